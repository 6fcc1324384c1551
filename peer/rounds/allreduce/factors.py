"""A part whose cells are sent as factors P and Q: two reductions, one after the other.

On a stream of a part, in both directions, the frames of P of all its cells come first, then those
of Q (`optim.reduction.lowrank`). The owner sends each mean P, made orthonormal, as soon as no live
sender's is missing, and a member answers it with its Q.

A member counts in the cells of which its Q came. The update is the mean of these members' matrices,
projected on the span of P, whichever members contributed to P. So a member that dies between P and
Q is left out of Q, and nothing else changes. If an owner dies, its part begins again, and Q is
computed from the new owner's P.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from atoll.optim.reduction.cells import LENGTH, Bytes, pack
from atoll.optim.reduction.lowrank import Factors, LowRankCells
from atoll.peer.rounds.allreduce.reduction import (
    CellRefused,
    FrameBuffer,
    Norms,
    PartRange,
    PartReducer,
    Share,
)
from atoll.peer.rounds.messages import PartDone


class FactorReducer:
    """The owner's side, with the interface of `PartReducer`."""

    credit_N: Tensor | None = None  # noqa: N815 - members keep what encoding lost as their own errors
    rejected = 0.0

    def __init__(
        self, *, part: PartRange, cells: LowRankCells, shares: Mapping[int, Share], norms: Norms
    ) -> None:
        """Expect both frames of each cell of every member in `shares`."""
        self.part = part
        self._cells = cells
        first, second = replace(part, cells=cells.first), replace(part, cells=cells.second)
        self._first = PartReducer(part=first, shares=shares, norms=norms)
        self._second = PartReducer(part=second, shares=shares, norms=norms, exchange=1)
        limits = _limits(part, cells)
        self._incoming = {member: FrameBuffer(limits) for member in shares}
        self.decoded_N = torch.empty(part.count)
        self._done: tuple[bytes, PartDone] | None = None

    @property
    def num_frames(self) -> int:
        """Return how many frames the owner sends."""
        return 2 * self.part.num_cells

    @property
    def frames(self) -> list[Bytes]:
        """The frames that are encoded, in the order in which they are sent."""
        return self._first.frames + (self._second.frames if self._first.finished else [])

    @property
    def finished(self) -> bool:
        """Return whether every cell is encoded."""
        return self._first.finished and self._second.finished

    @property
    def waiting_for(self) -> set[int]:
        """The members whose frames are missing."""
        return self._first.waiting_for | self._second.waiting_for

    def waits_for(self, member: int) -> bool:
        """Return whether frames of a member are missing."""
        return self._first.waits_for(member) or self._second.waits_for(member)

    def arrived(self, member: int) -> int:
        """Return of how many cells both frames of `member` have arrived."""
        return self._second.arrived(member)

    def add(self, member: int, frame: Bytes) -> None:
        """Add the next frame of `member`; raise as `PartReducer.add`."""
        whole = self._first.arrived(member) == self.part.num_cells
        (self._second if whole else self._first).add(member, frame)

    def add_all(self, member: int, cells: memoryview | Sequence[Bytes]) -> None:
        """Add the next frames of `member`; raise as `PartReducer.add_all`."""
        if member not in self._incoming:
            return
        for frame in self._incoming[member].frames_of(cells):
            self.add(member, frame)

    def drop(self, member: int) -> None:
        """Expect no more of `member`; its cells of which both frames came still count."""
        self._first.drop(member)
        self._second.drop(member)

    def advance(self) -> bool:
        """Encode the cells that are complete; return whether there were any."""
        first, second = self._first.advance(), self._second.advance()
        return first or second

    def done(self, part: int, generation: int) -> tuple[bytes, PartDone]:
        """Return the part's bytes and the report on them, decoded at the first call."""
        if self._done is None:
            self._done = self._decode(part, generation)
        return self._done

    def _decode(self, part: int, generation: int) -> tuple[bytes, PartDone]:
        _, done = self._second.done(part, generation)
        firsts, seconds = self._first.frames, self._second.frames
        frames = [
            b"".join((first[LENGTH.size :], second[LENGTH.size :]))
            for first, second in zip(firsts, seconds, strict=True)
        ]
        body = _decoded(self.part, self._cells, frames, self.decoded_N)
        digest = hashlib.sha256(body).digest()
        return body, done.model_copy(update={"wire_bytes": len(body), "digest": digest})


class FactorReceiver:
    """The other members' side, with the interface of `PartReceiver`."""

    def __init__(self, *, part: PartRange, cells: LowRankCells) -> None:
        """Expect both frames of each cell."""
        self._part, self._cells = part, cells
        self._buffer = FrameBuffer(_limits(part, cells))
        self._frames: list[bytes] = []
        self.decoded_N = torch.empty(part.count)

    def take(self, data: memoryview) -> list[bytes]:
        """Take a message; return its frames of P, which this peer has to answer.

        Raises:
            CellRefused: it holds more than the part, or does not end where a frame ends.
            CodecError: a frame is not valid for the codec.
        """
        came = [bytes(frame) for frame in self._buffer.feed(data)]
        before, count = len(self._frames), self._part.num_cells
        for number, frame in enumerate(came, before):
            cells = self._cells.first if number < count else self._cells.second
            cells.decode_sent(self._part.start_cell + number % count, frame)
        self._frames += came
        return came[: max(0, count - before)]

    def finish(self, done: PartDone) -> bytes:
        """Return the part's bytes.

        Raises:
            CellRefused: they do not have the owner's digest.
            CodecError: a cell is not finite.
        """
        count = self._part.num_cells
        if len(self._frames) != 2 * count:
            raise CellRefused(f"expected {2 * count} frames, got {len(self._frames)}")
        pairs = zip(self._frames[:count], self._frames[count:], strict=True)
        frames = [first + second for first, second in pairs]
        body = _decoded(self._part, self._cells, frames, self.decoded_N)
        if hashlib.sha256(body).digest() != done.digest:
            raise CellRefused(
                "the bytes of the part do not have the digest that its owner reported"
            )
        return body


def first_frames(factors: Factors, start_cell: int, stop_cell: int) -> list[bytes]:
    """Return what a member sends of the cells of a part before it knows P."""
    return [factors.first(index) for index in range(start_cell, stop_cell)]


def answers(factors: Factors, start_cell: int, p_frames: Sequence[Bytes]) -> list[bytes]:
    """Return a member's answers to frames of P, from the cell `start_cell` on."""
    return [factors.second(index, frame) for index, frame in enumerate(p_frames, start_cell)]


def _limits(part: PartRange, cells: LowRankCells) -> list[int]:
    """Return the longest frames of a part, those of P first."""
    indices = range(part.start_cell, part.stop_cell)
    return [each.max_sent_bytes(i) for each in (cells.first, cells.second) for i in indices]


def _decoded(part: PartRange, cells: LowRankCells, frames: Sequence[bytes], out_N: Tensor) -> bytes:
    """Decode the whole frames of a part into `out_N`, and return the part's bytes."""
    for index, frame in enumerate(frames):
        cells.decode_reduced(part.start_cell + index, frame, out_N[part.cell(index)])
    return b"".join(map(pack, frames))
