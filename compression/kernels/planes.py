"""Packing of small codes, eight bytes at a time.

A run of m codes is cut into planes, as many as codes go into a byte: plane j holds the codes
[j L, (j + 1) L), where L is m / planes, rounded up to a multiple of 8. Byte i of the packed
run holds code i of every plane; plane 0 is in the lowest bits (or is the lowest digit).
Neighbours thus stay neighbours in all planes, and one 64-bit operation works on eight codes.
Codes beyond m are zero.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from atoll.compression.base import part
from atoll.compression.scratch import TILE, room, scratch

EIGHTS = torch.tensor(0x8888 - 0x10000, dtype=torch.int16)
"""Added to four codes of -8..7, and then turned: their two's complements."""


def plane_bytes(numel: int, planes: int) -> int:
    """Return L, the bytes of a packed run of `numel` codes."""
    return 8 * -(-numel // (8 * planes))


def packed_bytes(numel: int, planes: int) -> int:
    """Return the bytes of any number of codes: runs of a tile, then a shorter one."""
    whole, rest = divmod(numel, TILE)
    return whole * plane_bytes(TILE, planes) + plane_bytes(rest, planes)


def run_length(numel: int) -> int:
    """Return how many codes are packed together: a tile, or all of a shorter tensor."""
    return TILE if numel > TILE else numel


def planes_of(codes_M: Tensor, numel: int, planes: int, zero: int = 0, run: int = 0) -> Tensor:
    """Store the first `numel` codes as bytes, in words of two [runs, planes, L / 2].

    `codes_M` has any shape and any type whose values fit int8 (fractions are cut off); bytes
    that fill the planes are used where they are. `zero` fills what they don't.
    """
    length = run or run_length(numel)
    width = planes * plane_bytes(length, planes)
    runs = numel // length
    if width == length and codes_M.dtype.itemsize == 1 and codes_M.numel() == numel:
        return codes_M.view(-1).view(torch.int16).view(runs, planes, -1)
    rows = room("rows", (runs, width), codes_M.device, torch.int8)
    if width > length:
        rows[:, length:].fill_(zero)
    codes = part(codes_M.view(-1), 0, numel).view(runs, length)
    part(rows, 0, length, dim=1).copy_(codes)
    return rows.view(torch.int16).view(runs, planes, -1)


def pack_(codes_M: Tensor, bits: int, out: Tensor, numel: int, zero: int = 0, run: int = 0) -> None:
    """Pack the first `numel` codes, of `bits` (1, 2 or 4) bits each, into the bytes `out`.

    Codes beyond become `zero`. Byte codes may be overwritten. Runs are of `run` codes each, by
    default as `run_length` says.
    """
    first, *others, last = planes_of(codes_M, numel, 8 // bits, zero, run).unbind(1)
    for j, plane in enumerate(others, start=1):
        first.add_(plane, alpha=1 << j * bits)
    aligned = out.storage_offset() % 2 == 0  # else no view as int16: behind an odd number of bytes
    packed = out.view(torch.int16).view(first.shape[0], -1) if aligned else first
    torch.add(first, last, alpha=1 << 8 - bits, out=packed)
    if not aligned:
        out.view(first.shape[0], -1).copy_(first.view(torch.uint8))


def rows_of(digits_M: Tensor, numel: int, planes: int, plane: int = 0) -> Tensor:
    """Return the first `numel` digits as [runs, planes, L], filled with zeros.

    L is `plane`, or that of byte planes. Digits that fill the planes are used where they are.
    """
    length = run_length(numel)
    runs, width = numel // length, planes * (plane or plane_bytes(length, planes))
    rows = digits_M.view(-1)
    if width != length or rows.numel() != numel:
        rows = room("rows", (runs, width), digits_M.device, digits_M.dtype)
        part(rows, 0, length, dim=1).copy_(part(digits_M.view(-1), 0, numel).view(runs, length))
        rows[:, length:].zero_()
    return rows.view(runs, planes, -1)


def pack_weighted(digits_M: Tensor, weights: tuple[int, ...], out: Tensor, numel: int) -> None:
    """Store the sum over planes of weight x digit as int8: `numel` fp32 digits, small integers.

    A matrix product reads them once; with integers it is exact.
    """
    rows = rows_of(digits_M, numel, len(weights))
    total = torch.matmul(_row(weights, rows.device), rows)
    out.view(torch.int8).copy_(total.view(-1))


@cache
def _row(weights: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([weights], dtype=torch.float32, device=device)


def unpack(packed: Tensor, bits: int, numel: int, *, high: bool, run: int = 0) -> Tensor:
    """Return `numel` codes as bytes (uint8), in the high or the low bits; the others are zero.

    Runs as in `pack_`.
    """
    length, planes = run or run_length(numel), 8 // bits
    runs = numel // length
    width = packed.numel() // runs
    words = aligned_words(packed).view(runs, 1, width // 8)
    rows = room("codes", (runs, planes * width), packed.device, torch.uint8)
    out = rows.view(torch.int64).view(runs, planes, -1)
    if high:
        torch.bitwise_left_shift(words, _shifts(bits, 8 - bits, words.device), out=out)
    else:
        torch.bitwise_right_shift(words, _shifts(bits, 0, words.device), out=out)
    mask = ((1 << bits) - 1) << (8 - bits if high else 0)
    out.bitwise_and_(constant(repeated(mask), torch.int64))
    return part(rows, 0, length, dim=1).reshape(-1)


def pack_wide_(codes_M: Tensor, out: Tensor, numel: int) -> None:
    """Pack the first `numel` codes, int16 of -8..7, into int16: four planes, 0 in the highest bits.

    Packed are their two's complements. The codes may be overwritten.
    """
    lanes = 4 * -(-run_length(numel) // 16)  # as many bytes as with two planes of bytes
    first, second, third, fourth = rows_of(codes_M, numel, 4, lanes).unbind(1)
    high, low = second.add_(first, alpha=1 << 4), fourth.add_(third, alpha=1 << 4)
    packed = torch.add(low, high, alpha=1 << 8, out=out.view(low.shape))
    packed.add_(EIGHTS).bitwise_xor_(EIGHTS)


def unpack_wide(packed: Tensor, numel: int) -> Tensor:
    """Return `numel` codes in the high 4 bits of int16; the lower bits are arbitrary."""
    length = run_length(numel)
    words = packed.view(numel // length, 1, -1)
    out = room("wide", (words.shape[0], 4, words.shape[2]), packed.device, torch.int16)
    torch.bitwise_left_shift(words, _wide_shifts(packed.device), out=out)
    rows = out.view(words.shape[0], -1)
    return part(rows, 0, length, dim=1).reshape(-1)


@cache
def _wide_shifts(device: torch.device) -> Tensor:
    return torch.tensor([0, 4, 8, 12], dtype=torch.int16, device=device).unsqueeze(1)


@cache
def _shifts(bits: int, last: int, device: torch.device) -> Tensor:
    """Return how far to shift each plane, [planes, 1]: rising from 0, or falling from `last`."""
    shifts = [abs(last - j * bits) for j in range(8 // bits)]
    return torch.tensor(shifts, dtype=torch.int64, device=device).unsqueeze(1)


def aligned_words(packed: Tensor) -> Tensor:
    """Return bytes (a multiple of 8 of them) as signed 64-bit words."""
    if packed.storage_offset() % 8:
        packed = scratch("packed", packed, torch.uint8).copy_(packed)
    return packed.view(torch.int64)


@cache
def constant(value: int, dtype: torch.dtype) -> Tensor:
    """Return an integer as a 0-d tensor: for short operations that is half the cost."""
    return torch.tensor(value, dtype=dtype)


def repeated(byte: int) -> int:
    """Return the signed 64-bit word of eight times `byte`."""
    return int.from_bytes(bytes([byte]) * 8, "little", signed=True)


def pack_runs_(codes_M: Tensor, bits: int, out: Tensor) -> None:
    """Pack any number of codes into `packed_bytes` bytes, in runs of a tile as `pack_` does."""
    numel, planes = codes_M.numel(), 8 // bits
    whole = numel // TILE * TILE
    cut = packed_bytes(whole, planes)
    if whole:
        pack_(codes_M[:whole], bits, out[:cut], whole)
    if whole < numel:
        pack_(codes_M[whole:], bits, out[cut:], numel - whole)


def unpack_runs(packed: Tensor, bits: int, numel: int) -> Tensor:
    """Return any number of codes in the low bits of new bytes."""
    whole = numel // TILE * TILE
    cut = packed_bytes(whole, 8 // bits)
    out = torch.empty(numel, dtype=torch.uint8, device=packed.device)
    if whole:
        out[:whole] = unpack(packed[:cut], bits, whole, high=False)
    if whole < numel:
        out[whole:] = unpack(packed[cut:], bits, numel - whole, high=False)
    return out
