"""Multiaddrs of peers: public or private, dialed or behind a relay."""

from __future__ import annotations

import ipaddress
import re

CIRCUIT = "/p2p-circuit"
_HOST = re.compile(r"/ip[46]/([^/]+)/")


def is_public(address: str) -> bool:
    """Return whether a multiaddr, or an IP address, is one of the internet; names count as such."""
    found = _HOST.match(address)
    try:
        return ipaddress.ip_address(found[1] if found else address).is_global
    except ValueError:
        return True


def relay_of(address: str) -> str | None:
    """Return the relay's PeerID in an address such as /ip4/1.2.3.4/tcp/1/p2p/R/p2p-circuit/p2p/B.

    None for an address that can be dialed.
    """
    before, found, _ = address.partition(CIRCUIT)
    return before.rpartition("/p2p/")[2] if found else None


def through(relay_address: str, peer_id: str) -> str:
    """Return the address of a peer behind a relay that listens at `relay_address`."""
    return f"{relay_address}{CIRCUIT}/p2p/{peer_id}"


def peer_of(address: str) -> str:
    """Return the PeerID at the end of a multiaddr."""
    return address.rpartition("/p2p/")[2]
