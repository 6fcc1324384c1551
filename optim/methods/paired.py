"""Base of methods by gossip: two peers exchange models, and there is no common state.

# N parameters
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.optim.methods.base import Method, Shape
from atoll.optim.state.layout import Layout


@dataclass(frozen=True, kw_only=True)
class PairedMethod(Method):
    """A method of which `apply` takes the pair's mean pseudo-gradient, then the way to its mean.

    Both vectors are of all values, 2N together (`atoll.optim.inprocess.gossip.meet`).
    """

    keep_variance: bool = False
    """Whether the mean of two models keeps their variance, tensor by tensor (arXiv:2404.04616);
    then meetings move the sum over all peers."""

    @property
    def reduction(self) -> Shape:
        """By gossip."""
        return "pairs"

    def centre(self, centre_N: Tensor, params: Sequence[Tensor], layout: Layout) -> Tensor:
        """The point to which the parameters of a pair are pulled.

        Args:
            centre_N: their mean.
            params: both.
            layout: of their tensors.
        """
        return with_variance_kept(centre_N, params, layout) if self.keep_variance else centre_N


def with_variance_kept(centre_N: Tensor, params: Sequence[Tensor], layout: Layout) -> Tensor:
    """A mean of weights with the variance that the averaged ones have, tensor by tensor.

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
