"""Context of a gossip peer: identity, links, settings, and how its vectors are encoded."""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.dht.roster import PeerRecord
from atoll.optim.methods.noloco import PairedMethod
from atoll.optim.reduction.cells import Cells
from atoll.optim.state.fragments import Fragment
from atoll.optim.state.layout import Layout
from atoll.peer.rounds.context import PeerContext


@dataclass(kw_only=True)
class GossipContext(PeerContext):
    """Context that all parts of one gossip peer share."""

    run_id: bytes
    method: PairedMethod
    layout: Layout
    last_round: int = 0
    """Round at which the run ends; 0 for a run without an end."""
    fragment: Fragment = field(init=False)
    cells: Cells = field(init=False)

    def __post_init__(self) -> None:
        self.fragment = self.method.fragments(self.layout)[0]
        self.cells = Cells(codec=self.method.codec, fragment=self.fragment)

    async def trainers(self) -> dict[str, PeerRecord]:
        """Return the live trainers except this peer."""
        records = await self.roster_peers()
        me = self.me.peer_id
        return {p: r for p, r in records.items() if p != me and r.role == "trainer"}
