"""Inviting a partner: the side that begins a meeting, and commits first."""

from __future__ import annotations

import asyncio
import os

from atoll.dht.transport import Stream
from atoll.optim.inprocess.gossip import Met
from atoll.peer.gossip.exchange import BROKEN, Exchange
from atoll.peer.gossip.place import ANSWERED_STALLS, Place, Round


class Asking:
    """Begins meetings."""

    def __init__(self, place: Place) -> None:
        """From where this peer stands."""
        self._place, self._ctx = place, place.ctx

    async def invite(self, here: Round, partner: str) -> Met | None:
        """Ask a partner, and meet it if it agrees; None where it comes to nothing."""
        name = os.urandom(16)
        self._place.meeting, self._place.outcomes.deciding = partner, name
        watch = self._ctx.link.watch(self._ctx.transport)
        try:
            timeout_s = ANSWERED_STALLS * self._ctx.settings.stall_s
            async with await self._ctx.transport.open(
                partner, "gossip", timeout_s=timeout_s
            ) as stream:
                return await self._propose(here, partner, stream, name)
        except BROKEN as error:
            watch.disturbed = True
            self._place.note_failure(here, partner, error)
            return None
        finally:
            watch.close()
            self._place.meeting = self._place.outcomes.deciding = None

    async def _propose(self, here: Round, partner: str, stream: Stream, name: bytes) -> Met | None:
        mine = self._place.mine(here.window)
        exchange = Exchange(self._ctx, stream, mine, name)
        left_s = max(0.0, here.deadline_s - self._ctx.now())
        await exchange.send_terms(patience_s=left_s)
        async with asyncio.timeout(left_s + ANSWERED_STALLS * self._ctx.settings.stall_s):
            await exchange.receive_terms()
        here.times = exchange.times
        self._place.agreed(partner)
        met = await exchange.trade()
        await exchange.decide(lambda: self._commit(name, met))
        return met

    def _commit(self, name: bytes, met: Met) -> None:
        self._place.outcomes.commit(name)
        self._place.move(met.state, met.mass)
