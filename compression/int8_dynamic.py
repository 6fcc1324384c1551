"""`int8-dynamic`: a non-linear 8-bit code in blocks, fine near zero, 7 decades deep.

Payload::

    scales   bf16, the largest magnitude of each block of `block` values
    codes    uint8, index into the code table; value = TABLE[code] * scale

The error of a value is at most 0.011 amax of its block: a table without -1, and the rounding of the
scale. Small values keep their magnitude: that is the use of the code.

Source: 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861; the table is that of
its "dynamic tree" data type: signed, up to 7 exponent bits.
Departures: blocks of 256, 16-bit scales; the nearest code is looked up (see
`atoll.compression.kernels.lookup`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from atoll.compression.base import part
from atoll.compression.blocks import BlockCodec, absmax_scales, scale_blocks_
from atoll.compression.kernels.lookup import Levels, look_up, nearest_codes
from atoll.compression.registry import register
from atoll.compression.scratch import scratch

EXPONENTS = 7  # those of the paper's data type


@register
@dataclass(frozen=True)
class Int8Dynamic(BlockCodec):
    """8 bits a value and 16 a block, small values kept; contractive."""

    name: ClassVar[str] = "int8-dynamic"
    code: ClassVar[int] = 5
    code_limit: ClassVar[float] = 1.0

    def _code_bytes(self, numel: int) -> int:
        return numel

    def _factors(self, measures_BM: Tensor, scales_BS: Tensor) -> Tensor:
        return absmax_scales(measures_BM, 1.0, scales_BS, code_limit=1.0, headroom=1.0)

    def _write_tile(
        self, x_BK: Tensor, factors_BF: Tensor, scales_BS: Tensor, codes: Tensor, numel: int
    ) -> None:
        unit_BK = torch.mul(x_BK, factors_BF, out=scratch("work", x_BK))
        nearest_codes(part(unit_BK.view(-1), 0, numel), code_table(), codes)

    def _read_tile(self, codes: Tensor, scales_BS: Tensor, out_M: Tensor) -> None:
        look_up(codes, code_table(), out_M)
        scale_blocks_(out_M, scales_BS, self.block)


@cache
def code_table() -> Levels:
    """Return the 256 codes in rising order, each the fp32 nearest to its definition."""
    codes = [0.0, 1.0]
    for exponent in range(EXPONENTS):
        count = 2**exponent
        step = 0.9 / count
        means = [0.1 + step * (i + 0.5) for i in range(count)]
        unit = 10.0 ** (exponent - EXPONENTS + 1)
        codes += [unit * mean for mean in means] + [-unit * mean for mean in means]
    table = torch.tensor(sorted(codes), dtype=torch.float64).to(torch.float32)
    return tuple(table.tolist())
