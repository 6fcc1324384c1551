"""The reduction of a large group: members send to relays of their row, relays send sums to owners.

Who relays what is in ``rows``, the arithmetic in ``sums``.  A relay sends the sums of a part on one
stream, gets the results on it, and passes them on to its row, which checks the bytes against what
is certified in the end.  Where a relay is gone, silent, or cut off, its row goes to the owner as in
a small group; so does everyone once a part has a new owner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from atoll.compression import CodecError
from atoll.coordinator.run.levels import Level
from atoll.dht.identity import short
from atoll.dht.refusals import RefusalCode
from atoll.dht.tasks import beside, end, together
from atoll.dht.transport import PeerUnreachable, Refused, Stream, TransportError
from atoll.optim.log.entry import MalformedRecord
from atoll.optim.reduction.lowrank import LowRankCells
from atoll.peer.rounds.allreduce.exchange import Exchange, PartLost
from atoll.peer.rounds.allreduce.factors import FactorReceiver
from atoll.peer.rounds.allreduce.owned import OwnedPart
from atoll.peer.rounds.allreduce.reduction import CellRefused, Norms, PartReceiver, batches
from atoll.peer.rounds.allreduce.relays import (
    LATE_STALLS,
    MEMBERS_SHARE,
    ROWS_SHARE,
    RelayedPart,
    TreePart,
)
from atoll.peer.rounds.allreduce.rows import rows_of
from atoll.peer.rounds.allreduce.sending import CODES
from atoll.peer.rounds.allreduce.sums import RowReducer, TreeReducer
from atoll.peer.rounds.allreduce.upfront import UpfrontCodes, not_upfront
from atoll.peer.rounds.conduct import Fault
from atoll.peer.rounds.context import Context
from atoll.peer.rounds.messages import (
    ALIVE,
    CELL,
    PACED_BYTES,
    REDUCE,
    Group,
    Reduce,
    Upfront,
    tagged,
)
from atoll.peer.rounds.policies import is_relayed

LOST = (TransportError, CodecError, MalformedRecord, CellRefused, PartLost)


def exchange_of(
    ctx: Context, group: Group, codes: Sequence[bytes], upfront: UpfrontCodes | None
) -> Exchange:
    """The reduction of a group: by rows where that is worth it, and its update is a sum.

    A robust rule needs every member's cells at one place; gathered frames and factors have no sum.
    """
    cells = ctx.replay.cells_at(group.position)
    has_sum = not (ctx.rule or cells.gathers or isinstance(cells, LowRankCells))
    if has_sum and is_relayed(len(group.members), cells.numel, sum(cells.sizes)):
        return TreeExchange(ctx, group, codes)
    return Exchange(ctx, group, codes, upfront)


class TreeExchange(Exchange):
    """One group's reduction in rows, from one member's place."""

    def __init__(self, ctx: Context, group: Group, codes: Sequence[bytes]) -> None:
        """See `Exchange`."""
        self.rows = rows_of(len(group.members), group.parts)
        self._relayed: dict[int, RelayedPart] = {}
        self._relay_norms = Norms()
        self._attempts: dict[int, tuple[int, asyncio.Task[None]]] = {}
        """by part: whom it is got from, and how that goes"""
        super().__init__(ctx, group, codes)

    def gone(self, member: int) -> None:
        """See `Exchange`; what was to come by a relay that is gone comes from the owner."""
        super().gone(member)
        for relay, attempt in self._attempts.values():
            if relay == member:
                attempt.cancel()

    def takes_upfront(self, remote: str, head: Upfront) -> Reduce:
        """See `Exchange`; the group before was small, this one is not."""
        raise not_upfront(head.position)

    async def serve(self, remote: str, head: Reduce, stream: Stream) -> None:
        """See `Exchange`."""
        if not head.sums:
            return await super().serve(remote, head, stream)
        owned, member = await self._await_owned(head), self._member(remote)
        row = self.rows.of[member]
        if not isinstance(owned, TreePart) or owned.relays.get(row) != member:
            raise Refused(
                RefusalCode.NOT_THE_RELAY, f"no sums of {short(remote)} are expected here"
            )
        del owned.relays[row]
        try:
            await together(
                self._receive_sums(owned, row, stream), self._send_results(owned, head, stream)
            )
        finally:
            if row in owned.tree.open_rows:
                await owned.dissolve(row)

    # the owner

    def _own(self, part: int, generation: int, senders: Collection[int]) -> OwnedPart:
        if generation:
            return super()._own(part, generation, senders)
        shares, passed = self._shares(), self.rows.passed(self.me)
        reducer = TreeReducer(
            rows=passed,
            part=self.range_of(part),
            shares=shares,
            norms=self._norms.setdefault(generation, Norms()),
            out_N=self._rooms.pop(part, None),
        )
        return TreePart(
            reducer=reducer,
            tree=reducer,
            compute=self._ctx.compute,
            waiting=self._expect_row(reducer),
            relays={row: self.rows.relays[part][row] for row in passed},
            late_s=LATE_STALLS * self.group.stall_s,
            rows_by=self._ctx.now() + ROWS_SHARE * self.group.deadline_s,
        )

    def _expect_row(self, reducer: RowReducer | TreeReducer) -> set[int]:
        """Members of this peer's row that are to send it their cells; it takes no others'."""
        row = self.rows.members[self.rows.of[self.me]]
        counted = {m for m in row if self.group.members[m].weight > 0}
        for member in counted & self._barred():
            reducer.drop(member)
        return counted - self._barred() - {self.me}

    async def _receive_sums(self, owned: TreePart, row: int, stream: Stream) -> None:
        try:
            while row in owned.tree.open_rows:
                message = await stream.recv(timeout_s=self.group.stall_s)
                if message is None:
                    raise PeerUnreachable("the stream ended before the sums were complete")
                if message[:1] not in (ALIVE, CELL):
                    raise CellRefused(f"expected sums, got a message of kind {message[:1]!r}")
                if message != ALIVE:
                    await owned.add_sums(row, memoryview(message)[1:])
            if owned.tree.is_dissolved(row):
                raise Refused(
                    RefusalCode.LATE_SUMS, "the members of the row are to come by themselves"
                )
        except Refused:
            raise
        except TransportError as error:
            await self._lose_row(owned, row, stream.remote, str(error))
        except CellRefused as error:
            await self._lose_row(owned, row, stream.remote, str(error))
            self._ctx.fault(stream.remote, Fault.BAD_SUM)
            raise Refused(RefusalCode.BAD_SUM, str(error)) from None

    async def _lose_row(self, owned: TreePart, row: int, relay: str, why: str) -> None:
        self._watch.disturbed = True
        text = (
            f"round {self.group.position + 1}: no more sums of row {row} by {short(relay)}: {why}"
        )
        self._ctx.on_event("warning", text)
        await owned.dissolve(row)

    async def _drop(
        self, owned: OwnedPart, *members: int, reason: str, level: Level = "warning"
    ) -> None:
        """See `Exchange`; who may still come in its row's sums is not left out."""
        left_out = set(members)
        if isinstance(owned, TreePart):
            owned.ended |= left_out
            left_out &= owned.reducer.waiting_for
            left_out -= {m for m in left_out if owned.tree.is_covered(m)}
        await super()._drop(owned, *sorted(left_out), reason=reason, level=level)

    # a relay, and the members of its row

    async def _exchange_with(self, owner: str, part: int, generation: int) -> None:
        relay = self.rows.relay(part, self.me)
        name = self.group.members[relay].peer_id
        if generation == 0 and name != owner:
            try:
                return await self._by_row(relay, owner, part)
            except LOST as error:
                self._watch.disturbed = True
                text = f"round {self.group.position + 1}: part {part} not by {short(name)}: {error}"
                self._ctx.on_event("warning", text)
        await super()._exchange_with(owner, part, generation)

    async def _by_row(self, relay: int, owner: str, part: int) -> None:
        if relay == self.me:
            return await self._relay(owner, part)
        if relay in self._gone:
            raise PartLost("its relay is gone")
        name = self.group.members[relay].peer_id
        attempt = asyncio.create_task(super()._exchange_with(name, part, 0))
        self._attempts[part] = relay, attempt
        try:
            await asyncio.wait({attempt})
        finally:
            del self._attempts[part]
            if not attempt.done():
                await end(attempt)
        if attempt.cancelled():
            raise PartLost("its relay is gone")
        attempt.result()

    async def _relay(self, owner: str, part: int) -> None:
        """Add up the row's cells, send the sums, and pass the results back."""
        owned = self._relayed[part] = self._owned_by_row(part)
        self._owned[part, 0] = owned
        try:
            stream = await self._open(owner)
            try:
                async with beside(
                    self._add_own(owned, part),
                    self._finish(owned, MEMBERS_SHARE),
                    self._send_sums(owned, stream, part),
                ):
                    await self._collect(stream, part, 0, asyncio.Queue())
                    owned.final = self.parts[part]
            finally:
                await stream.close()
        except LOST as error:
            owned.lost = str(error)
            raise
        finally:
            await owned.notify()

    def _owned_by_row(self, part: int) -> RelayedPart:
        row = self.rows.members[self.rows.of[self.me]]
        reducer = RowReducer(
            row=row,
            part=self.range_of(part),
            shares={m: share for m, share in self._shares().items() if m in row},
            norms=self._relay_norms,
        )
        return RelayedPart(
            reducer=reducer,
            compute=self._ctx.compute,
            waiting=self._expect_row(reducer),
            alive_s=self._ctx.alive_s,
        )

    async def _send_sums(self, owned: RelayedPart, stream: Stream, part: int) -> None:
        head = Reduce(
            position=self.group.position, group=self.digest, part=part, generation=0, sums=True
        )
        await stream.send(tagged(REDUCE, head), timeout_s=self.group.stall_s)
        sent = number = 0
        while sent < owned.reducer.num_frames:
            frames = owned.reducer.frames[sent:]
            messages = batches(frames, PACED_BYTES)
            await self._send_paced(stream, messages, number, CODES)
            sent, number = sent + len(frames), number + len(messages)
            if not frames and not await owned.await_sums(sent):
                await stream.send(ALIVE, timeout_s=self.group.stall_s)
        self._unsent.discard(part)
        self._note_sent()

    async def _pass_back(self, part: int, receiver: PartReceiver | FactorReceiver) -> None:
        relayed = self._relayed.get(part)
        if relayed is not None and relayed.final is None and isinstance(receiver, PartReceiver):
            relayed.came_back = receiver.frames
            await relayed.notify()
