"""Pipelines of real processes on hosts of the lab, and what bounds them, for `bench_pipeline.py`.

The model's slices mostly wait, as for an accelerator, since all hosts share this machine's cores:
for a stated time in the forward pass and twice as long in the backward pass, of which half is spent
on the gradient of the input. So an inner stage waits four times its forward time for a microbatch,
as it computes the forward pass again, and the last stage three times.
"""

import json
import subprocess
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench_nat import ATOLL, CUSTOM, Case, events, kill, wait_until

from atoll.compression.activations import parse_activations
from atoll.coordinator.run.spec import RunSpec
from atoll.dht.testing.wan import WanLab, WanLink

LOOKS = Path(__file__).resolve().parent / "pipeline_looks.py"
# A payload fits the 256 KiB that libp2p sends on a stream before the receiver answers.
BATCH, SEQ_LEN, WIDTH = 2, 248, 512
ROWS = BATCH * SEQ_LEN
"""Tokens of a microbatch."""
CODEC = "int8"
START_S = 120.0
FIRST_S = 120.0  # until all peers have counted something
CONGESTION = "cubic"  # Linux's default; this machine's may be another
MTU = 1500  # of the internet: the queue of a link of 10 Mbit/s holds 28 packets of 9,000 bytes
PACE = "BENCH_PACE"
ONE_THREAD = "OMP_NUM_THREADS=1"  # six peers share the cores, where threads that wait would spin
Flow = dict[str, Any]
"""What a peer reports of its flow, as `coordinator.run.status.FlowStatus`."""
# What a slice computes besides is small: a table of 256 rows, a gain for each channel, a head.
MODEL = """
import os
import time
from functools import partial

import torch
from torch import nn

from atoll.peer.training.models import model

SECONDS = [float(each) for each in os.environ.get("BENCH_PACE", "0").split(",")]

class Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward_s, backward_s):
        ctx.backward_s = backward_s
        if not x.is_meta:
            time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.backward_s)
        return gradient, None, None

class First(nn.Module):
    def __init__(self, vocab_size, width, seconds):
        super().__init__()
        self.embedding, self.seconds = nn.Embedding(vocab_size, width), seconds

    def forward(self, tokens_BT):
        return Wait.apply(self.embedding(tokens_BT), self.seconds, 2 * self.seconds)

class Inner(nn.Module):
    def __init__(self, width, seconds):
        super().__init__()
        self.gain_D, self.seconds = nn.Parameter(torch.zeros(width)), seconds

    def forward(self, x_BTD):
        gain_D = Wait.apply(self.gain_D, 0.0, self.seconds)
        return Wait.apply(x_BTD, self.seconds, self.seconds) * (1 + gain_D)

class Last(nn.Module):
    def __init__(self, width, vocab_size, seconds):
        super().__init__()
        self.inner, self.head = Inner(width, seconds), nn.Linear(width, vocab_size)

    def forward(self, x_BTD):
        return self.head(self.inner(x_BTD))

@model(slices=True)
def build(*, vocab_size, seq_len, width, stages):
    seconds = [*SECONDS, *[SECONDS[-1]] * stages][:stages]
    inner = [partial(Inner, width, each) for each in seconds[1:-1]]
    first = partial(First, vocab_size, width, seconds[0])
    return [first, *inner, partial(Last, width, vocab_size, seconds[-1])]
"""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A run in stages, of which each has as many peers. Host 0 has the coordinator."""

    forward_s: tuple[float, ...]
    """that a stage waits in a microbatch's forward pass, at a peer of factor 1"""
    factors: tuple[float, ...]
    """of the waits of each peer, from host 1 on: that of host h serves stage (h - 1) % stages if
    they are started in turn"""
    microbatches: int
    """of a step"""
    staleness: int
    inner_steps: int
    windows: str = "equal"
    activations: str = CODEC
    gradients: str = CODEC
    exact: bool = False

    @property
    def stages(self) -> int:
        """Return the number of stages."""
        return len(self.forward_s)

    @property
    def peers(self) -> int:
        """Return the number of peers."""
        return len(self.factors)


@dataclass(frozen=True, kw_only=True)
class PeerBound:
    """The least seconds in which one peer of a stage can deal with a microbatch."""

    compute_s: float
    link_s: float

    @property
    def seconds(self) -> float:
        """Return the greater of the two: computing and sending overlap."""
        return max(self.compute_s, self.link_s)

    @property
    def binds(self) -> str:
        """Return which of the two is greater."""
        return "link" if self.link_s > self.compute_s else "compute"


def forward_bytes(codec: str = CODEC) -> int:
    """Return the payload of a microbatch on its way out: the activations and the token ids."""
    return backward_bytes(codec) + 4 * BATCH * (SEQ_LEN + 1)


def backward_bytes(codec: str = CODEC) -> int:
    """Return the payload of a microbatch on its way back."""
    return parse_activations(codec).frame_bytes(ROWS, WIDTH)


def peer_bound(
    stage: int,
    *,
    stages: int,
    forward_s: float,
    link: WanLink,
    codecs: tuple[str, str] = (CODEC, CODEC),
) -> PeerBound:
    """Return the bound of a peer, from the payloads alone: no headers, and no answers.

    Args:
        stage: of the peer.
        stages: of the run.
        forward_s: that the peer waits in a forward pass.
        link: of the peer.
        codecs: of the way out and of the way back.
    """
    is_first, is_last = stage == 0, stage == stages - 1
    passes = 3 if is_last else 4  # all but the last compute their forward pass again
    out, back = forward_bytes(codecs[0]), backward_bytes(codecs[1])
    sent = out * (not is_last) + back * (not is_first)
    received = out * (not is_first) + back * (not is_last)
    link_s = max(8e-6 * sent / link.up, 8e-6 * received / link.down)
    return PeerBound(compute_s=passes * forward_s, link_s=link_s)


def stage_rate(pipeline: Pipeline, stage: int, link: WanLink, here: Sequence[int]) -> float:
    """Return the most microbatches a second of a stage, by its hosts that are here."""
    return sum(
        1
        / peer_bound(
            stage,
            stages=pipeline.stages,
            forward_s=pipeline.forward_s[stage] * pipeline.factors[host - 1],
            link=link,
            codecs=(pipeline.activations, pipeline.gradients),
        ).seconds
        for host in here
    )


class Flowing(Case):
    """A pipeline in the lab: the coordinator on host 0, a peer on each other host."""

    def __init__(self, lab: WanLab, folder: Path, pipeline: Pipeline) -> None:
        """Write the model and its text into a folder."""
        super().__init__(lab=lab, folder=folder)
        self.pipeline = pipeline
        (folder / "paced.py").write_text(MODEL)
        (folder / "text.txt").write_text("Microbatches flow from peer to peer, and back. " * 20_000)

    def spec(self) -> RunSpec:
        """Return the run, which starts with all peers and has no end."""
        pipeline = self.pipeline
        return RunSpec.from_dict(
            {
                "run": {"name": "pipeline"},
                "model": {
                    "custom": CUSTOM,
                    "overrides": {"width": WIDTH, "stages": pipeline.stages},
                },
                "data": {"source": str(self.folder / "text.txt"), "seq_len": SEQ_LEN},
                "inner": {"batch_size": BATCH, "grad_accumulation": pipeline.microbatches},
                "outer": {"inner_steps": pipeline.inner_steps, "windows": pipeline.windows},
                "topology": {
                    "stages": pipeline.stages,
                    "activations": pipeline.activations,
                    "gradients": pipeline.gradients,
                    "staleness": pipeline.staleness,
                    "exact": pipeline.exact,
                },
                "round": {"min_peers": pipeline.peers},
                "coordinator": {"advertise": self.lab.ip(0)},
            }
        )

    def begin(self, *, in_turn: bool) -> None:
        """Start everything, and wait until all peers train.

        Args:
            in_turn: start each peer only when the one before has its stage, so that host h has
                stage (h - 1) % stages.
        """
        self.start_coordinator(self.spec())
        with (self.folder / "looks.jsonl").open("a") as out:
            self.children["looks"] = self.lab.popen(
                0,
                [ATOLL[0], str(LOOKS), str(self.invite)],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.DEVNULL,
            )
        for host in range(1, self.pipeline.peers + 1):
            self.start_peer(host)
            if in_turn:
                wait_until(lambda: len(self.newest()) == host, START_S, self.words)  # noqa: B023
        wait_until(lambda: self.training() == self.pipeline.peers, START_S, self.words)

    def start_peer(self, host: int, *, newcomer: int = 0) -> None:
        """Start the peer of a host, for the first time or again, or a newcomer in its place.

        A newcomer, told apart by a number above 0, has nothing of the peer before it.
        """
        factor = self.pipeline.factors[host - 1]
        pace = ",".join(str(each * factor) for each in self.pipeline.forward_s)
        own = ["--data", "text.txt", "--allow-model", CUSTOM]
        self.run_peer(host, own, state_dir=state_dir(host, newcomer), pace=pace)

    def run_peer(self, host: int, own: Sequence[str], *, state_dir: str, pace: str = "") -> None:
        """Run a peer on a host, with options of the run's own."""
        name = f"peer-{host}"
        words = ["env", f"{PACE}={pace}", ONE_THREAD, *ATOLL, "peer", str(self.invite)]
        words += ["--yes", "--json", "--device", "cpu", "--name", name, "--state-dir", state_dir]
        words += own
        with (self.folder / f"{name}.log").open("a") as log:
            self.children[name] = self.lab.popen(
                host, words, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def kill(self, host: int) -> None:
        """Kill the peer of a host at once, with all its processes: nothing says goodbye."""
        kill(self.children[f"peer-{host}"])

    def looks(self) -> Iterator[dict[str, Any]]:
        """Return all looks so far."""
        for line in (self.folder / "looks.jsonl").read_text().splitlines():
            with suppress(ValueError):  # a line that is still being written
                yield json.loads(line)

    def newest(self) -> list[dict[str, Any]]:
        """Return the peers as last seen."""
        looks = list(self.looks())
        return looks[-1]["peers"] if looks else []

    def began_training_s(self, host: int) -> list[float]:
        """Return when each process of a host's peer began to train."""
        log = self.folder / f"peer-{host}.log"
        return [each["time"] for each in events(log) if each["kind"] == "ready"]


def state_dir(host: int, newcomer: int) -> str:
    """Return the name of a peer's state directory."""
    return f"peer-{host}-{newcomer}" if newcomer else f"peer-{host}"


@dataclass(kw_only=True)
class Counts:
    """What one process of a peer has counted, by the time of its report."""

    name: str
    stage: int
    points: list[tuple[float, Flow]] = field(default_factory=list)

    def between(
        self, from_s: float, until_s: float
    ) -> tuple[dict[str, Any], dict[str, Any], float]:
        """Return the reports at the ends of a window, and the seconds between them."""
        inside = [each for each in self.points if from_s <= each[0] <= until_s]
        (first_s, first), (last_s, last) = inside[0], inside[-1]
        return first, last, last_s - first_s

    def rate(self, from_s: float, until_s: float) -> float:
        """Return the microbatches a second that it counted in a window."""
        first, last, took_s = self.between(from_s, until_s)
        return float((last["counted"] - first["counted"]) / took_s)


def counts(looks: Sequence[dict[str, Any]]) -> list[Counts]:
    """Return what all processes have counted; those that never trained are left out."""
    found: dict[tuple[str, str], Counts] = {}
    for look in looks:
        for peer in look["peers"]:
            if peer["flow"] is None or not peer["module"]:
                continue
            stage = int(peer["module"].rpartition("-")[2]) - 1
            key = peer["name"], peer["incarnation"]
            mine = found.setdefault(key, Counts(name=peer["name"], stage=stage))
            if not mine.points or peer["heard_at"] > mine.points[-1][0] + 0.1:
                mine.points.append((peer["heard_at"], peer["flow"]))
    return list(found.values())


def spans(one: Counts, from_s: float, until_s: float) -> bool:
    """Return whether a process reported more than once in a window."""
    return sum(from_s <= at_s <= until_s for at_s, _ in one.points) > 1


def total(found: Sequence[Counts], name: str, from_s: float, until_s: float) -> int:
    """Return how much a count grew in a window, over some processes."""
    ends = [each.between(from_s, until_s) for each in found]
    return sum(int(last[name] - first[name]) for first, last, _ in ends)


def omissions(found: Sequence[Counts], from_s: float, until_s: float) -> dict[str, int]:
    """Return how many passes were given up in a window, by reason."""
    grown: Counter[str] = Counter()
    for each in found:
        first, last, _ = each.between(from_s, until_s)
        grown.update(last["omitted"])
        grown.subtract(first["omitted"])
    return {reason: number for reason, number in grown.items() if number}


def rounds(looks: Sequence[dict[str, Any]]) -> list[int]:
    """Return how many rounds each stage held, as its peers reported."""
    found: dict[str, int] = {}
    for look in looks:
        for peer in filter(lambda each: each["module"], look["peers"]):
            found[peer["module"]] = max(found.get(peer["module"], 0), peer["position"])
    return [found[module] for module in sorted(found)]


def most_chains(looks: Sequence[dict[str, Any]]) -> int:
    """Return the most different chains that peers reported at one position of a stage."""
    chains: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
    for look in looks:
        for peer in look["peers"]:
            chains[peer["module"], peer["position"]].add(peer["chain"])
    return max(len(each) for (_, position), each in chains.items() if position)


def busy_cores(seconds: Callable[[], None]) -> float:
    """Return how many of this machine's cores were busy while something took its time."""
    before, began_s = _busy_s(), time.monotonic()
    seconds()
    return (_busy_s() - before) / (time.monotonic() - began_s)


def _busy_s() -> float:
    words = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq = map(int, words[:7])
    return (user + nice + system + irq + softirq) / 100


def link_of(mbit: float, rtt_ms: float) -> WanLink:
    """Return the link of hosts between which a round trip takes so long."""
    return WanLink(up=mbit, down=mbit, delay_ms=rtt_ms / 2)


def lab_of(links: Sequence[WanLink]) -> WanLab:
    """Return hosts with the packets and the congestion control of most machines."""
    return WanLab(links, mtu=MTU, congestion=CONGESTION)


@contextmanager
def running(
    pipeline: Pipeline, link: WanLink, *, kind: type[Flowing] = Flowing, in_turn: bool = False
) -> Iterator[Flowing]:
    """Run a pipeline in a lab, from when each of its peers has counted a step."""
    links = [WanLink(delay_ms=link.delay_ms)] + [replace(link) for _ in range(pipeline.peers)]
    with tempfile.TemporaryDirectory() as folder, lab_of(links) as lab:
        with kind(lab, Path(folder), pipeline) as case:
            case.begin(in_turn=in_turn)
            wait_until(lambda: all_flow(case), FIRST_S, case.words)
            yield case


def all_flow(case: Flowing) -> bool:
    """Return whether all peers have counted at least a step."""
    flows = [peer["flow"] for peer in case.newest()]
    least = case.pipeline.microbatches
    return len(flows) == case.pipeline.peers and all(f and f["counted"] >= least for f in flows)
