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
from torch.nn.functional import pad

from atoll.compression.base import (
    BF16_MAX,
    FLOAT_MAX,
    Codec,
    CodecError,
    Dims,
    carve,
    peak,
    require_finite,
    spans,
)
from atoll.compression.scratch import TILE, scratch


@dataclass(frozen=True)
class BlockCodec(Codec):
    """Base of the codecs with one scale for each block of `block` values."""

    block: int = 256
    code_limit: ClassVar[float] = 128.0  # a power of two; no code stands for more

    def __post_init__(self) -> None:
        """Refuse blocks that do not divide a tile."""
        if not 8 <= self.block <= TILE or TILE % self.block:
            raise CodecError(f"expected a block that is a power of two >= 8, got {self.block}")

    @abstractmethod
    def _code_bytes(self, numel: int) -> int:
        """Return the bytes of the codes of `numel` <= `TILE` values."""

    @abstractmethod
    def _write_tile(self, x_BK: Tensor, scales_B: Tensor, codes: Tensor) -> Tensor:
        """Encode whole blocks; return the witness.  `codes` may stop short of a padded block."""

    @abstractmethod
    def _read_tile(self, codes: Tensor, scales_B: Tensor, out_M: Tensor) -> None:
        """Decode to `out_M`; its last block may be short."""

    def _payload_bytes(self, dims: Dims) -> int:
        numel = math.prod(dims)
        whole, rest = divmod(numel, TILE)
        codes = whole * self._code_bytes(TILE) + (self._code_bytes(rest) if rest else 0)
        return 2 * self._num_blocks(numel) + codes

    def _num_blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def _sections(self, payload: Tensor, numel: int) -> list[Tensor]:
        num_blocks = self._num_blocks(numel)
        code_bytes = payload.numel() - 2 * num_blocks
        return carve(payload, (torch.bfloat16, num_blocks), (torch.uint8, code_bytes))

    def _write(self, x_N: Tensor, dims: Dims, payload: Tensor) -> Tensor:
        scales, codes = self._sections(payload, x_N.numel())
        witnesses = [
            self._write_tile(
                self._padded(x_N[start:stop]).view(-1, self.block),
                scales[start // self.block : self._num_blocks(stop)],
                codes[self._code_offset(start) : self._code_offset(stop)],
            )
            for start, stop in spans(x_N)
        ]
        return witnesses[0] if len(witnesses) == 1 else peak(torch.stack(witnesses))

    def _read(self, payload: Tensor, dims: Dims, out_N: Tensor) -> None:
        scales, codes = self._sections(payload, out_N.numel())
        scales = scales.to(torch.float32)
        require_finite(scales, "scales", limit=FLOAT_MAX / self.code_limit)
        for start, stop in spans(out_N):
            self._read_tile(
                codes[self._code_offset(start) : self._code_offset(stop)],
                scales[start // self.block : self._num_blocks(stop)],
                out_N[start:stop],
            )

    def _code_offset(self, position: int) -> int:
        whole, rest = divmod(position, TILE)
        return whole * self._code_bytes(TILE) + (self._code_bytes(rest) if rest else 0)

    def _padded(self, x_N: Tensor) -> Tensor:
        short = -x_N.numel() % self.block
        return pad(x_N, (0, short)) if short else x_N


def scale_blocks_(out_M: Tensor, scales_B: Tensor, block: int) -> None:
    """Multiply each block of `out_M` by its scale, in place; the last block may be short."""
    whole = out_M.numel() // block
    if whole:
        out_M[: whole * block].view(whole, block).mul_(scales_B[:whole].unsqueeze(1))
    if whole * block < out_M.numel():
        out_M[whole * block :].mul_(scales_B[whole])


def block_peaks(x_BK: Tensor) -> Tensor:
    """Return the largest magnitude of each block, [B]; NaN where a block has one."""
    return torch.abs(x_BK, out=scratch("abs", x_BK).view_as(x_BK)).amax(1)


def absmax_scales(
    amax_B: Tensor, steps: float, scales_B: Tensor, *, code_limit: float = 128.0
) -> Tensor:
    """Store amax / steps of each block as bf16; return the factor from values to steps, [B, 1].

    The factor is a little below 1 / scale where bf16 rounded down, so that no code exceeds
    `steps`, and it is finite where the scale is zero or denormal.
    """
    scales_B.copy_((amax_B * (1.0 / steps)).clamp_(max=BF16_MAX / code_limit))
    inverse_B = torch.minimum(scales_B.to(torch.float32).reciprocal_(), steps / amax_B)
    return inverse_B.clamp_(max=FLOAT_MAX).unsqueeze(1)
