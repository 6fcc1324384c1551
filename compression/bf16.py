"""`bf16`: the upper half of fp32, rounded to nearest even.

Payload: one bfloat16 for each value.  Values beyond the largest bf16 become that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from atoll.compression.base import BF16_MAX
from atoll.compression.raw import RawCodec
from atoll.compression.registry import register
from atoll.compression.scratch import scratch


@register
@dataclass(frozen=True)
class Bf16(RawCodec):
    """16 bits a value, 8 of precision, the range of fp32; contractive."""

    name: ClassVar[str] = "bf16"
    code: ClassVar[int] = 3
    dtype: ClassVar[torch.dtype] = torch.bfloat16

    def _fit(self, tile: Tensor, largest: Tensor) -> Tensor:
        if tile.device.type == "cpu" and float(largest) <= BF16_MAX:
            return tile
        return torch.clamp(tile, -BF16_MAX, BF16_MAX, out=scratch("fit", tile))
