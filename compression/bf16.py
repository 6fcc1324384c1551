"""`bf16`: the upper half of fp32, rounded to nearest even.

Payload: one bfloat16 for each value. Values beyond the largest bf16 become that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from atoll.compression.raw import RawCodec
from atoll.compression.registry import register


@register
@dataclass(frozen=True)
class Bf16(RawCodec):
    """16 bits a value, 8 of precision, the range of fp32; contractive."""

    name: ClassVar[str] = "bf16"
    code: ClassVar[int] = 3
    dtype: ClassVar[torch.dtype] = torch.bfloat16
