"""`dlion`: Distributed Lion, one bit a value and step (arXiv:2404.00438).

At each step, with the inner rate eta:

    send sign(beta1 m + (1 - beta1) gradient)        m = beta2 m + (1 - beta2) gradient
    synced = (1 - eta decay) synced - eta vote       vote: the sign of the sum, or the mean

A tie in the sum is a vote of 0. One bit can't say that a sign is zero: it is positive and negative
in turns, at every position and from value to value, so that parameters without a gradient stay
within a step. Departure: the published code counts zeros and ties as negative.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from atoll.compression import Codec, Sign
from atoll.optim.methods.base import InnerName, Method, Shape, register, require
from atoll.optim.methods.ddp import DDP
from atoll.optim.methods.worker import Worker
from atoll.optim.reduction.contribution import WeightRule
from atoll.optim.state.fragments import Fragment
from atoll.optim.state.outer_state import OuterState
from atoll.optim.state.outer_step import descend

# Added and taken off, it leaves multiples of 2^-16. A sixth is no fp32 number, so three votes for
# and three against left 1e-8, whose sign is 1: without rounding, many ties moved.
ROUNDER = 192.0


class DLion(DDP):
    """Keeps Lion's momentum, and sends the signs of its step."""

    method: "DLionMethod"

    def _prepare(self) -> None:
        self._momentum_N = torch.zeros(self.places.numel)

    def _message(self, grad_N: Tensor) -> Tensor:
        if not self.places.all_of(bool(torch.isfinite(grad_N).all())):
            return grad_N  # the worker drops the step; the momentum stays sound
        beta1, beta2 = self.method.beta1, self.method.beta2
        step_N = self._momentum_N * beta1 + grad_N * (1.0 - beta1)
        self._momentum_N = self._momentum_N * beta2 + grad_N * (1.0 - beta2)
        if not bool(step_N.all()):
            step_N = torch.where(step_N == 0, self._in_turns(), step_N)
        return torch.where(step_N > 0, 1.0, -1.0)

    def _in_turns(self) -> Tensor:
        """Return 1 and -1 for even and odd values, the other way round at the next position.

        One fixed sign would move parameters without a gradient by the whole rate at each step.
        """
        signs_N = torch.ones(self.places.numel)
        signs_N[(self.reducer.position + 1 + self.places.first) % 2 :: 2] = -1.0
        return signs_N

    def _own_state(self) -> dict[str, Any]:
        return {"momentum_N": self.places.common(self._momentum_N)}

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        self._momentum_N = self.places.own(state["momentum_N"]).clone()


@register
@dataclass(frozen=True, kw_only=True)
class DLionMethod(Method):
    """Distributed Lion."""

    name: ClassVar[str] = "dlion"
    worker_class: ClassVar[type[Worker]] = DLion
    shape: ClassVar[Shape] = "gather"  # everyone decodes everyone's signs
    inner: ClassVar[InnerName] = "lion"
    every_step: ClassVar[bool] = True

    codec: Codec = field(default_factory=Sign)
    feedback: float = 0.0  # the codec loses nothing of a sign
    weights: WeightRule = "equal"  # one vote a peer

    beta1: float = 0.9
    """Share of the momentum in what is sent."""

    beta2: float = 0.99
    """Share of the momentum that is kept."""

    decay: float = 0.0
    """Decoupled weight decay."""

    vote: Literal["majority", "average"] = "majority"
    """Sign of the sum of signs, or their mean."""

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            MethodError: when one is out of range.
        """
        super().__post_init__()
        require(0 <= self.beta1 < 1 and 0 <= self.beta2 < 1, "betas in [0, 1)", self)

    def apply(
        self, state: OuterState, update_F: Tensor, *, fragment: Fragment, lr: float, momentum: float
    ) -> OuterState:
        """Descent along the vote."""
        if self.vote == "average":
            return descend(state, update_F, lr=lr, decay=self.decay)
        tally_F = torch.sub(torch.add(update_F, ROUNDER), ROUNDER)
        return descend(state, tally_F, lr=lr, decay=self.decay, signed=True)
