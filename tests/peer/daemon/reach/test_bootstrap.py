"""The run's first DHT node, started again while the peers have each other."""

import asyncio
from pathlib import Path

from atoll.coordinator.run.files import known_peers
from atoll.coordinator.service.server import NodeRequest
from atoll.dht.node import Node
from atoll.dht.roster import PeerRecord
from atoll.dht.transport import admit_everyone
from atoll.peer.daemon.reach import bootstrap
from atoll.peer.daemon.reach.bootstrap import BootstrapNode, both_families
from atoll.peer.daemon.reach.neighbours import PortInUse
from support.records import record_of

RUN_ID = bytes(range(32))
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


def request(folder: Path) -> NodeRequest:
    return NodeRequest(
        run_id=RUN_ID,
        identity_path=folder / "node.key",
        host="127.0.0.1",
        port=0,
        advertise=None,
        relay_mbit_s=0.0,
        check=admit_everyone,
        admit=lambda peer_id: b"admission",
    )


def record(node: Node) -> PeerRecord:
    return record_of(
        node.peer_id, addresses=tuple(node.addresses), incarnation="1" * 32, position=3
    )


async def until(condition, timeout_s=60.0):
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.1)


def test_all_of_ipv4_brings_all_of_ipv6_unless_that_is_taken(monkeypatch):
    taken = set()

    def free_port(host, port, *, remedy):
        if host in taken:
            raise PortInUse(host)
        return port

    monkeypatch.setattr(bootstrap, "free_port", free_port)
    assert both_families("0.0.0.0", 7701) == ["0.0.0.0", "::"]
    assert both_families("::", 7701) == ["::", "0.0.0.0"]
    assert both_families("192.168.1.4", 7701) == ["192.168.1.4"]
    taken.add("::")
    assert both_families("0.0.0.0", 7701) == ["0.0.0.0"]


def test_it_reports_the_connections_that_no_relay_has_shown(tmp_path):
    async def main():
        first = await BootstrapNode.start(request(tmp_path), admission_s=60.0)
        options = {"run_id": RUN_ID.hex(), "listen_maddrs": LOOPBACK, "admission": b"admission"}
        one = await Node.start(None, bootstrap=first.addresses, **options)
        try:
            (address,) = (await first.direct_connections())[one.peer_id]
            assert address.startswith("/ip4/127.0.0.1/tcp/")
            first._node.relaying.seen_at[one.peer_id] = "/ip4/1.1.1.1/tcp/4001"
            assert await first.direct_connections() == {}
        finally:
            await one.close()
            await first.close()

    asyncio.run(main())


def test_started_again_it_finds_the_peers_that_go_on_without_it(tmp_path, monkeypatch):
    monkeypatch.setattr(bootstrap, "LOOK_S", 0.2)

    async def main():
        first = await BootstrapNode.start(request(tmp_path), admission_s=60.0)
        options = {"run_id": RUN_ID.hex(), "listen_maddrs": LOOPBACK, "admission": b"admission"}
        one = await Node.start(None, bootstrap=first.addresses, **options)
        two = await Node.start(None, bootstrap=[*first.addresses, *one.addresses], **options)
        try:
            await one.roster.publish(record(one), 60.0)

            async def is_known():
                return set(known_peers(tmp_path)) == set(one.addresses[:2])

            await until(is_known)
            await first.close()
            for node in (one, two):  # as if it had been away until they dropped it
                table = node.dht.protocol.routing_table
                for uid, peer in list(table.uid_to_peer_id.items()):
                    if peer.to_base58() not in (one.peer_id, two.peer_id):
                        del table[uid]
            again = await BootstrapNode.start(request(tmp_path), admission_s=60.0)
            try:

                async def sees_one():
                    return one.peer_id in await again._node.roster.peers()

                await until(sees_one)
            finally:
                await again.close()
        finally:
            await one.close()
            await two.close()

    asyncio.run(main())
