"""A member's side of a reduction: codes go to the owners of parts, reduced parts come back.

Every member runs one ``Exchange`` a group.  For a part of its own it is the owner: it feeds its own
codes, takes in the others' streams, and answers each with the cells as they are complete
(``owning``).  A part is named by (part, generation); a repair starts the next generation and
forgets the one before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Sequence
from contextlib import suppress

from atoll.compression import CodecError
from atoll.dht.identity import short
from atoll.dht.refusals import RefusalCode
from atoll.dht.tasks import beside, end
from atoll.dht.transport import DeadlineExceeded, PeerUnreachable, Refused, Stream, TransportError
from atoll.optim.log.entry import MalformedRecord
from atoll.optim.reduction.cells import pack
from atoll.optim.reduction.lowrank import LowRankCells
from atoll.peer.rounds.allreduce.factors import FactorReceiver
from atoll.peer.rounds.allreduce.owning import Owning
from atoll.peer.rounds.allreduce.reduction import CellRefused, PartReceiver, batches
from atoll.peer.rounds.allreduce.seat import CONNECT_STALLS
from atoll.peer.rounds.allreduce.sending import CODES
from atoll.peer.rounds.allreduce.upfront import UpfrontCodes, not_upfront, plan_of
from atoll.peer.rounds.context import Context
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

DIAL_PAUSE_STALLS = 0.1  # between tries of a first contact
QUIET_S = 0.5  # after which a part that was coming is better fetched from somebody who has it


class _NotUpfront(Exception):  # noqa: N818
    """An owner did not keep what came before the group."""


class PartLost(Exception):  # noqa: N818
    """The owner of a part is gone or does not go on."""


class Exchange(Owning):
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
        super().__init__(ctx, group, codes)
        self.plan = plan_of(group).digest
        self._upfront = upfront if upfront is not None and upfront.digest == self.plan else None
        self.generation = dict.fromkeys(range(len(group.parts)), 0)
        self.is_over = False
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._repaired: list[asyncio.Task[None]] = []
        """cancelled tasks of earlier generations, which `close` awaits"""
        self._came_at: dict[int, float] = {}
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
        self._repaired.append(self._tasks[order.part])
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
        await end(*self._tasks.values(), *self._repaired)

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

    def _start(self, part: int, owner: int, senders: Collection[int]) -> None:
        generation = self.generation[part]
        if owner == self.me:
            self._owned[part, generation] = self._own(part, generation, senders)
            work = self._reduce_own(part, generation)
        else:
            work = self._fetch_reduced(part, generation, owner)
        self._tasks[part] = asyncio.create_task(work)

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
            if error.code is RefusalCode.NOT_UPFRONT:
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
        try:
            async with beside(sending):
                await self._collect(stream, part, generation, to_answer)
        finally:
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
