"""Records of the roster that say nothing but what a test is about."""

from typing import Any

from atoll.dht.roster import PeerRecord


def record_of(peer_id: str, **told: Any) -> PeerRecord:
    """Return the record of a trainer at position 0 that measured nothing yet."""
    plain = {
        "addresses": (),
        "incarnation": "0" * 32,
        "role": "trainer",
        "epoch": 0,
        "position": 0,
        "tokens_per_s": 0.0,
        "uplink_mbit_s": 0.0,
        "downlink_mbit_s": 0.0,
        "ready_in_s": 0.0,
        "protocol": 1,
    }
    return PeerRecord(peer_id=peer_id, **(plain | told))
