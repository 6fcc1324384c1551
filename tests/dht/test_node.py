"""Nodes over real p2pd processes: the roster, those who come late, and processes that die."""

import asyncio
import gc
import os
import signal
import socket
import time

import pytest

from atoll.dht import clock
from atoll.dht.bindings import PeerID
from atoll.dht.identity import Identity
from atoll.dht.p2pd import P2pd, P2pdError, P2pdOptions
from atoll.dht.transport import (
    DeadlineExceeded,
    PeerUnreachable,
)
from support.nodes import RUN, record, start


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

        await b.roster.publish(record(b, position=0), 60)
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
        before = a._dht
        control = before._p2p._client.control
        for name in ("_read_task", "_write_task"):
            getattr(control, name).cancel()
            setattr(control, name, asyncio.create_task(reset()))
        pid = a.daemon.pid
        while a.daemon.pid == pid or a._dht is before:
            await asyncio.sleep(0.05)

    swarm.run(main())
    gc.collect()
    assert "never retrieved" not in caplog.text


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


def test_a_node_with_peers_looks_for_lost_bootstrap_peers(swarm, a, b):
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


def test_a_process_killed_in_mid_stream_leaves_nothing_running(swarm, a):
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
            with pytest.raises(P2pdError, match="p2pd"):
                await P2pd.start(Identity.ephemeral(), P2pdOptions(listen=(listen,)))

    asyncio.run(main())


def test_base58_is_hivemind_s():
    peer_id = Identity.ephemeral().peer_id
    assert str(PeerID.from_base58(peer_id)) == peer_id
