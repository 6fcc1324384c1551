"""`sparseloco`: top-k of each 64 x 64 tile in 2 bits, with error feedback (arXiv:2508.15706).

    e = 0.95 e + delta        send the 64 largest of each 4,096        e = e - sent
    synced = synced - lr mean(sent)

Everyone decodes everyone's frames, so the mean keeps the union of the senders' indices. The mean of
a value divides by those that sent it, as the published code does, or with `average=all` by all
peers, as the paper writes: few values have two senders, so that is a shorter step, and ended 11%
higher. With `merge=select` the mean of all is selected again: what a peer receives then does not
grow with the number of peers, and what the owner of a part leaves out stays in its own residual.
There is no outer momentum, and lr is applied once (older published code multiplies by it twice).

With `tau` above 0 the reduction travels for so many inner steps, at most a window; what was
trained meanwhile stays. The papers wait.

Departures: matrices are tiled from their first value, and what does not fill a tile is chunked
in runs; the bin means are bf16; norms are clipped by the rule of all methods, and weights are
those of all methods.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import Tensor

from atoll.compression import Codec, TopK, TwoBit
from atoll.compression.sparse import Sparse
from atoll.optim.methods.base import Method, Shape, register
from atoll.optim.methods.diloco import DiLoCo
from atoll.optim.methods.worker import Worker
from atoll.optim.state.fragments import Fragment, tiled
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import OuterState
from atoll.optim.state.outer_step import descend


@register
@dataclass(frozen=True, kw_only=True)
class SparseLoCoMethod(Method):
    """SparseLoCo."""

    name: ClassVar[str] = "sparseloco"
    worker_class: ClassVar[type[Worker]] = DiLoCo

    codec: Codec = field(default_factory=lambda: TopK(k=64, values=TwoBit()))
    feedback: float = 0.95  # the paper's

    lr: float = 1.0
    """Outer learning rate."""

    # Over all peers, the paper's mean, a step is shorter and ended 11% higher.
    average: Literal["all", "senders"] = "senders"
    """Peers by whose number the mean of a value divides; all if it is selected again."""

    merge: Literal["union", "select"] = "union"
    """Part of the mean that is kept: all that anybody sent, or the largest again."""

    tau: int = 0
    """Inner steps that a reduction travels while training continues; 0 waits for it."""

    @property
    def divides_by(self) -> Literal["all", "senders"]:
        # After a second selection no peer knows how many peers sent a value.
        return self.average if self.merge == "union" else "all"

    @property
    def reduction(self) -> Shape:
        """Return "gather" if everyone decodes all frames, "mean" if owners select once more."""
        return "gather" if self.merge == "union" else "mean"

    def fragments(self, layout: Layout) -> tuple[Fragment, ...]:
        """Return the whole model, in tiles."""
        return (tiled(layout),)

    def apply(
        self, state: OuterState, update_F: Tensor, *, fragment: Fragment, lr: float, momentum: float
    ) -> OuterState:
        """Plain descent."""
        return descend(state, update_F, lr=lr, fragment=fragment)

    def apply_sparse(
        self, state: OuterState, update: Sparse, *, fragment: Fragment, lr: float, momentum: float
    ) -> OuterState:
        """Plain descent; zeros are written nowhere."""
        return descend(state, update, lr=lr, fragment=fragment)
