"""P3: a leader sends signs of life and never closes the group, or never proposes."""

import asyncio

import pytest

from atoll.optim.log.entry import Certificate, Elector, first_sound_term
from atoll.peer.rounds.consensus.ballots import leader_of, term_of
from support.attackers import prolong, stop_at
from support.swarm import SETTINGS, SMALL, reached, run_swarm, signed_epoch

PATIENCE_S = 4 * SETTINGS.grace_s + 14 * SETTINGS.stall_s


@pytest.mark.parametrize("step", ["_form", "_reduce", "_count_votes"])
def test_a_run_goes_on_under_the_next_leader(tmp_path, monkeypatch, step):
    async def scenario(swarm):
        peers = await swarm.start(4)
        await swarm.until(lambda: reached(peers, 2))
        liar, honest = peers[3], peers[:3]
        stop_at(monkeypatch, liar.ctx.me, step)
        longest_s, led = 0.0, 0
        while not led:
            at, began_s = min(p.replica.position for p in honest), swarm.now()
            order = honest[0].replica.electorate
            led += leader_of(order, at, 0) == liar.ctx.me
            await swarm.until(lambda at=at: reached(honest, at + 1), timeout_s=300.0)
            longest_s = max(longest_s, swarm.now() - began_s)
        assert longest_s < 2 * PATIENCE_S
        assert swarm.same_bits(honest)

    run_swarm(tmp_path, scenario, codec="int8")


@pytest.mark.parametrize("times", [{"deadline_s": 1e6}, {"stall_s": 60.0}])
def test_nobody_joins_a_group_of_longer_times_than_the_run_s(tmp_path, monkeypatch, times):
    async def scenario(swarm):
        peers = await swarm.start(4)
        await swarm.until(lambda: reached(peers, 2))
        *honest, liar = peers
        prolong(monkeypatch, liar.ctx.me, **times)
        at = max(p.replica.position for p in peers) + 1
        await swarm.until(lambda: reached(honest, at + 4))
        terms = {
            position: term_of(Certificate.decode(record.certificate).attempt)
            for position, record in enumerate(honest[0].replica.store.headers(at, 4), at)
        }
        order = honest[0].replica.electorate
        led = [position for position in terms if leader_of(order, position, 0) == liar.ctx.me]
        assert led and all(terms[position] > 0 for position in led)
        said = [
            event for peer in honest for event in peer.events if "group: expected a stall" in event
        ]
        assert said

    run_swarm(tmp_path, scenario, codec="int8", layout=SMALL)


@pytest.mark.parametrize(
    ("electors", "trust"),
    [
        ("keepers", "byzantine"),
        pytest.param("members", "crash", marks=pytest.mark.exhaustive),
        pytest.param("keepers", "crash", marks=pytest.mark.exhaustive),
    ],
)
def test_a_leader_that_failed_is_passed_over(tmp_path, monkeypatch, electors, trust):
    async def scenario(swarm):
        role = "keeper" if electors == "keepers" else "trainer"
        voting = [swarm.add(role=role) for _ in range(4)]
        trainers = [swarm.add() for _ in range(3)] if electors == "keepers" else voting[:3]
        await swarm.begin([*voting, *(trainers if electors == "keepers" else ())])
        await swarm.until(lambda: reached(trainers, 2))
        liar, honest = voting[3], voting[:3]
        stop_at(monkeypatch, liar.ctx.me, "_form")

        async def until_led(times):
            """Wait until so many positions were decided whose first leader is the liar."""
            longest_s, led = 0.0, 0
            while led < times:
                at, began_s = min(p.replica.position for p in trainers), swarm.now()
                order = honest[0].replica.electorate
                led += leader_of(order, at, 0) == liar.ctx.me
                await swarm.until(lambda at=at: reached(trainers, at + 1), timeout_s=300.0)
                longest_s = max(longest_s, swarm.now() - began_s)
            return longest_s

        assert await until_led(1) > 2 * SETTINGS.grace_s, "its first silence costs a term"
        assert await until_led(2) < 5.0 + 4 * SETTINGS.stall_s
        assert swarm.same_bits(trainers)

    run_swarm(tmp_path, scenario, codec="int8", electors=electors, trust=trust)


@pytest.mark.parametrize("electors", ["members", "keepers"])
def test_an_epoch_does_not_begin_with_a_leader_whose_term_failed(tmp_path, electors):
    async def scenario(swarm):
        role = "keeper" if electors == "keepers" else "trainer"
        voting = [swarm.add(role=role) for _ in range(4)]
        peers = [*voting, *(swarm.add() for _ in range(2 * (electors == "keepers")))]
        await swarm.begin(peers)
        await swarm.until(lambda: reached(peers, 2))
        replica = voting[0].replica
        at, chain, electorate = replica.position, replica.chain, list(replica.electorate)
        swarm.network.on_message = lambda *message: False  # the run stands still there
        await asyncio.sleep(20)
        failed = {leader_of(electorate, at, term).peer_id for term in (0, 1)}
        first_term = first_sound_term(electorate, at, failed)
        assert first_term == 2
        swarm.network.on_message = None
        record = signed_epoch(2, at, chain, electorate, first_term)
        for peer in peers:
            await peer.replica.adopt(record)
            await peer.catch_up()
        assert all(peer.replica.first_term == 2 for peer in peers)
        began_s = swarm.now()
        await swarm.until(lambda: reached(peers, at + 3), timeout_s=300.0)
        assert swarm.now() - began_s < 2 * PATIENCE_S
        terms = [
            term_of(Certificate.decode(row.certificate).attempt)
            for row in replica.store.headers(at, 3)
        ]
        led = [leader_of(electorate, at + i, t).peer_id for i, t in enumerate(terms)]
        assert terms[0] == 2 and not failed & set(led), "they are passed over from now on"
        assert swarm.same_bits(peers)

    run_swarm(tmp_path, scenario, codec="int8", electors=electors)


def test_the_first_sound_term_is_led_by_nobody_who_failed():
    electorate = [Elector(peer_id=name, incarnation="1") for name in "abcd"]
    order = [leader_of(electorate, 7, term).peer_id for term in range(4)]
    assert first_sound_term(electorate, 7, ()) == 0
    assert first_sound_term(electorate, 7, order[:1]) == 1
    assert first_sound_term(electorate, 7, order[:3]) == 3
    assert first_sound_term(electorate, 7, order[1:]) == 0
    assert first_sound_term(electorate, 7, order) == 0
