"""The transport over libp2p: each exchange is one libp2p stream, framed by `atoll.dht.transport`.

We use p2pd's raw streams, not hivemind's servicers: those allocate whatever length a stranger
names, and have no deadlines. Flow control is p2pd's and the kernel's: `send` waits while the far
side does not read. Opening a stream costs no round trip of its own once two peers know each other,
but some milliseconds of four processes; calls therefore keep theirs for a while.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from atoll.dht.addresses import CIRCUIT, by_family, refused, relay_of
from atoll.dht.arrivals import ArrivalMemory
from atoll.dht.libp2p_stream import LibP2PStream, T
from atoll.dht.notices import NoticeBoard
from atoll.dht.p2pd import Accept, P2pd, P2pdError, open_files
from atoll.dht.relaying import Relaying
from atoll.dht.strangers import Strangers
from atoll.dht.tasks import Tasks, end
from atoll.dht.transport import (
    MAX_CALL_BYTES,
    PING,
    VERSION,
    CallHandler,
    Check,
    Connection,
    DeadlineExceeded,
    Handlers,
    PeerUnreachable,
    Refused,
    RelayedStreamLost,
    StreamHandler,
    TransportError,
    TransportStatistics,
    admit_everyone,
    checked_method,
    checked_size,
    log_failure,
    within,
)
from atoll.dht.wirecount import WireTotals

logger = logging.getLogger(__name__)


GREETING_S = 10.0  # for the OPEN of a peer that showed an admission before
STRANGER_GREETING_S = 2.0  # for the OPEN of others; it travels with the stream
CALL_STREAM_S = 60.0  # for 3 MiB over a bad link, and for the next call to arrive
MAX_IDLE_CALLS = 2  # per peer and method
PARTING_S = 0.5  # for others to close their streams too, before ours are aborted
MAX_STREAMS_PER_PEER = 256  # bounds the memory that one peer can claim
SPARE_FILES = 2  # one in so many descriptors may be a stream that others opened
DIAL_RETRY_S = 0.25  # first pause between dials
BACKOFF_S = 5.0  # for which libp2p itself does not dial again after a failed dial
NO_WORD = frozenset({"dial backoff", "network is unreachable"})
"""Reasons of failed dials that say nothing about the peer."""
PROBE_S = 1.0  # for a TCP handshake
BROKEN_S = 60.0  # for which a relay comes last: some rounds, after which it may have been mended
TLS_S = 10.0  # to begin and to end it on a relayed stream
PING_S = 3.0  # for the answer of a peer that has let an exchange expire
PATIENCE_S = 0.5  # least time that the higher PeerID waits for the lower to dial


def protocol_name(run_id: str) -> str:
    """Return a run's libp2p protocol: peers of another run or version cannot open its streams."""
    return f"/atoll/{VERSION}/{run_id}"


def dial_failures(error: str) -> set[str]:
    """Return the reasons that p2pd gives for the addresses of a failed dial, each on a line."""
    lines = [line.strip() for line in error.splitlines()]
    failures = [line.partition("] ")[2] for line in lines if line.startswith("* [")]
    return {failure.rpartition(": ")[2] for failure in failures}


def _relayed(stream: LibP2PStream) -> int:
    return stream.bytes_sent + stream.bytes_received if stream.relay else 0


def _connection_of(stream: LibP2PStream) -> Connection:
    return stream.connection


class LibP2PTransport:
    """A `Transport` over a p2pd, in the caller's event loop."""

    def __init__(
        self,
        daemon: P2pd,
        *,
        run_id: str,
        admission: bytes = b"",
        check: Check = admit_everyone,
        rng: random.Random | None = None,
        count_wire: Callable[[], WireTotals | None] = lambda: None,
        relaying: Relaying | None = None,
        notices: NoticeBoard | None = None,
    ) -> None:
        """Create it; call `start` next.

        Args:
            daemon: carries the streams; its owner closes it.
            run_id: names the run's protocol.
            admission: our credential.
            check: judges those of others.
            rng: spreads dials.
            count_wire: returns the kernel's counters, or None.
            relaying: opens and accepts streams through third peers; without, there are none.
            notices: shows strangers what they may know; without, they get nothing.
        """
        self.admission = admission
        self.handlers = Handlers(check, log_failure)
        self.restarts = 0
        self._daemon = daemon
        self._protocol = protocol_name(run_id)
        self._rng = rng or random.Random()
        self._count_wire = count_wire
        self._is_closed = False
        self._streams: set[LibP2PStream] = set()
        self._idle: dict[tuple[str, str, bytes], list[LibP2PStream]] = {}
        self._tasks = Tasks()
        self._known: dict[str, tuple[str, ...]] = {}
        self._connected: set[str] = set()
        self._behind: set[str] = set()
        """peers that only a relay reaches"""
        self._relaying = relaying
        self._notices = notices
        self._dialing: dict[str, asyncio.Lock] = {}
        self._strangers = Strangers()
        self._memory = ArrivalMemory()
        self._handled: set[LibP2PStream] = set()
        """streams whose handler runs, which may outlive their connection"""
        self._doubted: set[str] = set()
        self._refused_s: dict[str, float] = {}
        """by peer, when its machine last refused a connection"""
        self._broken_s: dict[str, float] = {}
        """by relay, when a stream through it last broke"""
        self._calls_made = 0
        self._messages = [0, 0]
        self._bytes = [0, 0]
        self._relayed = 0

    async def start(self) -> None:
        """Start serving, the first time and after `rebind`."""
        accepts: dict[str, Accept] = {self._protocol: self._accept}
        if self._relaying is not None:
            self._relaying.bind(self._strangers, self._accept_relayed, self.doubt)
            accepts[self._relaying.protocol] = self._relaying.accept
        if self._notices is not None:
            accepts[self._notices.protocol] = self._notices.accept
        await self._daemon.listen(accepts)

    async def rebind(self, daemon: P2pd) -> None:
        """Continue with a new daemon of the same identity, after the old one died."""
        self._daemon = daemon
        self._connected.clear()  # connections and streams died with the old daemon
        self._idle.clear()
        self.restarts += 1
        await self.start()

    @property
    def peer_id(self) -> str:
        """This peer's PeerID in base58."""
        return self._daemon.peer_id

    @property
    def addresses(self) -> list[str]:
        """Multiaddrs at which others can dial this peer."""
        return list(self._daemon.addresses)

    @property
    def connected(self) -> frozenset[str]:
        """PeerIDs to which there was a connection of our own when we last looked."""
        return frozenset(self._connected)

    @property
    def relayed(self) -> frozenset[str]:
        """PeerIDs that only a relay reached when we last looked."""
        return frozenset(self._behind - self._connected)

    def seen_at(self, peer: str) -> str:
        """Return the address from which a peer comes, as its relay sees it; empty if unknown."""
        return self._relaying.seen_at.get(peer, "") if self._relaying is not None else ""

    async def is_connected(self, peer: str) -> bool:
        """Return whether there is a connection of our own to a peer now."""
        return peer in await self._live()

    async def dial_once(self, peer: str, addresses: Sequence[str], *, timeout_s: float) -> None:
        """Dial a peer, whose other addresses stay known. Raises PeerUnreachable."""
        await self._daemon.dial(peer, addresses, timeout_s=timeout_s)
        self._connected.add(peer)

    def serve(self, method: str, handler: CallHandler) -> None:
        """Answer calls of `method` with `handler`."""
        self.handlers.serve(method, handler)

    def serve_stream(self, method: str, handler: StreamHandler) -> None:
        """Pass streams of `method` to `handler`."""
        self.handlers.serve_stream(method, handler)

    async def call(self, peer: str, method: str, body: bytes, *, timeout_s: float) -> bytes:
        """Send a request and return its answer."""
        checked_method(method)
        checked_size("a call", len(body), MAX_CALL_BYTES)
        work = self._call(peer, method, body, timeout_s)
        return await self._within(work, timeout_s, f"call of {method}", peer)

    async def open(self, peer: str, method: str, *, timeout_s: float) -> LibP2PStream:
        """Open a stream to the peer's handler of `method`."""
        checked_method(method)
        work = self._open(peer, method, is_call=False, timeout_s=timeout_s)
        return await self._within(work, timeout_s, f"open of {method}", peer)

    async def _within(
        self, work: Coroutine[None, None, T], timeout_s: float, what: str, peer: str
    ) -> T:
        try:
            return await within(work, timeout_s, what, peer)
        except DeadlineExceeded:
            self.doubt(peer)
            raise

    def doubt(self, peer: str) -> None:
        """Ask a connected peer for a sign of life; close its connections if none comes.

        A router that has a new address, or a laptop in another network, leaves connections that
        libp2p takes for live for up to a minute. Meanwhile it does not dial those peers again.
        Of a peer behind relays, these are asked.
        """
        if peer in self._behind and peer not in self._connected:
            for relay in self._relays_of(peer):
                self._doubt(relay)
        else:
            self._doubt(peer)

    def _doubt(self, peer: str) -> None:
        if peer in self._connected and peer not in self._doubted and not self._is_closed:
            self._doubted.add(peer)
            self._tasks.spawn(self._expect_life(peer))

    async def _expect_life(self, peer: str) -> None:
        began_s = asyncio.get_running_loop().time()
        try:
            with suppress(TransportError):
                await within(self._call(peer, PING, b"", PING_S), PING_S, "ping", peer)
                return
            carried = (s for s in self._streams if (s.relay or s.remote) == peer)
            if not any(stream.heard_s >= began_s for stream in carried):
                logger.info("%s is silent; its connections are closed", peer)
                await self._daemon.disconnect(peer)
                self._connected.discard(peer)
        finally:
            self._doubted.discard(peer)

    def learn(self, peer: str, addresses: Sequence[str]) -> None:
        """Remember a peer's addresses for the first `call` or `open`."""
        self._known[peer] = tuple(addresses)
        self._behind.discard(peer)

    async def connect(self, peer: str, addresses: Sequence[str], *, timeout_s: float) -> None:
        """Ensure a connection to the peer."""
        self.learn(peer, addresses)
        self._connected.discard(peer)
        await within(self._connect(peer, timeout_s), timeout_s, "connect", peer)

    def statistics(self) -> TransportStatistics:
        """Return the counters since the start."""
        wire = self._count_wire()
        messages, (sent, received) = self._totals()
        return TransportStatistics(
            wire_bytes_sent=wire.sent if wire else sent,
            wire_bytes_received=wire.received if wire else received,
            wire_bytes_delivered=wire.acked if wire else sent,
            source="tcp" if wire else "application",
            messages_sent=messages[0],
            messages_received=messages[1],
            calls_made=self._calls_made,
            calls_served=self.handlers.num_served,
            refused=self.handlers.num_refused,
            streams_open=len(self._streams) - sum(map(len, self._idle.values())),
            restarts=self.restarts,
            relayed_bytes=self._relayed + sum(map(_relayed, self._streams)),
        )

    async def close(self) -> None:
        """End all streams and handlers. The daemon stays; its owner closes it."""
        if self._is_closed:
            return
        self._is_closed = True
        for stream in list(self._streams):  # first, so that the others read an end, not a break
            await stream.close()
        await self._tasks.close()
        await self._part()

    async def _part(self) -> None:
        """Give the others a moment to close as well, so that nothing we sent is lost."""
        with suppress(TimeoutError):
            async with asyncio.timeout(PARTING_S):
                while self._streams:
                    await asyncio.sleep(0.01)
        for stream in list(self._streams):
            stream.connection.abort()
        await asyncio.sleep(0)  # asyncio closes the sockets in the next turn of the loop

    def _totals(self) -> tuple[tuple[int, int], tuple[int, int]]:
        live = self._streams
        messages = tuple(self._messages)
        num_bytes = tuple(self._bytes)
        return (
            (
                messages[0] + sum(s.num_sent for s in live),
                messages[1] + sum(s.num_received for s in live),
            ),
            (
                num_bytes[0] + sum(s.bytes_sent for s in live),
                num_bytes[1] + sum(s.bytes_received for s in live),
            ),
        )

    # Connections

    async def _connect(self, peer: str, timeout_s: float) -> None:
        lock = self._dialing.setdefault(peer, asyncio.Lock())
        async with lock:
            if peer in self._connected or (peer in self._behind and peer not in await self._live()):
                return
            # If two dial each other at once, both fail, and libp2p waits 5 s before it dials again.
            if self.peer_id > peer:
                await self._wait_for_dial(peer)
            if peer in self._connected:
                return
            if self._relays_of(peer):
                if peer not in await self._live():  # it may have dialed us, its relay
                    await self._meet_relays(peer, timeout_s)
            else:
                await self._dial(peer, self._known.get(peer, ()), timeout_s)

    async def _wait_for_dial(self, peer: str) -> None:
        """Wait a moment for the lower PeerID to dial."""
        deadline_s = asyncio.get_running_loop().time() + PATIENCE_S * (1 + self._rng.random())
        while asyncio.get_running_loop().time() < deadline_s:
            if peer in await self._live():
                return
            await asyncio.sleep(0.02 + 0.02 * self._rng.random())

    def _relays_of(self, peer: str) -> list[str]:
        """Return the relays behind which a peer is, in its order."""
        if self._relaying is None:
            return []
        named = (relay_of(address) for address in self._known.get(peer, ()))
        return [relay for relay in named if relay is not None]

    async def _meet_relays(self, peer: str, timeout_s: float) -> None:
        """Connect to a relay of the peer; its streams are opened through that.

        All are dialed at once: one that died is named first until the peer publishes another.
        """
        relays = [relay for relay in self._relays_of(peer) if relay != self.peer_id]
        if not relays:
            why = "it has no connection to this peer, which relays for it"
            raise PeerUnreachable(f"no relay reaches {peer}: {why}", peer=peer)
        if self._connected.isdisjoint(relays):
            for address in self._known[peer]:
                relay = relay_of(address)
                if relay in relays and relay not in self._known:
                    self.learn(relay, [address.partition(CIRCUIT)[0]])
            await self._meet_one(peer, relays, timeout_s)
        self._behind.add(peer)

    async def _meet_one(self, peer: str, relays: Sequence[str], timeout_s: float) -> None:
        """Return once there is a connection to one of a peer's relays."""
        dials = [asyncio.create_task(self._connect(relay, timeout_s)) for relay in relays]
        errors: list[str] = []
        try:
            for dial in asyncio.as_completed(dials):
                try:
                    return await dial
                except PeerUnreachable as error:
                    errors.append(str(error))
        finally:
            await end(*dials, expected=(TransportError, TimeoutError))
        raise PeerUnreachable(f"no relay reaches {peer}: {'; '.join(errors)}", peer=peer)

    async def _dial(self, peer: str, addresses: Sequence[str], timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline_s, pause_s = loop.time() + timeout_s, DIAL_RETRY_S
        turns = by_family(addresses)
        while peer not in await self._live():
            now, turns = (turns[0], turns[1:]) if turns else (addresses, [])
            try:
                left_s = max(0.1, deadline_s - loop.time()) / (1 + len(turns))
                await self._daemon.dial(peer, now, timeout_s=left_s)
                self._connected.add(peer)
            except (P2pdError, TimeoutError) as error:
                is_gone = self._is_gone(peer, str(error), loop.time())
                if turns:
                    continue
                if isinstance(error, TimeoutError):
                    raise
                if is_gone or await self._refuses(peer, str(error), addresses):
                    raise PeerUnreachable(
                        f"{peer} refused the connection: {error}", peer=peer
                    ) from error
                pause_s *= 1 + self._rng.random()  # by chance, so that two peers fall out of step
                if loop.time() + pause_s > deadline_s:
                    raise PeerUnreachable(
                        f"{peer} cannot be reached: {error}", peer=peer
                    ) from error
                await asyncio.sleep(pause_s)

    def _is_gone(self, peer: str, error: str, now_s: float) -> bool:
        """Return whether the peer refused the connection; retrying is pointless.

        libp2p does not dial again for a while after that, and has no other reason to give. An
        address of a family that this machine does not have says nothing about the peer.
        """
        reasons = dial_failures(error) - NO_WORD
        if reasons == {"connection refused"}:
            self._refused_s[peer] = now_s
        elif reasons:
            self._refused_s.pop(peer, None)
        return now_s - self._refused_s.get(peer, -math.inf) < BACKOFF_S

    async def _refuses(self, peer: str, error: str, addresses: Sequence[str]) -> bool:
        """Return whether a peer's machine refuses, asked beside libp2p if that does not dial now.

        The DHT in p2pd may have dialed a peer that died before we did.
        """
        reasons = dial_failures(error)
        if "dial backoff" not in reasons or reasons - NO_WORD:
            return False
        if not await refused(addresses, PROBE_S):
            return False
        self._refused_s[peer] = asyncio.get_running_loop().time()
        return True

    def _note_broken(self, relay: str) -> None:
        lately = {r: at for r, at in self._broken_s.items() if self._broke_lately(r)}
        self._broken_s = lately | {relay: asyncio.get_running_loop().time()}

    def _broke_lately(self, relay: str) -> bool:
        """Return whether a stream through a relay ended without an end mark in the last minute."""
        now_s = asyncio.get_running_loop().time()
        return now_s - self._broken_s.get(relay, -math.inf) < BROKEN_S

    async def _live(self) -> set[str]:
        self._connected = await self._daemon.connected()
        return self._connected

    async def _dialed(
        self, peer: str, method: str, *, is_call: bool, timeout_s: float
    ) -> LibP2PStream:
        try:
            return await self._dialed_once(peer, method, is_call=is_call, timeout_s=timeout_s)
        except RelayedStreamLost:  # in the TLS handshake: another relay is tried
            return await self._dialed_once(peer, method, is_call=is_call, timeout_s=timeout_s)

    async def _dialed_once(
        self, peer: str, method: str, *, is_call: bool, timeout_s: float
    ) -> LibP2PStream:
        if peer not in self._connected and peer in self._known:
            await self._connect(peer, timeout_s)
        stream = LibP2PStream(peer, method, is_call=is_call, admit=None, memory=self._memory)
        tls: ssl.SSLContext | None = None
        if peer in self._behind and peer not in self._connected:
            stream.relay, connection, tls = await self._through_relay(peer, timeout_s)
        else:
            connection = await self._directly(peer, timeout_s)
        try:
            await self._attach(stream, connection, tls)
        except OSError as error:
            kind = RelayedStreamLost if stream.relay else PeerUnreachable
            raise kind(f"{peer} cannot be reached: {error}", peer=peer) from error
        return stream

    async def _directly(self, peer: str, timeout_s: float) -> socket.socket:
        try:
            connection = await self._daemon.open(peer, self._protocol, timeout_s=timeout_s)
        except P2pdError as error:
            self._connected.discard(peer)
            raise PeerUnreachable(f"{peer} cannot be reached: {error}", peer=peer) from error
        self._connected.add(peer)
        return connection

    async def _through_relay(
        self, peer: str, timeout_s: float
    ) -> tuple[str, socket.socket, ssl.SSLContext]:
        assert self._relaying is not None
        errors: list[str] = []
        # Those that we have a connection to first: to dial one that is dead takes seconds. One that
        # fell silent comes after those that did not, and one that broke a stream last.
        live, relays = await self._live(), self._relays_of(peer)
        relays.sort(key=lambda r: (self._broke_lately(r), r not in live, r in self._doubted))
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        for index, relay in enumerate(relays):
            left_s = deadline_s - asyncio.get_running_loop().time()
            share_s = left_s / (len(relays) - index)
            try:
                return relay, *await self._relaying.open(relay, peer, timeout_s=share_s)
            except DeadlineExceeded as error:
                self._doubt(relay)
                errors.append(f"through {relay}: {error}")
            except (PeerUnreachable, Refused) as error:
                errors.append(f"through {relay}: {error}")
        raise PeerUnreachable(f"{peer} cannot be reached {'; '.join(errors)}", peer=peer)

    async def _attach(
        self,
        stream: LibP2PStream,
        connection: socket.socket,
        tls: ssl.SSLContext | None,
        *,
        is_accepted: bool = False,
    ) -> None:
        loop = asyncio.get_running_loop()
        made = partial(_connection_of, stream)
        options: dict[str, Any] = {}
        if tls is not None:
            options = {"ssl": tls, "ssl_handshake_timeout": TLS_S, "ssl_shutdown_timeout": TLS_S}
        try:
            if is_accepted:
                await loop.connect_accepted_socket(made, connection, **options)
            else:
                if tls is not None:
                    options["server_hostname"] = ""  # its certificate is pinned
                await loop.create_unix_connection(made, sock=connection, **options)
        except BaseException:
            connection.close()
            raise
        stream.on_gone, stream.on_silent_relay = self._forget, self._doubt
        stream.on_broken_relay = self._note_broken
        self._streams.add(stream)

    def _forget(self, stream: LibP2PStream) -> None:
        self._strangers.leave(stream)  # only now: a refused one keeps its descriptor for a while
        if stream in self._streams:
            self._streams.discard(stream)
            for key in [key for key, idle in self._idle.items() if stream in idle]:
                self._idle[key].remove(stream)
            self._messages[0] += stream.num_sent
            self._messages[1] += stream.num_received
            self._bytes[0] += stream.bytes_sent
            self._bytes[1] += stream.bytes_received
            self._relayed += _relayed(stream)

    # Our side of an exchange

    async def _open(
        self, peer: str, method: str, *, is_call: bool, timeout_s: float
    ) -> LibP2PStream:
        if self._is_closed:
            raise TransportError(f"the transport of {self.peer_id} is closed")
        stream = await self._dialed(peer, method, is_call=is_call, timeout_s=timeout_s)
        stream.open_with(self.admission)
        return stream

    async def _call(self, peer: str, method: str, body: bytes, timeout_s: float) -> bytes:
        self._calls_made += 1
        try:
            return await self._ask(peer, method, body, timeout_s)
        except RelayedStreamLost:
            # Once more, through another relay: perhaps only the answer was lost. No call does
            # anything that a second one would do again.
            return await self._ask(peer, method, body, timeout_s)

    async def _ask(self, peer: str, method: str, body: bytes, timeout_s: float) -> bytes:
        stream = self._idle_stream(peer, method)
        if stream is None:
            stream = await self._open(peer, method, is_call=True, timeout_s=timeout_s)
        reply = await stream.ask(body)
        await self._keep(stream)
        return reply

    def _idle_stream(self, peer: str, method: str) -> LibP2PStream | None:
        # By admission too: the other side checked the one with which the stream was opened.
        idle = self._idle.get((peer, method, self.admission), [])
        while idle:
            stream = idle.pop()
            if stream.is_fresh:
                return stream
            stream.connection.abort()
        return None

    async def _keep(self, stream: LibP2PStream) -> None:
        """Keep the stream: opening one per call would cost 1 ms, another call on it 0.3 ms."""
        idle = self._idle.setdefault((stream.remote, stream.method, stream.admission), [])
        if stream.is_fresh and len(idle) < MAX_IDLE_CALLS and not self._is_closed:
            idle.append(stream)
        else:
            await stream.close()

    # The other side

    def _accept(self, remote: str, connection: socket.socket) -> None:
        why = self._why_full(remote) or self._strangers.why_full(remote)
        if why:
            logger.info("refused a stream of %s: %s", remote, why)
            connection.close()
            return
        stream = self._accepted(remote)
        task = self._tasks.spawn(self._serve_direct(stream, connection))
        task.add_done_callback(lambda _: self._served(stream, connection))

        def drop() -> None:
            stream.connection.abort()
            task.cancel()

        self._strangers.enter(remote, stream, drop)

    def _why_full(self, remote: str) -> str:
        """Return why a peer may open no more streams now; empty if it may."""
        if self._is_closed:
            return "this peer is leaving"
        counts = Counter(stream.remote for stream in self._streams | self._handled)
        if counts[remote] >= MAX_STREAMS_PER_PEER:
            return f"it has {counts[remote]} open, at most {MAX_STREAMS_PER_PEER} are allowed"
        if len(self._streams) >= open_files() // SPARE_FILES and not self._make_room(
            remote, counts
        ):
            return f"{len(self._streams)} are open, of all peers together"
        return ""

    def _make_room(self, remote: str, counts: Counter[str]) -> bool:
        """End the quietest stream of the peer with most of them; False if that is `remote`."""
        ((most, num_streams),) = counts.most_common(1)
        if num_streams <= counts[remote]:
            return False
        streams = [stream for stream in self._streams if stream.remote == most]
        quietest = min(streams, key=lambda stream: stream.heard_s, default=None)
        if quietest is None:  # handlers of streams that are lost: they end by themselves
            return False
        logger.info("ended a stream of %s, which has %d, to make room", most, num_streams)
        quietest.connection.abort()
        return True

    def _accepted(self, remote: str) -> LibP2PStream:
        return LibP2PStream(remote, "", is_call=False, admit=self._admit, memory=self._memory)

    def _served(self, stream: LibP2PStream, connection: socket.socket) -> None:
        if not stream.connection.is_made:  # cancelled before its first step
            self._strangers.leave(stream)
            connection.close()

    async def _accept_relayed(
        self, relay: str, remote: str, connection: socket.socket, tls: ssl.SSLContext
    ) -> None:
        """Take over a stream that a relay brought; return once its TLS stands."""
        why = self._why_full(remote)
        if why:
            logger.info("refused a relayed stream of %s: %s", remote, why)
            connection.close()
            return
        stream = self._accepted(remote)
        stream.relay = relay
        await self._attach(stream, connection, tls, is_accepted=True)
        self._tasks.spawn(self._serve(stream))

    def _admit(self, stream: LibP2PStream, admission: bytes) -> bool:
        try:
            self.handlers.check(stream.remote, admission, stream.method)
        except Exception as error:
            stream.refuse(self.handlers.refusal(error, self.peer_id))
            return False
        self._strangers.admit(stream.remote, stream)
        return True

    async def _serve_direct(self, stream: LibP2PStream, connection: socket.socket) -> None:
        await self._attach(stream, connection, None, is_accepted=True)
        self._connected.add(stream.remote)
        await self._serve(stream)

    async def _serve(self, stream: LibP2PStream) -> None:
        self._handled.add(stream)
        try:
            if await self._is_greeted(stream):
                await self._handle(stream)
        finally:
            self._handled.discard(stream)
            await stream.close()

    async def _is_greeted(self, stream: LibP2PStream) -> bool:
        patience_s = STRANGER_GREETING_S if stream in self._strangers else GREETING_S
        await asyncio.wait({stream.opened}, timeout=patience_s)
        if stream.opened.done() and not stream.opened.cancelled():
            return True
        if stream.connection.is_wanted:  # if not, a refusal is still on its way out
            stream.connection.abort()
        return False

    async def _handle(self, stream: LibP2PStream) -> None:
        try:
            await (self._answer(stream) if stream.is_call else self.handlers.run(stream))
        except Exception as error:
            stream.refuse(self.handlers.refusal(error, self.peer_id))

    async def _answer(self, stream: LibP2PStream) -> None:
        with suppress(DeadlineExceeded):  # no call for long: let the stream go
            while (body := await stream.recv(timeout_s=CALL_STREAM_S)) is not None:
                reply = await self.handlers.answer(stream.remote, stream.method, body)
                await stream.send(reply, timeout_s=CALL_STREAM_S)
