"""`int4`: blocks scaled by their largest magnitude, 15 levels, two codes to a byte.

Payload::

    scales   bf16, amax / 112 of each block of `block` values
    codes    4 bits each, two's complement, packed as `atoll.compression.kernels.planes`

value = (16 code) * scale: the code stays in the high half of a byte, which saves a shift.
Encoders write -7..7; a decoder also takes -8. The error of a value is at most amax / 13.8 of its
block: half a step, and the rounding of its scale.

Source: SDP4Bit, arXiv:2410.15526 (4 bits and small groups for what travels between nodes).
Departures: symmetric levels around zero and 16-bit scales; no Hadamard rotation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from atoll.compression.blocks import FourBitCodec, absmax_scales, scale_blocks_, steps_of
from atoll.compression.kernels.planes import EIGHTS, pack_, unpack
from atoll.compression.registry import register
from atoll.compression.scratch import scratch

ZERO = 8  # added to codes while they are packed, so that none is negative; `EIGHTS` takes it off


@register
@dataclass(frozen=True)
class Int4(FourBitCodec):
    """4 bits a value and 16 a block; contractive."""

    name: ClassVar[str] = "int4"
    code: ClassVar[int] = 7
    reads_once: ClassVar[bool] = True

    def _factors(self, measures_BM: Tensor, scales_BS: Tensor) -> Tensor:
        # 112 = 7 * 16: scales are of codes in the high half of a byte, factors of codes of -7..7.
        return absmax_scales(measures_BM, 112.0, scales_BS).mul_(1 / 16)

    def _write_tile(
        self, x_BK: Tensor, factors_BF: Tensor, scales_BS: Tensor, codes: Tensor, numel: int
    ) -> None:
        code_BK = scratch("codes", x_BK, torch.int8)
        code_BK.copy_(steps_of(x_BK, factors_BF, ZERO))
        pack_(code_BK, 4, codes, numel, ZERO)
        codes.view(torch.int16).bitwise_xor_(EIGHTS)

    def _read_tile(self, codes: Tensor, scales_BS: Tensor, out_M: Tensor) -> None:
        out_M.copy_(unpack(codes, 4, out_M.numel(), high=True).view(torch.int8))
        scale_blocks_(out_M, scales_BS, self.block)
