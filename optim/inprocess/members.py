"""A round's arithmetic without its network, for workers that share one process and one state.

Codec on both legs, error feedback at senders and owners, weights, caps, clip factors and the
outer step are the ones of a real round, so what trains here trains there.

    InProcessGroup   for the methods with a log; `atoll.optim.inprocess.gossip` has the other kind
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from atoll.optim.inprocess.gossip import GossipGroup
from atoll.optim.inprocess.group import GroupError, Misses, WorkerGroup, chosen, common_lr, nobody
from atoll.optim.inprocess.reduction import SHAPES, LowRankReduction, Reduction
from atoll.optim.methods.base import Method
from atoll.optim.reducer import Commit, Contribution
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import OuterState


class InProcessGroup(WorkerGroup):
    """Workers of one process that share one state, as replicas of a log do."""

    def __init__(
        self,
        size: int,
        method: Method | str = "diloco",
        *,
        misses: Misses = nobody,
        **options: object,
    ) -> None:
        """As `WorkerGroup`.

        Raises:
            GroupError: for a method by gossip.
        """
        super().__init__(size, method, misses=misses, **options)
        if self.method.reduction not in SHAPES:
            raise GroupError(f"expected a method with a common state, got {self.method.name}")
        self._state: OuterState | None = None
        self._seats: tuple[int, ...] = ()
        self._reductions: list[Reduction] = []

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
        for old, new in zip(before, self._reductions, strict=False):
            for index in set(seated).intersection(self._seats):
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
        """Move the state on; None where nothing counts and it keeps its bits."""
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
    size: int, method: Method | str, *, misses: Misses = nobody, **options: object
) -> WorkerGroup:
    """The group for a method: with a common state, or by gossip.

    Raises:
        ValueError: as `WorkerGroup`.
    """
    method = chosen(method, options)
    kind = GossipGroup if method.reduction == "pairs" else InProcessGroup
    return kind(size, method, misses=misses)
