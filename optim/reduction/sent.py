"""Decoded frames of consecutive pieces: all values or, for a sparse codec, only those sent.

Of a sparse codec's 1.56% nothing is made dense where they are added up, taken away or counted: a
pass over 30 million values takes 3 to 8 ms, one over what was sent of them 0.3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.compression import Codec
from atoll.compression.base import Frame
from atoll.compression.kernels.blocks import squarable
from atoll.compression.scratch import room, scratch
from atoll.compression.sparse import CoordinateCodec, SparseCodec
from atoll.optim.state.fragments import Dims, decode_batch, encode_batch
from atoll.optim.state.outer_step import to_fp32

SHORT = 1024  # values: a sum of so many squares in fp32 has seven digits


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Values of consecutive pieces, flat; good until the next ones are decoded."""

    values: Tensor
    """fp32, of all of them, or at the indices"""

    indices: Tensor | None = None
    """int64; the others are 0. One that comes twice has one value. None: there is a value for
    each."""

    def scale_(self, factor: Tensor) -> Sent:
        """Multiply by a number, in place."""
        self.values.mul_(factor)
        return self

    def add_to_(self, sum_N: Tensor, share: float = 1.0) -> None:
        """Add a share to a sum."""
        if self.indices is None:
            sum_N.add_(self.values, alpha=share)
            return
        some = sum_N.index_select(0, self.indices).add_(self.values, alpha=share)
        sum_N.scatter_(0, self.indices, some)

    def take_from_(self, values_N: Tensor) -> None:
        """Leave what was not sent."""
        if self.indices is None:
            values_N.sub_(self.values)
            return
        some = values_N.index_select(0, self.indices).sub_(self.values)
        values_N.scatter_(0, self.indices, some)

    def put_(self, out_N: Tensor) -> None:
        """Write all values."""
        if self.indices is None:
            out_N.copy_(self.values)
        else:
            out_N.zero_().scatter_(0, self.indices, self.values)

    def squares(self, pieces: Sequence[Dims]) -> list[float]:
        """The sum of squares of each piece."""
        if self.indices is None:
            return sums_of_squares(self.values, pieces)
        each = len(self.values) // len(pieces)
        return sums_of_squares(self.values, [(each,)] * len(pieces))


class Mean:
    """The mean of what members sent of consecutive pieces, over the weights of all of them."""

    def __init__(self, codec: Codec, pieces: Sequence[Dims], out_N: Tensor, total: float) -> None:
        """Begin in `out_N`, which holds the mean after `finish`; `total` is all their weight."""
        self._codec, self._pieces, self._total = codec, pieces, total
        self._out_N = out_N.zero_()

    def add(self, frames: Sequence[Frame], *, share: float, weight: float) -> None:
        """Add what a member sent; its share is its weight times a clip factor.

        Raises:
            CodecError: when a frame is none of its piece.
        """
        sent = sent_in(self._codec, frames, self._pieces)
        sent.scale_(_scalar(share / self._total)).add_to_(self._out_N)

    def finish(self) -> None:
        """All were added."""


class MeanOfSenders(Mean):
    """Return the mean, each coordinate over the weights of its senders; 0 without senders."""

    _codec: CoordinateCodec

    def __init__(
        self, codec: CoordinateCodec, pieces: Sequence[Dims], out_N: Tensor, total: float
    ) -> None:
        super().__init__(codec, pieces, out_N, total)
        numel = sum(codec.num_coordinates(dims) for dims in pieces)
        self._sum_D = out_N if codec.elementwise else torch.zeros(numel)
        self._weight_D = scratch("weights of senders", self._sum_D).zero_()
        self._indices: list[Tensor] = []

    def add(self, frames: Sequence[Frame], *, share: float, weight: float) -> None:
        found = self._codec.sparse_pieces(frames, self._pieces)
        sent = Sent(values=found.values, indices=found.indices)
        sent.scale_(_scalar(share)).add_to_(self._sum_D)
        weights = Sent(values=torch.full_like(sent.values, weight), indices=sent.indices)
        weights.add_to_(self._weight_D)
        self._indices.append(found.indices)

    def finish(self) -> None:
        """Divide where anybody sent; where several did, each time by the same into the same."""
        if self._indices:
            at = torch.cat(self._indices)
            some = self._sum_D.index_select(0, at) / self._weight_D.index_select(0, at)
            self._sum_D.scatter_(0, at, some)
        if self._sum_D is not self._out_N:
            self._codec.restore_pieces(self._sum_D, self._pieces, self._out_N)


def sent_in(codec: Codec, frames: Sequence[Frame], pieces: Sequence[Dims]) -> Sent:
    """Decode the pieces of one of `batches`.

    Raises:
        CodecError: when a frame is none of its piece.
    """
    if isinstance(codec, SparseCodec):
        sent = codec.sparse_rows(frames, math.prod(pieces[0]))
        return Sent(values=sent.values, indices=sent.indices)
    numel = sum(math.prod(dims) for dims in pieces)
    values = room("sent", (numel,), torch.device("cpu"), torch.float32)
    decode_batch(codec, frames, pieces, values)
    return Sent(values=values)


def encode_sent(codec: Codec, values: Tensor, pieces: Sequence[Dims]) -> tuple[list[bytes], Sent]:
    """Encode the pieces of one of `batches`; their frames, and what these say.

    Raises:
        CodecError: when they hold NaN or infinity.
    """
    if isinstance(codec, SparseCodec):
        frames, sent = codec.encode_sparse_rows(values.view(len(pieces), -1))
        return frames, Sent(values=sent.values, indices=sent.indices)
    frames = encode_batch(codec, values, pieces)
    return frames, sent_in(codec, frames, pieces)


def sums_of_squares(values: Tensor, pieces: Sequence[Dims]) -> list[float]:
    """The sum of squares of each of some pieces.

    From norms of short runs in fp32, right to seven digits, unless a square may overflow or vanish.
    """
    sizes = [math.prod(dims) for dims in pieces]
    if len(set(sizes)) > 1:
        parts = zip(torch.split(values, sizes), pieces, strict=True)
        return [sums_of_squares(part, [dims])[0] for part, dims in parts]
    run = SHORT if sizes[0] % SHORT == 0 else sizes[0]
    norms = torch.linalg.vector_norm(values.view(-1, run), 2, dim=1)
    if run != SHORT or not squarable(norms):
        norms = torch.linalg.vector_norm(values.view(-1, run), 2, dim=1, dtype=torch.float64)
    sums_P = norms.double().square().view(len(pieces), -1).sum(1)
    return [float(squares) for squares in sums_P]


def _scalar(value: float) -> Tensor:
    return torch.tensor(to_fp32(value), dtype=torch.float32)
