"""A worker's records of the open window of a fragment, and of the one that it handed in."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PendingWindow:
    """My contribution under way: where local stood, and the work that it stands for."""

    local_N: Tensor  # noqa: N815
    """Local at submission, of the fragment in the order of the vector, moved along with the
    commits since."""

    tokens: int
    steps: int

    age: int = 0
    """Inner steps since it was handed in."""


@dataclass(kw_only=True)
class Window:
    """The open window of one fragment, and the contribution of the last one."""

    pending: PendingWindow | None = None
    tokens: int = 0
    steps: int = 0
    step_in_window: int = 0
    losses: list[float | Tensor] = field(default_factory=list)

    def count(self, tokens: int, loss: float | Tensor | None) -> None:
        """Add an inner step."""
        self.tokens += tokens
        self.steps += 1
        self.step_in_window += 1
        if loss is not None:
            self.losses.append(loss)
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
        self.losses = []

    def state_dict(self) -> dict[str, Any]:
        """Its fields as plain values and tensors."""
        return {
            "pending": None if self.pending is None else vars(self.pending).copy(),
            "tokens": self.tokens,
            "steps": self.steps,
            "step_in_window": self.step_in_window,
            "losses": [float(loss) for loss in self.losses],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        pending = state["pending"]
        self.pending = None if pending is None else PendingWindow(**pending)
        self.tokens, self.steps = state["tokens"], state["steps"]
        self.step_in_window = state["step_in_window"]
        self.losses = list(state["losses"])
