"""`eager`: DiLoCo that never waits (arXiv:2502.12996).

A window's reduction travels during all of the next one. At the end of window t a peer steps on

    own fresh + others' stale:    mean delta(t-1) + (delta_r(t) - delta_r(t-1)) / M

at once. The log gets the means alone, one window late. The outer step is linear, so what a peer
adds by itself is a second, small outer optimizer in addition to the log's: the overlay, which never
enters the common state. With x = (delta_r(t) - delta_r(t-1)) / M:

    e = mu e + x        o = o - lr (x + mu e)        local = synced + o

which are the parameters of the paper's replica r.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from atoll.compression.scratch import TILE
from atoll.optim.methods.base import register, require
from atoll.optim.methods.co2 import CO2
from atoll.optim.methods.diloco import DiLoCoMethod
from atoll.optim.methods.windows import Window
from atoll.optim.methods.worker import Worker
from atoll.optim.reducer import Commit
from atoll.optim.state import vectors


class Eager(CO2):
    """Begins each window at the common parameters and its own overlay."""

    method: "EagerMethod"

    def _prepare(self) -> None:
        super()._prepare()
        self._members = self.method.peers

    def _restart(self) -> None:
        super()._restart()
        self._fresh_N: Tensor = torch.zeros_like(self.synced_N)
        self._overlay_N: Tensor = torch.zeros_like(self.synced_N)
        self._overlay_momentum_N: Tensor = torch.zeros_like(self.synced_N)

    def _follow(self, commit: Commit, new_F: Tensor, window: Window) -> None:
        super()._follow(commit, new_F, window)
        self._members = commit.members or self._members  # an entry without an update names none

    def _next_start(self) -> Tensor:
        lr, mu = self.method.lr, self.method.momentum
        next_N = vectors.empty(len(self._sent_N))
        kept = (self._fresh_N, self._overlay_momentum_N, self._overlay_N)
        every = (self._sent_N, self.synced_N, next_N, *kept)
        # Tile by tile and in place: whole vectors would be seven more.
        for sent, synced, start, fresh, momentum, overlay in zip(
            *(torch.split(vector, TILE) for vector in every), strict=True
        ):
            # The log's mean has the stale part; the overlay replaces it by the fresh one.
            x = sent / self._members
            stale = fresh.clone()
            fresh.copy_(x)
            x.sub_(stale)
            momentum.mul_(mu).add_(x)
            overlay.sub_(x.add_(momentum * mu).mul_(lr))
            torch.add(synced, overlay, out=start)
        return next_N

    def _own_state(self) -> dict[str, Any]:
        return super()._own_state() | {
            "members": self._members,
            "fresh_N": self.places.common(self._fresh_N),
            "overlay_N": self.places.common(self._overlay_N),
            "overlay_momentum_N": self.places.common(self._overlay_momentum_N),
        }

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        super()._load_own_state(state)
        self._members = state["members"]
        self._fresh_N = self.places.own(state["fresh_N"]).clone()
        self._overlay_N = self.places.own(state["overlay_N"]).clone()
        self._overlay_momentum_N = self.places.own(state["overlay_momentum_N"]).clone()


@register
@dataclass(frozen=True, kw_only=True)
class EagerMethod(DiLoCoMethod):
    """Eager updates."""

    name: ClassVar[str] = "eager"
    worker_class: ClassVar[type[Worker]] = Eager

    peers: int = 1
    """M of the first window; later ones take the number of members of the last entry."""

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            MethodError: when one is out of range, or is of what this method doesn't do.
        """
        super().__post_init__()
        require(self.tau == 0, "no tau: a reduction travels for a window", self.tau)
        require(self.count == 1, "one fragment", self.count)
        require(self.peers >= 1, "at least one peer", self.peers)

    @classmethod
    def defaults_for(cls, *, rounds: int, inner_steps: int, peers: int) -> dict[str, object]:
        """Return DiLoCo's defaults and the number of expected peers."""
        found = super().defaults_for(rounds=rounds, inner_steps=inner_steps, peers=peers)
        return found | {"peers": peers}

    def hidden_steps(self, inner_steps: int) -> int:
        """A whole window."""
        return inner_steps

    @property
    def window_vectors(self) -> int:
        """Return the vectors kept: start, sent and owed, and the same of what is fresh."""
        return 6
