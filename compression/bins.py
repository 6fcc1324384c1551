"""Bin means: what a statistical codebook stores for each bin."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from atoll.compression.scratch import scratch


def bin_means(t_BK: Tensor, num_bins: int) -> Tensor:
    """Return the mean of each row's values in each unit bin [j, j + 1), [B, num_bins].

    Values lie in [0, num_bins).  An empty bin gets its lower edge.  No masks: with F = floor(t),
    a row's sum of max(t, j) is the sum of t at and above j plus j for each value below.
    """
    rows, size = t_BK.shape
    sums_JB = t_BK.new_zeros(num_bins + 1, rows)  # at and above each bin; the last has none
    counts_JB = t_BK.new_zeros(num_bins + 1, rows)
    torch.sum(t_BK, 1, out=sums_JB[0])
    counts_JB[0] = size
    clipped = scratch("clipped", t_BK)
    whole = torch.floor(t_BK, out=scratch("whole", t_BK))
    for j in range(1, num_bins):
        torch.sum(torch.clamp(whole, j - 1, j, out=clipped), 1, out=counts_JB[j])
        torch.sum(torch.clamp(t_BK, min=j, out=clipped), 1, out=sums_JB[j])
    edges_J1 = _edges(num_bins, t_BK.device)
    counts_JB[1:-1].sub_((edges_J1[1:] - 1) * size)
    sums_JB[1:-1].sub_(edges_J1[1:] * (size - counts_JB[1:-1]))
    means_JB = (sums_JB[:-1] - sums_JB[1:]) / (counts_JB[:-1] - counts_JB[1:]).clamp_(min=1)
    return torch.clamp(means_JB, edges_J1, edges_J1 + 1).T


@cache
def _edges(num_bins: int, device: torch.device) -> Tensor:
    """Return the lower edges of the bins, [num_bins, 1]."""
    return torch.arange(num_bins, dtype=torch.float32, device=device).unsqueeze(1)
