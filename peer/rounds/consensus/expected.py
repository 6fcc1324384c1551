"""The peers for which the leader of a forming group waits, and until when.

The roster is some seconds old, so each trainer is asked where it stands.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence

from atoll.optim.log.entry import Elector
from atoll.peer.rounds.consensus.polls import ask_head
from atoll.peer.rounds.context import Context

PROBE_S = 1.0  # how often peers that are waited for are asked
DECISION_UNDER_WAY = 1  # entries that a peer may lack: the last one is still on its way to it


class Expected:
    """Trainers that answer and stand here, or are about to, and when each expects to be ready.

    They are known by the roster and by the electorate: at the beginning of an epoch the roster may
    show nobody.
    """

    def __init__(
        self,
        ctx: Context,
        *,
        electorate: Callable[[], Sequence[Elector]],
        ready: Callable[[], Collection[str]],
    ) -> None:
        """`ready` returns the peers that have a session with the leader."""
        self._ctx = ctx
        self._electorate = electorate
        self._ready = ready

    async def ask(self) -> dict[str, float]:
        """Ask all once; when each expects to be ready, on the leader's clock."""
        trainers, here = await self._trainers(), self._ready()
        asked = await self._ask([peer for peer in trainers if peer not in here])
        now = self._ctx.now()
        return {peer: now for peer in trainers if peer in here} | asked | self._mine()

    async def _ask(self, peers: Sequence[str]) -> dict[str, float]:
        heads = await asyncio.gather(*(ask_head(self._ctx, peer) for peer in peers))
        now, stands_at = self._ctx.now(), self._ctx.replica.position
        return {
            peer: now + head.ready_in_s
            for peer, head in zip(peers, heads, strict=True)
            if head is not None
            and head.position >= stands_at - DECISION_UNDER_WAY
            and head.role == "trainer"
        }

    def _mine(self) -> dict[str, float]:
        """When the leader itself will be, which may lead a group that it is not in."""
        ready_in_s = self._ctx.ready_in_s()
        return {} if ready_in_s is None else {self._ctx.me.peer_id: self._ctx.now() + ready_in_s}

    async def _trainers(self) -> list[str]:
        records = await self._ctx.roster_peers()
        peers = {peer for peer, record in records.items() if record.role == "trainer"}
        peers |= {elector.peer_id for elector in self._electorate()}
        return sorted(peers - {self._ctx.me.peer_id})
