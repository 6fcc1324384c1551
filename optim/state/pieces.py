"""The pieces of a fragment: what a codec encodes one by one, each a frame.

A piece is a cell of 65,536 values for codecs that look at single values, or some rows of a tensor
for those that look at shapes or names. The pieces of a tensor know its name, so that a codec by
layers (`mixed`) encodes each by that layer's codec: `codec_of`.

    FragmentError (ValueError)   more fragments than blocks, or frames that do not fit
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Self

from torch import Tensor

from atoll.compression import Codec, CodecError
from atoll.compression.base import Frame
from atoll.compression.scratch import MAX_TILES
from atoll.optim.state import vectors
from atoll.optim.state.layout import CELL

AT_ONCE = MAX_TILES  # pieces that are encoded at once: more calls cost more than the cache gives
AT_ONCE_ON_DEVICE = 64  # of a GPU: 16 MiB of values, and some times as much of scratch beside it

Dims = tuple[int, ...]


class FragmentError(ValueError):
    """A layout that can't be cut like this, or frames that do not fit a fragment."""


class Piece(tuple[int, ...]):
    """The shape of a piece of one tensor, with that tensor's name.

    It equals and hashes as the bare shape does: only a codec by layers looks at the name.
    """

    layer: str

    def __new__(cls, dims: Dims, layer: str) -> Self:
        """Name a shape."""
        piece = super().__new__(cls, dims)
        piece.layer = layer
        return piece


def codec_of(codec: Codec, dims: Dims) -> Codec:
    """Return the codec of one piece.

    Raises:
        CodecError: when a codec by layers has none for it.
    """
    return codec.for_layer(dims.layer) if isinstance(dims, Piece) else codec


def grid(numel: int) -> tuple[Dims, ...]:
    """Return pieces of one cell each; the last one may be shorter."""
    full, rest = divmod(numel, CELL)
    return ((CELL,),) * full + (((rest,),) if rest else ())


def piece_slices(pieces: Sequence[Dims]) -> tuple[slice, ...]:
    """Return the values of each piece, one after the other."""
    slices, start = [], 0
    for dims in pieces:
        stop = start + math.prod(dims)
        slices.append(slice(start, stop))
        start = stop
    return tuple(slices)


def batches(
    codec: Codec, pieces: Sequence[Dims], at_once: int = AT_ONCE
) -> Iterator[tuple[slice, Codec]]:
    """Yield runs of pieces that are encoded at once, each with its codec.

    Pieces share a run if they are equally long and the codec looks at values alone, or if the codec
    takes pieces of any shapes together. A codec by layers ends a run where its choice changes.
    """
    first = 0
    while first < len(pieces):
        dims, own = pieces[first], codec_of(codec, pieces[first])
        last = first + 1
        while last < min(len(pieces), first + at_once):
            alike = own.any_shapes or (own.elementwise and pieces[last] == dims)
            if not alike or codec_of(codec, pieces[last]) is not own:
                break
            last += 1
        yield slice(first, last), own
        first = last


def encode_pieces(codec: Codec, values_F: Tensor, pieces: Sequence[Dims]) -> list[bytes]:
    """Encode values piece by piece.

    Raises:
        CodecError: when they hold NaN or infinity.
    """
    frames, slices = list[bytes](), piece_slices(pieces)
    for batch, own in batches(codec, pieces):
        values = values_F[slices[batch][0].start : slices[batch][-1].stop]
        frames += encode_batch(own, values, pieces[batch])
    return frames


def encode_batch(codec: Codec, values: Tensor, pieces: Sequence[Dims]) -> list[bytes]:
    """Encode the pieces of one of `batches`."""
    if codec.any_shapes or len(pieces) == 1:
        return codec.encode_pieces(values, pieces)
    return codec.encode_rows(values.view(len(pieces), -1))


def decode_pieces(codec: Codec, frames: Sequence[Frame], pieces: Sequence[Dims]) -> Tensor:
    """Decode the frames of `encode_pieces`.

    Returns:
        values_F, fp32 on the CPU.

    Raises:
        FragmentError: when the number of frames is wrong, or one does not decode.
    """
    if len(frames) != len(pieces):
        raise FragmentError(f"expected {len(pieces)} frames, got {len(frames)}")
    slices = piece_slices(pieces)
    values_F = vectors.empty(slices[-1].stop)
    for batch, own in batches(codec, pieces):
        values = values_F[slices[batch][0].start : slices[batch][-1].stop]
        try:
            decode_batch(own, frames[batch], pieces[batch], values)
        except CodecError as error:
            # a batch decodes or fails as one, so the error cannot name the piece
            where = f"piece {batch.start}, or one of {len(pieces[batch])} from there on"
            raise FragmentError(f"{where}: {error}") from error
    return values_F


def decode_batch(
    codec: Codec, frames: Sequence[Frame], pieces: Sequence[Dims], out: Tensor
) -> None:
    """Decode the pieces of one of `batches`.

    Raises:
        CodecError: when a frame is none of its piece.
    """
    if codec.any_shapes or len(pieces) == 1:
        codec.decode_pieces(frames, pieces, out)
    else:
        codec.decode_rows(frames, out.view(len(pieces), -1))
