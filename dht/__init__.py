"""The network: identity, transport and signed records of peers.

Importing this package stays cheap: only `bindings`, `p2pd`, `libp2p` and `node` load hivemind, and
only when they are imported by name.
"""

from atoll.dht.identity import Identity, IdentityError, verify
from atoll.dht.refusals import RefusalCode
from atoll.dht.roster import PeerRecord, RecordError, Roster, RosterError
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
    "PeerRecord",
    "PeerUnreachable",
    "RecordError",
    "RefusalCode",
    "Refused",
    "Roster",
    "RosterError",
    "Stream",
    "Transport",
    "TransportError",
    "TransportStatistics",
    "verify",
]
