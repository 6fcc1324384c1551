"""Streams that arrive while everything ends: no socket stays open."""

import asyncio
import socket

import pytest

from atoll.dht.identity import Identity
from atoll.dht.libp2p import LibP2PTransport
from atoll.dht.p2pd import P2pd, P2pdOptions


class Bringer:
    """Stands in for p2pd's process: `accept` is called with the sockets of the test."""

    peer_id = "us"
    addresses = ()

    async def listen(self, accepts):
        (self.accept,) = accepts.values()


def nonblocking_pair():
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.settimeout(5)
    return ours, theirs


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_a_stream_accepted_just_before_the_end_is_closed(steps):
    ours, theirs = nonblocking_pair()

    async def main():
        bringer = Bringer()
        transport = LibP2PTransport(bringer, run_id="run")
        await transport.start()
        bringer.accept("them", ours)
        for _ in range(steps):
            await asyncio.sleep(0)
        await transport.close()

    asyncio.run(main())
    assert ours.fileno() == -1
    theirs.close()


def test_a_stream_without_a_greeting_is_closed_with_p2pd(tmp_path):
    async def main():
        accepted = []
        daemon = await P2pd.start(Identity.ephemeral(), P2pdOptions())
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(3)]
        try:
            await daemon.listen({"/test": lambda remote, connection: accepted.append(remote)})
            path = str(daemon.control_maddr).removeprefix("/unix").replace("d.sock", "c.sock")
            for connection in waiting:
                connection.connect(path)
            await asyncio.sleep(0.1)
        finally:
            await daemon.close()
        for connection in waiting:
            connection.settimeout(5)
            assert connection.recv(1) == b""
            connection.close()
        assert accepted == []

    asyncio.run(main())


def test_a_stream_that_does_not_begin_as_p2pd_does_is_closed():
    async def main():
        accepted = []
        daemon = await P2pd.start(Identity.ephemeral(), P2pdOptions())
        try:
            await daemon.listen({"/test": lambda remote, connection: accepted.append(remote)})
            path = str(daemon.control_maddr).removeprefix("/unix").replace("d.sock", "c.sock")
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(b"\xff" * 5)
            assert await asyncio.wait_for(reader.read(), 5) == b""
            writer.close()
        finally:
            await daemon.close()
        assert accepted == []

    asyncio.run(main())
