"""Codes that stand for the levels of a table: the nearest level by look-up, and back.

The nearest level of every fp16 is kept in 65,536 bytes, so that encoding is a rounding to fp16
and a look-up. A value within 2^-11 of the middle of two levels may thus get the farther one.
"""

from __future__ import annotations

import bisect
import itertools
from functools import cache

import torch
from torch import Tensor

from atoll.compression.scratch import scratch

Levels = tuple[float, ...]  # rising; a tuple, so that tables are cached by it


def nearest_codes(unit_M: Tensor, levels: Levels, found_M: Tensor) -> Tensor:
    """Store the index of the nearest level of each value as uint8; return `found_M`."""
    half_M = scratch("half", unit_M, torch.float16).copy_(unit_M).view(torch.int16)
    index_M = scratch("index", unit_M, torch.int32).copy_(half_M).bitwise_and_(0xFFFF)
    return torch.index_select(_nearest(levels, unit_M.device), 0, index_M, out=found_M)


def look_up(codes: Tensor, levels: Levels, out_M: Tensor) -> None:
    """Write the level of each code to `out_M`."""
    index_M = scratch("index", out_M, torch.int32).copy_(codes)
    torch.index_select(_table(levels, out_M.device), 0, index_M, out=out_M)


@cache
def _table(levels: Levels, device: torch.device) -> Tensor:
    return torch.tensor(levels, dtype=torch.float32, device=device)


@cache
def _nearest(levels: Levels, device: torch.device) -> Tensor:
    """Return the nearest level of every fp16, by its bits; those beyond the ends get the ends.

    Of two equally near the lower. NaN gets some level: the witness of its frame refuses it.
    """
    middles = [(a + b) / 2 for a, b in itertools.pairwise(levels)]
    every = torch.arange(65_536, dtype=torch.int32).to(torch.int16).view(torch.float16)
    codes = [bisect.bisect_left(middles, value) for value in every.tolist()]
    return torch.tensor(codes, dtype=torch.uint8, device=device)
