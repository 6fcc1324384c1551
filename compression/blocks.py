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
    TILE,
    Codec,
    CodecError,
    carve,
    peak,
    require_finite,
    spans,
)


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
    def _read_tile(self, codes: Tensor, scales_B: Tensor, out_BK: Tensor) -> None:
        """Decode whole blocks into `out_BK`."""

    def _payload_bytes(self, shape: tuple[int, ...]) -> int:
        numel = math.prod(shape)
        whole, rest = divmod(numel, TILE)
        codes = whole * self._code_bytes(TILE) + (self._code_bytes(rest) if rest else 0)
        return 2 * self._num_blocks(numel) + codes

    def _num_blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def _sections(self, payload: Tensor, numel: int) -> list[Tensor]:
        num_blocks = self._num_blocks(numel)
        code_bytes = payload.numel() - 2 * num_blocks
        return carve(payload, (torch.bfloat16, num_blocks), (torch.uint8, code_bytes))

    def _write(self, x_N: Tensor, shape: tuple[int, ...], payload: Tensor) -> Tensor:
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

    def _read(self, payload: Tensor, shape: tuple[int, ...]) -> Tensor:
        numel = math.prod(shape)
        scales, codes = self._sections(payload, numel)
        scales = scales.to(torch.float32)
        require_finite(scales, "scales", limit=FLOAT_MAX / self.code_limit)
        whole = self._num_blocks(numel) * self.block
        out = torch.empty(whole, dtype=torch.float32, device=payload.device)
        for start, stop in spans(out[:numel]):
            stop_block = self._num_blocks(stop)
            self._read_tile(
                codes[self._code_offset(start) : self._code_offset(stop)],
                scales[start // self.block : stop_block],
                out[start : stop_block * self.block].view(-1, self.block),
            )
        return out[:numel]

    def _code_offset(self, position: int) -> int:
        whole, rest = divmod(position, TILE)
        return whole * self._code_bytes(TILE) + (self._code_bytes(rest) if rest else 0)

    def _padded(self, x_N: Tensor) -> Tensor:
        short = -x_N.numel() % self.block
        return pad(x_N, (0, short)) if short else x_N


def absmax_scales(
    x_BK: Tensor, steps: float, scales_B: Tensor, *, code_limit: float = 128.0
) -> tuple[Tensor, Tensor]:
    """Store amax / steps of each block as bf16; return (factor to steps as fp32 [B, 1], witness).

    The factor is a little below 1 / scale where bf16 rounded down, so that no code exceeds
    `steps`, and it is finite where the scale is zero or denormal.
    """
    amax_B = x_BK.abs().amax(1)
    scales_B.copy_((amax_B * (1.0 / steps)).clamp_(max=BF16_MAX / code_limit))
    inverse_B = torch.minimum(scales_B.to(torch.float32).reciprocal_(), steps / amax_B)
    return inverse_B.clamp_(max=FLOAT_MAX).unsqueeze(1), amax_B.amax()
