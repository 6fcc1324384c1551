"""Identity, transport and signed records: everything that knows about the network.

Importing this package stays cheap: only `atoll.dht.libp2p`, `atoll.dht.daemon`,
`atoll.dht.roster_dht` and `atoll.dht.node` load hivemind, and only when they are imported by name.
"""

from atoll.dht.identity import Identity, IdentityError, verify
from atoll.dht.transport import (
    DeadlineExceeded,
    PeerUnreachable,
    Refused,
    Stream,
    Transport,
    TransportError,
    TransportStatistics,
)

__all__ = [
    "DeadlineExceeded",
    "Identity",
    "IdentityError",
    "PeerUnreachable",
    "Refused",
    "Stream",
    "Transport",
    "TransportError",
    "TransportStatistics",
    "verify",
]
