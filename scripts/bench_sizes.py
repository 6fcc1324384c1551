#!/usr/bin/env python3
"""Measure memory and time a parameter of a run's processes at several sizes of the model.

    ./scripts/bench sizes                                the saved table
    ./scripts/bench sizes --rerun --sizes 10m,30m        measure again
    ./scripts/bench sizes --rerun --sizes 10m --save --json
    ./scripts/bench sizes --rerun --sizes 30m --method "diloco(state=bf16)" --outer-state disk
    ./scripts/bench sizes --rerun --sizes 300m --rounds 4 --inner-state 8bit --outer-state disk
    ./scripts/bench sizes --rerun --sizes 10m,30m --rounds 40 --followers 1 --late
    ./scripts/bench sizes --pieces 10000000,50000000     pieces of a round alone, in a minute
    ./scripts/bench sizes --pieces 1000000000            of a billion, in 16 GB

A coordinator and peers run as people start them, on this machine and its CPUs. Memory is the peak
of what they would take alone on their machines: memory that the processes of a peer share counts
once, and pages of files, libraries above all, count whole although all processes here share them.
It is given less that of the same process with the tiny model, divided by the parameters that it has
more; a peer's figure is also given without its model and inner state, and without gradients if it
has them in a round, as `atoll plan` counts them: they are on the GPU of a peer that has one. The
system takes pages of files back if it needs them; "anon" is without them, and "file" they alone,
each the largest of samples, so they need not add up to the peak. With `--ranks` each peer is so
many processes, each with a copy of the model, as `--gpus` starts them.

With `--outer-state disk` the plan is compared with "anon" and the libraries' pages. `p2pd` is a
process of its own. With `--followers`, so many follow the run from its start. With `--late`, one
more peer joins after a third of the rounds, and fetches from peers and followers; the run goes on
beyond its rounds until some have taken that peer's work. No pieces are timed then.

Windows take seconds, unless `--inner-steps` says how many steps they have: in windows of less than
5 s, or 70 ns a parameter, peers keep memory that they give back between long ones. People's take
minutes. So that many steps are chosen, by the time of a step of 10m on this machine.

Seconds of phases are those that the peers report, means over the rounds after the first three, as
are the bytes that a peer sends, which the kernel counts. Processor seconds are of a process over
its whole life, divided by the rounds. Memory, disk and bytes are compared with what `atoll plan`
says before the run, whose disk is that of a run of many rounds.

Pieces are timed in one thread and in two, each in turn with a copy by torch on as many threads:
of the bytes that it reads, and of half of those that it reads and writes, which moves as many.
Vectors of 10M values may stay in a large shared cache, where a copy takes half of the time; those
of 50M do not, which is as many as a copy takes at most. One thread is timed by its processor
seconds, more by the clock on the wall. Pieces run one after another, each with its own vectors
alone; what it held at its peak is given beside its times.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import psutil
from circumstances import circumstances
from sizes_memory import Process
from sizes_pieces import all_pieces, piece_table
from sizes_windows import LEAST_STEPS, long_steps, step_ns
from torch import nn

from atoll.coordinator.rpc.client_errors import CoordinatorError
from atoll.coordinator.run.invite import Invite
from atoll.coordinator.run.spec import RunSpec, template
from atoll.coordinator.run.status import RunStatus
from atoll.optim.state.layout import Layout
from atoll.peer.cli.watching import look
from atoll.peer.lab.advice import as_run
from atoll.peer.lab.plan import Setting, bare_model, needed, predict
from atoll.peer.training.resources import Resources

ROOT = Path(__file__).resolve().parent.parent
SAVED = ROOT / "docs" / "benchmarks" / "sizes.json"
SIZES: dict[str, dict[str, Any]] = {
    "1m": {"preset": "nano"},
    "10m": {"preset": "mini"},
    "30m": {"preset": "30m"},
    "100m": {"preset": "150m", "overrides": {"num_layers": 8}},
    "300m": {"preset": "350m", "overrides": {"num_layers": 21}},
}
TINY = "1m"
TIMED = "10m"  # whose steps are timed, to choose those of a window
START_S = 120.0  # until the invite is written
END_S = 600.0  # until the coordinator tells of the last round: it applies the rounds beside others
CHECKPOINTS = 2  # of a run, and kept
LATE = "late"  # the name of the peer that joins in the middle
LATE_ROUNDS = 3  # that take its work: the first follows a window that counts nothing
WARM_ROUNDS = 3  # the first rounds include imports, the first state and measurements of the line
POLL_S = 0.1  # at least: looking takes the kernel longer the larger a process is
LOOKING = 0.25  # of the time is spent looking, at most
STALL_S = 60.0  # a round of hundreds of millions of parameters on a few shared cores takes minutes
PIECE_PARAMS = "10000000,50000000"

LAUNCH = """
import sys
from atoll.peer.daemon.launching import launch
sys.exit(launch(sys.argv[2:], int(sys.argv[1]), on_event=print))
"""

Facts = dict[str, Any]


@dataclass(kw_only=True)
class Measured:
    """One run: what its processes took, and what the peers reported."""

    size: str
    params: int
    rounds: int
    processes: dict[str, Process] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    """a round, by phase"""
    sent_bytes: float = 0.0
    """by a peer in a round"""
    planned_sent_bytes: int = 0
    disk_bytes: dict[str, int] = field(default_factory=dict)
    """of the state directories at the end"""
    planned: Resources
    """what `atoll plan` says"""
    state_on_disk: bool

    def planned_bytes(self, name: str) -> tuple[int, int]:
        """Return the memory and the disk that the plan states for a process.

        Files of an outer state have no names, so that a folder's size is without them.
        """
        plan = self.planned
        if keeps_all(name):
            kept = plan.coordinator_disk + self.rounds * plan.coordinator_disk_a_round
            return plan.coordinator_memory - self.state_on_disk * plan.coordinator_state, kept
        memory = plan.host_memory(on_gpu=False, state_on_disk=self.state_on_disk)
        return memory, plan.peer_disk

    def held_bytes(self, name: str, tiny: Process) -> int:
        """Return the memory of a process that the plan is compared with."""
        if not self.state_on_disk:
            return self.processes[name].peak_bytes
        return self.processes[name].anonymous_bytes + tiny.peak_bytes - tiny.anonymous_bytes


def spec_of(size: str, options: argparse.Namespace) -> RunSpec:
    """Return the run's spec."""
    of_method = as_run(options.method, options.inner_steps)
    inner = {"batch_size": 1, "warmup_steps": 2, "state": options.inner_state}
    told = {
        # With a late peer the bench ends the run: small models hold all rounds while it joins.
        "run": {"name": "sizes", "rounds": 0 if options.late else options.rounds},
        "model": SIZES[size],
        "data": {"seq_len": 32},
        "round": {
            "min_peers": options.peers,
            "grace_s": 60.0,
            "stall_s": STALL_S,
            "log_mb": 1,  # the least that a log may take, so that a short run fills it
        },
        "coordinator": {"checkpoint_every": options.rounds // 2, "keep_checkpoints": CHECKPOINTS},
    }
    return RunSpec.from_dict(told | of_method | {"inner": inner | of_method["inner"]})


def steps_of(sizes: Sequence[str], options: argparse.Namespace) -> dict[str, int]:
    """Return the inner steps of a window by size: as asked for, or of windows like people's."""
    if options.inner_steps is not None:
        return dict.fromkeys(sizes, options.inner_steps)
    options.inner_steps = LEAST_STEPS
    ns = step_ns(spec_of(TIMED, options))
    params = {size: Layout.of(bare_model(spec_of(size, options))).numel for size in sizes}
    # The tiny model has no long vectors, which windows decide on.
    return {size: LEAST_STEPS if size == TINY else long_steps(params[size], ns) for size in sizes}


def keeps_all(name: str) -> bool:
    """Return whether a process keeps the whole log, and trains nothing."""
    return name.startswith(("coordinator", "follower"))


class Processes:
    """The processes of one run, which end with it."""

    def __init__(self, folder: Path, log: IO[bytes]) -> None:
        self._folder, self._log = folder, log
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.seen: dict[str, Process] = {}

    def start(self, name: str, *command: str, ranks: int = 1) -> None:
        """Start `atoll ...`, or so many ranks of it."""
        program = ["-m", "atoll.peer.cli.main"] if ranks == 1 else ["-c", LAUNCH, str(ranks)]
        options = ["--stop-with-stdin"] if ranks == 1 else []  # a launcher's ranks end with it
        self.running[name] = subprocess.Popen(
            [sys.executable, *program, *command, *options],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            cwd=self._folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.seen[name] = Process()

    def sample(self) -> float:
        """Look at every process that runs; return the seconds that it took."""
        began_s = time.monotonic()
        for name, process in self.running.items():
            if process.poll() is None:
                self.seen[name].sample(process.pid)
        return time.monotonic() - began_s

    def ended(self, name: str) -> bool:
        """Return whether a process has ended.

        Raises:
            RuntimeError: it failed.
        """
        code = self.running[name].poll()
        if code:
            raise RuntimeError(f"{name} ended with code {code}; see the log")
        return code is not None

    def stop(self) -> None:
        """End what runs, children before parents if one hangs."""
        for process in self.running.values():
            if process.stdin is not None:
                process.stdin.close()
        for process in self.running.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                process.kill()
                process.wait()


@contextmanager
def processes(folder: Path, log: IO[bytes]) -> Iterator[Processes]:
    """Run processes for the time of the block."""
    started = Processes(folder, log)
    try:
        yield started
    finally:
        started.stop()


def measure(size: str, options: argparse.Namespace, log: IO[bytes]) -> Measured:
    """Run a coordinator and peers to the last round."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="atoll-sizes-")))
        spec = spec_of(size, options)
        (folder / "RUN.toml").write_text(template(spec))
        run = stack.enter_context(processes(folder, log))
        invite = start_coordinator(run, folder, options)
        names = [f"peer-{index}" for index in range(options.peers)]
        for index in range(options.followers):
            name = f"follower-{index}"
            run.start(name, "follow", invite, "--dir", name, "--json", *beside(options))
        for name in names:
            start_peer(run, name, invite, options)
        late = [partial(start_peer, run, LATE, invite, options)] if options.late else []
        status = watch(run, names, invite, options, late)
        disk_bytes = {name: folder_bytes(folder / name) for name in run.seen}
    warm = [row for row in status.history if row.position > WARM_ROUNDS]
    phases = {name for row in warm for name in row.seconds}
    model = bare_model(spec)
    return Measured(
        size=size,
        params=status.params,
        rounds=status.position,
        processes=run.seen,
        seconds={
            p: statistics.mean(row.seconds.get(p, 0.0) for row in warm) for p in sorted(phases)
        },
        sent_bytes=statistics.mean(row.wire_bytes for row in warm) / options.peers,
        planned_sent_bytes=planned_bytes(spec, model, options.peers),
        disk_bytes=disk_bytes,
        planned=needed(spec, model, options.peers, ranks=options.ranks),
        state_on_disk=options.outer_state == "disk",
    )


def start_peer(run: Processes, name: str, invite: str, options: argparse.Namespace) -> None:
    """Start a peer."""
    run.start(
        name, "peer", invite, "--state-dir", name, "--name", name, "--device", "cpu",
        *("--yes", "--json"), *beside(options), ranks=options.ranks,
    )  # fmt: skip


def beside(options: argparse.Namespace) -> Sequence[str]:
    """Return the options of peers and followers."""
    return ("--listen", "/ip4/127.0.0.1/tcp/0", "--outer-state", options.outer_state)


def planned_bytes(spec: RunSpec, model: nn.Module, peers: int) -> int:
    """Return what `atoll plan` says that a peer sends in a round, without control messages."""
    setting = Setting(peers=peers, mbit_s=1000.0, step_s=1e-3)  # control messages count by time
    steps = spec.outer.inner_steps
    return predict(spec.method(), model, setting, inner_steps=steps).wire_bytes


def start_coordinator(run: Processes, folder: Path, options: argparse.Namespace) -> str:
    """Start the run's coordinator; return its invite."""
    run.start(
        "coordinator", "coordinator", "RUN.toml", "--state-dir", "coordinator", "--quiet",
        *("--listen", "127.0.0.1:0", "--dht-listen", "127.0.0.1:0", "--invite-file", "invite"),
        *("--outer-state", options.outer_state),
    )  # fmt: skip
    invite, deadline_s = folder / "invite", time.monotonic() + START_S
    while not invite.exists():
        if run.ended("coordinator") or time.monotonic() > deadline_s:
            raise RuntimeError("the coordinator wrote no invite; see the log")
        time.sleep(POLL_S)
    return invite.read_text().strip()


def watch(
    run: Processes,
    names: list[str],
    invite: str,
    options: argparse.Namespace,
    late: list[Callable[[], None]],
) -> RunStatus:
    """Sample the processes until the run is over; return its last status.

    What is `late` begins after a third of the rounds.

    Raises:
        RuntimeError: a process failed, or the run took too long.
    """
    status: RunStatus | None = None
    deadline_s, asked_s = time.monotonic() + options.timeout, 0.0
    while not all([run.ended(name) for name in names]) and not counts_late(status, options):
        if time.monotonic() > deadline_s:
            raise RuntimeError(
                f"the run is not complete after {options.timeout:.0f} s; see the log"
            )
        looked_s = run.sample()
        if time.monotonic() > asked_s + 1.0:
            asked_s = time.monotonic()
            with suppress(CoordinatorError):
                status = look(Invite.decode(invite))
        while late and status is not None and status.position >= options.rounds // 3:
            late.pop()()
            names = [*names, LATE]
        time.sleep(max(POLL_S, looked_s / LOOKING))
    return last_status(Invite.decode(invite), options.rounds)


def last_status(invite: Invite, rounds: int) -> RunStatus:
    """Return the status with all rounds; a coordinator may still apply the last one.

    Raises:
        RuntimeError: it does not come.
    """
    deadline_s = time.monotonic() + END_S
    while time.monotonic() < deadline_s:
        with suppress(CoordinatorError):
            status = look(invite)
            if status.position >= rounds and status.history[-1].position >= rounds:
                return status
        time.sleep(1.0)
    raise RuntimeError("the coordinator did not tell of all rounds; see the log")


def counts_late(status: RunStatus | None, options: argparse.Namespace) -> bool:
    """Return whether a run without an end has gone on for long enough with its late peer."""
    if status is None or not options.late or status.position < options.rounds:
        return False
    counted = [peer.rounds_counted for peer in status.peers if peer.name == LATE]
    return max(counted, default=0) >= LATE_ROUNDS


def folder_bytes(folder: Path) -> int:
    """Return the bytes that the files of a folder take."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def rows_of(measured: Measured, tiny: Measured) -> list[Facts]:
    """Return a row a process and a row a phase."""
    more = measured.params - tiny.params
    common = {"size": measured.size, "params": measured.params}
    rows: list[Facts] = []
    for name, process in measured.processes.items():
        base, (memory_bytes, disk_bytes) = tiny.processes[name], measured.planned_bytes(name)
        peak = (process.peak_bytes - base.peak_bytes) / more
        inner = 0 if keeps_all(name) else measured.planned.inner_memory / measured.params
        rows.append(
            common
            | {
                "process": name,
                "peak_mb": process.peak_bytes / 1e6,
                "bytes_per_param": peak,
                "beside_per_param": peak - inner,
                "anonymous_per_param": (process.anonymous_bytes - base.anonymous_bytes) / more,
                "file_per_param": (process.file_bytes - base.file_bytes) / more,
                "p2pd_per_param": (process.p2pd_bytes - base.p2pd_bytes) / more,
                "disk_per_param": (measured.disk_bytes[name] - tiny.disk_bytes[name]) / more,
                "planned_memory": memory_bytes / measured.held_bytes(name, base),
                "planned_disk": disk_bytes / measured.disk_bytes[name],
                "cpu_ns_per_param": 1e9 * process.cpu_s / measured.rounds / measured.params,
            }
        )
    if measured.sent_bytes:
        rows.append(
            common
            | {
                "sent_mb": measured.sent_bytes / 1e6,
                "sent_bytes_per_param": measured.sent_bytes / measured.params,
                "planned_sent": measured.planned_sent_bytes / measured.sent_bytes,
            }
        )
    for phase, seconds in measured.seconds.items():
        ns = 1e9 * seconds / measured.params
        rows.append(common | {"phase": phase, "seconds": seconds, "ns_per_param": ns})
    return rows


def table(rows: list[Facts]) -> str:
    """Format the rows as tables."""
    lines = [
        f"{'size':6}{'process':13}{'peak MB':>9}{'B/param':>9}{'beside':>8}{'anon':>8}"
        f"{'file':>7}"
        f"{'p2pd':>7}{'disk':>7}{'plan/peak':>10}{'plan/disk':>10}{'CPU ns/param and round':>24}"
    ]
    for row in (r for r in rows if "process" in r):
        lines.append(
            f"{row['size']:6}{row['process']:13}{row['peak_mb']:9.0f}{row['bytes_per_param']:9.1f}"
            f"{row['beside_per_param']:8.1f}{row['anonymous_per_param']:8.1f}"
            f"{row.get('file_per_param', 0.0):7.1f}"
            f"{row['p2pd_per_param']:7.1f}{row['disk_per_param']:7.1f}"
            f"{row['planned_memory']:10.2f}{row['planned_disk']:10.2f}"
            f"{row['cpu_ns_per_param']:24.1f}"
        )
    lines += ["", f"{'size':6}{'sent, MB a peer and round':>26}{'B/param':>9}{'plan/sent':>11}"]
    for row in (r for r in rows if "sent_mb" in r):
        lines.append(
            f"{row['size']:6}{row['sent_mb']:26.1f}{row['sent_bytes_per_param']:9.3f}"
            f"{row['planned_sent']:11.2f}"
        )
    lines += ["", f"{'size':6}{'phase':13}{'s/round':>9}{'ns/param':>10}"]
    for row in (r for r in rows if "phase" in r):
        lines.append(
            f"{row['size']:6}{row['phase']:13}{row['seconds']:9.3f}{row['ns_per_param']:10.1f}"
        )
    return "\n".join([*lines, "", *piece_table(rows)])


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = arguments.add_argument
    add("--sizes", default="10m,30m", help=f"sizes, of {', '.join(SIZES)} (default %(default)s)")
    add("--method", default="diloco", metavar="SPEC", help="method (default %(default)s)")
    add(
        "--outer-state",
        choices=("memory", "disk"),
        default="memory",
        help="place of the outer state in all processes (default %(default)s)",
    )
    add(
        "--inner-state",
        choices=("fp32", "8bit"),
        default="fp32",
        help="moments of AdamW; 8bit needs torchao (default %(default)s)",
    )
    add("--peers", type=int, default=2, help="number of peers (default %(default)s)")
    add("--followers", type=int, default=0, help="followers of the run (default none)")
    add("--late", action="store_true", help="let one more peer join in the middle of the run")
    add("--ranks", type=int, default=1, help="processes that train as one peer (default 1)")
    add("--rounds", type=int, default=12, help="rounds of a run (default %(default)s)")
    add("--inner-steps", type=int, help="inner steps of a window (default: of one of seconds)")
    add("--pieces", metavar="PARAMS", help="time the pieces alone, of so many parameters each")
    add("--timeout", type=float, default=900.0, help="seconds for a run (default %(default)s)")
    add("--rerun", action="store_true", help="measure")
    add("--save", action="store_true", help="save what was measured")
    add(
        "--log",
        type=Path,
        default=ROOT / "build" / "bench_sizes.log",
        help="log of the processes (default build/bench_sizes.log)",
    )
    add("--json", action="store_true", help="print the result as JSON on the last line")
    return arguments


def main() -> int:
    options = parser().parse_args()
    sizes = options.sizes.split(",")
    if unknown := [size for size in sizes if size not in SIZES]:
        print(f"bench: unknown sizes {unknown}; choose from {', '.join(SIZES)}", file=sys.stderr)
        return 2
    if options.rounds <= WARM_ROUNDS:
        print(f"bench: the first {WARM_ROUNDS} rounds do not count; pass more", file=sys.stderr)
        return 2
    if options.pieces:
        options.inner_steps = LEAST_STEPS  # no piece depends on them
        print("\n".join(piece_table(all_pieces(options.pieces, options))))
        return 0
    if options.rerun or not SAVED.exists():
        of_size = steps_of([TINY, *sizes], options)
        options.inner_steps = of_size[TINY]
        rows = [] if options.followers or options.late else all_pieces(PIECE_PARAMS, options)
        options.log.parent.mkdir(exist_ok=True)
        with options.log.open("wb") as log:
            tiny = measure(TINY, options, log)
            for size in sizes:
                options.inner_steps = of_size[size]
                rows += rows_of(measure(size, options, log), tiny)
                print(table(rows), file=sys.stderr, flush=True)
        facts = circumstances() | {
            "method": options.method,
            "outer_state": options.outer_state,
            "inner_state": options.inner_state,
            "peers": options.peers,
            "followers": options.followers,
            "late": options.late,
            "ranks": options.ranks,
            "inner_steps": of_size,
            "rows": rows,
        }
        if options.save:
            SAVED.write_text(json.dumps(facts, indent=1) + "\n")
    else:
        facts = json.loads(SAVED.read_text())
    print(table(facts["rows"]))
    if options.json:
        print(json.dumps(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
