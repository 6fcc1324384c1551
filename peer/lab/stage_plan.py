"""Predict what a pipeline costs: bytes of a token on each link, memory and speed of each stage.

A pipeline is as fast as its slowest stage. That is, for each stage, the lesser of

    compute = peers / (seconds a token of the whole model x share of the stage x passes)
    link    = peers x rate / (bytes a token, in the busier direction)

The share follows from the products with parameters (`Slices.flops_per_token`); a stage but the last
computes its forward pass twice. Bytes are the exact lengths of the codecs' frames, the ids, a
header, and the rounds of the stage. The model does not include relays, a microbatch that is sent
twice, peers or links that differ, or the wait for the slowest peer of a round.

Without staleness a peer takes a step when all microbatches of the step have come back, so it waits
for the last one:

    step = microbatches x microbatch / rate of the pipeline + its way there and back

# R tokens of a microbatch, D width
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from atoll.coordinator.run.spec import RunSpec
from atoll.optim.state.layout import Layout
from atoll.peer.daemon.consent import needs_of
from atoll.peer.lab.plan import WIRE_OVERHEAD, PlanError, Setting, sent_bytes, sizes_of
from atoll.peer.pipeline.messages import tokens_bytes
from atoll.peer.training.data import load as data
from atoll.peer.training.opening import slices_by_stage, slices_of, stage_sizes
from atoll.peer.training.permission import Allowed
from atoll.peer.training.stage_learner import codecs_of

HEADER_BYTES = 400  # of a microbatch in one direction, with the answer: names, digests, a path
# Of forward and backward pass, of which the backward is two thirds.
WITH_RECOMPUTATION = 4 / 3
TRIPS = 1.5  # of a microbatch over a link: header and answer, then the payload one way

Bound = Literal["compute", "link"]


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """Predicted cost of one stage; bytes are those of one of its peers."""

    name: str
    first_slice: int
    last_slice: int
    peers: int
    params: int
    memory_bytes: int
    """Peak host memory of a peer that trains on its processor, without activations."""
    up_bytes_per_token: float
    """Sent for a token that goes through it: activations on, gradients back, its rounds."""
    down_bytes_per_token: float
    round_bytes: int
    """Payload that a peer sends in a round of the stage."""
    compute_tokens_per_s: float
    """Tokens that all its peers together can compute."""
    link_tokens_per_s: float
    """Tokens that all their links together can carry."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens that the stage can take."""
        return min(self.compute_tokens_per_s, self.link_tokens_per_s)

    @property
    def bound(self) -> Bound:
        """Which of the two it is that bounds the stage."""
        return "link" if self.link_tokens_per_s < self.compute_tokens_per_s else "compute"


@dataclass(frozen=True, kw_only=True)
class PipelineCost:
    """Predicted cost of a pipeline."""

    stages: tuple[StageCost, ...]
    forward_bytes_per_token: float
    """On each link between two stages, on the way out: activations and ids."""
    backward_bytes_per_token: float
    way_s: float
    """Seconds of a microbatch there and back, if no queue delays it."""
    tokens_per_s: float
    """Of all peers together, at most."""
    waiting_tokens_per_s: float
    """The same if each step waits for its microbatches; without staleness."""

    @property
    def binds(self) -> StageCost:
        """The slowest stage."""
        return min(self.stages, key=lambda stage: stage.tokens_per_s)


def predict_pipeline(spec: RunSpec, setting: Setting) -> PipelineCost:
    """Predict the cost of a run with stages.

    Args:
        spec: of the run.
        setting: equal peers and links; a step is one of the whole model on one peer.

    Raises:
        PlanError: there are fewer peers than stages.
        ModelError: the model is not usable, or cannot be cut into stages.
    """
    vocab_size = data.open_tokenizer(spec.data.tokenizer).vocab_size
    known = slices_of(spec, vocab_size, Allowed.everything_in(spec))  # a file of one's own
    flops = [size for size, _ in stage_sizes(spec, known)]
    token_s = compute_s(flops, setting.step_s / spec.step_tokens)
    forward, backward = link_bytes(spec, known.shape.width)
    loads = loads_of(len(flops), forward, backward)
    peer_s = [
        max(computes_s, max(load) / _bytes_per_s(setting))
        for computes_s, load in zip(token_s, loads, strict=True)
    ]
    stages, runs = [], list(slices_by_stage(spec, known).values())
    for index, peers in enumerate(spread(setting.peers, peer_s)):
        run = runs[index]
        layout = known.layout(run)
        rounds = round_bytes(spec, layout, peers)
        of_rounds = rounds * WIRE_OVERHEAD / (spec.outer.inner_steps * spec.step_tokens)
        up, down = (load + of_rounds for load in loads[index])
        stages.append(
            StageCost(
                name=spec.modules[index],
                first_slice=run[0],
                last_slice=run[-1],
                peers=peers,
                params=layout.numel,
                memory_bytes=needs_of(spec, layout).peer_memory,
                up_bytes_per_token=up,
                down_bytes_per_token=down,
                round_bytes=rounds,
                compute_tokens_per_s=peers / token_s[index],
                link_tokens_per_s=peers * _bytes_per_s(setting) / max(up, down),
            )
        )
    return _with_waits(spec, setting, stages, token_s, forward, backward)


def loads_of(stages: int, forward: float, backward: float) -> list[tuple[float, float]]:
    """Return the bytes of a token that a peer of each stage sends and receives, without rounds."""
    *_, last = range(stages)
    return [
        (
            forward * (index < last) + backward * (index > 0),
            forward * (index > 0) + backward * (index < last),
        )
        for index in range(stages)
    ]


def compute_s(flops: Sequence[int], token_s: float) -> list[float]:
    """Return the seconds that a peer of each stage computes for a token.

    Args:
        flops: of each stage's forward pass.
        token_s: seconds for a token of the whole model, forward and backward.
    """
    *_, last = range(len(flops))
    passes = [1.0 if index == last else WITH_RECOMPUTATION for index in range(len(flops))]
    total = sum(flops)
    return [token_s * size / total * factor for size, factor in zip(flops, passes, strict=True)]


def spread(peers: int, token_s: Sequence[float]) -> list[int]:
    """Return how many equal peers serve each stage, so that the slowest is as fast as can be.

    Args:
        peers: of the run.
        token_s: seconds that a peer of each stage needs for a token.

    Raises:
        PlanError: there are fewer peers than stages.
    """
    if peers < len(token_s):
        raise PlanError(
            f"expected at least {len(token_s)} peers, one a stage, got {peers}; pass more --peers "
            "or reduce topology.stages"
        )
    counts = [1] * len(token_s)
    for _ in range(peers - len(token_s)):
        slowest = max(range(len(counts)), key=lambda index: token_s[index] / counts[index])
        counts[slowest] += 1
    return counts


def link_bytes(spec: RunSpec, width: int) -> tuple[float, float]:
    """Return the bytes of a token on a link between two stages, on the way out and back."""
    codecs, sequences = codecs_of(spec), spec.inner.batch_size
    rows = sequences * spec.data.seq_len
    out = codecs.forward.frame_bytes(rows, width) + tokens_bytes(rows, sequences) + HEADER_BYTES
    back = codecs.backward.frame_bytes(rows, width) + HEADER_BYTES
    return out * WIRE_OVERHEAD / rows, back * WIRE_OVERHEAD / rows


def round_bytes(spec: RunSpec, layout: Layout, peers: int) -> int:
    """Return the payload that a peer of a stage sends in a window, on average."""
    method = spec.method()
    return round(sum(sent_bytes(method, f, peers) for f in sizes_of(method, layout)))


def _bytes_per_s(setting: Setting) -> float:
    return setting.mbit_s * 1e6 / 8


def _with_waits(
    spec: RunSpec,
    setting: Setting,
    stages: Sequence[StageCost],
    token_s: Sequence[float],
    forward: float,
    backward: float,
) -> PipelineCost:
    rows = spec.inner.batch_size * spec.data.seq_len
    links = len(stages) - 1
    travels_s = rows * (forward + backward) / _bytes_per_s(setting)
    way_s = rows * sum(token_s) + links * (2 * TRIPS * setting.rtt_s + travels_s)
    rate = min(stage.tokens_per_s for stage in stages)
    step_tokens = spec.step_tokens * stages[0].peers
    return PipelineCost(
        stages=tuple(stages),
        forward_bytes_per_token=forward,
        backward_bytes_per_token=backward,
        way_s=way_s,
        tokens_per_s=rate,
        waiting_tokens_per_s=step_tokens / (step_tokens / rate + way_s),
    )
