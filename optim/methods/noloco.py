"""`noloco`: no all-reduce; each round a peer meets one other (arXiv:2506.10911).

Pairs are drawn by a shared seed. With slow weights phi of one's own, after H inner steps:

    m = 0.5 m - 0.7 mean_pair(phi - local) + 0.7 (mean_pair(phi) - phi)        phi = phi + m

There is no common state and no log: a peer's weights drift towards its partners'. Two vectors of
the model's length travel each way. Who meets whom, and what the two make of each other, is in
`atoll.optim.inprocess.gossip`.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.compression import Codec, Fp32
from atoll.optim.methods.base import require, require_outer
from atoll.optim.methods.paired import PairedMethod
from atoll.optim.methods.registry import register
from atoll.optim.reducer import Reducer
from atoll.optim.state.fragments import Fragment
from atoll.optim.state.outer_state import OuterState
from atoll.optim.state.outer_step import gossip
from atoll.optim.workers.diloco import DiLoCo
from atoll.optim.workers.worker import Worker


@register
@dataclass(frozen=True, kw_only=True)
class NoLoCoMethod(PairedMethod):
    """NoLoCo; weights travel too, and what a codec loses of them does not come back."""

    name: ClassVar[str] = "noloco"

    codec: Codec = field(default_factory=Fp32)
    feedback: float = 0.0
    clip_at: float = 0.0

    lr: float = 0.7
    """Share of the pair's mean pseudo-gradient."""

    momentum: float = 0.5
    """Share of the momentum that is kept."""

    pull: float = 0.7
    """Share of the way to the pair's mean weights."""

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            MethodError: one that it can't have.
        """
        super().__post_init__()
        require_outer(self.lr, self.momentum)
        require(not self.feedback, "no feedback: nothing keeps what a codec lost", self.feedback)
        require(0 < self.pull <= 1, "a pull above 0 and at most 1", self.pull)

    def scalars(self, inner_lr: float) -> tuple[float, float]:
        return self.lr, self.momentum

    def apply(
        self,
        state: OuterState,
        update_F: Tensor,
        *,
        fragment: Fragment,
        lr: float,
        momentum: float,
    ) -> OuterState:
        """The modified Nesterov step of one peer; `update_F` is delta, then the pull."""
        return gossip(state, update_F, lr=lr, momentum=momentum, pull=self.pull)

    def worker(
        self, model: nn.Module, inner: Optimizer, reducer: Reducer, *, inner_steps: int
    ) -> Worker:
        return DiLoCo(model, inner, reducer, inner_steps=inner_steps)
