"""`ddp`: the mean gradient at every step, the synchronous reference (arXiv:2006.15704).

    send gradient        theta, m, v = AdamW(theta, m, v, mean gradient)

AdamW is the outer step: its moments are part of the common state, so replicas are equal to the
bit and a joiner takes them with the parameters. The inner optimizer only gives the rate of the
schedule. With `codec=powersgd(rank=4)` gradients travel as PowerSGD's factors (arXiv:1905.13727),
with the errors of PyTorch's hook; with any other codec error feedback is the one of all methods.

The mean is clipped by its norm when it is applied: it is reduced in parts, so no peer has all of it
before, and clipping each peer's own gradient is another rule.

`DDP` is the base of all workers that send something of every step's gradient. The model's
parameters change only when a commit is taken, so all replicas train from the same point; a window
is one step. A gradient that missed its round is gone: added to the next message it was a step old
and, over three seeds, worse than lost (docs/benchmarks/churn.md).
"""

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import Tensor

from atoll.compression import Bf16, Codec
from atoll.optim.methods.base import Method, register, require
from atoll.optim.methods.windows import Window
from atoll.optim.methods.worker import Worker
from atoll.optim.reducer import Commit
from atoll.optim.state.fragments import Fragment
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import OuterState
from atoll.optim.state.outer_step import ADAMW_SUMS, adamw, clipped


class DDP(Worker):
    """Sends the gradient, and takes the synced parameters as they are.

    The inner optimizer gives the learning rate of the schedule; it does not step. Workers that
    send something else of the gradient override `_message`.
    """

    keeps_work: ClassVar[bool] = False
    sends_gradients: ClassVar[bool] = True

    def _message(self, grad_N: Tensor) -> Tensor:
        """Return what is sent for a gradient."""
        return grad_N

    def _delta(self, index: int, local_F: Tensor) -> Tensor:
        return self._message(self.places.gradient(self.model))

    def _follow(self, commit: Commit, new_F: Tensor, window: Window) -> None:
        self.places.load_(self.model, commit.params_N)

    def _train(self) -> None:
        """Leave the parameters alone: the commit moves them."""

    def _rate(self) -> float:
        return float(self.param_groups[0]["lr"])

    def _discard(self) -> None:
        """Send nothing of a gradient that is not finite; the parameters are sound."""
        for window in self._windows:
            window.disown()
        self._statistics = replace(self._statistics, discarded=self._statistics.discarded + 1)


@register
@dataclass(frozen=True, kw_only=True)
class DDPMethod(Method):
    """Mean gradients; bf16 without feedback, unless told otherwise. AdamW as `inner.build`'s."""

    name: ClassVar[str] = "ddp"
    worker_class: ClassVar[type[Worker]] = DDP
    every_step: ClassVar[bool] = True
    moments: ClassVar[int] = 2

    codec: Codec = field(default_factory=Bf16)
    feedback: float = 0.0
    # Times the median. Gradients of honest peers scatter more than windows do: one step, a batch of
    # one's own. This leaves them whole, and no member counts for more than eight others.
    clip_at: float = 8.0

    clip_norm: float = 0.0
    """L2 norm that the mean gradient is clipped to; 0 for no clipping."""

    beta1: float = 0.9
    """Decay of the first moment."""

    beta2: float = 0.95
    """Decay of the second moment."""

    eps: float = 1e-8
    """Added to the denominator."""

    decay: float = 0.1
    """Decoupled weight decay of matrices."""

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            MethodError: when one is out of range.
        """
        super().__post_init__()
        require(0 <= self.clip_norm < math.inf, "a clip_norm of at least 0", self.clip_norm)
        require(0 <= self.beta1 < 1 and 0 <= self.beta2 < 1, "betas in [0, 1)", self)
        require(0 < self.eps < math.inf, "an eps above 0", self.eps)

    def memory_numel(self, layout: Layout) -> int:
        """Count both moments, and the averages of ones that correct their bias."""
        return super().memory_numel(layout) + ADAMW_SUMS

    def apply(
        self, state: OuterState, update_F: Tensor, *, fragment: Fragment, lr: float, momentum: float
    ) -> OuterState:
        """AdamW on the mean gradient, clipped."""
        return adamw(
            state,
            # Here and not at the senders: no peer holds the whole mean before.
            clipped(update_F, self.clip_norm) if self.clip_norm else update_F,
            lr=lr,
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            decay=self.decay,
        )
