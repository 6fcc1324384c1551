"""P21: somebody has the old key of the organiser, or names a new one without any key in force."""

import pytest

from atoll.coordinator.run.keys import RunKeys
from atoll.dht.identity import Identity
from atoll.dht.refusals import RefusalCode
from atoll.dht.transport import Refused
from atoll.optim.log.orders import Order, RotateKey, SetInnerSteps, StopRun, sign_order
from support.swarm import RUN_ID, SMALL, order_of, reached, run_swarm

NEW = RunKeys.generate()


def run(folder, scenario):
    return run_swarm(folder, scenario, layout=SMALL)


def by_new(number, change):
    return sign_order(Order(run_id=RUN_ID, number=number, change=change), NEW.sign)


async def rotate(swarm, peers, number=1):
    await swarm.until(lambda: reached(peers, 2))
    for peer in peers:
        peer.rounds.ordering.take(order_of(number, RotateKey(value=NEW.run_public_key)))
    await swarm.until(lambda: all(p.replica.settings.key == NEW.run_public_key for p in peers))


def test_the_old_key_gives_no_order_any_more(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(3)
        await rotate(swarm, peers)
        for _ in range(3):
            with pytest.raises(Refused) as refused:
                await peers[0].transport.call(
                    peers[1].identity.peer_id, "order", order_of(2, StopRun()), timeout_s=1.0
                )
            assert refused.value.code == RefusalCode.BAD_MESSAGE
        now = peers[1].ctx.now()
        assert peers[1].ctx.conduct.barred(peers[0].identity.peer_id, now) is not None
        for peer in peers[1:]:
            peer.rounds.ordering.take(by_new(2, SetInnerSteps(value=7)))
        await swarm.until(lambda: all(p.replica.settings.inner_steps == 7 for p in peers))
        assert swarm.same_bits(peers)

    run(tmp_path, scenario)


def test_a_leader_brings_no_order_of_the_old_key_into_the_log(tmp_path, monkeypatch):
    async def scenario(swarm):
        peers = await swarm.start(3)
        await rotate(swarm, peers)
        liar, lie = peers[0], order_of(2, StopRun())
        monkeypatch.setattr(liar.ctx, "next_order", lambda: lie)
        order = Order(run_id=RUN_ID, number=2, change=StopRun())
        monkeypatch.setattr(liar.replica, "open_order", lambda signed, key: order)
        position = peers[1].replica.position
        await swarm.until(lambda: reached(peers[1:], position + 4))
        assert all(peer.replica.settings.number == 1 for peer in peers[1:])
        assert swarm.same_bits(peers[1:])

    run(tmp_path, scenario)


def test_a_rotation_under_another_key_is_refused(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(3)
        await swarm.until(lambda: reached(peers, 2))
        change = RotateKey(value=NEW.run_public_key)
        forged = sign_order(
            Order(run_id=RUN_ID, number=1, change=change), Identity.ephemeral().sign
        )
        for signed in (forged, by_new(1, change)):  # nobody names itself either
            with pytest.raises(Refused):
                await peers[0].transport.call(
                    peers[1].identity.peer_id, "order", signed, timeout_s=1.0
                )
        assert peers[1].ctx.next_order() is None

    run(tmp_path, scenario)


def test_orders_around_a_rotation_are_decided_in_whatever_order_they_come(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(4)
        await swarm.until(lambda: reached(peers, 2))
        rotation = order_of(1, RotateKey(value=NEW.run_public_key))
        later = by_new(2, SetInnerSteps(value=7))
        peers[0].rounds.ordering.take(later)  # of a key that it does not know: no fault
        assert peers[0].ctx.next_order() is None
        peers[1].rounds.ordering.take(rotation)
        peers[1].rounds.ordering.take(later)
        peers[2].rounds.ordering.take(order_of(2, StopRun()))  # of the old key, before the rotation
        await swarm.until(lambda: all(p.replica.settings.number == 2 for p in peers))
        assert {p.replica.settings.inner_steps for p in peers} == {7}
        position = peers[0].replica.position
        await swarm.until(lambda: reached(peers, position + 2))
        assert all(p.replica.settings.last_round is None for p in peers)
        assert swarm.same_bits(peers)

    run(tmp_path, scenario)
