"""A member's side of one term: report to the leader, reduce, and stay until it is decided."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from atoll.dht.tasks import beside
from atoll.dht.transport import Stream
from atoll.optim.log.entry import MalformedRecord
from atoll.peer.rounds.allreduce.exchange import Exchange, exchange_of
from atoll.peer.rounds.allreduce.upfront import begin_upfront
from atoll.peer.rounds.consensus.closing import Seat, group_of
from atoll.peer.rounds.context import Context
from atoll.peer.rounds.messages import (
    ALIVE,
    GONE,
    GROUP,
    PART_DONE,
    READY,
    REPAIR,
    SEATED,
    Closed,
    Gone,
    Group,
    Ready,
    Repair,
    Seated,
    tagged,
)

CONNECT_STALLS = 3  # a first contact with a leader may have to dial


class AttemptFailed(Exception):  # noqa: N818
    """This term decides nothing; the next leader tries."""


async def join(
    ctx: Context,
    stream: Stream,
    ready: Ready,
    codes: Sequence[bytes],
    on_exchange: Callable[[Exchange], None],
) -> None:
    """Take part until the position is decided (the caller cancels) or the leader is lost.

    Raises:
        AttemptFailed: the leader died, fell silent, or broke the rules.
        Refused: the leader said no, and why.
    """

    def begin(group: Group) -> Exchange:
        exchange = exchange_of(ctx, group, codes if group_weight(ctx, group) else (), upfront)
        on_exchange(exchange)
        return exchange

    await stream.send(tagged(READY, ready), timeout_s=ctx.settings.stall_s)
    upfront = begin_upfront(ctx, ready, codes)
    try:
        async with beside(_send_alive(ctx, stream)), Seat(ctx, ready, stream.remote, begin) as seat:
            async with beside(_send_reports(ctx, stream, seat)):
                await _follow_orders(ctx, stream, seat)
    except MalformedRecord as error:
        raise AttemptFailed(f"the leader sent what no leader sends: {error}") from error
    finally:
        if upfront is not None:
            await upfront.close()
        await stream.close()


def group_weight(ctx: Context, group: Group) -> float:
    """The weight that the leader gave to this peer."""
    return next((m.weight for m in group.members if m.peer_id == ctx.me.peer_id), 0.0)


async def _follow_orders(ctx: Context, stream: Stream, seat: Seat) -> None:
    while True:
        message = await _recv(ctx, stream)
        if message[:1] == GROUP:
            closed = Closed.decode(message[1:])
            seat.take(closed, group_of(closed), passed=False)
        elif message[:1] == REPAIR:
            seat.order(Repair.decode(message[1:]))
        elif message[:1] == GONE:
            seat.order(Gone.decode(message[1:]))


async def _send_reports(ctx: Context, stream: Stream, seat: Seat) -> None:
    exchange = await seat.begun()
    if seat.was_passed:
        seated = Seated(group=exchange.digest)
        await stream.send(tagged(SEATED, seated), timeout_s=ctx.settings.stall_s)
    while True:
        done = await exchange.reports.get()
        await stream.send(tagged(PART_DONE, done), timeout_s=ctx.settings.stall_s)


async def _send_alive(ctx: Context, stream: Stream) -> None:
    while True:
        await asyncio.sleep(ctx.alive_s)
        await stream.send(ALIVE, timeout_s=ctx.settings.stall_s)


async def _recv(ctx: Context, stream: Stream) -> bytes:
    message = await stream.recv(timeout_s=ctx.settings.stall_s)
    if message is None:
        raise AttemptFailed("the leader ended the session before the position was decided")
    return message
