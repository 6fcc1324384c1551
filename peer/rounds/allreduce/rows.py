"""The all-reduce of a large group: members send to relays of their row, relays send sums to owners.

Each part has one relay a row. The row's members send it their codes; it adds them up, sends the sum
to the part's owner, and passes the results back to its row, which checks the bytes against the
digest that is certified in the end. Rows and relays follow from the group, so no message names
them.

If a relay is gone, silent or cut off, its row sends to the owner as in a small group; so do all
members once a part has a new owner. The arithmetic is in `sums`.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heapreplace

from atoll.dht.identity import short
from atoll.dht.refusals import RefusalCode
from atoll.dht.tasks import beside, race, together
from atoll.dht.transport import PeerUnreachable, Refused, Stream, TransportError
from atoll.optim.reduction.cells import Bytes
from atoll.peer.rounds import notices
from atoll.peer.rounds.allreduce.reduction import CellRefused, Norms, PartReceiver, batches
from atoll.peer.rounds.allreduce.sides import (
    CODES,
    LOST,
    ExchangeState,
    OwnedPart,
    Owner,
    PartLost,
    Receiver,
    Sender,
)
from atoll.peer.rounds.allreduce.sums import RowReducer, TreeReducer
from atoll.peer.rounds.conduct import Fault
from atoll.peer.rounds.messages import ALIVE, CELL, PACED_BYTES, PartDone, PartPlan, Reduce
from atoll.peer.rounds.policies import num_rows

# Cells a member from which on the cells go round: each fast link then owns at least one, and only
# slow links own none.
GO_ROUND = 2
LOOKS = 4  # per keepalive interval, because at an owner one deadline follows from another
LATE_STALLS = 0.5  # that members have to send to the owner, once their row's sums have ended
# Of the deadline. Relays wait less for slow senders than owners do for relays, and owners less for
# relays than for their own row's senders. If a relay waited as long as an owner, the owner would
# give up the whole row at the moment at which the relay gives up one slow member.
MEMBERS_SHARE, ROWS_SHARE = 0.25, 0.375


@dataclass(frozen=True)
class Rows:
    """The rows of a group, and the relays of each part."""

    of: tuple[int, ...]
    """the row of each member"""
    members: tuple[tuple[int, ...], ...]
    """of each row"""
    relays: tuple[tuple[int, ...], ...]
    """of each part, one a row; its owner for the owner's row"""

    def relay(self, part: int, member: int) -> int:
        """Return the member to which a member sends a part; itself if it relays or owns it."""
        return self.relays[part][self.of[member]]

    def passed(self, owner: int) -> dict[int, tuple[int, ...]]:
        """Return the rows whose sums an owner takes, with their members."""
        return {row: members for row, members in enumerate(self.members) if row != self.of[owner]}


def rows_of(members: int, parts: Sequence[PartPlan]) -> Rows:
    """Divide a group into rows, and choose the relays of each part."""
    count = num_rows(members)
    rows = tuple(tuple(range(row, members, count)) for row in range(count))
    of = tuple(member % count for member in range(members))
    owned = [0] * members
    for plan in parts:
        owned[plan.owner] += plan.stop_cell - plan.start_cell
    by_row = [_relays(row, parts, owned) for row in rows]
    relays = tuple(zip(*by_row, strict=True))
    return Rows(of=of, members=rows, relays=relays)


def _relays(row: Sequence[int], parts: Sequence[PartPlan], owned: Sequence[int]) -> list[int]:
    """Choose one of a row for each part, in proportion to the cells that its members own.

    A slow link owns few cells or none, so it relays few or none. If the cells do not go round, a
    member that owns none may have a fast link: then all relay alike.
    """
    rate = {member: owned[member] for member in row}
    if sum(owned) < GO_ROUND * len(owned) or not any(rate.values()):
        rate = dict.fromkeys(row, 1)
    size = sum(owned) / len(parts)
    loads = [((owned[member] + size) / rate[member], member) for member in row if rate[member]]
    heapify(loads)
    relays = []
    for plan in parts:
        relay = plan.owner
        if relay not in rate:
            load, relay = loads[0]
            cells = plan.stop_cell - plan.start_cell
            heapreplace(loads, (load + cells / rate[relay], relay))
        relays.append(relay)
    return relays


@dataclass(kw_only=True)
class RelayedPart(OwnedPart):
    """A part that this peer adds up for its row; its results come from the owner."""

    alive_s: float
    came_back: list[Bytes] = field(default_factory=list)
    final: PartDone | None = None
    lost: str = ""
    """why no more results will come"""

    @property
    def results(self) -> Sequence[Bytes]:
        """The results so far, as the owner sent them."""
        return self.came_back

    def check(self) -> None:
        """Raise `Refused` if the relay has lost the owner."""
        if self.lost:
            raise Refused(RefusalCode.OWNER_LOST, f"the relay lost the owner: {self.lost}")

    async def result(self, part: int, generation: int) -> PartDone:
        """Return the owner's report, which comes after the last of its results."""
        while self.final is None:
            self.check()
            await self.await_change(self.alive_s)
        return self.final

    async def await_sums(self, sent: int) -> bool:
        """Wait for more sums than were sent, or a change; False if neither came in time."""
        return len(self.reducer.frames) > sent or await self.await_change(self.alive_s)


@dataclass(kw_only=True)
class TreePart(OwnedPart):
    """A part that this peer owns: its row's members send cells, the other rows' relays sums."""

    tree: TreeReducer
    """the reducer"""
    relays: dict[int, int]
    """by row: the relay that has not opened its stream yet"""
    late_s: float
    rows_by: float
    """the deadline of sums, on the context's clock"""
    ended: set[int] = field(default_factory=set)
    """members of other rows whose own stream is over"""
    due: dict[int, float] = field(default_factory=dict)
    """by member that is in no more sums: the deadline to open its own stream"""

    async def add_sums(self, row: int, message: memoryview) -> None:
        """Add sums of a row; raise `CellRefused` if they are impossible."""
        async with self.lock:
            await self._do(partial(self._add_sums, row, message))

    async def dissolve(self, row: int) -> None:
        """Expect no more sums of a row: its members send their cells themselves."""
        self.relays.pop(row, None)
        async with self.lock:
            await self._do(partial(self._dissolve, row))
        await self.notify()

    async def silent(self, now: float, connect_by: float, gone: Collection[int]) -> set[int]:
        """Return members to wait for no longer; dissolve rows whose relay is late or gone."""
        for row, relay in list(self.relays.items()):
            if relay in gone or now >= connect_by:
                self.ended.add(relay)  # a relay that opens no stream for sums opens none for cells
                await self.dissolve(row)
        if now >= self.rows_by:
            await self._dissolve_all()
        alone = self.tree.alone()
        for member in alone - self.came:
            self.due.setdefault(member, max(connect_by, now + self.late_s))
        late = {m for m in alone - self.came if m in gone or now >= self.due[m]}
        return late | (alone & self.ended) | await super().silent(now, connect_by, gone)

    async def await_end(self, timeout_s: float) -> None:
        """Wait as `OwnedPart` does, but look more often."""
        await super().await_end(timeout_s / LOOKS)

    async def give_up(self) -> set[int]:
        """Dissolve all rows, and return the members whose cells are missing."""
        await self._dissolve_all()
        return self.tree.waiting_for

    def to_leave_out(self, members: Iterable[int]) -> Iterable[int]:
        """Return the members that are missing, but none that its row's sums may still hold."""
        left_out = set(members)
        self.ended |= left_out
        left_out &= self.reducer.waiting_for
        return sorted(m for m in left_out if not self.tree.is_covered(m))

    async def _dissolve_all(self) -> None:
        for row in self.tree.open_rows:
            await self.dissolve(row)

    def _add_sums(self, row: int, message: memoryview) -> None:
        self.tree.add_sums(row, message)
        self.tree.advance()

    def _dissolve(self, row: int) -> None:
        self.tree.dissolve(row)
        self.tree.advance()


class RowReduction:
    """A member's relaying in a group of rows, besides owning and sending: it relays and is relayed.

    It handles generation 0 of a part; a repaired part goes from all members to its new owner.
    """

    def __init__(self, rows: Rows, state: ExchangeState, owner: Owner, sender: Sender) -> None:
        self._rows = rows
        self._state = state
        self._owner = owner
        self._sender = sender
        self._relay_norms = Norms()
        self._gone: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)
        """by member: set once it is gone"""

    def gone(self, member: int) -> None:
        """Give up the exchanges with a relay that is gone: those parts go to their owners."""
        self._gone[member].set()

    # as the owner of a part

    def make_part(self, part: int) -> OwnedPart:
        """Return a part of this owner, which waits for its row's cells and the others' sums."""
        state, passed = self._state, self._rows.passed(self._state.me)
        reducer = TreeReducer(
            rows=passed,
            part=state.range_of(part),
            shares=state.shares(),
            norms=self._owner.norms(0),
            room=state.take_room(part),
        )
        return TreePart(
            reducer=reducer,
            tree=reducer,
            compute=state.ctx.compute,
            waiting=self._expect_row(reducer),
            relays={row: self._rows.relays[part][row] for row in passed},
            late_s=LATE_STALLS * state.group.stall_s,
            rows_by=state.ctx.now() + ROWS_SHARE * state.group.deadline_s,
        )

    def _expect_row(self, reducer: RowReducer | TreeReducer) -> set[int]:
        """Return the members of this peer's row that send it their cells; drop banned ones."""
        row, barred = self._my_row(), self._owner.barred()
        counted = {m for m in row if self._state.group.members[m].weight > 0}
        for member in counted & barred:
            reducer.drop(member)
        return counted - barred - {self._state.me}

    def _my_row(self) -> tuple[int, ...]:
        return self._rows.members[self._rows.of[self._state.me]]

    async def serve(self, remote: str, head: Reduce, stream: Stream) -> None:
        """Take a relay's sums of one part, and send it the results."""
        owned, member = await self._owner.await_part(head), self._state.member(remote)
        row = self._rows.of[member]
        if not isinstance(owned, TreePart) or owned.relays.get(row) != member:
            raise Refused(
                RefusalCode.NOT_THE_RELAY, f"no sums of {short(remote)} are expected here"
            )
        del owned.relays[row]
        try:
            await together(
                self._receive_sums(owned, row, stream),
                self._owner.send_results(owned, head, stream),
            )
        finally:
            if row in owned.tree.open_rows:
                await owned.dissolve(row)

    async def _receive_sums(self, owned: TreePart, row: int, stream: Stream) -> None:
        try:
            while row in owned.tree.open_rows:
                message = await stream.recv(timeout_s=self._state.group.stall_s)
                if message is None:
                    raise PeerUnreachable("the stream ended before the sums were complete")
                if message[:1] not in (ALIVE, CELL):
                    raise CellRefused(f"expected sums, got a message of kind {message[:1]!r}")
                if message != ALIVE:
                    await owned.add_sums(row, memoryview(message)[1:])
            if owned.tree.is_dissolved(row):
                raise Refused(
                    RefusalCode.LATE_SUMS, "sums are late; the row's members send to the owner"
                )
        except Refused:
            raise
        except TransportError as error:
            await self._lose_row(owned, row, stream.remote, str(error))
        except CellRefused as error:
            await self._lose_row(owned, row, stream.remote, str(error))
            self._state.ctx.fault(stream.remote, Fault.BAD_SUM)
            raise Refused(RefusalCode.BAD_SUM, str(error)) from None

    async def _lose_row(self, owned: TreePart, row: int, relay: str, why: str) -> None:
        lost = notices.row_lost(round=self._state.round, row=row, peer=relay, reason=why)
        self._state.log(lost)
        await owned.dissolve(row)

    # as a member of a row, and as its relay

    async def get(self, owner: str, part: int) -> bool:
        """Exchange a part by its relay; return False if it has to go to its owner instead."""
        relay = self._rows.relay(part, self._state.me)
        name = self._state.peer(relay)
        if name == owner:
            return False
        try:
            if relay == self._state.me:
                await self._relay(owner, part)
            else:
                await self._exchange_with(relay, part)
        except LOST as error:
            failed = notices.relay_failed(
                round=self._state.round, part=part, peer=name, reason=str(error)
            )
            self._state.log(failed)
            return False
        return True

    async def _exchange_with(self, relay: int, part: int) -> None:
        gone = self._gone[relay]

        async def lose_relay() -> None:
            await gone.wait()
            raise PartLost("its relay is gone")

        if gone.is_set():
            await lose_relay()
        exchange = self._sender.exchange(self._state.peer(relay), part, 0)
        await race(exchange, lose_relay(), expected=LOST)

    async def _relay(self, owner: str, part: int) -> None:
        """Add up the row's cells, send the sums, and pass the results back."""
        owned = self._make_relayed(part)
        self._owner.parts[part, 0] = owned
        try:
            stream = await self._sender.open(owner)
            try:
                async with beside(
                    self._owner.add_own(owned, part),
                    self._owner.await_senders(owned, MEMBERS_SHARE),
                    self._send_sums(owned, stream, part),
                ):
                    pass_back = partial(self._pass_back, owned)
                    await self._sender.collect(stream, part, 0, asyncio.Queue(), pass_back)
                    owned.final = self._state.parts[part]
            finally:
                await stream.close()
        except LOST as error:
            owned.lost = str(error)
            raise
        finally:
            await owned.notify()

    def _make_relayed(self, part: int) -> RelayedPart:
        state, row = self._state, self._my_row()
        reducer = RowReducer(
            row=row,
            part=state.range_of(part),
            shares={m: share for m, share in state.shares().items() if m in row},
            norms=self._relay_norms,
        )
        return RelayedPart(
            reducer=reducer,
            compute=state.ctx.compute,
            waiting=self._expect_row(reducer),
            alive_s=state.ctx.alive_s,
        )

    async def _send_sums(self, owned: RelayedPart, stream: Stream, part: int) -> None:
        await self._sender.send_head(stream, part, 0, sums=True)
        sent = number = 0
        while sent < owned.reducer.num_frames:
            frames = owned.reducer.frames[sent:]
            messages = batches(frames, PACED_BYTES)
            number = await self._state.send_paced(stream, messages, number, CODES)
            sent += len(frames)
            if not frames and not await owned.await_sums(sent):
                await stream.send(ALIVE, timeout_s=self._state.group.stall_s)
        self._state.note_sent(part)

    async def _pass_back(self, owned: RelayedPart, receiver: Receiver) -> None:
        if isinstance(receiver, PartReceiver):
            owned.came_back = receiver.frames
            await owned.notify()
