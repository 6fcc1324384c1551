"""Codes that leave before the group closes.

Who reports ready waits for the group: for stragglers, and at least for a round trip.  Its codes
need not wait.  The parts of a position are expected to be those of the last entry of its fragment,
with the same owners, which every peer knows by the log.  Codes go to these owners at once, and an
owner keeps them, as bytes, until the group says what they weigh.  Where the leader cuts the parts
anew they are forgotten, and sent again as the group says.
"""

from __future__ import annotations

import asyncio
from bisect import bisect
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from atoll.dht.refusals import RefusalCode
from atoll.dht.tasks import end
from atoll.dht.transport import DeadlineExceeded, Refused, Stream, TransportError
from atoll.optim.reduction.cells import LENGTH, Cells, pack
from atoll.optim.reduction.lowrank import LowRankCells
from atoll.peer.rounds.allreduce.reduction import batches
from atoll.peer.rounds.allreduce.state import CODES, Bulk, send_paced
from atoll.peer.rounds.context import Context
from atoll.peer.rounds.messages import (
    ALIVE,
    PACED_BYTES,
    UPFRONT,
    Group,
    Plan,
    PlannedPart,
    Ready,
    Upfront,
    planned_parts,
    tagged,
)

SEND_STALLS = 20  # for one message to an owner that is there, but may be on a slow link


def plan_of(group: Group) -> Plan:
    """How a group cuts its position."""
    parts = planned_parts(group.parts, group.members)
    return Plan(epoch=group.epoch, position=group.position, parts=parts)


def expected_plan(ctx: Context, position: int) -> Plan | None:
    """How a position will be cut if nothing changes; None where that is not known."""
    parts = ctx.last_parts.get(ctx.replay.fragment_at(position))
    if parts is None or isinstance(ctx.replay.cells_at(position), LowRankCells):
        return None
    return Plan(epoch=ctx.replica.epoch, position=position, parts=parts)


def begin_upfront(ctx: Context, ready: Ready, codes: Sequence[bytes]) -> UpfrontCodes | None:
    """Send a contribution to its expected owners; None where that would be in vain."""
    plan = expected_plan(ctx, ready.position)
    if plan is None or not ready.weight or ready.term:
        return None
    if not {part.owner for part in plan.parts} <= _known(ctx) | {ctx.me.peer_id}:
        return None
    return UpfrontCodes(ctx, plan, codes, ready.norm)


class UpfrontCodes:
    """One contribution on its way to the owners of a plan."""

    def __init__(self, ctx: Context, plan: Plan, codes: Sequence[bytes], norm: float) -> None:
        """Begin to send.

        Args:
            ctx: the sender's.
            plan: whom to send what.
            codes: a frame for each cell of the position.
            norm: declared for the contribution; it names the one that the codes are of.
        """
        self._ctx = ctx
        self._plan = plan
        self._codes = codes
        self._norm = norm
        self.digest = plan.digest
        me = ctx.me.peer_id
        others = [index for index, part in enumerate(plan.parts) if part.owner != me]
        loop = asyncio.get_running_loop()
        self._streams: dict[int, asyncio.Future[Stream | None]] = {
            index: loop.create_future() for index in others
        }
        self._sends = {index: asyncio.create_task(self._send(index)) for index in others}
        self._watch = ctx.link.watch(ctx.transport)
        self._ending = asyncio.create_task(self._end_watch())

    async def stream(self, part: int) -> Stream | None:
        """The stream that a part's codes go by; None where its owner was not reached."""
        opened = self._streams.get(part)
        return await asyncio.shield(opened) if opened is not None else None

    async def sent(self, part: int) -> None:
        """Return when a part's codes have left, or could not."""
        await asyncio.wait({self._sends[part]})

    async def close(self) -> None:
        """End what is under way, and all streams."""
        await end(*self._sends.values(), self._ending)
        self._watch.close()
        for opened in self._streams.values():
            stream = opened.result() if opened.done() else None
            if stream is not None:
                await stream.close()

    async def _end_watch(self) -> None:
        """The link is read while codes leave, not while the group is waited for."""
        if self._sends:
            await asyncio.wait(self._sends.values())
        self._watch.pause()

    async def _send(self, index: int) -> None:
        part, opened = self._plan.parts[index], self._streams[index]
        stall_s = self._ctx.settings.stall_s
        try:
            stream = await self._ctx.transport.open(part.owner, "reduce", timeout_s=stall_s)
        except TransportError:
            opened.set_result(None)
            return
        opened.set_result(stream)
        head = Upfront(
            position=self._plan.position,
            plan=self.digest,
            part=index,
            norm=self._norm,
        )
        frames = [pack(frame) for frame in self._codes[part.start_cell : part.stop_cell]]
        bulk = Bulk(
            position=self._plan.position,
            leg=CODES,
            turn=self._turn(part.owner),
            timeout_s=SEND_STALLS * stall_s,
        )
        with suppress(TransportError):  # whoever reads the owner's answers learns of it
            await stream.send(tagged(UPFRONT, head), timeout_s=stall_s)
            await send_paced(self._ctx, stream, batches(frames, PACED_BYTES), 0, bulk)

    def _turn(self, owner: str) -> int:
        owners = sorted({part.owner for part in self._plan.parts})
        return (owners.index(owner) - bisect(owners, self._ctx.me.peer_id)) % len(owners)


def check_upfront(ctx: Context, remote: str, head: Upfront) -> int:
    """How many bytes of a peer's codes an owner keeps.

    Raises:
        Refused: they are of no use here; the sender keeps them for the group.
    """
    plan = expected_plan(ctx, head.position)
    if (
        plan is None
        or remote not in _known(ctx)
        or head.position < ctx.replica.position
        or plan.digest != head.plan
        or head.part >= len(plan.parts)
        or plan.parts[head.part].owner != ctx.me.peer_id
    ):
        raise not_upfront(head.position)
    return most_bytes(ctx.replay.cells_at(head.position), plan.parts[head.part])


def _known(ctx: Context) -> set[str]:
    """Peers of the roster, and electors."""
    return {*ctx.seen, *(elector.peer_id for elector in ctx.replica.electorate)}


def not_upfront(position: int) -> Refused:
    """The answer to codes that fit no group."""
    return Refused(
        RefusalCode.NOT_UPFRONT,
        f"round {position + 1} is not cut like that; send when it is closed",
    )


def most_bytes(cells: Cells, part: PlannedPart) -> int:
    """What a member sends of a part at most, each message with its kind."""
    frames = [cells.max_sent_bytes(index) for index in range(part.start_cell, part.stop_cell)]
    messages = sum(1 + frame // PACED_BYTES for frame in frames)
    return sum(LENGTH.size + frame for frame in frames) + messages


@dataclass(frozen=True)
class _Failed:
    error: TransportError


class HeldStream:
    """A stream whose messages are kept from the start, and read later; a `Stream`."""

    def __init__(self, stream: Stream, limit: int, stall_s: float) -> None:
        """Begin to read, at most ``limit`` bytes of cells in all."""
        self.remote, self.method = stream.remote, stream.method
        self._stream = stream
        self._limit = limit
        self._stall_s = stall_s
        self._messages: asyncio.Queue[bytes | _Failed | None] = asyncio.Queue()
        self._reading = asyncio.create_task(self._read())

    @property
    def ended(self) -> bool:
        """Whether `read_all` would return."""
        return self._reading.done()

    async def read_all(self) -> None:
        """Return when the other side has sent its last message, or the stream broke."""
        await asyncio.wait({self._reading})

    async def _read(self) -> None:
        held = 0
        message: bytes | _Failed | None = ALIVE
        while isinstance(message, bytes):
            try:
                message = await self._stream.recv(timeout_s=self._stall_s)
            except DeadlineExceeded:
                continue
            except TransportError as error:
                message = _Failed(error)
            held += len(message or b"") if isinstance(message, bytes) else 0
            if held > self._limit:
                message = _Failed(
                    Refused(RefusalCode.TOO_LONG, f"expected {self._limit} bytes at most")
                )
            self._messages.put_nowait(message)

    async def send(self, data: bytes | bytearray | memoryview, *, timeout_s: float) -> None:
        """As the stream's."""
        await self._stream.send(data, timeout_s=timeout_s)

    async def recv(self, *, timeout_s: float) -> bytes | None:
        """As the stream's, of what was kept first."""
        try:
            async with asyncio.timeout(timeout_s):
                message = await self._messages.get()
        except TimeoutError:
            raise DeadlineExceeded(
                f"nothing came for {timeout_s:.1f} s", peer=self.remote
            ) from None
        if isinstance(message, _Failed):
            raise message.error
        return message

    async def end(self, *, timeout_s: float) -> None:
        """As the stream's."""
        await self._stream.end(timeout_s=timeout_s)

    async def close(self) -> None:
        """Stop reading, and end both directions."""
        await self._stop()
        await self._stream.close()

    async def _stop(self) -> None:
        await end(self._reading)
        self._messages = asyncio.Queue()  # the frame of a cancelled task keeps this object

    async def __aenter__(self) -> Self:
        """The stream itself."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop reading; the stream stays open for a refusal."""
        await self._stop()
