"""Lion: the sign of an interpolated momentum (arXiv:2302.06675)."""

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from atoll.optim.inner.by_parameter import ByParameter


class Lion(ByParameter):
    """EvoLved Sign Momentum.

    u = sign(beta1 m + (1 - beta1) g)        m = beta2 m + (1 - beta2) g
    theta = (1 - lr decay) theta - lr u
    """

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        """As any torch optimizer.

        Args:
            params: parameters or groups of them.
            lr: a third to a tenth of AdamW's.
            betas: shares of the momentum in the step, and of what is kept of it.
            weight_decay: decoupled; three to ten times AdamW's.

        Raises:
            ValueError: when a number is out of range.
        """
        if lr < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"expected lr of at least 0 and betas in [0, 1), got {lr}, {betas}")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def move(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """Step by the sign of the momentum and the gradient mixed."""
        momentum = self.momentum_of(param)
        beta1, beta2 = group["betas"]
        update = momentum.lerp(grad, 1.0 - beta1).sign_()
        momentum.lerp_(grad, 1.0 - beta2)
        param.add_(update, alpha=-group["lr"])
