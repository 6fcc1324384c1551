"""Workers of methods that send something of every step's gradient, in place of a drift.

The model's parameters change only when a commit is taken, so all replicas train from the same
point; a window is one step. What a round leaves out is owed: it is added to the next message, and
so counts later, once, as the drift of methods with windows does.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from atoll.optim.reducer import Commit, Reducer
from atoll.optim.worker import Window, Worker


class GradientWorker(Worker):
    """Sends what `_message` makes of the gradient, and takes the synced parameters as they are.

    The inner optimizer gives the learning rate of the schedule; it does not step.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: torch.optim.Optimizer,
        reducer: Reducer,
        *,
        delay: int = 0,
    ) -> None:
        """Join the reducer; as `Worker`."""
        self._sent_N: Tensor | None = None
        self._owed_N: Tensor | None = None
        super().__init__(model, inner, reducer, inner_steps=1, delay=delay)

    @abstractmethod
    def _message(self, grad_N: Tensor) -> Tensor:
        """What is sent for a gradient."""

    def _delta(self, index: int, local_N: Tensor) -> Tensor:
        message_N = self._message(self.layout.gradient(self.model))
        self._sent_N = message_N if self._owed_N is None else message_N + self._owed_N
        self._owed_N = None
        return self._sent_N

    def _follow(self, commit: Commit, new_F: Tensor, window: Window) -> None:
        self.layout.load_(self.model, commit.params_N)

    def _close(self, commit: Commit, window: Window) -> None:
        super()._close(commit, window)
        self._owed_N, self._sent_N = self._left_out(commit), None

    def _left_out(self, commit: Commit) -> Tensor | None:
        """What of the message under way no entry has taken."""
        if self._sent_N is None or commit.included is None:
            return self._sent_N
        if bool(commit.included.all()):
            return None
        taken_N = self.fragments[commit.fragment].mask(commit.included)
        return self._sent_N.masked_fill(taken_N, 0.0)

    def _restart(self) -> None:
        self._sent_N = self._owed_N = None

    def _own_state(self) -> dict[str, Any]:
        return {"sent_N": self._sent_N, "owed_N": self._owed_N}

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        self._sent_N, self._owed_N = state["sent_N"], state["owed_N"]

    def _train(self) -> None:
        """Nothing: the commit moves the parameters."""

    def _rate(self) -> float:
        return float(self.inner.param_groups[0]["lr"])

    def _discard(self) -> None:
        """Send nothing of a gradient that is not finite; the parameters are sound."""
        for window in self._windows:
            window.disown()
        self._restart()
        self._statistics = replace(self._statistics, discarded=self._statistics.discarded + 1)
