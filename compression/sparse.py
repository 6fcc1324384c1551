"""Base of sparse codecs: chunks of 4,096 values, 12-bit indices, and merging.

A sparse codec sends values at indices; a reducer can add without ever being dense: it merges
index sets (`merge`), and sends the union on with `TopK(k=members * k)`, which keeps every
index of it.

Layout of a tensor of N values, flattened: whole chunks of 4,096 with k entries each, then a
short chunk of r values with ceil(k r / 4096).

Indices on the wire, all chunks after one another::

    low     the low 8 bits, a byte each
    high    the high 4 bits, packed as `atoll.compression.kernels.planes`

They rise strictly within a chunk; a decoder MUST refuse those that do not, and those outside of
the chunk.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from atoll.compression.base import HEADER_BYTES, Codec, CodecError, Dims, Frame, Shape, shape_of
from atoll.compression.kernels.planes import pack_, pack_runs_, packed_bytes, unpack, unpack_runs
from atoll.compression.scratch import room

CHUNK = 4_096  # 12-bit indices; 64 x 64, so that a block of `dct` is one too


@dataclass(frozen=True, kw_only=True)
class Sparse:
    """Values at rising flat indices; zero elsewhere."""

    indices: Tensor
    """int64 [K], strictly rising."""

    values: Tensor
    """fp32 [K]."""

    shape: tuple[int, ...]
    """Shape of the dense tensor."""

    def dense(self) -> Tensor:
        """Return the dense fp32 tensor."""
        out = self.values.new_zeros(math.prod(self.shape))
        out[self.indices] = self.values
        return out.view(self.shape)

    def cpu(self) -> Sparse:
        """Return it in the host's memory."""
        return replace(self, indices=self.indices.cpu(), values=self.values.cpu())


def merge(parts: Sequence[Sparse], weights: Sequence[float]) -> Sparse:
    """Return the weighted sum of sparse tensors of one shape, on the union of their indices.

    Terms are added in the order of `parts`, by separate fp32 multiplications and additions, so
    the result has the same bits everywhere.

    Raises:
        CodecError: no parts, other shapes, or another number of weights.
    """
    if not parts or len(parts) != len(weights) or len({part.shape for part in parts}) != 1:
        raise CodecError(f"expected parts of one shape with a weight each, got {len(parts)} parts")
    union_U = torch.unique(torch.cat([part.indices for part in parts]))
    total_U = torch.zeros(union_U.numel(), dtype=torch.float32, device=union_U.device)
    for part, weight in zip(parts, weights, strict=True):
        at_K = torch.searchsorted(union_U, part.indices)
        total_U[at_K] += part.values * torch.tensor(weight, dtype=torch.float32)
    return Sparse(indices=union_U, values=total_U, shape=parts[0].shape)


@dataclass(frozen=True)
class CoordinateCodec(Codec):
    """Base of the codecs that send some coordinates of a tensor: of its values, or coefficients.

    A receiver knows which ones, so a mean of frames can divide each by the number of its senders.
    """

    @abstractmethod
    def num_coordinates(self, dims: Dims) -> int:
        """Return how many coordinates a tensor has."""

    @abstractmethod
    def sparse_pieces(self, frames: Sequence[Frame], shapes: Sequence[Dims]) -> Sparse:
        """Return the coordinates in the frames of consecutive pieces, numbered through.

        Raises:
            CodecError: as `decode`.
        """

    @abstractmethod
    def restore_pieces(self, all_D: Tensor, shapes: Sequence[Dims], out_N: Tensor) -> None:
        """Write the values of pieces with these coordinates; the same bits on every device."""


@dataclass(frozen=True)
class SparseCodec(CoordinateCodec):
    """Base of the codecs that send some values of each chunk."""

    indices_rise: ClassVar[bool] = False
    """True: indices of a payload rise, or the frame is refused."""

    def num_coordinates(self, dims: Dims) -> int:
        """Return how many values a tensor has."""
        return math.prod(dims)

    def sparse_pieces(self, frames: Sequence[Frame], shapes: Sequence[Dims]) -> Sparse:
        return self.sparse_rows(frames, math.prod(shapes[0]))

    def restore_pieces(self, all_D: Tensor, shapes: Sequence[Dims], out_N: Tensor) -> None:
        """Copy them: coordinates are values."""
        out_N.copy_(all_D)

    def sparse(self, data: Frame, shape: Shape) -> Sparse:
        """Return the entries of a frame, without making it dense.

        Raises:
            CodecError: as `decode`.
        """
        dims = shape_of(shape)
        payload = self._open(data, dims)
        if payload.numel() == 0:
            empty = torch.zeros(0)
            return Sparse(indices=empty.to(torch.int64), values=empty, shape=dims)
        indices_K, values_K = self._entries(payload, math.prod(dims))
        if self.indices_rise:
            return Sparse(indices=indices_K, values=values_K, shape=dims)
        order = torch.argsort(indices_K)
        return Sparse(indices=indices_K[order], values=values_K[order], shape=dims)

    def sparse_rows(self, frames: Sequence[Frame], numel: int) -> Sparse:
        """Return the entries of the frames of rows of `numel` values, without making them dense.

        Raises:
            CodecError: as `decode`.
        """
        rows = [self.sparse(frame, numel) for frame in frames]
        if len(rows) == 1:
            return replace(rows[0], shape=(1, numel))
        indices = [row.indices + at * numel for at, row in enumerate(rows)]
        return Sparse(
            indices=torch.cat(indices),
            values=torch.cat([row.values for row in rows]),
            shape=(len(frames), numel),
        )

    def encode_sparse_rows(self, x_RN: Tensor) -> tuple[list[bytes], Sparse]:
        """Return a frame for each row, as `encode_rows` does, and the result of `sparse_rows`.

        Raises:
            CodecError: as `encode`.
        """
        frames = self.encode_rows(x_RN)
        return frames, self.sparse_rows(frames, x_RN.shape[1])

    @abstractmethod
    def _entries(self, payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Return flat indices (int64, unique) and values (fp32) of a payload."""

    def _read(self, payload: Tensor, dims: Dims, out_N: Tensor) -> None:
        indices_K, values_K = self._entries(payload, out_N.numel())
        out_N.zero_()
        out_N.scatter_(0, indices_K, values_K)


def entries(numel: int, k: int) -> tuple[int, int, int]:
    """Return (whole chunks, values of the short chunk, its entries)."""
    whole, rest = divmod(numel, CHUNK)
    return whole, rest, -(-k * rest // CHUNK)


def num_entries(numel: int, k: int) -> int:
    """Return how many values a tensor sends."""
    whole, _, rest_k = entries(numel, k)
    return whole * k + rest_k


def chunk_starts(numel: int, k: int, device: torch.device) -> Tensor:
    """Return the flat index at which the chunk of each entry starts."""
    whole, _, rest_k = entries(numel, k)
    starts = torch.arange(whole, device=device).mul_(CHUNK).repeat_interleave(k)
    return torch.cat([starts, torch.full((rest_k,), whole * CHUNK, device=device)])


def index_bytes(count: int) -> int:
    """Return the bytes of `count` 12-bit indices."""
    return count + packed_bytes(count, 2)


def write_indices(indices_K: Tensor, out: Tensor) -> None:
    """Pack indices within chunks."""
    count = indices_K.numel()
    out[:count].copy_(indices_K.bitwise_and(0xFF))
    pack_runs_(indices_K >> 8, 4, out[count:])


def read_indices(packed: Tensor, count: int) -> Tensor:
    """Return `count` indices within chunks, int64; not yet checked."""
    high = unpack_runs(packed[count:], 4, count).to(torch.int64)
    return high.bitwise_left_shift_(8).bitwise_or_(packed[:count])


def write_index_rows(indices_RK: Tensor, out_RB: Tensor) -> None:
    """Pack indices within chunks, each row by itself, as `write_indices` does."""
    rows, count = indices_RK.shape
    out_RB[:, :count].copy_(indices_RK.bitwise_and(0xFF))
    high = room("high bits", (rows, packed_bytes(count, 2)), out_RB.device, torch.uint8)
    pack_(indices_RK >> 8, 4, high.view(-1), indices_RK.numel(), run=count)
    out_RB[:, count:].copy_(high)


def read_index_rows(packed_RB: Tensor, count: int) -> Tensor:
    """Return `count` indices within chunks a row, int64; not yet checked."""
    packed = packed_RB[:, count:].reshape(-1)
    high = unpack(packed, 4, len(packed_RB) * count, high=False, run=count).to(torch.int64)
    return high.view(-1, count).bitwise_left_shift_(8).bitwise_or_(packed_RB[:, :count])


def check_indices(indices_CK: Tensor, size: int) -> None:
    """Refuse indices that do not rise within a chunk of `size` values."""
    falls = bool((indices_CK[:, 1:] <= indices_CK[:, :-1]).any())
    if falls or int(indices_CK[:, -1:].max()) >= size:
        raise CodecError(f"expected rising indices below {size} in each chunk")


def values_payload(codec: Codec, count: int) -> int:
    """Return the payload bytes of `count` values in `codec`, rounded up to a multiple of 8."""
    return -(-(codec.wire_bytes(count) - HEADER_BYTES) // 8) * 8
