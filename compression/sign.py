"""`sign`: one bit a value, and the mean magnitude of a block.

Payload::

    scales   bf16, mean |x| / 64 of each block of `block` values
    codes    1 bit each, 1 for negative; packed as `atoll.compression.kernels.planes`

value = +-64 * scale; zero counts as positive. 64 is a bit of the int8 next to its sign, so a code
becomes a number by one `or`. The squared error of a block of K values is
|x|^2 - K mean^2 (and the rounding of the scale).

Source: Distributed Lion, arXiv:2404.00438 (signs both ways). Departure: the scale, which
makes the codec contractive for gradients as well as for Lion's updates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from atoll.compression.base import BF16_MAX
from atoll.compression.blocks import BlockCodec, mean_sizes, scale_blocks_
from atoll.compression.kernels.planes import pack_weighted, plane_bytes, unpack
from atoll.compression.registry import register
from atoll.compression.scratch import scratch

WEIGHTS = (1, 2, 4, 8, 16, 32, 64, -128)  # of the bits of an int8


@register
@dataclass(frozen=True)
class Sign(BlockCodec):
    """1 bit a value and 16 a block; contractive."""

    name: ClassVar[str] = "sign"
    code: ClassVar[int] = 11
    block: int = 1024
    code_limit: ClassVar[float] = 64.0
    reads_once: ClassVar[bool] = True
    together_on_cpu: ClassVar[bool] = True

    def _code_bytes(self, numel: int) -> int:
        return plane_bytes(numel, 8)

    def _measure(self, x_BK: Tensor, measures_BM: Tensor) -> None:
        mean_sizes(x_BK, measures_BM)

    def _factors(self, measures_BM: Tensor, scales_BS: Tensor) -> Tensor:
        scales_BS.copy_(torch.mul(measures_BM, 1 / 64).clamp_(max=BF16_MAX / self.code_limit))
        return measures_BM

    def _write_tile(
        self, x_BK: Tensor, factors_BF: Tensor, scales_BS: Tensor, codes: Tensor, numel: int
    ) -> None:
        negative_BK = torch.lt(x_BK, 0, out=scratch("work", x_BK))
        pack_weighted(negative_BK, WEIGHTS, codes, numel)

    def _read_tile(self, codes: Tensor, scales_BS: Tensor, out_M: Tensor) -> None:
        negative = unpack(codes, 1, out_M.numel(), high=True)
        out_M.copy_(negative.bitwise_or_(0x40).view(torch.int8))  # 0x40 is 64, 0xC0 is -64
        scale_blocks_(out_M, scales_BS, self.block)
