"""A peer among the others: ports to listen on, its record in the roster, and connections.

Ports are tried before p2pd is, which would exit without a reason.

Exceptions:

    ValueError
      PortInUse     an address cannot be listened on
"""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress

from atoll.dht import clock
from atoll.dht.addresses import TCP
from atoll.dht.node import Node
from atoll.dht.roster import PeerRecord, Roster, RosterError, RosterRole, StagePlace
from atoll.dht.tasks import together
from atoll.dht.transport import TransportError
from atoll.optim.log.entry import Elector
from atoll.optim.schedules import WindowEnd
from atoll.peer.daemon.options import LinkRates
from atoll.peer.daemon.reach.reachability import Reachability
from atoll.peer.daemon.views import TrainerView
from atoll.peer.rounds.messages import PROTOCOL

RECORD_TTL_S = 20.0  # rounds expect a dead peer for at most this long
CONNECT_S = 10.0  # libp2p does not dial again for 5 s after a failure
ADDRESSES_KEPT = 2  # of each peer: more would crowd other peers out of an invite's sixteen

ROSTER_ERRORS = (RosterError, TransportError, TimeoutError, OSError)


class PortInUse(ValueError):
    """An address that cannot be listened on."""


def window_ends(records: Iterable[PeerRecord], position: int, now_s: float) -> list[WindowEnd]:
    """Return when the windows of the trainers at a position end.

    Peers at another position are in another window, and one that does not know its pace does not
    know its end.
    """
    return [
        WindowEnd(
            step_s=record.step_s,
            in_s=record.ready_in_s - (now_s - (record.expires_at - RECORD_TTL_S)),
        )
        for record in records
        if record.role == "trainer" and record.position == position and record.step_s > 0
    ]


def free_port(host: str, port: int, *, remedy: str) -> int:
    """Listen for a moment and return the port; for 0, any free one.

    Raises:
        PortInUse: the port is taken, or the host is not this machine's; ends in `remedy`.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family) as server:
            bound: int = server.getsockname()[1]
    except (OSError, OverflowError) as error:
        raise PortInUse(f"cannot listen on {host}:{port} ({_reason(error)}); {remedy}") from None
    return bound


def _reason(error: OSError | OverflowError) -> str:
    if isinstance(error, OSError):
        return os.strerror(error.errno) if error.errno else str(error)
    return "no such port"  # an OverflowError: a number above 65535


def expect_free(listen: Iterable[str], *, remedy: str) -> None:
    """Check the TCP addresses among multiaddrs; port 0 stands for any free one.

    Raises:
        PortInUse: one of them cannot be listened on.
    """
    for found in filter(None, map(TCP.fullmatch, listen)):
        free_port(found["host"], int(found["port"]), remedy=remedy)


def is_turn(position: int, me: str, trainers: Iterable[str]) -> bool:
    """Return whether a position is this peer's, of trainers that take turns.

    They may know of different others for a moment: a position may be nobody's then, or of two.
    """
    turns = sorted({me, *trainers})
    return turns[position % len(turns)] == me


class WatchedRoster:
    """A `Roster` that answers at once with what the last look at the DHT gave.

    A look into the DHT takes as long as the slowest node that is asked: three seconds while one of
    them is dead, as after a peer or the coordinator was killed. A round must not wait for that, and
    need not: it asks the peers that it expects itself.
    """

    def __init__(self, roster: Roster) -> None:
        """Watch the roster in the DHT; the owner calls `look` every few seconds."""
        self._roster = roster
        self._last: dict[str, PeerRecord] | None = None

    async def publish(self, record: PeerRecord, ttl_s: float) -> None:
        """Store our record."""
        await self._roster.publish(record, ttl_s)

    async def peers(self) -> dict[str, PeerRecord]:
        """Return the peers of the last look; look if there was none."""
        return self._last if self._last is not None else await self.look()

    @property
    def seen(self) -> list[PeerRecord]:
        """The peers of the last look; none before the first."""
        return list((self._last or {}).values())

    async def look(self) -> dict[str, PeerRecord]:
        """Return the peers that are in the run now.

        Raises:
            RosterError, TransportError, TimeoutError: the DHT did not answer.
        """
        self._last = await self._roster.peers()
        return self._last

    async def leave(self) -> None:
        """Withdraw our record."""
        await self._roster.leave()

    def question(self) -> bytes:
        """Return what to send to a peer that is asked for records."""
        return self._roster.question()

    async def answer(self, question: bytes, remote: str = "") -> bytes:
        """Return records for the peer that asks."""
        return await self._roster.answer(question, remote)

    async def hear(self, answer: bytes) -> None:
        """Take the records of an answer."""
        await self._roster.hear(answer)


class Neighbours:
    """Keeps connections to the other peers, and this peer's record where they look for it."""

    def __init__(
        self,
        node: Node,
        me: Elector,
        rates: LinkRates,
        reachability: Reachability,
        *,
        role: RosterRole = "trainer",
        module: str = "",
        keep_addresses: Callable[[Sequence[str]], None],
    ) -> None:
        """Pass addresses of peers that are here to `keep_addresses`."""
        self.roster = WatchedRoster(node.roster)
        self._node = node
        self._me = me
        self._rates = rates
        self.reachability = reachability
        self._role: RosterRole = role
        self._module = module
        self._keep_addresses = keep_addresses

    async def publish(
        self,
        epoch: int,
        position: int,
        view: TrainerView,
        *,
        module: str | None = None,
        place: StagePlace | None = None,
    ) -> None:
        """Publish where this peer is; if the DHT does not take it, the next time will do.

        Args:
            epoch: of its log.
            position: entries that it has applied.
            view: of its trainer.
            module: that it serves, or goes to; by default that of its log.
            place: in a pipeline, its place there.
        """
        record = PeerRecord(
            peer_id=self._me.peer_id,
            addresses=tuple(self._node.addresses),
            incarnation=self._me.incarnation,
            role=self._role,
            epoch=epoch,
            position=position,
            tokens_per_s=view.tokens_per_s,
            uplink_mbit_s=self._rates.uplink_mbit_s,
            downlink_mbit_s=self._rates.downlink_mbit_s,
            ready_in_s=view.ready_in_s,
            step_s=view.step_s,
            relay_mbit_s=self._node.relaying.mbit_s,
            protocol=PROTOCOL,
            module=self._module if module is None else module,
            place=place,
        )
        with suppress(*ROSTER_ERRORS):
            await self.roster.publish(record, RECORD_TTL_S)

    async def connect(self, roster_peers: Callable[[], Awaitable[dict[str, PeerRecord]]]) -> None:
        """Look who is here, and connect to all of `roster_peers`."""
        with suppress(*ROSTER_ERRORS):
            await self.roster.look()
        records = await roster_peers()
        self.reachability.look(records, self._node.transport.connected)
        others = [r for peer, r in records.items() if peer != self._me.peer_id]
        dialed = (record for record in others if record.is_dialed)
        self._keep_addresses([a for r in dialed for a in r.addresses[:ADDRESSES_KEPT]])
        await together(*(self._dial(record) for record in others))
        self._node.punching.look()

    async def _dial(self, record: PeerRecord) -> None:
        with suppress(TransportError, TimeoutError, ValueError):
            await self._node.transport.connect(
                record.peer_id, record.addresses, timeout_s=CONNECT_S
            )

    def validates(self, position: int) -> bool:
        """Return whether it is this peer's turn to validate a position; in any thread."""
        others = (r.peer_id for r in self._seen_in_module() if r.role == "trainer")
        return is_turn(position, self._me.peer_id, others)

    def paces_s(self) -> list[float]:
        """Return the seconds a step takes each other trainer that reports them; in any thread."""
        others = (r for r in self._seen_in_module() if r.peer_id != self._me.peer_id)
        return [r.step_s for r in others if r.role == "trainer" and r.step_s > 0]

    def window_ends(self, position: int) -> list[WindowEnd]:
        """Return when the windows of the other trainers at a position end; in any thread."""
        others = (r for r in self._seen_in_module() if r.peer_id != self._me.peer_id)
        return window_ends(others, position, clock.now_s())

    def _seen_in_module(self) -> list[PeerRecord]:
        """Return the peers of the last look that follow the same log."""
        return [record for record in self.roster.seen if record.module == self._module]
