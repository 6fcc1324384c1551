"""A difference of two vectors that is computed where it is used, run by run.

Written out it would cost a pass over the model in fresh memory, of which each value is read once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.optim.state import vectors
from atoll.optim.state.fragments import Fragment


class Difference:
    """a - b, of a fragment's values in its order; both must stay as they are while it is used."""

    def __init__(self, fragment: Fragment, a_F: Tensor, b_F: Tensor) -> None:
        """Return the difference of two vectors returned by `Fragment.cut`."""
        self._fragment = fragment
        self._a_F, self._b_F = a_F, b_F

    def __call__(self) -> Tensor:
        """All of it, as a new vector."""
        values_F = vectors.empty(self._fragment.numel)
        self.write_(slice(0, self._fragment.numel), values_F)
        return values_F

    def write_(self, run: slice, out: Tensor) -> None:
        """Write some consecutive values, whole pieces of the fragment."""
        at = 0
        for a, b in self._fragment.places(run, self._a_F, self._b_F):
            torch.sub(a, b, out=out[at : at + a.numel()].view(a.shape))
            at += a.numel()
