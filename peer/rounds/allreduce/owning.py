"""An owner's side of a reduction: codes come in, cells go out as they are complete."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence

from atoll.compression import CodecError
from atoll.coordinator.run.levels import Level
from atoll.dht.identity import short
from atoll.dht.refusals import RefusalCode
from atoll.dht.tasks import beside, end
from atoll.dht.transport import PeerUnreachable, Refused, Stream, TransportError
from atoll.optim.reduction.cells import LENGTH
from atoll.optim.reduction.lowrank import LowRankCells
from atoll.optim.state.updates import Update
from atoll.peer.rounds.allreduce.factors import FactorReducer
from atoll.peer.rounds.allreduce.owned import OwnedPart
from atoll.peer.rounds.allreduce.reduction import CellRefused, Norms, PartReducer, Share, batches
from atoll.peer.rounds.allreduce.seat import CONNECT_STALLS, Seat
from atoll.peer.rounds.allreduce.sending import RESULTS
from atoll.peer.rounds.conduct import Fault
from atoll.peer.rounds.context import Context
from atoll.peer.rounds.messages import (
    ALIVE,
    CELL,
    PACED_BYTES,
    PART_DONE,
    Group,
    PartDone,
    Reduce,
    tagged,
)

SENDERS_SHARE = 0.5  # of the deadline: a slow sender costs itself, not the part or the round


class Owning(Seat):
    """The parts of a group that one member owns."""

    def __init__(self, ctx: Context, group: Group, codes: Sequence[bytes]) -> None:
        """None is begun; see `Exchange`."""
        super().__init__(ctx, group, codes)
        self.credits: dict[int, Update] = {}
        self.rejected: dict[int, float] = {}
        """norm of what a robust rule took out of each part that this peer reduced"""
        self.reports: asyncio.Queue[PartDone] = asyncio.Queue()
        self._owned: dict[tuple[int, int], OwnedPart] = {}
        self._norms: dict[int, Norms] = {}
        """by generation, over the parts that this peer owns"""

    async def serve(self, remote: str, head: Reduce, stream: Stream) -> None:
        """Answer a member's stream for a part that this peer owns.

        Whichever direction notices first that the member is gone, it is waited for no longer.
        """
        member = self._member(remote)
        owned = await self._await_owned(head)
        if member in owned.came:
            raise Refused(
                RefusalCode.REPLAYED, f"part {head.part}.{head.generation} has a stream of yours"
            )
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
            if not receiving.done():
                await end(receiving)

    async def _await_owned(self, head: Reduce) -> OwnedPart:
        # The order to repair reaches members at different times; a stream may come before it.
        deadline = self._ctx.now() + CONNECT_STALLS * self.group.stall_s
        while (owned := self._owned.get((head.part, head.generation))) is None:
            if self._ctx.now() > deadline:
                raise Refused(
                    RefusalCode.NOT_THE_OWNER,
                    f"part {head.part}.{head.generation} is not reduced here",
                )
            await asyncio.sleep(self._ctx.alive_s / 4)
        return owned

    def _own(self, part: int, generation: int, senders: Collection[int]) -> OwnedPart:
        shares = self._shares()
        reducer = self._reducer(part, shares, self._norms.setdefault(generation, Norms()))
        expected = (set(shares) & set(senders)) - self._barred()
        for index in set(shares) - expected:
            reducer.drop(index)
        waiting = expected - {self.me}
        return OwnedPart(reducer=reducer, compute=self._ctx.compute, waiting=waiting)

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

    async def _reduce_own(self, part: int, generation: int) -> None:
        owned = self._owned[part, generation]
        self._unsent.discard(part)
        self._note_sent()
        async with beside(self._add_own(owned, part)):
            await self._finish(owned)
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
            await self._drop(owned, self.me, reason=f"{Fault.BAD_CELL}: {error}", level="error")

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
            await self._drop(owned, member, reason=f"{Fault.BAD_CELL}: {error}", level="error")
            self._ctx.fault(self.group.members[member].peer_id, Fault.BAD_CELL)
            raise Refused(RefusalCode.BAD_CELL, str(error)) from None

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
