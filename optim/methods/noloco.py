"""`noloco`: no all-reduce; each round a peer meets one other (arXiv:2506.10911).

Pairs are drawn by a shared seed. With slow weights phi of one's own, after H inner steps:

    m = 0.5 m - 0.7 mean_pair(phi - local) + 0.7 (mean_pair(phi) - phi)        phi = phi + m

There is no common state and no log: a peer's weights drift towards its partners'. Two vectors of
the model's length travel each way. Who meets whom, and what the two make of each other, is in
`atoll.optim.inprocess.gossip`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from atoll.compression import Codec, Fp32
from atoll.optim.methods.base import Method, Shape, register, require
from atoll.optim.methods.diloco import DiLoCo
from atoll.optim.methods.worker import Worker
from atoll.optim.state.fragments import Fragment
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import OuterState
from atoll.optim.state.outer_step import gossip


@dataclass(frozen=True, kw_only=True)
class PairedMethod(Method):
    """A method of which `apply` takes the pair's mean pseudo-gradient, then the way to its mean.

    Both vectors are of all values, 2N together (`atoll.optim.inprocess.gossip.meet`).
    """

    shape: ClassVar[Shape] = "pairs"

    keep_variance: bool = False
    """Let the mean of two models keep their variance, tensor by tensor (arXiv:2404.04616); then
    meetings move the sum over all peers."""

    def centre(self, centre_N: Tensor, params: Sequence[Tensor], layout: Layout) -> Tensor:
        """Return the point to which the parameters of a pair are pulled.

        Args:
            centre_N: their mean.
            params: both.
            layout: of their tensors.
        """
        return with_variance_kept(centre_N, params, layout) if self.keep_variance else centre_N


def with_variance_kept(centre_N: Tensor, params: Sequence[Tensor], layout: Layout) -> Tensor:
    """Return a mean of weights with the variance of the averaged ones, tensor by tensor.

    Averaging vectors that are not correlated shrinks their variance. arXiv:2404.04616 scales the
    values of each tensor about their mean, so that the variance is the mean of those averaged:

        c = (c - mean(c)) sqrt(mean_k var(x_k) / var(c)) + mean(c)

    Tensors whose values are all equal, as those of one value, stay as they are.

    Args:
        centre_N: the mean, of which each tensor is scaled.
        params: what was averaged.
        layout: of the tensors.
    """
    kept = []
    for centre, *parts in zip(layout.split(centre_N), *map(layout.split, params), strict=True):
        have, wanted = _variance(centre), sum(map(_variance, parts)) / len(parts)
        factor = math.sqrt(wanted / have) if have > 0 else 1.0
        mean = centre.mean()
        kept.append(((centre - mean) * factor + mean).reshape(-1))
    return torch.cat(kept)


def _variance(values: Tensor) -> float:
    return float(values.double().var(correction=0))


@register
@dataclass(frozen=True, kw_only=True)
class NoLoCoMethod(PairedMethod):
    """NoLoCo; weights travel too, and what a codec loses of them does not come back."""

    name: ClassVar[str] = "noloco"
    worker_class: ClassVar[type[Worker]] = DiLoCo

    codec: Codec = field(default_factory=Fp32)  # no residual keeps what is lost of the weights
    feedback: float = 0.0
    # A partner's weights count as they are, so a bound on pseudo-gradients protects nobody.
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
        require(not self.feedback, "no feedback: nothing keeps what a codec lost", self.feedback)
        require(0 < self.pull <= 1, "a pull above 0 and at most 1", self.pull)

    def apply(
        self, state: OuterState, update_F: Tensor, *, fragment: Fragment, lr: float, momentum: float
    ) -> OuterState:
        """Take the modified Nesterov step of one peer; `update_F` is delta, then the pull."""
        return gossip(state, update_F, lr=lr, momentum=momentum, pull=self.pull)
