"""A member's side of a reduction: codes go to the owners of parts, reduced parts come back.

Every member runs one ``Exchange`` a group.  For a part of its own it is the owner: it feeds its own
codes, takes in the others' streams, and answers each with the cells as they are complete.  A part
is named by (part, generation); a repair starts the next generation and forgets the one before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from atoll.compression import CodecError
from atoll.coordinator.status import Level
from atoll.dht.transport import DeadlineExceeded, PeerUnreachable, Refused, Stream, TransportError
from atoll.optim import vectors
from atoll.optim.cells import LENGTH, pack
from atoll.optim.log import MalformedRecord
from atoll.optim.lowrank import Factors, LowRankCells
from atoll.optim.updates import Update
from atoll.peer.rounds.context import Context, short
from atoll.peer.rounds.factors import FactorReceiver, FactorReducer, answers, first_frames
from atoll.peer.rounds.messages import (
    ALIVE,
    CELL,
    PACED_BYTES,
    PART_DONE,
    REDUCE,
    Group,
    PartDone,
    Reduce,
    Repair,
    Upfront,
    tagged,
)
from atoll.peer.rounds.owned import OwnedPart
from atoll.peer.rounds.reduction import (
    CellRefused,
    Norms,
    PartRange,
    PartReceiver,
    PartReducer,
    Share,
    batches,
)
from atoll.peer.rounds.sending import CODES, RESULTS, Bulk, send_paced
from atoll.peer.rounds.upfront import NOT_UPFRONT, UpfrontCodes, not_upfront, plan_of

# A first contact may have to dial; together with a stall's slack a pair that is cut off from each
# other then costs a round less than 3 s at the default stall of 1.5 s.
CONNECT_STALLS = 1.5
SENDERS_SHARE = 0.5  # of the deadline: a slow sender costs itself, not the part or the round
DIAL_PAUSE_STALLS = 0.1  # between tries of a first contact
QUIET_S = 0.5  # after which a part that was coming is better fetched from somebody who has it


class _NotUpfront(Exception):  # noqa: N818
    """An owner did not keep what came before the group."""


class PartLost(Exception):  # noqa: N818
    """The owner of a part is gone or does not go on."""


@dataclass(kw_only=True)
class ExchangeTimes:
    """When things were done, seconds on the context's clock; None while they are not."""

    started: float
    sent: float | None = None
    reduced: float | None = None


class Exchange:
    """One group's reduction, from one member's place."""

    def __init__(
        self,
        ctx: Context,
        group: Group,
        codes: Sequence[bytes],
        upfront: UpfrontCodes | None = None,
    ) -> None:
        """Begin.

        Args:
            ctx: this peer's.
            group: closed, with this peer in it.
            codes: one frame a cell of the fragment; empty for a member of weight 0.
            upfront: what left before the group was closed; it counts if it fits.
        """
        self._ctx = ctx
        self.group = group
        self.digest = group.digest
        self.plan = plan_of(group).digest
        self._upfront = upfront if upfront is not None and upfront.digest == self.plan else None
        self.cells = ctx.replay.cells_at(group.position)
        self._codes = codes
        self._factors: Factors | None = None
        if isinstance(self.cells, LowRankCells) and codes:
            self._factors = Factors(self.cells, ctx.replica.state, codes)
        self._index = {m.peer_id: index for index, m in enumerate(group.members)}
        self.me = self._index[ctx.me.peer_id]
        self.generation = dict.fromkeys(range(len(group.parts)), 0)
        self.parts: dict[int, PartDone] = {}
        self.credits: dict[int, Update] = {}
        self.rejected: dict[int, float] = {}
        """norm of what a robust rule took out of each part that this peer reduced"""
        self.on_part: Callable[[], None] = lambda: None
        """called whenever a part is complete here, so that a leader goes on at once"""
        self.reports: asyncio.Queue[PartDone] = asyncio.Queue()
        self.left_out: dict[int, str] = {}
        """members that this peer went on without, and why"""
        self.is_over = False
        self.times = ExchangeTimes(started=ctx.now())
        self._owned: dict[tuple[int, int], OwnedPart] = {}
        self._norms: dict[int, Norms] = {}
        """by generation, over the parts that this peer owns"""
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._unsent = set(range(len(group.parts)))
        self._gone: set[int] = set()
        self._came_at: dict[int, float] = {}
        self._rooms = self._rooms_of_parts()
        self._watch = ctx.link.watch(ctx.transport)
        ctx.parts.arriving[group.position] = self
        everyone = range(len(group.members))
        for index, plan in enumerate(group.parts):
            self._start(index, plan.owner, everyone)

    def repair(self, order: Repair) -> None:
        """Reduce a part again under a new owner; what the old one sent is forgotten."""
        if not 0 <= order.part < len(self.group.parts) or order.owner >= len(self.group.members):
            raise MalformedRecord("repair: names a part or an owner that the group does not have")
        if any(sender >= len(self.group.members) for sender in order.senders):
            raise MalformedRecord("repair: names a sender that is not a member")
        if order.generation <= self.generation[order.part]:
            return
        self.generation[order.part] = order.generation
        self.parts.pop(order.part, None)
        self.credits.pop(order.part, None)
        self._tasks[order.part].cancel()
        self._start(order.part, order.owner, order.senders)

    def gone(self, member: int) -> None:
        """Wait no longer for streams that a member has not opened; open ones tell by themselves."""
        self._gone.add(member)
        self._watch.disturbed = True

    def busy(self, part: int) -> bool:
        """Whether the bytes of a part may still come by themselves."""
        return not self._tasks[part].done()

    async def arrival(self, start_cell: int, stop_cell: int) -> bool:
        """See `Arriving`: waits while the part's bytes keep coming."""
        for part, plan in enumerate(self.group.parts):
            if (plan.start_cell, plan.stop_cell) == (start_cell, stop_cell):
                return await self._arrival(part)
        return False

    async def _arrival(self, part: int) -> bool:
        asked_at = self._ctx.now()
        while not (task := self._tasks[part]).done():
            if self._ctx.now() >= max(asked_at, self._came_at.get(part, 0.0)) + QUIET_S:
                return True
            await asyncio.wait({task}, timeout=QUIET_S / 4)
        return False

    async def close(self) -> None:
        """End all streams."""
        self.is_over = True
        arriving, position = self._ctx.parts.arriving, self.group.position
        if arriving.get(position) is self:
            del arriving[position]
        self._watch.close()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _send_paced(
        self, stream: Stream, messages: Collection[bytes], first: int, leg: int
    ) -> None:
        to = self._member(stream.remote)
        bulk = Bulk(
            position=self.group.position,
            leg=leg,
            turn=(to - self.me) % len(self.group.members),
            timeout_s=self.group.deadline_s if leg == CODES else self.group.stall_s,
        )
        await send_paced(self._ctx, stream, messages, first, bulk)

    def takes_upfront(self, remote: str, head: Upfront) -> Reduce:
        """What a stream is that came before the group.

        Raises:
            Refused: it does not fit the group, or is of another contribution.
        """
        member = self.group.members[self._member(remote)]
        if head.plan != self.plan or head.norm != member.norm:
            raise not_upfront(head.position)
        return Reduce(
            position=head.position, group=self.digest, part=head.part, generation=0, sums=False
        )

    async def serve(self, remote: str, head: Reduce, stream: Stream) -> None:
        """Answer a member's stream for a part that this peer owns.

        Whichever direction notices first that the member is gone, it is waited for no longer.
        """
        member = self._member(remote)
        owned = await self._await_owned(head)
        if member in owned.came:
            raise Refused("replayed", f"part {head.part}.{head.generation} has a stream of yours")
        owned.came.add(member)
        owned.waiting.discard(member)
        receiving = asyncio.create_task(self._receive(owned, member, stream))
        try:
            await self._send_results(owned, head, stream)
            await receiving
        except TransportError as error:
            if owned.reducer.waits_for(member):
                await self._drop(owned, member, reason=str(error))
            raise
        finally:
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)

    def _start(self, part: int, owner: int, senders: Collection[int]) -> None:
        generation = self.generation[part]
        if owner == self.me:
            self._owned[part, generation] = self._own(part, generation, senders)
            work = self._reduce_own(part, generation)
        else:
            work = self._fetch_reduced(part, generation, owner)
        self._tasks[part] = asyncio.create_task(work)

    def range_of(self, part: int) -> PartRange:
        """The cells of a part."""
        plan = self.group.parts[part]
        return PartRange(start_cell=plan.start_cell, stop_cell=plan.stop_cell, cells=self.cells)

    def _rooms_of_parts(self) -> dict[int, Tensor]:
        """Where each part is decoded to in the update, so that nothing has to be put together.

        Taken once: a part that is reduced again has memory of its own, since a thread may still be
        at the first.
        """
        if isinstance(self.cells, LowRankCells) or self.cells.scatters:
            return {}
        update_F = vectors.empty(self.cells.numel)
        parts = range(len(self.group.parts))
        return {part: update_F[self.range_of(part).values] for part in parts}

    def _own(self, part: int, generation: int, senders: Collection[int]) -> OwnedPart:
        shares = self._shares()
        reducer = self._reducer(part, shares, self._norms.setdefault(generation, Norms()))
        expected = (set(shares) & set(senders)) - self._barred()
        for index in set(shares) - expected:
            reducer.drop(index)
        waiting = expected - {self.me}
        return OwnedPart(reducer=reducer, compute=self._ctx.compute, waiting=waiting)

    def _shares(self) -> dict[int, Share]:
        """Of the members whose work counts."""
        return {
            index: Share(weight=member.weight, clip=member.clip, norm=member.norm)
            for index, member in enumerate(self.group.members)
            if member.weight > 0
        }

    def _reducer(
        self, part: int, shares: Mapping[int, Share], norms: Norms
    ) -> PartReducer | FactorReducer:
        cells = self.range_of(part)
        if isinstance(self.cells, LowRankCells):
            return FactorReducer(part=cells, cells=self.cells, shares=shares, norms=norms)
        room_N = self._rooms.pop(part, None)
        return PartReducer(
            part=cells, shares=shares, rule=self._ctx.rule, norms=norms, out_N=room_N
        )

    def _barred(self) -> set[int]:
        """Members of whom this owner takes nothing for now."""
        barred = set()
        for index, member in enumerate(self.group.members):
            bar = self._ctx.conduct.barred(member.peer_id, self._ctx.now())
            if bar is not None and index != self.me:
                barred.add(index)
                self.left_out.setdefault(index, "barred")
        return barred

    def _member(self, remote: str) -> int:
        if remote not in self._index:
            raise Refused("not-a-member", f"expected a member of the group, got {remote}")
        return self._index[remote]

    async def _await_owned(self, head: Reduce) -> OwnedPart:
        # The order to repair reaches members at different times; a stream may come before it.
        deadline = self._ctx.now() + CONNECT_STALLS * self.group.stall_s
        while (owned := self._owned.get((head.part, head.generation))) is None:
            if self._ctx.now() > deadline:
                raise Refused(
                    "not-the-owner", f"part {head.part}.{head.generation} is not reduced here"
                )
            await asyncio.sleep(self._ctx.alive_s / 4)
        return owned

    async def _my_codes(self, part: int) -> Sequence[bytes]:
        plan = self.group.parts[part]
        if self._factors is None:
            return self._codes[plan.start_cell : plan.stop_cell]
        frames: list[bytes] = await self._ctx.compute(
            first_frames, self._factors, plan.start_cell, plan.stop_cell
        )
        return frames

    async def _answers(self, part: int, first: int, p_frames: Sequence[bytes]) -> list[bytes]:
        """This peer's frames of Q for frames of P, of a part's cells from ``first`` on."""
        start_cell = self.group.parts[part].start_cell + first
        frames: list[bytes] = await self._ctx.compute(answers, self._factors, start_cell, p_frames)
        return frames

    # the owner's side

    async def _reduce_own(self, part: int, generation: int) -> None:
        owned = self._owned[part, generation]
        self._unsent.discard(part)
        self._note_sent()
        adding = asyncio.create_task(self._add_own(owned, part))
        try:
            await self._finish(owned)
        finally:
            adding.cancel()
            await asyncio.gather(adding, return_exceptions=True)
        body, done = await self._ctx.compute(owned.reducer.done, part, generation)
        if (credit := owned.reducer.credit_N) is not None:
            self.credits[part] = credit
        self.rejected[part] = owned.reducer.rejected
        self._complete(part, body, done, owned.reducer.decoded_N)
        self.reports.put_nowait(done)

    async def _add_own(self, owned: OwnedPart, part: int) -> None:
        try:
            await owned.add(self.me, await self._my_codes(part))
            answered = 0
            while self._factors is not None and answered < owned.reducer.part.num_cells:
                p_frames = owned.reducer.frames[answered : owned.reducer.part.num_cells]
                if not p_frames:
                    await owned.await_frames(answered, self._ctx.alive_s)
                    continue
                bare = [frame[LENGTH.size :] for frame in p_frames]
                await owned.add(self.me, await self._answers(part, answered, bare))
                answered += len(p_frames)
        except (CodecError, CellRefused) as error:  # of one's own: the part is due all the same
            await self._drop(owned, self.me, reason=f"bad-cell: {error}", level="error")

    async def _finish(self, owned: OwnedPart, share: float = SENDERS_SHARE) -> None:
        """Wait for all cells, of slow senders until a share of the deadline."""
        started, limit_s = self._ctx.now(), self.group.deadline_s
        connect_by = started + CONNECT_STALLS * self.group.stall_s
        complete_by = min(started + share * limit_s, self.times.started + limit_s)
        while not owned.reducer.finished:
            now = self._ctx.now()
            if silent := await owned.silent(now, connect_by, self._gone):
                await self._drop(owned, *silent, reason="sent nothing")
                continue
            if now >= complete_by:
                late = await owned.give_up()
                await self._drop(owned, *late, reason="was past the deadline")
                continue
            await owned.await_end(self._ctx.alive_s)

    async def _receive(self, owned: OwnedPart, member: int, stream: Stream) -> None:
        try:
            while owned.reducer.waits_for(member):
                message = await stream.recv(timeout_s=self.group.stall_s)
                if message is None:
                    raise PeerUnreachable("the stream ended before the part was complete")
                if message != ALIVE:
                    await self._take(owned, member, message)
        except TransportError as error:
            await self._drop(owned, member, reason=str(error))
        except (CodecError, CellRefused) as error:
            await self._drop(owned, member, reason=f"bad-cell: {error}", level="error")
            self._ctx.fault(self.group.members[member].peer_id, "bad-cell")
            raise Refused("bad-cell", str(error)) from None

    async def _take(self, owned: OwnedPart, member: int, message: bytes) -> None:
        if message[:1] != CELL:
            raise CellRefused(f"expected cells, got a message of kind {message[:1]!r}")
        await owned.add(member, memoryview(message)[1:])

    async def _drop(
        self, owned: OwnedPart, *members: int, reason: str, level: Level = "warning"
    ) -> None:
        for member in members:
            self._watch.disturbed = True
            self.left_out.setdefault(member, reason)
            name = short(self.group.members[member].peer_id)
            self._ctx.on_event(level, f"round {self.group.position + 1}: left out {name}: {reason}")
            await owned.drop(member)

    async def _send_results(self, owned: OwnedPart, head: Reduce, stream: Stream) -> None:
        sent = num_messages = 0
        while sent < owned.reducer.num_frames:
            owned.check()
            frames = owned.results[sent:]
            messages = batches(frames, PACED_BYTES)
            await self._send_paced(stream, messages, num_messages, RESULTS)
            sent, num_messages = sent + len(frames), num_messages + len(messages)
            if not frames and not await owned.await_frames(sent, self._ctx.alive_s):
                await stream.send(ALIVE, timeout_s=self.group.stall_s)
        done = await owned.result(head.part, head.generation)
        await stream.send(tagged(PART_DONE, done), timeout_s=self.group.stall_s)

    # the other members' side

    async def _fetch_reduced(self, part: int, generation: int, owner: int) -> None:
        name = self.group.members[owner].peer_id
        try:
            await self._exchange_with(name, part, generation)
        except (TransportError, CodecError, MalformedRecord, CellRefused, PartLost) as error:
            self._watch.disturbed = True
            text = f"round {self.group.position + 1}: lost part {part} of {short(name)}: {error}"
            self._ctx.on_event("warning", text)

    async def _exchange_with(self, owner: str, part: int, generation: int) -> None:
        if self._upfront is not None and generation == 0:
            stream = await self._upfront.stream(part)
            with suppress(_NotUpfront):
                if stream is not None:
                    return await self._go_on_with(self._upfront, stream, part)
        stream = await self._open(owner)
        to_answer: asyncio.Queue[list[bytes]] = asyncio.Queue()
        sending = self._send_codes(stream, part, generation, to_answer)
        await self._converse(stream, sending, part, generation, to_answer)

    async def _go_on_with(self, upfront: UpfrontCodes, stream: Stream, part: int) -> None:
        """Codes are under way already.

        Raises:
            _NotUpfront: the owner did not keep them, or never answered.
        """
        try:
            await self._converse(
                stream, self._sent_upfront(upfront, part), part, 0, asyncio.Queue()
            )
        except Refused as error:
            if error.code == NOT_UPFRONT:
                raise _NotUpfront from error
            raise
        except PeerUnreachable as error:
            if part in self._came_at:
                raise
            raise _NotUpfront from error  # it may have broken long before the group was closed

    async def _sent_upfront(self, upfront: UpfrontCodes, part: int) -> None:
        await upfront.sent(part)
        self._unsent.discard(part)
        self._note_sent()

    async def _converse(
        self,
        stream: Stream,
        sending: Coroutine[None, None, None],
        part: int,
        generation: int,
        to_answer: asyncio.Queue[list[bytes]],
    ) -> None:
        """Send and collect at once."""
        sender = asyncio.create_task(sending)
        try:
            await self._collect(stream, part, generation, to_answer)
        finally:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)
            await stream.close()

    async def _open(self, owner: str) -> Stream:
        """A stream to an owner; a dial that fails at once is tried again while there is time."""
        deadline = self._ctx.now() + CONNECT_STALLS * self.group.stall_s
        while True:
            try:
                left_s = max(deadline - self._ctx.now(), self._ctx.alive_s)
                return await self._ctx.transport.open(owner, "reduce", timeout_s=left_s)
            except PeerUnreachable:
                if self._ctx.now() >= deadline:
                    raise
            await asyncio.sleep(DIAL_PAUSE_STALLS * self.group.stall_s)

    async def _send_codes(
        self,
        stream: Stream,
        part: int,
        generation: int,
        to_answer: asyncio.Queue[list[bytes]],
    ) -> None:
        head = Reduce(
            position=self.group.position,
            group=self.digest,
            part=part,
            generation=generation,
            sums=False,
        )
        await stream.send(tagged(REDUCE, head), timeout_s=self.group.stall_s)
        if self.group.members[self.me].weight > 0:
            sent = await self._send_frames(stream, await self._my_codes(part), 0)
            if self._factors is not None:
                await self._send_answers(stream, part, sent, to_answer)
        self._unsent.discard(part)
        self._note_sent()

    async def _send_frames(self, stream: Stream, frames: Sequence[bytes], first: int) -> int:
        """Send frames; the number of the next message."""
        messages = batches([pack(frame) for frame in frames], PACED_BYTES)
        await self._send_paced(stream, messages, first, CODES)
        return first + len(messages)

    async def _send_answers(
        self, stream: Stream, part: int, number: int, to_answer: asyncio.Queue[list[bytes]]
    ) -> None:
        """Answer each P with a Q, with signs of life while none comes."""
        plan, answered = self.group.parts[part], 0
        while answered < plan.stop_cell - plan.start_cell:
            try:
                async with asyncio.timeout(self._ctx.alive_s):
                    p_frames = await to_answer.get()
            except TimeoutError:
                await stream.send(ALIVE, timeout_s=self.group.stall_s)
                continue
            frames = await self._answers(part, answered, p_frames)
            number = await self._send_frames(stream, frames, number)
            answered += len(p_frames)

    def _receiver(self, part: int) -> PartReceiver | FactorReceiver:
        if isinstance(self.cells, LowRankCells):
            return FactorReceiver(part=self.range_of(part), cells=self.cells)
        return PartReceiver(
            part=self.range_of(part),
            members=len(self.group.members),
            out_N=self._rooms.pop(part, None),
        )

    async def _collect(
        self,
        stream: Stream,
        part: int,
        generation: int,
        to_answer: asyncio.Queue[list[bytes]],
    ) -> None:
        receiver = self._receiver(part)
        deadline = self.times.started + self.group.deadline_s + self.group.stall_s
        timeout_s = CONNECT_STALLS * self.group.stall_s
        while self._ctx.now() < deadline:
            message = await stream.recv(timeout_s=timeout_s)
            if message is None:
                raise PartLost("the stream ended before the part was complete")
            if message[:1] == CELL:
                self._came_at[part] = self._ctx.now()
                p_frames = await self._ctx.compute(receiver.take, memoryview(message)[1:])
                await self._pass_back(part, receiver)
                if p_frames:
                    to_answer.put_nowait(p_frames)
                timeout_s = self.group.stall_s
            elif message[:1] == PART_DONE:
                done = PartDone.decode(message[1:])
                if (done.part, done.generation) != (part, generation):
                    raise PartLost("the owner names another part")
                body = await self._ctx.compute(receiver.finish, done)
                return self._complete(part, body, done, receiver.decoded_N)
        raise DeadlineExceeded(f"expected the part within {self.group.deadline_s:.1f} s")

    async def _pass_back(self, part: int, receiver: PartReceiver | FactorReceiver) -> None:
        """Results came; a relay passes them on."""

    def _complete(self, part: int, body: bytes, done: PartDone, decoded_N: Update) -> None:
        self._ctx.parts.put(self.group.position, done.digest, body, decoded_N)
        self.parts[part] = done
        self.on_part()
        if len(self.parts) == len(self.group.parts):
            self.times.reduced = self._ctx.now()

    def _note_sent(self) -> None:
        if not self._unsent and self.times.sent is None:
            self.times.sent = self._ctx.now()
