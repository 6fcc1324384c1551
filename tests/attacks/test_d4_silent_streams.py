"""D4: strangers open streams and say nothing on them, until no descriptor is left."""

import asyncio
import errno
import resource
import socket
from collections import Counter

import pytest

from atoll.dht import libp2p, p2pd, strangers
from atoll.dht.identity import Identity
from atoll.dht.libp2p import LibP2PTransport, protocol_name
from atoll.dht.p2pd import P2pd, P2pdError, P2pdOptions
from atoll.dht.strangers import MAX_SILENT, MAX_SILENT_PER_PEER
from atoll.dht.transport import TransportError, encode_open
from support.minilibp2p import Stranger
from support.strangers import RUN, members


class Bringer:
    """Stands in for p2pd's process: `accept` is called with the sockets of the test."""

    peer_id = "us"
    addresses = ()

    async def listen(self, accepts):
        (self.accept,) = accepts.values()


class Visitors:
    """Opens streams without a p2pd."""

    def __init__(self, bringer):
        self._bringer, self.theirs = bringer, []

    def bring(self, remote, said=b""):
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        theirs.send(said)
        self.theirs.append(theirs)
        self._bringer.accept(remote, ours)

    def close(self):
        for each in self.theirs:
            each.close()


GOOD = encode_open(is_call=False, method="wait", admission=b"")
OPEN = bytes([1]) + len(GOOD).to_bytes(4) + GOOD


async def wait(remote, stream):
    await stream.recv(timeout_s=20)


@pytest.fixture
def serve():
    def runner(test):
        async def main():
            bringer = Bringer()
            transport = LibP2PTransport(bringer, run_id="run")
            transport.serve_stream("wait", wait)
            await transport.start()
            visitors = Visitors(bringer)
            try:
                await test(transport, visitors)
            finally:
                visitors.close()
                await transport.close()

        asyncio.run(asyncio.wait_for(main(), 20))

    return runner


def test_silent_streams_are_bounded_for_all_strangers_together(serve):
    async def test(transport, visitors):
        for index in range(500):
            visitors.bring(f"stranger-{index % 50}")
        await asyncio.sleep(0.05)
        assert transport.statistics().streams_open <= MAX_SILENT

    serve(test)


def test_one_stranger_keeps_few_and_for_a_short_time(serve, monkeypatch):
    monkeypatch.setattr(libp2p, "STRANGER_GREETING_S", 0.6)
    monkeypatch.setattr(strangers, "BURST_S", 0.1)

    async def test(transport, visitors):
        for _ in range(MAX_SILENT_PER_PEER):
            visitors.bring("stranger")
        await asyncio.sleep(0.2)
        for _ in range(20):
            visitors.bring("stranger")
        await asyncio.sleep(0.05)
        assert transport.statistics().streams_open == MAX_SILENT_PER_PEER
        await asyncio.sleep(0.7)
        assert transport.statistics().streams_open == 0

    serve(test)


def test_an_honest_newcomer_finds_room_and_its_burst_is_taken(serve):
    async def test(transport, visitors):
        for index in range(500):
            visitors.bring(f"stranger-{index % 5}")
        for _ in range(10):
            visitors.bring("newcomer", OPEN)
        await asyncio.sleep(0.1)
        for _ in range(40):
            visitors.bring("newcomer", OPEN)
        for index in range(500):
            visitors.bring(f"stranger-{index % 5}")
        async with asyncio.timeout(10):
            while Counter(stream.remote for stream in transport._streams)["newcomer"] < 50:
                await asyncio.sleep(0.01)

    serve(test)


def test_a_refused_stream_counts_until_its_descriptor_is_free(serve):
    async def test(transport, visitors):
        transport.handlers.check = None  # calling it fails, as a forged admission would
        for index in range(300):
            visitors.bring(f"stranger-{index}", OPEN)
        await asyncio.sleep(0.1)
        assert transport.statistics().streams_open <= MAX_SILENT

    serve(test)


def test_a_socket_that_cannot_be_had_is_a_transport_error(monkeypatch):
    def fail(*arguments):
        raise OSError(errno.EMFILE, "Too many open files")

    async def main():
        daemon = await P2pd.start(Identity.ephemeral(), P2pdOptions())
        try:
            monkeypatch.setattr(p2pd.socket, "socket", fail)
            with pytest.raises(P2pdError, match="allow more open files") as caught:
                await daemon.open(daemon.peer_id, "/test", timeout_s=1)
            assert isinstance(caught.value, TransportError)
        finally:
            monkeypatch.undo()
            await daemon.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_the_limit_of_open_files_is_raised_to_the_hard_one():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[1]), before[1]))
        p2pd.raise_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_no_p2pd_is_a_relay_for_strangers(tmp_path):
    arguments = p2pd.command(tmp_path / "d.sock", tmp_path / "key", P2pdOptions())
    assert "-relay=0" in arguments and not any("-relayService" in a for a in arguments)


async def ask(a, b, tries=3):
    """Exchange a message, with a new stream; again if a busy machine takes it for a silent one."""
    try:
        async with await a.transport.open(b.peer_id, "echo", timeout_s=3) as stream:
            await stream.send(b"x", timeout_s=3)
            return await stream.recv(timeout_s=3) == b"x"
    except TransportError:
        if tries == 1:
            raise
        return await ask(a, b, tries - 1)


async def echo(remote, stream):
    while (message := await stream.recv(timeout_s=20)) is not None:
        await stream.send(message, timeout_s=3)


@pytest.mark.slow
def test_real_peers_exchange_while_strangers_are_silent(tmp_path):
    async def main():
        async with members(tmp_path) as (a, b):
            for node in (a, b):
                node.transport.serve_stream("echo", echo)
            host, port = a.addresses[0].split("/")[2], a.addresses[0].split("/")[4]
            strangers = [Stranger() for _ in range(8)]
            try:
                for each in strangers:
                    await each.open(host, int(port))
                most = 0
                for _ in range(2):
                    for each in strangers:
                        await each.streams(protocol_name(RUN.hex()), 60)
                    for _ in range(5):
                        assert await ask(b, a)
                        assert await ask(a, b)
                        most = max(most, a.transport.statistics().streams_open)
                assert 0 < most <= MAX_SILENT + 4
            finally:
                for each in strangers:
                    await each.close()

    asyncio.run(asyncio.wait_for(main(), 90))  # 5 s on an idle machine
