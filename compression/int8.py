"""`int8`: blocks scaled by their largest magnitude, rounded to nearest.

Payload::

    scales   bf16, amax / 127 of each block of `block` values
    codes    int8, one for each value; value = code * scale

A decoder multiplies once in fp32, so it has the same bits everywhere.  Encoders write
codes in -127..127; a decoder also takes -128.  An all-zero block has scale 0.

Source: 8-Bit Approximations for Parallelism in Deep Learning, arXiv:1511.04561.
Departures: linear codes in blocks instead of a code of the whole tensor, so that one
outlier costs its block only; scales of 16 bits, for which the codes make up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from atoll.compression.base import part
from atoll.compression.blocks import BlockCodec, absmax_scales, block_peaks, scale_blocks_
from atoll.compression.registry import register
from atoll.compression.scratch import scratch


@register
@dataclass(frozen=True)
class Int8(BlockCodec):
    """8 bits a value and 16 a block; contractive."""

    name: ClassVar[str] = "int8"
    code: ClassVar[int] = 4
    block: int = 128

    def _code_bytes(self, numel: int) -> int:
        return numel

    def _write_tile(self, x_BK: Tensor, scales_B: Tensor, codes: Tensor, numel: int) -> Tensor:
        amax_B = block_peaks(x_BK)
        inverse_B1 = absmax_scales(amax_B, 127.0, scales_B)
        steps_BK = scratch("work", x_BK)
        torch.mul(x_BK, inverse_B1, out=steps_BK)
        codes.view(torch.int8).copy_(part(steps_BK.round_().view(-1), 0, numel))
        return amax_B.amax()

    def _read_tile(self, codes: Tensor, scales_B: Tensor, out_M: Tensor) -> None:
        out_M.copy_(codes.view(torch.int8))
        scale_blocks_(out_M, scales_B, self.block)
