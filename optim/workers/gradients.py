"""Workers of methods that send something of every step's gradient, in place of a drift.

The model's parameters change only when a commit is taken, so all replicas train from the same
point; a window is one step. A gradient that missed its round is gone: added to the next message it
was a step old and, over three seeds, worse than lost (docs/benchmarks/churn.md).
"""

from abc import abstractmethod
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from atoll.optim.reducer import Commit, Reducer
from atoll.optim.workers.windows import Window
from atoll.optim.workers.worker import Worker


class GradientWorker(Worker):
    """Sends what `_message` makes of the gradient, and takes the synced parameters as they are.

    The inner optimizer gives the learning rate of the schedule; it does not step.
    """

    keeps_work: ClassVar[bool] = False

    def __init__(
        self,
        model: nn.Module,
        inner: torch.optim.Optimizer,
        reducer: Reducer,
        *,
        delay: int = 0,
    ) -> None:
        """Join the reducer; as `Worker`."""
        super().__init__(model, inner, reducer, inner_steps=1, delay=delay)

    @abstractmethod
    def _message(self, grad_N: Tensor) -> Tensor:
        """Return what is sent for a gradient."""

    def _delta(self, index: int, local_F: Tensor) -> Tensor:
        return self._message(self.layout.gradient(self.model))

    def _follow(self, commit: Commit, new_F: Tensor, window: Window) -> None:
        self.layout.load_(self.model, commit.params_N)

    def _train(self) -> None:
        """Nothing: the commit moves the parameters."""

    def _rate(self) -> float:
        return float(self.inner.param_groups[0]["lr"])

    def _discard(self) -> None:
        """Send nothing of a gradient that is not finite; the parameters are sound."""
        for window in self._windows:
            window.disown()
        self._statistics = replace(self._statistics, discarded=self._statistics.discarded + 1)
