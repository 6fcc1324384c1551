"""Real p2pd processes on loopback. Three nodes live as long as this module."""

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
import time
from dataclasses import replace

import pytest

from atoll.dht import clock, libp2p
from atoll.dht.daemon import Daemon, DaemonError, DaemonOptions
from atoll.dht.engine import PeerID
from atoll.dht.frames import encode_open
from atoll.dht.identity import Identity
from atoll.dht.libp2p import protocol_name
from atoll.dht.node import Node
from atoll.dht.roster import PeerRecord
from atoll.dht.streams import Mark
from atoll.dht.transport import (
    MAX_CALL_BYTES,
    MAX_MESSAGE_BYTES,
    DeadlineExceeded,
    PeerUnreachable,
    Refused,
    TransportError,
)

RUN = "test-run"
TICKET = b"ticket"


def check(remote, credential):
    if credential != TICKET:
        raise Refused("not_admitted", "expected a ticket")


async def echo(remote, body):
    return remote.encode() + b":" + body


async def echo_stream(remote, stream):
    while (data := await stream.recv(timeout_s=20)) is not None:
        await stream.send(data, timeout_s=20)


async def start(bootstrap=(), **options):
    node = await Node.start(
        options.pop("identity_path", None),
        run_id=RUN,
        bootstrap=bootstrap,
        admission=TICKET,
        check=check,
        **options,
    )
    node.transport.serve("echo", echo)
    node.transport.serve_stream("echo", echo_stream)
    return node


CHILD = """
import asyncio, sys, time
real = time.time
time.time = lambda: real() + 3600  # this machine's clock is an hour ahead
from atoll.dht.node import Node
from atoll.dht.roster import PeerRecord

async def flood(remote, stream):
    await stream.recv(timeout_s=20)
    while True:
        await stream.send(bytes(100_000), timeout_s=20)

async def main():
    run_id, *bootstrap = sys.argv[1:]
    node = await Node.start(
        None, run_id=run_id, admission=b"ticket", bootstrap=bootstrap, clock_offset_s=-3600
    )
    record = PeerRecord(
        peer_id=node.peer_id, addresses=(), incarnation="1" * 32, role="follower", epoch=0,
        position=7, tokens_per_s=0, uplink_mbit_s=0, downlink_mbit_s=0, ready_in_s=0, protocol=1,
    )
    await node.roster.publish(record, 60)
    node.transport.serve_stream("flood", flood)
    print(node.daemon.pid, node.addresses[0], flush=True)
    await asyncio.sleep(120)

asyncio.run(main())
"""


class Swarm:
    def __init__(self):
        self.runner = asyncio.Runner()
        self.nodes = []
        self.child = None
        self.child_daemon_pid = 0
        self.child_address = ""

    def run(self, main, timeout_s=60):
        async def bounded():
            async with asyncio.timeout(timeout_s):
                return await main

        return self.runner.run(bounded())

    async def grow(self, path):
        self.nodes.append(await start(identity_path=path))
        bootstrap = self.nodes[0].addresses
        self.child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CHILD, RUN, *bootstrap, stdout=asyncio.subprocess.PIPE
        )
        for _ in range(2):
            self.nodes.append(await start(self.nodes[0].addresses))

    async def meet_child(self, node):
        if not self.child_address:
            pid, self.child_address = (await self.child.stdout.readline()).decode().split()
            self.child_daemon_pid = int(pid)
        peer = self.child_address.rpartition("/p2p/")[2]
        await node.transport.connect(peer, [self.child_address], timeout_s=10)
        return peer

    async def close(self):
        for node in self.nodes:
            await node.close()
        with contextlib.suppress(ProcessLookupError):
            self.child.kill()
        await self.child.communicate()


@pytest.fixture(scope="module")
def swarm(tmp_path_factory):
    swarm = Swarm()
    try:
        swarm.run(swarm.grow(tmp_path_factory.mktemp("node") / "key"))
        yield swarm
    finally:
        swarm.run(swarm.close())
        swarm.runner.close()


@pytest.fixture
def a(swarm):
    return swarm.nodes[0]


@pytest.fixture
def b(swarm):
    return swarm.nodes[1]


def record(node, **changes):
    plain = PeerRecord(
        peer_id=node.peer_id,
        addresses=tuple(node.addresses),
        incarnation="0" * 32,
        role="trainer",
        epoch=0,
        position=0,
        tokens_per_s=1.0,
        uplink_mbit_s=0.0,
        downlink_mbit_s=0.0,
        ready_in_s=0.0,
        protocol=1,
    )
    return replace(plain, **changes)


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
            assert caught.value.code == "not_admitted"
            stream = await a.transport.open(b.peer_id, "echo", timeout_s=10)
            with pytest.raises(Refused, match="ticket"):
                await stream.recv(timeout_s=10)
            await stream.close()
        finally:
            a.transport.admission = TICKET
        with pytest.raises(Refused, match="unknown_method"):
            await a.transport.call(b.peer_id, "nothing", b"", timeout_s=10)
        async with await a.transport.open(b.peer_id, "nothing", timeout_s=10) as stream:
            with pytest.raises(Refused, match="unknown_method"):
                while True:
                    await stream.send(bytes(100_000), timeout_s=10)

    swarm.run(main())


def test_calls_share_a_stream_but_not_after_the_admission_was_renewed(swarm, a, b):
    async def main():
        await a.transport.call(b.peer_id, "echo", b"", timeout_s=10)
        before = len(a.transport._streams)
        for _ in range(10):
            await a.transport.call(b.peer_id, "echo", b"", timeout_s=10)
        assert len(a.transport._streams) == before
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
        with pytest.raises(Refused, match="internal"):
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


def test_a_stream_that_says_nothing_is_cut_off(swarm, a, b, monkeypatch):
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


def test_roster_meets_in_the_dht(swarm):
    async def main():
        for i, node in enumerate(swarm.nodes):
            await node.roster.publish(record(node, position=i), 30)
        for node in swarm.nodes:
            peers = await node.roster.peers()
            assert [peers[n.peer_id].position for n in swarm.nodes] == [0, 1, 2]
        await swarm.nodes[2].roster.leave()
        assert swarm.nodes[2].peer_id not in await swarm.nodes[0].roster.peers()

    swarm.run(main())


def test_foreign_keys_and_forged_records_do_not_enter_the_dht(swarm, a, b):
    async def main():
        expires_at = clock.now_s() + 30
        assert not await a.dht.store("other key", b"value", expires_at)
        assert not await a.dht.store(f"atoll/{RUN}/roster", b"forged", expires_at, subkey=b.peer_id)

    swarm.run(main())


def test_a_node_joins_later_when_its_bootstrap_was_away(swarm, a):
    async def main():
        late = await start(["/ip4/127.0.0.1/tcp/9/p2p/" + Identity.ephemeral().peer_id])
        try:
            assert late.dht.protocol.routing_table.uid_to_peer_id == {}
            late.bootstrap = tuple(a.addresses)
            while not late.dht.protocol.routing_table.uid_to_peer_id:
                await asyncio.sleep(0.05)
        finally:
            await late.close()

    swarm.run(main())


def test_p2pd_that_dies_comes_back_with_the_same_identity_and_port(swarm, a, b):
    async def main():
        back = asyncio.Event()

        async def told():
            back.set()

        stream = await a.transport.open(b.peer_id, "echo", timeout_s=10)
        await stream.send(b"x", timeout_s=10)
        assert await stream.recv(timeout_s=10) == b"x"
        b.on_restart, before = told, b.addresses
        os.kill(b.daemon.pid, signal.SIGKILL)
        with pytest.raises(PeerUnreachable):
            await stream.recv(timeout_s=10)
        await stream.close()
        await back.wait()
        b.on_restart = None
        assert b.addresses == before
        assert b.transport.statistics().restarts == 1
        await a.transport.connect(b.peer_id, b.addresses, timeout_s=15)
        assert await a.transport.call(b.peer_id, "echo", b"", timeout_s=10)
        assert b.peer_id in await a.roster.peers()

    swarm.run(main(), timeout_s=60)


def test_a_p2pd_that_resets_hiveminds_connection_fills_no_log(swarm, a, caplog):
    async def reset():
        raise ConnectionResetError

    async def main():
        control = a._p2p._client.control
        for name in ("_read_task", "_write_task"):
            getattr(control, name).cancel()
            setattr(control, name, asyncio.create_task(reset()))
        pid = a.daemon.pid
        while a.daemon.pid == pid or a._p2p is None:
            await asyncio.sleep(0.05)

    swarm.run(main())
    gc.collect()
    assert "never retrieved" not in caplog.text


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


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_peer_whose_clock_is_an_hour_off_joins_with_the_learnt_offset(swarm, b):
    async def main():
        peer = await swarm.meet_child(b)
        assert (await b.roster.peers())[peer].position == 7

    swarm.run(main())


def test_a_node_that_knows_somebody_looks_for_bootstrap_peers_that_it_lost(swarm, a, b):
    """Two halves of a run that was cut apart each know somebody."""

    def known(node):
        return {str(peer) for peer in node.dht.protocol.routing_table.uid_to_peer_id.values()}

    def lose(node, lost):
        table = node.dht.protocol.routing_table
        for uid in [uid for uid, peer in table.uid_to_peer_id.items() if str(peer) == lost]:
            del table[uid]

    async def main():
        await a.dht.protocol.call_ping(PeerID.from_base58(b.peer_id))
        others = known(b) - {a.peer_id}
        assert others
        lose(b, a.peer_id)
        await b._rejoin(is_due=False)
        assert a.peer_id not in known(b)
        await b._rejoin(is_due=True)
        async with asyncio.timeout(10):  # hivemind notes who answered in a task of its own
            while not known(b) >= others | {a.peer_id}:
                await asyncio.sleep(0.02)

    swarm.run(main())


def test_a_frozen_process_ends_by_the_deadline(swarm, a):
    async def main():
        peer = await swarm.meet_child(a)
        async with await a.transport.open(peer, "flood", timeout_s=10) as stream:
            swarm.child.send_signal(signal.SIGSTOP)
            try:
                with pytest.raises(DeadlineExceeded):
                    await stream.send(b"go", timeout_s=1)
                    await stream.recv(timeout_s=0.5)
            finally:
                swarm.child.send_signal(signal.SIGCONT)
            assert len(await stream.recv(timeout_s=10)) == 100_000

    swarm.run(main())


def test_a_process_killed_in_mid_stream_is_unreachable_and_leaves_nothing_running(swarm, a):
    async def main():
        peer = await swarm.meet_child(a)
        async with await a.transport.open(peer, "flood", timeout_s=10) as stream:
            await stream.send(b"go", timeout_s=10)
            for _ in range(20):
                assert len(await stream.recv(timeout_s=10)) == 100_000
            swarm.child.kill()
            started_s = time.monotonic()
            with pytest.raises(PeerUnreachable):
                while await stream.recv(timeout_s=10) is not None:
                    pass
            assert time.monotonic() - started_s < 5
        while is_running(swarm.child_daemon_pid):
            await asyncio.sleep(0.02)

    swarm.run(main())


def test_a_port_in_use_is_named_by_p2pd():
    async def main():
        with socket.create_server(("127.0.0.1", 0)) as taken:
            listen = f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"
            with pytest.raises(DaemonError, match="p2pd"):
                await Daemon.start(Identity.ephemeral(), DaemonOptions(listen=(listen,)))

    asyncio.run(main())


def test_base58_is_hivemind_s():
    peer_id = Identity.ephemeral().peer_id
    assert str(PeerID.from_base58(peer_id)) == peer_id
