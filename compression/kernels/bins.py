"""Bin means: the values that a statistical codebook of four bins stores.

No masks: a row's sum of max(t, j) is the sum of t at and above j plus j for each value below,
and bins are counted eight to a word, by the two bits of their numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from atoll.compression.kernels.planes import constant, repeated
from atoll.compression.scratch import room

NUM_SUMS = 6  # of max(t, j) for j of 1..3, then of the bins' low bits, high bits, and both
WORDS = 128  # added at once: a byte counts to 255


def store_sums(t_BK: Tensor, sums_6B: Sequence[Tensor]) -> None:
    """Store the sums of max(t, j) of each row; overwrites `t_BK`."""
    for j, sums_B in enumerate(sums_6B[:3], start=1):
        torch.sum(t_BK.clamp_(min=j), 1, out=sums_B)


def store_counts(bins_BK: Tensor, sums_6B: Sequence[Tensor]) -> None:
    """Store how many bins (int8, 0..3) of each row have the low bit, the high bit, and both."""
    rows, size = bins_BK.shape
    if size % 8:
        bins_BK = torch.nn.functional.pad(bins_BK, (0, -size % 8))
    words = bins_BK.view(rows, -1).view(torch.int64)
    bits = room("bits", (3, *words.shape), words.device, torch.int64)
    low, high, both = bits.unbind(0)
    ones = constant(repeated(1), torch.int64)
    torch.bitwise_and(words, ones, out=low)
    torch.bitwise_right_shift(words, constant(1, torch.int64), out=high).bitwise_and_(ones)
    torch.bitwise_and(low, high, out=both)
    at_once = WORDS if words.shape[1] % WORDS == 0 else 1
    totals = bits.view(3, -1, at_once).sum(2).view(torch.uint8).view(3, rows, -1).sum(2)
    for sums_B, total_B in zip(sums_6B[3:], totals, strict=True):
        sums_B.copy_(total_B)


def bin_means(shares_6B: Tensor) -> Tensor:
    """Return the mean of t in each bin (-inf, 1), [1, 2), [2, 3), [3, inf), [B, 4].

    Takes the sums divided by the length of a row; the mean of t is 2. An empty bin has an edge.
    """
    low_B, high_B, both_B = shares_6B[3:]
    zero_B = torch.zeros_like(low_B)
    from_5B = torch.stack([zero_B + 1, low_B + high_B - both_B, high_B, both_B, zero_B])
    edges_31 = _edges(zero_B.device)
    above_3B = shares_6B[:3] - (1 - from_5B[1:4]) * edges_31
    above_5B = torch.stack([zero_B + 2, *above_3B, zero_B])
    shares_4B = from_5B[:-1] - from_5B[1:]
    # A bin's share is 0 or at least 1 / 65,536: 1e-6 only spares empty bins a division by 0.
    means_4B = (above_5B[:-1] - above_5B[1:]) / shares_4B.clamp(min=1e-6)
    # Differences of sums lose digits: a mean may lie outside its bin, that of an empty one does.
    means_4B[1:].clamp_(min=edges_31)
    means_4B[:3].clamp_(max=edges_31)
    return means_4B.T


@cache
def _edges(device: torch.device) -> Tensor:
    """Return the edges between the bins, [3, 1]."""
    return torch.tensor([[1.0], [2.0], [3.0]], device=device)
