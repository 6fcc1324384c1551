"""Inner optimizers by name: what trains a model between two syncs.

adamw   torch's, arXiv:1711.05101; or with moments of 8 bits (`atoll.optim.quantized`)
muon    Muon for hidden matrices, AdamW for the rest
lion    arXiv:2302.06675
sgd     without momentum; for methods that keep their own, it only carries the rate
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import ParamsT

from atoll.optim.methods.base import InnerName, MethodError
from atoll.optim.quantized import adamw_8bit


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


class Lion(ByParameter):
    """EvoLved Sign Momentum (arXiv:2302.06675).

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
        """Take the arguments of a torch optimizer.

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


NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # steepest at 0 that stays within 0.68 and 1.21
NEWTON_SCHULZ_STEPS = 5  # singular values from 0.002 of the norm on arrive


class Muon(ByParameter):
    """Muon and AdamW in one optimizer, by the `kind` of each parameter group.

    Muon makes the momentum of matrices orthogonal. For a matrix with gradient G:

        m = mu m + G        u = G + mu m        theta = (1 - lr decay) theta - lr scale O(u)

    O(U) is the orthogonal matrix nearest to U, by five quintic Newton-Schulz steps: they bring
    singular values to between 0.68 and 1.21, most of them below 1.14, and never turn a singular
    vector. scale = 0.2 sqrt(max(rows, columns)) gives the step the size of AdamW's, so one learning
    rate serves both.

    Sources: Muon (Jordan et al., 2024), the scale from Moonlight (arXiv:2502.16982). Departures
    from the code that is usually copied: the gradient is not overwritten by the momentum, the norm
    is taken in fp32, and which parameters are matrices follows from the modules, not from names.
    """

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float = 1e-3,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        """Take the arguments of a torch optimizer; `muon_groups` makes the groups of a model.

        Args:
            params: groups with "kind": "muon" (tensors of two dimensions or more) or "adamw".
            lr: for both kinds.
            momentum: mu.
            betas: AdamW's.
            eps: AdamW's.
            weight_decay: decoupled, of both kinds.

        Raises:
            ValueError: when a number is out of range, or a vector is to be made orthogonal.
        """
        if lr < 0 or not 0 <= momentum < 1 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"expected lr of at least 0, momentum and betas in [0, 1), "
                f"got {lr}, {momentum}, {betas}"
            )
        defaults = {
            "kind": "muon",
            "lr": lr,
            "momentum": momentum,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        for group in self.param_groups:
            if group["kind"] == "muon" and any(p.dim() < 2 for p in group["params"]):
                raise ValueError("expected matrices for muon, got a vector; give it to adamw")

    def move(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """Step as the group's kind says."""
        (self._muon if group["kind"] == "muon" else self._adamw)(param, grad, group)

    def _muon(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        momentum = self.momentum_of(param).mul_(group["momentum"]).add_(grad)
        update = grad.add(momentum, alpha=group["momentum"]).flatten(1)
        scale = 0.2 * math.sqrt(max(update.shape))  # the RMS of AdamW's steps is about 0.2
        param.add_(orthogonalize(update).view_as(param), alpha=-group["lr"] * scale)

    def _adamw(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if "step" not in state:
            state["step"] = 0
            state["first"], state["second"] = torch.zeros_like(param), torch.zeros_like(param)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        state["first"].lerp_(grad, 1.0 - beta1)
        state["second"].mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
        size = (state["second"] / (1.0 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
        rate = group["lr"] / (1.0 - beta1 ** state["step"])
        param.addcdiv_(state["first"], size, value=-rate)


def orthogonalize(matrix_RC: Tensor, steps: int = NEWTON_SCHULZ_STEPS) -> Tensor:
    """Return nearly the nearest orthogonal matrix: U V^T of the singular value decomposition.

    Args:
        matrix_RC: R rows, C columns; in bf16 on CUDA, in fp32 elsewhere.
        steps: of the iteration.

    Returns:
        [R, C] in the dtype of the input; zeros for a matrix of zeros.
    """
    a, b, c = NEWTON_SCHULZ
    wide = matrix_RC.shape[0] <= matrix_RC.shape[1]
    x: Tensor = matrix_RC.float() if wide else matrix_RC.float().T
    x = x / (torch.linalg.matrix_norm(x) + 1e-7)  # a matrix of zeros stays one
    if x.device.type == "cuda":
        x = x.bfloat16()
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    nearest: Tensor = x if wide else x.T
    return nearest.to(matrix_RC.dtype)


def muon_groups(model: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Return the parameter groups of a model for `Muon`.

    Matrices of hidden layers go to Muon. Embeddings, the layers that give one output for each row
    of an embedding, and vectors go to AdamW; vectors do not decay.
    """
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    ends = {id(table.weight) for table in tables}
    ends |= {id(head.weight) for table in tables for head in _heads(model, table)}
    trained = [param for param in model.parameters() if param.requires_grad]
    vectors = [p for p in trained if p.dim() < 2]
    matrices = [p for p in trained if p.dim() >= 2]
    groups = (
        ("muon", [p for p in matrices if id(p) not in ends], weight_decay),
        ("adamw", [p for p in matrices if id(p) in ends], weight_decay),
        ("adamw", vectors, 0.0),
    )
    return [
        {"params": params, "kind": kind, "weight_decay": decay}
        for kind, params, decay in groups
        if params
    ]


def _heads(model: nn.Module, table: nn.Embedding) -> list[nn.Linear]:
    """Return the layers at the end of a model that turn an embedding around.

    A hidden layer may have as many outputs as a table has rows: 256 is a usual width and the number
    of bytes. So one of another shape, or before the end, is only a head if no other layer has as
    many outputs.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    shape = table.weight.shape
    last = list(itertools.takewhile(lambda layer: layer.weight.shape == shape, reversed(layers)))
    as_many = [layer for layer in layers if layer.out_features == table.num_embeddings]
    return last or (as_many if len(as_many) == 1 else [])


def build(
    name: InnerName,
    model: nn.Module,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.1,
    fused: bool | None = None,
    quantized: bool = False,
) -> Optimizer:
    """Return an optimizer over a model's trainable parameters; vectors, as norms, do not decay.

    Args:
        name: which.
        model: whose parameters.
        lr: learning rate.
        betas: AdamW's, Muon's for what it gives to AdamW.
        weight_decay: decoupled.
        fused: whether AdamW takes torch's fused kernels; None leaves it to torch.
        quantized: whether AdamW keeps its moments in 8 bits.

    Raises:
        MethodError: when there is no such optimizer, or the package for 8 bits is missing.
    """
    if quantized and name != "adamw":
        raise MethodError(f"only adamw keeps its moments in 8 bits, got {name!r}")
    if name == "muon":
        return Muon(muon_groups(model, weight_decay=weight_decay), lr=lr, betas=betas)
    groups = decay_groups(model, weight_decay)
    if quantized:
        return adamw_8bit(groups, lr=lr, betas=betas)
    if name == "adamw":
        return AdamW(groups, lr=lr, betas=betas, fused=fused)
    if name == "lion":
        return Lion(groups, lr=lr)
    if name == "sgd":
        return SGD(groups, lr=lr)
    raise MethodError(f"expected adamw, muon, lion or sgd; got {name!r}")


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return two parameter groups: matrices, which decay, and vectors, which don't."""
    trained = [param for param in model.parameters() if param.requires_grad]
    groups = (
        ([p for p in trained if p.dim() >= 2], weight_decay),
        ([p for p in trained if p.dim() < 2], 0.0),
    )
    return [{"params": params, "weight_decay": decay} for params, decay in groups if params]
