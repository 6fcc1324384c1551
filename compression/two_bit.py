"""`2bit`: four bins around the mean, each decoded as the mean of what fell into it.

Payload::

    scales   4 bf16 for each block of `block` values: the means of the bins
    codes    2 bits each, the bin; packed as `atoll.compression.planes`

The bins are `width` sigma wide; the outer two reach to infinity.

Source: SparseLoCo (four bins over 6 sigma) and MuLoCo, arXiv:2505.23725 (2 bits need a
statistical codebook).  Departure: blocks, with 16-bit means; the paper takes a whole tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from atoll.compression.base import BF16_MAX, TINY, CodecError
from atoll.compression.bins import bin_means
from atoll.compression.blocks import BlockCodec
from atoll.compression.planes import pack, plane_bytes, unpack
from atoll.compression.registry import register
from atoll.compression.scratch import scratch

BELOW_4 = 4.0 - 2.0**-21


@register
@dataclass(frozen=True)
class TwoBit(BlockCodec):
    """2 bits a value and 64 a block; contractive."""

    name: ClassVar[str] = "2bit"
    code: ClassVar[int] = 9
    block: int = 4096
    width: float = 1.5
    code_limit: ClassVar[float] = 1.0
    scales_per_block: ClassVar[int] = 4

    def __post_init__(self) -> None:
        """Refuse bins without a width."""
        super().__post_init__()
        if not 0.1 <= self.width <= 10:
            raise CodecError(f"expected a width of 0.1 to 10 sigma, got {self.width}")

    def _code_bytes(self, numel: int) -> int:
        return plane_bytes(numel, 4)

    def _write_tile(
        self, x_BK: Tensor, factors_B1: Tensor, scales_BS: Tensor, codes: Tensor, numel: int
    ) -> None:
        peaks_B1 = factors_B1
        t_BK, step_B1, offset_B1 = self._to_bins(x_BK, peaks_B1)
        means_B4 = (bin_means(t_BK, 4) - 2).mul_(step_B1).add_(offset_B1)
        scales_BS.copy_((means_B4 * peaks_B1).clamp_(-BF16_MAX, BF16_MAX))
        pack(t_BK, 2, codes, numel)

    def _to_bins(self, x_BK: Tensor, peaks_B1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return t in [0, 4) with x / amax = (t - 2) step + offset, where not clipped."""
        t_BK = scratch("bins", x_BK)
        torch.mul(x_BK, torch.add(peaks_B1, TINY).reciprocal_(), out=t_BK)
        offset_B1 = t_BK.mean(1, keepdim=True)
        t_BK.sub_(offset_B1)
        square_BK = torch.mul(t_BK, t_BK, out=scratch("clipped", x_BK))
        step_B1 = square_BK.mean(1, keepdim=True).sqrt_().mul_(self.width).add_(TINY)
        t_BK.mul_(step_B1.reciprocal()).add_(2.0).clamp_(0.0, BELOW_4)
        return t_BK, step_B1, offset_B1

    def _read_tile(self, codes: Tensor, scales_BS: Tensor, out_M: Tensor) -> None:
        code_M = unpack(codes, 2, out_M.numel(), high=False)
        index_M = scratch("index", out_M, torch.int32).copy_(code_M)
        add_block_offsets_(index_M, self.block, 4)
        torch.index_select(scales_BS.reshape(-1), 0, index_M, out=out_M)


def add_block_offsets_(index_M: Tensor, block: int, step: int) -> None:
    """Add `step` b to the indices of block b, in place; the last block may be short."""
    whole = index_M.numel() // block
    starts = torch.arange(whole + 1, dtype=torch.int32, device=index_M.device) * step
    if whole:
        index_M[: whole * block].view(whole, block).add_(starts[:whole].unsqueeze(1))
    index_M[whole * block :].add_(starts[whole])
