"""`fp4`: sign and a 3-bit exponent (E3M0), in blocks scaled by their largest magnitude.

Payload::

    scales   bf16, 256 amax of each block of `block` values
    codes    4 bits each: sign, then the exponent e; in runs of a tile (the last is shorter)

A run of m codes is cut into four planes of L = 4 ceil(m / 16) codes, the last filled with zeros.
It is L uint16, each with code i of every plane, that of plane 0 in the highest bits. Shifted up
and two down again a code is the sign and the exponent of an fp16.

value = 0 for e = 0, else +-2^(e - 15) * scale: the levels are 0 and amax times 2^-6 ... 1.
Rounding is to the nearest level, but to 0 below 3/4 of the least: the error is at most 0.35 of a
value, or amax / 80 for the small ones. Magnitudes beyond 1.3e36 become that.

Source: Streaming DiLoCo, arXiv:2501.18512 (E3M0 for outer gradients).
Departure: scales for each block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from atoll.compression.base import BF16_MAX
from atoll.compression.blocks import FourBitCodec, block_peaks, scale_blocks_
from atoll.compression.kernels.planes import constant, pack_wide_, unpack_wide
from atoll.compression.registry import register
from atoll.compression.scratch import scratch

SIGN_AND_EXPONENT = 0x9C00  # of an fp16 with an exponent below 8
LEAST = 0.75 * 2.0**-14  # over the scale, and no longer 0: in the middle of 2^-15 and 2^-14
OCTAVE = 1 << 7  # in the bits of a bf16
LARGEST = BF16_MAX / 256  # what the largest scale stands for
MAGNITUDE = 0x7FFF  # bits of a bf16 without its sign


@register
@dataclass(frozen=True)
class Fp4(FourBitCodec):
    """4 bits a value and 16 a block, for heavy tails; contractive."""

    name: ClassVar[str] = "fp4"
    code: ClassVar[int] = 8
    version: ClassVar[int] = 2
    code_limit: ClassVar[float] = 1.0
    reads_once: ClassVar[bool] = True

    def _measure(self, x_BK: Tensor, measures_BM: Tensor) -> None:
        if x_BK.device.type == "cpu":
            size_BK = _magnitudes(x_BK)
            peaks_B1 = torch.amax(size_BK, 1, keepdim=True).view(torch.bfloat16)
            measures_BM.copy_(peaks_B1)
            if float(measures_BM.amax()) <= LARGEST:
                return
        block_peaks(x_BK, measures_BM)  # a large float may have become infinite as bf16
        if x_BK.device.type == "cpu":
            _magnitudes(x_BK.clamp(-LARGEST, LARGEST))

    def _factors(self, measures_BM: Tensor, scales_BS: Tensor) -> Tensor:
        """Return the bits of the least magnitude that is not 0 as bf16, an octave lower."""
        scales_BS.copy_(measures_BM).mul_(256.0).clamp_(max=BF16_MAX)
        return torch.mul(scales_BS, LEAST).view(torch.int16).sub_(OCTAVE)

    def _write_tile(
        self, x_BK: Tensor, factors_BF: Tensor, scales_BS: Tensor, codes: Tensor, numel: int
    ) -> None:
        """Encode the magnitudes that `_measure` left in scratch: bits of floats rise by octaves.

        32 times as high above the least, the three bits of the exponent lie below the sign. As no
        magnitude is above 86 times the least, none of these is a NaN.
        """
        size_BK = scratch("size", x_BK, torch.int16)
        rounded_BK = scratch("rounded", x_BK, torch.bfloat16)
        if x_BK.device.type != "cpu":  # its scratch is new at each call
            rounded_BK.copy_(x_BK.clamp(-LARGEST, LARGEST))
            torch.bitwise_and(rounded_BK.view(torch.int16), _int16(MAGNITUDE), out=size_BK)
        torch.maximum(size_BK, factors_BF, out=size_BK)
        torch.add(factors_BF * -32, size_BK, alpha=32, out=size_BK)
        code_BK = size_BK.view(torch.bfloat16)
        torch.copysign(code_BK, rounded_BK, out=code_BK)
        pack_wide_(
            size_BK.bitwise_right_shift_(_int16(12)).view(-1), codes.view(torch.int16), numel
        )

    def _read_tile(self, codes: Tensor, scales_BS: Tensor, out_M: Tensor) -> None:
        half_M = unpack_wide(codes.view(torch.int16), out_M.numel())
        half_M.bitwise_right_shift_(_int16(2))  # copies of the sign fill up
        half_M.bitwise_and_(_int16(SIGN_AND_EXPONENT))
        out_M.copy_(half_M.view(torch.float16))
        scale_blocks_(out_M, scales_BS, self.block)


def _magnitudes(x_BK: Tensor) -> Tensor:
    """Store x as bf16 (slot "rounded"), and its bits without the sign (slot "size")."""
    bits_BK = scratch("rounded", x_BK, torch.bfloat16).copy_(x_BK).view(torch.int16)
    size_BK = scratch("size", x_BK, torch.int16)
    return torch.bitwise_and(bits_BK, _int16(MAGNITUDE), out=size_BK)


def _int16(bits: int) -> Tensor:
    return constant(bits if bits < 0x8000 else bits - 0x10000, torch.int16)
