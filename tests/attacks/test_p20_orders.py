"""P20: somebody gives orders without the run's key, or again, or a leader keeps one back."""

import asyncio

import pytest

from atoll.dht.identity import Identity
from atoll.dht.refusals import RefusalCode
from atoll.dht.transport import Refused
from atoll.optim.log.entry import Entry
from atoll.optim.log.orders import (
    EvictPeer,
    Order,
    PauseRun,
    ReadmitPeer,
    ResumeRun,
    RunSettings,
    SetInnerSteps,
    SignedOrder,
    StopRun,
    sign_order,
)
from atoll.peer.rounds.consensus.ballots import leader_of
from support.swarm import RUN_ID, SMALL, order_of, reached, run_swarm


def run(folder, scenario):
    return run_swarm(folder, scenario, layout=SMALL)


def kinds(peer):
    records = peer.replica.store.headers(0, peer.replica.position)
    return [Entry.decode(record.entry).kind for record in records]


def forged(number, change):
    """An order under a key that is not the run's."""
    order = Order(run_id=RUN_ID, number=number, change=change)
    return sign_order(order, Identity.ephemeral().sign)


async def pause(swarm, peers):
    await swarm.until(lambda: reached(peers, 2))
    for peer in peers:
        peer.rounds.ordering.take(order_of(1, PauseRun()))
    await swarm.until(lambda: all(peer.replica.settings.is_paused for peer in peers))


@pytest.mark.parametrize(
    "order",
    [
        forged(1, StopRun()),
        order_of(1, StopRun(), run_id=b"s" * 32),
        SignedOrder(order=b"", signature=b"x").encode(),
        b"x" * 2000,
    ],
    ids=["another key", "another run", "no order", "too long"],
)
def test_an_order_that_is_none_is_its_senders_fault(tmp_path, order):
    async def scenario(swarm):
        peers = await swarm.start(3)
        await swarm.until(lambda: reached(peers, 1))
        for _ in range(3):
            with pytest.raises(Refused) as refused:
                await peers[0].transport.call(
                    peers[1].identity.peer_id, "order", order, timeout_s=1.0
                )
            assert refused.value.code == RefusalCode.BAD_MESSAGE
        now = peers[1].ctx.now()
        assert peers[1].ctx.conduct.barred(peers[0].identity.peer_id, now) is not None
        assert peers[1].ctx.next_order() is None

    run(tmp_path, scenario)


def test_an_order_that_was_decided_is_not_decided_again(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(3)
        await pause(swarm, peers)
        for peer in peers:
            peer.rounds.ordering.take(order_of(2, ResumeRun()))
        await swarm.until(lambda: all(p.replica.settings.number == 2 for p in peers))
        for peer in peers:  # the pause again: its number is old
            peer.rounds.ordering.take(order_of(1, PauseRun()))
            assert peer.ctx.next_order() is None
        position = peers[0].replica.position
        await swarm.until(lambda: reached(peers, position + 4))
        assert kinds(peers[0]).count("control") == 2
        assert not peers[0].replica.settings.is_paused

    run(tmp_path, scenario)


def test_a_leader_cannot_propose_an_order_that_nobody_gave(tmp_path, monkeypatch):
    async def scenario(swarm):
        peers = await swarm.start(4)
        await swarm.until(lambda: reached(peers, 2))
        liar, honest = peers[3], peers[:3]
        lie = forged(1, StopRun())
        monkeypatch.setattr(liar.ctx, "next_order", lambda: lie)
        order = Order.decode(SignedOrder.decode(lie).order)
        monkeypatch.setattr(liar.replica, "open_order", lambda signed, key: order)
        position = max(peer.replica.position for peer in peers)
        await swarm.until(lambda: reached(honest, position + 8), timeout_s=900.0)
        assert "control" not in kinds(honest[0])
        assert {peer.replica.settings for peer in honest} == {RunSettings()}
        assert any("expected a signature of the organiser's key" in event for event in liar.events)

    run(tmp_path, scenario)


def test_a_leader_cannot_decide_an_update_of_a_paused_run(tmp_path, monkeypatch):
    async def scenario(swarm):
        peers = await swarm.start(3)
        await pause(swarm, peers)
        liar, honest = peers[0], peers[1:]
        goes_on = liar.replica.settings.model_copy(update={"is_paused": False})
        monkeypatch.setattr(
            type(liar.replica),
            "settings",
            property(lambda self: goes_on if self is liar.replica else _settings(self)),
        )
        position = honest[0].replica.position
        liar.rounds._changed.set()
        await asyncio.sleep(60.0)
        assert {peer.replica.position for peer in honest} == {position}

    run(tmp_path, scenario)


def _settings(replica):
    from atoll.optim.log.orders import read_settings

    return read_settings(replica.standing.settings)


def test_the_next_leader_proposes_an_order_that_one_keeps_back(tmp_path, monkeypatch):
    async def scenario(swarm):
        peers = await swarm.start(3)
        await pause(swarm, peers)
        leader = leader_of(peers[0].replica.electorate, peers[0].replica.position, 0)
        liar = next(peer for peer in peers if peer.ctx.me == leader)
        monkeypatch.setattr(liar.ctx, "next_order", lambda: None)
        honest = [peer for peer in peers if peer is not liar]
        for peer in honest:
            peer.rounds.ordering.take(order_of(2, SetInnerSteps(value=7)))
        await swarm.until(lambda: all(p.replica.settings.number == 2 for p in peers))
        assert {peer.replica.settings.inner_steps for peer in peers} == {7}

    run(tmp_path, scenario)


def test_a_leader_out_of_touch_hears_of_an_order_from_an_elector(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(3)
        await pause(swarm, peers)
        leader = leader_of(peers[0].replica.electorate, peers[0].replica.position, 0)
        knows = next(peer for peer in peers if peer.ctx.me != leader)
        before = swarm.now()
        knows.rounds.ordering.take(order_of(2, ResumeRun()))
        await swarm.until(lambda: all(p.replica.settings.number == 2 for p in peers))
        assert swarm.now() - before < 3.0

    run(tmp_path, scenario)


def id_of(peer):
    return peer.identity.peer_id


def records(peer):
    stored = peer.replica.store.headers(0, peer.replica.position)
    return [Entry.decode(record.entry) for record in stored]


async def evicted(swarm, peers, out):
    """Let all but one know that it is evicted; return the position of the order."""
    others = [peer for peer in peers if peer is not out]
    for peer in others:
        peer.rounds.ordering.take(order_of(1, EvictPeer(peer_id=id_of(out))))
    await swarm.until(lambda: all(peer.replica.settings.evicted for peer in others))
    return next(entry.position for entry in records(others[0]) if entry.order)


def test_an_evicted_leader_cannot_keep_itself_in(tmp_path, monkeypatch):
    """It keeps the order back, reports and leads on as if nothing had been decided."""

    async def scenario(swarm):
        peers = await swarm.start(4)
        await swarm.until(lambda: reached(peers, 2))
        position = peers[0].replica.position
        leader = leader_of(peers[0].replica.electorate, position, 0)
        liar = next(peer for peer in peers if peer.ctx.me == leader)
        monkeypatch.setattr(liar.ctx, "next_order", lambda: None)
        honest = [peer for peer in peers if peer is not liar]
        at = await evicted(swarm, peers, liar)
        await swarm.until(lambda: reached(honest, at + 6))
        for entry in records(honest[0])[at:]:
            assert id_of(liar) not in {member.peer_id for member in entry.members}
            assert liar.ctx.me not in entry.electorate

    run(tmp_path, scenario)


def test_a_leader_cannot_put_its_evicted_friend_into_a_round(tmp_path, monkeypatch):
    async def scenario(swarm):
        peers = await swarm.start(5)
        await swarm.until(lambda: reached(peers, 2))
        friend, liar, honest = peers[4], peers[3], peers[:3]
        at = await evicted(swarm, peers, friend)
        monkeypatch.setattr(liar.ctx.conduct, "_evicted_in_log", tuple)
        monkeypatch.setattr(friend.ctx.conduct, "_evicted_in_log", tuple)
        await swarm.until(lambda: reached(honest, at + 12), timeout_s=900.0)
        for entry in records(honest[0])[at:]:
            assert id_of(friend) not in {member.peer_id for member in entry.members}
        assert swarm.same_bits(honest)

    run(tmp_path, scenario)


def test_an_old_eviction_does_not_follow_a_readmission(tmp_path):
    """Whoever kept the orders can send them again, in any order."""

    async def scenario(swarm):
        peers = await swarm.start(4)
        await swarm.until(lambda: reached(peers, 2))
        await evicted(swarm, peers, peers[3])
        for number, change in (
            (3, SetInnerSteps(value=7)),
            (2, ReadmitPeer(peer_id=id_of(peers[3]))),
        ):
            peers[0].rounds.ordering.take(order_of(number, change))
        await swarm.until(lambda: all(p.replica.settings.number == 3 for p in peers))
        for peer in peers:
            peer.rounds.ordering.take(order_of(1, EvictPeer(peer_id=id_of(peers[3]))))
        position = peers[0].replica.position
        await swarm.until(lambda: reached(peers, position + 4))
        assert {peer.replica.settings.evicted for peer in peers} == {()}

    run(tmp_path, scenario)


def test_of_two_orders_of_one_number_one_is_decided(tmp_path):
    """As after a restore of the coordinator: half of the peers know the one, half the other."""

    async def scenario(swarm):
        peers = await swarm.start(4)
        await swarm.until(lambda: reached(peers, 2))
        for peer, value in zip(peers, (7, 9, 7, 9), strict=True):
            peer.rounds.ordering.take(order_of(1, SetInnerSteps(value=value)))
        await swarm.until(lambda: all(peer.replica.settings.number == 1 for peer in peers))
        assert len({peer.replica.settings for peer in peers}) == 1
        position = peers[0].replica.position
        await swarm.until(lambda: reached(peers, position + 3))
        assert kinds(peers[0]).count("control") == 1
        assert swarm.same_bits(peers)

    run(tmp_path, scenario)
