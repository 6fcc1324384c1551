"""Find out whether others can dial this peer, and announce its address or its relays.

libp2p finds that out in minutes, if enough others try. The coordinator knows it at once: before
p2pd takes the port, this peer listens on it and asks the coordinator to dial back. Nothing has left
from this port yet, so no router has a flow for it, and only an open or forwarded port lets the
coordinator in. A process that was started again takes another port unless the last one was open:
its router may still have the flows of that one, and would let the coordinator in, but no others.
A router that refuses connections is asked to forward the port (UPnP); the coordinator dials again.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path

from atoll.coordinator.rpc.client import CoordinatorClient
from atoll.coordinator.rpc.client_errors import CoordinatorError
from atoll.coordinator.rpc.messages import PROBE_NONCE_BYTES
from atoll.coordinator.run.notice import Notice
from atoll.coordinator.run.status import PeerReach
from atoll.dht.addresses import ANY_IPV6, TCP, is_ipv6, is_public, peer_of
from atoll.dht.identity import short
from atoll.dht.node import Node
from atoll.dht.roster import PeerRecord
from atoll.dht.tasks import end
from atoll.dht.upnp import Forwarding
from atoll.peer import notices
from atoll.peer.daemon.doctor.health import own_addresses

MAX_RELAYS = 2  # peers, besides the coordinator: a record has room for three such addresses
MAX_ASKING = 4  # dial-backs at once: the coordinator makes one, strangers may come too


@dataclass(frozen=True, kw_only=True)
class Reach:
    """The result of a dial-back, kept for a start without the coordinator."""

    address: str = ""
    """ours, as the coordinator sees it; empty if it was never asked"""
    port: int = 0
    is_dialed: bool = True
    by_upnp: bool = False
    """whether the router forwards the port at our request, for as long as it is renewed"""

    @property
    def multiaddr(self) -> str:
        """Return the address that others dial."""
        version = 6 if ":" in self.address else 4
        return f"/ip{version}/{self.address}/tcp/{self.port}"


async def probe(
    client: CoordinatorClient, listen: Sequence[str], kept: Path, forwarding: Forwarding
) -> tuple[Reach, tuple[str, ...]]:
    """Ask the coordinator to dial the first of these addresses back.

    "All of IPv6" gets the same port, and is listened on too: the coordinator dials the address that
    it sees, and that may be one of IPv6.

    Returns:
        What came of it, or what is kept of an earlier time if the coordinator cannot be asked; and
        the addresses to listen on, with the port that was tried.
    """
    before = _recall(kept)
    for index, address in enumerate(listen):
        found = TCP.fullmatch(address)
        if found is None or ipaddress.ip_address(found["host"]).is_loopback:
            continue
        others = [each for each in listen[index + 1 :] if each == f"{ANY_IPV6}0"]
        hosts = (found["host"], *("::" for _ in others))
        kept_port = before.port if before.is_dialed else 0
        try:
            port = int(found["port"]) or kept_port
            reach = await _dialed_back(client, hosts, port, forwarding, was_mapped=before.by_upnp)
        except (CoordinatorError, OSError):
            # What the router forwarded at our request has ended, or another machine has it.
            return Reach() if before.by_upnp else before, tuple(listen)
        with suppress(OSError):  # a full disk: the next start asks again
            _remember(kept, reach)
        fixed = f"/ip{found['version']}/{found['host']}/tcp/{reach.port}"
        rest = [f"{ANY_IPV6}{reach.port}" if e in others else e for e in listen[index + 1 :]]
        return reach, (*listen[:index], fixed, *rest)
    return Reach(), tuple(listen)


async def probe_again(
    client: CoordinatorClient, listen: Sequence[str], forwarding: Forwarding
) -> Reach:
    """Ask the coordinator again, about a free port, since p2pd has the one that others dial.

    Routers have flows for that one and would let the coordinator in. A free port has none: it shows
    whether the network is open, but not whether a router forwards the port that p2pd has.
    A router that forwards it at our request is then asked to forward p2pd's.

    Args:
        client: of the coordinator.
        listen: addresses at which p2pd listens, with their ports.
        forwarding: asks the router, if there is one that lets nobody in.

    Returns:
        A `Reach` with p2pd's port; that of "never asked" if no address can be asked about.

    Raises:
        CoordinatorError, OSError: the coordinator cannot be asked.
    """
    found = [m for m in map(TCP.fullmatch, listen) if m is not None]
    asked = [m for m in found if not ipaddress.ip_address(m["host"]).is_loopback]
    if not asked:
        return Reach()
    others = [m["host"] for m in asked[1:] if m["host"] == "::"]
    reach = await _dialed_back(client, (asked[0]["host"], *others), 0, forwarding)
    port = int(asked[0]["port"])
    if reach.by_upnp and not await forwarding.open(port):
        return replace(reach, port=port, is_dialed=False, by_upnp=False)
    return replace(reach, port=port)


def inside(host: str) -> str:
    """Return our private address of IPv4 that a router translates; empty if there is none.

    Args:
        host: at which this machine listens, "all of IPv4" too.
    """
    here = own_addresses() if host == "0.0.0.0" else [host]
    return next((each for each in here if ":" not in each and not is_public(each)), "")


async def _dialed_back(
    client: CoordinatorClient,
    hosts: Sequence[str],
    port: int,
    forwarding: Forwarding,
    *,
    was_mapped: bool = False,
) -> Reach:
    nonce = os.urandom(PROBE_NONCE_BYTES)

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(nonce)
        writer.close()

    async with AsyncExitStack() as servers:

        async def listen(host: str, port: int) -> int:
            server = await asyncio.start_server(answer, host, port, backlog=MAX_ASKING)
            await servers.enter_async_context(server)
            bound: int = server.sockets[0].getsockname()[1]
            return bound

        try:
            port = await listen(hosts[0], port)
        except OSError:
            if not port:
                raise
            port = await listen(hosts[0], 0)
        with suppress(OSError):  # another program may have the same port of IPv6
            for host in hosts[1:]:
                await listen(host, port)
        # Both take seconds if nobody answers.
        searching = asyncio.ensure_future(_search(forwarding, inside(hosts[0])))
        try:
            address, is_reached = await client.probe(port, nonce)
            # A mapping of an earlier start ends with its lease, unless it is ours again.
            if is_reached and not was_mapped:
                return Reach(address=address, port=port)
            await searching
        finally:
            await end(searching)
        is_mapped = await forwarding.open(port)
        if is_mapped and not is_reached:
            address, is_reached = await client.probe(port, nonce)
        if not is_reached:
            await forwarding.close()
    return Reach(address=address, port=port, is_dialed=is_reached, by_upnp=is_reached and is_mapped)


async def _search(forwarding: Forwarding, address: str) -> None:
    if address:
        await forwarding.search(address)


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
    # Peers that have only IPv4 cannot dial what was reached by IPv6.
    if ":" in reach.address and not all(map(is_ipv6, filter(is_public, coordinator))):
        return False
    return is_local_run or not reach.address or is_public(reach.address)


class Reachability:
    """Lets a node announce how others reach it: at its own address, or behind relays.

    Relays are peers of the run that everybody can dial, and the coordinator's node last: it is
    always there, and its link is the one that all share.
    """

    def __init__(
        self,
        node: Node,
        reach: Reach,
        bootstrap: Sequence[str],
        *,
        relay_mbit_s: float = 0.0,
        report: Callable[[Notice], None] = lambda notice: None,
    ) -> None:
        """Announce what a dial-back found.

        Args:
            node: ours.
            reach: what was found.
            bootstrap: addresses of the run's first nodes; the coordinator's come first.
            relay_mbit_s: bandwidth for peers that cannot dial each other, while others dial us.
            report: takes what the owner should know.
        """
        self._node = node
        self._relay_mbit_s = relay_mbit_s
        self._report = report
        self._told: frozenset[str] = frozenset()
        self._know(bootstrap)
        self.take(reach)

    def _know(self, bootstrap: Sequence[str]) -> None:
        self._bootstrap = tuple(bootstrap)
        relay = peer_of(bootstrap[0]) if bootstrap else ""
        known = [address for address in bootstrap if peer_of(address) == relay]
        self._coordinator = tuple(sorted(known, key=is_public, reverse=True))[:1]

    def follow(self, bootstrap: Sequence[str]) -> None:
        """Take other addresses of the coordinator's node, which may relay for this peer."""
        if tuple(bootstrap) == self._bootstrap:
            return
        before, relays = self._coordinator, self._node.relays
        self._know(bootstrap)
        if set(before) & set(relays):
            others = (relay for relay in relays if relay not in before)
            self._node.relays = (*others, *self._coordinator)
        self.take(self._reach)

    @property
    def reach(self) -> Reach:
        """Return the result of the last dial-back."""
        return self._reach

    def take(self, reach: Reach) -> None:
        """Announce what another dial-back found, as after this machine has changed networks."""
        self._reach = reach
        self.is_direct = is_direct(reach, self._bootstrap) and not self._is_hidden()
        is_seen = self.is_direct and reach.address != "" and is_public(reach.address)
        self._node.seen = (reach.multiaddr,) if is_seen else ()
        self._node.relaying.allow(self._relay_mbit_s if self.is_direct else 0.0)
        if self.is_direct:
            self._node.relays = ()
        elif not self._node.relays:
            self._node.relays = self._coordinator

    def _is_hidden(self) -> bool:
        """Return whether nobody was asked, and our own addresses mean nothing to this run."""
        if self._reach.address or self._node.daemon.options.announce:
            return False
        return any(map(is_public, self._bootstrap)) and not any(
            map(is_public, self._node.addresses)
        )

    def __str__(self) -> str:
        """Return it as a sentence for the owner."""
        if self._is_hidden():
            return (
                "the coordinator cannot be asked yet whether others can dial this peer: they reach "
                f"it through relays, {self._relay_names()}"
            )
        if self.is_direct:
            where = f" at {self._reach.multiaddr}" if self._node.seen else ""
            how = ", which the router forwards by UPnP" if self._reach.by_upnp else ""
            return f"others can dial this peer{where}{how}"
        return (
            f"a router refuses connections to {self._reach.multiaddr}: others reach this peer "
            f"through relays, {self._relay_names()}. A port that the router forwards would be "
            "faster: turn on UPnP there, or name the port with --listen and --announce"
        )

    def _relay_names(self) -> str:
        """Return the relays, the first choice first."""
        coordinators = set(map(peer_of, self._coordinator))
        peers = [peer_of(address) for address in self._node.relays]
        names = ["the coordinator" if peer in coordinators else short(peer) for peer in peers]
        return " and ".join(filter(None, (", ".join(names[:-1]), names[-1]))) if names else "none"

    @property
    def kind(self) -> PeerReach:
        """Return how the other peers reach this one now."""
        if self.is_direct:
            return "upnp" if self._reach.by_upnp else "direct"
        transport = self._node.transport
        peers = transport.connected - {peer_of(address) for address in self._coordinator}
        return "hole" if peers and not transport.relayed else "relayed"

    def look(self, records: Mapping[str, PeerRecord], connected: Container[str]) -> None:
        """Choose relays among the online peers to which this one has a connection."""
        if self.is_direct:
            return
        me = self._node.peer_id
        near = {p: r for p, r in records.items() if p in connected and p != me}
        fit = {p: r for p, r in near.items() if r.relay_mbit_s > 0 and r.is_dialed and r.addresses}
        kept = [peer for peer in map(peer_of, self._node.relays) if peer in fit]
        # By a hash of both, so that relays have about as many peers each.
        others = sorted(fit.keys() - kept, key=lambda peer: sha256(f"{me}{peer}".encode()).digest())
        chosen = [fit[peer].addresses[0] for peer in (*kept, *others)[:MAX_RELAYS]]
        self._node.relays = (*chosen, *self._coordinator)
        relays = frozenset(map(peer_of, chosen))
        if relays and relays != self._told:
            self._told = relays
            self._report(notices.relays_chosen(self._relay_names(), relays=sorted(relays)))


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
            by_upnp=bool(fields.get("by_upnp", False)),  # of a version that asked no router
        )
    except (OSError, ValueError, KeyError, TypeError):
        return Reach()
