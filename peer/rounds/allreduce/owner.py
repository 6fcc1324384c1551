"""An owner's side of an all-reduce: members' cells come in, reduced cells go out as they complete.

An `Owner` runs the parts that this peer reduces. Each is an `OwnedPart`: the reducer, and the
members that it still waits for. Relays of large groups reduce in the same way (`rows`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from atoll.compression import CodecError
from atoll.coordinator.run.levels import Level
from atoll.dht.identity import short
from atoll.dht.refusals import RefusalCode
from atoll.dht.tasks import beside, end
from atoll.dht.transport import PeerUnreachable, Refused, Stream, TransportError
from atoll.optim.log.live import Compute
from atoll.optim.reduction.cells import LENGTH
from atoll.optim.reduction.lowrank import LowRankCells
from atoll.optim.state.updates import Update
from atoll.peer.rounds.allreduce.factors import FactorReducer
from atoll.peer.rounds.allreduce.reduction import CellRefused, Norms, PartReducer, batches
from atoll.peer.rounds.allreduce.state import CONNECT_STALLS, RESULTS, ExchangeState
from atoll.peer.rounds.conduct import Fault
from atoll.peer.rounds.messages import (
    ALIVE,
    CELL,
    PACED_BYTES,
    PART_DONE,
    PartDone,
    Reduce,
    tagged,
)

# Of the deadline. A slow sender then costs only its own contribution: an owner loses its part to
# another one after 3/4 of the deadline (`consensus.parts`), and the round ends later still.
SENDERS_SHARE = 0.5


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
    """members that have not opened their stream yet"""
    came: set[int] = field(default_factory=set)
    """members that have opened their stream: cells are taken from one stream only"""
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    arrived: list[Arrival] = field(default_factory=list)
    """cells that no job has taken yet"""

    @property
    def results(self) -> list[bytes]:
        """The results so far, each frame as members get it."""
        return self.reducer.frames

    def check(self) -> None:
        """Raise `Refused` if no more results will come; an owner computes its own."""

    async def result(self, part: int, generation: int) -> PartDone:
        """Return the owner's report on the part, once all results are there."""
        done: PartDone
        _, done = await self.compute(self.reducer.done, part, generation)
        return done

    async def silent(self, now: float, connect_by: float, gone: Collection[int]) -> set[int]:
        """Return members to wait for no longer: their stream is late, or they are gone."""
        return set(self.waiting) if now >= connect_by else self.waiting & set(gone)

    async def give_up(self) -> set[int]:
        """Return the members whose cells are missing; the deadline has passed."""
        return self.reducer.waiting_for

    def to_leave_out(self, members: Iterable[int]) -> Iterable[int]:
        """Return those of `members` that the part has to do without; here all of them."""
        return members

    async def add(self, member: int, cells: memoryview | Sequence[bytes]) -> None:
        """Add a message or frames; one job takes all that arrived while the last one ran.

        Raises:
            CodecError, CellRefused: as `PartReducer.add_all`.
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
        """Stop waiting for a member, and encode the cells that are complete without it."""
        self.waiting.discard(member)
        self.reducer.drop(member)
        async with self.lock:
            await self._do(self.reducer.advance)

    async def await_change(
        self, timeout_s: float, unless: Callable[[], bool] = lambda: False
    ) -> bool:
        """Wait for a change, at most so long and not if `unless` holds; False if none came."""
        async with self.changed:
            if unless():
                return True
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self.changed.wait()
                return True
        return False

    async def await_frames(self, sent: int, timeout_s: float) -> bool:
        """Wait for more results than were sent, or a change; False if neither came in time."""
        return await self.await_change(timeout_s, lambda: len(self.results) > sent)

    async def await_end(self, timeout_s: float) -> None:
        """Wait until every cell is encoded, something changes, or the time is over."""
        await self.await_change(timeout_s, lambda: self.reducer.finished)

    async def _do(self, job: Callable[[], object]) -> None:
        # Waiting streams are woken only if the job made more frames. All of them wait for results
        # while everybody's cells arrive: if every arrival woke them, a thousand members would
        # wake each other a million times for one part.
        before = len(self.reducer.frames)
        await self.compute(job)
        if len(self.reducer.frames) > before:
            await self.notify()

    async def notify(self) -> None:
        """Wake all that wait for a change."""
        async with self.changed:
            self.changed.notify_all()


def accumulate(reducer: PartReducer | FactorReducer, batch: Sequence[Arrival]) -> None:
    """Add arrivals, each member's up to its first error, and encode the cells that are complete."""
    for arrival in batch:
        try:
            reducer.add_all(arrival.member, arrival.cells)
        except (CodecError, CellRefused) as error:
            arrival.error = error
    reducer.advance()


class Owner:
    """Reduces the parts of a group that one member owns, or relays."""

    def __init__(self, state: ExchangeState) -> None:
        self._state = state
        self.parts: dict[tuple[int, int], OwnedPart] = {}
        """by part and generation"""
        self.credits: dict[int, Update] = {}
        self.rejected: dict[int, float] = {}
        self.reports: asyncio.Queue[PartDone] = asyncio.Queue()
        self._norms: dict[int, Norms] = {}

    def norms(self, generation: int) -> Norms:
        """Return the members' norms over all parts that this peer owns in a generation."""
        return self._norms.setdefault(generation, Norms())

    def make_part(self, part: int, generation: int, senders: Collection[int]) -> OwnedPart:
        """Return a part that waits for the cells of `senders`."""
        state, shares, norms = self._state, self._state.shares(), self.norms(generation)
        cells = state.range_of(part)
        reducer: PartReducer | FactorReducer
        if isinstance(state.cells, LowRankCells):
            reducer = FactorReducer(part=cells, cells=state.cells, shares=shares, norms=norms)
        else:
            room_N = state.take_room(part)
            reducer = PartReducer(
                part=cells, shares=shares, rule=state.ctx.rule, norms=norms, out_N=room_N
            )
        expected = (set(shares) & set(senders)) - self.barred()
        for index in set(shares) - expected:
            reducer.drop(index)
        waiting = expected - {state.me}
        return OwnedPart(reducer=reducer, compute=state.ctx.compute, waiting=waiting)

    def barred(self) -> set[int]:
        """Return the members that are banned now: this owner takes none of their cells."""
        state, barred = self._state, set()
        for index in range(len(state.group.members)):
            bar = state.ctx.conduct.barred(state.peer(index), state.ctx.now())
            if bar is not None and index != state.me:
                barred.add(index)
                state.left_out.setdefault(index, "barred")
        return barred

    async def reduce(self, part: int, generation: int) -> None:
        """Reduce one of `parts`, of which this peer is the owner."""
        owned = self.parts[part, generation]
        self._state.note_sent(part)
        async with beside(self.add_own(owned, part)):
            await self.await_senders(owned)
        body, done = await self._state.ctx.compute(owned.reducer.done, part, generation)
        if (credit := owned.reducer.credit_N) is not None:
            self.credits[part] = credit
        self.rejected[part] = owned.reducer.rejected
        self._state.complete(part, body, done, owned.reducer.decoded_N)
        self.reports.put_nowait(done)

    async def add_own(self, owned: OwnedPart, part: int) -> None:
        """Add this peer's own cells, and answer frames of P if they are of low rank."""
        state = self._state
        try:
            await owned.add(state.me, await state.my_codes(part))
            answered = 0
            while state.factors is not None and answered < owned.reducer.part.num_cells:
                p_frames = owned.reducer.frames[answered : owned.reducer.part.num_cells]
                if not p_frames:
                    await owned.await_frames(answered, state.ctx.alive_s)
                    continue
                bare = [frame[LENGTH.size :] for frame in p_frames]
                await owned.add(state.me, await state.answers(part, answered, bare))
                answered += len(p_frames)
        except (CodecError, CellRefused) as error:
            # This peer's own cells are bad. The others still need the part: an owner that ended
            # its task here once made the whole round end in NULL.
            await self.drop(owned, self._state.me, reason=_bad_cell(error), level="error")

    async def await_senders(self, owned: OwnedPart, share: float = SENDERS_SHARE) -> None:
        """Wait for all cells, but no longer than `share` of the deadline for slow senders."""
        state = self._state
        started, limit_s = state.ctx.now(), state.group.deadline_s
        connect_by = started + CONNECT_STALLS * state.group.stall_s
        complete_by = min(started + share * limit_s, state.times.started + limit_s)
        while not owned.reducer.finished:
            now = state.ctx.now()
            if silent := await owned.silent(now, connect_by, state.gone):
                await self.drop(owned, *silent, reason="sent nothing")
            elif now >= complete_by:
                late = await owned.give_up()
                await self.drop(owned, *late, reason="missed the deadline")
            else:
                await owned.await_end(state.ctx.alive_s)

    async def serve(self, remote: str, head: Reduce, stream: Stream) -> None:
        """Take a member's cells of one part, and send it the results.

        The owner stops waiting for a member as soon as either direction of its stream breaks.
        """
        member = self._state.member(remote)
        owned = await self.await_part(head)
        if member in owned.came:
            raise Refused(
                RefusalCode.REPLAYED,
                f"part {head.part}.{head.generation} already has a stream from this member",
            )
        owned.came.add(member)
        owned.waiting.discard(member)
        receiving = asyncio.create_task(self._receive(owned, member, stream))
        try:
            await self.send_results(owned, head, stream)
            await receiving
        except TransportError as error:
            if owned.reducer.waits_for(member):
                await self.drop(owned, member, reason=str(error))
            raise
        finally:
            if not receiving.done():
                await end(receiving)

    async def await_part(self, head: Reduce) -> OwnedPart:
        """Return the part that a stream is for; raise `Refused` if it is not reduced here."""
        # The order to repair a part reaches members at different times, so a member's stream may
        # arrive before the new owner knows of its part.
        state = self._state
        deadline = state.ctx.now() + CONNECT_STALLS * state.group.stall_s
        while (owned := self.parts.get((head.part, head.generation))) is None:
            if state.ctx.now() > deadline:
                raise Refused(
                    RefusalCode.NOT_THE_OWNER,
                    f"part {head.part}.{head.generation} is not reduced here",
                )
            await asyncio.sleep(state.ctx.alive_s / 4)
        return owned

    async def _receive(self, owned: OwnedPart, member: int, stream: Stream) -> None:
        try:
            while owned.reducer.waits_for(member):
                message = await stream.recv(timeout_s=self._state.group.stall_s)
                if message is None:
                    raise PeerUnreachable("the stream ended before the part was complete")
                if message == ALIVE:
                    continue
                if message[:1] != CELL:
                    raise CellRefused(f"expected cells, got a message of kind {message[:1]!r}")
                await owned.add(member, memoryview(message)[1:])
        except TransportError as error:
            await self.drop(owned, member, reason=str(error))
        except (CodecError, CellRefused) as error:
            await self.drop(owned, member, reason=_bad_cell(error), level="error")
            self._state.ctx.fault(self._state.peer(member), Fault.BAD_CELL)
            raise Refused(RefusalCode.BAD_CELL, str(error)) from None

    async def send_results(self, owned: OwnedPart, head: Reduce, stream: Stream) -> None:
        """Send the results of a part as they complete, and then the report on it."""
        stall_s, sent, num_messages = self._state.group.stall_s, 0, 0
        while sent < owned.reducer.num_frames:
            owned.check()
            frames = owned.results[sent:]
            messages = batches(frames, PACED_BYTES)
            await self._state.send_paced(stream, messages, num_messages, RESULTS)
            sent, num_messages = sent + len(frames), num_messages + len(messages)
            if not frames and not await owned.await_frames(sent, self._state.ctx.alive_s):
                await stream.send(ALIVE, timeout_s=stall_s)
        done = await owned.result(head.part, head.generation)
        await stream.send(tagged(PART_DONE, done), timeout_s=stall_s)

    async def drop(
        self, owned: OwnedPart, *members: int, reason: str, level: Level = "warning"
    ) -> None:
        """Continue a part without members; their cells that arrived still count."""
        for member in owned.to_leave_out(members):
            self._state.left_out.setdefault(member, reason)
            name = short(self._state.peer(member))
            self._state.log(f"left out {name}: {reason}", level)
            await owned.drop(member)


def _bad_cell(error: Exception) -> str:
    return f"{Fault.BAD_CELL}: {error}"
