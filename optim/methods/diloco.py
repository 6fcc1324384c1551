"""`diloco`: H inner steps, then Nesterov on the averaged pseudo-gradient (arXiv:2311.08105).

With `tau` above 0 the reduction travels for so many inner steps, at most a window, and what was
trained meanwhile stays; with `count` above 1 the model is cut in fragments that take turns, as in
`streaming`. The paper waits, and sends all at once.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.optim.methods.base import Method, require, require_outer
from atoll.optim.methods.defaults import outer_defaults
from atoll.optim.methods.registry import register
from atoll.optim.reducer import Reducer
from atoll.optim.state import fragments as cuts
from atoll.optim.state.fragments import Fragment
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import OuterState
from atoll.optim.state.outer_step import nesterov
from atoll.optim.workers.diloco import DiLoCo
from atoll.optim.workers.worker import Worker


@register
@dataclass(frozen=True, kw_only=True)
class DiLoCoMethod(Method):
    """DiLoCo; `outer_defaults` gives good settings for short runs."""

    name: ClassVar[str] = "diloco"

    lr: float = 0.7
    """Outer learning rate."""

    momentum: float = 0.9
    """Outer momentum."""

    tau: int = 0
    """Inner steps that a reduction travels while training goes on; 0 waits for it."""

    count: int = 1
    """Number of fragments."""

    pattern: Literal["strided", "sequential"] = "strided"
    """Which blocks make a fragment, where there are several."""

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            MethodError: when one is out of range.
        """
        super().__post_init__()
        require_outer(self.lr, self.momentum)
        require(self.tau >= 0, "a tau of at least 0", self.tau)
        require(self.count >= 1, "at least one fragment", self.count)
        require(
            self.count == 1 or not self.rank, "one fragment with powersgd's factors", self.count
        )

    def fragments(self, layout: Layout) -> tuple[Fragment, ...]:
        """Return one fragment, or blocks by `pattern`; cut by tensor if the codec needs it."""
        if self.count == 1:
            return super().fragments(layout)
        cut = cuts.strided if self.pattern == "strided" else cuts.sequential
        return cut(layout, self.count, tensors=not self.codec.elementwise)

    @classmethod
    def defaults_for(cls, *, rounds: int, inner_steps: int, peers: int) -> dict[str, object]:
        """Return outer learning rate and momentum for the length of the run."""
        lr, momentum = outer_defaults(rounds, inner_steps, peers)
        return {"lr": lr, "momentum": momentum}

    def hidden_steps(self, inner_steps: int) -> int:
        return self.tau

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
        """Nesterov on the fragment."""
        return nesterov(state, update_F, lr=lr, momentum=momentum, fragment=fragment)

    def worker(
        self, model: nn.Module, inner: Optimizer, reducer: Reducer, *, inner_steps: int
    ) -> Worker:
        return DiLoCo(model, inner, reducer, inner_steps=inner_steps, delay=self.tau)
