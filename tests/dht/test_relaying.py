"""Streams through a third peer between real p2pd processes; what a relay and strangers may not."""

import asyncio
import contextlib
import signal
import socket
import ssl
import time

import psutil
import pytest

from atoll.dht import libp2p, p2pd, relaying, strangers
from atoll.dht.addresses import relay_of, through
from atoll.dht.identity import Identity
from atoll.dht.libp2p import LibP2PTransport
from atoll.dht.p2pd import P2pd, P2pdOptions
from atoll.dht.refusals import RefusalCode
from atoll.dht.relaying import Kind, RateLimit, Relaying, Secrets
from atoll.dht.strangers import MAX_SILENT, MAX_SILENT_PER_PEER
from atoll.dht.transport import (
    MAX_CALL_BYTES,
    DeadlineExceeded,
    PeerUnreachable,
    Refused,
    RelayedStreamLost,
    RelayedStreamSilent,
)
from support.nodes import RUN, TICKET, check, echo, echo_stream


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Let no p2pd find the others by itself: on loopback everybody can be dialed.

    Nor end after 60 s without a DHT, which the tests that share it may take together.
    """
    full, without = p2pd.command, {"-dhtServer=1", "-idleTimeout=60s"}

    def without_routing(control, key, options):
        return [a for a in full(control, key, options) if a not in without]

    monkeypatch.setattr(p2pd, "command", without_routing)


class End:
    """A peer: p2pd, transport and relayed streams, without a DHT."""

    def __init__(self, identity, daemon, transport, relays):
        self.identity, self.daemon = identity, daemon
        self.transport, self.relaying = transport, relays
        self.peer_id = identity.peer_id

    @classmethod
    async def start(cls, *, relay_mbit_s=0.0, ticket=TICKET, run=RUN):
        identity = Identity.ephemeral()
        daemon = await P2pd.start(identity, P2pdOptions())
        relays = Relaying(
            identity,
            daemon,
            run_id=run,
            check=check,
            admission=lambda: ticket,
            relay_mbit_s=relay_mbit_s,
        )
        transport = LibP2PTransport(
            daemon, run_id=run, admission=ticket, check=check, relaying=relays
        )
        transport.serve("echo", echo)
        transport.serve_stream("echo", echo_stream)
        await transport.start()
        return cls(identity, daemon, transport, relays)

    async def close(self):
        await self.transport.close()
        await self.relaying.close()
        await self.daemon.close()


SHARED: list[End] = []
RUNNERS: list[asyncio.Runner] = []


@pytest.fixture(scope="module", autouse=True)
def closed_after_all():
    """One loop, so that most tests share a relay and three peers.

    A worker may run these tests in several batches, with other modules between them.
    """
    RUNNERS.append(asyncio.Runner())
    yield
    RUNNERS[0].run(close(SHARED))
    SHARED.clear()
    RUNNERS.pop().close()


async def close(some):
    for each in reversed(some):
        await each.close()


async def start(count, relay_mbit_s, **options):
    """A relay, and peers that have dialed it and know each other behind it only."""
    relay = await End.start(relay_mbit_s=relay_mbit_s)
    peers = [await End.start(**options) for _ in range(count)]
    (address,) = relay.daemon.addresses
    for peer in peers:
        await peer.transport.connect(relay.peer_id, [address], timeout_s=10)
        for other in peers:
            peer.transport.learn(other.peer_id, [through(address, other.peer_id)])
    return [relay, *peers]


@contextlib.asynccontextmanager
async def shared(count=2):
    """The relay and peers that tests share, which leave them as they were."""
    if not SHARED:
        SHARED.extend(await start(3, 1000.0))
    yield SHARED[: 1 + count]


@contextlib.asynccontextmanager
async def ends(count=2, *, relay_mbit_s=1000.0, **options):
    """A relay and peers of one test."""
    some = await start(count, relay_mbit_s, **options)
    try:
        yield some
    finally:
        await close(some)


def run(main, timeout_s=60):
    async def bounded():
        async with asyncio.timeout(timeout_s):
            await main()

    RUNNERS[0].run(bounded())


def test_an_address_names_its_relay():
    relay = f"/ip4/1.2.3.4/tcp/7701/p2p/{Identity.ephemeral().peer_id}"
    assert relay_of(through(relay, "B")) == relay.rpartition("/")[2]
    assert through(relay, "B") == f"{relay}/p2p-circuit/p2p/B"
    assert relay_of(relay) is None


def test_calls_and_streams_pass_through_a_relay():
    async def main():
        async with shared() as (relay, a, b):
            answer = await a.transport.call(b.peer_id, "echo", b"hi", timeout_s=10)
            assert answer == a.peer_id.encode() + b":hi"
            body = bytes(range(256)) * ((MAX_CALL_BYTES - 100) // 256)
            answer = await b.transport.call(a.peer_id, "echo", body, timeout_s=20)
            assert answer == b.peer_id.encode() + b":" + body
            async with await a.transport.open(b.peer_id, "echo", timeout_s=10) as stream:
                for size in (0, 1, 1 << 20):
                    await stream.send(bytes(size), timeout_s=10)
                    assert await stream.recv(timeout_s=10) == bytes(size)
                await stream.end(timeout_s=10)
                assert await stream.recv(timeout_s=10) is None
            assert b.peer_id not in await a.daemon.connected()
            assert relay.relaying.carried_bytes > 2 * len(body)

    run(main)


def test_many_streams_share_a_relay():
    async def main():
        async with shared(3) as (_, a, b, c):
            pairs = [(x, y) for x in (a, b, c) for y in (a, b, c) if x is not y]
            calls = [
                x.transport.call(y.peer_id, "echo", bytes([n]) * 10_000, timeout_s=20)
                for x, y in pairs
                for n in range(10)
            ]
            answers = await asyncio.gather(*calls)
            assert len(answers) == 60 and all(len(answer) == 10_053 for answer in answers)

    run(main)


def test_a_direct_connection_is_preferred():
    async def main():
        async with ends() as (relay, a, b):
            await a.transport.call(b.peer_id, "echo", b"", timeout_s=10)
            before = relay.relaying.carried_bytes
            await b.transport.connect(a.peer_id, a.daemon.addresses, timeout_s=10)
            await asyncio.sleep(0.1)
            a.transport._idle.clear()
            await a.transport.call(b.peer_id, "echo", bytes(100_000), timeout_s=10)
            assert relay.relaying.carried_bytes < before + 100_000

    run(main)


def test_a_relay_that_relays_nothing_says_so():
    async def main():
        async with ends(relay_mbit_s=0.0) as (_, a, b):
            with pytest.raises(PeerUnreachable, match="relays nothing; ask for a rate above 0"):
                await a.transport.call(b.peer_id, "echo", b"", timeout_s=10)

    run(main)


def test_a_peer_that_is_gone_is_unreachable():
    async def main():
        async with ends() as (_, a, b):
            await b.close()
            await asyncio.sleep(0.2)
            with pytest.raises(PeerUnreachable, match=f"{b.peer_id} has no connection"):
                await a.transport.call(b.peer_id, "echo", b"", timeout_s=10)

    run(main)


def test_a_stream_breaks_with_its_relay():
    async def main():
        async with ends() as (relay, a, b):
            async with await a.transport.open(b.peer_id, "echo", timeout_s=10) as stream:
                await stream.send(b"x", timeout_s=10)
                assert await stream.recv(timeout_s=10) == b"x"
                relay.daemon.process.kill()
                with pytest.raises(RelayedStreamLost):
                    await stream.recv(timeout_s=10)

    run(main)


def test_a_relay_that_is_gone_before_it_is_asked_is_unreachable():
    """A broken pipe in its place once restarted the work of a whole peer."""

    class Gone:
        async def open(self, peer, protocol, *, timeout_s):
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            theirs.close()
            return ours

    async def main():
        relays = Relaying(
            Identity.ephemeral(), Gone(), run_id=RUN, check=check, admission=lambda: TICKET
        )
        with pytest.raises(PeerUnreachable, match="R ended a relayed stream"):
            await relays.open("R", "B", timeout_s=5)
        await relays.close()

    run(main)


def test_strangers_are_not_relayed():
    async def main():
        async with ends(ticket=b"none") as (relay, a, b):
            with pytest.raises(PeerUnreachable, match="expected a ticket"):
                await a.transport.call(b.peer_id, "echo", b"", timeout_s=10)
            assert relay.relaying.denied == 1
            assert relay.relaying.carried_bytes == 0

    run(main)


@pytest.mark.exhaustive  # without p2pd: the two tests after it
def test_a_relay_keeps_to_its_bandwidth():
    async def main():
        async with ends(relay_mbit_s=8.0) as (_, a, b):
            await a.transport.call(b.peer_id, "echo", b"", timeout_s=10)
            began = time.monotonic()
            async with await a.transport.open(b.peer_id, "echo", timeout_s=10) as stream:
                await stream.send(bytes(1 << 20), timeout_s=20)
                assert len(await stream.recv(timeout_s=20)) == 1 << 20
            # There and back at 1 MB/s; it can only take longer.
            assert time.monotonic() - began > 1.8

    run(main)


def test_the_rate_is_shared_in_turns():
    async def main():
        rate, done = RateLimit(8.0), []

        async def use(name, pieces):
            for _ in range(pieces):
                await rate.take(name, 20_000)
                done.append(name)

        await asyncio.gather(use("a", 5), use("b", 5))
        assert done[1:9].count("a") == done[1:9].count("b") == 4

    run(main)


def test_a_sender_of_many_streams_has_one_share():
    async def main():
        rate, done = RateLimit(8.0), []

        async def use(name, pieces):
            for _ in range(pieces):
                await rate.take(name, 20_000)
                done.append(name)

        await asyncio.gather(*(use("a", 5) for _ in range(4)), use("b", 5))
        assert done[:11].count("b") == 5  # the first turn of each is over at once

    run(main)


async def freeze(process):
    """Stop a process; on a busy machine its threads go on for a while after the signal."""
    process.send_signal(signal.SIGSTOP)
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        await asyncio.sleep(0.01)


def test_a_connection_without_a_sign_of_life_is_closed(monkeypatch):
    """As after a router got another address: p2pd believes in it for a minute and does not dial."""
    monkeypatch.setattr(libp2p, "PING_S", 0.3)

    async def main():
        async with ends(1) as (a, b):
            await b.transport.call(a.peer_id, "echo", b"", timeout_s=10)
            await freeze(a.daemon.process)
            try:
                with pytest.raises(DeadlineExceeded):
                    await b.transport.call(a.peer_id, "new", b"", timeout_s=0.3)
                while await b.transport.is_connected(a.peer_id):
                    await asyncio.sleep(0.02)
            finally:
                a.daemon.process.send_signal(signal.SIGCONT)
            await b.transport.connect(a.peer_id, a.daemon.addresses, timeout_s=20)
            await b.transport.call(a.peer_id, "echo", b"", timeout_s=10)

    run(main)


def test_a_slow_answer_closes_no_connection(monkeypatch):
    async def main():
        async with ends(1) as (a, b):

            async def never(remote, body):
                await asyncio.sleep(60)

            a.transport.serve("never", never)
            with pytest.raises(DeadlineExceeded):
                await b.transport.call(a.peer_id, "never", b"", timeout_s=0.3)
            assert b.transport._doubted
            while b.transport._doubted:
                await asyncio.sleep(0.02)
            assert await b.transport.is_connected(a.peer_id)

    run(main)


@pytest.mark.exhaustive
def test_a_relay_doubts_a_peer_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(libp2p, "PING_S", 0.3)
    monkeypatch.setattr(relaying, "JOIN_S", 0.3)

    async def main():
        async with ends() as (relay, a, b):
            await a.transport.call(b.peer_id, "echo", b"", timeout_s=10)
            await freeze(b.daemon.process)
            try:
                with pytest.raises((PeerUnreachable, DeadlineExceeded)):
                    await a.transport.call(b.peer_id, "new", b"", timeout_s=2)
                while await relay.transport.is_connected(b.peer_id):
                    await asyncio.sleep(0.02)
            finally:
                b.daemon.process.send_signal(signal.SIGCONT)
            assert await a.transport.is_connected(relay.peer_id)  # it has answered

    run(main)


@contextlib.asynccontextmanager
async def two_ways():
    """Yield two relays, and two peers that know each other behind both, the first one first."""
    async with ends() as (first, a, b):
        second = await End.start(relay_mbit_s=1000.0)
        try:
            ways = [*first.daemon.addresses, *second.daemon.addresses]
            for peer, other in ((a, b), (b, a)):
                await peer.transport.connect(second.peer_id, ways[1:], timeout_s=10)
                known = [through(way, other.peer_id) for way in ways]
                peer.transport.learn(other.peer_id, known)
            yield first, a, b
        finally:
            await second.close()


def test_a_call_that_its_relay_cuts_off_is_made_once_more():
    """A vote or a decision that was lost with its relay once cost a peer three seconds."""

    async def main():
        async with two_ways() as (relay, a, b):
            asked = []

            async def slow(remote, body):
                asked.append(body)
                if len(asked) == 1:
                    relay.daemon.process.kill()
                    await asyncio.sleep(60)
                return b"done"

            b.transport.serve("slow", slow)
            assert await a.transport.call(b.peer_id, "slow", b"x", timeout_s=20) == b"done"
            assert asked == [b"x", b"x"]

    run(main)


@pytest.mark.exhaustive  # a silent one: the next test
def test_a_stream_whose_relay_dies_in_the_handshake_goes_through_the_next(monkeypatch):
    """The leader that it led to was taken for unreachable, and the round took 22 s."""

    async def main():
        async with two_ways() as (relay, a, b):
            attach = a.transport._attach

            async def dying(stream, connection, tls, **options):
                if stream.relay == relay.peer_id:
                    relay.daemon.process.kill()
                await attach(stream, connection, tls, **options)

            monkeypatch.setattr(a.transport, "_attach", dying)
            async with await a.transport.open(b.peer_id, "echo", timeout_s=10) as stream:
                assert stream.relay != relay.peer_id
                await stream.send(b"x", timeout_s=10)
                assert await stream.recv(timeout_s=10) == b"x"

    run(main)


def test_a_stream_of_a_silent_relay_is_opened_through_the_next(monkeypatch):
    """Its machine lost power: no connection ends, and p2pd believes in all of them."""
    monkeypatch.setattr(libp2p, "PING_S", 20.0)  # the doubt lasts longer than this test

    async def main():
        async with two_ways() as (relay, a, b):
            stream = await a.transport.open(b.peer_id, "echo", timeout_s=10)
            await stream.send(b"x", timeout_s=10)
            assert await stream.recv(timeout_s=10) == b"x"
            assert stream.relay == relay.peer_id
            await freeze(relay.daemon.process)
            try:
                with pytest.raises(RelayedStreamSilent):
                    await stream.recv(timeout_s=0.3)
                assert await a.transport.is_connected(relay.peer_id)
                again = await a.transport.open(b.peer_id, "echo", timeout_s=10)
                assert again.relay != relay.peer_id
                await again.send(b"y", timeout_s=10)
                assert await again.recv(timeout_s=10) == b"y"
            finally:
                relay.daemon.process.send_signal(signal.SIGCONT)
            await stream.close()
            await again.close()

    run(main)


# lies


async def opened(end, remote):
    return await end.daemon.open(remote.peer_id, end.relaying.protocol, timeout_s=5)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x09\x00\x00",
        b"\x01\xff\xff",
        b"\x01\x00\x05\x00\x09abc",
        b"\x02\x00\x02\x00\x00",
        b"\x01\x00\x01\x00",
    ],
    ids=["kind", "length", "field", "fields", "half"],
)
def test_a_malformed_frame_is_refused(sent):
    async def main():
        async with shared(1) as (relay, a):
            connection = await opened(a, relay)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(connection, sent)
            kind, (why,) = await relaying._receive(connection)
            assert kind == Kind.REFUSED and why
            assert await loop.sock_recv(connection, 10) == b""
            connection.close()
            await a.transport.call(relay.peer_id, "echo", b"", timeout_s=5)

    run(main)


def test_a_relay_cannot_claim_to_bring_somebody_else():
    """It has a hello of A, which every relay sees, but not A's key."""

    async def main():
        async with ends() as (relay, a, b):
            hello = a.relaying._secrets.hello
            connection = await opened(relay, b)
            await relaying._send(
                connection, Kind.BRING, a.peer_id.encode(), hello, b"", TICKET, TICKET
            )
            (theirs,) = await relaying._answer(connection, b.peer_id)
            # The relay is the TLS client with its own key.
            context = relay.relaying._secrets.context(b.peer_id, theirs, server_side=False)
            loop = asyncio.get_running_loop()
            reader = asyncio.StreamReader()
            transport, _ = await loop.create_unix_connection(
                lambda: asyncio.StreamReaderProtocol(reader),
                sock=connection,
                ssl=context,
                server_hostname="",
            )
            with contextlib.suppress(ssl.SSLError, OSError):
                assert await reader.read() == b""  # B ends it: another certificate than A's
            transport.close()
            assert not b.transport._streams

    run(main)


def test_a_hello_is_bound_to_its_peer_and_its_run():
    a, b = Identity.ephemeral(), Identity.ephemeral()
    ours = Secrets(b, RUN)
    assert ours.context(a.peer_id, Secrets(a, RUN).hello, server_side=True) is not None
    for hello in (Secrets(b, RUN).hello, Secrets(a, "other").hello, bytes(100), b"", bytes(9000)):
        with pytest.raises(Refused) as caught:
            ours.context(a.peer_id, hello, server_side=True)
        assert caught.value.code == RefusalCode.NOT_ADMITTED
    signed = a.sign(b"atoll relay tls 1" + RUN.encode() + b"\0" + b"no certificate")
    with pytest.raises(Refused, match="no certificate"):
        ours.context(a.peer_id, signed + b"no certificate", server_side=True)


def test_a_peer_has_so_many_relayed_streams_and_no_more(monkeypatch):
    monkeypatch.setattr(relaying, "MAX_PER_PEER", 3)

    async def main():
        async with ends() as (relay, a, b):
            streams = [await a.transport.open(b.peer_id, "echo", timeout_s=10) for _ in range(3)]
            with pytest.raises(PeerUnreachable, match="too many"):
                await a.transport.open(b.peer_id, "echo", timeout_s=10)
            for stream in streams:
                await stream.close()
            while relay.relaying._pairs.total():
                await asyncio.sleep(0.01)
            await a.transport.call(b.peer_id, "echo", b"", timeout_s=10)

    run(main)


def test_an_end_that_never_answers_is_given_up(monkeypatch):
    monkeypatch.setattr(relaying, "JOIN_S", 0.3)

    async def main():
        async with shared() as (relay, a, b):
            connection = await opened(a, relay)
            loop = asyncio.get_running_loop()
            assert await asyncio.wait_for(loop.sock_recv(connection, 10), 5) == b""
            connection.close()
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            with pytest.raises(TimeoutError):
                await relaying._answer(ours, b.peer_id)
            ours.close()
            theirs.close()

    run(main)


def test_silent_strangers_at_a_relay_are_bounded(monkeypatch):
    """They share one bound with those of the transport; an admitted peer is served meanwhile."""
    monkeypatch.setattr(strangers, "MAX_SILENT_PER_PEER", 1000)

    async def main():
        async with ends() as (relay, a, b), ends(1, ticket=b"none") as (_, stranger):
            addresses = relay.daemon.addresses
            await stranger.transport.connect(relay.peer_id, addresses, timeout_s=10)
            silent = [await opened(stranger, relay) for _ in range(MAX_SILENT + 20)]
            while len(relay.relaying._joining) != MAX_SILENT:
                await asyncio.sleep(0.01)
            assert await a.transport.call(b.peer_id, "echo", b"", timeout_s=10)
            for each in silent:
                each.close()

    run(main)


def test_streams_that_are_not_joined_are_bounded_for_all_together(monkeypatch):
    monkeypatch.setattr(relaying, "open_files", lambda: 3 * 2 * relaying.SPARE_FILES)

    async def main():
        async with ends() as (relay, a, b):
            loop = asyncio.get_running_loop()
            held = [await opened(each, relay) for each in (a, b, a)]
            while len(relay.relaying._joining) != 3:
                await asyncio.sleep(0.01)
            refused = await opened(b, relay)
            assert await asyncio.wait_for(loop.sock_recv(refused, 10), 5) == b""
            for each in (refused, *held):
                each.close()

    run(main)


def test_a_stranger_opens_few_streams_to_a_relay():
    async def main():
        async with ends(1, ticket=b"none") as (relay, stranger):
            held = [await opened(stranger, relay) for _ in range(MAX_SILENT_PER_PEER)]
            await asyncio.sleep(2 * strangers.BURST_S)
            refused = await opened(stranger, relay)
            loop = asyncio.get_running_loop()
            assert await asyncio.wait_for(loop.sock_recv(refused, 10), 5) == b""
            for each in (refused, *held):
                each.close()

    run(main)


def test_a_relay_that_begins_no_tls_uses_up_nobody_elses_streams(monkeypatch):
    """It replays a hello and an admission of A, and is silent."""
    monkeypatch.setattr(relaying, "MAX_JOINING", 5)

    async def main():
        async with ends() as (relay, a, b):
            hello, loop = a.relaying._secrets.hello, asyncio.get_running_loop()
            held = []
            for _ in range(5):
                held.append(await opened(relay, b))
                fields = (a.peer_id.encode(), hello, b"", TICKET, TICKET)
                await relaying._send(held[-1], Kind.BRING, *fields)
                assert await relaying._answer(held[-1], b.peer_id) == [b.relaying._secrets.hello]
            assert b.transport.statistics().streams_open == 0
            refused = await opened(relay, b)
            assert await asyncio.wait_for(loop.sock_recv(refused, 10), 5) == b""
            for each in (refused, *held):
                each.close()
            while b.relaying._joining:
                await asyncio.sleep(0.01)
            assert await a.transport.call(b.peer_id, "echo", b"", timeout_s=10)

    run(main)


@pytest.mark.exhaustive
def test_a_relay_itself_uses_the_connection_that_a_peer_dialed():
    async def main():
        async with ends(2) as (relay, a, b):
            (address,) = relay.daemon.addresses
            for peer in (a, b):  # one has a higher PeerID than the other, or the relay
                relay.transport.learn(peer.peer_id, [through(address, peer.peer_id)])
                relay.transport._connected.clear()
                await relay.transport.call(peer.peer_id, "echo", b"", timeout_s=10)
                await relay.transport.connect(
                    peer.peer_id, [through(address, peer.peer_id)], timeout_s=10
                )
            assert relay.relaying.carried_bytes == 0
            await b.close()
            await asyncio.sleep(0.2)
            with pytest.raises(PeerUnreachable, match="no connection to this peer"):
                await relay.transport.connect(
                    b.peer_id, [through(address, b.peer_id)], timeout_s=10
                )

    run(main)


@pytest.mark.parametrize("stranger", ["caller", "relay"])
def test_nobody_is_brought_without_both_admissions(stranger):
    async def main():
        async with shared() as (relay, a, b):
            tickets = (b"none", TICKET) if stranger == "caller" else (TICKET, b"none")
            connection = await opened(relay, b)
            hello = a.relaying._secrets.hello
            await relaying._send(connection, Kind.BRING, a.peer_id.encode(), hello, b"", *tickets)
            with pytest.raises(Refused, match="expected a ticket"):
                await relaying._answer(connection, b.peer_id)
            connection.close()

    run(main)
