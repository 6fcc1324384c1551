"""Predict the cost of a run before it starts: bytes, time, utilisation and memory of a method.

Bytes are the lengths of the codecs' frames for the method's fragments, computed from the shapes of
the model alone, for one chunk of each kind. Time is modelled:

    round  = trips rtt + max(bytes on the wire / rate, cpu / cores)
    cpu    = CPU_S_PER_ROUND + CPU_S_PER_CELL cells + CPU_S_PER_GB bytes on the wire + arithmetic
    window = H steps + trainer's part + encoding, round and applying beyond the method's delay
           >= all processor time of a peer / cores

The arithmetic of a method is timed on this machine (`atoll.peer.lab.work`). The other constants are
fitted to rounds between hosts with equal links without loss; docs/benchmarks/plan.md compares
predictions with measurements. Late peers are a number of steps that each round waits for the last
one (`Setting.late_steps`). The model does not include packet loss, links of different rates, or
steps that need the processor at the same time as a round.

    PlanError (ValueError)   peers, links or a model that no prediction is possible for

# N parameters, F values of a fragment, H inner steps per window
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import nn

from atoll.compression.sparse import SparseCodec
from atoll.coordinator.run.spec import RunSpec
from atoll.optim import methods
from atoll.optim.log.entry import MAX_MEMBERS
from atoll.optim.log.replay import cells_of
from atoll.optim.methods.base import Method
from atoll.optim.reduction.cells import LENGTH, SPARSE_AT_ONCE, Cells
from atoll.optim.schedules import Timetable
from atoll.optim.state.fragments import Fragment
from atoll.optim.state.layout import Layout
from atoll.optim.state.pieces import AT_ONCE, Dims, codec_of
from atoll.peer.lab.work import timed
from atoll.peer.training import models
from atoll.peer.training.data import load as data
from atoll.peer.training.hf import lora
from atoll.peer.training.hf.beginning import with_shape
from atoll.peer.training.opening import build_model
from atoll.peer.training.permission import Allowed
from atoll.peer.training.resources import Resources, Weights, memory_bytes, resources

# Fitted constants; docs/benchmarks/plan.md describes the measurements and their errors.
ROUND_TRIPS = 4.0  # the last report, the group, the results, the votes
CPU_S_PER_GB = 6.2  # per peer, for the streams of a gigabyte sent and one received
# Per peer, for one chunk's frames to its owner and back. Fitted to dense rounds; of a sparse codec
# so many chunks share it.
CPU_S_PER_CELL = 0.38e-3
SPARSE_SHARE = SPARSE_AT_ONCE // AT_ONCE
CPU_SHARE_PACED = 0.04  # of a processor while a link is full: pacing and measuring its rate
CPU_S_PER_ROUND = 0.03  # per peer for any size: votes, entry, log
WIRE_OVERHEAD = 1.011  # headers of TCP, libp2p and messages, with packets of 9,000 bytes
CONTROL_BYTES_S = 10_000  # per peer among four: roster, heartbeats, votes
LINK_MAX_GBIT_S = 1_000  # no peer has such a link: beyond is a typo
VALUE_S = 1.5e-9  # per parameter at the trainer, to read the pseudo-gradient and write the commit
# Windows that end by time take whole steps, and no two machines are equally fast. Four peers that
# trained for 6 and 9 s a window waited for 2.7 and 2.3 steps (docs/benchmarks/nat.md).
LATE_STEPS = 2.0
SETTLE_S = 0.02  # per round at the trainer for any size, for switching threads


class PlanError(ValueError):
    """No prediction is possible for these peers, links or model."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Peers, links and speed, equal for all peers."""

    peers: int
    mbit_s: float
    """Rate of a link in each direction."""
    rtt_s: float = 0.05
    """Round-trip time between two peers."""
    step_s: float
    """Seconds per inner step."""
    muon_step_s: float | None = None
    """Seconds per inner step with Muon; None if not timed."""
    cores: float = 2.0
    """Processor cores per peer for a round."""
    late_steps: float = 0.0
    """Steps for which a peer waits for the last report of a round, on average."""

    def __post_init__(self) -> None:
        if self.peers < 1:
            raise PlanError(f"expected at least one peer, got {self.peers}")
        if self.peers > MAX_MEMBERS:
            raise PlanError(
                f"expected at most {MAX_MEMBERS:,} peers, got {self.peers:,}: no round has more "
                "members; plan for those that take part at a time"
            )
        if not 0 < self.mbit_s <= 1000 * LINK_MAX_GBIT_S:
            raise PlanError(
                f"expected a rate above 0 and at most {1000 * LINK_MAX_GBIT_S} Mbit/s, "
                f"got {self.mbit_s}"
            )
        if not 0 <= self.rtt_s < math.inf:
            raise PlanError(f"expected a round-trip time of at least 0 s, got {self.rtt_s}")
        if not 0 <= self.late_steps < math.inf:
            raise PlanError(f"expected a peer to be late by steps >= 0, got {self.late_steps}")
        if not 0 < self.step_s < math.inf or not 0 < self.cores < math.inf:
            raise PlanError(
                f"expected a step time and a number of cores above 0, got {self.step_s} s and "
                f"{self.cores}"
            )


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted cost of one method."""

    spec: str
    inner_steps: int
    """H; 1 for methods that send at every step."""
    sent_bytes: int
    """Payload that a peer sends, and receives, per window, on average."""
    wire_bytes: int
    """All bytes that a peer sends per window: payload, headers, its share of the coordinator's copy
    of the update, and control messages."""
    round_s: float
    """Seconds from the last peer's report to the certificate, summed over all fragments."""
    lost_s: float
    """Seconds per window without a step: encoding, applying, waiting."""
    utilisation: float
    """Fraction of time spent computing steps."""
    steps_per_s: float
    """Inner steps per second, including lost time."""
    memory_bytes: int
    """Peak host memory of a peer that trains on its processor, without activations; see
    `atoll.peer.training.resources`."""


def predict(method: Method, model: nn.Module, setting: Setting, *, inner_steps: int) -> Prediction:
    """Predict the cost of a method.

    Args:
        method: method with its codec.
        model: model, which may be on the meta device; only names and shapes are used.
        setting: peers and links.
        inner_steps: H; ignored for methods that send at every step.

    Raises:
        FragmentError: the model cannot be divided into the method's fragments.
        CodecError: the codec cannot encode these shapes.
    """
    inner_steps = 1 if method.every_step else inner_steps
    layout = Layout.of(model)
    fragments = sizes_of(method, layout)
    sent = [sent_bytes(method, fragment, setting.peers) for fragment in fragments]
    cpus_s = [cpu_s(method, f, size, setting) for f, size in zip(fragments, sent, strict=True)]
    rounds_s = [round_s(size, setting, cpu) for size, cpu in zip(sent, cpus_s, strict=True)]
    window_s = inner_steps * setting.step_s
    lost_s = _lost_s(method, fragments, rounds_s, setting, window_s)
    busy_s = sum(cpus_s) + layout.numel * (VALUE_S + _beside_s(method))
    lost_s = max(lost_s, busy_s / setting.cores - window_s)
    return Prediction(
        spec=method.spec,
        inner_steps=inner_steps,
        sent_bytes=round(sum(sent)),
        wire_bytes=round(
            (sum(sent) + _copy_bytes(method, fragments, setting.peers)) * WIRE_OVERHEAD
            + CONTROL_BYTES_S * (window_s + lost_s)
        ),
        round_s=sum(rounds_s),
        lost_s=lost_s,
        utilisation=window_s / (window_s + lost_s),
        steps_per_s=inner_steps / (window_s + lost_s),
        memory_bytes=memory_bytes(
            method,
            Weights.of(method, model),
            peers=setting.peers,
            bodies=[fragment.body_bytes for fragment in fragments],
        ),
    )


def fragments_of(method: Method, layout: Layout) -> tuple[Fragment, ...]:
    """Return the method's fragments on the meta device, so that index tensors take no memory."""
    with torch.device("meta"):
        return method.fragments(layout)


@dataclass(frozen=True, kw_only=True)
class FragmentSize:
    """The sizes of a fragment that count."""

    numel: int
    num_chunks: int
    body_bytes: int
    """Length of a member's frames; an upper bound if the codec's frames vary."""
    chunks: tuple[tuple[Cells, int], ...]
    """One chunk of each kind as it travels, and how many are equal; none in rounds of pairs."""

    def up_bytes(self) -> int:
        """Return what a member sends to the owners of all parts."""
        alone = (replace(one, gathers=False, by_senders=False) for one, _ in self.chunks)
        return sum(
            one.max_body_bytes(1) * count
            for one, (_, count) in zip(alone, self.chunks, strict=True)
        )

    def num_turns(self) -> float:
        """Return the number of chunks, those that travel together counted once."""
        if not self.chunks:
            return self.num_chunks
        return sum(
            count / (SPARSE_SHARE if isinstance(one.codec, SparseCodec) else 1)
            for one, count in self.chunks
        )

    def down_bytes(self, members: int) -> int:
        """Return the length of the body of an update, which comes back."""
        return sum(one.max_body_bytes(members) * count for one, count in self.chunks)


def sizes_of(method: Method, layout: Layout) -> tuple[FragmentSize, ...]:
    """Return the sizes of the method's fragments, which are computed once per process.

    Raises:
        FragmentError: the model cannot be divided into the method's fragments.
        CodecError: the codec cannot encode these shapes.
    """
    return _sizes(method.spec, layout)


@cache
def _sizes(spec: str, layout: Layout) -> tuple[FragmentSize, ...]:
    method = methods.parse(spec)
    return tuple(_size(method, fragment) for fragment in fragments_of(method, layout))


def _size(method: Method, fragment: Fragment) -> FragmentSize:
    counts, total = _counted(method, fragment), 0
    chunks = list[tuple[Cells, int]]()
    for dims, count in counts:
        total += count * codec_of(method.codec, dims).wire_bytes(dims)
        if method.reduction != "pairs":
            one = Fragment(spans=((0, math.prod(dims)),), pieces=(dims,))
            chunks.append((cells_of(method, one), count))
    return FragmentSize(
        numel=fragment.numel,
        num_chunks=len(fragment.pieces),
        body_bytes=total,
        chunks=tuple(chunks),
    )


def _counted(method: Method, fragment: Fragment) -> list[tuple[Dims, int]]:
    # Chunks of a shape and codec are as long as each other. A model of 70B has a million of a few
    # kinds, mostly the same object many times in a row, which is found faster than an equal one.
    counts = dict[tuple[str, Dims], int]()
    kinds = dict[tuple[str, Dims], Dims]()
    for _, run in itertools.groupby(fragment.pieces, key=id):
        dims, *more = run
        kind = codec_of(method.codec, dims).spec, dims
        counts[kind] = counts.get(kind, 0) + 1 + len(more)
        kinds[kind] = dims
    return [(dims, counts[kind]) for kind, dims in kinds.items()]


def sent_bytes(method: Method, fragment: FragmentSize, peers: int) -> float:
    """Return the payload that a peer sends for a fragment, on average over the peers.

    A peer sends its chunks to the owners of their parts and, as an owner, results to all others
    (`atoll.optim.reduction.cells`). A gossip peer sends pseudo-gradient and weights to one partner.
    """
    if peers == 1:
        return 0.0
    if method.reduction == "pairs":  # one of an odd number of peers has no partner
        return 2 * fragment.body_bytes * (peers - peers % 2) / peers
    both = fragment.up_bytes() + fragment.down_bytes(peers)
    if method.rank:  # two frames per chunk each way, each with its length
        both += 2 * LENGTH.size * fragment.num_chunks
    return both * (peers - 1) / peers


def _copy_bytes(method: Method, fragments: Sequence[FragmentSize], peers: int) -> float:
    # A peer's share of the updates that leaders send to the coordinator.
    if not method.logged:
        return 0.0
    return sum(fragment.down_bytes(peers) for fragment in fragments) / peers


def cpu_s(method: Method, fragment: FragmentSize, sent: float, setting: Setting) -> float:
    """Return the processor seconds that a peer needs in a round in which it sends `sent` bytes."""
    if setting.peers == 1:
        return 0.0
    streams_s = (
        CPU_S_PER_ROUND
        + CPU_S_PER_CELL * fragment.num_turns()
        + CPU_S_PER_GB * sent * WIRE_OVERHEAD / 1e9
        + CPU_SHARE_PACED * link_s(sent, setting)
    )
    return streams_s + fragment.numel * timed(method).inside_s(setting.peers)


def link_s(sent: float, setting: Setting) -> float:
    """Return the seconds that a link needs for `sent` bytes of payload."""
    return sent * WIRE_OVERHEAD * 8 / (setting.mbit_s * 1e6)


def round_s(sent: float, setting: Setting, cpu: float) -> float:
    """Return the seconds of one reduction.

    Args:
        sent: bytes of payload that a peer sends.
        setting: peers and links.
        cpu: processor seconds, from `cpu_s`.
    """
    if setting.peers == 1:
        return 0.0
    return ROUND_TRIPS * setting.rtt_s + max(link_s(sent, setting), cpu / setting.cores)


def _beside_s(method: Method) -> float:
    # Per value, in other threads than the trainer: encoding before a round, applying after it.
    work = timed(method)
    return work.offer_s + work.apply_s


def _lost_s(
    method: Method,
    fragments: Sequence[FragmentSize],
    rounds_s: Sequence[float],
    setting: Setting,
    window_s: float,
) -> float:
    # Rounds cost the time beyond their delay, or beyond the window if that is more.
    hidden_s = method.hidden_steps(round(window_s / setting.step_s)) * setting.step_s
    beside_s = _beside_s(method) / min(1.0, setting.cores)
    late_s = 0.0 if method.every_step else _late_s(setting)
    travels_s = [
        late_s + seconds + fragment.numel * beside_s
        for seconds, fragment in zip(rounds_s, fragments, strict=True)
    ]
    open_s = sum(max(0.0, seconds - hidden_s) for seconds in travels_s)
    trainer_s = sum(SETTLE_S + f.numel * VALUE_S for f in fragments)
    return max(open_s, sum(travels_s) - window_s) + trainer_s


def _late_s(setting: Setting) -> float:
    return setting.late_steps * setting.step_s if setting.peers > 1 else 0.0


def needed(spec: RunSpec, model: nn.Module, peers: int, *, ranks: int = 1) -> Resources:
    """Return the memory and disk that a run needs of each machine.

    Args:
        spec: of the run.
        model: of the run, which may be on the meta device.
        peers: members of a round.
        ranks: processes that train as one peer, on one machine.

    Raises:
        PlanError: there is no such number of ranks.
    """
    if ranks < 1:
        raise PlanError(f"expected at least one rank, got {ranks}")
    method = spec.method()
    bodies = [fragment.body_bytes for fragment in sizes_of(method, Layout.of(model))]
    weights = Weights.of(method, model, spec.inner)
    return resources(spec, method, weights, peers=peers, bodies=bodies, ranks=ranks)


def windows_of(spec: RunSpec, model: nn.Module) -> Timetable:
    """Return the windows of a run by position, for the number of fragments of its method."""
    return spec.timetable(len(sizes_of(spec.method(), Layout.of(model))))


def bare_model(spec: RunSpec) -> nn.Module:
    """Build the model of a run without its weights; a custom one is built whole, on the CPU.

    Raises:
        ModelError: the preset, the overrides or the custom model are not usable.
        DataError: the tokenizer cannot be read.
    """
    vocab_size = data.open_tokenizer(spec.data.tokenizer).vocab_size
    if spec.model.custom is not None:
        return build_model(spec, vocab_size, Allowed.everything_in(spec))  # a file of one's own
    overrides = with_shape(spec).model.overrides
    with torch.device("meta"):
        model = models.Decoder(
            models.preset(
                spec.model.preset, overrides, vocab_size=vocab_size, seq_len=spec.data.seq_len
            )
        )
        if spec.model.lora is not None:
            lora.inject_(model, spec.model.lora, seed=spec.run.seed)
        return model
