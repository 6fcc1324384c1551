"""Where the coordinator is, passed from peer to peer.

A coordinator that starts on another machine is known to nobody there. Its DHT node dials the peers
that it knew and tells each of them its relocation; peers pass it on, and one that is out of touch
with its coordinator asks others. So does a coordinator now and then, as another one may have taken
its place: rebuilt from a follower, say, while this one's machine was thought dead. One call does
both, of either side::

    relocation    the caller's newest record, or nothing  ->  the other's, or nothing if it is equal

Nodes also show it to strangers (`atoll.dht.notices`), as a newcomer with an old invite is one.

A record counts by the run key's signature and its serial alone (`Whereabouts`), whoever sent it.
Each is passed on once, so records that are shown again cause no traffic.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from atoll.coordinator.rpc.client import CoordinatorClient
from atoll.coordinator.run.invite import MAX_BOOTSTRAP
from atoll.coordinator.run.relocation import Relocation, RelocationInvalid
from atoll.dht.addresses import peer_of
from atoll.dht.node import Node
from atoll.dht.refusals import RefusalCode
from atoll.dht.roster import PeerRecord, RosterError
from atoll.dht.tasks import together
from atoll.dht.transport import Refused, Transport, TransportError
from atoll.peer import notices
from atoll.peer.daemon.membership import Enrolment, FindPlace
from atoll.peer.daemon.reach.reachability import Reachability
from atoll.peer.rounds.context import OnEvent

METHOD = "relocation"
LOOK_S = 2.0
CALL_S = 10.0  # libp2p does not dial again for 5 s after a failure
AT_ONCE = 8  # calls of one look, of which the unreachable take their whole time
PASSED_ON = 8  # peers that a peer tells of each record: 1,000 all know after four steps
# Looks without the coordinator after which nodes are asked: after two minutes, then twice as late
# each time, and each hour from then on. Each time starts a process of libp2p and dials up to 32
# nodes, which a thousand peers share.
ASK_NODES_AFTER, ASK_NODES_EVERY = 60, 1800
ASKED = 2  # at each look without the coordinator


class KnownPlace(Protocol):
    """What a node knows of where the coordinator is."""

    @property
    def record(self) -> bytes:
        """The newest record; empty without one."""
        ...

    def take(self, record: bytes) -> bool:
        """Take a record; return whether it replaces the one here. Raises RelocationInvalid."""
        ...


class Spreading:
    """Decides whom to call next, without sockets."""

    def __init__(self, told_of_each: float) -> None:
        """Tell so many peers of each record."""
        self._told_of_each = self._left = told_of_each
        self._record = b""
        self._told: set[str] = set()

    def due(self, record: bytes, others: Collection[str], *, asks: bool) -> list[str]:
        """Return the peers to call now, at most `AT_ONCE`.

        Args:
            record: the newest one here.
            others: PeerIDs of those online.
            asks: whether others may have a newer record than this node hears of.
        """
        if record != self._record:
            self._record, self._told, self._left = record, set(), self._told_of_each
        self._told &= set(others)  # one that comes back may have missed it
        untold = [peer for peer in others if peer not in self._told] if record else []
        most = max(0, min(len(untold), self._left, AT_ONCE))  # who was asked was told as well
        told = random.sample(untold, int(most))
        asked = random.sample(sorted(others), min(len(others), ASKED)) if asks else []
        return list(dict.fromkeys([*told, *asked]))[:AT_ONCE]

    def told(self, peer: str, record: bytes) -> None:
        """Note that a peer has a record."""
        if record == self._record and peer not in self._told:
            self._told.add(peer)
            self._left -= 1


class Relocations:
    """One node's exchange of relocations with the others."""

    def __init__(
        self,
        transport: Transport,
        place: KnownPlace,
        peers: Callable[[], Awaitable[Mapping[str, PeerRecord]]],
        *,
        known: Callable[[], Sequence[str]] = tuple,
        told_of_each: float = PASSED_ON,
    ) -> None:
        """Answer from now on; `look` calls the `peers` that are online.

        `known` are multiaddrs of nodes, of which those that seem to be offline are called as well
        when others are asked.
        """
        self._transport = transport
        self._place = place
        self._peers = peers
        self._known = known
        self._spreading = Spreading(told_of_each)
        transport.serve(METHOD, self._answer)

    @classmethod
    def of_coordinator(cls, node: Node, place: KnownPlace) -> Relocations:
        """Return the exchange of the coordinator's node, which tells everybody.

        On a machine whose clock is ahead of the run's, the records of all peers have expired, and
        peers learn the clock from who tells them its place. So it calls those that it knew before.
        """

        def known() -> Sequence[str]:
            return node.bootstrap  # it changes as peers come and go

        return cls(node.transport, place, node.roster.peers, known=known, told_of_each=math.inf)

    async def look(self, *, asks: bool = False) -> None:
        """Call the peers that are due, and with `asks` some others."""
        seen = await self._peers()
        found: dict[str, Sequence[str]] = {p: record.addresses for p, record in seen.items()}
        if asks:
            found = _by_peer(self._known()) | found
        others = sorted(found.keys() - {self._transport.peer_id})
        due = self._spreading.due(self._place.record, others, asks=asks)
        await together(*(self._exchange(peer, found[peer]) for peer in due))

    async def _exchange(self, peer: str, addresses: Sequence[str]) -> None:
        ours = self._place.record
        with suppress(TransportError, TimeoutError, OSError, ValueError):
            await self._transport.connect(peer, addresses, timeout_s=CALL_S)
            theirs = await self._transport.call(peer, METHOD, ours, timeout_s=CALL_S)
            self._spreading.told(peer, ours)
            if theirs:
                self._place.take(theirs)

    async def _answer(self, remote: str, record: bytes) -> bytes:
        ours = self._place.record
        if record == ours:
            return b""
        try:
            if record:
                self._place.take(record)
        except RelocationInvalid as error:
            raise Refused(RefusalCode.BAD_REQUEST, str(error)) from None
        return b"" if self._place.record == record else self._place.record


def _by_peer(addresses: Sequence[str]) -> dict[str, Sequence[str]]:
    found = dict[str, list[str]]()
    for address in addresses:
        found.setdefault(peer_of(address), []).append(address)
    return {**found}


def asks_nodes(looks: int) -> bool:
    """Return whether a peer asks nodes after so many looks in a row without the coordinator."""
    if looks >= ASK_NODES_EVERY:
        return looks % ASK_NODES_EVERY == 0
    doublings, rest = divmod(looks, ASK_NODES_AFTER)
    return rest == 0 and doublings.bit_count() == 1


class Following:
    """Lets a peer follow its coordinator, however it has heard where that is."""

    def __init__(
        self,
        client: CoordinatorClient,
        node: Node,
        enrolment: Enrolment,
        reachability: Reachability,
        peers: Callable[[], Awaitable[Mapping[str, PeerRecord]]],
        *,
        report: OnEvent,
        find_place: FindPlace,
    ) -> None:
        """Answer other peers from now on; `keep` follows.

        `find_place` asks nodes as a stranger does: a peer whose admission has expired is one.
        """
        self._client = client
        self._node = node
        self._enrolment = enrolment
        self._reachability = reachability
        self._report = report
        self._find_place = find_place
        self._looks_without = 0
        """looks in a row without the coordinator"""
        self._known = set(client.addresses)
        self._followed = b""
        self._exchange = Relocations(node.transport, client.whereabouts, peers)
        node.notices.show = lambda: client.whereabouts.record

    async def keep(self) -> None:
        """Follow until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Follow a record that is new, and exchange records with other peers."""
        place = self._client.whereabouts
        if place.relocation is not None and place.record != self._followed:
            self._followed = place.record
            await self._follow(place.record, place.relocation)
        with suppress(RosterError, TransportError, TimeoutError, OSError):
            await self._exchange.look(asks=not self._client.is_reached)
        self._looks_without = 0 if self._client.is_reached else self._looks_without + 1
        if asks_nodes(self._looks_without):
            kept = self._enrolment.membership.bootstrap
            await self._find_place((*self._node.bootstrap, *kept))

    async def _follow(self, record: bytes, there: Relocation) -> None:
        self._enrolment.keep_relocation(record, there.bootstrap)
        if there.bootstrap:
            kept = dict.fromkeys([*there.bootstrap, *self._node.bootstrap])
            self._node.bootstrap = tuple(kept)[:MAX_BOOTSTRAP]
            self._reachability.follow(there.bootstrap)
        await self._client.follow()
        if not self._known >= set(there.addresses):
            self._report("info", notices.coordinator_moved(addresses=there.addresses))
        self._known = set(self._client.addresses)
