"""Holes through routers: the steps of two peers, and real p2pds behind routers of the lab."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from atoll.dht import punching
from atoll.dht.addresses import peer_of, through
from atoll.dht.node import Node
from atoll.dht.punching import Punching
from atoll.dht.refusals import RefusalCode
from atoll.dht.testing.wan import WanLab, WanLink
from atoll.dht.transport import PeerUnreachable, Refused

PUBLIC = "/ip4/203.0.114.1/tcp/1"


class Pair:
    """Two transports; a dial succeeds if the dials until then end with `through`."""

    def __init__(self, *, through):
        self.through = through
        self.dials = []
        self.is_connected = False


class End:
    """One end of a pair: the part of `LibP2PTransport` that makes holes."""

    def __init__(self, pair, peer_id, other):
        self.pair, self.peer_id, self.other = pair, peer_id, other
        self.address = PUBLIC
        self.peers = {}

    @property
    def relayed(self):
        return frozenset() if self.pair.is_connected else frozenset({self.other})

    def seen_at(self, peer):
        return self.address if peer == self.other else ""

    async def is_connected(self, peer):
        return self.pair.is_connected

    async def dial_once(self, peer, addresses, *, timeout_s):
        assert addresses == [self.address]
        self.pair.dials.append(self.peer_id)
        if "".join(self.pair.dials).endswith(self.pair.through):
            self.pair.is_connected = True
            return
        raise PeerUnreachable("nobody answered")

    def serve(self, method, handler):
        self.handler = handler

    async def call(self, peer, method, body, *, timeout_s):
        return await self.peers[peer].handler(self.peer_id, body)


def attempt(monkeypatch, through, *, address=PUBLIC, times=1):
    monkeypatch.setattr(punching, "BACKOFF_S", 0.0)

    async def main():
        pair = Pair(through=through)
        a, b = End(pair, "A", "B"), End(pair, "B", "A")
        a.peers["B"] = b
        a.address = b.address = address
        holes, both = [], [Punching(a), Punching(b)]
        for each in both:
            each.on_hole = holes.append
        for _ in range(times):
            for each in both:
                each.look()
            await asyncio.sleep(0.01)
        for each in both:
            await each.close()
        return pair.dials, holes

    return asyncio.run(main())


def test_the_other_peer_dials_through_the_hole(monkeypatch):
    assert attempt(monkeypatch, "AB") == (["A", "B"], ["B"])


def test_the_first_peer_dials_once_more(monkeypatch):
    assert attempt(monkeypatch, "ABA") == (["A", "B", "A"], ["B"])


def test_after_a_failure_there_is_a_pause(monkeypatch):
    assert attempt(monkeypatch, "never", times=3) == (["A", "B", "A"], [])


@pytest.mark.parametrize("address", ["", "/ip4/192.168.1.1/tcp/22", "/ip4/127.0.0.1/tcp/22"])
def test_nobody_dials_into_a_private_network(monkeypatch, address):
    """The address is a relay's word."""
    assert attempt(monkeypatch, "AB", address=address) == ([], [])


def test_requests_are_empty_and_one_at_a_time():
    async def main():
        gate = asyncio.Event()
        end = End(Pair(through="never"), "B", "A")

        async def dial_once(peer, addresses, *, timeout_s):
            await gate.wait()

        end.dial_once = dial_once
        served = Punching(end)
        first = asyncio.ensure_future(end.handler("A", b""))
        await asyncio.sleep(0)
        for body in (b"", b"x"):
            with pytest.raises(Refused) as caught:
                await end.handler("A", body)
            assert caught.value.code == RefusalCode.BAD_MESSAGE
        gate.set()
        assert await first == b""
        await served.close()

    asyncio.run(main())


# real p2pds; each host runs this file

BEHIND = {"a": "port-restricted", "b": "restricted", "c": "symmetric"}
# A symmetric router gives a flow to another peer another port than the relay saw: that passes the
# filter of addresses, but not that of addresses and ports.
DIRECT = {"ab": True, "bc": True, "ac": False}


async def be_a_host(role, ip, board):
    """Relay, or meet the others through the relay and make holes; write what came of it."""
    node = await Node.start(
        None, run_id="nat", listen_maddrs=(f"/ip4/{ip}/tcp/7701",), relay_mbit_s=100.0
    )

    async def echo(remote, body):
        return body

    node.transport.serve("echo", echo)
    put(board, role, node.addresses[0])
    known = {name: await get(board, name) for name in ("relay", *BEHIND)}
    if role != "relay":
        await make_holes(node, role, known, board)
    for name in BEHIND:
        await get(board, f"{name}-done")
    await node.close()


async def make_holes(node, role, known, board):
    relay = known.pop("relay")
    await node.transport.connect(peer_of(relay), [relay], timeout_s=10)
    put(board, f"{role}-here", "")
    others = {name: peer_of(known[name]) for name in BEHIND if name != role}
    for name, peer in others.items():
        await get(board, f"{name}-here")
        await node.transport.connect(peer, [through(relay, peer)], timeout_s=10)
        await node.transport.call(peer, "echo", b"", timeout_s=10)
    node.punching.look()
    await asyncio.gather(*node.punching._tasks._tasks)
    for name, peer in others.items():
        if node.peer_id < peer:
            put(board, "".join(sorted(role + name)), await node.transport.is_connected(peer))
        assert await node.transport.call(peer, "echo", b"x", timeout_s=10) == b"x"
    put(board, f"{role}-done", "")


def put(board, name, value):
    (board / f"{name}.new").write_text(json.dumps(value))
    (board / f"{name}.new").rename(board / name)


async def get(board, name):
    while not (board / name).exists():
        await asyncio.sleep(0.05)
    return json.loads((board / name).read_text())


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/net/tun").exists(), reason="needs root and /dev/net/tun"
)
def test_peers_behind_routers_make_holes_where_that_works(tmp_path):
    links = [WanLink(), *(WanLink(behind=kind) for kind in BEHIND.values())]
    with WanLab(links) as lab:
        children = [
            lab.popen(host, [sys.executable, __file__, role, lab.own_ip(host), str(tmp_path)])
            for host, role in enumerate(("relay", *BEHIND))
        ]
        try:
            assert [child.wait(100) for child in children] == [0] * len(children)
        finally:
            for child in children:
                child.kill()
                child.wait()
    assert {pair: json.loads((tmp_path / pair).read_text()) for pair in DIRECT} == DIRECT


if __name__ == "__main__":
    asyncio.run(be_a_host(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
