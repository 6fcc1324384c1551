"""Home routers: network address translation of IPv4 packets, by the kinds that RFC 4787 names.

A router gives each flow from inside a port of its public address (*mapping*), and drops what comes
to that port from somewhere that the flow has not sent to (*filtering*):

    kind              mapping                      passes from outside
    full-cone         one port a source            everything
    restricted        one port a source            addresses that were sent to
    port-restricted   one port a source            address and port that were sent to
    symmetric         one port a source and peer   the same

Most home routers are port-restricted; those of mobile and large company networks are symmetric.
Hole punching works between all kinds but symmetric with symmetric or port-restricted. `double`
puts a home router behind the router of a provider (RFC 6598), which helps nobody to get through.
TCP and UDP pass, everything else is dropped, and an unwanted packet gets no answer.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

NatKind = Literal["full-cone", "restricted", "port-restricted", "symmetric"]
KINDS: tuple[NatKind, ...] = get_args(NatKind)

TCP, UDP = 6, 17
CHECKSUM_AT = {TCP: 16, UDP: 6}  # within the header after IP's
IDLE_S = {TCP: 7440.0, UDP: 120.0}  # RFC 5382 (REQ-5) and RFC 4787 (REQ-5): what routers keep
FIRST_PORT = 20_000  # of those given to symmetric flows and in place of taken ones


class Endpoint(NamedTuple):
    """An address and port."""

    address: bytes
    port: int


@dataclass
class _Mapping:
    inside: Endpoint
    used_at: float
    peers: set[Endpoint] = field(default_factory=set)
    """that were sent to from it"""


class Nat:
    """One router. Times are of any steady clock, in seconds."""

    def __init__(self, kind: NatKind, public: str, clock: Callable[[], float]) -> None:
        """Translate to the address `public`."""
        self.kind, self.public = kind, socket.inet_aton(public)
        self._clock = clock
        self._ports: dict[tuple[int, Endpoint, Endpoint | None], int] = {}
        """by protocol, source, and, if symmetric, the peer"""
        self._mappings: dict[tuple[int, int], _Mapping] = {}
        """by protocol and public port"""
        self._next = FIRST_PORT

    def restart(self, public: str | None = None) -> None:
        """Forget all flows, as after a power cut; with another public address if one is given."""
        self._ports.clear()
        self._mappings.clear()
        if public is not None:
            self.public = socket.inet_aton(public)

    def outward(self, packet: bytes) -> bytes | None:
        """Return a packet from inside as it leaves; None if it is dropped."""
        flow = _flow(packet)
        if flow is None:
            return None
        protocol, source, peer = flow
        port = self._port_for(protocol, source, peer)
        mapping = self._mappings[protocol, port]
        mapping.peers.add(peer)
        mapping.used_at = self._clock()
        return _readdressed(packet, protocol, source=Endpoint(self.public, port))

    def inward(self, packet: bytes) -> bytes | None:
        """Return a packet from outside as it arrives inside; None if it is dropped."""
        flow = _flow(packet)
        if flow is None:
            return None
        protocol, peer, to = flow
        mapping = self._live(protocol, to.port)
        if to.address != self.public or mapping is None or not self._passes(mapping, peer):
            return None
        return _readdressed(packet, protocol, destination=mapping.inside)

    def _port_for(self, protocol: int, source: Endpoint, peer: Endpoint) -> int:
        key = protocol, source, peer if self.kind == "symmetric" else None
        port = self._ports.get(key)
        if port is None or self._live(protocol, port) is None:
            port = self._ports[key] = self._free_port(protocol, source.port)
            self._mappings[protocol, port] = _Mapping(inside=source, used_at=self._clock())
        return port

    def _free_port(self, protocol: int, wanted: int) -> int:
        if self.kind != "symmetric" and self._live(protocol, wanted) is None:
            return wanted
        while self._live(protocol, self._next) is not None:
            self._next = FIRST_PORT if self._next == 65_535 else self._next + 1
        self._next += 1
        return self._next - 1

    def _live(self, protocol: int, port: int) -> _Mapping | None:
        mapping = self._mappings.get((protocol, port))
        if mapping is not None and self._clock() - mapping.used_at > IDLE_S[protocol]:
            del self._mappings[protocol, port]
            return None
        return mapping

    def _passes(self, mapping: _Mapping, peer: Endpoint) -> bool:
        if self.kind == "full-cone":
            return True
        if self.kind == "restricted":
            return any(peer.address == known.address for known in mapping.peers)
        return peer in mapping.peers


class Routers:
    """Routers in a row, the one nearest to the host first."""

    def __init__(self, routers: Sequence[Nat]) -> None:
        """Pass packets through all of them."""
        self.routers = list(routers)

    def outward(self, packet: bytes) -> bytes | None:
        """Return a packet from inside as it leaves the last; None if one drops it."""
        for router in self.routers:
            passed = router.outward(packet)
            if passed is None:
                return None
            packet = passed
        return packet

    def inward(self, packet: bytes) -> bytes | None:
        """Return a packet from outside as it reaches the host; None if one drops it."""
        for router in reversed(self.routers):
            passed = router.inward(packet)
            if passed is None:
                return None
            packet = passed
        return packet


def _flow(packet: bytes) -> tuple[int, Endpoint, Endpoint] | None:
    """Return protocol, source and destination; None for what a router does not pass."""
    if len(packet) < 20 or packet[0] >> 4 != 4:
        return None
    start, protocol = (packet[0] & 15) * 4, packet[9]
    is_fragment = struct.unpack_from(">H", packet, 6)[0] & 0x1FFF
    if (
        protocol not in CHECKSUM_AT
        or is_fragment
        or len(packet) < start + CHECKSUM_AT[protocol] + 2
    ):
        return None
    source, destination = struct.unpack_from(">HH", packet, start)
    return protocol, Endpoint(packet[12:16], source), Endpoint(packet[16:20], destination)


def _readdressed(
    packet: bytes,
    protocol: int,
    *,
    source: Endpoint | None = None,
    destination: Endpoint | None = None,
) -> bytes:
    changed = bytearray(packet)
    start = (packet[0] & 15) * 4
    for at, port_at, endpoint in ((12, start, source), (16, start + 2, destination)):
        if endpoint is not None:
            changed[at : at + 4] = endpoint.address
            struct.pack_into(">H", changed, port_at, endpoint.port)
    _mend(changed, 10, packet, [(12, 20)])
    checksum_at = start + CHECKSUM_AT[protocol]
    if protocol == TCP or changed[checksum_at : checksum_at + 2] != b"\0\0":  # UDP's may be absent
        _mend(changed, checksum_at, packet, [(12, 20), (start, start + 4)])
    return bytes(changed)


def _mend(changed: bytearray, at: int, before: bytes, spans: Sequence[tuple[int, int]]) -> None:
    """Update an Internet checksum for the spans that were changed (RFC 1624)."""
    total = ~struct.unpack_from(">H", changed, at)[0] & 0xFFFF
    for start, stop in spans:
        for word in range(start, stop, 2):
            old = struct.unpack_from(">H", before, word)[0]
            total += (~old & 0xFFFF) + struct.unpack_from(">H", changed, word)[0]
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    struct.pack_into(">H", changed, at, ~total & 0xFFFF)
