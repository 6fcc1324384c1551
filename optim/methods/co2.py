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
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.optim.methods.base import Method, require, require_outer
from atoll.optim.methods.registry import register
from atoll.optim.reducer import Reducer
from atoll.optim.state.fragments import Fragment
from atoll.optim.state.outer_state import OuterState
from atoll.optim.state.outer_step import heavy_ball
from atoll.optim.workers.diloco import DiLoCo
from atoll.optim.workers.overlapped import Overlapped
from atoll.optim.workers.worker import Worker


@register
@dataclass(frozen=True, kw_only=True)
class CO2Method(Method):
    """CO2; the defaults are those of the published code."""

    name: ClassVar[str] = "co2"

    lr: float = 1.0
    """Outer learning rate."""

    momentum: float = 0.5
    """Outer momentum."""

    penalty: float = 1.0
    """Staleness gap penalty: pseudo-gradients are divided by it."""

    clip: float = math.inf
    """Largest magnitude of a momentum."""

    stale: bool = True
    """Whether a reduction is taken one window late; else it is waited for."""

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            MethodError: when one is out of range.
        """
        super().__post_init__()
        require_outer(self.lr, self.momentum)
        require(1 <= self.penalty < math.inf, "a penalty of at least 1", self.penalty)
        require(self.clip > 0, "a clip above 0", self.clip)

    def scalars(self, inner_lr: float) -> tuple[float, float]:
        return self.lr, self.momentum

    def apply(
        self,
        state: OuterState,
        update_F: Tensor,
        *,
        fragment: Fragment,
        lr: float,
        momentum: float,
    ) -> OuterState:
        """Heavy-ball momentum, penalised and clipped."""
        return heavy_ball(
            state,
            update_F,
            lr=lr,
            momentum=momentum,
            scale=1.0 / self.penalty,
            clip=self.clip,
        )

    def hidden_steps(self, inner_steps: int) -> int:
        """Return H if reductions are stale, else 0."""
        return inner_steps if self.stale else 0

    @property
    def window_vectors(self) -> int:
        """Return the vectors kept: the start of the window, what was sent and what is owed."""
        return 3 if self.stale else 0

    def worker(
        self, model: nn.Module, inner: Optimizer, reducer: Reducer, *, inner_steps: int
    ) -> Worker:
        kind = CO2 if self.stale else DiLoCo
        return kind(model, inner, reducer, inner_steps=inner_steps)


class CO2(Overlapped):
    """Begins each window at the common parameters."""

    def _next_start(self) -> Tensor:
        return self.synced_N
