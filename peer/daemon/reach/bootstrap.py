"""The run's first DHT node, which lives with the coordinator and lets peers find each other.

It keeps the addresses of peers on disk and dials them after a restart: they have each other,
dropped this node while it was away, and do not look for it.

Raises `neighbours.PortInUse` if coordinator.dht_listen cannot be used on this
machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from atoll.coordinator.catching_up import Recover
from atoll.coordinator.gossip import FetchModel
from atoll.coordinator.heads import AskHead
from atoll.coordinator.relocating import OwnPlace
from atoll.coordinator.run.files import keep_known_peers, known_peers
from atoll.coordinator.service.server import NodeRequest
from atoll.dht.identity import Identity
from atoll.dht.node import Node
from atoll.dht.roster import RecordError, RosterError
from atoll.dht.scoped import roster_of, transport_of
from atoll.dht.tasks import Tasks
from atoll.dht.transport import TransportError
from atoll.optim.log.standing import ReplicaView
from atoll.peer.daemon.membership import addresses_to_keep
from atoll.peer.daemon.reach.neighbours import ADDRESSES_KEPT, PortInUse, free_port
from atoll.peer.daemon.reach.relocations import LOOK_S as TELL_S
from atoll.peer.daemon.reach.relocations import Relocations
from atoll.peer.gossip.snapshots import ModelFetcher
from atoll.peer.recovery.ledger import LedgerHeads, LedgerRecovery

REMEDY = (
    "pass another address with --dht-listen HOST:PORT, or set coordinator.dht_listen; port 0 takes "
    "any that is free"
)
ASK_EVERY = 15  # looks, half a minute, between questions whether another coordinator has followed
LOOK_S = 10.0  # between two looks into the roster
RENEWALS = 3  # in the life of an admission, so that two may be late


class BootstrapNode:
    """A node of the run's DHT with the coordinator's own admission, renewed while it runs."""

    def __init__(self, node: Node, request: NodeRequest, admission_s: float) -> None:
        """Use `start`."""
        self._node = node
        self._request = request
        self._tasks = Tasks()
        self._tasks.spawn(self._renew(admission_s / RENEWALS))
        self._tasks.spawn(self._remember())

    @classmethod
    async def start(cls, request: NodeRequest, *, admission_s: float) -> BootstrapNode:
        """Start the node; `admission_s` is how long an admission lasts.

        Raises:
            PortInUse: the address is taken, or not this machine's.
            IdentityError: the key file cannot be used.
            P2pdError: p2pd did not start.
        """
        host = request.host
        port = choose_port(host, request.port, request.identity_path.with_name("node.port"))
        peer_id = Identity.load_or_create(request.identity_path).peer_id
        announce = [multiaddr(request.advertise, port)] if request.advertise else []
        if request.announce:
            announce = [multiaddr(each, number) for each, number in request.announce]
        node = await Node.start(
            request.identity_path,
            run_id=request.run_id.hex(),
            listen_maddrs=[multiaddr(each, port) for each in both_families(host, port)],
            announce_maddrs=announce,
            true_source=request.true_source,
            admission=request.admit(peer_id),
            check=request.check,
            relay_mbit_s=request.relay_mbit_s,
        )
        # Its watch dials them; nothing waits for it.
        node.bootstrap = known_peers(request.identity_path.parent)
        return cls(node, request, admission_s)

    @property
    def addresses(self) -> Sequence[str]:
        """Multiaddrs with the PeerID, for invites."""
        return self._node.addresses

    def recover(self, module: str) -> Recover:
        """Return what brings the coordinator's replica of a module up to the peers'."""
        return LedgerRecovery(
            me=self._node.peer_id,
            transport=transport_of(module, self._node.transport),
            roster=roster_of(module, self._node.roster),
        )

    def ask_head(self, module: str) -> AskHead:
        """Return what asks peers where they stand in a module's log."""
        return LedgerHeads(
            me=self._node.peer_id,
            transport=transport_of(module, self._node.transport),
            roster=roster_of(module, self._node.roster),
        )

    async def introduce(self, question: bytes) -> bytes:
        """Return signed records of peers; empty if the question is malformed."""
        with contextlib.suppress(RecordError):
            return await self._node.roster.answer(question)
        return b""

    def tell_place(self, place: OwnPlace) -> None:
        """Let all peers know from now on where the coordinator is, and strangers who ask."""
        self._node.notices.show = lambda: place.record
        self._tasks.spawn(self._tell(Relocations.of_coordinator(self._node, place)))

    async def direct_connections(self) -> dict[str, list[str]]:
        """Return the addresses of connected peers, except of those that a relay has shown us."""
        transport = self._node.transport
        found = await self._node.daemon.all_remote_addresses()
        return {
            peer: addresses
            for peer, addresses in found.items()
            if peer not in transport.relayed and not transport.seen_at(peer)
        }

    def fetch_model(self, keeper: ReplicaView) -> FetchModel:
        """Return what fetches a peer's model, in a run by gossip."""
        state = keeper.state
        return ModelFetcher(
            transport=self._node.transport,
            roster=self._node.roster,
            layout=state.layout,
            memory_numel=state.memory_M.numel(),
        )

    async def close(self) -> None:
        """Leave the DHT."""
        await self._tasks.close()
        await self._node.close()

    async def _renew(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            self._node.transport.admission = self._request.admit(self._node.peer_id)

    async def _tell(self, relocations: Relocations) -> None:
        num_looks = 0
        while True:
            with contextlib.suppress(RosterError, TransportError, TimeoutError, OSError):
                await relocations.look(asks=num_looks % ASK_EVERY == 0)
            num_looks += 1
            await asyncio.sleep(TELL_S)

    async def _remember(self) -> None:
        while True:
            # An OSError too: on a full disk the node continues with the addresses in memory.
            with contextlib.suppress(RosterError, TransportError, TimeoutError, OSError):
                records = (await self._node.roster.peers()).values()
                known = [a for record in records for a in record.addresses[:ADDRESSES_KEPT]]
                self._keep(addresses_to_keep((), self._node.bootstrap, known))
            await asyncio.sleep(LOOK_S)

    def _keep(self, addresses: tuple[str, ...]) -> None:
        if set(addresses) == set(self._node.bootstrap):
            return
        # p2pd may restart in mid-run; it then joins the DHT by these.
        self._node.bootstrap = addresses
        keep_known_peers(self._request.identity_path.parent, addresses)


def multiaddr(host: str, port: int) -> str:
    """Return the libp2p form of a host name or IP address and a TCP port."""
    try:
        kind = f"ip{ipaddress.ip_address(host).version}"
    except ValueError:
        kind = "dns"
    return f"/{kind}/{host}/tcp/{port}"


def both_families(host: str, port: int) -> list[str]:
    """Return the hosts to listen on: "all of IPv4" brings all of IPv6, if that is free, and back.

    gRPC takes [::] for both, and libp2p does not.
    """
    other = {"0.0.0.0": "::", "::": "0.0.0.0"}.get(host)
    if other is None:
        return [host]
    with contextlib.suppress(PortInUse):
        free_port(other, port, remedy=REMEDY)
        return [host, other]
    return [host]


def choose_port(host: str, wanted: int, remembered: Path) -> int:
    """Return a free port: the wanted one, else the last one (so invites stay valid), else any.

    Raises:
        PortInUse: the wanted port is taken, or the host is not this machine's.
    """
    if wanted:
        return free_port(host, wanted, remedy=REMEDY)
    with contextlib.suppress(OSError, ValueError):
        return free_port(host, int(remembered.read_text(encoding="ascii")), remedy=REMEDY)
    port = free_port(host, 0, remedy=REMEDY)
    remembered.write_text(str(port), encoding="ascii")
    return port
