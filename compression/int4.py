"""`int4`: blocks scaled by their largest magnitude, 15 levels, two codes to a byte.

Payload::

    scales   bf16, amax / 112 of each block of `block` values
    codes    4 bits each, two's complement, packed as `atoll.compression.planes`

value = (16 code) * scale: the code is used where it stands, in the high half of a byte.
Encoders write -7..7; a decoder also takes -8.

Source: SDP4Bit, arXiv:2410.15526 (4 bits and small groups for what travels between nodes).
Departures: symmetric levels around zero and 16-bit scales; no Hadamard rotation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from atoll.compression.blocks import BlockCodec, absmax_scales, scale_blocks_
from atoll.compression.planes import pack, plane_bytes, unpack
from atoll.compression.registry import register
from atoll.compression.scratch import scratch


@register
@dataclass(frozen=True)
class Int4(BlockCodec):
    """4 bits a value and 16 a block; contractive."""

    name: ClassVar[str] = "int4"
    code: ClassVar[int] = 7
    block: int = 64
    tiles_at_once: ClassVar[int] = 4

    def _code_bytes(self, numel: int) -> int:
        return plane_bytes(numel, 2)

    def _factors(self, peaks_B1: Tensor, scales_BS: Tensor) -> Tensor:
        return absmax_scales(peaks_B1, 112.0, scales_BS).mul_(1 / 16)

    def _write_tile(
        self, x_BK: Tensor, factors_B1: Tensor, scales_BS: Tensor, codes: Tensor, numel: int
    ) -> None:
        steps_BK = torch.mul(x_BK, factors_B1, out=scratch("work", x_BK))
        pack(steps_BK.round_(), 4, codes, numel)

    def _read_tile(self, codes: Tensor, scales_BS: Tensor, out_M: Tensor) -> None:
        out_M.copy_(unpack(codes, 4, out_M.numel(), high=True).view(torch.int8))
        scale_blocks_(out_M, scales_BS, self.block)
