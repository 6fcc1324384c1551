"""`topk`: the k largest of each 4,096 values, with 12-bit indices; the values in any codec.

Payload::

    values    payload of the codec `values` for all entries, padded to a multiple of 8
    indices   as `atoll.compression.sparse`

Of equal magnitudes any may be taken. The error is the norm of the values left out, at most
sqrt(1 - k / 4096) of the whole for whole chunks, and that of the codec `values`.

Source: SparseLoCo (top-k in chunks, 2-bit values). Departure: chunks are consecutive values
of the flattened tensor, also of matrices; so a chunk never straddles two cells of a reduction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from atoll.compression.base import (
    HEADER_BYTES,
    Codec,
    CodecError,
    Dims,
    Frame,
    floats,
    peak,
    refuse_infinite,
    spans,
)
from atoll.compression.blocks import MAGNITUDE, Int8
from atoll.compression.registry import register
from atoll.compression.scratch import scratch
from atoll.compression.sparse import (
    CHUNK,
    Sparse,
    SparseCodec,
    check_indices,
    chunk_starts,
    entries,
    index_bytes,
    num_entries,
    read_index_rows,
    read_indices,
    values_payload,
    write_index_rows,
    write_indices,
)

CHUNK_BITS = 12  # 2^12 = `CHUNK`
TILES = 8  # selected from at once: fewer cost more in calls, more leave the L2 cache
GROUPS = 512  # groups of 8: a first selection among maxima, a second among their groups


@register
@dataclass(frozen=True)
class TopK(SparseCodec):
    """k of 4,096 values, 12 bits and a value each; contractive."""

    name: ClassVar[str] = "topk"
    code: ClassVar[int] = 12
    indices_rise: ClassVar[bool] = True
    k: int = 64
    values: Codec = field(default_factory=Int8)

    def __post_init__(self) -> None:
        """Refuse counts outside a chunk, and values that depend on a shape or on past calls.

        Unbiased values too: with a choice by size the frame would be neither unbiased nor, since
        a draw may err by more than the input, contractive.
        """
        check_sparse(self.k, self.values)
        if self.values.mode == "unbiased":
            raise CodecError(f"expected contractive values in topk, got {self.values.spec!r}")

    def for_union(self, members: int) -> TopK:
        """Return the codec that keeps the whole union of `members` such frames.

        For a reduction of one's own, beside `atoll.compression.merge`: no method here sends a
        union on.
        """
        return replace(self, k=min(CHUNK, self.k * members))

    def _payload_bytes(self, dims: Dims) -> int:
        count = num_entries(math.prod(dims), self.k)
        return values_payload(self.values, count) + index_bytes(count)

    def _write(self, x_N: Tensor, dims: Dims, payload: Tensor) -> Tensor:
        indices_K, values_K = self._select(x_N)
        cut = values_payload(self.values, values_K.numel())
        self._write_values(values_K, payload[:cut])
        write_indices(indices_K, payload[cut:])
        return peak(values_K)  # NaN and infinity are among the largest

    def _select(self, x_N: Tensor) -> tuple[Tensor, Tensor]:
        parts = [select(x_N[a:b], self.k) for a, b in spans(x_N, TILES)]
        indices, values = zip(*parts, strict=True)
        return torch.cat(indices), torch.cat(values)

    def encode_rows(self, x_RN: Tensor) -> list[bytes]:
        if not self._is_regular(x_RN):
            return super().encode_rows(x_RN)
        return self._seal_rows(self._write_frames(self.choose_rows(x_RN)), (x_RN.shape[1],))

    def encode_sparse_rows(self, x_RN: Tensor) -> tuple[list[bytes], Sparse]:
        if not self._is_regular(x_RN):
            return super().encode_sparse_rows(x_RN)
        return self.encode_chosen(self.choose_rows(x_RN))

    def choose_rows(self, x_RN: Tensor) -> Sparse:
        """Return the values to send of rows that `go_together`, not yet encoded."""
        if x_RN.shape[1] < CHUNK:
            indices_K, values_K = select_short(x_RN, num_entries(x_RN.shape[1], self.k))
        else:
            indices_K, values_K = self._select(floats(x_RN))
        self._add_starts_(indices_K, x_RN.shape[1])
        return Sparse(indices=indices_K, values=values_K, shape=tuple(x_RN.shape))

    def encode_chosen(self, chosen: Sparse) -> tuple[list[bytes], Sparse]:
        """Return a frame for each row of a choice of `choose_rows`, and the decoded values.

        Raises:
            CodecError: as `encode`.
        """
        frames_RB = self._write_frames(chosen)
        values_RB, *_ = self._sections(frames_RB[:, HEADER_BYTES:], chosen.shape[1])
        values_RK = torch.empty((len(frames_RB), self._count(chosen)), dtype=torch.float32)
        self.values._read_rows(values_RB, values_RK)
        sent = replace(chosen, values=values_RK.view(-1))
        return self._seal_rows(frames_RB, (chosen.shape[1],)), sent

    def decode_rows(self, frames: Sequence[Frame], out_RN: Tensor) -> None:
        if not self._is_regular(out_RN):
            super().decode_rows(frames, out_RN)
            return
        sent = self.sparse_rows(frames, out_RN.shape[1])
        out_RN.zero_().view(-1).scatter_(0, sent.indices, sent.values)

    def sparse_rows(self, frames: Sequence[Frame], numel: int) -> Sparse:
        if not self.go_together(numel):
            return super().sparse_rows(frames, numel)
        values_RB, _, indices_RB = self._sections(self._open_rows(frames, (numel,)), numel)
        indices_RK = read_index_rows(indices_RB, num_entries(numel, self.k))
        check_indices(self._in_chunks(indices_RK, numel), min(numel, CHUNK))
        values_RK = torch.empty(indices_RK.shape, dtype=torch.float32)
        self.values._read_rows(values_RB, values_RK)
        self._add_starts_(indices_RK, numel)
        shape = (len(frames), numel)
        return Sparse(indices=indices_RK.view(-1), values=values_RK.view(-1), shape=shape)

    def _write_frames(self, chosen: Sparse) -> Tensor:
        """Return frames without headers."""
        rows, numel = chosen.shape
        shape = (rows, self._count(chosen))
        frames_RB = torch.empty((rows, self.wire_bytes(numel)), dtype=torch.uint8)
        values_RB, rest_RB, indices_RB = self._sections(frames_RB[:, HEADER_BYTES:], numel)
        self.values._write_rows(chosen.values.view(shape), values_RB)
        rest_RB.zero_()
        within = chosen.indices % min(numel, CHUNK)
        write_index_rows(within.view(shape), indices_RB)
        refuse_infinite(float(peak(chosen.values)))
        return frames_RB

    def _count(self, chosen: Sparse) -> int:
        """Return how many entries a row has."""
        return num_entries(chosen.shape[1], self.k)

    def _add_starts_(self, indices: Tensor, numel: int) -> None:
        """Turn indices within the chunks of rows of so many values into flat ones."""
        chunks_CK = self._in_chunks(indices, numel)
        starts_C = torch.arange(len(chunks_CK), device=indices.device).mul_(min(numel, CHUNK))
        chunks_CK.add_(starts_C.unsqueeze(1))

    def _in_chunks(self, indices: Tensor, numel: int) -> Tensor:
        """Return indices of rows of so many values, those of a chunk a row."""
        return indices.view(-1, num_entries(min(numel, CHUNK), self.k))

    def _is_regular(self, x_RN: Tensor) -> bool:
        """Return True if rows can be processed together."""
        return x_RN.device.type == "cpu" and self.go_together(x_RN.shape[1])

    def go_together(self, numel: int) -> bool:
        """Return True if rows of `numel` values can: whole chunks, or a part of one."""
        # A short chunk behind whole ones has another number of entries, so rows are not regular.
        if not numel or (numel > CHUNK and numel % CHUNK):
            return False
        return self.wire_bytes(numel) % 8 == 0  # frames side by side stay aligned

    def _sections(self, payload_RB: Tensor, numel: int) -> tuple[Tensor, ...]:
        """Return the values, their padding, and the indices of each row."""
        count = num_entries(numel, self.k)
        cut, used = values_payload(self.values, count), self.values.wire_bytes(count) - HEADER_BYTES
        return torch.split(payload_RB, [used, cut - used, index_bytes(count)], dim=1)

    def _write_values(self, values_K: Tensor, payload: Tensor) -> None:
        count = values_K.numel()
        used = self.values.wire_bytes(count) - 8
        payload[used:].zero_()
        self.values._write(values_K, (count,), payload[:used])

    def _entries(self, payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        count = num_entries(numel, self.k)
        cut = values_payload(self.values, count)
        indices_K = self._checked(read_indices(payload[cut:], count), numel)
        values_K = torch.empty(count, dtype=torch.float32, device=payload.device)
        used = self.values.wire_bytes(count) - 8
        self.values._read(payload[:used], (count,), values_K)
        return indices_K.add_(chunk_starts(numel, self.k, payload.device)), values_K

    def _checked(self, indices_K: Tensor, numel: int) -> Tensor:
        whole, rest, rest_k = entries(numel, self.k)
        if whole:
            check_indices(indices_K[: whole * self.k].view(whole, self.k), CHUNK)
        if rest:
            check_indices(indices_K[whole * self.k :].view(1, rest_k), rest)
        return indices_K


def check_sparse(k: int, values: Codec) -> None:
    """Refuse parameters that a sparse codec cannot have.

    Raises:
        CodecError: k outside 1..4096, or a codec of variable size, with state or of matrices.
    """
    if not 1 <= k <= CHUNK:
        raise CodecError(f"expected k of 1 to {CHUNK}, got {k}")
    if values.stateful or not values.exact_size or not values.elementwise:
        raise CodecError(f"expected an elementwise codec for the values, got {values.spec!r}")


def select(x_M: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return rising indices within chunks (int64) and values of the largest, chunk after chunk."""
    whole, rest, rest_k = entries(x_M.numel(), k)
    cut = whole * CHUNK
    indices, values = [], []
    if whole:
        chunks = x_M[:cut].view(whole, CHUNK)
        indices.append(largest_of_chunks(chunks, k))
        values.append(chunks.gather(1, indices[-1]))
    if rest:
        of_rest, values_of_rest = select_short(x_M[cut:].view(1, rest), rest_k)
        indices.append(of_rest)
        values.append(values_of_rest)
    return torch.cat([i.view(-1) for i in indices]), torch.cat([v.view(-1) for v in values])


def select_short(x_RN: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Select from rows that are shorter than a chunk."""
    indices_RK = x_RN.abs().topk(k, dim=1, sorted=False).indices.sort(1).values
    return indices_RK.view(-1), x_RN.gather(1, indices_RK).view(-1)


def largest_of_chunks(x_CM: Tensor, k: int) -> Tensor:
    """Return the rising indices of the k largest magnitudes of each chunk, [C, k].

    The k groups with the largest maxima hold the k largest values, so that two selections
    among few replace one among 4,096.
    """
    if x_CM.device.type == "cpu":
        return _largest_on_cpu(x_CM, k)
    size_CM = torch.abs(x_CM, out=scratch("work", x_CM))
    if 4 * k > GROUPS:
        return size_CM.topk(k, dim=1, sorted=False).indices.sort(1).values
    grouped = size_CM.view(-1, CHUNK // GROUPS, GROUPS)
    group_CK = grouped.amax(1).topk(k, dim=1, sorted=False).indices
    inside = grouped.gather(2, group_CK.unsqueeze(1).expand(-1, CHUNK // GROUPS, -1))
    at_CK = inside.flatten(1).topk(k, dim=1, sorted=False).indices
    found = (at_CK // k) * GROUPS + group_CK.gather(1, at_CK % k)
    return found.sort(1).values


def _largest_on_cpu(x_CM: Tensor, k: int) -> Tensor:
    """Return the largest of each chunk, first among equals; takes a quarter of torch.topk's time.

    The k-th largest of the maxima of groups is a bound below which nothing is chosen. What is
    left, about 70 of 4,096 for k = 64, lies in the groups whose maxima reach it, and is sorted as
    integers. numpy does both many at once.
    """
    bits_CM = scratch("work", x_CM, torch.int32)
    np.bitwise_and(x_CM.view(torch.int32).numpy(), MAGNITUDE, out=bits_CM.numpy())
    groups = next(count for count in (GROUPS, 2 * GROUPS, CHUNK) if count >= min(4 * k, CHUNK))
    most_CG = bits_CM.view(len(bits_CM), -1, groups).amax(1).numpy()
    bound_C1 = np.partition(most_CG, groups - k, axis=1)[:, groups - k : groups - k + 1]
    # A bound of 1 leaves zeros out: a mean of selections has thousands, all candidates otherwise.
    key_E, starts_C = _candidates(bits_CM.numpy(), most_CG, np.maximum(bound_C1, 1))
    if np.diff(starts_C, append=len(key_E)).min() < k:  # a chunk with less than k that are not 0
        key_E, starts_C = _candidates(bits_CM.numpy(), most_CG, bound_C1)
    found_CK = key_E[starts_C[:, None] + np.arange(k)] & (CHUNK - 1)
    found_CK.sort(axis=1)
    return torch.from_numpy(found_CK)


def _candidates(
    bits_CM: np.ndarray, most_CG: np.ndarray, bound_C1: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return a key for each value that reaches its bound, and the start of each chunk's keys.

    A key is the chunk, the distance below the largest magnitude (31 bits), and the index (12 bits).
    Keys rise, so that the first among equals comes first.
    """
    groups = most_CG.shape[1]
    group_E = np.flatnonzero(most_CG >= bound_C1)
    chunk_E = group_E // groups
    at_E = group_E + chunk_E * (CHUNK - groups) + np.arange(0, CHUNK, groups)[:, None]
    size_E = bits_CM.reshape(-1).take(at_E)
    reach_E = np.flatnonzero(size_E >= bound_C1.reshape(-1).take(chunk_E))
    at_E, size_E = at_E.reshape(-1).take(reach_E), size_E.reshape(-1).take(reach_E)
    key_E = at_E >> CHUNK_BITS << 31 | MAGNITUDE - size_E.astype(np.int64)
    key_E = key_E << CHUNK_BITS | at_E & (CHUNK - 1)
    key_E.sort()
    starts_C = np.arange(len(bits_CM)) << 31 + CHUNK_BITS
    return key_E, np.searchsorted(key_E, starts_C)
