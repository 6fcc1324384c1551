"""Reduce the contributions of a group to one update: the arithmetic of a round in one process.

    MeanReduction      owners of parts encode the weighted mean once; all decode the same frames
    GatherReduction    everyone gets everyone's frames and takes the mean of what they decode to
    LowRankReduction   PowerSGD: means of P, then of Q, and a product that all compute alike

Weights, caps, clip factors and error feedback are the ones of a real round (docs/protocol.md).
Bytes are the lengths of real frames: what each worker would have sent and received as payload.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atoll.optim.log.replay import residual_of
from atoll.optim.methods.base import Method
from atoll.optim.reducer import Contribution
from atoll.optim.reduction.cells import Cells, Term, body_of
from atoll.optim.reduction.feedback import Offer
from atoll.optim.reduction.lowrank import Factors, LowRankCells
from atoll.optim.reduction.weights import cap_weights, clip_factors, work_weight
from atoll.optim.state.fragments import Fragment, decode_pieces, encode_pieces
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import OuterState


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """The result of one reduction."""

    update_F: Tensor  # noqa: N815
    """The decoded update that everyone applies."""

    body: bytes = b""
    """Its frames, where the next state holds more of them than their sum."""

    body_bytes: int
    """Length of the update."""

    wire_bytes: int
    """Payload that all workers together sent."""

    clipped: int = 0
    """Contributions whose norm was clipped."""


class Reduction(ABC):
    """Reduces one fragment of a group; keeps what its members' codecs lost."""

    def __init__(self, method: Method, layout: Layout, fragment: Fragment, size: int) -> None:
        """Start with no residual.

        Raises:
            ValueError: when feedback does not go with the codec.
        """
        self.method = method
        self.fragment = fragment
        self.size = size

    def weights(self, contributions: Sequence[Contribution]) -> list[float]:
        """Capped weights; all 0 when nothing counts."""
        rule = self.method.weights
        return cap_weights([work_weight(c.tokens, c.steps, rule) for c in contributions])

    @abstractmethod
    def reduce(
        self, contributions: Sequence[Contribution], weights: Sequence[float], state: OuterState
    ) -> Reduced:
        """Reduce all contributions to one update of a state; their weights must not all be 0."""

    @abstractmethod
    def member_state(self, index: int) -> dict[str, Any]:
        """State of one member between rounds."""

    @abstractmethod
    def load_member_state(self, index: int, state: Mapping[str, Any]) -> None:
        """Take over what `member_state` gave."""


class WithFeedback(Reduction):
    """A reduction whose members keep residuals by `Feedback`."""

    def __init__(self, method: Method, layout: Layout, fragment: Fragment, size: int) -> None:
        super().__init__(method, layout, fragment, size)
        self.feedback = [residual_of(method, fragment) for _ in range(size)]

    def member_state(self, index: int) -> dict[str, Any]:
        """The member's residual."""
        return self.feedback[index].state_dict()

    def load_member_state(self, index: int, state: Mapping[str, Any]) -> None:
        """Take over a residual.

        Raises:
            ValueError: when it has another length.
        """
        self.feedback[index].load_state_dict(state)

    def _offers(
        self, contributions: Sequence[Contribution], weights: Sequence[float]
    ) -> tuple[list[Offer], list[float]]:
        """Encoded contributions, and the share of each in the sum: weight x clip factor."""
        offers = [
            feedback.offer(c.delta_N, weight)
            for feedback, c, weight in zip(self.feedback, contributions, weights, strict=True)
        ]
        return offers, self._shares(offers, contributions, weights)

    def _shares(
        self,
        offers: Sequence[Offer],
        contributions: Sequence[Contribution],
        weights: Sequence[float],
    ) -> list[float]:
        if self.method.clip_at == 0:
            return list(weights)
        norms = [o.norm if weight > 0 else 0.0 for o, weight in zip(offers, weights, strict=True)]
        steps = [c.steps for c in contributions]
        factors = clip_factors(norms, steps, at=self.method.clip_at)
        return [weight * factor for weight, factor in zip(weights, factors, strict=True)]

    def _mean(
        self, offers: Sequence[Offer], shares: Sequence[float], total_weight: float
    ) -> Tensor:
        sum_F = torch.zeros(self.fragment.numel)
        for offer, share in zip(offers, shares, strict=True):
            if share > 0:
                d_F = decode_pieces(self.method.codec, offer.frames, self.fragment.pieces)
                sum_F += d_F * share
        return sum_F / total_weight

    def _settle(
        self, offers: Sequence[Offer], shares: Sequence[float], update_F: Tensor | None = None
    ) -> None:
        everywhere = torch.ones(len(self.fragment.pieces), dtype=torch.bool)
        for feedback, offer, share in zip(self.feedback, offers, shares, strict=True):
            feedback.settle(offer, everywhere, weight=share, update_F=update_F)


class MeanReduction(WithFeedback):
    """The dense shape: a mean that the owners of its parts encode once."""

    def reduce(
        self, contributions: Sequence[Contribution], weights: Sequence[float], state: OuterState
    ) -> Reduced:
        offers, shares = self._offers(contributions, weights)
        mean_F = self._mean(offers, shares, sum(weights))
        pieces = self.fragment.pieces
        frames = encode_pieces(self.method.codec, mean_F, pieces)
        update_F = decode_pieces(self.method.codec, frames, pieces)
        self._settle(offers, shares)
        for index, feedback in enumerate(self.feedback):
            part = self._part(index)
            feedback.owner_credit(part, (mean_F[part] - update_F[part]) * sum(weights))
        body_bytes = sum(map(len, frames))
        others = self.size - 1  # each frame goes to its owner, each mean back to all others
        return Reduced(
            update_F=update_F,
            body_bytes=body_bytes,
            wire_bytes=others * (body_bytes + sum(map(len, offers[0].frames))),
            clipped=sum(s < w for s, w in zip(shares, weights, strict=True)),
        )

    def _part(self, index: int) -> slice:
        """The values that one member owns: whole pieces, as evenly as they go."""
        slices = self.fragment.slices
        start, stop = (len(slices) * i // self.size for i in (index, index + 1))
        if start == stop:
            return slice(0, 0)
        return slice(slices[start].start, slices[stop - 1].stop)


class GatherReduction(WithFeedback):
    """The sparse shape: everyone decodes everyone's frames; nothing is encoded again.

    The mean divides by the weights of all peers, or, where the method says so, of those that
    sent a value: then what one peer alone selected counts in full.
    """

    def __init__(self, method: Method, layout: Layout, fragment: Fragment, size: int) -> None:
        """As `Reduction`.

        Raises:
            CodecError: when the method divides by senders and the codec can't tell who they are.
        """
        super().__init__(method, layout, fragment, size)
        self.cells = Cells(
            codec=method.codec,
            fragment=fragment,
            gathers=True,
            by_senders=method.divides_by == "senders",
        )

    def reduce(
        self, contributions: Sequence[Contribution], weights: Sequence[float], state: OuterState
    ) -> Reduced:
        offers, shares = self._offers(contributions, weights)
        frames = [
            self.cells.encode_terms(
                [
                    Term(share=share, weight=weight, frame=offer.frames[index])
                    for offer, share, weight in zip(offers, shares, weights, strict=True)
                    if weight > 0
                ]
            )
            for index in range(len(self.cells))
        ]
        update_F = torch.empty(self.fragment.numel)
        self.cells.decode_reduced_all(0, frames, update_F)
        self._settle(offers, shares)
        body_bytes = sum(len(frame) for offer in offers for frame in offer.frames)
        return Reduced(
            update_F=update_F,
            body_bytes=body_bytes,
            wire_bytes=(self.size - 1) * body_bytes,
            clipped=sum(s < w for s, w in zip(shares, weights, strict=True)),
        )


class LowRankReduction(WithFeedback):
    """PowerSGD (arXiv:1905.13727) as PyTorch's DDP hook does it, from the first step on.

    Each worker's error is its input less the common output; Q stays warm in the common state
    (`atoll.optim.reduction.lowrank`). Departures: the first Q is a fixed hash, not drawn at
    random; weights
    may differ; the factors may travel in another codec than fp32.
    """

    def __init__(self, method: Method, layout: Layout, fragment: Fragment, size: int) -> None:
        """As `Reduction`.

        Raises:
            CodecError: when the codec is not `powersgd`.
        """
        super().__init__(method, layout, fragment, size)
        self.cells = LowRankCells(codec=method.codec, fragment=fragment)

    def reduce(
        self, contributions: Sequence[Contribution], weights: Sequence[float], state: OuterState
    ) -> Reduced:
        offers, shares = self._offers(contributions, weights)
        senders = [
            (Factors(self.cells, state, offer.frames), share)
            for offer, share, weight in zip(offers, shares, weights, strict=True)
            if weight > 0
        ]
        frames = [self._cell(index, senders, sum(weights)) for index in range(len(self.cells))]
        update_F = torch.empty(self.fragment.numel)
        for index, cell in enumerate(self.fragment.slices):
            self.cells.decode_reduced(index, frames[index], update_F[cell])
        self._settle(offers, shares, update_F)
        body_bytes = sum(map(len, frames))
        return Reduced(
            update_F=update_F,
            body=body_of(frames),
            body_bytes=body_bytes,
            wire_bytes=2 * (self.size - 1) * body_bytes,
            clipped=sum(s < w for s, w in zip(shares, weights, strict=True)),
        )

    def _cell(self, index: int, senders: Sequence[tuple[Factors, float]], total: float) -> bytes:
        """A cell's frame: the first exchange, then the second."""
        first, second = self.cells.first, self.cells.second
        sent = [(first.decode_sent(index, each.first(index)), share) for each, share in senders]
        p_frame = first.encode_mean(index, _weighted(sent) / total)
        sent = [
            (second.decode_sent(index, each.second(index, p_frame)), share)
            for each, share in senders
        ]
        return p_frame + second.encode_mean(index, _weighted(sent) / total)


def _weighted(vectors: Sequence[tuple[Tensor, float]]) -> Tensor:
    total = torch.zeros_like(vectors[0][0])
    for vector, share in vectors:
        total += vector * share
    return total


SHAPES: dict[str, type[Reduction]] = {
    "mean": MeanReduction,
    "gather": GatherReduction,
    "low-rank": LowRankReduction,
}
"""The reductions that end in a state that all members share."""
