"""Transport of a fragment's values: frames to the owners of parts, reduced frames back.

The cells of a round are the fragment's pieces. On the way up a member sends one codec frame a
cell. What comes back depends on the method's reduction:

    mean      the owner's frame of the weighted mean, in the same codec
    gather    all members' frames as they came, with their shares; every peer decodes them alike,
              so the update holds the union of the values that members selected

Frames travel, and lie in the body of an entry, one after another (little endian)::

    0    4    length of the frame
    4    ...  the frame

A gathered frame is, for each member whose cell is in, in the order of the entry's members::

    0    4    share: weight times clip factor, fp32
    4    4    weight, fp32
    8    4    length of the member's frame
    12   ...  the member's frame

and decodes to sum(share d) / sum(weight). If the method divides by senders, each coordinate is
divided by the weights of the members that sent it instead. A receiver MUST check each length
against `max_sent_bytes` or `max_reduced_bytes` before it reads on; a weight MUST be finite and
above 0, a share at most that.

    UpdateError (ValueError)   a body that is too long, or a cell that does not decode
"""

from __future__ import annotations

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
from atoll.compression.base import CPU, Frame
from atoll.compression.blocks import squarable
from atoll.compression.scratch import room, scratch
from atoll.compression.sparse import CoordinateCodec, Sparse, SparseCodec
from atoll.optim.state import vectors
from atoll.optim.state.fragments import Fragment
from atoll.optim.state.outer_state import is_finite
from atoll.optim.state.outer_step import scalar
from atoll.optim.state.pieces import (
    AT_ONCE,
    Dims,
    batches,
    codec_of,
    decode_batch,
    encode_pieces,
    grid,
)
from atoll.optim.state.updates import Update

SHORT = 1024  # values whose norm in fp32 is right to 2e-8; of 65,536 values it is to 1e-6
SPARSE_AT_ONCE = 16 * AT_ONCE  # cells, of which nothing is made dense
LENGTH = struct.Struct("<I")
TERM = struct.Struct("<ffI")

Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Values of consecutive pieces, flat; good until the next ones are decoded."""

    values: Tensor
    """fp32; of all of them, or at the indices."""

    indices: Tensor | None = None
    """int64; values elsewhere are 0. An index may come twice with the same value. None: `values`
    holds all."""

    def scale_(self, factor: Tensor) -> Sent:
        """Multiply by a number, in place."""
        self.values.mul_(factor)
        return self

    def add_to_(self, sum_N: Tensor, share: float = 1.0) -> None:
        """Add a share to a sum."""
        if self.indices is None:
            sum_N.add_(self.values, alpha=share)
            return
        # Not scatter_add_: an index that comes twice must count once.
        some = sum_N.index_select(0, self.indices).add_(self.values, alpha=share)
        sum_N.scatter_(0, self.indices, some)

    def take_from_(self, values_N: Tensor) -> None:
        """Subtract these values, so that those that were not sent remain."""
        if self.indices is None:
            values_N.sub_(self.values)
            return
        some = values_N.index_select(0, self.indices).sub_(self.values)
        values_N.scatter_(0, self.indices, some)

    def put_(self, out_N: Tensor) -> None:
        """Write all values, zeros included."""
        if self.indices is None:
            out_N.copy_(self.values)
        else:
            out_N.zero_().scatter_(0, self.indices, self.values)

    def squares(self, pieces: Sequence[Dims]) -> list[float]:
        """Return the sum of squares of each piece."""
        if self.indices is None:
            return sums_of_squares(self.values, pieces)
        each = len(self.values) // len(pieces)  # pieces of one batch keep equally many values
        return sums_of_squares(self.values, [(each,)] * len(pieces))


class Mean:
    """The mean of what members sent of consecutive pieces, over the weights of all of them."""

    def __init__(self, codec: Codec, pieces: Sequence[Dims], out_N: Tensor, total: float) -> None:
        """Begin in `out_N`, which holds the mean after `finish`; `total` is the sum of weights."""
        self._codec, self._pieces, self._total = codec, pieces, total
        self._out_N = out_N.zero_()

    def add(self, frames: Sequence[Frame], *, share: float, weight: float) -> None:
        """Add a member's frames; its share is its weight times a clip factor.

        Raises:
            CodecError: when a frame is none of its piece.
        """
        sent = sent_in(self._codec, frames, self._pieces)
        sent.scale_(scalar(share / self._total)).add_to_(self._out_N)

    def finish(self) -> None:
        """Complete the mean, once all members were added."""


class MeanOfSenders(Mean):
    """Return the mean, each coordinate over the weights of its senders; 0 without senders."""

    _codec: CoordinateCodec

    def __init__(
        self, codec: CoordinateCodec, pieces: Sequence[Dims], out_N: Tensor, total: float
    ) -> None:
        super().__init__(codec, pieces, out_N, total)
        numel = sum(codec.num_coordinates(dims) for dims in pieces)
        # The coordinates of a DCT are coefficients, which become values only in `finish`.
        self._sum_D = out_N if codec.elementwise else torch.zeros(numel)
        self._weight_D = scratch("weights of senders", self._sum_D).zero_()
        self._indices: list[Tensor] = []

    def add(self, frames: Sequence[Frame], *, share: float, weight: float) -> None:
        found = self._codec.sparse_pieces(frames, self._pieces)
        sent = Sent(values=found.values, indices=found.indices)
        sent.scale_(scalar(share)).add_to_(self._sum_D)
        weights = Sent(values=torch.full_like(sent.values, weight), indices=sent.indices)
        weights.add_to_(self._weight_D)
        self._indices.append(found.indices)

    def finish(self) -> None:
        """Divide the coordinates that anybody sent."""
        if self._indices:
            at = torch.cat(self._indices)  # a coordinate of several senders: same quotient twice
            some = self._sum_D.index_select(0, at) / self._weight_D.index_select(0, at)
            self._sum_D.scatter_(0, at, some)
        if self._sum_D is not self._out_N:
            self._codec.restore_pieces(self._sum_D, self._pieces, self._out_N)


def sent_in(
    codec: Codec, frames: Sequence[Frame], pieces: Sequence[Dims], device: torch.device = CPU
) -> Sent:
    """Decode the pieces of one of `batches`; of a sparse codec always on the CPU.

    Raises:
        CodecError: when a frame is none of its piece.
    """
    if isinstance(codec, SparseCodec):
        sent = codec.sparse_rows(frames, math.prod(pieces[0]))
        return Sent(values=sent.values, indices=sent.indices)
    numel = sum(math.prod(dims) for dims in pieces)
    values = room("sent", (numel,), device, torch.float32)
    decode_batch(codec, frames, pieces, values)
    return Sent(values=values)


def encode_sent(codec: Codec, values: Tensor, pieces: Sequence[Dims]) -> tuple[list[bytes], Sent]:
    """Encode the pieces of one of `batches`.

    Returns:
        Their frames, and the values that these decode to.

    Raises:
        CodecError: when they hold NaN or infinity.
    """
    if isinstance(codec, SparseCodec):
        frames, sent = codec.encode_sparse_rows(values.view(len(pieces), -1))
        return frames, Sent(values=sent.values, indices=sent.indices)
    if codec.any_shapes or len(pieces) == 1:
        frames = codec.encode_pieces(values, pieces)
        return frames, sent_in(codec, frames, pieces, values.device)
    sent_RN = scratch("sent", values).view(len(pieces), -1)
    frames = codec.encode_and_decode_rows(values.view(len(pieces), -1), sent_RN)
    return frames, Sent(values=sent_RN.view(-1))


def sums_of_squares(values: Tensor, pieces: Sequence[Dims]) -> list[float]:
    """Return the sum of squares of each of some pieces.

    Norms of runs of 1,024 values in fp32 are right to seven digits in a fifth of the time of fp64.
    If a square may overflow or vanish, or a piece is no multiple of a run, it is fp64.
    """
    sizes = [math.prod(dims) for dims in pieces]
    if len(set(sizes)) > 1:
        parts = zip(torch.split(values, sizes), pieces, strict=True)
        return [sums_of_squares(part, [dims])[0] for part, dims in parts]
    run = SHORT if sizes[0] % SHORT == 0 else sizes[0]
    norms = torch.linalg.vector_norm(values.view(-1, run), 2, dim=1).cpu()
    if run != SHORT or not squarable(norms):
        values = values.cpu()  # not every device has fp64
        norms = torch.linalg.vector_norm(values.view(-1, run), 2, dim=1, dtype=torch.float64)
    return squares_of(norms, len(pieces))


def squares_of(norms: Tensor, num_pieces: int) -> list[float]:
    """Return the sum of squares of each of some pieces, given the norms of their runs."""
    squares: list[float] = norms.double().square().view(num_pieces, -1).sum(1).tolist()
    return squares


class UpdateError(ValueError):
    """The body of an update does not decode to the values of its fragment."""


@dataclass(frozen=True, kw_only=True)
class Term:
    """A member's frame of a cell, and its weight in the mean."""

    share: float
    """Weight x clip factor."""

    weight: float
    """The member's capped weight, fp32, above 0."""

    frame: Bytes
    """The member's frame as it came."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Cells:
    """The cells of one fragment, encoded by one codec, or each by that of its layer."""

    together: ClassVar[bool] = True
    """Equal cells may be encoded and decoded at once."""

    codec: Codec
    fragment: Fragment

    gathers: bool = False
    """An update holds all members' frames instead of their mean."""

    by_senders: bool = False
    """A gathered value is divided by the weights of the members that sent it, not of all."""

    def __post_init__(self) -> None:
        """Refuse codecs that a round can't use.

        Raises:
            CodecError: when frames depend on earlier ones, a layer has no codec, or values are
                divided by senders and frames do not show which values a member sent.
        """
        for dims in self.fragment.pieces:
            codec_of(self.codec, dims)
        if self.codec.stateful:  # joiners decode frames without the earlier ones
            raise CodecError(f"expected a codec whose frames stand alone, got {self.codec.spec}")
        if self.by_senders and not isinstance(self.codec, CoordinateCodec):
            raise CodecError(f"expected a codec that identifies senders, got {self.codec.spec}")

    @classmethod
    def of_vector(cls, codec: Codec, numel: int) -> Self:
        """Return the cells of a whole vector of `numel` values, reduced to a mean."""
        return cls(codec=codec, fragment=Fragment(spans=((0, numel),), pieces=grid(numel)))

    def __len__(self) -> int:
        """Return the number of cells."""
        return len(self.fragment.pieces)

    @property
    def numel(self) -> int:
        """Return F, the number of values of all cells."""
        return self.fragment.numel

    def dims(self, index: int) -> Dims:
        """Return the shape of one cell."""
        return self.fragment.pieces[index]

    def codec_at(self, index: int) -> Codec:
        """Return the codec of one cell."""
        return codec_of(self.codec, self.dims(index))

    def values(self, start: int, stop: int) -> slice:
        """Return the values of the cells `[start, stop)` within the fragment."""
        slices = self.fragment.slices
        return slice(slices[start].start, slices[stop - 1].stop)

    @cached_property
    def scatters(self) -> bool:
        """Return whether an update is decoded to the sent values only."""
        return self.together and not self.gathers and isinstance(self.codec, SparseCodec)

    def max_sent_bytes(self, index: int) -> int:
        """Return the bytes of the longest frame of one member's cell."""
        return self._most_bytes[index + 1] - self._most_bytes[index]

    def max_reduced_bytes(self, index: int, members: int) -> int:
        """Return the bytes of the longest reduced frame of one cell."""
        one = self.max_sent_bytes(index)
        return members * (TERM.size + one) if self.gathers else one

    def max_body_bytes(self, members: int, start: int = 0, stop: int | None = None) -> int:
        """Return the bytes of the longest body of the cells `[start, stop)`, all by default."""
        ends = (start, len(self) if stop is None else stop)
        lengths = self._most_bytes[ends[1]] - self._most_bytes[ends[0]]
        headers = LENGTH.size * (ends[1] - ends[0])
        if not self.gathers:
            return headers + lengths
        return headers + members * (lengths + TERM.size * (ends[1] - ends[0]))

    @property
    def sizes(self) -> list[int]:
        """Return the bytes of the longest frame of each cell that one member sends."""
        return [self.max_sent_bytes(index) for index in range(len(self))]

    @cached_property
    def _most_bytes(self) -> list[int]:
        """Return the summed bytes of the longest frames before each cell, and of all."""
        # Most cells share one shape and one codec, so their length is computed once.
        sums, lengths = [0], dict[tuple[str, Dims], int]()
        for index, dims in enumerate(self.fragment.pieces):
            codec = self.codec_at(index)
            key = (codec.spec, dims)
            if key not in lengths:
                lengths[key] = codec.wire_bytes(dims)
            sums.append(sums[-1] + lengths[key])
        return sums

    def encode(self, values_F: Tensor) -> list[bytes]:
        """Encode F values of a member, or of a mean, to one frame a cell.

        Raises:
            CodecError: when the values hold NaN or infinity.
        """
        return encode_pieces(self.codec, values_F, self.fragment.pieces)

    # one cell

    def decode_sent(self, index: int, frame: Bytes) -> Tensor:
        """Return a member's values of one cell, flat.

        Raises:
            CodecError: when it is no frame of the cell.
        """
        return self.codec_at(index).decode(frame, self.dims(index)).view(-1)

    def encode_mean(self, index: int, mean_C: Tensor) -> bytes:
        """Return the reduced frame of a mean.

        Raises:
            CodecError: when it holds NaN or infinity.
        """
        return self.codec_at(index).encode(mean_C.view(self.dims(index)))

    def encode_terms(self, terms: Sequence[Term]) -> bytes:
        """Return the reduced frame of gathered ones."""
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
            # Checked before decoding: an owner or a donor may claim any length and any share.
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
        """Split the cells `[first, stop)` into runs that are encoded or decoded at once."""
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
        """Decode a member's frames of the cells from `first` on.

        Yields:
            Runs of cells with their values, which are good until the next ones are taken.

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
        """Return the reduced frames of a mean over the cells `[first, stop)`.

        Args:
            first: cell that `mean` and `lost` begin with.
            stop: the cell after the last one.
            mean: their values; replaced by those that the frames decode to.
            lost: takes the mean less these.

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
            assert sent.indices is not None, "a sparse codec gives them"
            values.append(sent.values)
            indices.append(sent.indices.add_(self._within(run, first).start))
        numel = self._within(range(first, first + len(frames)), first).stop if frames else 0
        return Sparse(indices=torch.cat(indices), values=torch.cat(values), shape=(numel,))

    def _decode_gathered(
        self, run: range, codec: Codec, reduced: Sequence[Bytes], out: Tensor
    ) -> None:
        """Decode the means of gathered frames; cells with the same members and shares at once."""
        terms = [self._terms(index, frame) for index, frame in zip(run, reduced, strict=True)]
        shares = [[(term.share, term.weight) for term in of_cell] for of_cell in terms]
        for _, alike in itertools.groupby(range(len(run)), shares.__getitem__):
            at = list(alike)
            some = run[at[0] : at[-1] + 1]
            values = out[self._within(some, run.start)]
            self._mean(some, codec, terms[at[0] : at[-1] + 1], values)
        require_finite(out)

    def _mean(self, run: range, codec: Codec, terms: Sequence[list[Term]], out: Tensor) -> None:
        # In fp64 and in the order of the members, which the frame gives: the same bits everywhere.
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
        """Return the values of some cells in a vector that begins with the cell `first`."""
        values, start = self.values(run.start, run.stop), self.fragment.slices[first].start
        return slice(values.start - start, values.stop - start)

    # bodies

    def decode_body(
        self, body: Bytes, members: int, allocate: vectors.Allocate = vectors.empty
    ) -> Update:
        """Decode the body of an update of so many members; `allocate` makes the vector of it.

        Returns:
            update_F, fp32 on the CPU, all finite; the values that were sent if it `scatters`.

        Raises:
            UpdateError: when it is too long (checked before memory is taken), its frames are not
                one a cell, or one does not decode to finite numbers.
        """
        return self.decode_part(body, members, 0, len(self), allocate)

    def decode_part(
        self,
        body: Bytes,
        members: int,
        start: int,
        stop: int,
        allocate: vectors.Allocate = vectors.empty,
    ) -> Update:
        """Decode the part of a body from cell `start` up to `stop`, as `decode_body` does."""
        frames = self._frames_of(body, members, start, stop)
        try:
            numel = self._within(range(start, stop), start).stop if frames else 0
            out = None if self.scatters else allocate(numel)
            return self.decode_update(start, frames, out)
        except CodecError as error:
            # Cells are decoded many at once, so the refusal looks for the one that fails.
            raise self._refusal(start, frames) from error

    def decode_by_runs(self, body: Bytes, members: int) -> Iterator[tuple[int, int, Update]]:
        """Decode a body as `decode_body` does, some cells `[first, stop)` at a time.

        Each update is good until the next one is taken.
        """
        frames = self._frames_of(body, members, 0, len(self))
        runs = [run for run, _ in self.runs(0, len(self))]
        numels = [self._within(run, run.start).stop for run in runs]
        out = None if self.scatters else vectors.empty(max(numels))
        for run, numel in zip(runs, numels, strict=True):
            of_run = None if out is None else out[:numel]
            try:
                yield (
                    run.start,
                    run.stop,
                    self.decode_update(run.start, frames[run.start : run.stop], of_run),
                )
            except CodecError as error:
                raise self._refusal(run.start, frames[run.start : run.stop]) from error

    def _frames_of(self, body: Bytes, members: int, start: int, stop: int) -> list[memoryview]:
        """Split a part of a body into the frames of the cells `[start, stop)`."""
        longest = self.max_body_bytes(members, start, stop)
        if len(body) > longest:
            raise UpdateError(
                f"expected a body of at most {longest} bytes ({self.codec.spec}), got {len(body)}"
            )
        limits = [self.max_reduced_bytes(index, members) for index in range(start, stop)]
        frames = unpack(memoryview(body), limits)
        if len(frames) != stop - start:
            raise UpdateError(f"expected {stop - start} chunks, got {len(frames)}")
        return frames

    def decode_update(
        self, first: int, frames: Sequence[Bytes], out: Tensor | None = None
    ) -> Update:
        """Decode the reduced frames of the cells from `first` on, to `out` if they are dense.

        Raises:
            CodecError: when one is none of its cell.
        """
        if self.scatters:
            return self.decode_scattered(first, frames)
        if out is None:
            out = vectors.empty(self._within(range(first, first + len(frames)), first).stop)
        self.decode_reduced_all(first, frames, out)
        return out

    def _refusal(self, first: int, frames: Sequence[Bytes]) -> UpdateError:
        """Name the first cell that does not decode."""
        for index, frame in enumerate(frames, first):
            try:
                self.decode_update(index, [frame])
            except CodecError as error:
                return UpdateError(f"chunk {index}: {error}")
        return UpdateError(
            "expected chunks that decode together, got some that decode only one by one"
        )


def require_finite(values: Tensor) -> None:
    """Refuse decoded values that are not finite.

    Raises:
        CodecError: when there is NaN or infinity.
    """
    if not is_finite(values):
        raise CodecError("expected finite numbers, got NaN or infinity")


def pack(frame: Bytes) -> bytes:
    """Return a frame with its length before it."""
    return LENGTH.pack(len(frame)) + frame


def body_of(frames: Sequence[Bytes]) -> bytes:
    """Return the body of an update from its reduced frames, one a cell."""
    return b"".join(pack(frame) for frame in frames)


def unpack(data: memoryview, limits: Sequence[int], first: int = 0) -> list[memoryview]:
    """Split packed frames, one after another; the result is views.

    Args:
        data: whole frames.
        limits: most bytes of each frame.
        first: index of the limit of the first frame in `data`.

    Raises:
        UpdateError: when there are more frames than limits, or one is longer or cut off.
    """
    frames: list[memoryview] = []
    at = 0
    while at < len(data):
        index = first + len(frames)
        if index == len(limits):
            raise UpdateError(f"expected at most {len(limits) - first} chunks, got more")
        if len(data) - at < LENGTH.size:
            raise UpdateError("expected a length, got the end of the data")
        (length,) = LENGTH.unpack_from(data, at)
        at += LENGTH.size
        if length > min(limits[index], len(data) - at):
            raise UpdateError(
                f"expected a chunk of at most {limits[index]} bytes, all of them here, "
                f"got one of {length}"
            )
        frames.append(data[at : at + length])
        at += length
    return frames
