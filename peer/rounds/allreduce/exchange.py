"""One member's exchange: an all-reduce of one group, from the closed group to its reduced parts.

An `Exchange` runs one task a part. If this peer owns the part, its `Owner` reduces it; otherwise
its `Sender` sends the codes to the owner and takes the result (`sides`). In groups of more than 64
members a `RowReduction` uses both to go by relays. All of them share one `ExchangeState`.

A part is named by (part, generation). A repair starts the part's next generation under a new owner
and forgets the one before.

**Eager send.** A member that has reported waits for the group: for stragglers, and for a round trip
at least. Its codes need not wait. The parts of a position are expected to be those of the last
entry of its fragment, with the same owners, and every peer knows them from the log. The codes go to
these owners at once; an owner keeps them, as bytes, until the group gives their weights. If the
leader cuts the parts differently, the codes are forgotten and sent again as the group requires.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from atoll.dht.refusals import RefusalCode
from atoll.dht.tasks import Tasks, end
from atoll.dht.transport import DeadlineExceeded, Refused, Stream, TransportError
from atoll.optim.log.entry import MalformedRecord
from atoll.optim.reduction.cells import LENGTH, Bytes, Cells
from atoll.optim.reduction.lowrank import LowRankCells
from atoll.peer.rounds import notices
from atoll.peer.rounds.allreduce.eager import EagerSlot, furthest_upfront, not_upfront
from atoll.peer.rounds.allreduce.reduction import PartRange
from atoll.peer.rounds.allreduce.rows import RowReduction, Rows, rows_of
from atoll.peer.rounds.allreduce.sides import (
    LOST,
    ExchangeState,
    Owner,
    Sender,
    UpfrontCodes,
)
from atoll.peer.rounds.context import Context
from atoll.peer.rounds.messages import (
    ALIVE,
    PACED_BYTES,
    Group,
    Plan,
    PlannedPart,
    Ready,
    Reduce,
    Repair,
    Upfront,
    planned_parts,
)
from atoll.peer.rounds.policies import OWNERS_SHARE, is_relayed


def plan_of(group: Group) -> Plan:
    """Return how a group cuts its position."""
    parts = planned_parts(group.parts, group.members)
    return Plan(epoch=group.epoch, position=group.position, parts=parts)


def expected_plan(ctx: Context, position: int) -> Plan | None:
    """Return how a position will be cut if nothing changes; None if that is unknown."""
    parts = ctx.last_parts.get(ctx.replay.fragment_at(position))
    # A Q answers an owner's P, so a low-rank contribution is not complete before its group closes.
    if parts is None or isinstance(ctx.replay.cells_at(position), LowRankCells):
        return None
    return Plan(epoch=ctx.replica.epoch, position=position, parts=parts)


def begin_upfront(ctx: Context, ready: Ready, codes: Sequence[Bytes]) -> UpfrontCodes | None:
    """Begin to send a contribution to its expected owners; return None if that is useless."""
    plan = expected_plan(ctx, ready.position)
    if plan is None or not ready.report.weight or ready.term:
        return None
    if not {part.owner for part in plan.parts} <= _known(ctx) | {ctx.me.peer_id}:
        return None
    return UpfrontCodes(ctx, plan, codes, ready.report.norm)


def check_upfront(ctx: Context, remote: str, head: Upfront) -> int:
    """Return how many bytes of a peer's codes an owner keeps.

    Raises:
        Refused: they fit no group that is expected here; the sender sends them again.
    """
    plan = expected_plan(ctx, head.position)
    if (
        plan is None
        or remote not in _known(ctx)
        or not ctx.replica.position <= head.position <= furthest_upfront(ctx)
        or plan.digest != head.plan
        or head.part >= len(plan.parts)
        or plan.parts[head.part].owner != ctx.me.peer_id
    ):
        raise not_upfront(head.position)
    return most_bytes(ctx.replay.cells_at(head.position), plan.parts[head.part])


def _known(ctx: Context) -> set[str]:
    # Codes are kept in memory before any group names their sender, so strangers' are refused.
    return {*ctx.seen, *(elector.peer_id for elector in ctx.replica.electorate)}


def most_bytes(cells: Cells, part: PlannedPart) -> int:
    """Return the most bytes that a member sends of a part, with a byte of kind a message."""
    frames = [cells.max_sent_bytes(index) for index in range(part.start_cell, part.stop_cell)]
    messages = sum(1 + frame // PACED_BYTES for frame in frames)
    return sum(LENGTH.size + frame for frame in frames) + messages


@dataclass(frozen=True)
class _Broken:
    error: TransportError


class HeldStream:
    """A `Stream` whose messages are read from the start and handed out later."""

    def __init__(
        self, stream: Stream, limit: int, stall_s: float, slot: EagerSlot | None = None
    ) -> None:
        """Begin to read, at most `limit` bytes in all; `slot` counts those that wait."""
        self.remote, self.method = stream.remote, stream.method
        self._stream = stream
        self._limit = limit
        self._stall_s = stall_s
        self._slot = slot
        self._messages: asyncio.Queue[bytes | _Broken | None] = asyncio.Queue()
        self._reading = asyncio.create_task(self._read())

    @property
    def ended(self) -> bool:
        """Return whether the other side has sent its last message, or the stream broke."""
        return self._reading.done()

    async def read_all(self) -> None:
        """Wait until the stream has ended."""
        await asyncio.wait({self._reading})

    async def _read(self) -> None:
        held = 0
        message: bytes | _Broken | None = ALIVE
        while isinstance(message, bytes):
            try:
                message = await self._stream.recv(timeout_s=self._stall_s)
            except DeadlineExceeded:  # the sender has nothing to send while the group is awaited
                continue
            except TransportError as error:
                message = _Broken(error)
            if isinstance(message, bytes):
                held += len(message)
                try:
                    self._count(message, held)
                except Refused as error:
                    message = _Broken(error)
            self._messages.put_nowait(message)

    def _count(self, message: bytes, held: int) -> None:
        if held > self._limit:
            raise Refused(RefusalCode.TOO_LONG, f"at most {self._limit} bytes allowed, got more")
        if self._slot is not None:
            self._slot.take(len(message))

    async def send(self, data: bytes | bytearray | memoryview, *, timeout_s: float) -> None:
        """Send at once."""
        await self._stream.send(data, timeout_s=timeout_s)

    async def recv(self, *, timeout_s: float) -> bytes | None:
        """Return the next message, from those that were kept first."""
        try:
            async with asyncio.timeout(timeout_s):
                message = await self._messages.get()
        except TimeoutError:
            raise DeadlineExceeded(f"no message for {timeout_s:.1f} s", peer=self.remote) from None
        if isinstance(message, _Broken):
            raise message.error
        return message

    async def end(self, *, timeout_s: float) -> None:
        """End this direction."""
        await self._stream.end(timeout_s=timeout_s)

    async def close(self) -> None:
        """Stop reading, and end both directions."""
        await self._stop()
        await self._stream.close()

    async def _stop(self) -> None:
        await end(self._reading)
        self._messages = asyncio.Queue()  # a cancelled task's frame keeps `self`, so free the bytes

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The stream stays open: a refusal is sent on it after this. A wrapper that closed it here
        # turned `not-upfront` into a plain end, which reads as the owner's death.
        await self._stop()


# A part that brought nothing for so long is better fetched from a member that holds it.
QUIET_S = 0.5


def exchange_of(
    ctx: Context, group: Group, codes: Sequence[Bytes], upfront: UpfrontCodes | None
) -> Exchange:
    """Begin the all-reduce of a group, in rows if that saves time and the update is a sum.

    A robust rule needs every member's cells at one place; gathered frames and factors have no sum.
    """
    cells = ctx.replay.cells_at(group.position)
    has_sum = not (ctx.rule_in_force or cells.gathers or isinstance(cells, LowRankCells))
    if has_sum and is_relayed(len(group.members), cells.numel, sum(cells.sizes)):
        return Exchange(ctx, group, codes, rows=rows_of(len(group.members), group.parts))
    return Exchange(ctx, group, codes, upfront)


class Exchange:
    """One group's all-reduce as one of its members takes part in it."""

    def __init__(
        self,
        ctx: Context,
        group: Group,
        codes: Sequence[Bytes],
        upfront: UpfrontCodes | None = None,
        rows: Rows | None = None,
    ) -> None:
        """Begin.

        Args:
            ctx: this peer's.
            group: closed, with this peer in it.
            codes: one frame a cell of the fragment; empty for a member of weight 0.
            upfront: codes that left before the group closed; they count if its parts are the same.
            rows: the rows of a large group.
        """
        self.group = group
        self._plan = plan_of(group).digest
        if upfront is not None and upfront.digest != self._plan:
            upfront = None
        self._state = state = ExchangeState(ctx, group, codes)
        self.digest = state.digest
        self._owner = Owner(state)
        self._sender = Sender(state, upfront)
        self._rows = RowReduction(rows, state, self._owner, self._sender) if rows else None
        self.times = state.times
        self.parts = state.parts
        """owners' reports on the parts that are complete here"""
        self.left_out = state.left_out
        """members that this peer continued without, and why"""
        self.credits = self._owner.credits
        """what encoding lost of each part that this peer reduced, times its weight"""
        self.rejected = self._owner.rejected
        """L2 norm of what a robust rule took out of each part that this peer reduced"""
        self.reports = self._owner.reports
        """for the leader: each part that this peer has reduced"""
        self.is_over = False
        self._generation = dict.fromkeys(range(len(group.parts)), 0)
        self._work = Tasks()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """by part: the newest generation's"""
        self._owners: dict[int, tuple[int, float]] = {}
        """by part: its owner, and since when"""
        self._idle: set[int] = set()
        """owners that were noted, once a group"""
        ctx.parts.decided_up_to(ctx.replica.position)
        ctx.parts.begin(group.position, self)
        everyone = range(len(group.members))
        for index, plan in enumerate(group.parts):
            self._start(index, plan.owner, everyone)

    @property
    def on_part(self) -> Callable[[], None]:
        """Called whenever a part is complete here, so that a leader continues at once."""
        return self._state.on_part

    @on_part.setter
    def on_part(self, callback: Callable[[], None]) -> None:
        self._state.on_part = callback

    def range_of(self, part: int) -> PartRange:
        """Return the cells of a part."""
        return self._state.range_of(part)

    def _start(self, part: int, owner: int, senders: Collection[int]) -> None:
        generation = self._generation[part]
        self._owners[part] = owner, self._state.ctx.now()
        # A repaired part goes from every member to its new owner directly.
        rows = self._rows if generation == 0 else None
        if owner == self._state.me:
            owned = (
                rows.make_part(part) if rows else self._owner.make_part(part, generation, senders)
            )
            self._owner.parts[part, generation] = owned
            work = self._owner.reduce(part, generation)
        else:
            work = self._get(rows, owner, part, generation)
        self._tasks[part] = self._work.spawn(work)

    async def _get(self, rows: RowReduction | None, owner: int, part: int, generation: int) -> None:
        name = self._state.peer(owner)
        try:
            if rows is None or not await rows.get(name, part):
                await self._sender.exchange(name, part, generation)
        except LOST as error:
            if not self.is_over:  # else the part was not needed any more
                lost = notices.part_lost(
                    round=self._state.round, part=part, peer=name, reason=str(error)
                )
                self._state.log(lost)

    async def serve(self, remote: str, head: Reduce, stream: Stream) -> None:
        """Take the codes or sums that a member sends of a part, and send it the results."""
        if head.sums and self._rows is not None:
            await self._rows.serve(remote, head, stream)
        else:
            await self._owner.serve(remote, head, stream)

    def takes_upfront(self, remote: str, head: Upfront) -> Reduce:
        """Return what a stream is that was opened before the group closed.

        Raises:
            Refused: it does not fit the group, or is of another contribution.
        """
        # An eager send goes to the owners, but members of a large group send to their relays.
        if self._rows is not None:
            raise not_upfront(head.position)
        member = self.group.members[self._state.member(remote)]
        if head.plan != self._plan or head.norm != member.norm:
            raise not_upfront(head.position)
        return Reduce(
            position=head.position, group=self.digest, part=head.part, generation=0, sums=False
        )

    def repair(self, order: Repair) -> None:
        """Reduce a part again under a new owner; what the old one sent is forgotten."""
        if not 0 <= order.part < len(self.group.parts) or order.owner >= len(self.group.members):
            raise MalformedRecord("repair: names a part or an owner that the group does not have")
        if any(sender >= len(self.group.members) for sender in order.senders):
            raise MalformedRecord("repair: names a sender that is not a member")
        if order.generation <= self._generation[order.part]:
            return
        if not self._tasks[order.part].done():
            self._note_owner(order.part)
        self._generation[order.part] = order.generation
        self.parts.pop(order.part, None)
        self.credits.pop(order.part, None)
        self._tasks[order.part].cancel()
        self._start(order.part, order.owner, order.senders)

    def _note_owner(self, part: int) -> None:
        """Note the owner of a part that is repaired, if it is there and had its time.

        By this peer's own clock: the leader that orders the repair may lie.
        """
        state, (owner, began_at) = self._state, self._owners[part]
        had_s = OWNERS_SHARE * self.group.deadline_s - self.group.stall_s
        is_here = owner != state.me and owner not in state.gone
        if is_here and owner not in self._idle and state.ctx.now() >= began_at + had_s:
            self._idle.add(owner)
            state.ctx.note_idle_owner(state.peer(owner))

    def gone(self, member: int) -> None:
        """Wait no longer for streams that a member has not opened; open ones break by themselves.

        The leader reports this when the member's session ends. Owners alone cannot tell a dead
        member from one that is still dialling, and would wait for the whole first contact.
        """
        self._state.gone.add(member)
        self._state.watch.disturbed = True
        if self._rows is not None:
            self._rows.gone(member)

    def busy(self, part: int) -> bool:
        """Return whether the bytes of a part may still arrive by themselves."""
        return not self._tasks[part].done()

    async def arrival(self, start_cell: int, stop_cell: int) -> bool:
        """Wait while a part's bytes keep coming; return whether it may still arrive."""
        for part, plan in enumerate(self.group.parts):
            if (plan.start_cell, plan.stop_cell) == (start_cell, stop_cell):
                return await self._arrival(part)
        return False

    async def _arrival(self, part: int) -> bool:
        now, came_at = self._state.ctx.now, self._sender.came_at
        asked_at = now()
        while not (task := self._tasks[part]).done():
            if now() >= max(asked_at, came_at.get(part, 0.0)) + QUIET_S:
                return True
            await asyncio.wait({task}, timeout=QUIET_S / 4)
        return False

    async def close(self) -> None:
        """End all tasks and streams."""
        self.is_over = True
        arriving, position = self._state.ctx.parts.arriving, self.group.position
        if arriving.get(position) is self:
            del arriving[position]
        self._state.watch.close()
        await self._work.close()
