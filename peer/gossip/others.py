"""What a peer knows of the rounds of the others: by the roster, and by what it heard from them."""

from __future__ import annotations

import asyncio
import random

from atoll.dht.transport import TransportError
from atoll.optim.log.entry import LogError
from atoll.peer.gossip.context import GossipContext
from atoll.peer.gossip.messages import Standing
from atoll.peer.gossip.policies import brought_level

ASKED_AROUND = 3  # others that are asked for their round by a peer that is told it is behind


class Others:
    """The live trainers but this one."""

    def __init__(self, ctx: GossipContext) -> None:
        """Nothing was heard yet."""
        self._ctx = ctx
        self._heard: dict[str, int] = {}

    def hear(self, peer: str, round_: int) -> None:
        """Take a peer's word for its round."""
        self._heard[peer] = round_

    def heard(self, peer: str) -> int:
        """The round that a peer told of last; 0 where it told of none."""
        return self._heard.get(peer, 0)

    async def rounds(self) -> dict[str, int]:
        """The rounds that they have reached, as far as known."""
        records = await self._ctx.trainers()
        self._heard = {p: r for p, r in self._heard.items() if p in records}
        return {p: max(r.position, self._heard.get(p, 0)) for p, r in records.items()}

    async def level(self, own: int, *, by: int) -> int:
        """The round that a peer at `own` goes on with (`policies.brought_level`)."""
        level = brought_level(own, (await self.rounds()).values(), by=by)
        last = self._ctx.last_round
        return max(own, min(level, last)) if last else level

    async def ask_around(self, own: int) -> None:
        """Ask some of them for their rounds, others in each round `own`."""
        others = sorted(await self._ctx.trainers())
        choice = random.Random(f"{self._ctx.me.peer_id}/{own}")
        asked = choice.sample(others, min(ASKED_AROUND, len(others)))
        await asyncio.gather(*(self.standing(peer) for peer in asked))

    async def standing(self, peer: str) -> Standing | str:
        """Where a peer is, or why nobody can tell."""
        timeout_s = self._ctx.settings.stall_s
        try:
            reply = await self._ctx.transport.call(peer, "gossip-head", b"", timeout_s=timeout_s)
            standing = Standing.decode(reply)
        except (TransportError, LogError) as error:
            return str(error)
        self.hear(peer, standing.round)
        return standing
