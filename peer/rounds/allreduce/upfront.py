"""Eager send: codes leave before the group closes.

A member that has reported waits for the group: for stragglers, and for a round trip at least. Its
codes need not wait. The parts of a position are expected to be those of the last entry of its
fragment, with the same owners, and every peer knows them from the log. The codes go to these owners
at once; an owner keeps them, as bytes, until the group gives their weights. If the leader cuts the
parts differently, the codes are forgotten and sent again as the group requires.
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

SEND_STALLS = 20  # for one message: the owner reads it at once, but may have a slow link


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


def begin_upfront(ctx: Context, ready: Ready, codes: Sequence[bytes]) -> UpfrontCodes | None:
    """Begin to send a contribution to its expected owners; return None if that is useless."""
    plan = expected_plan(ctx, ready.position)
    if plan is None or not ready.weight or ready.term:
        return None
    if not {part.owner for part in plan.parts} <= _known(ctx) | {ctx.me.peer_id}:
        return None
    return UpfrontCodes(ctx, plan, codes, ready.norm)


class UpfrontCodes:
    """One contribution on its way to the owners of a plan.

    Owners are served in turn, beginning with this peer's successor, so that all do not send to the
    same owner first.
    """

    def __init__(self, ctx: Context, plan: Plan, codes: Sequence[bytes], norm: float) -> None:
        """Begin to send.

        Args:
            ctx: the sender's.
            plan: the expected parts and their owners.
            codes: a frame for each cell of the position.
            norm: declared for the contribution; owners tell contributions apart by it.
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
        """Return the stream of a part's codes; None if its owner was not reached."""
        opened = self._streams.get(part)
        return await asyncio.shield(opened) if opened is not None else None

    async def sent(self, part: int) -> None:
        """Wait until a part's codes have left, or could not leave."""
        await asyncio.wait({self._sends[part]})

    async def close(self) -> None:
        """End all sends and streams."""
        await end(*self._sends.values(), self._ending)
        self._watch.close()
        for opened in self._streams.values():
            stream = opened.result() if opened.done() else None
            if stream is not None:
                await stream.close()

    async def _end_watch(self) -> None:
        # Codes that have left make no load: the link is not measured while the group is awaited.
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
        with suppress(TransportError):  # the reader of the owner's answers gets the same error
            await stream.send(tagged(UPFRONT, head), timeout_s=stall_s)
            await send_paced(self._ctx, stream, batches(frames, PACED_BYTES), 0, bulk)

    def _turn(self, owner: str) -> int:
        owners = sorted({part.owner for part in self._plan.parts})
        return (owners.index(owner) - bisect(owners, self._ctx.me.peer_id)) % len(owners)


def check_upfront(ctx: Context, remote: str, head: Upfront) -> int:
    """Return how many bytes of a peer's codes an owner keeps.

    Raises:
        Refused: they fit no group that is expected here; the sender sends them again.
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
    # Codes are kept in memory before any group names their sender, so strangers' are refused.
    return {*ctx.seen, *(elector.peer_id for elector in ctx.replica.electorate)}


def not_upfront(position: int) -> Refused:
    """Return the refusal of codes that do not fit the group."""
    return Refused(
        RefusalCode.NOT_UPFRONT,
        f"round {position + 1} has other parts or owners; send again when its group is closed",
    )


def most_bytes(cells: Cells, part: PlannedPart) -> int:
    """Return the most bytes that a member sends of a part, with a byte of kind a message."""
    frames = [cells.max_sent_bytes(index) for index in range(part.start_cell, part.stop_cell)]
    messages = sum(1 + frame // PACED_BYTES for frame in frames)
    return sum(LENGTH.size + frame for frame in frames) + messages


@dataclass(frozen=True)
class _Failed:
    error: TransportError


class HeldStream:
    """A `Stream` whose messages are read from the start and handed out later."""

    def __init__(self, stream: Stream, limit: int, stall_s: float) -> None:
        """Begin to read, at most `limit` bytes in all."""
        self.remote, self.method = stream.remote, stream.method
        self._stream = stream
        self._limit = limit
        self._stall_s = stall_s
        self._messages: asyncio.Queue[bytes | _Failed | None] = asyncio.Queue()
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
        message: bytes | _Failed | None = ALIVE
        while isinstance(message, bytes):
            try:
                message = await self._stream.recv(timeout_s=self._stall_s)
            except DeadlineExceeded:  # the sender has nothing to send while the group is awaited
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
        """Send at once."""
        await self._stream.send(data, timeout_s=timeout_s)

    async def recv(self, *, timeout_s: float) -> bytes | None:
        """Return the next message, from those that were kept first."""
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
