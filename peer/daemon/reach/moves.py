"""Notice that this machine has another address, and announce it.

A laptop that changes networks, a VPN that drops and a provider's new address all leave connections
behind that both ends take for live for a while, and a record with an address that fails.
`AddressWatch` decides without sockets or a clock when to ask the coordinator again; `Moves` asks.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Literal

from atoll.coordinator.rpc.client import CoordinatorClient
from atoll.coordinator.rpc.client_errors import CoordinatorError
from atoll.dht.node import Node
from atoll.dht.upnp import Forwarding
from atoll.peer import notices
from atoll.peer.daemon.doctor.health import own_addresses
from atoll.peer.daemon.reach.reachability import Reachability, probe_again
from atoll.peer.rounds.context import OnEvent

LOOK_EVERY_S = 2.0  # two system calls; nothing is sent
PAUSE_S = (5.0, 60.0)  # the first and the longest, between two tries to ask; they double

Change = Literal["moved", "lost", "unknown"]
"""This machine has another address; all connections ended; nobody was ever asked."""


class AddressWatch:
    """Decides when the coordinator should be asked again; times are of any steady clock."""

    def __init__(self, own: Sequence[str], *, is_known: bool) -> None:
        """Begin with this machine's addresses; `is_known` says if the coordinator was asked."""
        self._network = network_of(own)
        self._change: Change | None = None if is_known else "unknown"
        self._met: frozenset[str] = frozenset()
        self._next_s = 0.0
        self.tries = 0
        """that failed since the last change"""

    def look(self, now_s: float, own: Sequence[str], connected: frozenset[str]) -> Change | None:
        """Return why to ask now; None if there is no need, no network, or a pause between tries.

        Args:
            now_s: the time.
            own: addresses from which this machine's packets leave.
            connected: PeerIDs to which there are connections.
        """
        network = network_of(own)
        if not network:
            return None
        if network != self._network:
            if self._network or self._change is None:
                self._change, self._next_s, self.tries = "moved", now_s, 0
            self._network = network
        elif self._change is None and self._met and not self._met & connected:
            # One that is left shows that this machine's address holds; others may just have gone.
            self._change = "lost"
        else:
            self._met = connected or self._met
        return self._change if now_s >= self._next_s else None

    def done(self, connected: frozenset[str]) -> None:
        """Note that the coordinator answered."""
        self._change, self._met, self._next_s, self.tries = None, connected, 0.0, 0

    def failed(self, now_s: float) -> None:
        """Note that the coordinator did not answer."""
        self._next_s = now_s + min(PAUSE_S[0] * 2**self.tries, PAUSE_S[1])
        self.tries += 1


def network_of(own: Sequence[str]) -> str:
    """Return what changes with the network: the IPv4 address, or else the /64 of IPv6.

    The rest of an IPv6 address changes daily on many systems, which closes no connection.
    """
    hosts = sorted(map(ipaddress.ip_address, own), key=lambda host: host.version)
    if not hosts:
        return ""
    first = hosts[0]
    return str(first if first.version == 4 else ipaddress.ip_network((first, 64), strict=False))


class Moves:
    """Renews what a peer announces whenever its address has changed."""

    def __init__(
        self,
        client: CoordinatorClient,
        node: Node,
        reachability: Reachability,
        forwarding: Forwarding,
        *,
        is_asked: bool,
        report: OnEvent,
        own: Callable[[], list[str]] = own_addresses,
    ) -> None:
        """Watch once `keep` runs; `is_asked` is false if the owner names what to announce."""
        self._client = client
        self._node = node
        self._reachability = reachability
        self._forwarding = forwarding
        self._is_asked = is_asked
        self._report = report
        self._own = own
        self._watch = AddressWatch(own(), is_known=reachability.reach.address != "" or not is_asked)

    async def keep(self) -> None:
        """Watch until cancelled."""
        if self._node.daemon.options.is_loopback_only:
            return
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await self.look(asyncio.get_running_loop().time())

    async def look(self, now_s: float) -> None:
        """Look once, and ask the coordinator if that is due."""
        transport = self._node.transport
        change = self._watch.look(now_s, self._own(), transport.connected)
        if change is None:
            return
        if change == "moved" and not self._watch.tries:
            await self._leave_dead_connections()
        try:
            if self._is_asked:
                await self._ask(change)
        except (CoordinatorError, OSError, TimeoutError):
            self._watch.failed(now_s)
        else:
            self._watch.done(transport.connected)

    async def _leave_dead_connections(self) -> None:
        """End connections from an address that this machine no longer has.

        The kernel and libp2p would try to use them for half a minute, and not dial again.
        """
        for peer in self._node.transport.connected:
            self._node.transport.doubt(peer)
        with suppress(CoordinatorError):
            await self._client.close()  # the next call connects again

    async def _ask(self, change: Change) -> None:
        before = self._reachability.reach
        listen = self._node.daemon.options.listen
        found = await probe_again(self._client, listen, self._forwarding)
        if change == "lost" and before.address and not found.by_upnp:
            # The same router, perhaps with another address, forwards the same ports, but for those
            # that it forwarded at our request until it was restarted.
            found = replace(found, is_dialed=before.is_dialed and not before.by_upnp)
        if found != before:
            self._reachability.take(found)
            there = self._reachability
            self._report("info", notices.reach_changed(str(there), reach=there.kind))
