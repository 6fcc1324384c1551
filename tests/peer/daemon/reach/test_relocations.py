"""Where the coordinator is, passed from peer to peer over a network in memory."""

import asyncio
import random
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.coordinator.relocating import OwnPlace
from atoll.coordinator.run.invite import Invite
from atoll.coordinator.run.relocation import Relocation, Whereabouts
from atoll.dht.refusals import RefusalCode
from atoll.dht.testing.memory import MemoryNetwork, run_virtual
from atoll.dht.transport import Refused
from atoll.peer.daemon.reach.relocations import (
    ASK_NODES_AFTER,
    ASK_NODES_EVERY,
    ASKED,
    AT_ONCE,
    METHOD,
    PASSED_ON,
    Following,
    Relocations,
    Spreading,
    asks_nodes,
)
from support.records import record_of

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OLD_NODE, NEW_NODE = (f"/ip4/192.0.2.{i}/tcp/7701/p2p/12D3KooW" for i in (1, 2))
INVITE = Invite(
    addresses=("old:7700",),
    run_id=b"\x07" * 32,
    run_key=KEY.public_key().public_bytes_raw(),
    tls_sha256=bytes(32),
    bootstrap=(OLD_NODE,),
)


def record(serial=5, address="new:7700"):
    there = Relocation(serial=serial, addresses=(address,), bootstrap=(NEW_NODE,))
    return there.sign(INVITE.run_id, KEY.sign)


class Swarm:
    """Peers in memory, all of which are in each other's roster."""

    def __init__(self, *names):
        self.network = MemoryNetwork()
        self.records = {name: record_of(name) for name in names}
        self.places = {name: Whereabouts(INVITE) for name in names}
        self.nodes = {name: self.exchange(name, self.places[name]) for name in names}

    def exchange(self, name, place, **options):
        return Relocations(self.network.transport(name), place, self.peers, **options)

    async def peers(self):
        return self.records

    async def look(self, times, **options):
        for _ in range(times):
            for node in self.nodes.values():
                await node.look(**options)

    def knowing(self):
        return {name for name, place in self.places.items() if place.record}


def test_all_peers_hear_of_it_from_a_coordinator_that_reaches_one(tmp_path):
    random.seed(1)  # in one of a hundred runs nobody tells one of them, which then has to ask

    async def main():
        names = [f"p{i:03}" for i in range(60)]
        swarm = Swarm(*names)
        told = []
        own = OwnPlace(tmp_path, INVITE, record(), lambda *event: told.append(event))
        coordinator = swarm.exchange("coordinator", own, told_of_each=float("inf"))
        for name in names[1:]:
            swarm.network.cut("coordinator", name)
        for _ in range(80):  # of 60 peers, eight at random at a time
            await coordinator.look()
            if swarm.knowing():
                break
        await swarm.look(8)
        assert swarm.knowing() == set(names)
        assert not told

    run_virtual(main())


def test_a_coordinator_that_sees_nobody_tells_those_that_it_knew(tmp_path):
    """By a clock that is ahead of the run's, the records of all peers have expired (seed 61921)."""

    async def main():
        swarm = Swarm("a", "b", "c")
        own = OwnPlace(tmp_path, INVITE, record(), lambda *event: None)
        swarm.records = {}
        known = [f"/ip4/192.0.2.{i}/tcp/1/p2p/{name}" for i, name in enumerate("ab")]
        coordinator = swarm.exchange(
            "coordinator", own, known=lambda: known, told_of_each=float("inf")
        )
        await coordinator.look()
        assert not swarm.knowing()  # a dial of somebody who is gone takes a while
        await coordinator.look(asks=True)
        assert swarm.knowing() == {"a", "b"}

    run_virtual(main())


def test_a_peer_that_is_lost_asks_and_one_that_is_in_touch_does_not():
    async def main():
        swarm = Swarm("a", "b")
        await swarm.nodes["b"].look()  # answers, and has nothing yet
        swarm.places["b"].take(record())
        await swarm.nodes["a"].look()
        assert not swarm.places["a"].record
        await swarm.nodes["a"].look(asks=True)
        assert swarm.places["a"].addresses == ("new:7700", "old:7700")

    run_virtual(main())


def test_a_coordinator_hears_that_another_has_taken_its_place(tmp_path):
    """It was thought dead, and rebuilt from a follower; it has told all peers its own place."""

    async def main():
        swarm, told = Swarm("a", "b", "c"), list[tuple[str, str]]()
        own = OwnPlace(tmp_path, INVITE, record(), lambda *event: told.append(event))
        coordinator = swarm.exchange("coordinator", own, told_of_each=float("inf"))
        await coordinator.look()
        for place in swarm.places.values():
            place.take(record(6, "rebuilt:7700"))
        await coordinator.look()
        assert not told
        for _ in range(2):
            await coordinator.look(asks=True)
        assert len(told) == 1 and told[0][0] == "error" and "at rebuilt:7700" in told[0][1]
        assert own.record == record()

    run_virtual(main())


def test_a_caller_with_an_old_record_is_told_the_newer_one():
    async def main():
        swarm = Swarm("a", "b")
        swarm.places["a"].take(record(5))
        swarm.places["b"].take(record(6, "newer:7700"))
        await swarm.nodes["a"].look(asks=True)
        assert swarm.places["a"].record == swarm.places["b"].record == record(6, "newer:7700")

    run_virtual(main())


def test_a_forged_record_is_refused_and_passed_on_to_nobody():
    async def main():
        swarm = Swarm("a", "b")
        liar = swarm.network.transport("liar")
        forged = Relocation(serial=9, addresses=("evil:7700",)).sign(
            INVITE.run_id, Ed25519PrivateKey.generate().sign
        )
        for body in (forged, bytes(1 << 20), b"x"):
            with pytest.raises(Refused) as refused:
                await liar.call("a", METHOD, body, timeout_s=5)
            assert refused.value.code == RefusalCode.BAD_REQUEST
        await swarm.look(3, asks=True)
        assert not swarm.knowing()

    run_virtual(main())


def test_an_answer_that_is_forged_changes_nothing():
    async def main():
        swarm = Swarm("a", "liar")

        async def lie(remote, body):
            return b"\x00" * 200

        swarm.nodes.pop("liar")._transport.serve(METHOD, lie)
        await swarm.look(2, asks=True)
        assert not swarm.knowing()

    run_virtual(main())


def test_records_shown_again_cause_no_calls():
    spreading, others = Spreading(PASSED_ON), [f"p{i:02}" for i in range(40)]
    assert spreading.due(b"", others, asks=False) == []
    calls = 0
    for _ in range(10):
        due = spreading.due(b"first", others, asks=False)
        calls += len(due)
        for peer in due:
            spreading.told(peer, b"first")
    assert calls == PASSED_ON
    assert len(spreading.due(b"second", others, asks=False)) == AT_ONCE


def test_a_coordinator_tells_everybody_some_at_a_time():
    spreading, others, told = Spreading(float("inf")), [f"p{i:02}" for i in range(40)], []
    while due := spreading.due(b"record", others, asks=False):
        assert len(due) <= AT_ONCE
        told += due
        for peer in due:
            spreading.told(peer, b"record")
    assert sorted(told) == others
    spreading.due(b"record", others[1:], asks=False)
    assert spreading.due(b"record", others, asks=False) == ["p00"]  # it has come back


def test_peers_that_do_not_answer_are_tried_again_and_bar_nobody():
    spreading, others, seen = Spreading(PASSED_ON), [f"p{i:02}" for i in range(40)], set()
    for _ in range(60):
        seen.update(spreading.due(b"record", others, asks=False))
    assert len(seen) > PASSED_ON
    assert len(spreading.due(b"", others, asks=True)) == ASKED


def test_peers_that_were_asked_and_know_it_do_not_count_below_none():
    """A peer without the coordinator asks more peers than it has to tell."""
    spreading, others = Spreading(PASSED_ON), [str(index) for index in range(40)]
    spreading.due(b"one", others, asks=True)
    for peer in others[: PASSED_ON + 1]:
        spreading.told(peer, b"one")
    assert len(spreading.due(b"one", others, asks=True)) == ASKED


class Follower:
    """A peer's parts around `Following`, which note what is asked of them."""

    def __init__(self):
        self.kept, self.reconnected, self.shown, self.relays = [], 0, [], []
        self.asked = []
        self.whereabouts, self.is_reached = Whereabouts(INVITE), True
        self.addresses = self.whereabouts.addresses
        self.network = MemoryNetwork()
        self.node = SimpleNamespace(
            transport=self.network.transport("me"),
            bootstrap=(OLD_NODE,),
            notices=SimpleNamespace(show=bytes),
        )
        self.following = Following(
            self,
            self.node,
            SimpleNamespace(
                keep_relocation=lambda *kept: self.kept.append(kept),
                membership=SimpleNamespace(bootstrap=("/ip4/1.2.3.4/tcp/1/p2p/peer",)),
            ),
            SimpleNamespace(follow=self.relays.append),
            self.peers,
            report=lambda level, text: self.shown.append(text),
            find_place=self.find_place,
        )

    async def follow(self):
        self.reconnected += 1
        self.addresses = self.whereabouts.addresses

    async def peers(self):
        return {"me": record_of("me")}

    async def find_place(self, nodes):
        self.asked.append(nodes)
        return False


def test_a_peer_without_the_coordinator_asks_nodes_now_and_then():
    """Once its admission has expired, no peer answers it."""

    async def main():
        peer = Follower()
        for _ in range(2 * ASK_NODES_AFTER):
            await peer.following.look()
        assert not peer.asked
        peer.is_reached = False
        for _ in range(2 * ASK_NODES_AFTER):
            await peer.following.look()
        assert peer.asked == [(OLD_NODE, "/ip4/1.2.3.4/tcp/1/p2p/peer")] * 2

    run_virtual(main())


def test_nodes_are_asked_ever_more_seldom_down_to_once_an_hour():
    asked = [looks for looks in range(3 * ASK_NODES_EVERY + 1) if asks_nodes(looks)]
    assert asked == [60, 120, 240, 480, 960, 1800, 3600, 5400]


def test_a_peer_keeps_a_new_record_before_it_follows():
    async def main():
        peer = Follower()
        await peer.following.look()
        assert not peer.kept and not peer.node.notices.show()
        peer.whereabouts.take(record())
        assert peer.node.notices.show() == record()  # to strangers, who may have an old invite
        for _ in range(3):
            await peer.following.look()
        assert peer.kept == [(record(), (NEW_NODE,))] and peer.reconnected == 1
        assert peer.node.bootstrap == (NEW_NODE, OLD_NODE) and peer.relays == [(NEW_NODE,)]
        assert peer.shown == ["the coordinator is at new:7700 now"]

    run_virtual(main())


def test_the_record_of_an_address_that_is_known_is_no_news():
    async def main():
        peer = Follower()
        peer.whereabouts.take(record(5, "old:7700"))
        await peer.following.look()
        assert len(peer.kept) == 1 and not peer.shown

    run_virtual(main())


def test_a_roster_that_does_not_answer_ends_nothing():
    async def main():
        peer = Follower()

        async def silent():
            raise TimeoutError

        peer.following._exchange._peers = silent
        keeping = asyncio.create_task(peer.following.keep())
        peer.whereabouts.take(record())
        await asyncio.sleep(10)
        assert not keeping.done() and peer.kept
        keeping.cancel()

    run_virtual(main())
