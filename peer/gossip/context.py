"""What every piece of a run by gossip shares: identity, links, settings, and how vectors travel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from atoll.dht.roster import PeerRecord, Roster, RosterError
from atoll.dht.transport import Transport, TransportError
from atoll.optim.cells import Cells
from atoll.optim.fragments import Fragment
from atoll.optim.layout import Layout
from atoll.optim.log import Elector
from atoll.optim.methods.paired import PairedMethod
from atoll.peer.rounds.conduct import Conduct
from atoll.peer.rounds.context import ALIVE_PER_STALL, Compute, OnEvent, RoundSettings, short
from atoll.peer.rounds.pacing import Link


@dataclass(kw_only=True)
class GossipContext:
    """One peer's view of a run by gossip."""

    me: Elector
    run_id: bytes
    transport: Transport
    roster: Roster
    method: PairedMethod
    layout: Layout
    settings: RoundSettings
    compute: Compute
    on_event: OnEvent
    last_round: int = 0
    """round at which the run ends, 0 if it does not"""
    ready_in_s: Callable[[], float | None] = lambda: None
    """seconds until this peer's window ends; None where it does not train"""
    conduct: Conduct = field(default_factory=Conduct)
    link: Link = field(default_factory=Link)
    fragment: Fragment = field(init=False)
    cells: Cells = field(init=False)
    seen: dict[str, PeerRecord] = field(default_factory=dict)
    """who was in the run when it was last looked at"""

    def __post_init__(self) -> None:
        """Cut the layout as the method does."""
        self.fragment = self.method.fragments(self.layout)[0]
        self.cells = Cells(codec=self.method.codec, fragment=self.fragment)

    async def roster_peers(self) -> dict[str, PeerRecord]:
        """Who is in the run; what was known before where the roster cannot be read now."""
        try:
            self.seen = await self.roster.peers()
        except (RosterError, TransportError, TimeoutError, OSError) as error:
            self.on_event("warning", f"the roster cannot be read, going on with the last: {error}")
        return self.seen

    async def trainers(self) -> dict[str, PeerRecord]:
        """The live trainers but this one."""
        records = await self.roster_peers()
        me = self.me.peer_id
        return {p: r for p, r in records.items() if p != me and r.role == "trainer"}

    @property
    def alive_s(self) -> float:
        """Seconds between signs of life."""
        return self.settings.stall_s / ALIVE_PER_STALL

    @staticmethod
    def now() -> float:
        """The clock of deadlines: the event loop's."""
        return asyncio.get_running_loop().time()

    def fault(self, peer: str, why: str) -> None:
        """Note that a peer broke a rule; say so where it is left out from now on."""
        barred = self.conduct.fault(peer, why, self.now())
        if barred is not None:
            self.on_event("error", f"{short(peer)} is {barred}")
