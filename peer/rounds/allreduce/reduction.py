"""The arithmetic of a part: cells are added as they arrive, and encoded once when complete.

The cells of a member arrive in order, so a part always holds a prefix of them: those that came
before the member stalled. The mean of a cell is taken over the members whose cell arrived,
sum(w c d) / sum(w), with weight w, clip factor c and decoded contribution d.

If the run has a robust rule (`atoll.optim.reduction.robust`), it replaces that mean: the encoded
cells are held until all are there or late, and the difference to the mean is measured. If the
method gathers, the encoded cells are held too and sent on together
(`atoll.optim.reduction.cells`).

All parts are decoded into one vector, and their bytes come to lie in one buffer (`Rooms`), so
neither the update nor the body of its entry is ever copied together. Both are made on first use:
rounds that begin again overlap, and a reduction that has brought nothing takes no memory.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from atoll.optim.reduction.cells import (
    LENGTH,
    Bytes,
    Cells,
    Sent,
    Term,
    UpdateError,
    pack,
    unpack,
)
from atoll.optim.reduction.robust import Rule
from atoll.optim.reduction.sparse_mean import SparseMean
from atoll.optim.state import vectors
from atoll.optim.state.updates import Update, joined
from atoll.peer.rounds.messages import PIECE_BYTES, PartDone, Prefix

NORM_SLACK = 1.05  # decoding rounds a norm up by less than 5% for every codec we have


class PartBytes:
    """The bytes of one part, piece after piece."""

    def __init__(self, memory: memoryview | None = None) -> None:
        """Lay the pieces in `memory`, which holds the longest part; without it, keep each apart."""
        self._memory = memory
        self._pieces: list[bytes] = []
        self._stop = 0

    def add(self, piece: bytes) -> Bytes:
        """Keep a piece; return it as it is kept."""
        if self._memory is None:
            self._pieces.append(piece)
            return piece
        start, self._stop = self._stop, self._stop + len(piece)
        self._memory[start : self._stop] = piece
        return self._memory[start : self._stop].toreadonly()

    def whole(self) -> Bytes:
        """Return all pieces as one."""
        if self._memory is None:
            return b"".join(self._pieces)
        return self._memory[: self._stop].toreadonly()


class Room(NamedTuple):
    """The place of one part, for whoever reduces or receives it; it takes memory when asked."""

    values: Callable[[], Tensor]
    """Makes room for the part's values."""
    bytes: Callable[[], PartBytes]
    """Makes room for its bytes."""


def room_alone(count: int) -> Room:
    """Return a place for a part of so many values, beside no other part."""
    return Room(partial(vectors.empty, count), PartBytes)


class Rooms:
    """The memory of one group's update."""

    def __init__(
        self,
        values: Sequence[slice],
        most_bytes: Sequence[int],
        allocate: vectors.Allocate = vectors.empty,
    ) -> None:
        """Divide it into parts.

        Args:
            values: of each part, within the update.
            most_bytes: length of the longest body of each part. If all of them are that long, they
                lie in the buffer as they do in the entry's body. Empty: pieces are kept apart.
            allocate: makes the vector of the values.
        """
        self._values = values
        self._allocate = allocate
        self._starts = [0, *itertools.accumulate(most_bytes)]
        self._lock = threading.Lock()  # parts are reduced in several threads
        self._update_F: Tensor | None = None
        self._body: memoryview | None = None

    def room(self, part: int) -> Room:
        """Return the place of a part."""
        bytes_of = partial(self._bytes_of, part) if len(self._starts) > 1 else PartBytes
        return Room(partial(self._values_of, part), bytes_of)

    @property
    def is_made(self) -> bool:
        """Return whether it takes memory."""
        return self._update_F is not None or self._body is not None

    def _values_of(self, part: int) -> Tensor:
        with self._lock:
            if self._update_F is None:
                self._update_F = self._allocate(self._values[-1].stop)
        return self._update_F[self._values[part]]

    def _bytes_of(self, part: int) -> PartBytes:
        with self._lock:
            if self._body is None:
                self._body = vectors.buffer(self._starts[-1])
        return PartBytes(self._body[self._starts[part] : self._starts[part + 1]])


class CellRefused(ValueError):
    """A cell contradicts what its sender declared, or the part."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """A member's share of the mean."""

    weight: float
    clip: float
    norm: float
    """L2 norm that the member declared for its whole contribution"""


class Norms:
    """Sums of squares of what members sent to one owner, over its parts and threads."""

    def __init__(self) -> None:
        self._squares: defaultdict[tuple[int, int], float] = defaultdict(float)
        self._lock = threading.Lock()

    def add(self, member: int, exchange: int, squares: float) -> float:
        """Add to a member's sum; return its L2 norm so far in this exchange of the round."""
        with self._lock:
            self._squares[member, exchange] += squares
            return math.sqrt(self._squares[member, exchange])


@dataclass(frozen=True, kw_only=True)
class PartRange:
    """The cells `[start_cell, stop_cell)` of a fragment."""

    start_cell: int
    stop_cell: int
    cells: Cells

    @property
    def num_cells(self) -> int:
        """Number of the part's cells."""
        return self.stop_cell - self.start_cell

    @property
    def values(self) -> slice:
        """The part within the fragment."""
        return self.cells.values(self.start_cell, self.stop_cell)

    @property
    def count(self) -> int:
        """Number of the part's values."""
        values = self.values
        return int(values.stop - values.start)

    def cell(self, index: int) -> slice:
        """Return the values of the part's cell `index`, within the part."""
        values = self.cells.values(self.start_cell + index, self.start_cell + index + 1)
        return slice(values.start - self.values.start, values.stop - self.values.start)

    def max_sent_bytes(self, index: int) -> int:
        """Return the longest frame of a member for the part's cell `index`."""
        return self.cells.max_sent_bytes(self.start_cell + index)

    def max_reduced_bytes(self, index: int, members: int) -> int:
        """Return the longest reduced frame of the part's cell `index`."""
        return self.cells.max_reduced_bytes(self.start_cell + index, members)

    def max_bytes(self, members: int) -> int:
        """Return the longest that the part can be if so many members reduce it."""
        return self.cells.max_body_bytes(members, self.start_cell, self.stop_cell)


class PartReducer:
    """Accumulates one part. Not thread safe: its owner calls it from one task at a time."""

    adds_rows: ClassVar[bool] = False
    """whether it takes or makes sums of rows, which are dense even if cells are sparse"""

    def __init__(
        self,
        *,
        part: PartRange,
        shares: Mapping[int, Share],
        rule: Rule | None = None,
        norms: Norms | None = None,
        exchange: int = 0,
        room: Room | None = None,
    ) -> None:
        """Expect cells of every member in `shares`; without a rule they are averaged.

        `norms` covers all parts of one owner, which checks the declared norms with it, separately
        in each `exchange` of a round. `room` takes the decoded part and its bytes.
        """
        self._rule = rule
        self._keeps = rule is not None or part.cells.gathers
        self._held: dict[int, dict[int, bytes]] = {}
        self._rejected_squares = 0.0
        self.part = part
        self._shares = dict(shares)
        self._arrived = dict.fromkeys(shares, 0)
        self._norms, self._exchange = norms or Norms(), exchange
        limits = [part.max_sent_bytes(index) for index in range(part.num_cells)]
        self._incoming = {member: FrameBuffer(limits) for member in shares}
        self._live = set(shares)
        self._last = -1
        """a member of which no other has fewer cells here; -1 while none is known"""
        self._done: tuple[Bytes, PartDone] | None = None
        self._sparse: SparseMean | None = None
        if part.cells.scatters and rule is None and not self.adds_rows:
            self._sparse = SparseMean(part.cells, part.start_cell, part.stop_cell)
        self._room = room or room_alone(part.count)
        self._begun = 0
        """number of cells that have a sum"""
        self._weight = [0.0] * part.num_cells
        self.frames: list[Bytes] = []
        """the encoded cells, each prefixed with its length"""
        self._hash = hashlib.sha256()

    @cached_property
    def _sum_N(self) -> Tensor:  # noqa: N802
        return self._room.values()

    @cached_property
    def _credit_N(self) -> Tensor:  # noqa: N802
        return vectors.empty(self.part.count)

    @cached_property
    def _bytes(self) -> PartBytes:
        return self._room.bytes()

    @property
    def finished(self) -> bool:
        """Return whether every cell is encoded."""
        return len(self.frames) == self.part.num_cells

    @property
    def num_frames(self) -> int:
        """Return how many frames the owner sends."""
        return self.part.num_cells

    @property
    def waiting_for(self) -> set[int]:
        """The members whose cells are missing."""
        return {m for m in self._live if self.waits_for(m)}

    def waits_for(self, member: int) -> bool:
        """Return whether cells of a member are missing."""
        return member in self._live and self._arrived[member] < self.part.num_cells

    def arrived(self, member: int) -> int:
        """Return how many cells of `member` have arrived."""
        return self._arrived.get(member, 0)

    def add(self, member: int, frame: Bytes) -> None:
        """Add the next cell of `member`.

        Raises:
            CodecError: the frame is not valid for the codec.
            CellRefused: more cells than the part has, or a norm above the declared one.
        """
        if member not in self._live:
            return
        self._add_frames(member, [frame])

    def add_all(self, member: int, cells: memoryview | Sequence[Bytes]) -> None:
        """Add the next cells of `member`, as frames or as the message that holds them.

        Raises:
            CodecError, CellRefused: as `add`, or the message does not end where a cell ends.
        """
        if member not in self._live:
            return
        if frames := self._incoming[member].frames_of(cells):
            self._add_frames(member, frames)

    def drop(self, member: int) -> None:
        """Expect no more of `member`; its cells that arrived still count."""
        self._live.discard(member)

    def advance(self) -> bool:
        """Encode the cells that are complete; return whether any are."""
        first, ready = len(self.frames), self._ready_cells()
        if first < ready:
            for frame in self._encode(first, ready):
                kept = self._bytes.add(pack(frame))
                self._hash.update(kept)
                self.frames.append(kept)
        return ready > 0

    def done(self, part: int, generation: int) -> tuple[Bytes, PartDone]:
        """Return the part's bytes and the report on them, put together at the first call."""
        if self._done is None:
            self._done = self._put_together(part, generation)
        return self._done

    def _put_together(self, part: int, generation: int) -> tuple[Bytes, PartDone]:
        body = self._bytes.whole()
        if self._sparse is not None:
            self._sparse.finish()
        partial = tuple(
            Prefix(member=m, cells=cells)
            for m, cells in sorted(self._arrived.items())
            if cells < self.part.num_cells
        )
        return body, PartDone(
            part=part,
            generation=generation,
            wire_bytes=len(body),
            digest=self._hash.digest(),
            partial=partial,
        )

    @property
    def rejected(self) -> float:
        """L2 norm of the rule's result minus the weighted mean, over this part."""
        return math.sqrt(self._rejected_squares)

    @property
    def decoded_N(self) -> Update:  # noqa: N802
        """The values that the frames decode to, once all cells are encoded."""
        return self._sum_N if self._sparse is None else self._sparse.decoded

    @property
    def credit_N(self) -> Update | None:  # noqa: N802
        """The error of encoding the mean, times the sum of weights: W (a - u) on this part.

        None if frames are gathered: their mean is not encoded, so nothing is lost.
        """
        if self._sparse is not None:
            return self._sparse.lost
        return None if self.part.cells.gathers else self._credit_N

    def _ready_cells(self) -> int:
        """Return how many cells are complete: as many as the slowest live member has sent."""
        # Searching all members at every message costs P x P steps a part, so it is done only
        # when the slowest one has come further.
        encoded = len(self.frames)
        if self._last in self._live and self._arrived[self._last] == encoded:
            return encoded
        self._last = min(self._live, key=self._arrived.__getitem__, default=-1)
        return self._arrived[self._last] if self._last >= 0 else self.part.num_cells

    def _add_frames(self, member: int, frames: Sequence[Bytes]) -> None:
        """Add the next cells of a member, in runs that are decoded together."""
        first, start = self._arrived[member], self.part.start_cell
        if first + len(frames) > self.part.num_cells:
            raise CellRefused(f"expected {self.part.num_cells} chunks, got one more")
        for run, sent in self.part.cells.decode_runs(start + first, frames):
            taken = frames[run.start - start - first : run.stop - start - first]
            self._add_run(member, taken, sent)

    def _add_run(self, member: int, frames: Sequence[Bytes], sent: Sent) -> None:
        first, share = self._arrived[member], self._shares[member]
        self._check_norm(member, sent)
        if self._sparse is not None:
            self._sparse.add(member, first, sent, share.weight * share.clip)
        elif not self.part.cells.gathers:
            sent.add_to_(self._sum_of(first, first + len(frames)), share.weight * share.clip)
        for index, frame in enumerate(frames, first):
            if self._keeps and share.weight > 0:
                self._held.setdefault(index, {})[member] = bytes(frame)
            self._weight[index] += share.weight
        self._arrived[member] += len(frames)

    def _sum_of(self, first: int, stop: int) -> Tensor:
        """Return the sums of the cells `[first, stop)`, and zero those that no cell has begun."""
        if stop > self._begun:
            self._values(self._sum_N, self._begun, stop).zero_()
            self._begun = stop
        return self._values(self._sum_N, first, stop)

    def _encode(self, first: int, stop: int) -> list[bytes]:
        """Return the reduced frames of some complete cells."""
        if self._sparse is not None:
            return self._sparse.encode(list(self._weights(first, stop)))
        start, mean_N = self.part.start_cell, self._sum_of(first, stop)
        if self.part.cells.gathers:
            frames = [self._gather(index) for index in range(first, stop)]
            self.part.cells.decode_reduced_all(start + first, frames, mean_N)
            return frames
        weights = list(self._weights(first, stop))
        for cells, weight in weights:
            if weight > 0:
                self._values(self._sum_N, cells.start, cells.stop).div_(weight)
        if self._rule is not None:
            for index in range(first, stop):
                self._reject(self._rule, index)
        lost_N = self._values(self._credit_N, first, stop)
        frames = self.part.cells.encode_mean_all(start + first, start + stop, mean_N, lost_N)
        for cells, weight in weights:
            self._values(self._credit_N, cells.start, cells.stop).mul_(weight)
        return frames

    def _weights(self, first: int, stop: int) -> Iterator[tuple[range, float]]:
        """Return runs of the cells `[first, stop)` that have the same sum of weights."""
        for weight, run in itertools.groupby(range(first, stop), self._weight.__getitem__):
            cells = list(run)
            yield range(cells[0], cells[-1] + 1), weight

    def _gather(self, index: int) -> bytes:
        """Join all members' frames of a cell to one."""
        held = sorted(self._held.pop(index, {}).items())
        shares = self._shares
        return self.part.cells.encode_terms(
            [
                Term(share=shares[m].weight * shares[m].clip, weight=shares[m].weight, frame=sent)
                for m, sent in held
            ]
        )

    def _reject(self, rule: Rule, index: int) -> None:
        """Replace the mean of the held cells by the rule's result."""
        held, mean_N = self._held.pop(index, {}), self._values(self._sum_N, index)
        if not held:
            return
        rows_MN = torch.stack(
            [self._decode(index, frame) * self._shares[m].clip for m, frame in held.items()]
        )
        kept_N = rule(rows_MN)
        self._rejected_squares += float((mean_N - kept_N).square().sum())
        mean_N.copy_(kept_N)

    def _decode(self, index: int, frame: Bytes) -> Tensor:
        return self.part.cells.decode_sent(self.part.start_cell + index, frame)

    def _values(self, vector_N: Tensor, first: int, stop: int | None = None) -> Tensor:
        """Return the values of the cell `first`, or of the cells `[first, stop)`."""
        last = first if stop is None else stop - 1
        return vector_N[self.part.cell(first).start : self.part.cell(last).stop]

    def _check_norm(self, member: int, sent: Sent) -> None:
        squares = float(torch.dot(sent.values, sent.values))
        norm = self._norms.add(member, self._exchange, squares)
        declared = self._shares[member].norm
        if not norm <= declared * NORM_SLACK + 1e-12:
            raise CellRefused(f"expected a norm of at most {declared:.3g}, got {norm:.3g} so far")


class PartReceiver:
    """The other members' side: it checks, decodes and hashes reduced cells as they arrive."""

    def __init__(self, *, part: PartRange, members: int, room: Room | None = None) -> None:
        """Expect all cells of a part that so many members reduce; `room` takes it as it comes."""
        self._part = part
        limits = [part.max_reduced_bytes(i, members) for i in range(part.num_cells)]
        self._buffer = FrameBuffer(limits)
        self.frames: list[Bytes] = []
        """as they came, each prefixed with its length"""
        self._hash = hashlib.sha256()
        self._scattered: list[Update] = []
        self._room = room or room_alone(part.count)

    @cached_property
    def _out_N(self) -> Tensor:  # noqa: N802
        return self._room.values()

    @cached_property
    def _bytes(self) -> PartBytes:
        return self._room.bytes()

    def take(self, data: memoryview) -> list[bytes]:
        """Take a message; return no frames, since none is to be answered.

        Raises:
            CellRefused: it holds more than the part, or does not end where a cell ends.
            CodecError: a frame is not valid for the codec.
        """
        frames = self._buffer.feed(data)
        if frames:
            self._decode(len(self.frames), frames)
        self.frames += [self._bytes.add(pack(frame)) for frame in frames]
        self._hash.update(data)
        return []

    def _decode(self, first: int, frames: Sequence[memoryview]) -> None:
        cells, start_cell = self._part.cells, self._part.start_cell + first
        if cells.scatters:
            self._scattered.append(cells.decode_scattered(start_cell, frames))
            return
        start, stop = self._part.cell(first).start, self._part.cell(first + len(frames) - 1).stop
        cells.decode_reduced_all(start_cell, frames, self._out_N[start:stop])

    @property
    def decoded_N(self) -> Update:  # noqa: N802
        """The values that the frames decode to, after `finish`."""
        return self._scattered[0] if self._part.cells.scatters else self._out_N

    def finish(self, done: PartDone) -> Bytes:
        """Return the part's bytes.

        Raises:
            CellRefused: cells are missing, or the bytes do not have the owner's digest.
        """
        if len(self.frames) != self._part.num_cells or self._hash.digest() != done.digest:
            raise CellRefused(
                "the bytes of the part do not have the digest that its owner reported"
            )
        if self._part.cells.scatters:
            self._scattered = [joined(self._scattered)]
        return self._bytes.whole()


class FrameBuffer:
    """Splits a stream's messages into frames.

    A message holds whole frames, each prefixed with its length. A frame that is longer than a piece
    with its length is cut over messages of its own.
    """

    def __init__(self, limits: Sequence[int]) -> None:
        """Expect frames, each of at most the length in `limits`."""
        self._limits = limits
        self._next = 0
        self._long: bytearray | None = None
        self._length = 0

    def feed(self, data: memoryview) -> list[memoryview]:
        """Return the frames that a message completes.

        Raises:
            CellRefused: it holds too many frames, one that is too long, or ends inside a short one.
        """
        if self._long is None and (length := self._begins_long(data)):
            self._long, self._length = bytearray(), length
        if self._long is not None:
            self._long += data
            if len(self._long) < self._length:
                return []
            data, self._long = memoryview(self._long), None
        frames = split_frames(data, self._limits, self._next)
        self._next += len(frames)
        return frames

    def frames_of(self, cells: memoryview | Sequence[Bytes]) -> Sequence[Bytes]:
        """Return frames as they are, or those that a message completes; raise as `feed`."""
        return self.feed(memoryview(cells)) if isinstance(cells, memoryview) else cells

    def _begins_long(self, data: memoryview) -> int:
        """Return the length of a frame that comes in several messages; 0 for other messages."""
        if len(data) < LENGTH.size or self._next == len(self._limits):
            return 0
        (length,) = LENGTH.unpack_from(data)
        short = LENGTH.size + length <= PIECE_BYTES or length > self._limits[self._next]
        return 0 if short else LENGTH.size + int(length)


def batches(frames: Iterable[Bytes], limit: int) -> Iterator[Bytes]:
    """Join consecutive frames to messages of at most `limit` bytes, at least one frame each.

    A frame that is longer than a piece is cut. Keepalives wait behind a whole message: cells of
    256 KiB in one message each stalled a link of 2 Mbit/s. Messages are made one by one, as they
    are sent: all of a vector would be a copy of it.
    """
    batch: list[Bytes] = []
    size = 0
    for frame in frames:
        if batch and size + len(frame) > limit:
            yield b"".join(batch)
            batch, size = [], 0
        if len(frame) > PIECE_BYTES:
            yield from (frame[at : at + limit] for at in range(0, len(frame), limit))
            continue
        batch.append(frame)
        size += len(frame)
    if batch:
        yield b"".join(batch)


def split_frames(data: memoryview, limits: Sequence[int], first: int = 0) -> list[memoryview]:
    """Return the frames in a message, each of at most the length in `limits`, from `first` on.

    Raises:
        CellRefused: the message does not end where a cell ends, or holds too many cells.
    """
    try:
        return unpack(data, limits, first)
    except UpdateError as error:
        raise CellRefused(str(error)) from None
