"""A peer and the others: addresses to announce, relays, neighbours, a move to another network.

`Reachability` decides what to announce, `Neighbours` keeps connections, `Company` notices a peer
that is alone, `Moves` another network, `Following` a coordinator that has moved. `BootstrapNode` is
the coordinator's part of the DHT.
"""

from typing import TYPE_CHECKING

from atoll.coordinator.exports import exports

if TYPE_CHECKING:
    from atoll.peer.daemon.reach.bootstrap import BootstrapNode
    from atoll.peer.daemon.reach.company import Company
    from atoll.peer.daemon.reach.moves import Moves
    from atoll.peer.daemon.reach.neighbours import Neighbours
    from atoll.peer.daemon.reach.reachability import Reachability
    from atoll.peer.daemon.reach.relocations import Following

__all__ = ["BootstrapNode", "Company", "Following", "Moves", "Neighbours", "Reachability"]

__getattr__ = exports(
    __name__,
    {
        "BootstrapNode": "bootstrap",
        "Company": "company",
        "Following": "relocations",
        "Moves": "moves",
        "Neighbours": "neighbours",
        "Reachability": "reachability",
    },
)
