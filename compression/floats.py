"""Codecs that store each value as a float: `fp32`, the values as they are, and `bf16`.

Payload: one float (little endian) for each value. Values beyond the largest of the stored type
become that. `bf16` is the upper half of fp32, rounded to nearest even: an error of at most 2^-8 of
the value. A decoder refuses NaN and infinity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from atoll.compression.base import Codec, Dims, peak, require_finite, spans
from atoll.compression.kernels import fused
from atoll.compression.registry import register


@dataclass(frozen=True)
class RawCodec(Codec):
    """Base of the codecs with one float of type `dtype` for each value."""

    dtype: ClassVar[torch.dtype]

    def _payload_bytes(self, dims: Dims) -> int:
        return math.prod(dims) * self.dtype.itemsize

    def _write(self, x_N: Tensor, dims: Dims, payload: Tensor) -> Tensor:
        codes = payload.view(self.dtype)
        if x_N.device.type == "cpu":
            witness = _copy(x_N, codes)
            if math.isfinite(float(witness)):
                return witness
        # A sum of finite values may overflow: only now look at magnitudes, and clamp.
        kernels = self._kernels(x_N)
        if kernels:
            return kernels.write_bf16(x_N, codes)
        limit = torch.finfo(self.dtype).max
        codes.copy_(x_N.clamp(-limit, limit))
        return peak(torch.stack([peak(x_N[start:stop]) for start, stop in spans(x_N)]))

    def _read(self, payload: Tensor, dims: Dims, out_N: Tensor) -> None:
        codes = payload.view(self.dtype)
        kernels = self._kernels(out_N)
        if kernels:
            require_finite(kernels.read_bf16(codes, out_N), "values")
            return
        for start, stop in spans(out_N):
            out_N[start:stop].copy_(codes[start:stop])
            require_all_finite(codes[start:stop])

    def _kernels(self, x_N: Tensor) -> fused.Kernels | None:
        return fused.kernels(x_N.device) if self.dtype == torch.bfloat16 else None


def _copy(x_N: Tensor, codes: Tensor) -> Tensor:
    """Convert; return a sum that is finite only if all codes are."""
    sums = []
    for start, stop in spans(x_N):
        sums.append(codes[start:stop].copy_(x_N[start:stop]).sum())
    return torch.stack(sums).to(torch.float32).sum()


def require_all_finite(x: Tensor) -> None:
    """Refuse decoded values that are NaN or infinite; the sum is the cheap first look."""
    if not math.isfinite(float(x.sum().cpu())):
        require_finite(x.to(torch.float32), "values")


@register
@dataclass(frozen=True)
class Fp32(RawCodec):
    """32 bits a value, lossless; contractive with a residual of zero."""

    name: ClassVar[str] = "fp32"
    code: ClassVar[int] = 1
    dtype: ClassVar[torch.dtype] = torch.float32


@register
@dataclass(frozen=True)
class Bf16(RawCodec):
    """16 bits a value, 8 of precision, the range of fp32; contractive."""

    name: ClassVar[str] = "bf16"
    code: ClassVar[int] = 3
    dtype: ClassVar[torch.dtype] = torch.bfloat16
