"""`co2`: local SGD whose reduction is one round late (arXiv:2401.16265).

    m = clamp(mu m + mean delta(t-1) / penalty, -clip, clip)        synced = synced - lr m

The next window begins at synced, so what a peer learned in window t returns to it with the
reduction, a window later. Without staleness, penalty and clipping it is SlowMo-style local SGD
(arXiv:1910.00643) for a constant inner rate.

Departures: the penalty is a constant, as in the published code; the paper computes it from the
staleness gap of the iterates. The published code calls `torch.clamp` and drops its result, so its
momentum is never clipped; here it is, value by value. Momentum is not divided by the inner rate.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.optim.methods.base import Method, StateFormat, register, require
from atoll.optim.methods.diloco import DiLoCo
from atoll.optim.methods.windows import Window
from atoll.optim.methods.worker import Worker
from atoll.optim.reducer import Commit, Reducer
from atoll.optim.state import vectors
from atoll.optim.state.fragments import Fragment
from atoll.optim.state.outer_state import OuterState
from atoll.optim.state.outer_step import heavy_ball


class CO2(Worker):
    """Begins each window at the common parameters, without waiting for the last one's reduction.

    That reduction is taken at the end of the window. Workers that are one window late, but begin
    elsewhere, override `_next_start`.

    start    where the open window began; delta = start - local
    owed     deltas that were left out of their entry; they are in the next one
    """

    saves_drift: ClassVar[bool] = False

    def _restart(self) -> None:
        self._start_N: Tensor = self.places.held(self.model, self.synced_N)
        self._sent_N: Tensor = torch.zeros_like(self.synced_N)
        self._owed_N: Tensor = torch.zeros_like(self.synced_N)

    def _next_start(self) -> Tensor:
        """Return where the next window begins, right after the last one was handed in."""
        return self.synced_N

    def _delta(self, index: int, local_F: Tensor) -> Tensor:
        self._sent_N = vectors.empty(len(local_F))
        return torch.sub(self._start_N, local_F, out=self._sent_N).add_(self._owed_N)

    def _handed_in(self, fragment: Fragment) -> None:
        self._hold_submitted()  # before local is another
        self._owed_N.zero_()  # all of it is in what was just sent
        self._start_N = self.places.held(self.model, self._next_start())
        self.places.load_(self.model, self._start_N)

    def _follow(self, commit: Commit, new_F: Tensor, window: Window) -> None:
        """Keep what was left out; local moves when the window has ended."""
        if not commit.settles:
            return
        # Local was reset since, so unlike a drift it holds nothing of what was left out.
        missing = torch.ones(len(self.fragments[0].pieces), dtype=torch.bool)
        if commit.included is not None:
            missing = ~commit.included
        for piece, left_out in zip(self.fragments[0].slices, missing.tolist(), strict=True):
            if left_out:
                self._owed_N[piece] += self._sent_N[piece]

    def _own_state(self) -> dict[str, Any]:
        return {
            "start_N": self.places.common(self._start_N),
            "sent_N": self.places.common(self._sent_N),
            "owed_N": self.places.common(self._owed_N),
        }

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        self._start_N = self.places.own(state["start_N"]).clone()
        self._sent_N = self.places.own(state["sent_N"]).clone()
        self._owed_N = self.places.own(state["owed_N"]).clone()


@register
@dataclass(frozen=True, kw_only=True)
class CO2Method(Method):
    """CO2; the defaults are those of the published code."""

    name: ClassVar[str] = "co2"
    worker_class: ClassVar[type[Worker]] = CO2
    moves_values_apart: ClassVar[bool] = True

    lr: float = 1.0
    """Outer learning rate."""

    momentum: float = 0.5
    """Outer momentum."""

    state: StateFormat = "fp32"
    """Format of the momentum: fp32, or bf16 in half the memory. Parameters are fp32."""

    penalty: float = 1.0
    """Staleness gap penalty: pseudo-gradients are divided by it."""

    clip: float = math.inf  # the published code never clips
    """Largest magnitude of a momentum."""

    stale: bool = True
    """Take a reduction one window late, instead of waiting for it."""

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            MethodError: when one is out of range.
        """
        super().__post_init__()
        require(1 <= self.penalty < math.inf, "a penalty of at least 1", self.penalty)
        require(self.clip > 0, "a clip above 0", self.clip)

    def apply(
        self, state: OuterState, update_F: Tensor, *, fragment: Fragment, lr: float, momentum: float
    ) -> OuterState:
        """Heavy-ball momentum, penalised and clipped."""
        return heavy_ball(
            state,
            update_F,
            lr=lr,
            momentum=momentum,
            scale=1.0 / self.penalty,
            clip=self.clip,
            fragment=fragment,
        )

    def hidden_steps(self, inner_steps: int) -> int:
        """Return H if reductions are stale, else 0."""
        return inner_steps if self.stale else 0

    @property
    def window_vectors(self) -> int:
        """Return the vectors kept: the start of the window, what was sent and what is owed."""
        return 3 if self.stale else 0

    def worker(
        self,
        model: nn.Module,
        inner: Optimizer | Sequence[Optimizer],
        reducer: Reducer,
        *,
        inner_steps: int,
    ) -> Worker:
        """Join as `CO2`, or without staleness as `DiLoCo`."""
        if self.stale:
            return super().worker(model, inner, reducer, inner_steps=inner_steps)
        return DiLoCo(model, inner, reducer, inner_steps=inner_steps, method=self)
