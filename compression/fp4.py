"""`fp4`: sign and a 3-bit exponent (E3M0), in blocks scaled by their largest magnitude.

Payload::

    scales   bf16, 256 amax of each block of `block` values
    codes    4 bits each: sign, then the exponent e; packed as `atoll.compression.planes`

value = 0 for e = 0, else +-2^(e - 15) * scale: the levels are 0 and amax times 2^-6 ... 1.
The code is used as the sign and the exponent of an fp16.  Rounding is to the nearest level.
Magnitudes beyond 1.3e36 become that.

Source: Streaming DiLoCo, arXiv:2501.18512 (E3M0 for outer gradients).
Departure: scales for each block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from atoll.compression.blocks import BlockCodec, absmax_scales, scale_blocks_
from atoll.compression.planes import pack, plane_bytes, repeated, unpack
from atoll.compression.registry import register
from atoll.compression.scratch import scratch

LARGEST = 2.0**-8  # of the codes, as fp16
HALF_MANTISSA = 0x200


@register
@dataclass(frozen=True)
class Fp4(BlockCodec):
    """4 bits a value and 16 a block, for heavy tails; contractive."""

    name: ClassVar[str] = "fp4"
    code: ClassVar[int] = 8
    block: int = 64
    tiles_at_once: ClassVar[int] = 4
    code_limit: ClassVar[float] = 1.0

    def _code_bytes(self, numel: int) -> int:
        return plane_bytes(numel, 2)

    def _factors(self, peaks_B1: Tensor, scales_BS: Tensor) -> Tensor:
        return absmax_scales(peaks_B1, LARGEST, scales_BS, code_limit=self.code_limit)

    def _write_tile(
        self, x_BK: Tensor, factors_B1: Tensor, scales_BS: Tensor, codes: Tensor, numel: int
    ) -> None:
        scaled_BK = torch.mul(x_BK, factors_B1, out=scratch("work", x_BK))
        half_BK = scratch("half", x_BK, torch.float16).copy_(scaled_BK).view(torch.int16)
        signed_BK = half_BK.add_(HALF_MANTISSA).bitwise_right_shift_(10)
        pack(_sign_and_exponent(signed_BK), 4, codes, numel)

    def _read_tile(self, codes: Tensor, scales_BS: Tensor, out_M: Tensor) -> None:
        code_M = unpack(codes, 4, out_M.numel(), high=False)
        half_M = scratch("half", out_M, torch.int16).copy_(_upper_half(code_M))
        out_M.copy_(half_M.bitwise_left_shift_(8).view(torch.float16))
        scale_blocks_(out_M, scales_BS, self.block)


def _sign_and_exponent(signed_M: Tensor) -> Tensor:
    """Turn e or e - 32 (int16) into 4 bits: sign and e."""
    sign_M = scratch("sign", signed_M, torch.int16)
    torch.bitwise_right_shift(signed_M, 2, out=sign_M)
    return signed_M.bitwise_and_(7).bitwise_or_(sign_M.bitwise_and_(8))


def _upper_half(code_M: Tensor) -> Tensor:
    """Turn 4 bits into the upper byte of an fp16: sign at bit 7, exponent at bits 4..2."""
    short = -code_M.numel() % 8
    if short:
        code_M = torch.cat([code_M, code_M.new_zeros(short)])
    words = code_M.view(torch.int64)
    sign = (words & repeated(8)) << 4
    return (
        ((words & repeated(7)) << 2).bitwise_or_(sign).view(torch.uint8)[: code_M.numel() - short]
    )
