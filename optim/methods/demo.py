"""`demo`: decoupled momentum; only its largest cosine coefficients travel (arXiv:2411.19870).

At each step, with the inner rate eta:

    e = beta e + eta gradient        q = the top k of each 64 x 64 chunk of DCT(e)
    e = e - iDCT(q)                  synced = (1 - eta decay) synced - eta sign(mean iDCT(q))

e is both the momentum and the residual: error feedback with a share of beta. The mean divides by
all peers, or with `average=senders`, as the published code does, each coefficient by those that
sent it. With `delay=1` the results of a step are applied after the next one.

Departures: coefficients have 8 bits (or 1, `codec=dct(k=32, bits=1)`) and 12-bit indices, in place
of 32 and 64; sizes that 64 does not divide are padded; a mean over senders is rounded to 127 steps
of its chunk's largest coefficient, which makes it exact everywhere. Unlike the reference's, the
state is complete and tensors may have any number of dimensions.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import Tensor

from atoll.compression import Codec, Dct
from atoll.optim.methods.base import InnerName, Method, Shape, register, require
from atoll.optim.methods.ddp import DDP
from atoll.optim.methods.worker import Worker
from atoll.optim.reduction.contribution import WeightRule
from atoll.optim.state.fragments import Fragment, by_tensor
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import OuterState
from atoll.optim.state.outer_step import descend


class DeMo(DDP):
    """Sends the gradient times the inner rate; the residual is the reducer's."""

    def _message(self, grad_N: Tensor) -> Tensor:
        return grad_N * self._rate()


@register
@dataclass(frozen=True, kw_only=True)
class DeMoMethod(Method):
    """DeMo; `feedback` is the paper's beta."""

    name: ClassVar[str] = "demo"
    worker_class: ClassVar[type[Worker]] = DeMo
    shape: ClassVar[Shape] = "gather"  # everyone decodes everyone's coefficients
    inner: ClassVar[InnerName] = "sgd"
    every_step: ClassVar[bool] = True

    codec: Codec = field(default_factory=lambda: Dct(k=32))
    feedback: float = 0.999  # the residual is the momentum
    weights: WeightRule = "equal"
    clip_at: float = 8.0  # as of ddp; a new peer has less momentum to send

    average: Literal["all", "senders"] = "all"
    """Peers by whose number the mean of a coefficient divides."""

    decay: float = 0.0
    """Decoupled weight decay."""

    delay: int = 0
    """Steps between sending and applying: 0, or 1 to overlap them."""

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            MethodError: when one is out of range.
        """
        super().__post_init__()
        require(self.delay in (0, 1), "a delay of 0 or 1", self.delay)

    @property
    def divides_by(self) -> Literal["all", "senders"]:
        return self.average

    def fragments(self, layout: Layout) -> tuple[Fragment, ...]:
        """Return the whole model, a piece a tensor: chunks of the DCT do not cross tensors."""
        return (by_tensor(layout),)

    def apply(
        self, state: OuterState, update_F: Tensor, *, fragment: Fragment, lr: float, momentum: float
    ) -> OuterState:
        """Descent along the sign."""
        return descend(state, update_F, lr=lr, decay=self.decay, signed=True)

    def hidden_steps(self, inner_steps: int) -> int:
        return self.delay
