"""Bin means: what a statistical codebook stores for each bin."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.compression.scratch import scratch


def bin_means(t_BK: Tensor, num_bins: int) -> Tensor:
    """Return the mean of each row's values in each unit bin [j, j + 1), [B, num_bins].

    Values lie in [0, num_bins).  An empty bin gets its middle.  No masks: with F = floor(t),
    sum max(t, j) over a row is the sum of t at and above j plus j for each value below.
    """
    size = t_BK.shape[1]
    clipped = scratch("clipped", t_BK)
    whole = torch.floor(t_BK, out=scratch("whole", t_BK))
    above, count = [t_BK.sum(1)], [torch.full_like(t_BK[:, 0], float(size))]
    for j in range(1, num_bins):
        num = torch.clamp(whole, j - 1, j, out=clipped).sum(1) - (j - 1) * size
        total = torch.clamp(t_BK, min=j, out=clipped).sum(1)
        above.append(total - j * (size - num))
        count.append(num)
    return _means(torch.stack(above, 1), torch.stack(count, 1))


def _means(above_BJ: Tensor, count_BJ: Tensor) -> Tensor:
    """Turn sums and counts at and above each bin into means of the bins."""
    sums, counts = above_BJ.clone(), count_BJ.clone()
    sums[:, :-1] -= above_BJ[:, 1:]
    counts[:, :-1] -= count_BJ[:, 1:]
    bins = torch.arange(sums.shape[1], device=sums.device, dtype=torch.float32)
    empty = (counts < 0.5).to(torch.float32)
    inside = sums / counts.clamp(min=1)
    return torch.clamp(inside * (1 - empty) + (bins + 0.5) * empty, bins, bins + 1)
