"""Codecs that scale blocks of values and store a small code for each; `int8`, the plainest of them.

Payload::

    scales   bf16, one for each block of `block` values (the last block may be short)
    codes    as the codec packs them, tile after tile of 65,536 values

**`int8`**: blocks scaled by their largest magnitude, rounded to nearest::

    scales   bf16, amax / 127 of each block of `block` values
    codes    int8, one for each value; value = code * scale

A decoder multiplies once in fp32, so it has the same bits everywhere. Encoders write
codes in -127..127; a decoder also takes -128. All codes of an all-zero block are 0.
The error of a value is at most amax / 252 of its block, half a step and the rounding of its scale;
below 1e-34 it may be larger, since no scale is below `TINY`.

Source: 8-Bit Approximations for Parallelism in Deep Learning, arXiv:1511.04561.
Departures: linear codes in blocks instead of a code of the whole tensor, so that one
outlier costs its block only; scales of 16 bits, for which the codes make up.
"""

from __future__ import annotations

import math
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from atoll.compression import staging
from atoll.compression.base import (
    BF16_MAX,
    CPU,
    FLOAT_MAX,
    HEADER_BYTES,
    TINY,
    Codec,
    CodecError,
    Dims,
    Frame,
    carve,
    floats,
    part,
    refuse_infinite,
    require_finite,
    step_sizes,
)
from atoll.compression.checksum import Checksum
from atoll.compression.kernels import fused
from atoll.compression.kernels.planes import constant, plane_bytes
from atoll.compression.registry import register
from atoll.compression.scratch import MAX_TILES, TILE, room, scratch

MAGNITUDE = 0x7FFFFFFF  # bits of an fp32 without its sign
SQUARABLE = (1e-15, 1e15)  # norms between which squares and their sums are finite and normal

ROUNDER = 1.5 * 2**23  # fp32 has steps of 1 from 2^23 on; the 1.5 keeps negative sums in there

Load = Callable[[int, Tensor], None]
"""load(step, x) writes the values of a step to x, flat"""
Done = Callable[[int, Tensor, Tensor], None]
"""done(step, x, sent) gets them again, with what they decode to; both may be overwritten"""


@dataclass(frozen=True)
class BlockCodec(Codec):
    """Base of the codecs with one scale for each block of `block` values."""

    block: int = 256
    # A power of two. No code stands for more, so scales up to FLOAT_MAX / code_limit decode finite.
    code_limit: ClassVar[float] = 128.0

    scales_per_block: ClassVar[int] = 1
    code_dtype: ClassVar[torch.dtype] = torch.uint8
    scales_first: ClassVar[bool] = True  # `_factors` stores them, so that codes are what is left
    reads_once: ClassVar[bool] = False  # True: factors for each step; few calls MUST make them
    num_measures: ClassVar[int] = 1
    tiles_at_once: ClassVar[int] = MAX_TILES  # on a CPU
    together_on_cpu: ClassVar[bool] = False  # True: rows cost less as one tensor, on a CPU too

    def __post_init__(self) -> None:
        """Refuse blocks that do not divide a tile."""
        if not 8 <= self.block <= TILE or TILE % self.block:
            raise CodecError(f"expected a block that is a power of two >= 8, got {self.block}")

    @abstractmethod
    def _code_bytes(self, numel: int) -> int:
        """Return the bytes of the codes of `numel` <= `TILE` values."""

    def _measure(self, x_BK: Tensor, measures_BM: Tensor) -> None:
        """Store the measures of each block that its factors need: its largest magnitude.

        One measure at least MUST be NaN or infinite if the block has such a value.
        """
        block_peaks(x_BK, measures_BM)

    def _factors(self, measures_BM: Tensor, scales_BS: Tensor) -> Tensor:
        """Return what `_write_tile` needs for each block of the frame, [B, F]: the measures.

        A codec whose scales follow from the peaks stores them here, all in one go.
        """
        return measures_BM

    @abstractmethod
    def _write_tile(
        self, x_BK: Tensor, factors_BF: Tensor, scales_BS: Tensor, codes: Tensor, numel: int
    ) -> None:
        """Encode `numel` values, given the factors of their blocks.

        The last block may hold more values than are to be encoded.
        """

    def _finish(self, factors_BF: Tensor, scales_BS: Tensor) -> None:
        """Store the scales of the frame, if they are known only after all codes."""

    @abstractmethod
    def _read_tile(self, codes: Tensor, scales_BS: Tensor, out_M: Tensor) -> None:
        """Decode to `out_M`; its last block may be short."""

    def encode_rows(self, x_RN: Tensor) -> list[bytes]:
        if not self._is_tiles(x_RN):
            return super().encode_rows(x_RN)
        together = room("rows", (self._payload_bytes((x_RN.numel(),)),), CPU, torch.uint8)
        self._fill(floats(x_RN), (x_RN.numel(),), together)
        return self._frames_of(together, len(x_RN))

    def encode_and_decode_rows(self, x_RN: Tensor, out_RN: Tensor) -> list[bytes]:
        if not self._is_tiles(x_RN):
            return super().encode_and_decode_rows(x_RN, out_RN)
        dims = (x_RN.numel(),)
        written = together = room("rows", (self._payload_bytes(dims),), CPU, torch.uint8)
        if x_RN.device.type == "cpu":
            self._fill(floats(x_RN), dims, together)
        else:
            written = self._written_on_device(floats(x_RN), dims, together.numel())
            refuse_infinite(self._fetch(written, together))
        self._read(written[: together.numel()], dims, out_RN.view(-1))
        return self._frames_of(together, len(x_RN))

    def _frames_of(self, together: Tensor, rows: int) -> list[bytes]:
        """Return the frames of rows, given the payload of a tensor of all of them."""
        frames_RB = room("frames", (rows, self.wire_bytes(TILE)), CPU, torch.uint8)
        for of_frames, section in self._sections_of_rows(frames_RB[:, HEADER_BYTES:], together):
            of_frames.copy_(section)
        return self._seal_rows(frames_RB, (TILE,))

    def decode_rows(self, frames: Sequence[Frame], out_RN: Tensor) -> None:
        if not self._is_tiles(out_RN):
            super().decode_rows(frames, out_RN)
            return
        dims, payload_RB = (out_RN.numel(),), self._open_rows(frames, (TILE,))
        together = room("rows", (self._payload_bytes(dims),), CPU, torch.uint8)
        for of_frames, section in self._sections_of_rows(payload_RB, together):
            section.copy_(of_frames)
        self._read(staging.on_device(out_RN.device, together), dims, out_RN.view(-1))

    def _is_tiles(self, x_RN: Tensor) -> bool:
        if len(x_RN) < 2 or x_RN.shape[1] != TILE or self.wire_bytes(TILE) % 8:
            return False  # payloads of rows lie side by side, each aligned to 8
        return self.together_on_cpu or x_RN.device.type != "cpu"

    def _sections_of_rows(
        self, payload_RB: Tensor, together: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Return scales, then codes: of rows of a tile each, and of a tensor of all values."""
        rows = len(payload_RB)
        sections = self._sections(together, rows * TILE)
        of_all = [section.view(torch.uint8).view(rows, -1) for section in sections]
        of_rows = torch.split(payload_RB, [section.shape[1] for section in of_all], dim=1)
        return zip(of_rows, of_all, strict=True)

    def _payload_bytes(self, dims: Dims) -> int:
        numel = math.prod(dims)
        return 2 * self._num_blocks(numel) * self.scales_per_block + self._all_code_bytes(numel)

    def _all_code_bytes(self, numel: int) -> int:
        whole, rest = divmod(numel, TILE)
        return whole * self._code_bytes(TILE) + (self._code_bytes(rest) if rest else 0)

    def _num_blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def _sections(self, payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Return scales [blocks, scales of a block] and codes."""
        num_scales = self._num_blocks(numel) * self.scales_per_block
        code_bytes = payload.numel() - 2 * num_scales
        scales, codes = carve(payload, (torch.bfloat16, num_scales), (torch.uint8, code_bytes))
        return scales.view(-1, self.scales_per_block), codes.view(self.code_dtype)

    def _write(self, x_N: Tensor, dims: Dims, payload: Tensor) -> Tensor:
        return self._write_sealed(x_N, dims, payload, None)

    def _write_sealed(
        self, x_N: Tensor, dims: Dims, payload: Tensor, seal: Checksum | None
    ) -> Tensor:
        scales, codes = self._sections(payload, x_N.numel())
        measures = x_N.new_empty((scales.shape[0], self.num_measures))
        parts = (x_N, measures, scales, codes)
        kernels = self._kernels(x_N)
        if kernels:
            (x_M, measures_BM, scales_BS, codes_M), *rest = self._steps(*parts)
            kernels.write_tiles(self, x_M, measures_BM, scales_BS, codes_M)
            for part_of_tile in rest:
                self._write_parts(*part_of_tile, seal=None)
        else:
            self._write_parts(*parts, seal=seal)
        return measures.amax()

    def _kernels(self, x_N: Tensor) -> fused.Kernels | None:
        """Return the kernels for the whole tiles of `x_N`; None if there are none."""
        kernels = fused.kernels(x_N.device) if x_N.numel() >= TILE else None
        return kernels if kernels and kernels.takes(self.name, self.block) else None

    def _write_parts(
        self, x_N: Tensor, measures: Tensor, scales: Tensor, codes: Tensor, *, seal: Checksum | None
    ) -> None:
        steps = self._steps(x_N, measures, scales, codes)
        if self.reads_once:
            if seal:
                seal.postpone(scales)
            for step in steps:
                self._write_step(step, seal)
        else:
            self._write_steps(list(steps), measures, scales, seal if self.scales_first else None)

    def _write_step(self, step: tuple[Tensor, ...], seal: Checksum | None) -> None:
        x_M, measures_BM, scales_BS, codes_M = step
        x_BK = self._in_blocks(x_M)
        self._measure(x_BK, measures_BM)
        factors_BF = self._factors(measures_BM, scales_BS)
        self._write_tile(x_BK, factors_BF, scales_BS, codes_M, x_M.numel())
        if seal:
            seal.reach(codes_M)

    def _write_steps(
        self,
        steps: Sequence[tuple[Tensor, ...]],
        measures: Tensor,
        scales: Tensor,
        seal: Checksum | None,
    ) -> None:
        """Measure all steps, make all factors in one go, then encode."""
        steps_BK = [self._in_blocks(x_M) for x_M, *_ in steps]
        for x_BK, (_, measures_BM, *_) in zip(steps_BK, steps, strict=True):
            self._measure(x_BK, measures_BM)
        factors = self._factors(measures, scales)
        of_steps = torch.split(factors, [scales_BS.shape[0] for _, _, scales_BS, _ in steps])
        for x_BK, factors_BF, (x_M, _, scales_BS, codes_M) in zip(
            steps_BK, of_steps, steps, strict=True
        ):
            self._write_tile(x_BK, factors_BF, scales_BS, codes_M, x_M.numel())
            if seal:
                seal.reach(codes_M)
        self._finish(factors, scales)

    def _read(self, payload: Tensor, dims: Dims, out_N: Tensor) -> None:
        scales_bf16, codes = self._sections(payload, out_N.numel())
        scales = scales_bf16.to(torch.float32)
        require_finite(scales, "scales", limit=FLOAT_MAX / self.code_limit)
        steps = self._steps(out_N, scales, codes)
        kernels = self._kernels(out_N)
        if kernels:
            (out_M, scales_BS, codes_M), *steps = steps
            kernels.read_tiles(self, codes_M, scales_BS, out_M)
        for out_M, scales_BS, codes_M in steps:
            self._read_tile(codes_M, scales_BS, out_M)

    def _steps(self, x_N: Tensor, *rest: Tensor) -> Iterable[tuple[Tensor, ...]]:
        """Return the steps to process at once: values, the tensors by block, and codes."""
        sizes = step_sizes(x_N, self.tiles_at_once)
        if len(sizes) == 1:
            return [(x_N, *rest)]
        *of_blocks, codes = rest
        num_blocks = [self._num_blocks(size) for size in sizes]
        num_codes = [self._all_code_bytes(size) // self.code_dtype.itemsize for size in sizes]
        pieces = [torch.split(each, num_blocks) for each in of_blocks]
        values, packed = torch.split(x_N, sizes), torch.split(codes, num_codes)
        return zip(values, *pieces, packed, strict=True)

    def _in_blocks(self, x_M: Tensor) -> Tensor:
        """Return `x_M` as [B, K]; a short last block is filled up with repetitions of itself."""
        numel = x_M.numel()
        if numel <= self.block:
            return x_M.view(1, numel)
        short = numel % self.block
        if short:
            # Zeros would pull down means and moments; repetitions leave the peak as it is.
            tail = x_M[-short:].repeat(-(-self.block // short))[: self.block]
            x_M = torch.cat([x_M[:-short], tail])
        return x_M.view(-1, self.block)


def scale_blocks_(out_M: Tensor, scales_B1: Tensor, block: int) -> None:
    """Multiply each block of `out_M` by its scale, in place; the last block may be short."""
    whole = out_M.numel() // block
    if whole:
        blocks = part(out_M, 0, whole * block).view(whole, block)
        blocks.mul_(part(scales_B1, 0, whole))
    if whole * block < out_M.numel():
        out_M[whole * block :].mul_(scales_B1[whole])


def steps_of(x_BK: Tensor, factors_B1: Tensor, zero: int = 0) -> Tensor:
    """Return zero + round(x * factor), at most 2^21 in magnitude, in the low bits of int32.

    1.5 * 2^23 is added in the same pass; the fraction falls off, since fp32 has steps of 1 between
    2^23 and 2^24 (the 1.5 keeps negative sums in there). `zero` is even, so that ties fall the same
    way. Reused scratch.
    """
    row_K = part(_rounder(zero, x_BK.device), 0, x_BK.shape[1])
    return torch.addcmul(row_K, x_BK, factors_B1, out=scratch("work", x_BK)).view(torch.int32)


@cache
def _rounder(zero: int, device: torch.device) -> Tensor:
    return torch.full((TILE,), ROUNDER + zero, device=device)


def block_peaks(x_BK: Tensor, peaks_B1: Tensor) -> Tensor:
    """Store the largest magnitude of each block, NaN if it has one; return magnitudes.

    Their bits are compared as integers, NaN above all: that takes half of the time, since torch
    tests floats for NaN one by one. Reused scratch.
    """
    size_BK = scratch("work", x_BK)
    bits_BK = size_BK.view(torch.int32)
    torch.bitwise_and(x_BK.view(torch.int32), constant(MAGNITUDE, torch.int32), out=bits_BK)
    torch.amax(bits_BK, 1, keepdim=True, out=peaks_B1.view(torch.int32))
    return size_BK


def squarable(norms: Tensor) -> bool:
    """Return True if the norms of blocks prove that no square or sum overflowed or vanished."""
    smallest, largest = norms.aminmax()
    return SQUARABLE[0] < float(smallest) and float(largest) < SQUARABLE[1]


def mean_sizes(x_BK: Tensor, means_B1: Tensor) -> None:
    """Store the mean magnitude of each block, NaN or infinite if it has such a value.

    Magnitudes are divided before they are added, so that nothing overflows.
    """
    size_BK = torch.abs(x_BK, out=scratch("work", x_BK))
    shares_K = scratch("shares", size_BK[0]).fill_(1 / size_BK.shape[1])
    torch.mv(size_BK, shares_K, out=means_B1.view(-1))


def absmax_scales(
    peaks_B1: Tensor,
    steps: float,
    scales_B1: Tensor,
    *,
    code_limit: float = 128.0,
    headroom: float = 1 + 2**-8,
) -> Tensor:
    """Store peak / steps of each block as bf16; return the factor from values to steps, [B, 1].

    With the default headroom scales lie up to 2^-7 above peak / steps, so that no code exceeds
    `steps` although bf16 rounds to nearest, or a bound clamps the scale. They are never below
    `TINY`, so that the factor is finite. Without headroom codes may exceed `steps`. Reused
    scratch.
    """
    inverse_B1 = scratch("inverse", peaks_B1)
    torch.add(TINY, peaks_B1, alpha=headroom / steps, out=inverse_B1)
    scales_B1.copy_(inverse_B1.clamp_(max=BF16_MAX / code_limit))
    inverse_B1.copy_(scales_B1).reciprocal_()
    if headroom > 1:  # bf16 may have rounded down by as much: no value may pass `steps`
        most_B1 = torch.reciprocal(peaks_B1, out=scratch("most", peaks_B1)).mul_(steps)
        torch.minimum(inverse_B1, most_B1, out=inverse_B1)
    return inverse_B1


@dataclass(frozen=True, kw_only=True)
class InStep:
    """Scratch of a step of `Int8.encode_in_steps`: x, and what is sent of it or comes before that.

    Flat if the name says nothing else.
    """

    x: Tensor
    x_blocks: Tensor
    x_bits: Tensor
    sent: Tensor
    sent_blocks: Tensor
    bits: Tensor
    bits_of_rows: Tensor
    bits_of_blocks: Tensor

    @classmethod
    def of(cls, x_RN: Tensor, sent_RN: Tensor, block: int) -> InStep:
        """Return the memory of two tensors in all shapes that the passes take."""
        x_bits_RN, bits_RN = x_RN.view(torch.int32), sent_RN.view(torch.int32)
        return cls(
            x=x_RN.view(-1),
            x_blocks=x_RN.view(-1, block),
            x_bits=x_bits_RN.view(-1),
            sent=sent_RN.view(-1),
            sent_blocks=sent_RN.view(-1, block),
            bits=bits_RN.view(-1),
            bits_of_rows=bits_RN,
            bits_of_blocks=bits_RN.view(-1, block),
        )


class _StepsMade(threading.local):
    """The steps of one thread, by rows, rows at once and block: making views takes 1 us each."""

    def __init__(self) -> None:
        self.made: dict[tuple[int, int, int], list[InStep]] = {}


_steps = _StepsMade()


def steps_in_scratch(num_rows: int, at_once: int, block: int) -> list[InStep]:
    """Return steps of `at_once` rows of a tile each; the last one may have fewer."""
    made = _steps.made.get((num_rows, at_once, block))
    if made is None:
        x_RN = room("loaded", (num_rows, TILE), CPU, torch.float32)
        sent_RN = room("work", (at_once, TILE), CPU, torch.float32)
        made = _steps.made[num_rows, at_once, block] = [
            InStep.of(x, part(sent_RN, 0, len(x)), block) for x in torch.split(x_RN, at_once)
        ]
    return made


@dataclass(frozen=True)
class FourBitCodec(BlockCodec):
    """Base of the codecs with 4 bits a value and 16 a block."""

    block: int = 64

    def _code_bytes(self, numel: int) -> int:
        return plane_bytes(numel, 2)


@register
@dataclass(frozen=True)
class Int8(BlockCodec):
    """8 bits a value and 16 a block; contractive."""

    name: ClassVar[str] = "int8"
    code: ClassVar[int] = 4
    code_dtype: ClassVar[torch.dtype] = torch.int8
    reads_once: ClassVar[bool] = True
    together_on_cpu: ClassVar[bool] = True
    block: int = 128

    def goes_in_steps(self, dims: Dims) -> bool:
        """Return whether `encode_in_steps` takes rows of this shape."""
        return dims == (TILE,) and self.wire_bytes(TILE) % 8 == 0

    def encode_in_steps(self, frames_RB: Tensor, at_once: int, load: Load, done: Done) -> None:
        """Write the frames of rows of a tile each, those of `encode_rows`, on a CPU.

        Rows are taken `at_once`, so that each pass over them, the codec's and the caller's, finds
        them in cache. Short calls and views are made for all rows together: between passes that
        stream through the cache they cost more than what they do.

        Args:
            frames_RB: where frames are written: uint8, R rows of `wire_bytes(TILE)` side by side.
            at_once: rows of a step; the last step may have fewer.
            load: gives the values of a step.
            done: takes them again, with what they decode to.

        Raises:
            CodecError: as `encode`; then `done` has not been called.
        """
        num_rows = len(frames_RB)
        sections = [2 * TILE // self.block, TILE]
        scales_RB, codes_RN = torch.split(frames_RB[:, HEADER_BYTES:], sections, dim=1)
        steps = steps_in_scratch(num_rows, at_once, self.block)
        peaks_B1 = torch.empty((num_rows * TILE // self.block, 1))
        peaks = torch.split(peaks_B1.view(torch.int32), at_once * TILE // self.block)
        magnitude = constant(MAGNITUDE, torch.int32)
        for index, (step, peaks_B) in enumerate(zip(steps, peaks, strict=True)):
            load(index, step.x)
            torch.bitwise_and(step.x_bits, magnitude, out=step.bits)
            torch.amax(step.bits_of_blocks, 1, keepdim=True, out=peaks_B)
        refuse_infinite(float(peaks_B1.amax()))
        scales_B1 = torch.empty_like(peaks_B1, dtype=torch.bfloat16)
        factors_B1 = absmax_scales(peaks_B1, 127.0, scales_B1)
        scales_RB.view(torch.bfloat16).copy_(scales_B1.view(num_rows, -1))
        scales_B1 = scales_B1.to(torch.float32)
        self._write_steps_of_rows(
            steps, factors_B1, scales_B1, codes_RN.view(torch.int8), at_once, done
        )
        self._put_heads(frames_RB, (TILE,))

    def _write_steps_of_rows(
        self,
        steps: Sequence[InStep],
        factors_B1: Tensor,
        scales_B1: Tensor,
        codes_RN: Tensor,
        at_once: int,
        done: Done,
    ) -> None:
        """Write codes, and pass on what they decode to."""
        row_K, blocks = part(_rounder(0, CPU), 0, self.block), at_once * TILE // self.block
        parts = (
            torch.split(codes_RN, at_once),
            torch.split(factors_B1, blocks),
            torch.split(scales_B1, blocks),
        )
        for index, (step, codes, factors, scales) in enumerate(zip(steps, *parts, strict=True)):
            torch.addcmul(row_K, step.x_blocks, factors, out=step.sent_blocks)
            codes.copy_(step.bits_of_rows)
            step.sent.sub_(ROUNDER)  # the codes again: none is beyond 127
            step.sent_blocks.mul_(scales)
            done(index, step.x, step.sent)

    def _code_bytes(self, numel: int) -> int:
        return numel

    def _factors(self, measures_BM: Tensor, scales_BS: Tensor) -> Tensor:
        return absmax_scales(measures_BM, 127.0, scales_BS)

    def _write_tile(
        self, x_BK: Tensor, factors_BF: Tensor, scales_BS: Tensor, codes: Tensor, numel: int
    ) -> None:
        codes.copy_(part(steps_of(x_BK, factors_BF).view(-1), 0, numel))

    def _read_tile(self, codes: Tensor, scales_BS: Tensor, out_M: Tensor) -> None:
        out_M.copy_(codes)
        scale_blocks_(out_M, scales_BS, self.block)
