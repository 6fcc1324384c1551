"""D1: one attacker takes the places next to the roster's key, and swallows every record."""

import asyncio
import threading

import pytest

from atoll.dht.bindings import DHTID, DHTNode, PeerID, dht_pb2
from atoll.dht.identity import Identity
from atoll.dht.kademlia import node_id_of
from atoll.dht.roster import MAX_SHARED, DhtRoster
from atoll.dht.testing import run_virtual
from atoll.optim.state import vectors
from atoll.peer.daemon.beside import starting
from atoll.peer.daemon.options import PeerOptions
from atoll.peer.daemon.process import RunOptions, Stop, join_and_train
from atoll.peer.rounds.context import fetch_head
from support.beside import InThread
from support.organiser import LOOPBACK, Organiser, tiny_spec
from support.organiser import until as wait_until
from support.strangers import CHECK, ROSTER_ID, RUN, admission, members, record, signed
from support.swarm import Swarm


async def until(holds, timeout_s=15):
    async with asyncio.timeout(timeout_s):
        while not await holds():
            await asyncio.sleep(0.05)


def test_node_ids_that_do_not_follow_from_the_peer_id_enter_no_table(tmp_path):
    async def main():
        async with members(tmp_path) as (a, b):
            target = PeerID.from_base58(a.peer_id)
            chosen = [DHTID(int(ROSTER_ID) ^ k) for k in range(1, 25)]
            for node_id in chosen:
                b.dht.protocol.node_info = dht_pb2.NodeInfo(node_id=node_id.to_bytes())
                await b.dht.protocol.call_ping(target)
                await b.dht.protocol.call_find(target, [ROSTER_ID])
            await asyncio.sleep(0.1)
            table = a.dht.protocol.routing_table
            assert set(table.uid_to_peer_id) == {node_id_of(b.peer_id)}

    asyncio.run(asyncio.wait_for(main(), 30))


def test_an_answer_may_name_nodes_at_their_own_ids_alone(tmp_path):
    async def main():
        async with members(tmp_path) as (_, b):
            honest, liar = (PeerID.from_base58(Identity.ephemeral().peer_id) for _ in range(2))
            answer = dht_pb2.FindResult(
                nearest_node_ids=[node_id_of(str(honest)).to_bytes(), ROSTER_ID.to_bytes()],
                nearest_peer_ids=[honest.to_bytes(), liar.to_bytes()],
            )
            named = b.dht.protocol._nearest(answer)
            assert named == {node_id_of(str(honest)): honest}

    asyncio.run(asyncio.wait_for(main(), 30))


def eclipse(node):
    """Let the DHT swallow what this node stores, and hide what others stored."""

    async def store(*arguments, **options):
        return True

    async def get(*arguments, **options):
        return None

    node.dht.store, node.dht.get = store, get


def test_members_joiners_and_restarts_meet_although_the_dht_is_eclipsed(tmp_path):
    """Real nodes; each knows the first alone, as from an invite."""

    async def publish(node, incarnation="0"):
        changed = record(node.peer_id, node.addresses)
        await node.roster.publish(
            type(changed)(**{**vars(changed), "incarnation": incarnation * 32}), 20
        )

    async def main():
        async with members(tmp_path, count=3) as nodes:
            everyone = {node.peer_id for node in nodes}

            async def all_meet():
                return all([set(await node.roster.peers()) == everyone for node in nodes])

            for node in nodes:
                eclipse(node)
                await publish(node)
            await until(all_meet)
            (tmp_path / "late").mkdir()
            async with members(tmp_path / "late", count=1) as (joiner,):
                eclipse(joiner)
                joiner.bootstrap = tuple(nodes[0].addresses[:1])
                await publish(joiner)
                everyone.add(joiner.peer_id)
                nodes.append(joiner)
                await until(all_meet)
                records = await joiner.roster.peers()
                other = records[nodes[2].peer_id]
                await joiner.transport.connect(other.peer_id, other.addresses, timeout_s=10)
            nodes.pop()
            async with members(tmp_path / "late", count=1) as (again,):
                eclipse(again)
                again.bootstrap = tuple(nodes[0].addresses[:1])
                await publish(again, incarnation="1")
                nodes.append(again)

                async def is_back():
                    records = await nodes[1].roster.peers()
                    back = records.get(again.peer_id)
                    return back is not None and back.incarnation == "1" * 32 and await all_meet()

                await until(is_back)

    asyncio.run(asyncio.wait_for(main(), 45))


class DeadDht:
    """Swallows what is stored."""

    async def store(self, *arguments, **options):
        return True

    async def get(self, *arguments, **options):
        return None


def roster(identity):
    return DhtRoster(
        DeadDht(),
        identity,
        run_id=RUN.hex(),
        credential=lambda: admission(identity.peer_id),
        check=CHECK,
    )


def test_a_head_answer_carries_records(tmp_path):
    async def main():
        swarm = Swarm(tmp_path)
        a, b, *_ = await swarm.start(3)
        for peer in (a, b):
            peer.ctx.roster = roster(peer.identity)
            await peer.ctx.roster.publish(record(peer.identity.peer_id), 30)
        both = {a.identity.peer_id, b.identity.peer_id}
        for _ in range(2):  # the second time both know the same, and nothing is sent
            head = await fetch_head(
                a.transport, a.ctx.roster, b.identity.peer_id, epoch=None, timeout_s=5
            )
        assert head.roster == b"\x90"
        assert set(await a.ctx.roster.peers()) == set(await b.ctx.roster.peers()) == both
        await swarm.stop()

    run_virtual(main())


def test_an_answer_has_at_most_32_records_and_bad_ones_spoil_nothing():
    async def main():
        ours, theirs = roster(Identity.ephemeral()), roster(Identity.ephemeral())
        for _ in range(MAX_SHARED + 8):
            identity = Identity.ephemeral()
            await ours.take([signed(identity, admission(identity.peer_id))[1]])
        await theirs.hear(await ours.answer(theirs.question()))
        assert len(theirs.known) == MAX_SHARED
        good, bad = Identity.ephemeral(), Identity.ephemeral()
        far = signed(good, admission(good.peer_id), lasts_s=3000)[1]
        records = [signed(bad)[1], b"rubbish", far, signed(good, admission(good.peer_id))[1]]
        assert await theirs.take(records) == 1
        assert good.peer_id in theirs.known
        assert bad.peer_id not in theirs.known

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.exhaustive  # the nodes alone do the same in the first test
def test_rounds_joiners_and_restarts_work_although_the_dht_is_eclipsed(tmp_path, monkeypatch):
    """Real peers with a real coordinator; every store is swallowed and every search finds none."""

    async def store(*arguments, **options):
        return True

    async def get(*arguments, **options):
        return None

    monkeypatch.setattr(DHTNode, "store", store)
    monkeypatch.setattr(DHTNode, "get", get)
    monkeypatch.setattr(starting, "start_process", InThread)
    monkeypatch.setattr(vectors, "_memory", vectors._memory)  # as it was, afterwards
    organiser = Organiser(tiny_spec(run={"rounds": 0}, round={"min_peers": 2}), tmp_path / "c")
    running = []

    def start(name):
        peer = PeerOptions(
            invite=organiser.invite, state_dir=tmp_path / name, name=name, listen=LOOPBACK
        )
        stop = Stop()
        options = RunOptions(peer=peer, device="cpu", yes=True, share=0.2)
        thread = threading.Thread(
            target=lambda: join_and_train(options, on_event=lambda event: None, stop=stop),
            daemon=True,
        )
        thread.start()
        running.append((stop, thread))
        return running[-1]

    def has_members(count):
        history = organiser.status().history
        return lambda: any(
            row.members == count for row in organiser.status().history[len(history) :]
        )

    organiser.start()
    try:
        start("one")
        stop, thread = start("two")
        wait_until(has_members(2), "rounds of two")
        start("late")
        wait_until(has_members(3), "a round with the joiner")
        stop.set()
        thread.join(30)
        wait_until(has_members(2), "rounds of the others")
        start("two")
        wait_until(has_members(3), "a round with the one that started again")
    finally:
        for stop, _ in running:
            stop.set()
        for _, thread in running:
            thread.join(60)
        organiser.stop()
