#!/usr/bin/env python3
"""Measure the fraction of time in which peers compute, on links of several speeds.

    ./scripts/bench utilisation --rates 50,200,1000                   the saved table
    ./scripts/bench utilisation --rates 50,200,1000 --rerun --save    measure again and save
    ./scripts/bench utilisation --rerun --rates 50 --step-ms 100 --model micro --json

A coordinator and peers run as in a real run, each in a network namespace of `WanLab`, which
needs root. The model has 30M parameters, and its inner steps only take time
(`utilisation_host.py`). Utilisation is the time of the inner steps divided by all time, from the
first window after the warm-up on, for the slowest peer. A row counts only if it has as many rounds
as windows, because a peer that nobody waits for would be busy too. Time that is lost neither to
waiting nor to steps that ended late is spent in the trainer's own copies.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import psutil
from bench_allreduce import lab_is_possible, load
from circumstances import commit, today

from atoll.coordinator.run.spec import RunSpec, template
from atoll.dht.testing.wan import WanLab, WanLink
from atoll.peer.lab.advice import as_run

ROOT = Path(__file__).resolve().parent.parent
HOST = Path(__file__).resolve().parent / "utilisation_host.py"
SAVED = ROOT / "docs" / "benchmarks" / "utilisation.json"
METHODS = ("sparseloco(merge=select, tau=32)", "diloco(codec=fp32, feedback=0)")
START_S = 120.0  # until the invite is written
ANSWER_S = 600.0  # for a host to warm up, and then to end
PORTS = (7700, 7701)

Facts = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method at one rate and step time."""

    method: str
    params: int
    hosts: int
    mbit_s: float
    rtt_ms: float
    step_ms: float
    inner_steps: int
    windows: int
    rounds: int
    """decided while the windows were trained; with fragments, one per window and fragment"""
    utilisation: float
    """of the slowest peer"""
    waited: float
    """fraction of the time in which a trainer waited"""
    overslept: float
    """fraction by which steps ended late because no core was free; the other loss is own copies"""
    encode_s: float
    """in a separate thread, in parallel with the inner steps"""
    sent_mb: float
    """per host and window, by the lab's counters, including heartbeats"""
    cpu_s: float
    """of all processes of a host, per window"""
    all_included: bool
    """whether every peer's contribution was in every round"""
    date: str
    commit: str
    load: str


@dataclass(frozen=True, kw_only=True)
class Point:
    """One setting to measure."""

    method: str
    mbit_s: float
    step_ms: float


def run_toml(point: Point, options: argparse.Namespace) -> str:
    """Return the run's RUN.toml."""
    told = {
        "run": {"name": "utilisation"},
        "model": {"preset": options.model},
        "round": {"min_peers": options.hosts, "snapshot_every": 1000},
        "coordinator": {"checkpoint_every": 0},
    }
    return template(RunSpec.from_dict(told | as_run(point.method, options.inner_steps)))


@contextmanager
def session_niceness(nice: int) -> Iterator[None]:
    """Give this session more or less of the CPU than others while the block runs."""
    if not nice:
        yield
        return
    group = Path("/proc/self/autogroup")
    before = group.read_text().split()[-1]
    group.write_text(str(nice))
    try:
        yield
    finally:
        group.write_text(before)


class Hosts:
    """The processes of one point, which end with it."""

    def __init__(self, lab: WanLab, folder: Path, log: IO[bytes]) -> None:
        self._lab, self._folder, self._log = lab, folder, log
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, host: int, *command: str) -> subprocess.Popen[str]:
        """Run one of our programs on a host.

        All belong to one session, because Linux divides the CPU between sessions before it
        considers threads. A thread that yields to the inner steps of its own host thus yields to
        those of the other hosts, as if each host had a separate machine.
        """
        process = self._lab.popen(
            host,
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=self._folder,
            process_group=0,  # leaves Ctrl-C to us
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONWARNINGS": "ignore",
                "THP_MEM_ALLOC_ENABLE": "1",
            },
        )
        self.processes.append(process)
        return process

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.stdin.close()  # ends those that end with their input
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                process.kill()
                process.wait()


def measure(point: Point, options: argparse.Namespace, log: IO[bytes]) -> Row:
    """Start a run between hosts and let it train for some windows."""
    delay_ms = options.rtt / 2
    links = [WanLink(up=point.mbit_s, down=point.mbit_s, delay_ms=delay_ms)] * options.hosts
    links.append(WanLink(up=1000, down=1000, delay_ms=delay_ms))  # the coordinator's
    told = {"step_s": point.step_ms / 1000, "warmup": options.warmup, "windows": options.windows}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="atoll-bench-")))
        lab = stack.enter_context(WanLab(links, mtu=options.mtu, congestion="cubic"))
        hosts = stack.enter_context(Hosts(lab, folder, log))
        invite = start_coordinator(lab, hosts, folder, run_toml(point, options), options.hosts)
        peers = [
            hosts.start(
                index,
                str(HOST),
                *(invite, str(folder / f"peer-{index}"), json.dumps(told | {"name": f"h{index}"})),
            )
            for index in range(options.hosts)
        ]
        for peer in peers:
            answer(peer)
        before = sum(lab.sent[: options.hosts]), sum(map(cpu_s, peers))
        answers = [answer(peer) for peer in peers]
        sent = sum(lab.sent[: options.hosts]) - before[0]
        used_s = sum(map(cpu_s, peers)) - before[1]
    share = options.hosts * options.windows
    return Row(
        **{name: answers[0][name] for name in ("method", "params")},
        hosts=options.hosts,
        mbit_s=point.mbit_s,
        rtt_ms=options.rtt,
        step_ms=point.step_ms,
        inner_steps=options.inner_steps,
        windows=options.windows,
        rounds=min(a["rounds"] for a in answers),
        utilisation=min(a["utilisation"] for a in answers),
        waited=max(a["waited"] for a in answers),
        overslept=max(a["overslept"] for a in answers),
        encode_s=max(a["encode_s"] for a in answers),
        sent_mb=sent / share / 1e6,
        cpu_s=used_s / share,
        all_included=all(a["included"] == a["rounds"] for a in answers),
        date=today(),
        commit=commit(),
        load=load(),
    )


def answer(peer: subprocess.Popen[str]) -> Facts:
    """Return the next report of a peer.

    Raises:
        RuntimeError: it ended, or reported nothing for too long.
    """
    guard = threading.Timer(ANSWER_S, peer.kill)
    guard.start()
    try:
        line = peer.stdout.readline()
    finally:
        guard.cancel()
    if not line:
        raise RuntimeError(f"a host ended with code {peer.wait()}; see the log")
    facts: Facts = json.loads(line)
    return facts


def cpu_s(peer: subprocess.Popen[str]) -> float:
    """Return the CPU seconds of a host's live processes."""
    root, seconds = psutil.Process(peer.pid), 0.0
    for process in [root, *root.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            seconds += times.user + times.system
    return seconds


def start_coordinator(lab: WanLab, hosts: Hosts, folder: Path, toml: str, index: int) -> str:
    """Start the run's coordinator; return its invite."""
    (folder / "RUN.toml").write_text(toml)
    service, dht = (f"{lab.ip(index)}:{port}" for port in PORTS)
    coordinator = hosts.start(
        index,
        *("-m", "atoll.peer.cli.main"),
        *("coordinator", "RUN.toml", "--state-dir", "coordinator", "--listen", service),
        *("--dht-listen", dht, "--advertise", lab.ip(index), "--invite-file", "invite"),
        *("--quiet", "--stop-with-stdin"),
    )
    invite, deadline_s = folder / "invite", time.monotonic() + START_S
    while not invite.exists():
        if coordinator.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError("the coordinator printed no invite; see the log")
        time.sleep(0.2)
    return invite.read_text().strip()


def points(options: argparse.Namespace) -> list[Point]:
    """Return every method at every rate and step time."""
    return [
        Point(method=method, mbit_s=rate, step_ms=step)
        for method in options.methods
        for rate in numbers(options.rates)
        for step in numbers(options.step_ms)
    ]


def numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",")]


def key_of(row: Facts) -> tuple[Any, ...]:
    names = ("method", "params", "hosts", "mbit_s", "rtt_ms", "step_ms", "inner_steps")
    return tuple(row[name] for name in names)


def keep(rows: list[Facts]) -> None:
    """Save rows, replacing those with the same settings."""
    new = {key_of(row) for row in rows}
    kept = [row for row in saved() if key_of(row) not in new]
    SAVED.write_text(json.dumps([*kept, *rows], indent=1) + "\n")


def saved() -> list[Facts]:
    return json.loads(SAVED.read_text()) if SAVED.exists() else []


def table(rows: list[Facts]) -> str:
    """Format the rows as a table."""
    lines = [
        f"{'method':46}{'H':>4}{'Mbit/s':>7}{'step ms':>8}{'utilisation':>12}{'waited':>8}"
        f"{'overslept':>10}{'rounds':>8}{'MB/window':>12}{'CPU s':>7}  commit"
    ]
    for row in rows:
        overslept = f"{100 * row['overslept']:9.1f}%" if "overslept" in row else f"{'':10}"
        lines.append(
            f"{row['method'][:45]:46}{row['inner_steps']:4d}{row['mbit_s']:7.0f}"
            f"{row['step_ms']:8.0f}{100 * row['utilisation']:11.1f}%{100 * row['waited']:7.1f}%"
            f"{overslept}{row['rounds']:5d}/{row['windows']:<2d}{row['sent_mb']:12.2f}"
            f"{row['cpu_s']:7.2f}  {row['commit']}"
        )
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = arguments.add_argument
    add(
        "--rates",
        default="50,200,1000",
        help="bandwidths in Mbit/s, both directions, comma-separated",
    )
    add("--step-ms", default="22,50,100", help="durations of an inner step in ms, comma-separated")
    add("--methods", nargs="*", default=METHODS, metavar="SPEC", help="methods to measure")
    add("--model", default="30m", help="preset of RUN.toml (default 30m)")
    add(
        "--inner-steps",
        type=int,
        default=32,
        help="inner steps per window, H (default %(default)s)",
    )
    add("--hosts", type=int, default=4, help="number of peers (default %(default)s)")
    add("--rtt", type=float, default=50.0, help="round trip between any two hosts, ms (default 50)")
    add("--windows", type=int, default=20, help="number of measured windows (default 20)")
    add("--warmup", type=int, default=10, help="rounds before those (default 10)")
    add("--mtu", type=int, default=9000, help="MTU of the hosts; small packets cost the lab CPU")
    add("--nice", type=int, default=0, help="niceness of this session; -20: before other programs")
    add("--rerun", action="store_true", help="measure")
    add("--save", action="store_true", help="save what was measured")
    add(
        "--log",
        type=Path,
        default=ROOT / "build" / "bench_utilisation.log",
        help="log of the processes (default build/bench_utilisation.log)",
    )
    add("--json", action="store_true", help="print the rows as JSON on the last line")
    return arguments


def main() -> int:
    options = parser().parse_args()
    rows = saved()
    if options.rerun or not rows:
        if why := lab_is_possible():
            print(f"bench: cannot start the hosts: {why}", file=sys.stderr)
            return 2
        options.log.parent.mkdir(exist_ok=True)
        rows = []
        with options.log.open("wb") as log, session_niceness(options.nice):
            for point in points(options):
                rows.append(asdict(measure(point, options, log)))
                print(table(rows[-1:]), file=sys.stderr, flush=True)
                if options.save:
                    keep(rows)
    print(table(rows))
    if options.json:
        print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
