"""Codecs that scale blocks of values and store a small code for each.

Payload::

    scales   bf16, one for each block of `block` values (the last block may be short)
    codes    as the codec packs them, tile after tile of 65,536 values
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from atoll.compression.base import (
    BF16_MAX,
    FLOAT_MAX,
    TINY,
    Codec,
    CodecError,
    Dims,
    carve,
    part,
    peak,
    require_finite,
    tile_step,
)
from atoll.compression.scratch import TILE, scratch

Tiles = list[tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class BlockCodec(Codec):
    """Base of the codecs with one scale for each block of `block` values."""

    block: int = 256
    code_limit: ClassVar[float] = 128.0  # a power of two; no code stands for more

    scales_per_block: ClassVar[int] = 1

    def __post_init__(self) -> None:
        """Refuse blocks that do not divide a tile."""
        if not 8 <= self.block <= TILE or TILE % self.block:
            raise CodecError(f"expected a block that is a power of two >= 8, got {self.block}")

    @abstractmethod
    def _code_bytes(self, numel: int) -> int:
        """Return the bytes of the codes of `numel` <= `TILE` values."""

    @abstractmethod
    def _write_tile(self, x_BK: Tensor, scales_B: Tensor, codes: Tensor, numel: int) -> Tensor:
        """Encode `numel` values in blocks; return the witness.  The last block may hold more."""

    @abstractmethod
    def _read_tile(self, codes: Tensor, scales_B: Tensor, out_M: Tensor) -> None:
        """Decode to `out_M`; its last block may be short."""

    def _payload_bytes(self, dims: Dims) -> int:
        numel = math.prod(dims)
        whole, rest = divmod(numel, TILE)
        codes = whole * self._code_bytes(TILE) + (self._code_bytes(rest) if rest else 0)
        return 2 * self._num_scales(numel) + codes

    def _num_scales(self, numel: int) -> int:
        return -(-numel // self.block) * self.scales_per_block

    def _sections(self, payload: Tensor, numel: int) -> list[Tensor]:
        num_scales = self._num_scales(numel)
        code_bytes = payload.numel() - 2 * num_scales
        return carve(payload, (torch.bfloat16, num_scales), (torch.uint8, code_bytes))

    def _write(self, x_N: Tensor, dims: Dims, payload: Tensor) -> Tensor:
        scales, codes = self._sections(payload, x_N.numel())
        witnesses = [
            self._write_tile(self._in_blocks(x_M), scales_B, codes_M, x_M.numel())
            for x_M, scales_B, codes_M in self._tiles(x_N, scales, codes)
        ]
        return witnesses[0] if len(witnesses) == 1 else peak(torch.stack(witnesses))

    def _read(self, payload: Tensor, dims: Dims, out_N: Tensor) -> None:
        scales, codes = self._sections(payload, out_N.numel())
        scales = scales.to(torch.float32)
        require_finite(scales, "scales", limit=FLOAT_MAX / self.code_limit)
        for out_M, scales_B, codes_M in self._tiles(out_N, scales, codes):
            self._read_tile(codes_M, scales_B, out_M)

    def _tiles(self, x_N: Tensor, scales: Tensor, codes: Tensor) -> Tiles:
        """Return values, scales and codes of what is processed at once."""
        step = tile_step(x_N)
        if x_N.numel() <= step:
            return [(x_N, scales, codes)]
        per_step = step // self.block * self.scales_per_block, step // TILE * self._code_bytes(TILE)
        pieces = (
            torch.split(x_N, step),
            torch.split(scales, per_step[0]),
            torch.split(codes, per_step[1]),
        )
        return list(zip(*pieces, strict=True))

    def _in_blocks(self, x_M: Tensor) -> Tensor:
        """Return `x_M` as [B, K]; a short last block is filled up with repetitions of itself."""
        numel = x_M.numel()
        if numel <= self.block:
            return x_M.view(1, numel)
        short = numel % self.block
        if short:
            tail = x_M[-short:].repeat(-(-self.block // short))[: self.block]
            x_M = torch.cat([x_M[:-short], tail])
        return x_M.view(-1, self.block)


def scale_blocks_(out_M: Tensor, scales_B: Tensor, block: int) -> None:
    """Multiply each block of `out_M` by its scale, in place; the last block may be short."""
    whole = out_M.numel() // block
    if whole:
        blocks = part(out_M, 0, whole * block).view(whole, block)
        blocks.mul_(part(scales_B, 0, whole).unsqueeze(1))
    if whole * block < out_M.numel():
        out_M[whole * block :].mul_(scales_B[whole])


def block_peaks(x_BK: Tensor) -> Tensor:
    """Return the largest magnitude of each block, [B]; NaN where a block has one."""
    return torch.abs(x_BK, out=scratch("work", x_BK)).amax(1)


def absmax_scales(
    amax_B: Tensor,
    steps: float,
    scales_B: Tensor,
    *,
    code_limit: float = 128.0,
    headroom: float = 1 + 2**-8,
) -> Tensor:
    """Store amax / steps of each block as bf16; return the factor from values to steps, [B, 1].

    With the default headroom scales lie up to 2^-7 above amax / steps, so that no code exceeds
    `steps` although bf16 rounds to nearest.  They are never below `TINY`, so that the factor
    is finite.
    """
    exact_B = torch.add(TINY, amax_B, alpha=headroom / steps)
    scales_B.copy_(exact_B.clamp_(max=BF16_MAX / code_limit))
    return scales_B.to(torch.float32).reciprocal_().unsqueeze(1)
