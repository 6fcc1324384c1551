"""Calls and streams between real p2pd processes on loopback; bytes of strangers."""

import asyncio
import contextlib
import os
import time

import pytest

from atoll.dht import libp2p
from atoll.dht.identity import Identity
from atoll.dht.libp2p import protocol_name
from atoll.dht.refusals import RefusalCode
from atoll.dht.transport import (
    MAX_CALL_BYTES,
    MAX_MESSAGE_BYTES,
    DeadlineExceeded,
    Mark,
    PeerUnreachable,
    Refused,
    TransportError,
    encode_open,
)
from support.nodes import RUN, TICKET


def test_p2pd_takes_our_ed25519_identity(swarm, a, b):
    async def main():
        assert a.daemon.peer_id == a.identity.peer_id
        await b.transport.connect(a.peer_id, a.addresses, timeout_s=10)
        # The remote id that the other side authenticated is ours.
        assert await b.transport.call(a.peer_id, "echo", b"hi", timeout_s=10) == (
            b.identity.peer_id.encode() + b":hi"
        )

    swarm.run(main())


def test_two_that_connect_to_each_other_at_once_both_succeed(swarm):
    async def main():
        _, b, c = swarm.nodes
        await asyncio.gather(
            b.transport.connect(c.peer_id, c.addresses, timeout_s=10),
            c.transport.connect(b.peer_id, b.addresses, timeout_s=10),
        )
        answers = await asyncio.gather(
            b.transport.call(c.peer_id, "echo", b"", timeout_s=10),
            c.transport.call(b.peer_id, "echo", b"", timeout_s=10),
        )
        assert answers == [b.peer_id.encode() + b":", c.peer_id.encode() + b":"]

    swarm.run(main())


def test_calls_of_every_size(swarm, a, b):
    async def main():
        for size in (0, 1, 70_000, MAX_CALL_BYTES - 53):
            body = bytes(i % 251 for i in range(min(size, 1000))) * max(1, size // 1000)
            assert (await a.transport.call(b.peer_id, "echo", body, timeout_s=20))[53:] == body
        with pytest.raises(ValueError, match="split"):
            await a.transport.call(b.peer_id, "echo", bytes(MAX_CALL_BYTES + 1), timeout_s=20)

    swarm.run(main())


def test_stream_keeps_messages_whole_and_in_order(swarm, a, b):
    async def main():
        sent = [os.urandom(size) for size in (0, 1, 5, 16_379, 16_384, 16_385, 300_000)]
        sent.append(bytes(MAX_MESSAGE_BYTES))
        async with await a.transport.open(b.peer_id, "echo", timeout_s=10) as stream:
            assert stream.remote == b.peer_id
            for data in sent:
                await stream.send(data, timeout_s=10)
            await stream.end(timeout_s=10)
            got = []
            while (data := await stream.recv(timeout_s=10)) is not None:
                got.append(data)
        assert got == sent

    swarm.run(main())


def test_refusals_carry_their_code(swarm, a, b):
    async def main():
        a.transport.admission = b"forged"
        try:
            with pytest.raises(Refused, match="ticket") as caught:
                await a.transport.call(b.peer_id, "echo", bytes(2 << 20), timeout_s=10)
            assert caught.value.code == RefusalCode.NOT_ADMITTED
            stream = await a.transport.open(b.peer_id, "echo", timeout_s=10)
            with pytest.raises(Refused, match="ticket"):
                await stream.recv(timeout_s=10)
            await stream.close()
        finally:
            a.transport.admission = TICKET
        with pytest.raises(Refused, match=RefusalCode.UNKNOWN_METHOD):
            await a.transport.call(b.peer_id, "nothing", b"", timeout_s=10)
        async with await a.transport.open(b.peer_id, "nothing", timeout_s=10) as stream:
            with pytest.raises(Refused, match=RefusalCode.UNKNOWN_METHOD):
                while True:
                    await stream.send(bytes(100_000), timeout_s=10)

    swarm.run(main())


def test_calls_share_a_stream_but_not_after_the_admission_was_renewed(swarm, a, b):
    async def main():
        await a.transport.call(b.peer_id, "echo", b"", timeout_s=10)
        before = len(a.transport._streams)
        for _ in range(10):
            await a.transport.call(b.peer_id, "echo", b"", timeout_s=10)
        assert len(a.transport._streams) <= before  # another call's may have ended
        a.transport.admission = b"forged"
        try:
            with pytest.raises(Refused, match="ticket"):
                await a.transport.call(b.peer_id, "echo", b"", timeout_s=10)
        finally:
            a.transport.admission = TICKET
        many = [a.transport.call(b.peer_id, "echo", bytes([i]), timeout_s=10) for i in range(30)]
        assert [answer[-1] for answer in await asyncio.gather(*many)] == list(range(30))

    swarm.run(main())


def test_a_handler_that_breaks_is_an_internal_refusal(swarm, a, b, caplog):
    async def broken(remote, body):
        raise ZeroDivisionError

    async def main():
        b.transport.serve("broken", broken)
        with pytest.raises(Refused, match=RefusalCode.INTERNAL):
            await a.transport.call(b.peer_id, "broken", b"", timeout_s=10)

    swarm.run(main())
    assert "a handler failed" in caplog.text


def test_sends_and_receives_end_at_their_deadline(swarm, a, b):
    async def lazy(remote, stream):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(20):
                await asyncio.Event().wait()

    async def main():
        b.transport.serve_stream("lazy", lazy)
        async with await a.transport.open(b.peer_id, "lazy", timeout_s=10) as stream:
            started_s = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                await stream.recv(timeout_s=0.2)
            assert time.monotonic() - started_s < 2
            with pytest.raises(DeadlineExceeded):  # all buffers on the way fill up
                for _ in range(200):
                    await stream.send(bytes(MAX_MESSAGE_BYTES), timeout_s=0.5)

    swarm.run(main())


def test_a_receive_may_be_tried_again_after_its_deadline(swarm, a, b):
    async def main():
        async with await a.transport.open(b.peer_id, "echo", timeout_s=10) as stream:
            with pytest.raises(DeadlineExceeded):
                await stream.recv(timeout_s=0.05)
            await stream.send(b"still here", timeout_s=10)
            assert await stream.recv(timeout_s=10) == b"still here"

    swarm.run(main())


def test_what_was_sent_before_close_arrives(swarm, a, b):
    async def main():
        got = asyncio.get_running_loop().create_future()

        async def slow_sink(remote, stream):
            await asyncio.sleep(0.2)
            sizes = []
            while (data := await stream.recv(timeout_s=10)) is not None:
                sizes.append(len(data))
            got.set_result(sizes)

        b.transport.serve_stream("sink", slow_sink)
        async with await a.transport.open(b.peer_id, "sink", timeout_s=10) as stream:
            for size in (1_000_000, 10, 500_000):
                await stream.send(bytes(size), timeout_s=10)
        assert await got == [1_000_000, 10, 500_000]
        with pytest.raises(TransportError, match="ended here"):
            await stream.send(b"", timeout_s=1)

    swarm.run(main())


def test_a_peer_that_is_not_there_is_unreachable(swarm, a):
    async def main():
        nobody = Identity.ephemeral().peer_id
        with pytest.raises(PeerUnreachable):
            await a.transport.call(nobody, "echo", b"", timeout_s=10)
        with pytest.raises((PeerUnreachable, DeadlineExceeded)):
            await a.transport.connect(nobody, ["/ip4/127.0.0.1/tcp/9"], timeout_s=2)

    swarm.run(main())


def test_wire_bytes_are_the_kernels_and_cover_the_payload(swarm, a, b):
    async def main():
        before = a.transport.statistics()
        if before.source != "tcp":
            pytest.skip("this kernel does not tell about sockets")
        num_bytes = 4 << 20
        async with await a.transport.open(b.peer_id, "echo", timeout_s=10) as stream:
            for _ in range(num_bytes >> 18):
                await stream.send(bytes(1 << 18), timeout_s=10)
                await stream.recv(timeout_s=10)
        a.wire.poll()  # the last reading may be younger than MIN_POLL_S, and then is given again
        after = a.transport.statistics()
        sent = after.wire_bytes_sent - before.wire_bytes_sent
        received = after.wire_bytes_received - before.wire_bytes_received
        assert num_bytes < sent < 1.1 * num_bytes
        assert num_bytes < received < 1.1 * num_bytes

    swarm.run(main())


async def raw_stream(daemon, peer):
    reader, writer = await asyncio.open_unix_connection(
        sock=await daemon.open(peer, protocol_name(RUN), timeout_s=10)
    )
    return reader, writer


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        bytes([Mark.DATA]) + b"\xff\xff\xff\xff",
        bytes([Mark.OPEN]) + b"\xff\xff\xff\xff",
        bytes([Mark.OPEN]) + (5).to_bytes(4) + b"\x09\x00\x02hi",
        bytes([Mark.OPEN]) + (5).to_bytes(4) + b"\x01\x00\xffhi",
        bytes([Mark.END, 0, 0, 0, 0]),
    ],
)
def test_hostile_bytes_end_the_stream_and_nothing_else(swarm, a, b, data):
    async def main():
        reader, writer = await raw_stream(a.daemon, b.peer_id)
        with contextlib.closing(writer):
            writer.write(data)
            with contextlib.suppress(ConnectionError):
                assert await reader.read() in (b"", bytes([Mark.CLOSE, 0, 0, 0, 0]))
        assert await a.transport.call(b.peer_id, "echo", b"", timeout_s=10)

    swarm.run(main())


def test_a_stream_without_an_open_is_cut_off(swarm, a, b, monkeypatch):
    monkeypatch.setattr(libp2p, "GREETING_S", 0.1)

    async def main():
        reader, writer = await raw_stream(a.daemon, b.peer_id)
        with contextlib.closing(writer):
            assert await reader.read() == b""

    swarm.run(main())


def test_a_peer_with_too_many_streams_gets_no_more(swarm, a, b, monkeypatch):
    async def main():
        async with contextlib.AsyncExitStack() as stack:
            with pytest.raises(PeerUnreachable):
                for _ in range(20):
                    stream = await a.transport.open(b.peer_id, "echo", timeout_s=10)
                    await stack.enter_async_context(stream)
                    await stream.send(b"x", timeout_s=10)
                    await stream.recv(timeout_s=10)

    monkeypatch.setattr(libp2p, "MAX_STREAMS_PER_PEER", 12)
    swarm.run(main())


def test_a_message_longer_than_allowed_ends_the_stream(swarm, a, b):
    async def main():
        reader, writer = await raw_stream(a.daemon, b.peer_id)
        with contextlib.closing(writer):
            opening = encode_open(is_call=False, method="echo", admission=TICKET)
            writer.write(bytes([Mark.OPEN]) + len(opening).to_bytes(4) + opening)
            writer.write(bytes([Mark.DATA]) + (MAX_MESSAGE_BYTES + 1).to_bytes(4) + b"x")
            with contextlib.suppress(ConnectionError):
                assert bytes([Mark.DATA]) not in (await reader.read())[:1]

    swarm.run(main())
