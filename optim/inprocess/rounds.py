"""Rounds without their network, for workers that share one process and one state.

Codec on both legs, error feedback at senders and owners, weights, caps, clip factors and the
outer step are the ones of a real round (docs/protocol.md), so what trains here trains there.
Bytes are the lengths of real frames: what each worker would have sent and received as payload.

    MeanReduction      owners of parts encode the weighted mean once; all decode the same frames
    GatherReduction    everyone gets everyone's frames and takes the mean of what they decode to
    LowRankReduction   PowerSGD: means of P, then of Q, and a product that all compute alike
    InProcessGroup     for the methods with a log; `atoll.optim.inprocess.gossip` has the other kind
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from atoll.optim.inprocess.gossip import GossipGroup
from atoll.optim.inprocess.group import GroupError, Misses, WorkerGroup, chosen, common_lr, nobody
from atoll.optim.log.replay import residual_of
from atoll.optim.methods.base import Method
from atoll.optim.reducer import Commit, Contribution, Residual
from atoll.optim.reduction.cells import Cells, Term, body_of
from atoll.optim.reduction.contribution import (
    Offer,
    admitted_clips,
    cap_weights,
    carried_norm,
    work_weight,
)
from atoll.optim.reduction.lowrank import Factors, LowRankCells
from atoll.optim.state.fragments import Fragment
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import OuterState
from atoll.optim.state.pieces import decode_pieces, encode_pieces


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """The result of one reduction."""

    update_F: Tensor  # noqa: N815
    """The decoded update that everyone applies."""

    body: bytes = b""
    """Its frames, if the next state holds more of them than their sum."""

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
        self.feedback: list[Residual] = [residual_of(method, fragment) for _ in range(size)]
        self.carried = 0.0
        """the norm that bounds clip factors from below, as entries carry it"""

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
            feedback.offer(c.delta, weight)
            for feedback, c, weight in zip(self.feedback, contributions, weights, strict=True)
        ]
        return offers, self._shares(offers, contributions, weights)

    def _shares(
        self,
        offers: Sequence[Offer],
        contributions: Sequence[Contribution],
        weights: Sequence[float],
    ) -> list[float]:
        norms = [offer.norm for offer in offers]
        steps = [max(1, c.steps) for c in contributions]
        factors = admitted_clips(
            weights, norms, steps, at=self.method.clip_at, carried=self.carried
        )
        counting = [norm for norm, weight in zip(norms, weights, strict=True) if weight > 0]
        self.carried = carried_norm(self.carried, counting)
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
            # The encoding's loss stays with the owner, as the mass that it stands for.
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

    The mean divides by the weights of all peers, or, if the method asks for it, of those that
    sent a value: then a value that one peer alone selected counts in full.
    """

    def __init__(self, method: Method, layout: Layout, fragment: Fragment, size: int) -> None:
        """Take the arguments of `Reduction`.

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
            wire_bytes=(self.size - 1) * body_bytes,  # each worker's frames go to all others
            clipped=sum(s < w for s, w in zip(shares, weights, strict=True)),
        )


class LowRankReduction(WithFeedback):
    """PowerSGD (arXiv:1905.13727) as PyTorch's DDP hook does it, from the first step on.

    Each worker's error is its input less the common output; Q stays warm in the common state
    (`atoll.optim.reduction.lowrank`). Departures: the first Q is a fixed hash, not drawn at
    random; weights may differ; the factors may travel in another codec than fp32.
    """

    def __init__(self, method: Method, layout: Layout, fragment: Fragment, size: int) -> None:
        """Take the arguments of `Reduction`.

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
            # Both factors go to their owners, both means back to all others.
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


SHAPES: dict[str, type[WithFeedback]] = {
    "mean": MeanReduction,
    "gather": GatherReduction,
    "low-rank": LowRankReduction,
}
"""The reductions that end in a state that all members share."""


class InProcessGroup(WorkerGroup):
    """Workers of one process that share one state, as replicas of a log do."""

    def __init__(
        self,
        size: int,
        method: Method | str = "diloco",
        *,
        misses: Misses = nobody,
        inner_steps: int = 30,
        rounds: int = 0,
        threads: bool = False,
        **options: object,
    ) -> None:
        """Take the arguments of `WorkerGroup`.

        Raises:
            GroupError: for a method by gossip.
        """
        super().__init__(
            size,
            method,
            misses=misses,
            inner_steps=inner_steps,
            rounds=rounds,
            threads=threads,
            **options,
        )
        if self.method.reduction not in SHAPES:
            raise GroupError(f"expected a method with a common state, got {self.method.name}")
        self._state: OuterState | None = None
        self._seats: tuple[int, ...] = ()
        self._reductions: list[WithFeedback] = []

    @property
    def state(self) -> OuterState:
        """The state that all workers share.

        Raises:
            GroupError: when no worker has started.
        """
        if self._state is None:
            raise GroupError("expected a worker to have started; give a member to a method first")
        return self._state

    def state_of(self, index: int) -> OuterState:
        """The state that all workers share."""
        return self.state

    def _begin(self, layout: Layout, params_N: Tensor) -> None:
        self._state = self.method.genesis(layout, params_N)

    def _seat(self, index: int) -> None:
        self._share_out()

    def _unseat(self, index: int) -> None:
        self._share_out()

    def _share_out(self) -> None:
        """Share the parts out among those present; each keeps its residual."""
        shape, layout = SHAPES[self.method.reduction], self.state.layout
        before, seated = self._reductions, self._seats
        self._seats = self.present
        self._reductions = [
            shape(self.method, layout, fragment, len(self._seats)) for fragment in self._fragments
        ]
        for fragment, reduction in enumerate(self._reductions):
            for seat, index in enumerate(self._seats):
                if (keep := self._members[index].keep) is not None:
                    reduction.feedback[seat] = keep(fragment)
        for old, new in zip(before, self._reductions, strict=False):
            new.carried = old.carried
            kept = {i for i in self._seats if self._members[i].keep is not None}
            for index in set(seated).intersection(self._seats) - kept:
                new.load_member_state(
                    self._seats.index(index), old.member_state(seated.index(index))
                )

    def _set_state(self, index: int, state: OuterState) -> None:
        self._state = state

    def _reduce(self, fragment: int, contributions: Mapping[int, Contribution]) -> None:
        position = self.state.position
        missing = {index for index in contributions if self._misses(position, index)}
        weighed = [
            replace(c, tokens=0) if index in missing else c for index, c in contributions.items()
        ]
        update_F = self._update(fragment, weighed)
        counted = update_F is not None
        everywhere = torch.ones(len(self._fragments[fragment].pieces), dtype=torch.bool)
        commit = Commit(
            fragment=fragment,
            position=self.state.position,
            params_N=self.state.params_N,
            included=everywhere if counted else None,
            members=len(contributions) - len(missing) if counted else 0,
        )
        left_out = replace(commit, included=None)
        self._settle(
            fragment, {i: left_out if i in missing else commit for i in sorted(contributions)}
        )

    def _update(self, fragment: int, contributions: Sequence[Contribution]) -> Tensor | None:
        """Advance the state; None if nothing counts and it keeps its bits."""
        reduction = self._reductions[fragment]
        weights = reduction.weights(contributions)
        if sum(weights) == 0:
            self._state = self.state.at(self.state.position + 1)
            self._count()
            return None
        before = self.state
        reduced = reduction.reduce(contributions, weights, before)
        lr, momentum = self.method.scalars(common_lr(contributions))
        self._state = self.method.apply(
            before,
            reduced.update_F,
            fragment=self._fragments[fragment],
            lr=lr,
            momentum=momentum,
        )
        if isinstance(reduction, LowRankReduction):
            reduction.cells.keep_warm(before, self._state, reduced.body)
        self._count(
            clipped=reduced.clipped,
            body_bytes=reduced.body_bytes,
            wire_bytes=reduced.wire_bytes,
        )
        return reduced.update_F

    def _member_state(self, index: int, fragment: int) -> dict[str, Any]:
        return self._reductions[fragment].member_state(self._seats.index(index))

    def _load_member_state(self, index: int, fragment: int, state: Mapping[str, Any]) -> None:
        self._reductions[fragment].load_member_state(self._seats.index(index), state)


def in_process(
    size: int,
    method: Method | str,
    *,
    misses: Misses = nobody,
    inner_steps: int = 30,
    rounds: int = 0,
    threads: bool = False,
    **options: object,
) -> WorkerGroup:
    """The group for a method: with a common state, or by gossip.

    Raises:
        ValueError: as `WorkerGroup`.
    """
    method = chosen(method, options)
    kind = GossipGroup if method.reduction == "pairs" else InProcessGroup
    return kind(
        size, method, misses=misses, inner_steps=inner_steps, rounds=rounds, threads=threads
    )
