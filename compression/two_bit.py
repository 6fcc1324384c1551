"""`2bit`: four bins around the mean, each decoded as the mean of its values.

Payload::

    scales   4 bf16 for each block of `block` values: the means of the bins
    codes    2 bits each, the bin; packed as `atoll.compression.kernels.planes`

The bins are `width` sigma wide; the outer two reach to infinity. As values are means of bins, the
mean squared error of a block is at most its variance (and the rounding of the means).

Source: SparseLoCo (four bins over 6 sigma) and MuLoCo, arXiv:2505.23725 (2 bits need a
statistical codebook). Departure: blocks, with 16-bit means; the paper takes a whole tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from atoll.compression.base import BF16_MAX, FLOAT_MAX, TINY, CodecError, require_finite
from atoll.compression.blocks import BlockCodec, block_peaks, squarable
from atoll.compression.kernels.bins import NUM_SUMS, bin_means, store_counts, store_sums
from atoll.compression.kernels.planes import pack_, plane_bytes, unpack
from atoll.compression.registry import register
from atoll.compression.scratch import room, scratch

FINEST = 2.0**-20  # step over root mean square: bounds t if all values are the same
BELOW_4 = 4.0 - 2.0**-21  # is cut off to bin 3; there is no bin 4
SCALE_BYTES = 8  # of a block


@register
@dataclass(frozen=True)
class TwoBit(BlockCodec):
    """2 bits a value and 64 a block; contractive."""

    name: ClassVar[str] = "2bit"
    code: ClassVar[int] = 9
    block: int = 4096
    width: float = 1.5
    scales_first: ClassVar[bool] = False
    code_limit: ClassVar[float] = 1.0
    scales_per_block: ClassVar[int] = 4
    num_measures: ClassVar[int] = 3  # mean and root mean square of x / unit, and the unit

    def __post_init__(self) -> None:
        """Refuse bins without a width."""
        super().__post_init__()
        if not 0.1 <= self.width <= 10:
            raise CodecError(f"expected a width of 0.1 to 10 sigma, got {self.width}")

    def _code_bytes(self, numel: int) -> int:
        return plane_bytes(numel, 4)

    def _measure(self, x_BK: Tensor, measures_BM: Tensor) -> None:
        if x_BK.device.type == "cpu":
            measures_BM[:, 2].fill_(1.0)  # ordinary norms need no unit, which saves two passes
            _moments(x_BK, measures_BM)
            if squarable(measures_BM[:, 1]):
                return
        units_B1 = measures_BM[:, 2:]
        block_peaks(x_BK, units_B1)
        inverse_B1 = torch.add(units_B1, TINY).reciprocal_()
        _moments(torch.mul(x_BK, inverse_B1, out=scratch("work", x_BK)), measures_BM)

    def _factors(self, measures_BM: Tensor, scales_BS: Tensor) -> Tensor:
        """Return [B, (gain, offset, mean, step, unit, sums)]; t = x gain + offset is in bin [t].

        x / unit = (t - 2) step + mean.
        """
        mean_B, rms_B, unit_B = measures_BM.unbind(1)
        variance_B = (rms_B * rms_B - mean_B * mean_B).clamp_(min=0.0)
        step_B = torch.maximum(variance_B.sqrt_() * self.width, rms_B * FINEST).add_(TINY)
        gain_B = ((unit_B + TINY).reciprocal_() / step_B).clamp_(max=FLOAT_MAX)
        table_FB = measures_BM.new_empty((5 + NUM_SUMS, len(measures_BM)))
        rows = (gain_B, 2.0 - mean_B / step_B, mean_B, step_B, unit_B)
        torch.stack(rows, out=table_FB[:5])
        return table_FB.T

    def _write_tile(
        self, x_BK: Tensor, factors_BF: Tensor, scales_BS: Tensor, codes: Tensor, numel: int
    ) -> None:
        pack_(self._bins(x_BK, factors_BF), 2, codes, numel)

    def _write_rows(self, x_RN: Tensor, payload_RB: Tensor) -> Tensor:
        """Write rows of one block each, all at once."""
        rows, size = x_RN.shape
        if not self._is_block(size):
            return super()._write_rows(x_RN, payload_RB)
        scales_RS = x_RN.new_empty((rows, self.scales_per_block), dtype=torch.bfloat16)
        measures_RM = x_RN.new_empty((rows, self.num_measures))
        self._measure(x_RN, measures_RM)
        factors_RF = self._factors(measures_RM, scales_RS)
        codes = room("codes of rows", (rows, plane_bytes(size, 4)), x_RN.device, torch.uint8)
        pack_(self._bins(x_RN, factors_RF), 2, codes.view(-1), x_RN.numel(), run=size)
        self._finish(factors_RF, scales_RS)
        payload_RB[:, :SCALE_BYTES].view(torch.bfloat16).copy_(scales_RS)
        payload_RB[:, SCALE_BYTES:].copy_(codes)
        return measures_RM.amax()

    def _read_rows(self, payload_RB: Tensor, out_RN: Tensor) -> None:
        size = out_RN.shape[1]
        if not self._is_block(size):
            super()._read_rows(payload_RB, out_RN)
            return
        scales_RS = payload_RB[:, :SCALE_BYTES].view(torch.bfloat16).to(torch.float32)
        require_finite(scales_RS, "scales", limit=FLOAT_MAX / self.code_limit)
        shape = (len(out_RN), plane_bytes(size, 4))
        codes = room("codes of rows", shape, out_RN.device, torch.uint8)
        packed = codes.copy_(payload_RB[:, SCALE_BYTES:]).view(-1)
        code_M = unpack(packed, 2, out_RN.numel(), high=False, run=size)
        look_up(code_M, scales_RS, size, out_RN.view(-1))

    def _is_block(self, size: int) -> bool:
        """Return whether rows of `size` values are one block each."""
        return size <= self.block

    def _bins(self, x_BK: Tensor, factors_BF: Tensor) -> Tensor:
        """Return the bins (int8 scratch), and store their sums in the factors."""
        gain_B1, offset_B1, _, _, _, *sums = torch.split(factors_BF, 1, 1)
        t_BK = torch.mul(x_BK, gain_B1, out=scratch("work", x_BK)).add_(offset_B1)
        sums_6B = [sums_B1.view(-1) for sums_B1 in sums]
        clipped_BK = torch.clamp(t_BK, 0.0, BELOW_4, out=scratch("clipped", x_BK))
        bins_BK = scratch("bins", x_BK, torch.int8).copy_(clipped_BK)
        # Sums are of t, not clipped: clipped means of the outer bins cost up to 6 points of error
        # on Student t.
        store_sums(t_BK, sums_6B)
        store_counts(bins_BK, sums_6B)
        factors_BF[:, 5:].mul_(1 / x_BK.shape[1])
        return bins_BK

    def _finish(self, factors_BF: Tensor, scales_BS: Tensor) -> None:
        """Turn the sums of the bins into their means."""
        mean_B1, step_B1, unit_B1 = torch.split(factors_BF[:, 2:5], 1, 1)
        means_B4 = (bin_means(factors_BF[:, 5:].T) - 2).mul_(step_B1).add_(mean_B1)
        scales_BS.copy_(means_B4.mul_(unit_B1).clamp_(-BF16_MAX, BF16_MAX))

    def _read_tile(self, codes: Tensor, scales_BS: Tensor, out_M: Tensor) -> None:
        look_up(unpack(codes, 2, out_M.numel(), high=False), scales_BS, self.block, out_M)


def _moments(x_BK: Tensor, measures_BM: Tensor) -> None:
    """Store mean and root mean square of each block."""
    size = x_BK.shape[1]
    torch.sum(x_BK, 1, out=measures_BM[:, 0])
    torch.linalg.vector_norm(x_BK, 2, 1, out=measures_BM[:, 1])
    measures_BM[:, 0].mul_(1 / size)
    measures_BM[:, 1].mul_(size**-0.5)


def look_up(code_M: Tensor, scales_BS: Tensor, block: int, out_M: Tensor) -> None:
    """Store the value of each code, by the scales of its block."""
    index_M = scratch("index", out_M, torch.int32).copy_(code_M)
    add_block_offsets_(index_M, block, scales_BS.shape[1])
    torch.index_select(scales_BS.reshape(-1), 0, index_M, out=out_M)


def add_block_offsets_(index_M: Tensor, block: int, step: int) -> None:
    """Add `step` b to the indices of block b, in place; the last block may be short."""
    whole = index_M.numel() // block
    starts = torch.arange(whole + 1, dtype=torch.int32, device=index_M.device) * step
    if whole:
        index_M[: whole * block].view(whole, block).add_(starts[:whole].unsqueeze(1))
    index_M[whole * block :].add_(starts[whole])
