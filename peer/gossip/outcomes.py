"""What became of meetings: who asked for one decides, and tells who is in doubt."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import Literal

from atoll.dht.transport import TransportError
from atoll.optim.log.entry import LogError
from atoll.peer.gossip.context import GossipContext
from atoll.peer.gossip.messages import Outcome, Question, Terms
from atoll.peer.rounds.guard import guarded_call

DOUBT_STALLS = 20.0  # how long a partner is asked what became of a meeting
KEPT_IDS = 256  # of meetings that were decided here

Known = Literal["committed", "not committed", "unknown"]


class Outcomes:
    """The meetings that this peer decided."""

    def __init__(self, ctx: GossipContext) -> None:
        """None yet."""
        self._ctx = ctx
        self._committed: deque[bytes] = deque(maxlen=KEPT_IDS)
        self.deciding: bytes | None = None
        """the one in progress"""

    def serve(self) -> None:
        """Answer from now on."""
        handler = guarded_call(self._serve, self._ctx.fault)
        self._ctx.transport.serve("gossip-outcome", handler)

    def commit(self, name: bytes) -> None:
        """A meeting is committed; what was not never was."""
        self._committed.append(name)

    async def _serve(self, remote: str, body: bytes) -> bytes:
        question = Question.decode(body)
        committed = question.exchange in self._committed
        pending = question.exchange == self.deciding and not committed
        return Outcome(
            incarnation=self._ctx.me.incarnation,
            decided="committed" if committed else "pending" if pending else "not committed",
        ).encode()

    async def ask(self, partner: str, terms: Terms) -> Known:
        """Ask until it is known whether a meeting was committed, or nobody can tell any more."""
        stall_s, now = self._ctx.settings.stall_s, self._ctx.now
        until = now() + DOUBT_STALLS * stall_s
        question = Question(exchange=terms.exchange).encode()
        while now() < until:
            with suppress(TransportError, LogError):
                reply = await self._ctx.transport.call(
                    partner, "gossip-outcome", question, timeout_s=stall_s
                )
                told = Outcome.decode(reply)
                if told.incarnation != terms.incarnation:
                    return "unknown"
                if told.decided != "pending":
                    return told.decided
            await asyncio.sleep(stall_s / 4)
        return "unknown"
