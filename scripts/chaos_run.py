"""A run in the lab whose processes and links faults strike, and what was seen of it.

Chaos      the processes of a run on hosts: faults begin and end, memory is read
Seen       what a run left behind: lives, memory, tokens, losses, chains, and processes
"""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from bisect import insort
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path

import psutil
from bench_nat import ATOLL, CUSTOM, FIRST_ROUND_S, Case, committed_at_s, events, wait_until
from chaos_plan import Fault
from chaos_score import Life, Memory, Span
from pipeline_learning import spread

from atoll.coordinator.run.spec import RunSpec
from atoll.dht.testing.wan import Behind, WanLab, WanLink
from atoll.optim.log.entry import Entry
from atoll.optim.log.module import log_folder
from atoll.optim.log.store import LOG_FILE
from atoll.peer.daemon.beside.network_side import LEAVE_S
from atoll.peer.training.bits import held_out, measure
from atoll.peer.training.devices import Device
from atoll.peer.training.trained import load_checkpoint

ONE_THREAD = "OMP_NUM_THREADS=1"  # all peers share these cores
# A fifth of a million parameters, which learn in minutes; each step waits, as for an accelerator.
PRESET, SIZES = "nano", {"dim": 64, "num_layers": 3, "num_heads": 2, "ffn_dim": 200}
STEP_WAIT_S = 0.5
SEQ_LEN, BATCH, INNER_STEPS = 64, 4, 12
COORDINATOR = WanLink()
HOME = WanLink(up=20.0, down=100.0, delay_ms=12.0)
# Half of the boxes are behind routers. Peers 1, 3, 5 and 7 have public addresses.
BEHIND: tuple[Behind, ...] = (
    "",
    "port-restricted",
    "",
    "symmetric",
    "",
    "double",
    "",
    "restricted",
)
SLOW_RATE, SLOW_DELAY_MS, SLOW_LOSS = 0.1, 100.0, 0.01
METHOD = "diloco(tau=4)"
MEMORY_EVERY_S = 5.0
EVAL_TOKENS = 32_768
# In which everything that a killed or ended process started has to end: a network process whose
# trainer died says goodbye first, which takes long where its link is cut.
GONE_S = LEAVE_S + 5.0
LOOK_S = 0.5  # between two looks for it
CACHE = "torchinductor_"  # torch makes it as it is imported, and keeps it for the next program
LEAST_ROUNDS = 3  # of a checkpoint that is evaluated: before, the loss says little


class Chaos(Case):
    """A dense run with one peer a host, the coordinator on host 0."""

    def __init__(self, lab: WanLab, folder: Path, peers: int) -> None:
        """Write the model into a folder."""
        super().__init__(lab=lab, folder=folder)
        self.peers = peers
        self.healthy = list(lab.links)
        self.frozen: dict[int, list[list[float]]] = {host: [] for host in range(1, peers + 1)}
        self.ended: dict[int, list[float]] = {host: [] for host in range(1, peers + 1)}
        self.memory: dict[tuple[str, int], list[tuple[float, int]]] = {}
        self.newcomers = 0
        self.left_behind: list[str] = []
        self._dirs = {host: f"peer-{host}" for host in range(1, peers + 1)}
        self.write_model(STEP_WAIT_S, PRESET, SIZES)

    def spec(self) -> RunSpec:
        """Return the run, which starts with all peers, has no end and keeps all checkpoints."""
        return RunSpec.from_dict(
            {
                "run": {"name": "chaos"},
                "model": {"custom": CUSTOM},
                "data": {"source": "stdlib", "seq_len": SEQ_LEN},
                "inner": {"batch_size": BATCH, "warmup_steps": 8},
                # Windows end together, also those of a peer that was away; and all train on for
                # four steps, 2 s, while a round waits for a slow link or one that does not answer.
                "outer": {
                    "method": METHOD,
                    "inner_steps": INNER_STEPS,
                    "windows": "deadline",
                },
                "round": {"min_peers": self.peers},
                "coordinator": {
                    "advertise": self.lab.ip(0),
                    "checkpoint_every": 4,
                    "keep_checkpoints": 0,
                },
            }
        )

    def begin(self) -> None:
        """Start everything, and wait until all peers train and a round was decided."""
        self.start_coordinator(self.spec())
        for host in range(1, self.peers + 1):
            self.run_peer(host)
        wait_until(lambda: self.training() == self.peers, FIRST_ROUND_S, self.words)
        wait_until(lambda: self.position() > 1, FIRST_ROUND_S, self.words)

    def run_peer(self, host: int) -> None:
        """Start the peer of a host, for the first time or again."""
        name = f"peer-{host}"
        words = ["env", ONE_THREAD, *ATOLL, "peer", str(self.invite), "--yes", "--json"]
        words += ["--device", "cpu", "--allow-model", CUSTOM, "--name", name]
        words += ["--state-dir", self._dirs[host]]
        with (self.folder / f"{name}.log").open("a") as log:
            self.children[name] = self.lab.popen(
                host, words, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    # faults

    def begin_fault(self, fault: Fault) -> None:
        """Let a fault begin."""
        match fault.kind:
            case "kill" | "coordinator":
                self._kill(fault.host)
            case "freeze":
                self._signal(fault.host, signal.SIGSTOP)
                self.frozen[fault.host].append([time.time()])
            case "cut":
                self.lab.cut(fault.host)
            case "slow":
                link = self.healthy[fault.host]
                self.lab.links[fault.host] = replace(
                    link,
                    up=SLOW_RATE * link.up,
                    down=SLOW_RATE * link.down,
                    delay_ms=link.delay_ms + SLOW_DELAY_MS,
                    loss=SLOW_LOSS,
                )
            case "move":
                self.lab.readdress(fault.host)
            case "leave":
                self._note_ended(fault.host)
                self._main(fault.host).terminate()

    def _must_wait(self, fault: Fault, now_s: float) -> bool:
        """Return whether what was struck still ends, so that it cannot start again yet."""
        ends = fault.kind in ("kill", "leave", "coordinator")
        return ends and now_s < fault.at_s + GONE_S and bool(self.still_runs(fault.host))

    def end_fault(self, fault: Fault) -> None:
        """Let a fault end."""
        match fault.kind:
            case "kill":
                self.expect_nothing_left(fault.host)
                self.run_peer(fault.host)
            case "coordinator":
                self.expect_nothing_left(0)
                self.run_coordinator()
            case "freeze":
                self._signal(fault.host, signal.SIGCONT)
                self.frozen[fault.host][-1].append(time.time())
            case "cut":
                self.lab.heal(fault.host)
            case "slow":
                self.lab.links[fault.host] = self.healthy[fault.host]
            case "leave":
                self.expect_nothing_left(fault.host)
                self.newcomers += 1
                self._dirs[fault.host] = f"newcomer-{self.newcomers}"
                self.run_peer(fault.host)

    def _main(self, host: int) -> psutil.Process:
        name = "coordinator" if host == 0 else f"peer-{host}"
        return psutil.Process(self.children[name].pid)

    def _tree(self, host: int) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            main = self._main(host)
            return [main, *main.children(recursive=True)]
        return []

    def _signal(self, host: int, number: int) -> None:
        for process in self._tree(host):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _kill(self, host: int) -> None:
        """Kill the process that its owner started, and no other: those that it made must see it."""
        if host:
            self._note_ended(host)
        self._main(host).kill()

    def _note_ended(self, host: int) -> None:
        self.ended[host].append(time.time())

    def still_runs(self, host: int) -> list[psutil.Process]:
        """Return what runs on a host whose process was killed or told to end."""
        with suppress(subprocess.TimeoutExpired):  # or it would stay as a zombie
            self.children["coordinator" if host == 0 else f"peer-{host}"].wait(0)
        return self.lab_processes(host)

    def expect_nothing_left(self, host: int) -> None:
        """Note what still runs on a host, and end it."""
        for process in self.still_runs(host):
            with suppress(psutil.NoSuchProcess):
                # Without the interpreter, whose path is this machine's.
                words = " ".join(process.cmdline()[1:])
                self.left_behind.append(f"host {host}: {words[:200]}")
                process.kill()

    def lab_processes(self, host: int) -> list[psutil.Process]:
        """Return what runs in a host's namespace."""
        words = ["ip", "netns", "pids", self.lab.ns(host)]
        pids = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
        found = []
        for pid in pids:
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(int(pid))
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    # observations

    def read_memory(self) -> None:
        """Read the resident memory of every process with its children."""
        for host in range(self.peers + 1):
            sizes = []
            for process in self._tree(host):
                with suppress(psutil.NoSuchProcess):
                    sizes.append(process.memory_info().rss)
            if sizes:
                name = "coordinator" if host == 0 else f"peer-{host}"
                key = name, self.children[name].pid
                self.memory.setdefault(key, []).append((time.time(), sum(sizes)))

    def run_until(self, until_s: float, faults: Sequence[Fault]) -> Iterator[str]:
        """Let faults begin and end until a time; yield what happens, and an empty text in between.

        Args:
            until_s: seconds since 1970.
            faults: their times count from now.
        """
        began_s = time.time()
        todo = [(each.at_s, False, each) for each in faults]
        todo += [(each.ends_s, True, each) for each in faults]
        todo.sort(key=lambda each: each[:2])
        read_s = 0.0
        while time.time() < until_s:
            while todo and began_s + todo[0][0] <= time.time():
                _, is_over, fault = todo.pop(0)
                if is_over and self._must_wait(fault, time.time() - began_s):
                    again = time.time() - began_s + LOOK_S, True, fault
                    insort(todo, again, key=lambda each: each[:2])
                    continue
                (self.end_fault if is_over else self.begin_fault)(fault)
                if not is_over:
                    yield str(fault)
            if time.time() - read_s > MEMORY_EVERY_S:
                read_s = time.time()
                self.read_memory()
                yield ""
            time.sleep(0.1)

    def lives(self, until_s: float) -> list[Life]:
        """Return the lives of all processes of peers."""
        found = []
        for host in range(1, self.peers + 1):
            ends = [*self.ended[host], until_s]
            frozen: list[Span] = [
                (each[0], each[1] if len(each) > 1 else until_s) for each in self.frozen[host]
            ]
            log = self.folder / f"peer-{host}.log"
            for ready_s in (each["time"] for each in events(log) if each["kind"] == "ready"):
                ended_s = min((end for end in ends if end > ready_s), default=until_s)
                found.append(
                    Life(host=host, trains_s=ready_s, ended_s=ended_s, frozen=tuple(frozen))
                )
        return found

    def memories(self) -> list[Memory]:
        """Return the memory of all processes over time."""
        return [
            Memory(name=name, samples=tuple(samples)) for (name, _), samples in self.memory.items()
        ]

    def decided_at_s(self) -> dict[int, float]:
        """Return when the first peer printed each round."""
        found: dict[int, float] = {}
        for log in self.folder.glob("peer-*.log"):
            for number, at_s in committed_at_s(log).items():
                found[number] = min(at_s, found.get(number, at_s))
        return found

    def chains(self) -> Mapping[int, set[str]]:
        """Return the chains that peers and the coordinator report, by position."""
        found: dict[int, set[str]] = {}
        status = self.status()
        for peer in status.get("peers", ()):
            if peer["state"] not in ("left", "gone"):
                found.setdefault(peer["position"], set()).add(peer["chain"])
        return found


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one run left behind."""

    within: Span
    lives: Sequence[Life]
    memories: Sequence[Memory]
    points: Sequence[tuple[float, int]]
    """(seconds since 1970, tokens so far) after each round"""
    losses: Sequence[tuple[float, float]]
    """(tokens, held-out loss) of checkpoints"""
    chains: int
    """most different chains at one position, at the end"""
    in_the_end: int
    """peers that reported at the end"""
    left_behind: Sequence[str] = field(default=())
    """processes and files"""

    @property
    def rounds(self) -> int:
        """Rounds in that time."""
        return sum(self.within[0] <= at_s <= self.within[1] for at_s, _ in self.points)


def tokens_at(log: Path) -> list[int]:
    """Return the tokens that the entries of a log have counted before each position."""
    with closing(sqlite3.connect(f"file:{log}?mode=ro", uri=True)) as db:
        rows = db.execute("SELECT entry FROM entries ORDER BY position").fetchall()
    entries = (Entry.decode(row[0]) for row in rows)
    return [0, *accumulate(sum(m.tokens for m in e.members if m.weight) for e in entries)]


def losses(folder: Path, tokens: Sequence[int]) -> list[tuple[float, float]]:
    """Return tokens and held-out loss of some checkpoints of a run."""
    files = sorted((folder / "state" / "checkpoints").glob("*.safetensors"))
    sys.path.insert(0, str(folder))  # for the model, which waits only where it trains
    device, found, text = Device.choose("cpu", "float32"), [], None
    try:
        for file in spread(files[LEAST_ROUNDS:]):
            trained = load_checkpoint(file, allow_model=CUSTOM)
            if text is None:
                text = held_out(trained, data=None, tokenizer=None, tokens=EVAL_TOKENS)
            trained.model.eval()
            loss = measure(trained.model, trained.tokenizer, text.batches, device=device).loss
            found.append((float(tokens[trained.positions[0]]), loss))
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop(CUSTOM.partition(":")[0], None)
    return found


@contextmanager
def lab_of(peers: int) -> Iterator[Chaos]:
    """Return a run in a lab and a folder that are gone afterwards."""
    homes = [replace(HOME, behind=BEHIND[number % len(BEHIND)]) for number in range(peers)]
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        temporary = Path(name) / "tmp"
        temporary.mkdir()
        before = os.environ.get("TMPDIR")
        os.environ["TMPDIR"] = str(temporary)  # of all processes: what they leave there is seen
        try:
            with WanLab([COORDINATOR, *homes], mtu=1500) as lab:
                with Chaos(lab, Path(name), peers) as case:
                    yield case
        finally:
            os.environ.pop("TMPDIR")
            if before is not None:
                os.environ["TMPDIR"] = before


def finish(case: Chaos, within: Span) -> Seen:
    """End a run, and return what was seen of it."""
    until_s = within[1]
    chains = case.chains()
    for host in range(1, case.peers + 1):
        case.children[f"peer-{host}"].terminate()
    for host in range(1, case.peers + 1):  # while the coordinator is there to take their leave
        with suppress(subprocess.TimeoutExpired):
            case.children[f"peer-{host}"].wait(GONE_S)
    case.stop()
    deadline_s = time.monotonic() + GONE_S
    for host in range(case.peers + 1):
        while case.still_runs(host) and time.monotonic() < deadline_s:
            time.sleep(LOOK_S)
        case.expect_nothing_left(host)
    tokens = tokens_at(case.folder / "state" / log_folder("") / LOG_FILE)
    decided = sorted(case.decided_at_s().items())
    files = [path.name for path in (case.folder / "tmp").iterdir()]
    files = [name for name in files if not name.startswith(CACHE)]
    return Seen(
        within=within,
        lives=case.lives(until_s),
        memories=case.memories(),
        points=[(at_s, tokens[n]) for n, at_s in decided if n < len(tokens)],
        losses=losses(case.folder, tokens),
        chains=max(map(len, chains.values()), default=0),
        in_the_end=sum(
            any(life.host == host and life.ended_s == until_s for life in case.lives(until_s))
            for host in range(1, case.peers + 1)
        ),
        left_behind=[*case.left_behind, *files],
    )
