"""Fast uniform noise, and integer hashes that are the same everywhere."""

from __future__ import annotations

import os
from functools import cache

import torch
from torch import Tensor

from atoll.compression.base import part
from atoll.compression.scratch import TILE, scratch

MARGIN = 2.0**-10  # a value of at most 1 - MARGIN and noise stay below 3 / 2
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


def add_noise_(x: Tensor, seed: int) -> Tensor:
    """Add noise in [-1/2, 1/2] to each value, in place; return `x`.

    A fixed table R of random integers becomes (R xor a) b, with a and odd b drawn from the
    seed. Over seeds each number is exactly uniform on its 2^32 steps, and two are nearly
    independent; it costs four passes where a generator costs twenty. Rounded to fp32, the
    sum is right on average to 2^-23.
    """
    word = mix(seed)  # the low half is a, the high half b; odd, so that no two numbers meet
    table = _table(x.device, -(-x.numel() // TILE))
    bits = scratch("noise", x, torch.int32)
    flips, factor = (torch.tensor(_signed(w), dtype=torch.int32) for w in (word, word >> 32 | 1))
    torch.bitwise_xor(part(table, 0, x.numel()).view(x.shape), flips, out=bits)
    noise = scratch("bins", x).copy_(bits.mul_(factor))
    return x.add_(noise, alpha=2.0**-32)


@cache
def _table(device: torch.device, num_tiles: int) -> Tensor:
    # A fixed table: the randomness is in a and b, and one seed gives one frame in every process.
    generator = torch.Generator().manual_seed(0)
    count = num_tiles * TILE
    numbers = torch.randint(-(2**31), 2**31, (count,), generator=generator, dtype=torch.int64)
    return numbers.to(torch.int32).to(device)


def _signed(word: int) -> int:
    """Return the low 32 bits as a signed integer."""
    return ((word & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
