"""A DHT node over the network in memory: what `atoll.dht.node.Node` is to a peer.

Transport and roster are real; the roster's records are signed, verified and exchanged as over
libp2p. Kademlia is not here: a run of a few machines has each record on all nodes that can be
reached, so `MemoryDht` puts them there, and a search that meets a dead or frozen node takes as long
as hivemind's.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from atoll.dht.addresses import peer_of
from atoll.dht.roster import DhtRoster
from atoll.dht.tasks import Tasks
from atoll.dht.testing.memory import MemoryTransport
from atoll.dht.transport import Check, TransportError, admit_everyone
from atoll.peer.lab.hunt.edges import here

ASKED = 2  # as in `atoll.dht.node`
ASK_EVERY_S, ASK_SOON_S, ASK_TIMEOUT_S = 5.0, 1.0, 5.0
SILENT_S = 3.0  # a search waits so long for a node that is dead
STEP_S = 0.05  # of a search without one


class MemoryDht:
    """One machine's node of the DHT, with the interface of hivemind's."""

    def __init__(self, transport: MemoryTransport, nodes: dict[str, MemoryDht]) -> None:
        """Know all nodes that ever joined."""
        self._transport = transport
        self._nodes = nodes
        self._stored: dict[tuple[str, str], tuple[bytes, float]] = {}
        nodes[transport.peer_id] = self

    async def store(
        self, key: str, value: bytes, expiration_time: float, subkey: str | None = None
    ) -> bool:
        """Store a record at all nodes that can be reached; return whether there is another."""
        reached = await self._search()
        for node in (self, *reached):
            node._stored[key, subkey or ""] = (value, expiration_time)
        return True

    async def get(self, key: str, latest: bool = False) -> Any:  # noqa: ANN401
        """Return the records of a key, as hivemind does."""
        newest: dict[str, tuple[bytes, float]] = {}
        for node in (self, *await self._search()):
            for (stored_key, subkey), (value, until_s) in node._stored.items():
                if stored_key == key and until_s > newest.get(subkey, (b"", 0.0))[1]:
                    newest[subkey] = (value, until_s)
        values = {subkey: SimpleNamespace(value=value) for subkey, (value, _) in newest.items()}
        return SimpleNamespace(value=values) if values else None

    def _reaches(self, node: MemoryDht) -> bool:
        here = self._transport
        return here.network.reaches(here.peer_id, node._transport.peer_id)

    async def _search(self) -> list[MemoryDht]:
        others = [node for node in self._nodes.values() if node is not self]
        reached = [node for node in others if self._reaches(node)]
        await asyncio.sleep(STEP_S if len(reached) == len(others) else SILENT_S)
        return [node for node in reached if self._reaches(node)]


class NodeTransport(MemoryTransport):
    """A transport with what only libp2p's has."""

    relayed: frozenset[str] = frozenset()

    @property
    def connected(self) -> frozenset[str]:
        """The PeerIDs of the living."""
        return frozenset(self.network.peers) - {self.peer_id}

    def learn(self, peer: str, addresses: Sequence[str]) -> None:
        """Do nothing: a PeerID is all that is needed."""

    def seen_at(self, peer: str) -> str:
        """Return nothing: no router stands in between."""
        return ""


class MemoryNode:
    """A node in memory; see the module."""

    def __init__(self, transport: NodeTransport, roster: DhtRoster, identity: Any) -> None:  # noqa: ANN401
        self.identity = identity
        self.transport = transport
        self.roster = roster
        self.relays: tuple[str, ...] = ()
        self.seen: tuple[str, ...] = ()
        self.bootstrap: tuple[str, ...] = ()
        self.addresses = [f"/ip4/10.0.0.1/tcp/1/p2p/{transport.peer_id}"]
        self.relaying = SimpleNamespace(mbit_s=0.0, allow=lambda mbit_s: None)
        self.notices = SimpleNamespace(show=bytes)
        self.punching = SimpleNamespace(look=lambda: None, on_hole=None)
        options = SimpleNamespace(announce=("10.0.0.1",), is_loopback_only=True, listen=())
        self.daemon = SimpleNamespace(options=options, all_remote_addresses=_nobody)
        self._tasks = Tasks()
        self._tasks.spawn(self._ask_around())

    @classmethod
    async def start(
        cls,
        identity_path: Path,
        *,
        run_id: str,
        bootstrap: Sequence[str] = (),
        admission: bytes = b"",
        check: Check = admit_everyone,
        clock_offset_s: float = 0.0,
        **_: object,
    ) -> MemoryNode:
        """Join the network of the machine that this is called on."""
        machine = here()
        machine.clock_offset_s = clock_offset_s
        transport = machine.join_mesh(admission, check)
        roster = DhtRoster(
            MemoryDht(transport, machine.world.dht),
            machine.identity,
            run_id=run_id,
            credential=lambda: transport.admission,
            check=check,
        )
        transport.serve("roster", roster.serve)
        node = machine.world.nodes[transport.peer_id] = cls(transport, roster, machine.identity)
        node.bootstrap = tuple(bootstrap)
        return node

    @property
    def is_reached(self) -> bool:
        """Whether its process runs, and is not frozen."""
        return self.transport.network.reaches(self.peer_id, self.peer_id)

    @property
    def peer_id(self) -> str:
        """Our PeerID."""
        return self.transport.peer_id

    async def close(self) -> None:
        """Leave the network."""
        await self._tasks.close()
        await self.roster.leave()
        await self.transport.close()

    async def _ask_around(self) -> None:
        while True:
            known = sorted(set(self.roster.known) - {self.peer_id})
            asked = random.sample(known, min(len(known), ASKED))
            if len(known) < ASKED:
                asked += [peer_of(address) for address in self.bootstrap]
            for peer in dict.fromkeys(asked):
                if peer != self.peer_id:
                    await self._exchange(peer)
            soon = len(self.roster.known) <= ASKED
            await asyncio.sleep(ASK_SOON_S if soon else ASK_EVERY_S)

    async def _exchange(self, peer: str) -> None:
        try:
            answer = await self.transport.call(
                peer, "roster", self.roster.question(), timeout_s=ASK_TIMEOUT_S
            )
            await self.roster.hear(answer)
        except (TransportError, TimeoutError, ValueError):
            pass


async def _nobody() -> dict[str, list[str]]:
    return {}
