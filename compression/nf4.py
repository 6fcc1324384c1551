"""`nf4`: 16 levels at the quantiles of a gaussian, in blocks scaled by their largest magnitude.

Payload::

    scales   bf16, the largest magnitude of each block of `block` values
    codes    4 bits each, index into `LEVELS`; packed as `atoll.compression.kernels.planes`

The error of a value is at most 0.153 amax of its block: half the widest gap, that between -1 and
-0.696, and the rounding of the scale.

Source: QLoRA, arXiv:2305.14314 (NF4; its table). Departures: 16-bit scales, which is a quarter
of a bit less a value; the nearest level is looked up (see `atoll.compression.kernels.lookup`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from atoll.compression.blocks import FourBitCodec, absmax_scales, scale_blocks_
from atoll.compression.kernels.lookup import look_up, nearest_codes
from atoll.compression.kernels.planes import pack_, unpack
from atoll.compression.registry import register
from atoll.compression.scratch import scratch

LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


@register
@dataclass(frozen=True)
class Nf4(FourBitCodec):
    """4 bits a value and 16 a block, the least error of the 4-bit codecs; contractive."""

    name: ClassVar[str] = "nf4"
    code: ClassVar[int] = 21
    code_limit: ClassVar[float] = 1.0

    # No headroom: a value that the rounding of its scale puts beyond the last level gets that one.
    def _factors(self, measures_BM: Tensor, scales_BS: Tensor) -> Tensor:
        return absmax_scales(measures_BM, 1.0, scales_BS, code_limit=1.0, headroom=1.0)

    def _write_tile(
        self, x_BK: Tensor, factors_BF: Tensor, scales_BS: Tensor, codes: Tensor, numel: int
    ) -> None:
        unit_BK = torch.mul(x_BK, factors_BF, out=scratch("work", x_BK))
        found_BK = scratch("found", x_BK, torch.uint8)
        pack_(nearest_codes(unit_BK.view(-1), LEVELS, found_BK.view(-1)), 4, codes, numel)

    def _read_tile(self, codes: Tensor, scales_BS: Tensor, out_M: Tensor) -> None:
        look_up(unpack(codes, 4, out_M.numel(), high=False), LEVELS, out_M)
        scale_blocks_(out_M, scales_BS, self.block)
