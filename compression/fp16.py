"""`fp16`: half precision with a power-of-two scale, so that no range of inputs overflows.

Payload::

    scales   bf16 power of two for each block of `block` values; values over their scale are
             below 2^15
    codes    fp16, one each; value = code * scale

Pseudo-gradients of 1e-7 would be denormal in plain fp16 and 70,000 infinite; scaling by a
power of two costs no precision. An encoder brings the norm of a block, which is at most 256 times
its largest value, to [2^14, 2^15). The error is at most 2^-11 of the value or, for the denormal
ones, 2^-39 of that norm. A decoder refuses values that are NaN or infinite.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from atoll.compression.base import part
from atoll.compression.blocks import BlockCodec, block_peaks, scale_blocks_, squarable
from atoll.compression.floats import require_all_finite
from atoll.compression.registry import register
from atoll.compression.scratch import TILE, scratch

EXPONENT = 0x7F800000  # of an fp32


@register
@dataclass(frozen=True)
class Fp16(BlockCodec):
    """16 bits a value, 11 of precision, and 16 a block; contractive."""

    name: ClassVar[str] = "fp16"
    code: ClassVar[int] = 2
    version: ClassVar[int] = 2
    block: int = TILE
    code_limit: ClassVar[float] = 2.0**14
    code_dtype: ClassVar[torch.dtype] = torch.float16
    reads_once: ClassVar[bool] = True

    def _code_bytes(self, numel: int) -> int:
        return 2 * numel

    def _measure(self, x_BK: Tensor, measures_BM: Tensor) -> None:
        if x_BK.device.type == "cpu":  # one pass where two would find the largest magnitude
            torch.linalg.vector_norm(x_BK, 2, 1, keepdim=True, out=measures_BM)
            if squarable(measures_BM):
                return
        block_peaks(x_BK, measures_BM)

    def _factors(self, measures_BM: Tensor, scales_BS: Tensor) -> Tensor:
        exponents_B1 = (measures_BM.view(torch.int32) & EXPONENT).view(torch.float32)
        # Scales are normal, 2^-126 at least, so that their reciprocals are exact and finite.
        scales_B1 = exponents_B1.mul_(2.0**-14).clamp_(min=2.0**-126)
        scales_BS.copy_(scales_B1)
        return scales_B1.reciprocal_()

    def _write_tile(
        self, x_BK: Tensor, factors_BF: Tensor, scales_BS: Tensor, codes: Tensor, numel: int
    ) -> None:
        scaled_M = torch.mul(x_BK, factors_BF, out=scratch("work", x_BK)).view(-1)
        codes.copy_(part(scaled_M, 0, numel))

    def _read_tile(self, codes: Tensor, scales_BS: Tensor, out_M: Tensor) -> None:
        out_M.copy_(codes)
        scale_blocks_(out_M, scales_BS, self.block)
        require_all_finite(out_M)
