"""Transport of a fragment's values: frames to the owners of parts, reduced frames back.

The cells of a round are the fragment's pieces. On the way up a member sends one codec frame a
cell. What comes back depends on the method's reduction:

    mean      the owner's frame of the weighted mean, in the same codec
    gather    all members' frames as they came, with their shares; everyone decodes them alike, so
              the update holds the union of what the members selected

Frames travel, and lie in the body of an entry, one after another (little endian)::

    0    4    length of the frame
    4    ...  the frame

A gathered frame is, for each member whose cell is in, in the order of the entry's members::

    0    4    share: weight times clip factor, fp32
    4    4    weight, fp32
    8    4    length of the member's frame
    12   ...  the member's frame

and decodes to sum(share d) / sum(weight), or where the method divides by senders to that of each
coordinate, with the weights of those that sent it. A receiver MUST check each length against
`max_sent_bytes` or `max_reduced_bytes` before it reads on; a weight MUST be finite and above 0, a
share at most that.

    UpdateError (ValueError)   a body that is too long, or a cell that does not decode
"""

import itertools
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Self

import torch
from torch import Tensor

from atoll.compression import Codec, CodecError
from atoll.compression.sparse import CoordinateCodec, Sparse, SparseCodec
from atoll.optim.reduction.sent import Mean, MeanOfSenders, Sent, encode_sent, sent_in
from atoll.optim.state import vectors
from atoll.optim.state.fragments import (
    AT_ONCE,
    Dims,
    Fragment,
    batches,
    codec_of,
    decode_batch,
    encode_pieces,
    grid,
)
from atoll.optim.state.outer_state import is_finite
from atoll.optim.state.updates import Update

Bytes = bytes | bytearray | memoryview

SPARSE_AT_ONCE = 16 * AT_ONCE  # cells, of which nothing is made dense
LENGTH = struct.Struct("<I")
TERM = struct.Struct("<ffI")


class UpdateError(ValueError):
    """The body of an update does not decode to the values of its fragment."""


@dataclass(frozen=True, kw_only=True)
class Term:
    """A member's frame of a cell, and its weight in the mean."""

    share: float
    """weight x clip factor"""

    weight: float
    frame: Bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class Cells:
    """The cells of one fragment, encoded by one codec, or each by that of its layer."""

    together: ClassVar[bool] = True
    """Whether equal cells may be encoded and decoded at once."""

    codec: Codec
    fragment: Fragment

    gathers: bool = False
    """Whether an update holds all members' frames, in place of their mean."""

    by_senders: bool = False
    """Whether a gathered value is divided by the weights of those that sent it, not of all."""

    def __post_init__(self) -> None:
        """Refuse codecs that a round can't use.

        Raises:
            CodecError: when frames depend on earlier ones, a layer has no codec, or nobody can
                tell who sent a value.
        """
        for dims in self.fragment.pieces:
            codec_of(self.codec, dims)
        if self.codec.stateful:
            raise CodecError(f"expected a codec whose frames stand alone, got {self.codec.spec}")
        if self.by_senders and not isinstance(self.codec, CoordinateCodec):
            raise CodecError(f"expected a codec that tells who sent what, got {self.codec.spec}")

    @classmethod
    def of_vector(cls, codec: Codec, numel: int) -> Self:
        """The cells of a whole vector of so many values, which come back as a mean."""
        return cls(codec=codec, fragment=Fragment(spans=((0, numel),), pieces=grid(numel)))

    def __len__(self) -> int:
        """Number of cells."""
        return len(self.fragment.pieces)

    @property
    def numel(self) -> int:
        """Values of all cells."""
        return self.fragment.numel

    def dims(self, index: int) -> Dims:
        """Shape of one cell."""
        return self.fragment.pieces[index]

    def codec_at(self, index: int) -> Codec:
        """The codec of one cell."""
        return codec_of(self.codec, self.dims(index))

    def values(self, start: int, stop: int) -> slice:
        """Values of the cells `[start, stop)` within the fragment."""
        slices = self.fragment.slices
        return slice(slices[start].start, slices[stop - 1].stop)

    @cached_property
    def scatters(self) -> bool:
        """Return whether an update is decoded to the sent values only."""
        return self.together and not self.gathers and isinstance(self.codec, SparseCodec)

    def max_sent_bytes(self, index: int) -> int:
        """Longest frame of one member's cell."""
        return self._most_bytes[index + 1] - self._most_bytes[index]

    def max_reduced_bytes(self, index: int, members: int) -> int:
        """Longest frame of one cell that so many members reduced."""
        one = self.max_sent_bytes(index)
        return members * (TERM.size + one) if self.gathers else one

    def max_body_bytes(self, members: int, start: int = 0, stop: int | None = None) -> int:
        """Longest body of the cells `[start, stop)`, all by default."""
        ends = (start, len(self) if stop is None else stop)
        lengths = self._most_bytes[ends[1]] - self._most_bytes[ends[0]]
        headers = LENGTH.size * (ends[1] - ends[0])
        if not self.gathers:
            return headers + lengths
        return headers + members * (lengths + TERM.size * (ends[1] - ends[0]))

    @property
    def sizes(self) -> list[int]:
        """Longest frame of each cell that one member sends, in bytes."""
        return [self.max_sent_bytes(index) for index in range(len(self))]

    @cached_property
    def _most_bytes(self) -> list[int]:
        """Longest frames of the cells before each, summed up."""
        sums, lengths = [0], dict[tuple[str, Dims], int]()
        for index, dims in enumerate(self.fragment.pieces):
            codec = self.codec_at(index)
            key = (codec.spec, dims)
            if key not in lengths:
                lengths[key] = codec.wire_bytes(dims)
            sums.append(sums[-1] + lengths[key])
        return sums

    def encode(self, values_F: Tensor) -> list[bytes]:
        """Frames of a member, or of a mean.

        Raises:
            CodecError: when the values hold NaN or infinity.
        """
        return encode_pieces(self.codec, values_F, self.fragment.pieces)

    # one cell

    def decode_sent(self, index: int, frame: Bytes) -> Tensor:
        """A member's values of one cell, flat.

        Raises:
            CodecError: when it is no frame of the cell.
        """
        return self.codec_at(index).decode(frame, self.dims(index)).view(-1)

    def encode_mean(self, index: int, mean_C: Tensor) -> bytes:
        """The reduced frame of a mean.

        Raises:
            CodecError: when it holds NaN or infinity.
        """
        return self.codec_at(index).encode(mean_C.view(self.dims(index)))

    def encode_terms(self, terms: Sequence[Term]) -> bytes:
        """The reduced frame of gathered ones."""
        pieces: list[Bytes] = []
        for term in terms:
            pieces += (TERM.pack(term.share, term.weight, len(term.frame)), term.frame)
        return b"".join(pieces)

    def decode_reduced(self, index: int, frame: Bytes, out_C: Tensor) -> None:
        """Decode a reduced frame, to the same bits on every device.

        Raises:
            CodecError: when it is none of this cell.
        """
        self._decode_run(range(index, index + 1), self.codec_at(index), [frame], out_C)

    def _terms(self, index: int, frame: Bytes) -> list[Term]:
        view, terms, longest = memoryview(frame), [], self.max_sent_bytes(index)
        while view:
            if len(view) < TERM.size:
                raise CodecError(f"expected a term of {TERM.size} bytes, got {len(view)}")
            share, weight, length = TERM.unpack_from(view)
            if length > min(longest, len(view) - TERM.size):
                raise CodecError(f"expected at most {longest} bytes of a member, got {length}")
            if not (0 <= share <= weight and 0 < weight < math.inf):
                raise CodecError(
                    "expected a weight above 0 and a share of at most that, "
                    f"got {weight} and {share}"
                )
            end = TERM.size + length
            terms.append(Term(share=share, weight=weight, frame=view[TERM.size : end]))
            view = view[end:]
        return terms

    # consecutive cells

    def runs(self, first: int, stop: int, at_once: int = AT_ONCE) -> Iterator[tuple[range, Codec]]:
        """The cells `[first, stop)`, by those that are encoded or decoded at once."""
        if not self.together:
            yield from ((range(index, index + 1), self.codec) for index in range(first, stop))
            return
        while first < stop:
            last = min(stop, first + at_once, self._alike_until[first])
            yield range(first, last), self.codec_at(first)
            first = last

    @cached_property
    def _alike_until(self) -> list[int]:
        """Return, for each cell, the next one that cannot be processed together with it."""
        until = [len(self)] * len(self)
        for index in reversed(range(len(self) - 1)):
            pair = self.fragment.pieces[index : index + 2]
            first, _ = next(batches(self.codec, pair))
            until[index] = until[index + 1] if first.stop == 2 else index + 1
        return until

    def decode_runs(self, first: int, frames: Sequence[Bytes]) -> Iterator[tuple[range, Sent]]:
        """Decode a member's frames of the cells from `first` on: cells, and their values.

        Values are good until the next ones are taken.

        Raises:
            CodecError: when one is no frame of its cell.
        """
        at_once = SPARSE_AT_ONCE if isinstance(self.codec, SparseCodec) else AT_ONCE
        for run, codec in self.runs(first, first + len(frames), at_once):
            sent = frames[run.start - first : run.stop - first]
            if self.together:
                yield run, sent_in(codec, sent, self._pieces(run))
            else:
                yield run, Sent(values=self.decode_sent(run.start, sent[0]))

    def encode_mean_all(self, first: int, stop: int, mean: Tensor, lost: Tensor) -> list[bytes]:
        """The reduced frames of a mean over the cells `[first, stop)`.

        What they decode to takes the place of the mean; the difference goes to `lost`.

        Raises:
            CodecError: when it holds NaN or infinity.
        """
        frames: list[bytes] = []
        for run, codec in self.runs(first, stop):
            values, of_run = mean[self._within(run, first)], lost[self._within(run, first)]
            of_run.copy_(values)
            if self.together:
                encoded, sent = encode_sent(codec, values, self._pieces(run))
            else:
                encoded = [self.encode_mean(run.start, values)]
                sent = Sent(values=self.decode_sent(run.start, encoded[0]))
            require_finite(sent.values)
            sent.take_from_(of_run)
            sent.put_(values)
            frames += encoded
        return frames

    def decode_reduced_all(self, first: int, frames: Sequence[Bytes], out: Tensor) -> None:
        """Decode the reduced frames of the cells from `first` on, as `decode_reduced` does.

        Raises:
            CodecError: when one is none of its cell.
        """
        for run, codec in self.runs(first, first + len(frames)):
            reduced = frames[run.start - first : run.stop - first]
            values = out[self._within(run, first)]
            if self.together:
                self._decode_run(run, codec, reduced, values)
            else:
                self.decode_reduced(run.start, reduced[0], values)

    def _decode_run(self, run: range, codec: Codec, reduced: Sequence[Bytes], out: Tensor) -> None:
        if self.gathers:
            self._decode_gathered(run, codec, reduced, out)
        elif isinstance(codec, SparseCodec):
            sent = sent_in(codec, reduced, self._pieces(run))
            require_finite(sent.values)
            sent.put_(out)
        else:
            decode_batch(codec, reduced, self._pieces(run), out)
            require_finite(out)

    def decode_scattered(self, first: int, frames: Sequence[Bytes]) -> Sparse:
        """Decode reduced frames of cells whose update `scatters`.

        Raises:
            CodecError: when one is none of its cell.
        """
        values, indices = [torch.empty(0)], [torch.empty(0, dtype=torch.int64)]
        for run, sent in self.decode_runs(first, frames):
            require_finite(sent.values)
            assert sent.indices is not None, "a sparse codec tells them"
            values.append(sent.values)
            indices.append(sent.indices.add_(self._within(run, first).start))
        numel = self._within(range(first, first + len(frames)), first).stop if frames else 0
        return Sparse(indices=torch.cat(indices), values=torch.cat(values), shape=(numel,))

    def _decode_gathered(
        self, run: range, codec: Codec, reduced: Sequence[Bytes], out: Tensor
    ) -> None:
        """Means of gathered frames; of cells with the same members and shares all at once."""
        terms = [self._terms(index, frame) for index, frame in zip(run, reduced, strict=True)]
        shares = [[(term.share, term.weight) for term in of_cell] for of_cell in terms]
        for _, alike in itertools.groupby(range(len(run)), shares.__getitem__):
            at = list(alike)
            some = run[at[0] : at[-1] + 1]
            values = out[self._within(some, run.start)]
            self._mean(some, codec, terms[at[0] : at[-1] + 1], values)
        require_finite(out)

    def _mean(self, run: range, codec: Codec, terms: Sequence[list[Term]], out: Tensor) -> None:
        pieces, total = self._pieces(run), sum(term.weight for term in terms[0])
        if self.by_senders:
            assert isinstance(codec, CoordinateCodec), "checked on creation"
            mean: Mean = MeanOfSenders(codec, pieces, out, total)
        else:
            mean = Mean(codec, pieces, out, total)
        for of_member in zip(*terms, strict=True):
            share, weight = of_member[0].share, of_member[0].weight
            mean.add([term.frame for term in of_member], share=share, weight=weight)
        mean.finish()

    def _pieces(self, run: range) -> tuple[Dims, ...]:
        return self.fragment.pieces[run.start : run.stop]

    def _within(self, run: range, first: int) -> slice:
        """The values of some cells in a vector that begins with those of the cell `first`."""
        values, start = self.values(run.start, run.stop), self.fragment.slices[first].start
        return slice(values.start - start, values.stop - start)

    # bodies

    def decode_body(self, body: Bytes, members: int) -> Update:
        """Decode the body of an update of so many members.

        Returns:
            update_F, fp32 on the CPU, all finite; what was sent of it where it `scatters`.

        Raises:
            UpdateError: when it is too long (checked before memory is taken), its frames are not
                one a cell, or one does not decode to finite numbers.
        """
        longest = self.max_body_bytes(members)
        if len(body) > longest:
            raise UpdateError(
                f"expected a body of at most {longest} bytes ({self.codec.spec}), got {len(body)}"
            )
        limits = [self.max_reduced_bytes(index, members) for index in range(len(self))]
        frames = unpack(memoryview(body), limits)
        if len(frames) != len(self):
            raise UpdateError(f"expected {len(self)} cells, got {len(frames)}")
        try:
            return self.decode_update(0, frames)
        except CodecError as error:
            raise self._refusal(frames) from error

    def decode_update(self, first: int, frames: Sequence[Bytes]) -> Update:
        """Decode the reduced frames of the cells from `first` on.

        Raises:
            CodecError: when one is none of its cell.
        """
        if self.scatters:
            return self.decode_scattered(first, frames)
        out = vectors.empty(self._within(range(first, first + len(frames)), first).stop)
        self.decode_reduced_all(first, frames, out)
        return out

    def _refusal(self, frames: Sequence[Bytes]) -> UpdateError:
        """Which of the cells does not decode."""
        for index, frame in enumerate(frames):
            try:
                self.decode_update(index, [frame])
            except CodecError as error:
                return UpdateError(f"cell {index}: {error}")
        return UpdateError("a cell that decodes only by itself")


def require_finite(values: Tensor) -> None:
    """Refuse decoded values that are none.

    Raises:
        CodecError: when there is NaN or infinity.
    """
    if not is_finite(values):
        raise CodecError("expected finite numbers, got NaN or infinity")


def pack(frame: Bytes) -> bytes:
    """A frame with its length before it."""
    return LENGTH.pack(len(frame)) + frame


def body_of(frames: Sequence[Bytes]) -> bytes:
    """The body of an update whose reduced frames are these, one a cell."""
    return b"".join(pack(frame) for frame in frames)


def unpack(data: memoryview, limits: Sequence[int]) -> list[memoryview]:
    """The frames that `pack` gave, one after another.

    Args:
        data: whole frames.
        limits: the most bytes of each that may come.

    Raises:
        UpdateError: more frames than limits, one that is longer, or one that is cut off.
    """
    frames: list[memoryview] = []
    at = 0
    while at < len(data):
        if len(frames) == len(limits):
            raise UpdateError(f"expected at most {len(limits)} cells, got more")
        if len(data) - at < LENGTH.size:
            raise UpdateError("expected a length, got the end of the data")
        (length,) = LENGTH.unpack_from(data, at)
        at += LENGTH.size
        if length > min(limits[len(frames)], len(data) - at):
            raise UpdateError(
                f"expected a cell of at most {limits[len(frames)]} bytes, all of them here, "
                f"got one of {length}"
            )
        frames.append(data[at : at + length])
        at += length
    return frames
