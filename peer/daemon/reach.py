"""How others reach this peer: directly, or through a relay because a router lets nobody in.

libp2p finds that out in minutes, if enough others try. The coordinator knows it at once: before
p2pd takes the port, this peer listens on it and asks the coordinator to dial back. Nothing has left
from this port yet, so no router has a flow for it, and only an open or forwarded port lets the
coordinator in.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from atoll.coordinator.rpc.client import CoordinatorClient
from atoll.coordinator.rpc.client_errors import CoordinatorError
from atoll.coordinator.rpc.messages import PROBE_NONCE_BYTES
from atoll.dht.node import Node, peer_of
from atoll.dht.p2pd import is_public

_TCP = re.compile(r"/ip(?P<version>[46])/(?P<host>[^/]+)/tcp/(?P<port>\d+)")
MAX_ASKING = 4  # dial-backs at once: the coordinator makes one, strangers may come too


@dataclass(frozen=True, kw_only=True)
class Reach:
    """The result of a dial-back, kept for a start without the coordinator."""

    address: str = ""
    """ours, as the coordinator sees it; empty if it was never asked"""
    port: int = 0
    is_dialed: bool = True

    @property
    def multiaddr(self) -> str:
        """Return the address that others dial."""
        version = 6 if ":" in self.address else 4
        return f"/ip{version}/{self.address}/tcp/{self.port}"


async def probe(
    client: CoordinatorClient, listen: Sequence[str], kept: Path
) -> tuple[Reach, tuple[str, ...]]:
    """Ask the coordinator to dial the first of these addresses back.

    Returns:
        What came of it, or what is kept of an earlier time if the coordinator cannot be asked; and
        the addresses to listen on, with the port that was tried.
    """
    before = _recall(kept)
    for index, address in enumerate(listen):
        found = _TCP.fullmatch(address)
        if found is None or ipaddress.ip_address(found["host"]).is_loopback:
            continue
        try:
            reach = await _dialed_back(client, found["host"], int(found["port"]) or before.port)
        except (CoordinatorError, OSError):
            return before, tuple(listen)
        _remember(kept, reach)
        fixed = f"/ip{found['version']}/{found['host']}/tcp/{reach.port}"
        return reach, (*listen[:index], fixed, *listen[index + 1 :])
    return Reach(), tuple(listen)


async def _dialed_back(client: CoordinatorClient, host: str, port: int) -> Reach:
    nonce = os.urandom(PROBE_NONCE_BYTES)

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(nonce)
        writer.close()

    try:
        server = await asyncio.start_server(answer, host, port, backlog=MAX_ASKING)
    except OSError:
        if not port:
            raise
        server = await asyncio.start_server(answer, host, 0, backlog=MAX_ASKING)
    async with server:
        port = server.sockets[0].getsockname()[1]
        address, is_reached = await client.probe(port, nonce)
    return Reach(address=address, port=port, is_dialed=is_reached)


def is_direct(reach: Reach, coordinator: Sequence[str]) -> bool:
    """Return whether everybody in the run can dial this peer.

    A coordinator on the same local network reaches peers that nobody else does: its word counts
    only about public addresses, unless the run itself has none.

    Args:
        reach: what it found.
        coordinator: its addresses.
    """
    if not reach.is_dialed:
        return False
    is_local_run = not any(map(is_public, coordinator))
    return is_local_run or not reach.address or is_public(reach.address)


def announce(node: Node, reach: Reach, bootstrap: Sequence[str]) -> str:
    """Let a node announce how it is reached; return that as a sentence.

    Args:
        node: ours.
        reach: what a dial-back found.
        bootstrap: addresses of the run's first nodes; the coordinator's come first.
    """
    relay = peer_of(bootstrap[0]) if bootstrap else ""
    relays = [address for address in bootstrap if peer_of(address) == relay]
    if is_direct(reach, bootstrap):
        node.seen = (reach.multiaddr,) if reach.address and is_public(reach.address) else ()
        return (
            f"others can dial this peer at {reach.multiaddr}"
            if node.seen
            else ("others can dial this peer")
        )
    node.relays = tuple(sorted(relays, key=is_public, reverse=True))
    return (
        f"a router lets nobody in to {reach.multiaddr}: others reach this peer through the "
        "coordinator's relay. A port that the router forwards would be faster: name it with "
        "--listen and --announce"
    )


def _remember(path: Path, reach: Reach) -> None:
    partial = path.with_suffix(".new")
    partial.write_text(json.dumps(asdict(reach)))
    partial.replace(path)


def _recall(path: Path) -> Reach:
    try:
        fields = json.loads(path.read_text())
        return Reach(
            address=str(fields["address"]),
            port=int(fields["port"]) & 0xFFFF,
            is_dialed=bool(fields["is_dialed"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return Reach()
