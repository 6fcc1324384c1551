"""What a peer does about an address that has changed, without a network or a clock."""

import asyncio
from types import SimpleNamespace

import pytest

from atoll.coordinator.rpc.client_errors import CoordinatorUnreachable
from atoll.dht.identity import Identity
from atoll.dht.upnp import Forwarding
from atoll.peer.daemon.reach import moves
from atoll.peer.daemon.reach.moves import AddressWatch, Moves, network_of
from atoll.peer.daemon.reach.reachability import Reach, Reachability

HOME, CAFE = ["192.168.1.4", "2a00:1::4"], ["10.7.0.9"]
A, B = frozenset("A"), frozenset("B")
COORDINATOR = f"/ip4/203.0.114.1/tcp/7701/p2p/{Identity.ephemeral().peer_id}"


def test_another_network_is_asked_about_at_once_and_once():
    watch = AddressWatch(HOME, is_known=True)
    assert watch.look(0.0, HOME, A) is None
    assert watch.look(2.0, [], A) is None  # between two networks
    assert watch.look(4.0, CAFE, A) == "moved"
    watch.done(A)
    assert watch.look(6.0, CAFE, A) is None
    assert watch.look(8.0, HOME, A) == "moved"


def test_tries_have_pauses_that_double_and_another_move_ends_them():
    watch, asked = AddressWatch(HOME, is_known=False), []
    for second in range(200):
        if watch.look(float(second), HOME, A) is not None:
            asked.append(second)
            watch.failed(float(second))
    assert asked == [0, 5, 15, 35, 75, 135, 195]
    assert watch.look(200.0, CAFE, A) == "moved"
    assert watch.tries == 0


def test_all_connections_lost_at_once_raise_the_question():
    watch = AddressWatch(HOME, is_known=True)
    assert watch.look(0.0, HOME, frozenset()) is None
    assert watch.look(2.0, HOME, A | B) is None
    assert watch.look(4.0, HOME, B) is None  # a peer that left
    assert watch.look(6.0, HOME, frozenset()) == "lost"
    watch.done(frozenset())
    assert watch.look(8.0, HOME, frozenset()) is None


def test_the_daily_address_of_ipv6_is_no_move():
    assert network_of(["2a00:1::4"]) == network_of(["2a00:1::beef"]) != network_of(["2a00:2::4"])
    assert network_of(["192.168.1.4", "2a00:1::4"]) == network_of(["192.168.1.4"])


class Client:
    """The coordinator, as far as it is asked."""

    def __init__(self):
        self.closed, self.is_away = 0, False

    async def close(self):
        self.closed += 1


def node():
    doubted = []
    return SimpleNamespace(
        seen=(),
        relays=(),
        peer_id="P",
        relaying=SimpleNamespace(allow=lambda mbit_s: None),
        doubted=doubted,
        transport=SimpleNamespace(connected=A | B, relayed=(), doubt=doubted.append),
        daemon=SimpleNamespace(options=SimpleNamespace(listen=("/ip4/0.0.0.0/tcp/4001",))),
    )


@pytest.fixture
def peer(monkeypatch):
    """A peer that was dialed at home; `answer` is the coordinator's next one."""
    here = SimpleNamespace(own=HOME, answer=None, client=Client(), node=node(), said=[])

    async def answered(client, listen, forwarding):
        assert listen == ("/ip4/0.0.0.0/tcp/4001",)
        if here.answer is None:
            raise CoordinatorUnreachable("away")
        return here.answer

    monkeypatch.setattr(moves, "probe_again", answered)
    here.reach = Reachability(here.node, Reach(address="203.0.114.9", port=4001), [COORDINATOR])
    here.moves = Moves(
        here.client,
        here.node,
        here.reach,
        Forwarding(),
        is_asked=True,
        report=lambda level, text, key=None: here.said.append(text),
        own=lambda: here.own,
    )
    return here


def look(peer, *times):
    async def main():
        for now_s in times:
            await peer.moves.look(now_s)

    asyncio.run(main())


def test_a_peer_that_moves_behind_a_router_and_back_is_announced_anew(peer):
    look(peer, 0.0)
    assert peer.node.seen == ("/ip4/203.0.114.9/tcp/4001",) and not peer.node.doubted
    peer.own = CAFE
    look(peer, 2.0, 4.0)
    assert (sorted(peer.node.doubted), peer.client.closed) == (["A", "B"], 1)
    peer.answer = Reach(address="203.0.114.77", port=4001, is_dialed=False)
    look(peer, 7.0)
    assert (peer.node.seen, peer.node.relays) == ((), (COORDINATOR,))
    assert len(peer.said) == 1 and "203.0.114.77" in peer.said[0]
    peer.own, peer.answer = HOME, Reach(address="203.0.114.10", port=4001)
    look(peer, 9.0, 11.0)
    assert (peer.node.seen, peer.node.relays) == (("/ip4/203.0.114.10/tcp/4001",), ())
    assert peer.client.closed == 2


def test_a_router_with_another_address_forwards_the_same_port(peer):
    look(peer, 0.0)
    peer.node.transport.connected = frozenset()
    # A free port is not forwarded, so it is not let in.
    peer.answer = Reach(address="203.0.114.10", port=4001, is_dialed=False)
    look(peer, 2.0)
    assert (peer.node.seen, peer.node.relays) == (("/ip4/203.0.114.10/tcp/4001",), ())


def test_a_router_that_was_restarted_has_forgotten_its_mappings(peer):
    peer.reach.take(Reach(address="203.0.114.9", port=4001, by_upnp=True))
    look(peer, 0.0)
    peer.node.transport.connected = frozenset()
    peer.answer = Reach(address="203.0.114.10", port=4001, is_dialed=False)
    look(peer, 2.0)
    assert (peer.node.seen, peer.node.relays) == ((), (COORDINATOR,))
    peer.node.transport.connected = A
    look(peer, 4.0)
    peer.node.transport.connected = frozenset()
    peer.answer = Reach(address="203.0.114.11", port=4001, by_upnp=True)
    look(peer, 6.0)
    assert peer.node.seen == ("/ip4/203.0.114.11/tcp/4001",) and peer.reach.kind == "upnp"
