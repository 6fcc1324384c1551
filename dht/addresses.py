"""Multiaddrs of peers: public or private, dialed or behind a relay."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Sequence

CIRCUIT = "/p2p-circuit"
ANY_IPV6 = "/ip6/::/tcp/"
TCP = re.compile(r"/ip(?P<version>[46])/(?P<host>[^/]+)/tcp/(?P<port>\d+)")
"""one address to listen at, or an observed one, without the PeerID"""
_HOST = re.compile(r"(?:/ip6zone/[^/]+)?/ip[46]/([^/]+)/")


def is_public(address: str) -> bool:
    """Return whether a multiaddr, or an IP address, is one of the internet; names count as such."""
    host = _host_of(address)
    return host is None or host.is_global


def ip_of(address: str) -> str:
    """Return the IP address in a multiaddr, that of IPv4 if it is mapped; empty for a name."""
    host = _host_of(address)
    return "" if host is None else str(host)


def _host_of(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address in a multiaddr, or the text itself; None for a name."""
    found = _HOST.match(address)
    try:
        host = ipaddress.ip_address(found[1] if found else address)
    except ValueError:
        return None
    return getattr(host, "ipv4_mapped", None) or host


def is_ipv6(address: str) -> bool:
    """Return whether only IPv6 reaches a multiaddr."""
    return address.startswith(("/ip6/", "/ip6zone/", "/dns6/"))


def announced(found: Sequence[str]) -> list[str]:
    """Choose the addresses to announce, of all at which a peer listens.

    Private addresses mean nothing to peers elsewhere, and a public IPv6 address next to a private
    IPv4 address is no sign of a run over the internet: most homes have both, and their routers let
    nobody in. So the addresses are all public or all private, and IPv4 decides if there is any.
    """
    hosts = {address: _host_of(address) for address in found}
    inside = [a for a, host in hosts.items() if host is not None and host.is_loopback]
    outside = [a for a in found if a not in inside]
    by_ipv4 = [a for a in outside if not is_ipv6(a)]
    public = [a for a in outside if is_public(a)]
    if any(map(is_public, by_ipv4 or outside)):
        return public
    # Programs of one machine need one loopback address; more would lengthen the invite.
    loopback = [a for a in inside if not is_ipv6(a)] or inside
    return [a for a in found if a in loopback or (a in outside and not is_public(a))]


def by_family(addresses: Sequence[str]) -> list[list[str]]:
    """Split addresses into turns to dial: those of IPv4 and names first, then those of IPv6.

    Both carry the same (docs/benchmarks/links.md). But peers make holes for each other at the
    addresses that their relays see, and every peer can dial one of IPv4.
    """
    first = [address for address in addresses if not is_ipv6(address)]
    return [turn for turn in (first, [a for a in addresses if is_ipv6(a)]) if turn]


async def refused(addresses: Sequence[str], timeout_s: float) -> bool:
    """Return whether a machine refuses TCP at some of these addresses, and takes it at none."""
    found = [match for match in map(TCP.match, addresses) if match is not None]
    answers = await asyncio.gather(
        *(_refuses(match["host"], int(match["port"]), timeout_s) for match in found)
    )
    return True in answers and False not in answers


async def _refuses(host: str, port: int, timeout_s: float) -> bool | None:
    """Return whether nobody listens there; None if this machine has no way to the host."""
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return True
    except TimeoutError:
        return False
    except OSError:
        return None
    writer.close()
    return False


def has_ipv6() -> bool:
    """Return whether this machine can listen on IPv6."""
    try:
        with socket.create_server(("::", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def usable(listen: Sequence[str]) -> tuple[str, ...]:
    """Leave out "all of IPv6" on a machine without, unless nothing else is named."""
    others = tuple(address for address in listen if not address.startswith(ANY_IPV6))
    return tuple(listen) if not others or has_ipv6() else others


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
