"""Fast uniform noise, and integer hashes that are the same everywhere."""

from __future__ import annotations

import os
from functools import cache

import torch
from torch import Tensor

from atoll.compression.scratch import TILE, scratch

ONE_BITS = 0x3F800000  # fp32 1.0
FRACTION = 0x007FFFFE  # 22 random bits of an fp32 in [1, 2): adding 1 to it stays exact
MASK_64 = (1 << 64) - 1


def mix(state: int) -> int:
    """Return a 64-bit hash of a 64-bit integer (the output function of splitmix64)."""
    state = (state + 0x9E3779B97F4A7C15) & MASK_64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK_64
    return state ^ (state >> 31)


def fresh_seed() -> int:
    """Return 64 bits from the system's entropy."""
    return int.from_bytes(os.urandom(8), "little")


def uniform(like: Tensor, seed: int) -> Tensor:
    """Return noise in [1, 2) for each of the values of `like`; reused scratch.

    A fixed table R of random integers becomes (R xor a) b, with a and odd b drawn from the
    seed.  Over seeds each number is exactly uniform on its 2^22 steps, and two are nearly
    independent; it costs five passes where a generator costs twenty.
    """
    word = mix(seed)
    table = _table(like.device, -(-like.numel() // TILE))
    table = table[: like.numel()].view(like.shape)
    bits = scratch("noise", like, torch.int32)
    torch.bitwise_xor(table, _signed(word), out=bits)
    bits.mul_(_signed(word >> 32 | 1)).bitwise_right_shift_(9)
    return bits.bitwise_and_(FRACTION).bitwise_or_(ONE_BITS).view(torch.float32)


@cache
def _table(device: torch.device, num_tiles: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    count = num_tiles * TILE
    numbers = torch.randint(-(2**31), 2**31, (count,), generator=generator, dtype=torch.int64)
    return numbers.to(torch.int32).to(device)


def _signed(word: int) -> int:
    """Return the low 32 bits as a signed integer."""
    return ((word & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
