"""`int8-uniform`: 256 equal buckets over 6 sigma each way, decoded as the bucket means.

Payload, for each tile of 65,536 values (the last may be short)::

    means    256 fp32, the mean of each bucket (an empty one has its middle)
    codes    uint8 each, the bucket

the means of all tiles first, then the codes of all.

Source: INTELLECT-1, arXiv:2412.01152 (the `prime` ring all-reduce). Departures: a codebook
for each tile, values decoded once instead of once for each hop. Kept for comparison:
within 6 sigma of the mean an error is below a bucket, 0.047 sigma; beyond, values are lost in the
last bucket, so heavy tails cost it 20 times the error of `int8`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from atoll.compression.base import FLOAT_MAX, Codec, Dims, carve, peak, require_finite, spans
from atoll.compression.registry import register
from atoll.compression.scratch import TILE, scratch
from atoll.compression.two_bit import add_block_offsets_

BUCKETS = 256
SIGMAS = 6.0  # each way; both numbers are those of `prime`
TINY = 1e-37


@register
@dataclass(frozen=True)
class Int8Uniform(Codec):
    """8 bits a value and 8,192 a tile; contractive."""

    name: ClassVar[str] = "int8-uniform"
    code: ClassVar[int] = 6

    def _payload_bytes(self, dims: Dims) -> int:
        numel = math.prod(dims)
        return numel + 4 * BUCKETS * -(-numel // TILE)

    def _sections(self, payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        num_tiles = -(-numel // TILE)
        means, codes = carve(payload, (torch.float32, num_tiles * BUCKETS), (torch.uint8, numel))
        return means.view(num_tiles, BUCKETS), codes

    def _write(self, x_N: Tensor, dims: Dims, payload: Tensor) -> Tensor:
        means_TB, codes = self._sections(payload, x_N.numel())
        largest = torch.stack([peak(x_N[start:stop]) for start, stop in spans(x_N)]).amax()
        for i, start in enumerate(range(0, x_N.numel(), TILE)):
            tile = x_N[start : start + TILE]
            _write_tile(tile, means_TB[i], codes[start : start + TILE])
        return largest

    def _read(self, payload: Tensor, dims: Dims, out_N: Tensor) -> None:
        means_TB, codes = self._sections(payload, out_N.numel())
        require_finite(means_TB.reshape(-1), "bucket means")
        for start, stop in spans(out_N):
            out_M = out_N[start:stop]
            index_M = scratch("index", out_M, torch.int32).copy_(codes[start:stop])
            add_block_offsets_(index_M, TILE, BUCKETS)
            table = means_TB[start // TILE : -(-stop // TILE)].reshape(-1)
            torch.index_select(table, 0, index_M, out=out_M)


def _write_tile(x_M: Tensor, means: Tensor, codes: Tensor) -> None:
    """Encode one tile; with NaN in x the codes are arbitrary, and the caller's witness refuses."""
    unit_M, scale = _unit(x_M)
    offset = unit_M.mean()
    centred = unit_M.sub_(offset)
    sigma = torch.mul(centred, centred, out=scratch("clipped", x_M)).mean().sqrt_()
    step = sigma.mul_(2 * SIGMAS / BUCKETS).add_(TINY)
    # 256 - 2^-15 is cut off to 255; 256 would wrap to bucket 0.
    t_M = centred.mul_(step.reciprocal()).add_(BUCKETS / 2).clamp_(0.0, BUCKETS - 2**-15)
    codes.copy_(t_M)
    decoded = ((_means(t_M, codes) - BUCKETS / 2) * step + offset) * scale
    means.copy_(decoded.clamp_(-FLOAT_MAX, FLOAT_MAX))


def _unit(x_M: Tensor) -> tuple[Tensor, Tensor]:
    """Return x in [-1, 1] and what it was divided by, so that no square or sum overflows."""
    scale = peak(x_M).add_(TINY)
    return torch.mul(x_M, scale.reciprocal(), out=scratch("bins", x_M)), scale


def _means(t_M: Tensor, codes: Tensor) -> Tensor:
    index = codes.to(torch.int64)
    sums = torch.zeros(BUCKETS, device=t_M.device).index_add_(0, index, t_M)
    counts = torch.zeros(BUCKETS, device=t_M.device).index_add_(0, index, torch.ones_like(t_M))
    middles = torch.arange(BUCKETS, device=t_M.device, dtype=torch.float32) + 0.5
    return torch.where(counts > 0, sums / counts.clamp(min=1), middles)
