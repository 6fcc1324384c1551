"""`ternary`: -1, 0 or 1 times a scale; five values to a byte.

Payload::

    scales   bf16, one for each block of `block` values
    codes    balanced base 3: five digits -1, 0, 1 to an int8, d0 + 3 d1 + 9 d2 + 27 d3 + 81 d4

Digits are cut into planes as in `atoll.compression.kernels.planes` (plane 0 the lowest digit).
They come out from the highest on: d4 is the integer nearest to byte / 81, d3 that to the rest / 27
and so on. Encoders write -121..121; a decoder takes every byte (at the ends of the range d4
is then 2 or -2).

Variants::

    ternary                    unbiased: scale max |x|, value +-scale with probability |x| / scale
    ternary(clip=2.5)          as TernGrad: x clipped at 2.5 sigma first; unbiased about the
                               clipped x only, smaller variance; no feedback either
    ternary(stochastic=False)  contractive: |x| above 0.7 mean |x| becomes its block's mean

A stochastic value errs by less than scale; its variance is |x| (scale - |x|).

Source: TernGrad, arXiv:1705.07878; the deterministic rule is that of Ternary Weight Networks,
arXiv:1605.04711. Departure: blocks of a tile, the layer in a reduction by cells.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from atoll.compression.base import BF16_MAX, TINY, CodecError, Mode, part
from atoll.compression.blocks import BlockCodec, absmax_scales, scale_blocks_
from atoll.compression.kernels.noise import MARGIN, add_noise_, fresh_seed, mix
from atoll.compression.kernels.planes import pack_weighted, plane_bytes, run_length
from atoll.compression.registry import register
from atoll.compression.scratch import TILE, room, scratch

WEIGHTS = (1, 3, 9, 27, 81)  # 3^5 = 243 fit in a byte: 1.6 bits a value
DIGITS = len(WEIGHTS)
THRESHOLD = 0.7  # of the mean magnitude; near the best for gaussian and for uniform values


@register
@dataclass(frozen=True)
class Ternary(BlockCodec):
    """1.6 bits a value and 16 a block; unbiased, or contractive with `stochastic=False`."""

    name: ClassVar[str] = "ternary"
    code: ClassVar[int] = 10
    version: ClassVar[int] = 2
    block: int = TILE
    stochastic: bool = True
    clip: float = 0.0
    seed: int = -1
    scales_first: ClassVar[bool] = False
    code_limit: ClassVar[float] = 2.0
    _draws: Iterator[int] = field(
        default_factory=itertools.count, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        """Refuse a negative clip, and one that has no effect."""
        super().__post_init__()
        if self.clip < 0 or (self.clip and not self.stochastic):
            raise CodecError(f"expected clip >= 0, and 0 if not stochastic; got {self.clip}")

    @property
    def mode(self) -> Mode:
        """Return "unbiased" for the stochastic variants."""
        return "unbiased" if self.stochastic else "contractive"

    def _code_bytes(self, numel: int) -> int:
        return plane_bytes(numel, DIGITS)

    def _factors(self, measures_BM: Tensor, scales_BS: Tensor) -> Tensor:
        if self.stochastic and not self.clip:
            return absmax_scales(measures_BM, 1.0, scales_BS, code_limit=self.code_limit)
        return measures_BM

    def _write_tile(
        self, x_BK: Tensor, factors_BF: Tensor, scales_BS: Tensor, codes: Tensor, numel: int
    ) -> None:
        if self.stochastic:
            digits = self._draw(x_BK, factors_BF, scales_BS)
        else:
            digits = _nearest(x_BK, factors_BF, scales_BS)
        pack_weighted(digits, WEIGHTS, codes, numel)

    def _draw(self, x_BK: Tensor, factors_B1: Tensor, scales_BS: Tensor) -> Tensor:
        if self.clip:
            peaks_B1 = torch.minimum(factors_B1, self.clip * _sigma(x_BK, factors_B1))
            factors_B1 = absmax_scales(peaks_B1, 1.0, scales_BS, code_limit=self.code_limit)
        unit_BK = torch.mul(x_BK, factors_B1, out=scratch("work", x_BK))
        if self.clip:
            # The clip is here: without it values exceed 1, and even 1 plus noise could round to 2.
            unit_BK.clamp_(-1 + MARGIN, 1 - MARGIN)
        seed = fresh_seed() if self.seed < 0 else mix(self.seed) + next(self._draws)
        return add_noise_(unit_BK, seed).round_()

    def _read_tile(self, codes: Tensor, scales_BS: Tensor, out_M: Tensor) -> None:
        unpack_digits(codes, out_M)
        scale_blocks_(out_M, scales_BS, self.block)


def _sigma(x_BK: Tensor, peaks_B1: Tensor) -> Tensor:
    """Return the root mean square of each block, without overflow."""
    unit_BK = scratch("work", x_BK)
    torch.mul(x_BK, torch.add(peaks_B1, TINY).reciprocal_(), out=unit_BK)
    return unit_BK.mul_(unit_BK).mean(1, keepdim=True).sqrt_().mul_(peaks_B1)


def _nearest(x_BK: Tensor, peaks_B1: Tensor, scales_BS: Tensor) -> Tensor:
    """Threshold at 0.7 of the mean magnitude; the scale is the mean of the values above it."""
    unit_BK = scratch("bins", x_BK)
    torch.mul(x_BK, torch.add(peaks_B1, TINY).reciprocal_(), out=unit_BK)
    size_BK = torch.abs(unit_BK, out=scratch("work", x_BK))
    limit_B1 = size_BK.mean(1, keepdim=True).mul_(THRESHOLD).add_(TINY)
    size_BK.mul_(limit_B1.reciprocal()).clamp_(max=1e6)
    kept_B1 = bin_means_above_one(size_BK)
    scales_BS.copy_((kept_B1 * limit_B1 * peaks_B1).clamp_(max=BF16_MAX / 2))
    return unit_BK.mul_(limit_B1.reciprocal()).clamp_(-1.5, 1.5).trunc_()


def bin_means_above_one(size_BK: Tensor) -> Tensor:
    """Return the mean of each row's values of at least 1, [B, 1]; 1 if there is none."""
    size = size_BK.shape[1]
    kept_BK = scratch("clipped", size_BK)
    count = torch.clamp(size_BK, max=1.0, out=kept_BK).floor_().sum(1, keepdim=True)
    total = torch.clamp(size_BK, min=1.0, out=kept_BK).sum(1, keepdim=True) - (size - count)
    return (total / count.clamp(min=1)).clamp_(min=1.0)


def unpack_digits(packed: Tensor, out_M: Tensor) -> None:
    """Write the digits of `packed` to `out_M`.

    Products with 1 / 81 and so on are rounded alike everywhere, and no multiple of 1 / 2 is
    within 1 / 162 of one; the rests are exact.
    """
    length = run_length(out_M.numel())
    runs = out_M.numel() // length
    width = packed.numel() // runs
    rest = room("rest", (runs, width), packed.device, torch.float32)
    rest.copy_(packed.view(torch.int8).view(runs, width))
    digits = room("digits", (runs, DIGITS, width), packed.device, torch.float32)
    for weight, plane in zip(reversed(WEIGHTS), reversed(digits.unbind(1)), strict=True):
        torch.mul(rest, 1 / weight, out=plane)
        rest.sub_(plane.round_(), alpha=weight)
    out_M.view(runs, length).copy_(part(digits.view(runs, -1), 0, length, dim=1))
