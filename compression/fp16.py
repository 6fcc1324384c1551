"""`fp16`: half precision with a power-of-two scale, so that no range of inputs overflows.

Payload::

    scale    bf16 power of two, one for the frame; the largest value / scale is in [2^14, 2^15)
    values   fp16, one each; value = code * scale

Pseudo-gradients of 1e-7 would be denormal in plain fp16 and 70,000 infinite; scaling by a
power of two costs no precision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from atoll.compression.base import Codec, Dims, carve, peak, spans
from atoll.compression.raw import require_all_finite
from atoll.compression.registry import register
from atoll.compression.scratch import scratch

EXPONENT = 0x7F800000  # of an fp32


@register
@dataclass(frozen=True)
class Fp16(Codec):
    """16 bits a value, 11 of precision; contractive."""

    name: ClassVar[str] = "fp16"
    code: ClassVar[int] = 2

    def _payload_bytes(self, dims: Dims) -> int:
        return 2 + 2 * math.prod(dims)

    def _write(self, x_N: Tensor, dims: Dims, payload: Tensor) -> Tensor:
        scale, codes = carve(payload, (torch.bfloat16, 1), (torch.float16, x_N.numel()))
        largest = torch.stack([peak(x_N[start:stop]) for start, stop in spans(x_N)]).amax()
        power = (largest.view(torch.int32) & EXPONENT).view(torch.float32) * 2.0**-14
        scale.copy_(power.clamp_(min=2.0**-126))
        inverse = scale.to(torch.float32).reciprocal_()
        for start, stop in spans(x_N):
            tile = x_N[start:stop]
            codes[start:stop].copy_(torch.mul(tile, inverse, out=scratch("fit", tile)))
        return largest

    def _read(self, payload: Tensor, dims: Dims, out_N: Tensor) -> None:
        scale_bf16, codes = carve(payload, (torch.bfloat16, 1), (torch.float16, out_N.numel()))
        scale = scale_bf16.to(torch.float32)
        for start, stop in spans(out_N):
            require_all_finite(out_N[start:stop].copy_(codes[start:stop]).mul_(scale))
