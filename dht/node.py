"""A peer's place in the network: p2pd, hivemind's DHT, transport and roster in one asyncio loop.

`Node.start` runs in the caller's loop and starts no process but p2pd. A watcher restarts a p2pd
that dies or no longer answers, with the same identity and port; DHT and transport use the new one,
and `on_restart` is awaited. Open streams have ended with PeerUnreachable by then. A node whose
bootstrap peers are away starts all the same and keeps trying them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path

from atoll.dht import clock, measuring
from atoll.dht.addresses import announced, peer_of, through
from atoll.dht.bindings import DHTID, P2P, DHTNode, PeerID
from atoll.dht.identity import Identity
from atoll.dht.kademlia import WAIT_S as DHT_WAIT_S
from atoll.dht.kademlia import Door, join
from atoll.dht.libp2p import LibP2PTransport
from atoll.dht.notices import NoticeBoard
from atoll.dht.p2pd import P2pd, P2pdError, P2pdOptions
from atoll.dht.punching import Punching
from atoll.dht.relaying import Relaying
from atoll.dht.roster import DhtRoster, RosterValidator, roster_key
from atoll.dht.tasks import Tasks, together
from atoll.dht.transport import Check, TransportError, admit_everyone, log_failure
from atoll.dht.wirecount import WireCounter, WireTotals

logger = logging.getLogger(__name__)

WATCH_S = 1.0  # between two looks; the death of p2pd is noticed at once
REJOIN_EVERY = 30  # watches; a bootstrap peer that is gone for good is dialled twice a minute
PING_EVERY = 5  # watches; a p2pd that hangs is found within 5 s + PING_TIMEOUT_S
PING_TIMEOUT_S = 10.0  # a machine under load answers late; a restart breaks every stream
BOOTSTRAP_S = 10.0  # to dial one bootstrap peer
ASKED = 2  # peers asked at a time: 9 kB/s in large runs, 250 records in the life of one
ASK_EVERY_S = 5.0  # as often as records are renewed
ASK_SOON_S = 1.0  # while hardly anyone is known
ASK_TIMEOUT_S = 5.0  # until the next one is asked anyway
RESTART_PAUSE_S = 1.0  # between two attempts to restart p2pd

OnRestart = Callable[[], Awaitable[None]]


class _Dht:
    """Hivemind's DHT node and its client of p2pd."""

    def __init__(self, p2p: P2P, node: DHTNode) -> None:
        self.node = node
        self._p2p: P2P | None = p2p

    @classmethod
    async def start(
        cls,
        daemon: P2pd,
        run_id: str,
        reached: Sequence[str],
        door: Door,
        check: Check,
        old: DHTNode | None = None,
    ) -> _Dht:
        """Join the DHT by the bootstrap addresses that could be reached.

        A node that replaces an old one keeps what it stored.
        """
        p2p = await P2P.replicate(daemon.control_maddr)
        key_id = DHTID.generate(source=roster_key(run_id)).to_bytes()
        try:
            node = await join(
                p2p,
                peer_id=daemon.peer_id,
                reached=[peer_of(address) for address in reached],
                validator=RosterValidator(key_id, run_id, check),
                door=door,
            )
        except BaseException:
            await p2p.shutdown()
            raise
        if old is not None:  # else the run's records would be gone until all publish again
            node.protocol.storage = old.protocol.storage
        return cls(p2p, node)

    @property
    def is_deaf(self) -> bool:
        """True if hivemind has stopped reading from p2pd.

        It stops for good when an answer arrives for a call that timed out.
        """
        reader = self._task("_read_task")
        return reader is not None and reader.done()

    async def close(self) -> None:
        """Stop the node and its client. Idempotent."""
        self.node.is_alive = False
        for task in map(self._task, ("_read_task", "_write_task")):
            if task is not None and task.done() and not task.cancelled():
                task.exception()  # a reset by a p2pd that died: asyncio would log it
        p2p, self._p2p = self._p2p, None
        if p2p is not None:
            await p2p.shutdown()

    def _task(self, name: str) -> asyncio.Task[None] | None:
        client = getattr(self._p2p, "_client", None)
        return getattr(getattr(client, "control", None), name, None)


class Node:
    """A running node, created by `Node.start`; all of it belongs to that event loop."""

    def __init__(
        self,
        identity: Identity,
        daemon: P2pd,
        *,
        run_id: str,
        transport: LibP2PTransport,
        relaying: Relaying,
        notices: NoticeBoard,
        dht: _Dht,
        door: Door,
        check: Check,
        roster: DhtRoster,
        wire: WireCounter,
    ) -> None:
        self.identity = identity
        self.daemon = daemon
        self.run_id = run_id
        self.wire = wire
        self.transport = transport
        self.relaying = relaying
        self.notices = notices
        self.relays: tuple[str, ...] = ()
        """Multiaddrs of the peers through which others reach us, if this one cannot be dialed."""
        self.seen: tuple[str, ...] = ()
        """Multiaddrs at which others see us, such as a router's forwarded port."""
        self.punching = Punching(transport)
        self.roster = roster
        self.bootstrap: tuple[str, ...] = ()
        """Multiaddrs of peers through which to join; may be replaced at any time."""
        self.on_restart: OnRestart | None = None
        self._dht = dht
        self._door = door
        self._check = check
        self._watchers = Tasks()
        self._watchers.spawn(self._watch())
        self._watchers.spawn(self._stay_joined())
        self._watchers.spawn(self._ask_around())

    @classmethod
    async def start(
        cls,
        identity_path: str | os.PathLike[str] | None,
        *,
        run_id: str,
        listen_maddrs: Sequence[str] = ("/ip4/127.0.0.1/tcp/0",),
        announce_maddrs: Sequence[str] = (),
        true_source: Callable[[str], str] = str,
        bootstrap: Sequence[str] = (),
        admission: bytes = b"",
        check: Check = admit_everyone,
        relay_mbit_s: float = 0.0,
        clock_offset_s: float = 0.0,
        on_restart: OnRestart | None = None,
    ) -> Node:
        """Start p2pd, transport, DHT and roster, in about a second.

        Args:
            identity_path: the key file, made if missing; None for a key that lives in memory.
            run_id: names the run's protocol and DHT key; other runs are invisible.
            listen_maddrs: where to listen; port 0 is any free one.
            announce_maddrs: addresses announced for others to dial, if they differ.
            true_source: returns the true source of a forwarded connection, given its multiaddr.
            bootstrap: multiaddrs with /p2p/ of peers in the run; none for the first.
            admission: our credential, which goes with every exchange.
            check: judges the credentials of others.
            relay_mbit_s: bandwidth at which we relay streams of admitted peers that cannot dial
                each other; 0 relays nothing.
            clock_offset_s: the run's clock minus ours.
            on_restart: awaited after p2pd was restarted.

        Raises:
            IdentityError: the key file cannot be used.
            P2pdError: p2pd did not start.
        """
        identity = (
            Identity.load_or_create(Path(identity_path)) if identity_path else Identity.ephemeral()
        )
        options = P2pdOptions(
            listen=tuple(listen_maddrs),
            announce=tuple(announce_maddrs),
            true_source=true_source,
        )
        clock.set_offset(clock_offset_s)  # before the DHT starts: it refuses a clock 3 s off
        async with AsyncExitStack() as undo:
            daemon = await P2pd.start(identity, options)
            undo.push_async_callback(daemon.close)
            wire = WireCounter([daemon.pid])
            relaying = Relaying(
                identity,
                daemon,
                run_id=run_id,
                check=check,
                admission=lambda: transport.admission,
                relay_mbit_s=relay_mbit_s,
            )
            undo.push_async_callback(relaying.close)
            notices = NoticeBoard(run_id)
            undo.push_async_callback(notices.close)
            transport = LibP2PTransport(
                daemon,
                run_id=run_id,
                admission=admission,
                check=check,
                count_wire=wire.totals,
                relaying=relaying,
                notices=notices,
            )
            undo.push_async_callback(transport.close)
            await transport.start()
            reached = await _dial(daemon, bootstrap, {identity.peer_id})
            door = Door(check, lambda: transport.admission)
            undo.callback(door.close)
            dht = await _Dht.start(daemon, run_id, reached, door, check)
            undo.push_async_callback(dht.close)
            roster = DhtRoster(
                dht.node,
                identity,
                run_id=run_id,
                credential=lambda: transport.admission,
                check=check,
                in_thread=door.in_thread,
            )
            transport.serve("roster", roster.serve)
            node = cls(
                identity,
                daemon,
                run_id=run_id,
                transport=transport,
                relaying=relaying,
                notices=notices,
                dht=dht,
                door=door,
                check=check,
                roster=roster,
                wire=wire,
            )
            node.bootstrap, node.on_restart = tuple(bootstrap), on_restart
            measuring.serve(transport, lambda peer: node.daemon.remote_addresses(peer))
            undo.pop_all()
            return node

    @property
    def peer_id(self) -> str:
        """Our PeerID in base58."""
        return self.identity.peer_id

    @property
    def dht(self) -> DHTNode:
        """Hivemind's node; a restart of p2pd replaces it."""
        return self._dht.node

    @property
    def addresses(self) -> list[str]:
        """Multiaddrs with /p2p/ at which others reach us; private ones if there are no others."""
        if self.relays:
            return [through(relay, self.peer_id) for relay in self.relays]
        seen = [f"{address}/p2p/{self.peer_id}" for address in self.seen]
        return announced(list(dict.fromkeys([*seen, *self.daemon.addresses])))

    def wire_totals(self) -> WireTotals | None:
        """Return the bytes on p2pd's sockets so far, or None if the kernel reports none."""
        return self.wire.totals()

    async def close(self) -> None:
        """Leave the roster; end streams, DHT and p2pd. Idempotent."""
        await self._watchers.close()
        await self.punching.close()
        if self.daemon.is_alive:
            with suppress(TimeoutError):
                async with asyncio.timeout(DHT_WAIT_S):
                    await self.roster.leave()
        await self.transport.close()
        await self.relaying.close()
        await self.notices.close()
        await self._dht.close()
        self._door.close()
        await self.daemon.close()

    # Watching

    async def _watch(self) -> None:
        num_watches = 0
        while True:
            await self._wait_for_death(WATCH_S)
            num_watches += 1
            if not await self._is_well(ask=num_watches % PING_EVERY == 0):
                await self._restart()
            self.wire.totals()

    async def _wait_for_death(self, timeout_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.daemon.process.wait()

    async def _is_well(self, *, ask: bool) -> bool:
        if not self.daemon.is_alive or self._dht.is_deaf:
            return False
        if ask:
            try:
                await self.daemon.ping(timeout_s=PING_TIMEOUT_S)
            except (P2pdError, TimeoutError):
                return False
        return True

    async def _restart(self) -> None:
        logger.warning("p2pd of %s has ended or hangs; restarting it", self.peer_id)
        options = self.daemon.options  # with the port that it had: others know our address
        self.wire.totals()  # the last look at its sockets, before they are gone
        await self.daemon.close()
        await self._dht.close()
        while not await self._is_revived(options):
            await asyncio.sleep(RESTART_PAUSE_S)
        if self.on_restart is not None:
            try:
                await self.on_restart()
            except Exception as error:  # the watcher must survive its listener
                log_failure(error)

    async def _is_revived(self, options: P2pdOptions) -> bool:
        try:
            await self._revive(options)
        except Exception as error:
            logger.error("p2pd could not be restarted, retrying: %r", error)
            await self.daemon.close()
            await self._dht.close()
            return False
        return True

    async def _revive(self, options: P2pdOptions) -> None:
        self.wire.remove(self.daemon.pid)
        self.daemon = await P2pd.start(self.identity, options)
        self.wire.add(self.daemon.pid)
        await self.transport.rebind(self.daemon)
        reached = await _dial(self.daemon, self.bootstrap, {self.peer_id})
        self._dht = await _Dht.start(
            self.daemon, self.run_id, reached, self._door, self._check, self.dht
        )
        self.roster.node = self.dht

    async def _stay_joined(self) -> None:
        num_looks = 0
        while True:
            await asyncio.sleep(WATCH_S)
            num_looks += 1
            try:
                await _dial(self.daemon, self.relays, {self.peer_id})  # nothing if it is connected
                await self._rejoin(is_due=num_looks % REJOIN_EVERY == 0)
            except Exception as error:  # hivemind's, while p2pd restarts
                logger.info("could not look for the DHT's bootstrap peers, retrying: %r", error)

    async def _rejoin(self, *, is_due: bool) -> None:
        """Reconnect to bootstrap peers that the DHT lost: at once if none is left, else when due.

        The periodic attempt reunites two halves of a run that were cut apart: each still has peers.
        """
        known = {str(peer) for peer in self.dht.protocol.routing_table.uid_to_peer_id.values()}
        if known and not is_due:
            return
        for address in await _dial(self.daemon, self.bootstrap, {self.peer_id, *known}):
            await self.dht.protocol.call_ping(PeerID.from_base58(peer_of(address)))

    async def _ask_around(self) -> None:
        """Exchange records with some peers: the roster must not depend on the DHT."""
        while True:
            known = set(self.roster.known) - {self.peer_id}
            asked = set(random.sample(sorted(known), min(len(known), ASKED)))
            if len(known) < ASKED:
                for address in self.bootstrap:
                    asked.add(peer := peer_of(address))
                    self.transport.learn(peer, [address])
            for peer in asked - {self.peer_id}:
                try:
                    await self._exchange(peer)
                except (TransportError, TimeoutError, ValueError) as error:
                    logger.debug("no records from %s: %s", peer, error)
            await asyncio.sleep(ASK_EVERY_S if len(self.roster.known) > ASKED else ASK_SOON_S)

    async def _exchange(self, peer: str) -> None:
        answer = await self.transport.call(
            peer, "roster", self.roster.question(), timeout_s=ASK_TIMEOUT_S
        )
        await self.roster.hear(answer)


async def _dial(daemon: P2pd, addresses: Sequence[str], but: Collection[str]) -> list[str]:
    """Dial bootstrap addresses, except of the peers `but`; return those that were reached."""
    others = [address for address in addresses if peer_of(address) not in but]
    reached = set()

    async def reach(address: str) -> None:
        try:
            await daemon.dial(peer_of(address), [address], timeout_s=BOOTSTRAP_S)
        except (TransportError, TimeoutError, ValueError) as error:
            logger.info("bootstrap peer %s cannot be reached: %s", address, error)
        else:
            reached.add(address)

    await together(*map(reach, others))
    return [address for address in others if address in reached]
