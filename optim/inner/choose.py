"""Inner optimizers by name: what trains a model between two syncs.

adamw   torch's, arXiv:1711.05101
muon    Muon for hidden matrices, AdamW for the rest
lion    arXiv:2302.06675
sgd     without momentum; for methods that keep their own, it only carries the rate
"""

from typing import Any

from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from atoll.optim.inner.lion import Lion
from atoll.optim.inner.muon import Muon, muon_groups
from atoll.optim.methods.base import InnerName, MethodError


def build(
    name: InnerName,
    model: nn.Module,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.1,
    fused: bool | None = None,
) -> Optimizer:
    """An optimizer over a model's trainable parameters; vectors, such as norms, do not decay.

    Args:
        name: which.
        model: whose parameters.
        lr: learning rate.
        betas: AdamW's, Muon's for what it gives to AdamW.
        weight_decay: decoupled.
        fused: whether AdamW takes torch's fused kernels; None leaves it to torch.

    Raises:
        MethodError: when there is no such optimizer.
    """
    if name == "muon":
        return Muon(muon_groups(model, weight_decay=weight_decay), lr=lr, betas=betas)
    groups = decay_groups(model, weight_decay)
    if name == "adamw":
        return AdamW(groups, lr=lr, betas=betas, fused=fused)
    if name == "lion":
        return Lion(groups, lr=lr)
    if name == "sgd":
        return SGD(groups, lr=lr)
    raise MethodError(f"expected adamw, muon, lion or sgd; got {name!r}")


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups: matrices, which decay, and vectors, which don't."""
    trained = [param for param in model.parameters() if param.requires_grad]
    groups = (
        ([p for p in trained if p.dim() >= 2], weight_decay),
        ([p for p in trained if p.dim() < 2], 0.0),
    )
    return [{"params": params, "weight_decay": decay} for params, decay in groups if params]
