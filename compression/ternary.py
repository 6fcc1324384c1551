"""`ternary`: -1, 0 or 1 times a scale; five values to a byte.

Payload::

    scales   bf16, one for each block of `block` values
    codes    base 3, digits 0, 1, 2 for -1, 0, 1

Five digits are cut into planes as in `atoll.compression.planes` (plane 0 the lowest digit).
A byte holds ceil(v 256 / 243) of their value v = d0 + 3 d1 + ... + 81 d4, so that digits come
out from the highest on as (byte * 3) >> 8, with the low 8 bits of the product carried on.  Every
byte is valid.

Variants::

    ternary                    unbiased: scale max |x|, value +-scale with probability |x| / scale
    ternary(clip=2.5)          as TernGrad: x clipped at 2.5 sigma first; unbiased about the
                               clipped x only, smaller variance; no feedback either
    ternary(stochastic=False)  contractive: |x| above 0.7 mean |x| becomes its block's mean

Source: TernGrad, arXiv:1705.07878; the deterministic rule is that of Ternary Weight Networks,
arXiv:1605.04711.  Departure: blocks of a tile, the layer in a reduction by cells.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from atoll.compression.base import BF16_MAX, TINY, CodecError, Mode, part
from atoll.compression.blocks import (
    BlockCodec,
    absmax_scales,
    block_peaks,
    scale_blocks_,
)
from atoll.compression.noise import fresh_seed, mix, uniform
from atoll.compression.planes import plane_bytes, planes_of, run_length
from atoll.compression.registry import register
from atoll.compression.scratch import TILE, room, scratch

DIGITS = 5  # 3^5 = 243 fit in a byte: 1.6 bits a value
THRESHOLD = 0.7  # of the mean magnitude; near the best for gaussian and for uniform values


@register
@dataclass(frozen=True)
class Ternary(BlockCodec):
    """1.6 bits a value and 16 a block; unbiased, or contractive with `stochastic=False`."""

    name: ClassVar[str] = "ternary"
    code: ClassVar[int] = 10
    block: int = TILE
    stochastic: bool = True
    clip: float = 0.0
    seed: int = -1
    code_limit: ClassVar[float] = 1.0
    _draws: Iterator[int] = field(
        default_factory=itertools.count, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        """Refuse a clip that does nothing or cannot be."""
        super().__post_init__()
        if self.clip < 0 or (self.clip and not self.stochastic):
            raise CodecError(f"expected clip >= 0, and 0 if not stochastic; got {self.clip}")

    @property
    def mode(self) -> Mode:
        """Return "unbiased" for the stochastic variants."""
        return "unbiased" if self.stochastic else "contractive"

    def _code_bytes(self, numel: int) -> int:
        return plane_bytes(numel, DIGITS)

    def _write_tile(self, x_BK: Tensor, scales_B: Tensor, codes: Tensor, numel: int) -> Tensor:
        amax_B = block_peaks(x_BK)
        if self.stochastic:
            digits = self._draw(x_BK, amax_B, scales_B)
        else:
            digits = _nearest(x_BK, amax_B, scales_B)
        pack_digits(digits, codes, numel)
        return amax_B.amax()

    def _draw(self, x_BK: Tensor, amax_B: Tensor, scales_B: Tensor) -> Tensor:
        if self.clip:
            amax_B = torch.minimum(amax_B, self.clip * _sigma(x_BK, amax_B))
        inverse_B1 = absmax_scales(amax_B, 1.0, scales_B, code_limit=self.code_limit)
        unit_BK = torch.mul(x_BK, inverse_B1, out=scratch("work", x_BK))
        if self.clip:
            unit_BK.clamp_(-1.0, 1.0)
        return unit_BK.add_(uniform(x_BK, self._next_seed()))

    def _next_seed(self) -> int:
        return fresh_seed() if self.seed < 0 else mix(self.seed) + next(self._draws)

    def _read_tile(self, codes: Tensor, scales_B: Tensor, out_M: Tensor) -> None:
        out_M.copy_(unpack_digits(codes, out_M.numel()))
        scale_blocks_(out_M, scales_B, self.block)


def _sigma(x_BK: Tensor, amax_B: Tensor) -> Tensor:
    """Return the root mean square of each block, without overflow."""
    unit_BK = scratch("work", x_BK)
    torch.mul(x_BK, torch.add(amax_B, TINY).reciprocal_().unsqueeze(1), out=unit_BK)
    return unit_BK.mul_(unit_BK).mean(1).sqrt_().mul_(amax_B)


def _nearest(x_BK: Tensor, amax_B: Tensor, scales_B: Tensor) -> Tensor:
    """Threshold at 0.7 of the mean magnitude; the scale is the mean of what is above."""
    unit_BK = scratch("bins", x_BK)
    torch.mul(x_BK, torch.add(amax_B, TINY).reciprocal_().unsqueeze(1), out=unit_BK)
    size_BK = torch.abs(unit_BK, out=scratch("work", x_BK))
    limit_B1 = size_BK.mean(1, keepdim=True).mul_(THRESHOLD).add_(TINY)
    size_BK.mul_(limit_B1.reciprocal()).clamp_(max=1e6)
    kept = bin_means_above_one(size_BK)
    scales_B.copy_((kept * limit_B1[:, 0] * amax_B).clamp_(max=BF16_MAX))
    return unit_BK.mul_(limit_B1.reciprocal()).clamp_(-1.5, 1.5).trunc_().add_(1.0)


def bin_means_above_one(size_BK: Tensor) -> Tensor:
    """Return the mean of each row's values of at least 1; 1 where there is none."""
    size = size_BK.shape[1]
    kept_BK = scratch("clipped", size_BK)
    count = torch.clamp(size_BK, max=1.0, out=kept_BK).floor_().sum(1)
    total = torch.clamp(size_BK, min=1.0, out=kept_BK).sum(1) - (size - count)
    return (total / count.clamp(min=1)).clamp_(min=1.0)


def pack_digits(digits_M: Tensor, out: Tensor, numel: int) -> None:
    """Pack the first `numel` digits (0, 1, 2; fractions are cut off), five to a byte."""
    words = planes_of(digits_M, numel, DIGITS)
    value = words.mul_(_powers(words.device)).sum(1).view(torch.uint8)
    number = scratch("number", value).copy_(value)
    out.copy_(number.mul_(256 / 243).ceil_().view(-1))


@cache
def _powers(device: torch.device) -> Tensor:
    return torch.tensor([3**j for j in range(DIGITS)], device=device).unsqueeze(1)


def unpack_digits(packed: Tensor, numel: int) -> Tensor:
    """Return `numel` digits less 1 as int8."""
    length = run_length(numel)
    runs = numel // length
    width = packed.numel() // runs
    rest = scratch("base3", packed, torch.int16).copy_(packed).view(runs, -1)
    digit = scratch("digit", rest, torch.int16)
    digits = room("codes", (runs, DIGITS, width), packed.device, torch.int8)
    for plane in reversed(digits.unbind(1)):
        torch.bitwise_right_shift(rest.mul_(3), 8, out=digit)
        plane.copy_(digit.sub_(1))
        rest.bitwise_and_(255)
    return part(digits.view(runs, -1), 0, length, dim=1).reshape(-1)
