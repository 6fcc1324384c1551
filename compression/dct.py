"""`dct`: the k largest coefficients of the cosine transform of each 64 x 64 block.

Blocks: a tensor of two or more dimensions is the matrix [dims[0], rest] in blocks of 64 x 64,
padded with zeros; or, if that takes fewer blocks (and for vectors), its flattened values in
runs of 4,096, each read as 64 x 64. Each of the B blocks sends K = ceil(k N / (4096 B))
coefficients, so padding costs no bytes. If bf16 values are no longer than that (a handful
of values), they are sent instead.

Payload::

    scales   bf16, one for each block
    codes    int8 for each coefficient (`bits=8`: amax / 127 steps), or a sign bit (`bits=1`: times
             the mean magnitude), packed as `atoll.compression.kernels.planes`
    indices  row * 64 + column of each coefficient, as `atoll.compression.sparse`

or one bf16 for each value.

The transform is DCT-II, orthonormal. Decoding must give the same bits everywhere, so the basis
is rounded to integers, C = round(cos-basis 2^20), and both passes add integers in float64: with
codes of at most 128 every partial sum is below 2^53, and exact in any order. The result is
rounded to fp32 once, and multiplied by scale / 2^40.

The error is the norm of the coefficients left out (the basis is orthonormal), and in 8 bits at most
amax / 252 of its block for each coefficient sent.

Source: DeMo, arXiv:2411.19870. Departures: padding instead of divisors of the
dimensions (which fail for odd vocabularies), 12-bit indices and 8-bit values instead of 64 + 32
bits, any number of dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from atoll.compression.base import (
    BF16_MAX,
    FLOAT_MAX,
    HEADER_BYTES,
    TINY,
    CodecError,
    Dims,
    Frame,
    carve,
    floats,
    peak,
    refuse_infinite,
    require_finite,
    spans,
)
from atoll.compression.checksum import Checksum
from atoll.compression.kernels.planes import pack_runs_, packed_bytes, unpack_runs
from atoll.compression.registry import register
from atoll.compression.scratch import TILE, room, scratch, tiles_at_once
from atoll.compression.sparse import (
    CHUNK,
    CoordinateCodec,
    Sparse,
    check_indices,
    index_bytes,
    read_indices,
    write_indices,
)
from atoll.compression.topk import largest_of_chunks

SIDE = 64  # the chunk of DeMo (arXiv:2411.19870)
BASIS_BITS = 20  # 7 + 2 * (20 + 3) bits: below 2^53, and 2^21 would not be


class _Framed(NamedTuple):
    """A tensor's flat values, its shape, and the payload of its frame, or its coordinates."""

    values: Tensor
    dims: Dims
    payload: Tensor


@register
@dataclass(frozen=True)
class Dct(CoordinateCodec):
    """k of 4,096 coefficients, 20 bits each with `bits=8`; contractive."""

    name: ClassVar[str] = "dct"
    code: ClassVar[int] = 14
    by_tensor: ClassVar[bool] = True
    any_shapes: ClassVar[bool] = True
    k: int = 32
    bits: int = 8

    def __post_init__(self) -> None:
        """Refuse counts outside a block and unknown widths."""
        if not 1 <= self.k <= CHUNK or self.bits not in (1, 8):
            raise CodecError(f"expected k of 1 to {CHUNK} and bits 1 or 8, got {self}")

    def _frame_key(self, dims: Dims) -> str:
        return str(dims)

    def _sizes(self, dims: Dims) -> tuple[int, int]:
        """Return (blocks, coefficients of each)."""
        return _counts(self.k, tuple(dims))

    def _code_bytes(self, count: int) -> int:
        return count if self.bits == 8 else packed_bytes(count, 8)

    def _transform_bytes(self, dims: Dims) -> int:
        num_blocks, k = self._sizes(dims)
        count = num_blocks * k
        return 2 * num_blocks + self._code_bytes(count) + index_bytes(count)

    def _plain(self, dims: Dims) -> bool:
        return self._transform_bytes(dims) >= 2 * math.prod(dims)

    def _payload_bytes(self, dims: Dims) -> int:
        return 2 * math.prod(dims) if self._plain(dims) else self._transform_bytes(dims)

    def _sections(self, payload: Tensor, dims: Dims) -> list[Tensor]:
        num_blocks, k = self._sizes(dims)
        codes, rest = self._code_bytes(num_blocks * k), index_bytes(num_blocks * k)
        return carve(
            payload, (torch.bfloat16, num_blocks), (torch.uint8, codes), (torch.uint8, rest)
        )

    def encode_pieces(self, x_N: Tensor, shapes: Sequence[Dims]) -> list[bytes]:
        if x_N.device.type != "cpu":
            return super().encode_pieces(x_N, shapes)
        frames = [bytearray(self.wire_bytes(dims)) for dims in shapes]
        payloads = [_payload(frame) for frame in frames]
        for pieces in self._groups(_parts(floats(x_N), shapes), shapes, payloads):
            refuse_infinite(float(self._write_pieces(pieces)))
        for frame, dims in zip(frames, shapes, strict=True):
            frame[:HEADER_BYTES] = self._sealed(dims, Checksum(_payload(frame)))
        return [bytes(frame) for frame in frames]

    def decode_pieces(self, frames: Sequence[Frame], shapes: Sequence[Dims], out_N: Tensor) -> None:
        if out_N.device.type != "cpu":
            super().decode_pieces(frames, shapes, out_N)
            return
        for pieces in self._groups(_parts(out_N, shapes), shapes, self._opened(frames, shapes)):
            self._read_pieces(pieces)

    def num_coordinates(self, dims: Dims) -> int:
        """Return how many coefficients a tensor has, those of padding too."""
        return math.prod(dims) if self._plain(dims) else self._sizes(dims)[0] * CHUNK

    def sparse_pieces(self, frames: Sequence[Frame], shapes: Sequence[Dims]) -> Sparse:
        sizes = [self.num_coordinates(dims) for dims in shapes]
        places = torch.split(torch.arange(sum(sizes)), sizes)
        groups = self._groups(places, shapes, self._opened(frames, shapes))
        found = [self._read_coordinates(pieces) for pieces in groups]
        return Sparse(
            indices=torch.cat([indices for indices, _ in found]),
            values=torch.cat([values for _, values in found]),
            shape=(sum(sizes),),
        )

    def restore_pieces(self, all_D: Tensor, shapes: Sequence[Dims], out_N: Tensor) -> None:
        """As `CoordinateCodec.restore_pieces`, rounded to 127 steps of the largest of each block.

        They are whole numbers then, as what is sent, so that the transform is exact.
        """
        coordinates = torch.split(all_D, [self.num_coordinates(dims) for dims in shapes])
        for pieces in self._groups(_parts(out_N, shapes), shapes, coordinates):
            if self._plain(pieces[0].dims):
                for values, _, own in pieces:
                    values.copy_(own)
            else:
                self._restore_rounded(pieces)

    def _restore_rounded(self, pieces: Sequence[_Framed]) -> None:
        value_BC = _together([own for *_, own in pieces]).view(-1, CHUNK)
        step_B = value_BC.abs().amax(1) / 127
        code_BC = (value_BC / (step_B + TINY).unsqueeze(1)).round_().to(torch.float64)
        code_BSS = code_BC.view(-1, SIDE, SIDE)
        self._restore(lambda some: rows_of_all(code_BSS[some]), step_B, pieces)

    def _opened(self, frames: Sequence[Frame], shapes: Sequence[Dims]) -> list[Tensor]:
        """Return payloads; copies, since what `_open` returns lasts until the next call."""
        return [self._open(f, dims).clone() for f, dims in zip(frames, shapes, strict=True)]

    def _groups(
        self, parts: Sequence[Tensor], shapes: Sequence[Dims], payloads: Sequence[Tensor]
    ) -> list[list[_Framed]]:
        """Return the pieces that are not empty, in groups that are coded alike."""
        groups: dict[tuple[bool, int], list[_Framed]] = {}
        for values, dims, payload in zip(parts, shapes, payloads, strict=True):
            if values.numel():
                alike = self._plain(dims), self._sizes(dims)[1]
                groups.setdefault(alike, []).append(_Framed(values, dims, payload))
        return list(groups.values())

    def _write(self, x_N: Tensor, dims: Dims, payload: Tensor) -> Tensor:
        return self._write_pieces([_Framed(x_N, dims, payload)])

    def _write_pieces(self, pieces: Sequence[_Framed]) -> Tensor:
        """Write one of `_groups`; return the witness of all."""
        largest_P = torch.stack([_largest(piece.values) for piece in pieces])
        if self._plain(pieces[0].dims):
            for piece in pieces:
                values = piece.values.clamp(-BF16_MAX, BF16_MAX)
                piece.payload.view(torch.bfloat16).copy_(values)
        else:
            self._write_blocks(pieces, largest_P)
        return largest_P.amax()

    def _write_blocks(self, pieces: Sequence[_Framed], largest_P: Tensor) -> None:
        blocks = [_blocks(piece.values, piece.dims) for piece in pieces]
        sizes = [len(own) for own in blocks]
        unit_P = largest_P + TINY.to(largest_P.device)  # no coefficient of x / unit overflows
        units = [unit.expand(size) for unit, size in zip(unit_P.unbind(), sizes, strict=True)]
        unit_B = _together(units)
        at_BK, value_BK = self._select(_together(blocks), unit_B, self._sizes(pieces[0].dims)[1])
        scale_B, code_BK = self._quantize(value_BK, unit_B)
        parts = (torch.split(each, sizes) for each in (scale_B, code_BK, at_BK))
        for piece, scale, code, at in zip(pieces, *parts, strict=True):
            scales, codes, indices = self._sections(piece.payload, piece.dims)
            scales.copy_(scale)
            self._write_codes(code.reshape(-1), codes)
            write_indices(at.reshape(-1), indices)

    def _select(self, blocks_BSS: Tensor, unit_B: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return places and values, over its unit, of the k largest coefficients of each block."""
        size, found = _group(blocks_BSS), []
        for blocks, unit in zip(
            torch.split(blocks_BSS, size), torch.split(unit_B, size), strict=True
        ):
            coefficients = transform(blocks, unit.reciprocal().view(-1, 1, 1)).view(-1, CHUNK)
            at = largest_of_chunks(coefficients, k)
            found.append((at, coefficients.gather(1, at)))
        return torch.cat([at for at, _ in found]), torch.cat([value for _, value in found])

    def _quantize(self, value_BK: Tensor, unit_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scales (bf16) and the codes (int8; with one bit, 1 for negative)."""
        # 1 + 2^-8: bf16 may round a scale down by as much. The limit keeps decoded values finite:
        # none exceeds the norm of its block, at most 64 * 128 steps for 4,096 coefficients.
        size_BK = value_BK.abs()
        step_B = size_BK.amax(1) * ((1 + 2**-8) / 127) if self.bits == 8 else size_BK.mean(1)
        scale_B = ((step_B + TINY) * unit_B).clamp_(max=BF16_MAX / 128 / SIDE).to(torch.bfloat16)
        if self.bits == 1:
            return scale_B, value_BK.signbit().view(torch.int8)
        steps_BK = value_BK * (unit_B / scale_B.to(torch.float32)).unsqueeze(1)
        return scale_B, steps_BK.round_().clamp_(-127, 127).to(torch.int8)

    def _write_codes(self, code_M: Tensor, codes: Tensor) -> None:
        if self.bits == 1:
            pack_runs_(code_M, 1, codes)
        else:
            codes.view(torch.int8).copy_(code_M)

    def _read(self, payload: Tensor, dims: Dims, out_N: Tensor) -> None:
        self._read_pieces([_Framed(out_N, dims, payload)])

    def _read_pieces(self, pieces: Sequence[_Framed]) -> None:
        """Decode one of `_groups`."""
        if not self._plain(pieces[0].dims):
            self._read_blocks(pieces)
            return
        for piece in pieces:
            piece.values.copy_(piece.payload.view(torch.bfloat16))
            require_finite(piece.values, "values")

    def _read_blocks(self, pieces: Sequence[_Framed]) -> None:
        at_BK, code_BK, scale_B = self._coefficients(pieces)
        self._restore(lambda some: rows_of_few(at_BK[some], code_BK[some]), scale_B, pieces)

    def _read_coordinates(self, pieces: Sequence[_Framed]) -> tuple[Tensor, Tensor]:
        """Return places and values of the coordinates in one of `_groups`; pieces hold places."""
        if self._plain(pieces[0].dims):
            values = _together([piece.payload.view(torch.bfloat16) for piece in pieces]).float()
            require_finite(values, "values")
            return _together([piece.values for piece in pieces]), values
        at_BK, code_BK, scale_B = self._coefficients(pieces)
        start_B = _together([piece.values[::CHUNK] for piece in pieces])
        values_BK = code_BK.to(torch.float32) * scale_B.unsqueeze(1)
        return (at_BK + start_B.unsqueeze(1)).view(-1), values_BK.view(-1)

    def _coefficients(self, pieces: Sequence[_Framed]) -> tuple[Tensor, Tensor, Tensor]:
        """Return places [B, K], whole numbers, float64 [B, K], and scales [B] of all blocks."""
        scales, codes, indices = zip(
            *(self._sections(piece.payload, piece.dims) for piece in pieces), strict=True
        )
        scale_B = _together(scales).to(torch.float32)
        require_finite(scale_B, "scales", limit=FLOAT_MAX / 128 / SIDE)
        counts = [math.prod(self._sizes(piece.dims)) for piece in pieces]
        k = counts[0] // len(scales[0])
        found = [read_indices(*pair) for pair in zip(indices, counts, strict=True)]
        at_BK = _together(found).view(-1, k)
        check_indices(at_BK, CHUNK)
        read = [self._read_codes(*pair) for pair in zip(codes, counts, strict=True)]
        return at_BK, _together(read).view(-1, k).to(torch.float64), scale_B

    def _read_codes(self, codes: Tensor, count: int) -> Tensor:
        """Return the integer coefficients."""
        if self.bits == 8:
            return codes.view(torch.int8)
        return 1 - 2 * unpack_runs(codes, 1, count).view(torch.int8)

    def _restore(
        self, rows_of: Callable[[slice], Tensor], scale_B: Tensor, pieces: Sequence[_Framed]
    ) -> None:
        """Write the values of all pieces, from blocks whose rows are transformed back already."""
        out, *others = (piece.values for piece in pieces)
        direct = not others and _is_flat(pieces[0].dims) and out.numel() % CHUNK == 0
        blocks = (out if direct else out.new_empty(len(scale_B) * CHUNK)).view(-1, SIDE, SIDE)
        # 2^-40: each of the two passes multiplied by 2^20.
        size, gain_B = _group(blocks), (scale_B * 2.0**-40).view(-1, 1, 1)
        for start in range(0, len(blocks), size):
            some = slice(start, start + size)
            blocks[some].copy_(columns(rows_of(some))).mul_(gain_B[some])
        if not direct:
            sizes = [self._sizes(piece.dims)[0] for piece in pieces]
            for piece, own in zip(pieces, torch.split(blocks, sizes), strict=True):
                piece.values.copy_(_unblocks(own, piece.dims))


def _parts(x_N: Tensor, shapes: Sequence[Dims]) -> tuple[Tensor, ...]:
    return torch.split(x_N, [math.prod(dims) for dims in shapes])


def _payload(frame: bytearray) -> Tensor:
    return torch.frombuffer(frame, dtype=torch.uint8)[HEADER_BYTES:]


def _largest(x_N: Tensor) -> Tensor:
    return peak(torch.stack([peak(x_N[start:stop]) for start, stop in spans(x_N)]))


def _together(parts: Sequence[Tensor]) -> Tensor:
    """Join tensors; return one alone as it is, without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


@lru_cache(maxsize=1_000)
def _counts(k: int, dims: Dims) -> tuple[int, int]:
    numel, num_blocks = math.prod(dims), math.prod(_grid(dims))
    return num_blocks, -(-k * numel // (CHUNK * num_blocks))


def _group(blocks_BSS: Tensor) -> int:
    """Return how many blocks to transform at once."""
    if blocks_BSS.device.type != "cpu":
        return len(blocks_BSS)
    return tiles_at_once() * TILE // CHUNK


def _is_flat(dims: Dims) -> bool:
    """Return True if a tensor is cut into runs of its flattened values."""
    if len(dims) < 2:
        return True
    columns = math.prod(dims[1:])
    return -(-math.prod(dims) // CHUNK) < -(-dims[0] // SIDE) * -(-columns // SIDE)


def _grid(dims: Dims) -> tuple[int, int]:
    """Return the blocks down and across."""
    if _is_flat(dims):
        return -(-math.prod(dims) // CHUNK), 1
    return -(-dims[0] // SIDE), -(-math.prod(dims[1:]) // SIDE)


def _blocks(x_N: Tensor, dims: Dims) -> Tensor:
    """Cut into blocks [B, 64, 64], padded with zeros."""
    down, across = _grid(dims)
    if _is_flat(dims):
        short = down * CHUNK - x_N.numel()
        flat = torch.nn.functional.pad(x_N, (0, short)) if short else x_N
        return flat.view(-1, SIDE, SIDE)
    rows, columns = dims[0], math.prod(dims[1:])
    padding = (0, across * SIDE - columns, 0, down * SIDE - rows)
    padded = torch.nn.functional.pad(x_N.view(rows, columns), padding)
    return padded.view(down, SIDE, across, SIDE).transpose(1, 2).reshape(-1, SIDE, SIDE)


def _unblocks(blocks_BSS: Tensor, dims: Dims) -> Tensor:
    """Undo `_blocks`; return the flat values."""
    if _is_flat(dims):
        return blocks_BSS.view(-1)[: math.prod(dims)]
    down, across = _grid(dims)
    whole = blocks_BSS.view(down, across, SIDE, SIDE).transpose(1, 2)
    matrix = whole.reshape(down * SIDE, across * SIDE)
    return matrix[: dims[0], : math.prod(dims[1:])].reshape(-1)


def cosine_basis() -> Tensor:
    """Return the orthonormal DCT-II basis, float64 [frequency, position]."""
    position = torch.arange(SIDE, dtype=torch.float64) + 0.5
    frequency = torch.arange(SIDE, dtype=torch.float64).unsqueeze(1)
    basis = torch.cos(frequency * position * (math.pi / SIDE)) * math.sqrt(2 / SIDE)
    basis[0] *= math.sqrt(0.5)
    return basis


@cache
def _forward_basis(device: torch.device) -> Tensor:
    return cosine_basis().to(torch.float32).to(device)


@cache
def integer_basis(device: torch.device) -> Tensor:
    """Return round(basis 2^20), float64 [frequency, position]; a test pins its digest."""
    return (cosine_basis() * 2.0**BASIS_BITS).round().to(device)


def transform(x_BSS: Tensor, gain: Tensor) -> Tensor:
    """Return the coefficients of gain * x, fp32; reused scratch."""
    basis = _forward_basis(x_BSS.device)
    scaled = torch.mul(x_BSS, gain, out=scratch("work", x_BSS))
    across = torch.matmul(scaled, basis.T, out=scratch("across", x_BSS))
    return torch.bmm(basis.expand(len(x_BSS), -1, -1), across, out=scratch("bins", x_BSS))


def rows_of_few(at_BK: Tensor, code_BK: Tensor) -> Tensor:
    """Transform rows that few coefficients are in, back to positions across; [B, 64, 64].

    Whole numbers, exact. Adds only the rows of the basis that have a coefficient. Reused scratch.
    """
    basis, count = integer_basis(at_BK.device), len(at_BK)
    rows = (at_BK >> 6) + torch.arange(count, device=at_BK.device).unsqueeze(1) * SIDE
    terms = _room("terms", (at_BK.numel(), SIDE), at_BK)
    torch.index_select(basis, 0, (at_BK & (SIDE - 1)).view(-1), out=terms)
    half = _room("half", (count * SIDE, SIDE), at_BK).zero_()
    half.index_add_(0, rows.view(-1), terms.mul_(code_BK.reshape(-1, 1)))
    return half.view(count, SIDE, SIDE)


def rows_of_all(code_BSS: Tensor) -> Tensor:
    """Return the rows of blocks that keep all coefficients."""
    basis = integer_basis(code_BSS.device)
    return torch.matmul(code_BSS, basis, out=_room("half", tuple(code_BSS.shape), code_BSS))


def columns(half_BSS: Tensor) -> Tensor:
    """Transform the columns of `rows_of_few`'s result back to positions, float64, exact.

    Even basis functions are symmetric and odd ones antisymmetric, which halves it. Reused scratch.
    """
    basis = integer_basis(half_BSS.device)
    half = half_BSS.view(len(half_BSS), SIDE // 2, 2, SIDE)
    shape = (len(half), SIDE // 2, SIDE)
    even, odd = (
        torch.bmm(
            basis[parity::2, : SIDE // 2].T.expand(len(half), -1, -1),
            half[:, :, parity],
            out=_room(f"parity{parity}", shape, half),
        )
        for parity in (0, 1)
    )
    exact = _room("exact", (len(half), SIDE, SIDE), half)
    torch.add(even, odd, out=exact[:, : SIDE // 2])
    exact[:, SIDE // 2 :].copy_(even.sub_(odd).index_select(1, _reversed(half.device)))
    return exact


def _room(slot: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
    return room(slot, shape, like.device, torch.float64)


@cache
def _reversed(device: torch.device) -> Tensor:
    return torch.arange(SIDE // 2 - 1, -1, -1, device=device)
