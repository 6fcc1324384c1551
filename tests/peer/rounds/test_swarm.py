"""Whole rounds of peers in one process: a clean run, each fault, and those who come later."""

import asyncio
from functools import partial

import pytest

from atoll.coordinator.run.outcome import Outcome
from atoll.dht.identity import verify
from atoll.dht.roster import RosterError
from atoll.optim.log.claims import verify_claims
from atoll.optim.log.entry import ChainMismatch, Entry, Epoch
from atoll.peer.rounds.consensus.ballots import leader_of
from support.swarm import RUN_ID, SETTINGS, run_swarm, signed_epoch

run = partial(run_swarm, codec="int8")


def entries(peer):
    count = peer.replica.position
    return [Entry.decode(r.entry) for r in peer.replica.store.headers(0, count)]


def leader(swarm, position):
    at = next(p for p in swarm.peers if p.replica.position == position)
    elector = leader_of(at.replica.electorate, position, 0)
    return next(p for p in swarm.peers if p.ctx.me == elector)


class Fault:
    """Strikes one peer ``after_s`` into the reduction of one position."""

    def __init__(self, swarm, *, position, victim, strike, after_s=0.03):
        self.swarm, self.victim, self.at = swarm, None, None
        self.position, self.choose, self.strike, self.after_s = position, victim, strike, after_s
        swarm.on_phase = self.on_phase

    def on_phase(self, peer, phase, position):
        if phase != "reduce" or position != self.position or self.victim is not None:
            return
        self.victim = self.choose(self.swarm)
        asyncio.get_running_loop().call_later(self.after_s, self.hit)

    def hit(self):
        self.at = self.swarm.now()
        self.strike(self.victim)

    @property
    def survivors(self):
        return [p for p in self.swarm.peers if p is not self.victim]


def not_the_leader(position):
    return lambda swarm: next(p for p in swarm.peers if p is not leader(swarm, position))


def the_leader(position):
    return lambda swarm: leader(swarm, position)


def test_a_peer_waits_for_a_group_until_it_is_in_one(tmp_path):
    seen = set()

    async def scenario(swarm):
        peers = await swarm.begin([swarm.add(window_s=window_s) for window_s in (1.0, 1.0, 2.0)])
        while peers[0].replica.position < 4:
            rounds = peers[0].rounds
            pending = rounds._pending_at(peers[0].replica.position)
            is_grouped = pending is not None and pending.exchange is not None
            seen.add((rounds.is_in_group, pending is not None, is_grouped))
            await asyncio.sleep(0.01)

    run(tmp_path, scenario)
    offered, grouped = (False, True, False), (True, True, True)
    assert seen >= {(False, False, False), offered, grouped}
    assert (False, True, True) not in seen


def test_entries_are_looked_for_once_more_if_word_of_one_comes_meanwhile(tmp_path):
    """The donors may have answered before it was decided; nobody sends it again."""

    async def scenario(swarm):
        (peer,) = await swarm.start(1)
        begun, go_on = [], asyncio.Event()

        async def catch_up():
            begun.append(swarm.now())
            await go_on.wait()

        peer.rounds._catch_up = catch_up
        peer.rounds.kick_catch_up()
        await asyncio.sleep(1.0)
        peer.rounds.kick_catch_up()
        peer.rounds.kick_catch_up()
        assert len(begun) == 1
        go_on.set()
        await asyncio.sleep(1.0)
        assert len(begun) == 2

    run(tmp_path, scenario)


@pytest.mark.exhaustive  # with a fault: test_strikes.py
def test_eight_peers_commit_and_hold_the_same_bits(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(8)
        await swarm.until(lambda: all(p.replica.position >= 4 for p in peers))
        assert swarm.same_bits(peers)
        log = entries(peers[0])
        assert all(len(e.complete_members()) == 8 for e in log)
        assert log[2].state_root is not None
        assert all(p.rounds.statistics().left_out == 0 for p in peers)
        owners = {part.owner for part in log[0].parts}
        assert len(owners) == len(log[0].parts) == 4

    run(tmp_path, scenario)


def test_twenty_rounds_with_a_kill_leave_bit_identical_replicas(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(4)
        fault = Fault(swarm, position=5, victim=not_the_leader(5), strike=lambda peer: peer.kill())
        await swarm.until(lambda: fault.at is not None)
        await swarm.until(lambda: all(p.replica.position > 5 for p in fault.survivors))
        assert swarm.now() - fault.at < 1.0
        await swarm.until(lambda: all(p.replica.position >= 8 for p in fault.survivors))
        again = swarm.add(fault.victim.identity)
        await again.start()
        members = [*fault.survivors[:3], again]
        await swarm.until(lambda: all(p.replica.position >= 20 for p in members))
        assert swarm.same_bits(members)
        last = entries(peers[1] if fault.victim is peers[0] else peers[0])[-1]
        assert again.ctx.me in {m.elector for m in last.complete_members()}

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    ("victim", "after_s"),
    [
        (the_leader, 0.0),
        (not_the_leader, 0.06),
        (the_leader, 0.15),
        pytest.param(not_the_leader, 0.0, marks=pytest.mark.exhaustive),
        pytest.param(the_leader, 0.06, marks=pytest.mark.exhaustive),
        pytest.param(not_the_leader, 0.15, marks=pytest.mark.exhaustive),
    ],
)
def test_the_others_commit_within_a_second_of_a_kill(tmp_path, victim, after_s):
    async def scenario(swarm):
        await swarm.start(4)
        fault = Fault(
            swarm,
            position=2,
            victim=victim(2),
            strike=lambda peer: peer.kill(),
            after_s=after_s,
        )
        await swarm.until(lambda: fault.at is not None)
        await swarm.until(lambda: all(p.replica.position > 2 for p in fault.survivors))
        assert swarm.now() - fault.at <= 1.0
        await swarm.until(lambda: all(p.replica.position >= 5 for p in fault.survivors))
        assert swarm.same_bits(fault.survivors)

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    "victim", [the_leader, pytest.param(not_the_leader, marks=pytest.mark.exhaustive)]
)
def test_the_others_go_on_without_a_frozen_peer_and_it_comes_back(tmp_path, victim):
    async def scenario(swarm):
        peers = await swarm.start(4)
        fault = Fault(
            swarm,
            position=2,
            victim=victim(2),
            strike=lambda peer: swarm.network.freeze(peer.identity.peer_id),
        )
        await swarm.until(lambda: fault.at is not None)
        await swarm.until(lambda: all(p.replica.position > 2 for p in fault.survivors))
        assert swarm.now() - fault.at <= 3.0
        await swarm.until(lambda: all(p.replica.position >= 6 for p in fault.survivors))
        swarm.network.thaw(fault.victim.identity.peer_id)
        await swarm.until(lambda: all(p.replica.position >= 10 for p in peers))
        assert swarm.same_bits(peers)

    run(tmp_path, scenario)


def test_a_contribution_counts_once_however_often_its_peer_was_left_out(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(4)
        slow = peers[0]
        slow.window_s = 21.0
        await swarm.until(lambda: slow.windows >= 3)
        await swarm.until(lambda: slow.rounds.statistics().phase == "train")
        await swarm.until(lambda: peers[1].replica.position >= slow.replica.position)
        included = [s for s in slow.settled if s.included is not None]
        assert len(included) == slow.rounds.statistics().included
        assert len(included) + slow.rounds.statistics().left_out == slow.windows
        counted = [
            e.position for e in entries(peers[1]) if slow.ctx.me in {m.elector for m in e.members}
        ]
        assert len(counted) == len(set(counted)) == len(included)

    run(tmp_path, scenario)


def test_a_joiner_takes_a_snapshot_and_the_log_from_several_donors(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(3)
        await swarm.until(lambda: all(p.replica.position >= 7 for p in peers))
        assert all(p.replica.store.first_with_bodies() > 0 for p in peers)
        joiner = swarm.add()
        await joiner.start()
        recovered = joiner.recovered
        assert recovered is not None
        assert recovered.snapshot_position >= 4
        assert recovered.entries > 0
        assert len(recovered.donors) >= 2
        await swarm.until(lambda: joiner.rounds.statistics().included >= 2)
        first, second = [s for s in joiner.settled if s.included is not None][:2]
        weights = [
            next(m.weight for m in s.applied.entry.members if m.elector == joiner.ctx.me)
            for s in (first, second)
        ]
        assert weights[0] == 0.0
        assert weights[1] > 0.0
        position = min(p.replica.position for p in swarm.peers)
        await swarm.until(lambda: len({p.replica.position for p in swarm.peers}) == 1)
        assert swarm.same_bits(swarm.peers)
        assert position > 7

    run(tmp_path, scenario, body_budget_bytes=1)


def test_peers_that_die_one_after_another_leave_one_that_goes_on(tmp_path):
    async def scenario(swarm):
        alive = list(await swarm.start(4))
        while len(alive) > 1:
            start = max(p.replica.position for p in alive)
            await swarm.until(lambda s=start: all(p.replica.position > s + 1 for p in alive))
            first = alive[0].replica.electorate[0]
            victim = next(p for p in alive if p.ctx.me != first)
            victim.kill()
            alive.remove(victim)
        last = alive[0].replica.position
        await swarm.until(lambda: alive[0].replica.position > last + 2)
        assert [e.peer_id for e in alive[0].replica.electorate] == [alive[0].identity.peer_id]

    run(tmp_path, scenario)


def test_at_most_one_side_of_a_partition_goes_on_and_the_other_catches_up(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(4)
        await swarm.until(lambda: all(p.replica.position >= 2 for p in peers))
        left, right = peers[:2], peers[2:]
        for a in left:
            for b in right:
                swarm.network.cut(a.identity.peer_id, b.identity.peer_id)
        await swarm.until(lambda: max(p.replica.position for p in peers) >= 6)
        moved = [side for side in (left, right) if max(p.replica.position for p in side) >= 6]
        assert len(moved) == 1
        stuck = right if moved[0] is left else left
        assert all(p.replica.position <= 3 for p in stuck)
        for a in left:
            for b in right:
                swarm.network.heal(a.identity.peer_id, b.identity.peer_id)
        await swarm.until(lambda: all(p.replica.position >= 9 for p in peers))
        log = [entries(p)[:9] for p in peers]
        assert all(each == log[0] for each in log)

    run(tmp_path, scenario)


def test_a_new_epoch_goes_on_where_most_peers_died_at_once(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(4)
        await swarm.until(lambda: all(p.replica.position >= 3 for p in peers))
        survivor = next(p for p in peers if p.ctx.me != peers[0].replica.electorate[0])
        for peer in peers:
            if peer is not survivor:
                peer.kill()
        stuck = survivor.replica.position
        await asyncio.sleep(60.0)
        assert survivor.replica.position == stuck
        record = signed_epoch(2, stuck, survivor.replica.chain, [survivor.ctx.me])
        assert await survivor.replica.adopt(record)
        await swarm.until(lambda: survivor.replica.position >= stuck + 2)
        assert entries(survivor)[-1].epoch == 2

    run(tmp_path, scenario)


def test_a_replica_beyond_the_base_of_a_new_epoch_rewinds(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(3)
        await swarm.until(lambda: all(p.replica.position >= 5 for p in peers))
        base = entries(peers[0])[4]
        ahead = peers[0]
        for peer in peers[1:]:
            peer.kill()
        record = signed_epoch(2, 4, base.previous_chain, [ahead.ctx.me])
        assert not await ahead.replica.adopt(record)
        assert ahead.rounds.voter.term == 0  # it looks where it stands: beyond the base still
        await ahead.catch_up()
        assert (ahead.replica.position, ahead.replica.chain) == (4, base.previous_chain)
        await swarm.until(lambda: ahead.replica.position >= 6)
        assert [e.epoch for e in entries(ahead)[3:6]] == [1, 2, 2]

    run(tmp_path, scenario)


def test_a_reboot_resumes_from_the_store(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(3)
        await swarm.until(lambda: all(p.replica.position >= 5 for p in peers))
        replica = peers[0].replica
        before = (replica.position, replica.chain, replica.state.root(), replica.electorate)
        peers[0].kill()
        replica.snapshots.clear()
        assert await replica.resume()
        after = (replica.position, replica.chain, replica.state.root(), replica.electorate)
        assert after == before

    run(tmp_path, scenario)


def test_settings_are_those_of_the_protocol():
    assert SETTINGS.stall_s == 1.5


@pytest.mark.parametrize("position", [6, 7])  # with a snapshot of its own, and without
def test_a_joiner_finds_a_certified_snapshot_at_any_position(tmp_path, position):
    async def scenario(swarm):
        peers = await swarm.start(3)
        await swarm.until(lambda: all(p.replica.position >= position for p in peers))
        joiner = swarm.add()
        await joiner.start()
        assert joiner.recovered.snapshot_position >= 2
        assert not joiner.events

    run(tmp_path, scenario, body_budget_bytes=1)


def test_a_part_that_was_reduced_again_does_not_claim_the_dead(tmp_path):
    async def scenario(swarm):
        await swarm.start(4)
        fault = Fault(
            swarm,
            position=2,
            victim=not_the_leader(2),
            strike=lambda peer: peer.kill(),
            after_s=0.04,
        )
        await swarm.until(lambda: fault.at is not None)
        await swarm.until(lambda: all(p.replica.position > 2 for p in fault.survivors))
        entry = entries(fault.survivors[0])[2]
        dead = fault.victim.ctx.me
        assert any(part.generation > 0 for part in entry.parts)
        mask = entry.included_cells(dead.peer_id, dead.incarnation)
        for part in entry.parts:
            if part.generation > 0:
                assert not any(mask[part.start_cell : part.stop_cell])
        assert dead not in entry.electorate

    run(tmp_path, scenario)


def test_a_peer_that_was_cut_off_knows_that_it_lost_the_leader(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(4)
        await swarm.until(lambda: all(p.replica.position >= 1 for p in peers))
        alone, others = peers[0], peers[1:]
        ids = [p.identity.peer_id for p in peers]
        swarm.network.partition(ids[:1], ids[1:])
        here = others[0].replica.position
        await swarm.until(lambda: all(p.replica.position >= here + 3 for p in others))
        swarm.network.heal()
        await swarm.until(lambda: alone.replica.position >= here + 3)
        missed = [s.missed for s in alone.settled if s.settles and s.included is None]
        assert missed[0] is Outcome.LEADER_LOST

    run(tmp_path, scenario)


def test_a_leader_that_comes_late_to_its_own_group_waits_for_the_decision(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(4)
        await swarm.until(lambda: all(p.replica.position >= 1 for p in peers))
        position = peers[0].replica.position
        late = leader(swarm, position)
        late.window_s = 30.0
        await swarm.until(lambda: all(p.replica.position >= position + 4 for p in peers))
        log = entries(peers[0])
        assert [e.kind for e in log] == ["update"] * len(log)
        assert not any("superseded" in event for p in peers for event in p.events)

    run(tmp_path, scenario)


def test_a_roster_that_fails_for_a_while_stops_nothing(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(3)
        await swarm.until(lambda: all(p.replica.position >= 1 for p in peers))

        async def fail():
            raise RosterError("not now")

        for peer in peers:
            await peer.ctx.roster_peers()
            peer.roster.peers = fail
        await swarm.until(lambda: all(p.replica.position >= 4 for p in peers))
        assert swarm.same_bits(peers)

    run(tmp_path, scenario)


def test_headers_before_a_base_must_end_in_its_chain(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(3)
        await swarm.until(lambda: all(p.replica.position >= 6 for p in peers))
        records = peers[0].replica.store.headers(0, 6)
        headers = [(r.entry, r.certificate) for r in records]
        opened = Epoch(
            run_id=RUN_ID,
            epoch=1,
            base_position=3,
            base_chain=records[2].chain,
            electorate=Entry.decode(records[2].entry).electorate,
        )
        known = {"run_id": RUN_ID, "here": None, "opened": opened, "verify": verify}
        assert len(verify_claims(headers, **known)) == 6
        forged = Entry.decode(records[2].entry).model_copy(update={"lr": 0.25})
        headers[2] = forged.encode(), records[2].certificate
        with pytest.raises(ChainMismatch):
            verify_claims(headers, **known)

    run(tmp_path, scenario)
