"""A member opens all streams that it may, and announces the longest message on each.

Five bytes a stream once made the transport allocate 3 MiB: 770 MB for 4 kB of one member.
"""

import asyncio
import socket
import tracemalloc

import pytest

from atoll.dht import libp2p, libp2p_stream
from atoll.dht.arrivals import PEER_BYTES
from atoll.dht.libp2p import MAX_STREAMS_PER_PEER, LibP2PTransport
from atoll.dht.transport import MAX_CALL_BYTES, MAX_MESSAGE_BYTES, Mark, encode_open


class Bringer:
    """Stands in for p2pd's process: `accept` is called with the sockets of the test."""

    peer_id = "us"
    addresses = ()

    async def listen(self, accepts):
        (self.accept,) = accepts.values()


def frame(mark, payload=b"", *, announced=None):
    return bytes([mark]) + (len(payload) if announced is None else announced).to_bytes(4) + payload


def opened(method, *, is_call):
    return frame(Mark.OPEN, encode_open(is_call=is_call, method=method, admission=b""))


async def started():
    bringer = Bringer()
    transport = LibP2PTransport(bringer, run_id="run")
    await transport.start()
    return bringer, transport


def bring(bringer, remote, greeting):
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    theirs.send(greeting)
    bringer.accept(remote, ours)
    return theirs


async def all_read():
    for _ in range(50):
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)


def test_headers_without_a_body_cost_little_memory():
    async def main():
        bringer, transport = await started()
        theirs = []
        for index in range(MAX_STREAMS_PER_PEER):
            theirs.append(bring(bringer, "member", opened("ping", is_call=True)))
            if index % 8 == 7:
                await all_read()  # a burst of a stranger's streams is refused
        tracemalloc.start()
        for each in theirs:
            each.send(frame(Mark.DATA, announced=MAX_CALL_BYTES))
        await all_read()
        grown, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert transport.statistics().streams_open > MAX_STREAMS_PER_PEER // 2
        assert grown < PEER_BYTES
        await transport.close()
        for each in theirs:
            each.close()

    asyncio.run(main())


def test_unread_messages_of_one_member_are_bounded_over_all_its_streams(monkeypatch):
    # Half a frame of a closed stream waits so long.
    monkeypatch.setattr(libp2p_stream, "LINGER_S", 0.05)

    async def main():
        bringer, transport = await started()
        read = asyncio.Event()

        async def handler(remote, stream):
            await read.wait()

        transport.serve_stream("part", handler)
        theirs = [bring(bringer, "member", opened("part", is_call=False)) for _ in range(48)]
        await all_read()
        message = frame(Mark.DATA, bytes(MAX_MESSAGE_BYTES))
        loop = asyncio.get_running_loop()
        for each in theirs:
            with pytest.raises((TimeoutError, OSError)):  # never read, or cut off
                async with asyncio.timeout(0.05):
                    for _ in range(4):
                        await loop.sock_sendall(each, message)
        await all_read()
        assert transport._memory.total_bytes <= PEER_BYTES
        read.set()
        await asyncio.sleep(0.2)
        assert transport._memory.total_bytes == 0, "what a handler did not read is given back"
        await transport.close()
        for each in theirs:
            each.close()

    asyncio.run(main())


def test_a_member_with_all_streams_makes_room_for_others(monkeypatch):
    monkeypatch.setattr(libp2p, "open_files", lambda: 2 * libp2p.SPARE_FILES * 4)

    async def main():
        bringer, transport = await started()
        theirs = []
        for _ in range(8):
            theirs.append(bring(bringer, "member", opened("ping", is_call=True)))
            await all_read()
        assert transport.statistics().streams_open == 8
        honest = bring(bringer, "honest", opened("ping", is_call=True) + frame(Mark.DATA))
        loop = asyncio.get_running_loop()
        answer = await asyncio.wait_for(loop.sock_recv(honest, 64), 5)
        assert answer[0] == Mark.DATA
        assert transport.statistics().streams_open == 8
        await transport.close()
        for each in (*theirs, honest):
            each.close()

    asyncio.run(main())
