#!/usr/bin/env python3
"""Measure runs of peers behind home routers: when they train, how fast, and through whom.

    ./scripts/bench nat                          all topologies, three runs of each; needs root
    ./scripts/bench nat --only open,all:symmetric
    ./scripts/bench nat --only relay-killed      a public relay dies in mid-round
    ./scripts/bench nat --soak 30                30 minutes at 20 Mbit/s and 0.5% loss with kills
    ./scripts/bench nat --save                   also write docs/benchmarks/nat.md and .json
    ./scripts/bench nat --json                   the results as JSON on the last line

A coordinator with a public address and four peers (real processes) are hosts of `WanLab`, of which
none, two or all are behind routers of one kind. A row compares a round's seconds on the wire with
the bound of its topology (`bound_s`). Nobody opens a port. Each finished run is kept in a file of
this commit, so that a bench that was interrupted continues; a run that fails is tried once more.
Exits with 1 if a target is missed, and with 2 if nothing can be measured.
"""

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import psutil
from bench_allreduce import bound_seconds, lab_is_possible, wire_bytes
from circumstances import circumstances, commit, today
from rows import put_between

from atoll.coordinator.run.spec import RunSpec, template
from atoll.dht.testing.wan import Behind, WanLab, WanLink

ROOT = Path(__file__).resolve().parent.parent
SAVED = ROOT / "docs" / "benchmarks" / "nat.json"
PAGE = ROOT / "docs" / "benchmarks" / "nat.md"
RELAY_KILLED = "relay-killed"
SOAK = "soak"
SOAK_MBIT = 20.0
SOAK_LOSS = 0.005
SOAK_MTU = 1500  # of the internet: loss strikes packets, and larger ones would be six times fewer
LOOK_S = 10.0
FIRST_ROUND_S = 900.0  # of an advised window, which takes minutes on a slow machine
RUNS = 3
# docs/benchmarks/nat.md states what each of these is about.
JOINED_S, RATIO, SHARE, COST_S, UTILISATION = 20.0, 1.3, 0.1, 5.0, 0.95
SOAK_KINDS: tuple[Behind, ...] = ("port-restricted", "restricted", "symmetric", "double")
STRIKE_EVERY_S = 120.0
STEP_MS = 1000.0
COMPUTED_MS = 100.0  # of a step of this model and batch on one of these cores
SOAK_MODEL = "mini"  # 10.7M parameters
SOAK_TOKENS = 32  # a step: all peers compute on this machine's cores
MARKS = ("<!-- rows of nat.json -->", "<!-- end of rows -->")
ATOLL = (sys.executable, "-m", "atoll.peer.cli.main")
RUN_FILE = "RUN.toml"
PEERS = 4
ROUNDS = 8
ROUNDS_AROUND = 12  # of a run in which a relay is killed, after a third of them
CASE_S = 240.0
BODY_BYTES = 100_000  # sent in 50 ms by a host whose bodies move
RELAY_MBIT = 100.0  # coordinator.relay_mbit, its default
# Of a round, that the wire carries. Codes leave before the group closes, so `send` overlaps a
# wait for others: the sum is at most what the round took.
PHASES = ("send", "reduce", "vote")
PARAMS = 9_998_208
# Behind real routers each peer has a machine of its own; here all share these cores. So a window
# waits for three seconds, in which the last round is applied, hashed and saved; without them that
# work takes the cores from the next round's exchange, whose time is measured. A peer that missed a
# round has the window to catch up.
CUSTOM = "paced:build"
# What a step computes, it computes on this machine's cores, which all hosts share; the rest of its
# time it waits, as for an accelerator.
MODEL = """
import time
from torch import nn
from atoll.peer.training.models import Decoder, ModelConfig, model, preset

class Paced(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.decoder = Decoder(config)

    def forward(self, tokens_BT):
        if self.training and not tokens_BT.is_meta:  # a look at shapes computes nothing
            time.sleep(%(wait_s)f)
        return self.decoder(tokens_BT)

@model
def build(*, vocab_size, seq_len):
    config = preset(%(preset)r, %(sizes)r, vocab_size=vocab_size, seq_len=seq_len)
    return Paced(config)
"""
LARGE = {"dim": 384, "num_layers": 5, "num_heads": 6, "ffn_dim": 1206}  # 10M parameters
LARGE_WAIT_S = 1.5
Result = TypeVar("Result", "Row", "Killed")


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A case: who is behind which router."""

    name: str
    behind: tuple[Behind, ...]
    """of each peer"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One topology, measured."""

    case: str
    joined_s: float
    """from the start of the peers until the last one trains"""
    first_s: float
    """until the first round of all four"""
    round_s: float
    """median over the rounds after the first: reduction and votes"""
    bound_s: float
    ratio: float
    through_coordinator: float
    """fraction of all sent bytes that the coordinator's host sent"""
    relayed_mb: float
    """per round, by all peers' counts"""
    direct_pairs: int
    """of peers behind routers: connected through holes at the end"""
    counted: float
    """fraction of the contributions that rounds included"""

    @property
    def missed(self) -> list[str]:
        """The targets that this row misses."""
        is_shared = self.case.startswith("two:") and self.through_coordinator > SHARE
        return [
            *([f"{self.case}: joined after {self.joined_s:.0f} s"] * (self.joined_s > JOINED_S)),
            *([f"{self.case}: {self.ratio:.2f} times the bound"] * (self.ratio > RATIO)),
            *([f"{self.case}: {self.through_coordinator:.0%} through the coordinator"] * is_shared),
        ]


def topologies() -> list[Topology]:
    """Return all cases that are measured by default."""
    kinds: tuple[Behind, ...] = (
        "full-cone",
        "restricted",
        "port-restricted",
        "symmetric",
        "double",
    )
    cases = [Topology(name="open", behind=("",) * PEERS)]
    for kind in kinds:
        cases.append(Topology(name=f"two:{kind}", behind=("", "", kind, kind)))
        cases.append(Topology(name=f"all:{kind}", behind=(kind,) * PEERS))
    return cases


def bound_s(behind: Sequence[Behind], relayed_pairs: int, link: WanLink) -> float:
    """Return the least seconds of a round's bytes, as the topology lets them pass.

    With public peers, these own all parts: of P peers, an owner of a share s sends and receives
    (1 - s) + (P - 1) s times the vector. Without, all own, and each pair that has no direct
    connection moves the vector once through the coordinator's relay.
    """
    num_bytes = wire_bytes("int8", PARAMS)
    megabits, peers, owners = 8e-6 * num_bytes, len(behind), behind.count("")
    if 0 < owners < peers:
        share = 1 / owners
        return megabits * ((1 - share) + (peers - 1) * share) / link.up
    direct = bound_seconds(num_bytes, [link] * peers)
    return max(direct, relayed_pairs * megabits / min(RELAY_MBIT, link.up))


@dataclass(kw_only=True)
class Case:
    """A run in the lab: the coordinator on host 0, a peer on each other host."""

    lab: WanLab
    folder: Path
    is_one_port: bool = False
    """whether the coordinator serves gRPC and libp2p on one port"""
    children: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End all processes, the coordinator with its last checkpoint."""
        for child in self.children.values():
            child.terminate()
        for child in self.children.values():
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()

    @property
    def invite(self) -> Path:
        """The file that holds the invite."""
        return self.folder / "invite"

    def large(self, rounds: int) -> RunSpec:
        """Return a run of 10M parameters with windows of three seconds, of the model above."""
        self.write_model(LARGE_WAIT_S, "nano", LARGE)
        return self.placed(
            RunSpec.from_dict(
                {
                    "run": {"name": "nat", "rounds": rounds},
                    "model": {"custom": CUSTOM},
                    "data": {"seq_len": 16},
                    "inner": {"batch_size": 1, "warmup_steps": 2},
                    "outer": {"inner_steps": 2},
                }
            )
        )

    def write_model(self, wait_s: float, preset: str, sizes: dict[str, int]) -> None:
        """Write a model, of which each step waits before it computes."""
        told = {"wait_s": wait_s, "preset": preset, "sizes": sizes}
        (self.folder / "paced.py").write_text(MODEL % told)

    def advised(self, step_ms: float) -> RunSpec:
        """Return the run that `atoll init` advises for 10M parameters, these links and steps."""
        path = self.folder / "advised.toml"
        words = [*ATOLL, "init", str(path), "--peers", str(PEERS), "--mbit", f"{SOAK_MBIT:g}"]
        words += ["--model", SOAK_MODEL, "--step-ms", f"{step_ms:g}"]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        self.write_model(max(0.0, step_ms - COMPUTED_MS) / 1e3, SOAK_MODEL, {})
        spec = self.placed(RunSpec.load(path))
        small = {
            "model": spec.model.model_copy(update={"custom": CUSTOM}),
            "data": spec.data.model_copy(update={"seq_len": SOAK_TOKENS}),
            "inner": spec.inner.model_copy(update={"batch_size": 1}),
        }
        return spec.model_copy(update=small)

    def placed(self, spec: RunSpec) -> RunSpec:
        """Return a spec with the lab's address, this bench's text, and a start with all peers."""
        text = self.folder / "text.txt"
        text.write_text("Peers behind routers train, and nobody opens a port. " * 20_000)
        there = {"advertise": self.lab.ip(0), "relay_mbit": RELAY_MBIT}
        return spec.model_copy(
            update={
                "data": spec.data.model_copy(update={"source": str(text)}),
                "round": spec.round.model_copy(update={"min_peers": PEERS}),
                "coordinator": spec.coordinator.model_copy(update=there),
            }
        )

    def start_coordinator(self, spec: RunSpec) -> None:
        """Start the run, and wait for its invite."""
        (self.folder / RUN_FILE).write_text(template(spec))
        self.run_coordinator()
        wait_until(self.invite.exists, 60, self.words)

    def run_coordinator(self) -> None:
        """Start the coordinator of a run, for the first time or again."""
        options = ("--state-dir", self.folder / "state", "--invite-file", self.invite)
        if self.is_one_port:
            options += ("--one-port",)
        self.start(0, "coordinator", "coordinator", self.folder / RUN_FILE, *options)

    def start_peer(self, host: int, *more: object) -> None:
        """Start the peer of a host, for the first time or again, with more options."""
        name = f"peer-{host}"
        options = ("--yes", "--data", self.folder / "text.txt", "--device", "cpu", "--json")
        options += ("--name", name, "--allow-model", CUSTOM)
        options += ("--state-dir", self.folder / name, *more)
        self.start(host, name, "peer", self.invite, *options)

    def start(self, host: int, name: str, *arguments: object) -> None:
        """Run a command of atoll on a host; its output goes to a file."""
        with (self.folder / f"{name}.log").open("a") as log:
            self.children[name] = self.lab.popen(
                host,
                [*ATOLL, *map(str, arguments)],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def restart_peer(self, host: int) -> None:
        """Kill a peer, and start it again after some seconds."""
        child = self.children[f"peer-{host}"]
        kill(child)
        time.sleep(5.0)
        self.start_peer(host)

    def strike(self, name: str, host: int) -> None:
        """Kill a peer and its p2pd as soon as its host sends bodies."""
        before = self.lab.sent[host]
        while True:
            time.sleep(0.05)
            sent, before = self.lab.sent[host] - before, self.lab.sent[host]
            if sent > BODY_BYTES:
                kill(self.children.pop(name))
                return

    def training(self) -> int:
        """Return how many peers have said that they train.

        From their output: a process that asks costs a second of a core, which the peers need.
        """
        logs = self.folder.glob("peer-*.log")
        return sum(any(each["kind"] == "ready" for each in events(log)) for log in logs)

    def position(self) -> int:
        """Return the number of rounds that a peer has reported."""
        logs = self.folder.glob("peer-*.log")
        return max((number for log in logs for number in committed_at_s(log)), default=0)

    def committed_s(self, names: Collection[str]) -> dict[int, float]:
        """Return when the last of some peers printed each round that all of them did.

        The coordinator's own times are late if the peer died that brings it the entries.
        """
        found = [committed_at_s(self.folder / f"{name}.log") for name in names]
        common = set[int].intersection(*map(set, found))
        return {number: max(own[number] for own in found) for number in sorted(common)}

    def status(self) -> dict[str, Any]:
        """Return what `atoll status --json` prints; nothing while it cannot."""
        words = [*ATOLL, "status", str(self.invite), "--json"]
        with self.lab.popen(0, words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
            out = child.communicate(timeout=60)[0]
        try:
            found: dict[str, Any] = json.loads(out)
        except ValueError:
            return {}
        return found

    def words(self) -> str:
        """Return the end of all output, for an error."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in logs)

    def holes(self) -> int:
        """Return how many pairs have reported a hole."""
        logs = [log.read_text() for log in self.folder.glob("peer-*.log")]
        return sum(log.count("through a hole") for log in logs)


def kill(peer: subprocess.Popen[bytes]) -> None:
    """Kill a peer with its network process, which would say goodbye, and its p2pd."""
    for each in psutil.Process(peer.pid).children(recursive=True):
        each.kill()
    peer.kill()
    peer.wait()


def wait_until(holds: Callable[[], bool], limit_s: float, words: Callable[[], str]) -> None:
    """Wait for a condition. Raises RuntimeError with the output of all processes."""
    deadline_s = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"not done within {limit_s:.0f} s\n{words()}")
        time.sleep(0.2)


def measure(topology: Topology, *, is_one_port: bool) -> Row:
    """Run one case from nothing to its last round."""
    link = WanLink()
    links = [link, *(WanLink(behind=behind) for behind in topology.behind)]
    with tempfile.TemporaryDirectory() as folder, WanLab(links) as lab:
        with Case(lab=lab, folder=Path(folder), is_one_port=is_one_port) as case:
            case.start_coordinator(case.large(ROUNDS))
            began_s = time.time()
            for host in range(1, PEERS + 1):
                case.start_peer(host)
            wait_until(lambda: case.training() == PEERS, CASE_S, case.words)
            joined_s = time.time() - began_s
            wait_until(lambda: case.position() > 0, CASE_S, case.words)
            sent = list(lab.sent)
            wait_until(lambda: case.position() == ROUNDS, CASE_S, case.words)
            spent = [now - then for now, then in zip(lab.sent, sent, strict=True)]
            return row_of(topology, case.status(), case.holes(), spent, began_s, joined_s)


@dataclass(frozen=True, kw_only=True)
class Soak:
    """A long run of peers that are all behind routers."""

    model: str
    method: str
    step_ms: float
    """that the advice was asked for"""
    minutes: float
    rounds: int
    kills: int
    moves: int
    """changes of a router's public address"""
    longest_s: float
    """between two rounds"""
    utilisation: float
    """fraction of the time that peers trained: the mean of all looks at all peers that are here"""
    counted: float
    """fraction of the contributions that rounds included"""
    chains: int
    """different chains at the newest position that all peers reported"""
    behind: tuple[Behind, ...] = SOAK_KINDS

    @property
    def missed(self) -> list[str]:
        """The targets that this run misses."""
        return [
            *([f"{SOAK}: utilisation {self.utilisation:.1%}"] * (self.utilisation < UTILISATION)),
            *([f"{SOAK}: {self.chains} different chains"] * (self.chains != 1)),
        ]


@dataclass(kw_only=True)
class Looks:
    """The looks at a long run: its history is longer than a status."""

    rounds: dict[int, dict[str, Any]] = field(default_factory=dict)
    used: list[float] = field(default_factory=list)

    def take(self, status: dict[str, Any]) -> None:
        """Note a status; nothing if there was none."""
        self.rounds |= {row["position"]: row for row in status.get("history", ())}
        for peer in status.get("peers", ()):
            # A gone peer keeps its last figure, and before its second window one has none.
            if peer["state"] not in ("left", "gone") and peer["rounds_seen"] > 1:
                self.used.append(peer["utilisation"])

    def __str__(self) -> str:
        used = f"{statistics.mean(self.used):.1%}" if self.used else "not known yet"
        return f"round {max(self.rounds, default=0)}, utilisation {used}"


def soak(minutes: float, step_ms: float, seed: int = 1) -> Soak:
    """Run four peers behind routers, at 20 Mbit/s and 0.5% loss; strike now and then.

    Method, windows and codec are those that `atoll init` chooses for this link. The coordinator
    has the link of the other cases, with the same loss.
    """
    home = WanLink(up=SOAK_MBIT, down=SOAK_MBIT, loss=SOAK_LOSS)
    links = [WanLink(loss=SOAK_LOSS), *(replace(home, behind=behind) for behind in SOAK_KINDS)]
    rng, looks, kills, moves = random.Random(seed), Looks(), 0, 0
    with tempfile.TemporaryDirectory() as folder, WanLab(links, mtu=SOAK_MTU) as lab:
        with Case(lab=lab, folder=Path(folder)) as case:
            spec = case.advised(step_ms)
            case.start_coordinator(spec)
            for host in range(1, PEERS + 1):
                case.start_peer(host)
            wait_until(lambda: case.position() > 0, FIRST_ROUND_S, case.words)
            began_s = time.monotonic()
            end_s, strike_s = began_s + 60 * minutes, began_s + STRIKE_EVERY_S
            while time.monotonic() < end_s:
                looks.take(case.status())
                if time.monotonic() >= strike_s and strike_s < end_s - STRIKE_EVERY_S / 2:
                    strike_s += STRIKE_EVERY_S
                    host = rng.randint(1, PEERS)
                    if rng.random() < 0.5:
                        kills += 1
                        case.restart_peer(host)
                    else:
                        moves += 1
                        lab.readdress(host)
                passed = (time.monotonic() - began_s) / 60
                progress(f"{passed:.1f} of {minutes:g} minutes: {looks}")
                time.sleep(min(LOOK_S, max(0.0, end_s - time.monotonic())))
            status: dict[str, Any] = {}
            wait_until(lambda: bool(status.update(case.status()) or status), CASE_S, case.words)
            looks.take(status)
    history = [looks.rounds[position] for position in sorted(looks.rounds)]
    gaps = [after["at"] - before["at"] for before, after in pairwise(history)]
    chains: dict[int, set[str]] = {}
    for peer in status["peers"]:
        chains.setdefault(peer["position"], set()).add(peer["chain"])
    return Soak(
        model=SOAK_MODEL,
        method=f"{spec.outer.method}, {spec.outer.inner_steps} steps",
        step_ms=step_ms,
        minutes=minutes,
        rounds=status["position"],
        kills=kills,
        moves=moves,
        longest_s=max(gaps),
        utilisation=statistics.mean(looks.used),
        counted=sum(row["members"] for row in history) / (PEERS * len(history)),
        chains=max(map(len, chains.values())),
    )


@dataclass(frozen=True, kw_only=True)
class Killed:
    """A public peer that relays for two others, killed in mid-round."""

    round_s: float
    """median seconds between two rounds before, at the last survivor; logs have whole seconds"""
    struck_s: float
    """of the round in which it died"""
    cost_s: float
    without: list[list[str]]
    """names of those left out of each later round, without the killed one"""

    @property
    def missed(self) -> list[str]:
        """The targets that this run misses."""
        left_out = sorted({name for names in self.without for name in names})
        return [
            *([f"{RELAY_KILLED}: it cost {self.cost_s:.1f} s"] * (self.cost_s > COST_S)),
            *([f"{RELAY_KILLED}: left out {', '.join(left_out)}"] * bool(left_out)),
        ]


def kill_a_relay() -> Killed:
    """Kill the first relay of two peers behind symmetric routers while bodies move."""
    links = [WanLink(), *(WanLink(behind=behind) for behind in ("", "", "symmetric", "symmetric"))]
    with tempfile.TemporaryDirectory() as folder, WanLab(links) as lab:
        with Case(lab=lab, folder=Path(folder)) as case:
            case.start_coordinator(case.large(ROUNDS_AROUND))
            for host in range(1, PEERS + 1):
                case.start_peer(host)
            wait_until(lambda: case.position() >= ROUNDS_AROUND // 3, CASE_S, case.words)
            peers = {peer["name"]: peer for peer in case.status()["peers"]}
            relay = next(
                n for n, p in peers.items() if p["peer_id"] == peers["peer-3"]["relays"][0]
            )
            survivors = sorted(peers.keys() - {relay})
            case.strike(relay, int(relay.rpartition("-")[2]))
            struck = max(case.committed_s(survivors)) + 1
            wait_until(lambda: case.position() == ROUNDS_AROUND, CASE_S, case.words)
            rows = case.status()["history"]
            at_s = case.committed_s(survivors)
    took_s = {later: at_s[later] - at_s[one] for one, later in pairwise(at_s)}
    before_s = statistics.median(gap_s for number, gap_s in took_s.items() if number < struck)
    names = {peer["peer_id"]: name for name, peer in peers.items()}
    without = [
        [names.get(peer, peer) for peer in row["left_out"] if names.get(peer) != relay]
        for row in sorted(rows, key=lambda row: row["position"])
        if row["position"] >= struck
    ]
    cost_s = took_s[struck] - before_s
    return Killed(round_s=before_s, struck_s=took_s[struck], cost_s=cost_s, without=without)


def events(log: Path) -> list[dict[str, Any]]:
    """Return what a peer printed as JSON; a line that is still being written does not count."""
    found = []
    for line in log.read_text().splitlines():
        with suppress(ValueError):
            found.append(json.loads(line))
    return [each for each in found if isinstance(each, dict)]


def committed_at_s(log: Path) -> dict[int, float]:
    """Return when a peer reported each round."""
    return {each["round"]: each["time"] for each in events(log) if each["kind"] == "round"}


def row_of(
    topology: Topology,
    status: dict[str, Any],
    holes: int,
    spent: Sequence[int],
    began_s: float,
    joined_s: float,
) -> Row:
    """Return what the status of a finished run shows."""
    history = sorted(status["history"], key=lambda row: row["position"])
    full = [row for row in history if row["members"] == PEERS]
    behind = sum(map(bool, topology.behind))
    seconds = [on_the_wire(row) for row in history[1:]]
    least_s = bound_s(topology.behind, behind * (behind - 1) // 2 - holes, WanLink())
    return Row(
        case=topology.name,
        joined_s=joined_s,
        first_s=full[0]["at"] - began_s,
        round_s=statistics.median(seconds),
        bound_s=least_s,
        ratio=statistics.median(seconds) / least_s,
        through_coordinator=spent[0] / sum(spent),
        relayed_mb=sum(peer["relayed_bytes"] for peer in status["peers"]) / 2e6 / len(history),
        direct_pairs=holes,
        counted=sum(row["members"] for row in history) / (PEERS * len(history)),
    )


def on_the_wire(row: dict[str, Any]) -> float:
    """Return a round's seconds of reduction and votes, the mean of its members."""
    return sum(row["seconds"].get(phase, 0.0) for phase in PHASES)


def progress(text: str) -> None:
    """Tell who waits that something happens."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


class Kept:
    """The finished runs of this commit, in a file, for a bench that was interrupted."""

    def __init__(self, path: Path) -> None:
        """Continue the file if it exists."""
        self.path = path

    def of(self, case: str, kind: type[Result]) -> list[Result]:
        """Return the runs of a case; a line that was cut off counts as none."""
        found = []
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            try:
                told = json.loads(line)
                if told["case"] == case:
                    found.append(kind(**told["run"]))
            except (ValueError, KeyError, TypeError):
                continue
        return found

    def add(self, case: str, run: "Row | Killed") -> None:
        """Append a run."""
        with self.path.open("a") as file:
            file.write(json.dumps({"case": case, "run": asdict(run)}) + "\n")


def repeated(
    case: str, kind: type[Result], kept: Kept, runs: int, one: Callable[[], Result]
) -> list[Result]:
    """Return so many runs of a case, with those that were kept; a failed one is tried once more.

    Raises:
        RuntimeError: two runs failed.
    """
    found, failures = kept.of(case, kind)[:runs], 0
    while len(found) < runs:
        progress(f"{case}: run {len(found) + 1} of {runs}")
        try:
            found.append(one())
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            failures += 1
            progress(f"{case}: failed: {error}")
            if failures > 1:
                raise RuntimeError(f"{case}: two runs failed") from error
        else:
            kept.add(case, found[-1])
            progress(f"{case}: {json.dumps(asdict(found[-1]))}")
    return found


def summary(runs: Sequence[Row]) -> dict[str, Any]:
    """Return the median of every figure over some runs of a case, and the spread of the ratio."""
    middle: dict[str, Any] = {"case": runs[0].case}
    for name in asdict(runs[0]).keys() - {"case"}:
        middle[name] = statistics.median(getattr(run, name) for run in runs)
    ratios = [run.ratio for run in runs]
    spread = {"runs": len(runs), "ratio_low": min(ratios), "ratio_high": max(ratios)}
    return {**middle, "direct_pairs": round(middle["direct_pairs"]), **spread, **origin()}


def killed_summary(runs: Sequence[Killed]) -> dict[str, Any]:
    """Return the runs in which a relay was killed, with the worst cost."""
    worst = {"cost_s": max(run.cost_s for run in runs)}
    return {**worst, "runs": [asdict(run) for run in runs], **origin()}


def origin() -> dict[str, str]:
    """Return when and of which commit something was measured."""
    return {"date": today(), "commit": commit()}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    lines = [
        "| peers behind | joined, s | first round, s | round, s | bound, s | ratio | "
        "lowest to highest | through the coordinator | relayed, MB a round | holes | counted | "
        "runs | date, commit |",
        "|---" * 13 + "|",
    ]
    lines += [
        f"| {row['case']} | {row['joined_s']:.0f} | {row['first_s']:.0f} | {row['round_s']:.2f} "
        f"| {row['bound_s']:.2f} | {row['ratio']:.2f} "
        f"| {row['ratio_low']:.2f} to {row['ratio_high']:.2f} | {row['through_coordinator']:.1%} "
        f"| {row['relayed_mb']:.1f} | {row['direct_pairs']} | {row['counted']:.0%} "
        f"| {row['runs']} | {row['date']}, {row['commit']} |"
        for row in rows
    ]
    return "\n".join(lines)


def killed_table(found: dict[str, Any]) -> str:
    """Return the runs in which a relay was killed as Markdown."""
    lines = ["| relay killed | a round, s | that round, s | cost, s | left out | date, commit |"]
    lines.append("|---" * 6 + "|")
    for number, run in enumerate(found["runs"], 1):
        left_out = sorted({name for names in run["without"] for name in names})
        lines.append(
            f"| run {number} | {run['round_s']:.1f} | {run['struck_s']:.1f} | {run['cost_s']:.1f} "
            f"| {', '.join(left_out) or 'nobody'} | {found['date']}, {found['commit']} |"
        )
    return "\n".join(lines)


def soak_table(found: dict[str, Any]) -> str:
    """Return the long run as Markdown."""
    return (
        "| long run | model | method | rounds | kills, moves | longest gap, s | utilisation "
        f"| counted | chains | date, commit |\n{'|---' * 10}|\n"
        f"| {found['minutes']:g} min | {found['model']} | {found['method']} | {found['rounds']} "
        f"| {found['kills']}, {found['moves']} | {found['longest_s']:.0f} "
        f"| {found['utilisation']:.1%} | {found['counted']:.0%} | {found['chains']} "
        f"| {found['date']}, {found['commit']} |"
    )


def tables(found: dict[str, Any]) -> str:
    """Return all that was measured as Markdown."""
    parts = [table(found["rows"])] if found["rows"] else []
    parts += [killed_table(found["relay_killed"])] if found["relay_killed"] else []
    parts += [soak_table(found["soak"])] if found["soak"] else []
    return "\n\n".join(parts)


def merged(known: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Return what was saved before with what is new; each result keeps its own date and commit."""
    before = {name: known[name] for name in ("date", "commit") if name in known}
    for row in known.get("rows", ()):  # one run each, and one date for all, in older files
        alone = {"runs": 1, "ratio_low": row["ratio"], "ratio_high": row["ratio"]}
        row |= {**alone, **before, **row}
    killed = known.get("relay_killed") or {}
    by_case = {row["case"]: row for row in [*known.get("rows", ()), *found["rows"]]}
    return {
        **{name: found[name] for name in ("machine", "params", "relay_mbit")},
        "rows": [by_case[each.name] for each in topologies() if each.name in by_case],
        # An older file has one run, timed by another clock.
        "relay_killed": found["relay_killed"] or (killed if "runs" in killed else None),
        "soak": found["soak"] or known.get("soak"),
    }


def save(found: dict[str, Any], saved: Path = SAVED, page: Path = PAGE) -> None:
    """Add to what was saved, and write the tables between the marks of the page."""
    everything = merged(json.loads(saved.read_text()) if saved.exists() else {}, found)
    saved.write_text(json.dumps(everything, indent=1) + "\n")
    told = f"{everything['machine']}.\n\n{tables(everything)}"
    put_between(page, MARKS, told)


def arguments(cases: Sequence[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", default="", help=f"comma-separated (default all), of: {', '.join(cases)}")
    add("--soak", type=float, default=0, metavar="MIN", help="only the long run, of MIN minutes")
    add(
        "--step-ms",
        type=float,
        default=STEP_MS,
        metavar="MS",
        help=f"time of a step of the long run, most of which it waits (default: {STEP_MS:g})",
    )
    add("--runs", type=int, default=RUNS, help=f"runs of each case (default: {RUNS})")
    add("--fresh", action="store_true", help="repeat runs that an interrupted bench has kept")
    add("--one-port", action="store_true", help="start the coordinator with --one-port")
    add("--save", action="store_true", help=f"save the results in {SAVED.name} and {PAGE.name}")
    add("--json", action="store_true", help="print the results as JSON on the last line")
    options = parser.parse_args()
    options.only = options.only.split(",") if options.only else list(cases)
    if unknown := set(options.only) - set(cases):
        parser.error(f"no case {', '.join(sorted(unknown))}; choose from {', '.join(cases)}")
    if options.runs < 1:
        parser.error("--runs must be at least 1")
    return options


def main() -> int:
    """Measure what is asked for; return 1 if a target is missed, 2 if this machine cannot."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that hosts and peers are removed
    known = {topology.name: topology for topology in topologies()}
    options = arguments([*known, RELAY_KILLED])
    if why := lab_is_possible():
        print(f"bench nat: {why}", file=sys.stderr)
        return 2
    port = "-one-port" if options.one_port else ""
    kept = Kept(Path(tempfile.gettempdir()) / f"atoll-bench-nat-{commit()}{port}.jsonl")
    if options.fresh:
        kept.path.unlink(missing_ok=True)
    found: dict[str, Any] = {
        **circumstances(),
        "params": PARAMS,
        "relay_mbit": RELAY_MBIT,
        "rows": [],
        "relay_killed": None,
        "soak": None,
    }
    missed: list[str] = []
    for name in () if options.soak else options.only:
        if name == RELAY_KILLED:
            deaths = repeated(name, Killed, kept, options.runs, kill_a_relay)
            found["relay_killed"] = killed_summary(deaths)
            missed += [each for death in deaths for each in death.missed]
        else:
            one = partial(measure, known[name], is_one_port=options.one_port)
            found["rows"].append(row := summary(repeated(name, Row, kept, options.runs, one)))
            missed += Row(**{each.name: row[each.name] for each in fields(Row)}).missed
        if options.save:  # what is finished stays, whatever comes next
            save(found)
    if options.soak:
        long_run = soak(options.soak, options.step_ms)
        found["soak"] = asdict(long_run) | origin()
        missed += long_run.missed
        if options.save:
            save(found)
    print(tables(found))
    for each in missed:
        print(f"missed: {each}", file=sys.stderr)
    if options.json:
        print(json.dumps(found))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
