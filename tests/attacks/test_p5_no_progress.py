"""P5: a member holds its streams open by signs of life, and sends no cells."""

import math

import pytest

from atoll.peer.rounds.conduct import Fault
from atoll.peer.rounds.policies import is_slow, laggards
from support.attackers import hold
from support.swarm import SETTINGS, reached, run_swarm

STALL_S = SETTINGS.stall_s


async def round_s(swarm, peers, count=4):
    """Seconds a round."""
    began_s, at = swarm.now(), min(peer.replica.position for peer in peers)
    await swarm.until(lambda: reached(peers, at + count), timeout_s=600.0)
    return (swarm.now() - began_s) / count


def test_a_member_that_only_lives_is_left_out_and_remembered(tmp_path, monkeypatch):
    async def scenario(swarm):
        peers = await swarm.start(4)
        await swarm.until(lambda: reached(peers, 3))
        liar, honest = peers[3], peers[:3]
        before_s = await round_s(swarm, peers)
        hold(monkeypatch, liar.ctx.me)
        assert await round_s(swarm, honest, 3) < before_s + 6 * STALL_S
        await swarm.until(
            lambda: all(p.ctx.lags.barred(liar.identity.peer_id, swarm.now()) for p in honest),
            timeout_s=120.0,
        )
        bars = [p.ctx.lags.barred(liar.identity.peer_id, swarm.now()) for p in honest]
        assert {bar.why for bar in bars} == {Fault.NO_PROGRESS}
        assert await round_s(swarm, honest) < before_s + STALL_S
        for peer in honest:
            for other in honest:
                assert peer.ctx.lags.barred(other.identity.peer_id, swarm.now()) is None
        assert swarm.same_bits(honest)

    run_swarm(tmp_path, scenario, codec="int8")


@pytest.mark.parametrize(
    ("progress", "took_s", "waited_s", "lagging"),
    [
        ({1: 1.0, 2: 1.0, 3: 0.2}, {1: 10.0, 2: 10.0}, 19.9, set()),
        ({1: 1.0, 2: 1.0, 3: 0.2}, {1: 10.0, 2: 10.0}, 20.0, {3}),
        ({1: 1.0, 2: 1.0, 3: 0.25}, {1: 10.0, 2: 10.0}, 99.0, set()),
        ({1: 1.0, 2: 1.0, 3: 0.0}, {1: 0.1, 2: 0.1}, 4 * STALL_S - 0.1, set()),
        ({1: 1.0, 2: 1.0, 3: 0.0}, {1: 0.1, 2: 0.1}, 4 * STALL_S, {3}),
        ({1: 0.1, 2: 0.2, 3: 0.0}, {}, 999.0, set()),
        ({1: 1.0, 2: 0.2, 3: 0.1}, {1: 1.0}, 99.0, set()),
        ({1: 0.0}, {}, math.inf, set()),
        ({1: 1.0, 2: 0.0}, {1: 1.0}, 99.0, {2}),
    ],
    ids="soon twice quarter early late all-slow two-slow one two".split(),
)
def test_who_lags(progress, took_s, waited_s, lagging):
    assert laggards(progress, took_s, waited_s=waited_s, stall_s=STALL_S) == lagging


def test_a_member_may_say_that_it_is_slow():
    assert is_slow(24.0, [24.0, 100.0, 100.0])
    assert not is_slow(25.0, [25.0, 100.0, 100.0])
    assert not is_slow(0.0, [0.0, 0.0, 100.0])  # as slow as most
