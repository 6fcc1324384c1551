"""P5: a member holds its streams open by signs of life, and sends no cells."""

import pytest

from atoll.optim.log.entry import Entry
from atoll.peer.rounds.conduct import Fault
from atoll.peer.rounds.consensus.round import Round
from atoll.peer.rounds.consensus.round_events import CloseGroup
from atoll.peer.rounds.policies import (
    exchange_mbit_s,
    is_slow,
    laggards,
    round_deadline_s,
    slowest_mbit_s,
)
from support.attackers import declare_no_uplink, finish_no_parts, hold
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
    "leads", ["members", pytest.param("keepers", marks=pytest.mark.exhaustive)]
)
def test_an_owner_that_finishes_nothing_gets_no_parts(tmp_path, monkeypatch, leads):
    async def scenario(swarm):
        keepers = [swarm.add(role="keeper") for _ in range(leads == "keepers")]
        trainers = [swarm.add() for _ in range(4)]
        await swarm.begin([*keepers, *trainers])
        await swarm.until(lambda: reached(trainers, 3))
        liar, honest = trainers[3], trainers[:3]
        leading = keepers or honest
        before_s = await round_s(swarm, honest)
        finish_no_parts(monkeypatch, liar.ctx.me)
        await swarm.until(
            lambda: all(p.ctx.lags.barred(liar.identity.peer_id, swarm.now()) for p in leading),
            timeout_s=400.0,
        )
        assert await round_s(swarm, honest) < before_s + STALL_S
        for peer in leading:
            for other in honest:
                assert peer.ctx.lags.barred(other.identity.peer_id, swarm.now()) is None
        assert swarm.same_bits(honest)

    run_swarm(tmp_path, scenario, codec="int8", electors=leads)


def test_a_leader_cannot_make_members_shun_an_owner(tmp_path, monkeypatch):
    """It orders the repair of parts whose owners had no time yet."""
    advance = Round.advance

    async def scenario(swarm):
        peers = await swarm.start(4)
        await swarm.until(lambda: reached(peers, 3))
        liar, noted = peers[3], []

        def hasty(machine, view):
            actions = advance(machine, view)
            closing = any(isinstance(action, CloseGroup) for action in actions)
            if machine._leads._me == liar.ctx.me and closing:
                for part in machine.parts._parts:
                    part.due = view.now
            return actions

        monkeypatch.setattr(Round, "advance", hasty)
        for peer in peers[:3]:
            monkeypatch.setattr(peer.ctx, "note_idle_owner", noted.append)
        at = peers[0].replica.position
        await swarm.until(lambda: reached(peers[:3], at + 8), timeout_s=300.0)
        entries = [Entry.decode(r.entry) for r in peers[0].replica.store.headers(at, 8)]
        assert any(part.generation for entry in entries for part in entry.parts), "no repair"
        assert noted == []

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
        ({1: 0.0}, {}, 59.9, set()),
        ({1: 0.0}, {}, 60.0, {1}),
        ({1: 0.25}, {}, 999.0, set()),
        ({1: 1.0, 2: 0.0}, {1: 1.0}, 99.0, {2}),
    ],
    ids="soon twice quarter early late all-slow two-slow lone late-lone slow-lone two".split(),
)
def test_who_lags(progress, took_s, waited_s, lagging):
    found = laggards(progress, took_s, waited_s=waited_s, stall_s=STALL_S, lone_s=60.0)
    assert found == lagging


def test_one_other_member_that_only_lives_is_left_out_and_remembered(tmp_path, monkeypatch):
    async def scenario(swarm):
        peers = await swarm.start(2)
        await swarm.until(lambda: reached(peers, 3))
        liar, honest = peers[1], peers[0]
        declare_no_uplink(monkeypatch, liar.ctx.link)
        hold(monkeypatch, liar.ctx.me)
        await swarm.until(
            lambda: honest.ctx.lags.barred(liar.identity.peer_id, swarm.now()), timeout_s=300.0
        )

    run_swarm(tmp_path, scenario, codec="int8")


@pytest.mark.parametrize(
    ("uplinks", "slowest"),
    [
        ([0, 100], 10),
        ([0, 0, 100, 100], 10),
        ([5, 100], 10),
        ([1e5, 1], 10),
        ([0, 8], 2),
        ([20, 100], 20),
        ([5], 5),
        ([0, 100, 100], 25),
        ([0, 100, 100, 100], 25),
    ],
)
def test_no_declared_rate_makes_a_deadline_long_or_tiny(uplinks, slowest):
    """P5: half of a group may declare any rate; 72 MB took 46,095 s, and take at most 480."""
    assert slowest_mbit_s(uplinks) == slowest
    assert round_deadline_s(72_000_000, slowest, 1.5) < 2400


@pytest.mark.parametrize(
    ("own", "theirs", "rate"),
    [(100, 0.001, 10), (100, 0, 100), (100, 1e9, 100), (1, 1e9, 1), (2, 0.001, 0.5), (100, 20, 20)],
)
def test_a_partner_by_gossip_makes_no_deadline_long_or_tiny(own, theirs, rate):
    assert exchange_mbit_s(own, theirs) == rate


def test_a_member_may_say_that_it_is_slow():
    assert is_slow(24.0, [24.0, 100.0, 100.0])
    assert not is_slow(25.0, [25.0, 100.0, 100.0])
    assert not is_slow(0.0, [0.0, 0.0, 100.0])  # as slow as most
