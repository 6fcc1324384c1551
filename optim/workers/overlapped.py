"""Workers that go on at once after a window, and take its reduction at the end of the next one.

start    where the open window began; delta = start - local
owed     deltas that were left out of their entry; they are in the next one
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from atoll.optim.reducer import Commit, Reducer
from atoll.optim.state.fragments import Fragment
from atoll.optim.workers.windows import Window
from atoll.optim.workers.worker import Worker


class Overlapped(Worker):
    """Worker whose reductions arrive one window late; subclasses define where windows begin."""

    def __init__(
        self, model: nn.Module, inner: torch.optim.Optimizer, reducer: Reducer, *, inner_steps: int
    ) -> None:
        """Join the reducer; as `Worker`."""
        super().__init__(model, inner, reducer, inner_steps=inner_steps, delay=inner_steps)
        self._restart()

    def _restart(self) -> None:
        self._start_N: Tensor = self.layout.held(self.model, self.synced_N)
        self._sent_N: Tensor = torch.zeros_like(self.synced_N)
        self._owed_N: Tensor = torch.zeros_like(self.synced_N)

    @abstractmethod
    def _next_start(self) -> Tensor:
        """Return where the next window begins, right after the last one was handed in."""

    def _delta(self, index: int, local_F: Tensor) -> Tensor:
        self._sent_N = self._start_N - local_F + self._owed_N
        return self._sent_N

    def _handed_in(self, fragment: Fragment) -> None:
        self._owed_N = torch.zeros_like(self._owed_N)
        self._start_N = self.layout.held(self.model, self._next_start())
        self.layout.load_(self.model, self._start_N)

    def _follow(self, commit: Commit, new_F: Tensor, window: Window) -> None:
        """Keep what was left out; local moves when the window has ended."""
        if not commit.settles:
            return
        missing = torch.ones(len(self.fragments[0].pieces), dtype=torch.bool)
        if commit.included is not None:
            missing = ~commit.included
        for piece, left_out in zip(self.fragments[0].slices, missing.tolist(), strict=True):
            if left_out:
                self._owed_N[piece] += self._sent_N[piece]

    def _own_state(self) -> dict[str, Any]:
        return {
            "start_N": self._start_N,
            "sent_N": self._sent_N,
            "owed_N": self._owed_N.clone(),
        }

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        self._start_N = state["start_N"].clone()
        self._sent_N = state["sent_N"].clone()
        self._owed_N = state["owed_N"].clone()
