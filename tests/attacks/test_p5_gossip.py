"""P5 by gossip: a partner accepts each exchange, sends keepalives, and never its vectors."""

import asyncio

from atoll.peer.gossip.meeting import Meeting
from support.crowd import in_crowd


def test_a_partner_that_only_lives_is_not_met_for_a_while(monkeypatch):
    send = Meeting._send

    async def use(crowd):
        honest, liar = await crowd.start(2, window_s=5.0)
        honest.ctx.link.declare(100.0)
        await crowd.rounds(3)

        async def never(meeting):
            if meeting._ctx.me.peer_id == liar.peer_id:
                await asyncio.Event().wait()
            return await send(meeting)

        monkeypatch.setattr(Meeting, "_send", never)
        await crowd.until(lambda: honest.ctx.lags.barred(liar.peer_id, crowd.now()), 300)
        assert honest.ctx.conduct.barred(liar.peer_id, crowd.now()) is None, "it broke no rule"
        began_s, at = crowd.now(), honest.position
        await crowd.until(lambda: honest.position >= at + 4, 60)
        assert crowd.now() - began_s < 4 * 6.0, "it goes on alone, at once"

    in_crowd(use)
