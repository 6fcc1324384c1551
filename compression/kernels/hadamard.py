"""A seeded orthonormal basis of a part of a space, of the same bits on every machine.

The coordinates, in a seeded order and with seeded signs, are cut into blocks of falling powers of
two (384 = 256 + 128). Each block takes a seeded choice of columns of its Hadamard matrix, as many
as its share of the width. An entry is 0 or +-1 / sqrt(block): columns are orthogonal in exact
arithmetic, and of length 1 but for the rounding of that root.

All coordinates of a block weigh the same. A block below width / k may get no column, and then its
coordinates are lost: a width should be a multiple of a power of two that is larger than that.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from atoll.compression.kernels.noise import mix


@functools.lru_cache(maxsize=8)  # a process has one width and two devices
@torch.inference_mode(False)  # autograd may use it, whatever the mode of the thread that makes it
def seeded_basis(width: int, k: int, seed: int, device: torch.device) -> Tensor:
    """Return `k` orthonormal columns, fp32 [width, k]; shared, so not to be changed.

    Takes 1 <= k <= width <= 65,536.
    """
    start = mix(seed)
    words = [mix(start + place) for place in range(width)]
    order = torch.tensor(sorted(range(width), key=words.__getitem__))
    signs_D = torch.tensor([1.0 - 2.0 * (word & 1) for word in words])
    basis_DK = torch.zeros(width, k)
    for begin, end in _blocks(width):
        # Rounded up, so that what is left over goes to the largest blocks.
        first, last = -(-k * begin // width), -(-k * end // width)
        columns = _choose(end - begin, last - first, mix(start) + begin)
        places = order[begin:end]
        block = _hadamard(end - begin, columns) * signs_D[places].unsqueeze(1)
        basis_DK[places, first:last] = block * (1 / math.sqrt(end - begin))
    return basis_DK.to(device)


def _blocks(width: int) -> Iterator[tuple[int, int]]:
    """Return the ranges of the blocks, the largest first."""
    begin = 0
    for bit in reversed(range(width.bit_length())):
        if width >> bit & 1:
            yield begin, begin + (1 << bit)
            begin += 1 << bit


def _choose(size: int, count: int, start: int) -> list[int]:
    """Return `count` different numbers below `size`, drawn by hashes."""
    return sorted(range(size), key=lambda column: mix(start + column))[:count]


def _hadamard(size: int, columns: list[int]) -> Tensor:
    """Return some columns of the Hadamard matrix, fp32: -1 where an odd number of bits is shared.

    The bits are those of the numbers of row and column, both below 2^16.
    """
    rows = torch.arange(size, dtype=torch.int32).unsqueeze(1)
    shared = rows & torch.tensor(columns, dtype=torch.int32)
    for shift in (8, 4, 2, 1):
        shared ^= shared >> shift
    return (1 - 2 * (shared & 1)).to(torch.float32)
