"""Codecs that store each value as a float: the base of `fp32`, `bf16` and `fp16`.

Payload::

    scale    bf16, a power of two, present where the format is scaled (`fp16`)
    values   one float each

A decoder refuses NaN and infinity.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from atoll.compression.base import Codec, peak, require_finite, spans


@dataclass(frozen=True)
class RawCodec(Codec):
    """Base of the codecs with one float of type `dtype` for each value."""

    dtype: ClassVar[torch.dtype]

    def _payload_bytes(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape) * self.dtype.itemsize

    def _write(self, x_N: Tensor, shape: tuple[int, ...], payload: Tensor) -> Tensor:
        codes = payload.view(self.dtype)
        witnesses = []
        for start, stop in spans(x_N):
            tile = x_N[start:stop]
            witnesses.append(peak(tile))
            codes[start:stop].copy_(self._fit(tile))
        return peak(torch.stack(witnesses))

    def _read(self, payload: Tensor, shape: tuple[int, ...]) -> Tensor:
        codes = payload.view(self.dtype)
        out = torch.empty(codes.numel(), dtype=torch.float32, device=payload.device)
        for start, stop in spans(out):
            tile = out[start:stop].copy_(codes[start:stop])
            require_all_finite(tile)
        return out

    @abstractmethod
    def _fit(self, tile: Tensor) -> Tensor:
        """Return `tile` within the range of the stored type."""


def require_all_finite(x: Tensor) -> None:
    """Refuse decoded values that are NaN or infinite; the sum is the cheap first look."""
    if not math.isfinite(float(x.sum())):
        require_finite(x, "values")
