"""A part that this peer reduces: cells on their way into it, and who waits for its results."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from atoll.compression import CodecError
from atoll.peer.rounds.allreduce.factors import FactorReducer
from atoll.peer.rounds.allreduce.reduction import CellRefused, PartReducer
from atoll.peer.rounds.context import Compute
from atoll.peer.rounds.messages import PartDone


@dataclass(kw_only=True)
class Arrival:
    """Cells of a member on their way into the reduction."""

    member: int
    cells: memoryview | Sequence[bytes]
    """a message, or frames"""
    error: CodecError | CellRefused | None = None


@dataclass(kw_only=True)
class OwnedPart:
    """A part that this peer reduces."""

    reducer: PartReducer | FactorReducer
    compute: Compute
    waiting: set[int]
    """members whose stream has not come yet"""
    came: set[int] = field(default_factory=set)
    """members whose stream came: cells are taken from one stream only"""
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    arrived: list[Arrival] = field(default_factory=list)
    """what no job has taken up yet"""

    @property
    def results(self) -> list[bytes]:
        """What members get, as far as it is there."""
        return self.reducer.frames

    def check(self) -> None:
        """Raises Refused where no more results will come; an owner makes its own."""

    async def result(self, part: int, generation: int) -> PartDone:
        """The word on the part, once all results are there."""
        done: PartDone
        _, done = await self.compute(self.reducer.done, part, generation)
        return done

    async def silent(self, now: float, connect_by: float, gone: Collection[int]) -> set[int]:
        """Members that are waited for no longer: their stream is late, or they are gone."""
        return set(self.waiting) if now >= connect_by else self.waiting & set(gone)

    async def give_up(self) -> set[int]:
        """The deadline has passed: members of which cells are missing."""
        return self.reducer.waiting_for

    async def add(self, member: int, cells: memoryview | Sequence[bytes]) -> None:
        """Take in a message or frames; one job takes all that came while the one before ran.

        Raises:
            CodecError, CellRefused: as ``PartReducer.add_all``.
        """
        arrival = Arrival(member=member, cells=cells)
        self.arrived.append(arrival)
        async with self.lock:
            batch, self.arrived = self.arrived, []
            if batch:
                await self._do(partial(accumulate, self.reducer, batch))
        if arrival.error is not None:
            raise arrival.error

    async def drop(self, member: int) -> None:
        """Wait for nothing more of a member; what is complete without it is encoded."""
        self.waiting.discard(member)
        self.reducer.drop(member)
        async with self.lock:
            await self._do(self.reducer.advance)

    async def await_frames(self, sent: int, timeout_s: float) -> bool:
        """Whether there are more frames than were sent, or something changed, within the time."""
        async with self.changed:
            if len(self.results) > sent:
                return True
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self.changed.wait()
                return True
        return False

    async def await_change(self, timeout_s: float) -> bool:
        """Whether something changed within the time."""
        async with self.changed:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self.changed.wait()
                return True
        return False

    async def await_end(self, timeout_s: float) -> None:
        """Return when every cell is encoded, something changed, or the time is over."""
        async with self.changed:
            if self.reducer.finished:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self.changed.wait()

    async def _do(self, job: Callable[[], object]) -> None:
        """Do a job of the reduction; who waits for cells hears of it only if there are more.

        Each member waits for its results while each one's cells come: woken every time, a thousand
        members would wake each other a million times for a part.
        """
        before = len(self.reducer.frames)
        await self.compute(job)
        if len(self.reducer.frames) > before:
            await self.notify()

    async def notify(self) -> None:
        """Wake who waits for something that has come."""
        async with self.changed:
            self.changed.notify_all()


def accumulate(reducer: PartReducer | FactorReducer, batch: Sequence[Arrival]) -> None:
    """Add what arrived, each member's up to its first error, and encode what is complete."""
    for arrival in batch:
        try:
            reducer.add_all(arrival.member, arrival.cells)
        except (CodecError, CellRefused) as error:
            arrival.error = error
    reducer.advance()
