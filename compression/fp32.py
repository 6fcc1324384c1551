"""`fp32`: the values as they are.

Payload: one fp32 (little endian) for each value. For tests, baselines and small layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from atoll.compression.raw import RawCodec
from atoll.compression.registry import register


@register
@dataclass(frozen=True)
class Fp32(RawCodec):
    """32 bits a value, lossless; contractive with a residual of zero."""

    name: ClassVar[str] = "fp32"
    code: ClassVar[int] = 1
    dtype: ClassVar[torch.dtype] = torch.float32
