"""Orders in whole rounds: everybody switches at one position, whoever leads, dies or is away."""

import asyncio

from atoll.optim.log.orders import (
    EvictPeer,
    PauseRun,
    ReadmitPeer,
    ResumeRun,
    SetInnerSteps,
    SetOuterRate,
    SetReducer,
    StopRun,
)
from atoll.optim.reduction.robust import median
from atoll.peer.rounds.allreduce import sides
from atoll.peer.rounds.allreduce.reduction import PartReducer
from support.orders import entries, expect_without, give, id_of, is_decided, leader_at
from support.strikes import expect_no_work_lost
from support.swarm import SMALL, reached, run_swarm


def run(folder, scenario, **options):
    return run_swarm(folder, scenario, **({"layout": SMALL} | options))


def test_an_order_is_decided_and_no_work_is_lost(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(3)
        await swarm.until(lambda: reached(peers, 2))
        give(peers, 1, SetInnerSteps(value=7))
        await swarm.until(is_decided(peers, 1))
        assert {p.replica.settings.inner_steps for p in peers} == {7}
        position = peers[0].replica.position
        await swarm.until(lambda: reached(peers, position + 2))
        await asyncio.sleep(1.0)
        assert swarm.same_bits(peers)
        kinds = [entry.kind for entry in entries(peers[0])]
        assert kinds.count("control") == 1 and "null" not in kinds
        for peer in peers:
            expect_no_work_lost(peer)

    run(tmp_path, scenario)


def test_what_was_offered_is_offered_again_after_an_order(tmp_path):
    """The order comes while a group reduces: its members train nothing anew."""

    async def scenario(swarm):
        given = []

        def note(peer, phase, position):
            if phase == "reduce" and position == 2 and not given:
                given.append(peer)
                give(swarm.peers, 1, SetInnerSteps(value=7))

        swarm.on_phase = note
        peers = await swarm.start(3)
        await swarm.until(lambda: reached(peers, 4))
        assert [entry.kind for entry in entries(peers[0])][:4] == [
            "update",
            "update",
            "control",
            "update",
        ]
        assert {len(peer.handed_in) for peer in peers} == {3}
        assert swarm.same_bits(peers)

    run(tmp_path, scenario)


def test_a_paused_run_decides_orders_alone(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(3)
        await swarm.until(lambda: reached(peers, 2))
        give(peers, 1, PauseRun())
        await swarm.until(is_decided(peers, 1))
        paused_at = peers[0].replica.position
        await asyncio.sleep(60.0)
        assert {peer.replica.position for peer in peers} == {paused_at}
        give(peers[:1], 2, SetOuterRate(value=0.25))
        await swarm.until(is_decided(peers, 2))
        give(peers, 3, ResumeRun())
        await swarm.until(is_decided(peers, 3))
        await swarm.until(lambda: reached(peers, paused_at + 4))
        await asyncio.sleep(1.0)
        log = entries(peers[0])[paused_at - 1 :]
        assert [entry.kind for entry in log[:4]] == ["control"] * 3 + ["update"]
        assert swarm.same_bits(peers)
        for peer in peers:
            expect_no_work_lost(peer)

    run(tmp_path, scenario)


def test_a_run_that_stops_decides_nothing_more(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(3)
        await swarm.until(lambda: reached(peers, 2))
        give(peers, 1, StopRun())
        await swarm.until(is_decided(peers, 1))
        last = peers[0].replica.settings.last_round
        give(peers, 2, ResumeRun())
        await asyncio.sleep(60.0)
        assert {peer.replica.position for peer in peers} == {last}
        assert swarm.same_bits(peers)

    run(tmp_path, scenario)


def test_the_leader_of_a_paused_run_dies_with_the_order(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(3)
        await swarm.until(lambda: reached(peers, 2))
        give(peers, 1, PauseRun())
        await swarm.until(is_decided(peers, 1))
        victim = leader_at(swarm, peers[0].replica.position)
        victim.kill()
        others = [peer for peer in peers if peer is not victim]
        give(others, 2, ResumeRun())
        before = swarm.now()
        await swarm.until(is_decided(others, 2))
        assert swarm.now() - before < 10.0
        position = others[0].replica.position
        await swarm.until(lambda: reached(others, position + 2))
        await asyncio.sleep(1.0)
        assert swarm.same_bits(others)

    run(tmp_path, scenario)


def test_a_peer_that_was_away_meets_the_orders_in_the_log(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(4)
        await swarm.until(lambda: reached(peers, 2))
        away = peers[3]
        swarm.network.freeze(away.identity.peer_id)
        others = peers[:3]
        give(others, 1, SetOuterRate(value=0.25))
        await swarm.until(is_decided(others, 1))
        position = others[0].replica.position
        await swarm.until(lambda: reached(others, position + 2))
        swarm.network.thaw(away.identity.peer_id)
        await swarm.until(lambda: reached(peers, position + 4))
        assert away.replica.settings == others[0].replica.settings
        assert swarm.same_bits(peers)
        joiner = swarm.add()
        await joiner.start()
        assert joiner.replica.settings == others[0].replica.settings
        await swarm.until(lambda: reached([*peers, joiner], position + 8))

    run(tmp_path, scenario)


def test_an_evicted_peer_is_in_no_round_until_it_is_readmitted(tmp_path):
    """All know the order but the evicted one, which votes for it and has its work back later."""

    async def scenario(swarm):
        peers = await swarm.start(4)
        await swarm.until(lambda: reached(peers, 2))
        out, others = peers[3], peers[:3]
        give(others, 1, EvictPeer(peer_id=id_of(out), reason="noise"))
        await swarm.until(is_decided(peers, 1))
        since = next(i for i, entry in enumerate(entries(peers[0])) if entry.kind == "control")
        await swarm.until(lambda: reached(others, since + 5))
        await asyncio.sleep(1.0)
        expect_without(others, out, since)
        assert swarm.same_bits(others)
        give(others, 2, ReadmitPeer(peer_id=id_of(out)))
        await swarm.until(is_decided(peers, 2))
        position = others[0].replica.position
        await swarm.until(
            lambda: any(
                id_of(out) in {member.peer_id for member in entry.members}
                for entry in entries(others[0])[position:]
            )
        )
        position = others[0].replica.position
        await swarm.until(lambda: reached(peers, position + 1))
        await asyncio.sleep(1.0)
        assert swarm.same_bits(peers)
        for peer in others:
            expect_no_work_lost(peer)

    run(tmp_path, scenario)


def test_owners_reduce_by_the_rule_of_an_order_from_its_position_on(tmp_path, monkeypatch):
    rules = []

    def noted(*arguments, rule, **named):
        rules.append(rule)
        return PartReducer(*arguments, rule=rule, **named)

    monkeypatch.setattr(sides, "PartReducer", noted)

    async def scenario(swarm):
        peers = await swarm.start(3)
        await swarm.until(lambda: reached(peers, 2))
        assert set(rules) == {None}
        give(peers, 1, SetReducer(value="median"))
        await swarm.until(is_decided(peers, 1))
        rules.clear()
        position = peers[0].replica.position
        await swarm.until(lambda: reached(peers, position + 2))
        assert set(rules) == {median}
        assert swarm.same_bits(peers)

    run(tmp_path, scenario)


def test_a_leader_that_is_evicted_is_out_with_its_own_round(tmp_path):
    """In the middle of a round: its members reduce, and nothing of it is decided."""

    async def scenario(swarm):
        peers = await swarm.start(4)
        await swarm.until(lambda: reached(peers, 2))
        given = []

        def note(peer, phase, position):
            if phase == "reduce" and not given:
                given.append(leader_at(swarm, position))
                order = EvictPeer(peer_id=id_of(given[0]))
                give([p for p in peers if p is not given[0]], 1, order)

        swarm.on_phase = note
        await swarm.until(lambda: given)
        others = [peer for peer in peers if peer is not given[0]]
        await swarm.until(is_decided(others, 1))
        since = next(i for i, entry in enumerate(entries(others[0])) if entry.kind == "control")
        await swarm.until(lambda: reached(others, since + 3))
        await asyncio.sleep(1.0)
        expect_without(others, given[0], since)
        assert swarm.same_bits(others)
        for peer in others:
            expect_no_work_lost(peer)

    run(tmp_path, scenario)


def test_a_peer_that_was_away_meets_its_eviction_in_the_log(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(4)
        await swarm.until(lambda: reached(peers, 2))
        out, others = peers[3], peers[:3]
        swarm.network.freeze(id_of(out))
        give(others, 1, EvictPeer(peer_id=id_of(out)))
        await swarm.until(is_decided(others, 1))
        position = others[0].replica.position
        await swarm.until(lambda: reached(others, position + 3))
        swarm.network.thaw(id_of(out))
        await swarm.until(is_decided([out], 1))
        assert out.replica.settings.evicted == (id_of(out),)

    run(tmp_path, scenario)


def test_the_last_elector_that_is_evicted_stays_until_an_epoch(tmp_path):
    async def scenario(swarm):
        peers = await swarm.begin([swarm.add(role="keeper"), swarm.add(), swarm.add()])
        await swarm.until(lambda: reached(peers, 2))
        give(peers[:1], 1, EvictPeer(peer_id=id_of(peers[0])))
        await swarm.until(is_decided(peers, 1))
        position = peers[1].replica.position
        await asyncio.sleep(60.0)
        assert {elector.peer_id for elector in peers[1].replica.electorate} == {id_of(peers[0])}
        assert {peer.replica.position for peer in peers[1:]} == {position}

    run(tmp_path, scenario, electors="keepers")


def test_keepers_that_withstand_liars_decide_orders(tmp_path):
    async def scenario(swarm):
        keepers = [swarm.add(role="keeper") for _ in range(4)]
        peers = await swarm.begin([*keepers, swarm.add(), swarm.add()])
        await swarm.until(lambda: reached(peers, 2))
        give(keepers, 1, PauseRun())
        await swarm.until(is_decided(peers, 1))
        position = peers[0].replica.position
        leader_at(swarm, position).kill()
        alive = [peer for peer in peers if peer.transport.alive]
        give([peer for peer in keepers if peer in alive], 2, ResumeRun())
        await swarm.until(is_decided(alive, 2))
        await swarm.until(lambda: reached(alive, position + 3))
        await asyncio.sleep(1.0)
        assert swarm.same_bits(alive)

    run(tmp_path, scenario, electors="keepers", trust="byzantine")
