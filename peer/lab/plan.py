"""What a run will cost before it is started: bytes, time, utilisation and memory of each method.

Bytes are the lengths of the codecs' frames over the method's own fragments, from the shapes of
the model alone. Time is modelled:

    round  = trips rtt + max(bytes on the wire / rate, cpu / cores)
    cpu    = CPU_S_PER_ROUND + CPU_S_PER_CELL cells + CPU_S_PER_GB bytes on the wire + arithmetic
    window = H steps + at the trainer + what of encoding, round and applying its delay does not hide
           >= all processor time of a peer / cores

The arithmetic of a method is timed on this machine (`atoll.peer.lab.work`). The other constants
were
fitted to rounds between hosts without loss and with equal links; what the prediction is worth is in
docs/benchmarks/plan.md. Links with loss, links of different rates, and peers that arrive late are
not modelled, nor steps that want the processor at the same time.

    PlanError (ValueError)   links or a number of peers that nothing can be said about

# N parameters, F of a fragment, H inner steps of a window
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from atoll.coordinator.run.spec import RunSpec
from atoll.optim.inner.muon import muon_groups
from atoll.optim.log.replay import cells_of
from atoll.optim.methods.base import Method
from atoll.optim.reduction.cells import LENGTH
from atoll.optim.state.fragments import Fragment, codec_of
from atoll.optim.state.layout import Layout
from atoll.optim.workers.timetable import Timetable
from atoll.peer.lab.work import timed
from atoll.peer.training import models
from atoll.peer.training.data import load as data
from atoll.peer.training.trainer import build_model

ROUND_TRIPS = 4.0  # the last report, the group, what comes back, votes
CPU_S_PER_GB = 6.2  # of a peer, for streams of what it sends and as much that it receives
CPU_S_PER_CELL = 0.38e-3  # of a peer, for frames on their ways to owners and back
CPU_SHARE_PACED = 0.04  # of a processor, while a link is filled: turns of senders, readings
CPU_S_PER_ROUND = 0.03  # of a peer, whatever the size: votes, entry, log
WIRE_OVERHEAD = 1.011  # headers of TCP, libp2p and messages, at packets of 9,000 bytes
CONTROL_BYTES_S = 10_000  # of a peer among four: roster, heartbeats, votes; see plan.md
LINK_MAX_GBIT_S = 1_000
VALUE_S = 1.5e-9  # of a parameter at the trainer: what it trained taken out, the commit put in
SETTLE_S = 0.02  # of a round at the trainer whatever the size: turns of threads


class PlanError(ValueError):
    """Links or peers that nothing can be said about."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Peers, their links and their speed; the same for all."""

    peers: int
    mbit_s: float
    """Of a link, in each direction."""
    rtt_s: float = 0.05
    """Between two peers, there and back."""
    step_s: float
    """Of an inner step."""
    muon_step_s: float | None = None
    """Of one with Muon; None where it was not timed."""
    cores: float = 2.0
    """Processor cores that a peer has for a round."""

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            PlanError: when one is out of range.
        """
        if self.peers < 1:
            raise PlanError(f"expected at least one peer, got {self.peers}")
        if not 0 < self.mbit_s <= 1000 * LINK_MAX_GBIT_S:
            raise PlanError(f"expected a rate above 0 Mbit/s, got {self.mbit_s}")
        if not 0 <= self.rtt_s < math.inf:
            raise PlanError(f"expected a round trip of at least 0 s, got {self.rtt_s}")
        if not 0 < self.step_s < math.inf or not 0 < self.cores < math.inf:
            raise PlanError("expected a step time and a number of cores above 0")


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What one method will cost."""

    spec: str
    inner_steps: int
    """H; 1 for methods that send every step."""
    sent_bytes: int
    """Payload that a peer sends in a window, on average over the peers; it receives as much."""
    wire_bytes: int
    """All that it sends in a window: with headers, its share of the copy that the coordinator gets,
    and what peers tell each other all the time."""
    round_s: float
    """From the last peer's report to the certificate; of all fragments, one after the other."""
    lost_s: float
    """Of a window, in which no step is computed: encoding, applying, waiting."""
    utilisation: float
    """Share of the time in which steps are computed."""
    steps_per_s: float
    """With what is lost taken off."""
    memory_bytes: int
    """Of a peer at the worst moment, for parameters, optimizers and messages; without activations,
    the log and the libraries."""


def predict(method: Method, model: nn.Module, setting: Setting, *, inner_steps: int) -> Prediction:
    """What a method will cost.

    Args:
        method: with its codec.
        model: may lie on the meta device: only names and shapes are looked at.
        setting: peers and links.
        inner_steps: H; methods that send every step take 1.

    Raises:
        FragmentError: when the model can't be cut as the method wants.
        CodecError: when the codec can't encode such shapes.
    """
    inner_steps = 1 if method.every_step else inner_steps
    layout = Layout.of(model)
    fragments = fragments_of(method, layout)
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
        memory_bytes=memory_bytes(method, model, setting.peers),
    )


def fragments_of(method: Method, layout: Layout) -> tuple[Fragment, ...]:
    """The method's fragments; index tensors, as long as the model, are not filled."""
    with torch.device("meta"):
        return method.fragments(layout)


def body_bytes(method: Method, fragment: Fragment) -> int:
    """Length of a fragment's frames; an upper bound for codecs whose frames vary."""
    return sum(codec_of(method.codec, dims).wire_bytes(dims) for dims in fragment.pieces)


def sent_bytes(method: Method, fragment: Fragment, peers: int) -> float:
    """Payload that a peer sends for a fragment, on average over the peers.

    Cells go to the owners of their parts, and what the owners made of them to all others
    (`atoll.optim.reduction.cells`); by gossip, pseudo-gradient and weights go to one other.
    """
    if peers == 1:
        return 0.0
    if method.reduction == "pairs":  # with an odd number one rests
        return 2 * body_bytes(method, fragment) * (peers - peers % 2) / peers
    down = cells_of(method, fragment)
    up = replace(down, gathers=False, by_senders=False)
    both = up.max_body_bytes(1) + down.max_body_bytes(peers)
    if method.rank:  # two frames a cell each way, each with its length
        both += 2 * LENGTH.size * len(down)
    return both * (peers - 1) / peers


def _copy_bytes(method: Method, fragments: Sequence[Fragment], peers: int) -> float:
    """A peer's share of the updates that leaders send to the coordinator."""
    if not method.logged:
        return 0.0
    return sum(cells_of(method, f).max_body_bytes(peers) for f in fragments) / peers


def cpu_s(method: Method, fragment: Fragment, sent: float, setting: Setting) -> float:
    """Seconds of one processor that a peer needs within a round in which it sends so many bytes."""
    if setting.peers == 1:
        return 0.0
    streams_s = (
        CPU_S_PER_ROUND
        + CPU_S_PER_CELL * len(fragment.pieces)
        + CPU_S_PER_GB * sent * WIRE_OVERHEAD / 1e9
        + CPU_SHARE_PACED * link_s(sent, setting)
    )
    return streams_s + fragment.numel * timed(method).inside_s(setting.peers)


def link_s(sent: float, setting: Setting) -> float:
    """Seconds in which a link carries so many bytes of payload."""
    return sent * WIRE_OVERHEAD * 8 / (setting.mbit_s * 1e6)


def round_s(sent: float, setting: Setting, cpu: float) -> float:
    """Seconds of one reduction.

    Args:
        sent: bytes of payload that a peer sends.
        setting: peers and links.
        cpu: as `cpu_s` gives.
    """
    if setting.peers == 1:
        return 0.0
    return ROUND_TRIPS * setting.rtt_s + max(link_s(sent, setting), cpu / setting.cores)


def _beside_s(method: Method) -> float:
    """Of a value: what is encoded before a round and applied after it, beside the trainer."""
    work = timed(method)
    return work.offer_s + work.apply_s


def _lost_s(
    method: Method,
    fragments: Sequence[Fragment],
    rounds_s: Sequence[float],
    setting: Setting,
    window_s: float,
) -> float:
    """Of a window: what its rounds take beyond their delay or beyond it, and the trainer's part."""
    hidden_s = method.hidden_steps(round(window_s / setting.step_s)) * setting.step_s
    beside_s = _beside_s(method) / min(1.0, setting.cores)
    travels_s = [s + f.numel * beside_s for s, f in zip(rounds_s, fragments, strict=True)]
    late_s = sum(max(0.0, seconds - hidden_s) for seconds in travels_s)
    trainer_s = sum(SETTLE_S + f.numel * VALUE_S for f in fragments)
    return max(late_s, sum(travels_s) - window_s) + trainer_s


def memory_bytes(method: Method, model: nn.Module, peers: int) -> int:
    """Bytes of a peer when a round's result is applied, the worst moment.

    Training takes parameters, gradients and the inner optimizer's moments. Syncing takes the
    common state twice (an update is applied in new buffers), the residual, and of each fragment
    under way what was handed in, what its inclusion would add to the residual, the local values
    and the decoded update; the order of values that are sent in tiles; and frames. Within 3% of
    what five methods took at 31M parameters (docs/benchmarks/plan.md).
    """
    layout = Layout.of(model)
    vectors = 3.0 + _moments(method, model) / layout.numel  # parameters, gradients, temporaries
    vectors += 2 * 2  # synced parameters and outer momentum, old and new
    vectors += 2  # local values, flat, and what is sent
    vectors += 2 if method.residual > 0 else 0  # residual, and its change
    vectors += 1 if method.rank else 0  # what factors are made of
    vectors += 2  # local values as handed in, and the update
    vectors += method.window_vectors
    fragments = fragments_of(method, layout)
    body = sum(body_bytes(method, fragment) for fragment in fragments)
    frames = peers if method.reduction == "gather" else 2
    return round(4 * layout.numel * vectors) + frames * body


def _moments(method: Method, model: nn.Module) -> int:
    """Values that the inner optimizer keeps."""
    if method.inner == "muon":
        groups = muon_groups(model, weight_decay=0.0)
        return sum(
            (1 if group["kind"] == "muon" else 2) * param.numel()
            for group in groups
            for param in group["params"]
        )
    return {"adamw": 2, "lion": 1, "sgd": 0}[method.inner] * Layout.of(model).numel


def windows_of(spec: RunSpec, model: nn.Module) -> Timetable:
    """The windows of a run by position, over so many fragments as its method cuts the model in."""
    return spec.timetable(len(fragments_of(spec.method(), Layout.of(model))))


def bare_model(spec: RunSpec) -> nn.Module:
    """The model of a run without its weights; a custom one is built whole, on the CPU.

    Raises:
        ModelError: the preset, the overrides or the custom model are not usable.
        DataError: the tokenizer can't be read.
    """
    vocab_size = data.open_tokenizer(spec.data.tokenizer).vocab_size
    if spec.model.custom is not None:
        return build_model(spec, vocab_size)
    with torch.device("meta"):
        return models.Decoder(
            models.preset(
                spec.model.preset,
                spec.model.overrides,
                vocab_size=vocab_size,
                seq_len=spec.data.seq_len,
            )
        )
