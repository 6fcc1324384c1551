"""The open window of a fragment, as a worker counts it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

MOST_NEWEST = 256  # of 8 KiB; a wait for the device each so many steps is not felt


@dataclass(frozen=True, kw_only=True)
class PendingWindow:
    """My contribution under way: where local stood, and the work that it stands for."""

    local_N: Tensor | None  # noqa: N815
    """Local at submission, of the fragment in the order of the vector, moved along with the
    commits since. None while the worker waits with a delay of 0: it is what local is."""

    tokens: int
    steps: int

    age: int = 0
    """Inner steps since it was handed in."""


@dataclass(kw_only=True)
class LossMean:
    """The mean of a window's losses, of which a device may still compute the newest.

    A window ends with a round: without a quorum it goes on for days, so it keeps a sum.
    """

    total: float = 0.0
    """The sum of all but the newest."""
    num: int = 0
    """The number of losses in it."""
    newest: list[float | Tensor] = field(default_factory=list)
    """At most `MOST_NEWEST`."""

    def add(self, loss: float | Tensor) -> None:
        """Take a loss; waits for the device each `MOST_NEWEST` of them."""
        self.newest.append(loss)
        if len(self.newest) >= MOST_NEWEST:
            self._sum_up()

    def mean(self) -> float:
        """Return the mean, NaN of none; waits for the device."""
        self._sum_up()
        return self.total / self.num if self.num else float("nan")

    def _sum_up(self) -> None:
        for loss in self.newest:
            self.total += float(loss.cpu() if isinstance(loss, Tensor) else loss)
        self.num += len(self.newest)
        self.newest.clear()

    def state_dict(self) -> dict[str, Any]:
        """Its fields as plain values. `losses` is what earlier versions had of all."""
        return {
            "losses": [float(loss) for loss in self.newest],
            "loss_total": self.total,
            "num_losses": self.num,
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> LossMean:
        """Return what `state_dict` gave, also that of a version that kept all losses."""
        found = cls(total=state.get("loss_total", 0.0), num=state.get("num_losses", 0))
        for loss in state["losses"]:
            found.add(loss)
        return found


@dataclass(kw_only=True)
class Window:
    """The open window of one fragment, and the contribution of the last one."""

    pending: PendingWindow | None = None
    tokens: int = 0
    steps: int = 0
    step_in_window: int = 0
    losses: LossMean = field(default_factory=LossMean)

    def count(self, tokens: int, loss: float | Tensor | None) -> None:
        """Add an inner step."""
        self.tokens += tokens
        self.steps += 1
        self.step_in_window += 1
        if loss is not None:
            self.losses.add(loss)
        if self.pending is not None:
            self.pending = replace(self.pending, age=self.pending.age + 1)

    def disown(self) -> None:
        """Let the open window count for nothing; what is under way was trained before."""
        self.tokens = 0 if self.pending is None else self.pending.tokens

    def restart(self, step_in_window: int) -> None:
        """Forget what was trained."""
        self.pending = None
        self.tokens = self.steps = 0
        self.step_in_window = step_in_window
        self.losses = LossMean()

    def state_dict(self) -> dict[str, Any]:
        """Its fields as plain values and tensors."""
        return {
            "pending": None if self.pending is None else vars(self.pending).copy(),
            "tokens": self.tokens,
            "steps": self.steps,
            "step_in_window": self.step_in_window,
            **self.losses.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        pending = state["pending"]
        self.pending = None if pending is None else PendingWindow(**pending)
        self.tokens, self.steps = state["tokens"], state["steps"]
        self.step_in_window = state["step_in_window"]
        self.losses = LossMean.of_state(state)
