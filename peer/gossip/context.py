"""What every piece of a run by gossip shares: identity, links, settings, and how vectors travel."""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.dht.roster import PeerRecord
from atoll.optim.methods.paired import PairedMethod
from atoll.optim.reduction.cells import Cells
from atoll.optim.state.fragments import Fragment
from atoll.optim.state.layout import Layout
from atoll.peer.rounds.context import PeerContext


@dataclass(kw_only=True)
class GossipContext(PeerContext):
    """One peer's view of a run by gossip."""

    run_id: bytes
    method: PairedMethod
    layout: Layout
    last_round: int = 0
    """round at which the run ends, 0 if it does not"""
    fragment: Fragment = field(init=False)
    cells: Cells = field(init=False)

    def __post_init__(self) -> None:
        """Cut the layout as the method does."""
        self.fragment = self.method.fragments(self.layout)[0]
        self.cells = Cells(codec=self.method.codec, fragment=self.fragment)

    async def trainers(self) -> dict[str, PeerRecord]:
        """The live trainers but this one."""
        records = await self.roster_peers()
        me = self.me.peer_id
        return {p: r for p, r in records.items() if p != me and r.role == "trainer"}
