"""One module's view of a run's network: its own methods, and the peers that follow its log.

A run of several modules has one DHT and one set of connections. Peers of different modules share no
rounds, so each module's methods have names of their own ("head@stage-2"), and a peer that has moved
refuses calls for the module it has left. A dense run has one module without a name, whose methods
and peers are those of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from atoll.dht.roster import PeerRecord, Roster
from atoll.dht.transport import CallHandler, Stream, StreamHandler, Transport, TransportStatistics


def transport_of(module: str, transport: Transport) -> Transport:
    """Return the transport of a module's rounds."""
    # Its credential is a property, which pyright takes for another thing than an attribute.
    return cast(Transport, ModuleTransport(module, transport)) if module else transport


def roster_of(module: str, roster: Roster) -> Roster:
    """Return the roster of a module's peers."""
    return ModuleRoster(module, roster) if module else roster


class ModuleTransport:
    """A `Transport` whose methods are those of one module."""

    def __init__(self, module: str, inner: Transport) -> None:
        """Share the connections of `inner`."""
        self._module = module
        self._inner = inner

    def _name(self, method: str) -> str:
        return f"{method}@{self._module}"

    @property
    def peer_id(self) -> str:
        """This peer's PeerID."""
        return self._inner.peer_id

    @property
    def addresses(self) -> list[str]:
        """Multiaddrs at which others can dial this peer."""
        return self._inner.addresses

    @property
    def admission(self) -> bytes:
        """The credential sent with every exchange."""
        return self._inner.admission

    @admission.setter
    def admission(self, credential: bytes) -> None:
        self._inner.admission = credential

    async def call(self, peer: str, method: str, body: bytes, *, timeout_s: float) -> bytes:
        """Send a request to a peer's handler for this module."""
        return await self._inner.call(peer, self._name(method), body, timeout_s=timeout_s)

    async def open(self, peer: str, method: str, *, timeout_s: float) -> Stream:
        """Open a stream to a peer's handler for this module."""
        return await self._inner.open(peer, self._name(method), timeout_s=timeout_s)

    def serve(self, method: str, handler: CallHandler) -> None:
        """Answer calls for this module."""
        self._inner.serve(self._name(method), handler)

    def serve_stream(self, method: str, handler: StreamHandler) -> None:
        """Run `handler` for streams for this module."""
        self._inner.serve_stream(self._name(method), handler)

    async def connect(self, peer: str, addresses: Sequence[str], *, timeout_s: float) -> None:
        """Ensure a connection, which all modules share."""
        await self._inner.connect(peer, addresses, timeout_s=timeout_s)

    def statistics(self) -> TransportStatistics:
        """Return the counters of all modules together."""
        return self._inner.statistics()

    async def close(self) -> None:
        """Do nothing: the owner of the connections closes them."""


class ModuleRoster:
    """A `Roster` that knows the peers of one module; records of all travel through it."""

    def __init__(self, module: str, inner: Roster) -> None:
        """Read `inner`."""
        self._module = module
        self._inner = inner

    async def publish(self, record: PeerRecord, ttl_s: float) -> None:
        """Replace our record."""
        await self._inner.publish(record, ttl_s)

    async def peers(self) -> dict[str, PeerRecord]:
        """Return the peers that follow this module's log."""
        known = await self._inner.peers()
        return {peer: record for peer, record in known.items() if record.module == self._module}

    async def leave(self) -> None:
        """Remove our record."""
        await self._inner.leave()

    def question(self) -> bytes:
        """Return what to send to a peer that is asked for records."""
        return self._inner.question()

    async def answer(self, question: bytes, remote: str = "") -> bytes:
        """Return records for the peer that asks."""
        return await self._inner.answer(question, remote)

    async def hear(self, answer: bytes) -> None:
        """Take the records of an answer."""
        await self._inner.hear(answer)
