"""Base of codecs with one 4-bit code per value."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.compression.kernels.blocks import BlockCodec
from atoll.compression.kernels.planes import plane_bytes


@dataclass(frozen=True)
class FourBitCodec(BlockCodec):
    """Base of the codecs with 4 bits a value and 16 a block."""

    block: int = 64

    def _code_bytes(self, numel: int) -> int:
        return plane_bytes(numel, 2)
