"""Base of optimizers that update one parameter at a time."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer


class ByParameter(Optimizer):
    """Calls `move` for each parameter that has a gradient."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take one step on the gradients; `closure` is refused.

        Raises:
            ValueError: when a closure is given.
        """
        if closure is not None:
            raise ValueError("expected no closure; compute the gradients before step()")
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.mul_(1.0 - group["lr"] * group["weight_decay"])
                    self.move(param, param.grad, group)

    def move(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """Change a parameter, which has decayed already."""
        raise NotImplementedError

    def momentum_of(self, param: Tensor) -> Tensor:
        """The parameter's momentum, zeros at first."""
        state = self.state[param]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(param)
        momentum: Tensor = state["momentum"]
        return momentum
