"""`int8`: blocks scaled by their largest magnitude, rounded to nearest.

Payload::

    scales   bf16, amax / 127 of each block of `block` values
    codes    int8, one for each value; value = code * scale

A decoder multiplies once in fp32, so it has the same bits everywhere. Encoders write
codes in -127..127; a decoder also takes -128. An all-zero block has scale 0.

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
from atoll.compression.kernels.blocks import BlockCodec, absmax_scales, scale_blocks_, steps_of
from atoll.compression.registry import register


@register
@dataclass(frozen=True)
class Int8(BlockCodec):
    """8 bits a value and 16 a block; contractive."""

    name: ClassVar[str] = "int8"
    code: ClassVar[int] = 4
    code_dtype: ClassVar[torch.dtype] = torch.int8
    reads_once: ClassVar[bool] = True
    alike_in_rows: ClassVar[bool] = True
    block: int = 128

    def _code_bytes(self, numel: int) -> int:
        return numel

    def _factors(self, measures_BM: Tensor, scales_BS: Tensor) -> Tensor:
        return absmax_scales(measures_BM, 127.0, scales_BS)

    def _write_tile(
        self, x_BK: Tensor, factors_BF: Tensor, scales_BS: Tensor, codes: Tensor, numel: int
    ) -> None:
        codes.copy_(part(steps_of(x_BK, factors_BF).view(-1), 0, numel))

    def _read_tile(self, codes: Tensor, scales_BS: Tensor, out_M: Tensor) -> None:
        out_M.copy_(codes)
        scale_blocks_(out_M, scales_BS, self.block)
