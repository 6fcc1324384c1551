"""Bulk messages of a round, sent in their turns."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

from atoll.dht.transport import Stream
from atoll.peer.rounds.context import Context
from atoll.peer.rounds.messages import ALIVE, CELL

CODES, RESULTS = 0, 1  # what goes first


@dataclass(frozen=True, kw_only=True)
class Bulk:
    """What orders the messages to one receiver, and how long each may take."""

    position: int
    leg: int
    """``CODES`` or ``RESULTS``"""
    turn: int
    """receivers get theirs in turn, each peer beginning with its successor"""
    timeout_s: float


async def send_paced(
    ctx: Context, stream: Stream, messages: Collection[bytes], first: int, bulk: Bulk
) -> None:
    """Send messages when the pacer lets them go, with signs of life while they wait.

    Args:
        ctx: this peer's.
        stream: to whom.
        messages: what.
        first: number of the first message on this stream.
        bulk: what they are.
    """
    for number, message in enumerate(messages, first):
        order = (bulk.position, bulk.leg, number, bulk.turn)
        turn = ctx.link.pacer.turn(len(message), order)
        try:
            while not turn.done():
                await asyncio.wait({turn}, timeout=ctx.alive_s)
                if not turn.done():
                    await stream.send(ALIVE, timeout_s=ctx.settings.stall_s)
        finally:
            turn.cancel()
        await stream.send(CELL + message, timeout_s=bulk.timeout_s)
