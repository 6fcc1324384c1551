"""Codecs that store each value as a float: the base of `fp32` and `bf16`.

Payload: one float for each value.

A decoder refuses NaN and infinity.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from atoll.compression.base import Codec, Dims, peak, require_finite, spans


@dataclass(frozen=True)
class RawCodec(Codec):
    """Base of the codecs with one float of type `dtype` for each value."""

    dtype: ClassVar[torch.dtype]

    def _payload_bytes(self, dims: Dims) -> int:
        return math.prod(dims) * self.dtype.itemsize

    def _write(self, x_N: Tensor, dims: Dims, payload: Tensor) -> Tensor:
        codes = payload.view(self.dtype)
        witnesses: list[Tensor] = []
        for start, stop in spans(x_N):
            tile = x_N[start:stop]
            witnesses.append(peak(tile))
            codes[start:stop].copy_(self._fit(tile, witnesses[-1]))
        return peak(torch.stack(witnesses))

    def _read(self, payload: Tensor, dims: Dims, out_N: Tensor) -> None:
        codes = payload.view(self.dtype)
        for start, stop in spans(out_N):
            require_all_finite(out_N[start:stop].copy_(codes[start:stop]))

    @abstractmethod
    def _fit(self, tile: Tensor, largest: Tensor) -> Tensor:
        """Return `tile` within the range of the stored type; `largest` is its peak."""


def require_all_finite(x: Tensor) -> None:
    """Refuse decoded values that are NaN or infinite; the sum is the cheap first look."""
    if not math.isfinite(float(x.sum())):
        require_finite(x, "values")
