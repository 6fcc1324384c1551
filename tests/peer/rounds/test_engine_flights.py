"""Several positions in flight: reductions overlap, decisions come in order."""

import asyncio
from dataclasses import replace

import pytest

from atoll.optim.log.entry import Entry
from atoll.optim.state.layout import CELL, Layout
from atoll.peer.rounds import policies
from atoll.peer.rounds.consensus.ballots import leader_of
from atoll.peer.rounds.consensus.member import OfferedWindow
from atoll.peer.rounds.messages import Known
from support.strikes import KINDS, Strike, expect_equal_end, passed, run_strike_in_flight
from support.swarm import run_swarm, signed_epoch

BLOCKS = Layout(names=tuple(f"blocks.{i}.w" for i in range(4)), shapes=((CELL + 1_000,),) * 4)
FAR_S = 0.2  # latency at which a reduction takes several steps of a second


def run(folder, scenario, *, fragments=4):
    run_swarm(folder, scenario, method=f"streaming(count={fragments})", layout=BLOCKS)


def entries(peer):
    return [Entry.decode(r.entry) for r in peer.replica.store.headers(0, peer.replica.position)]


@pytest.mark.parametrize("fragments", [pytest.param(2, marks=pytest.mark.exhaustive), 4])
def test_positions_in_flight_end_in_the_same_bits(tmp_path, fragments):
    async def scenario(swarm):
        swarm.network.default.latency_s = FAR_S
        peers = await swarm.start(3, window_s=1.2 / fragments, tau=fragments)
        in_flight = []

        def on_message(*_):
            in_flight.append(max(p.rounds.statistics().in_flight for p in peers))

        swarm.network.on_message = on_message
        await swarm.until(lambda: passed(peers, 12))
        assert max(in_flight) == fragments
        log = entries(peers[0])
        assert [e.fragment for e in log] == [swarm.replay.fragment_at(e.position) for e in log]
        assert all(len(e.complete_members()) == 3 for e in log)
        await expect_equal_end(swarm, peers)

    run(tmp_path, scenario, fragments=fragments)


def test_what_is_on_offer_is_ready_before_its_flight_begins(tmp_path):
    """Else the leader is told of the next window, and closes the group without this peer."""

    async def scenario(swarm):
        peers = await swarm.start(3, window_s=30.0, tau=4)
        said = []

        def offer_and_ask(window, peer=peers[0], offer=peers[0].rounds.offer):
            peer.ready_at = swarm.now() + peer.window_s
            said.append(peer.rounds.head(Known(epoch=None)).ready_in_s)
            offer(window)
            said.append(peer.rounds.head(Known(epoch=None)).ready_in_s)

        peers[0].rounds.offer = offer_and_ask
        await swarm.until(lambda: len(said) == 6, timeout_s=300)
        assert said == pytest.approx([30.0, 0.0] * 3)

    run(tmp_path, scenario)


@pytest.mark.parametrize("pace_s", [pytest.param(12.0, marks=pytest.mark.exhaustive), 25.0])
def test_a_slow_peer_makes_no_update_alone(tmp_path, pace_s):
    """Its fragments are on offer long before their turn, while others still train theirs."""

    async def scenario(swarm):
        paces_s = [pace_s, pace_s, pace_s, 2.7 * pace_s]
        peers = await swarm.begin([swarm.add(window_s=each_s, tau=2) for each_s in paces_s])
        await swarm.until(lambda: passed(peers, 20), timeout_s=2000.0)
        slow = peers[-1].ctx.me
        members = [[m.elector for m in e.complete_members()] for e in entries(peers[0])]
        assert all(len(elected) >= 3 for elected in members)
        assert sum(slow in elected for elected in members) >= 5
        await expect_equal_end(swarm, peers)

    run(tmp_path, scenario, fragments=2)


def rounds_in(folder, seconds, *, tau):
    """Positions that three far peers decide, a fragment handed in each second."""
    decided = []

    async def scenario(swarm):
        swarm.network.default.latency_s = 1.5 * FAR_S
        peers = await swarm.start(3, window_s=1.0, tau=tau)
        await swarm.until(lambda: swarm.now() > seconds, timeout_s=2 * seconds)
        decided.append(min(p.replica.position for p in peers))

    run(folder, scenario)
    return decided[0]


def test_a_reduction_that_takes_longer_than_a_step_holds_nobody_up(tmp_path, monkeypatch):
    many = rounds_in(tmp_path / "many", 18.0, tau=4)
    monkeypatch.setattr(policies, "MAX_AHEAD", 0)
    one = rounds_in(tmp_path / "one", 18.0, tau=4)
    assert many >= 15
    assert one <= 12


def strike_at(folder, message):
    kind, end = KINDS[message % len(KINDS)]
    return run_strike_in_flight(folder, lambda swarm: Strike(swarm, kind, message, end))


@pytest.mark.parametrize(
    "message",  # one of each kind
    [
        *(3, 29),
        *(pytest.param(message, marks=pytest.mark.exhaustive) for message in (60, 91, 147)),
    ],
)
def test_a_fault_at_a_message_while_several_are_in_flight(tmp_path, message):
    strike_at(tmp_path, message)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_a_fault_at_every_message_while_several_are_in_flight(tmp_path):
    for message in range(200):
        strike_at(tmp_path / str(message), message)


def test_whoever_will_lead_the_next_position_is_killed_with_it_reduced(tmp_path):
    """The early reduction dies with its leader; the contributions are counted all the same."""

    async def scenario(swarm):
        peers = await swarm.start(4, window_s=0.2, tau=4)
        votes_come_late(peers)
        await swarm.until(lambda: reduced_early(peers) is not None, timeout_s=10.0)
        position, leader = reduced_early(peers)
        leader.kill()
        others = [p for p in peers if p is not leader]
        await swarm.until(lambda: passed(others, position))
        entry = entries(others[0])[position]
        assert entry.kind == "update"
        assert {m.elector for m in entry.complete_members()} == {p.ctx.me for p in others}
        await expect_equal_end(swarm, others)

    run(tmp_path, scenario)


def votes_come_late(peers, late_s=0.5):
    """A decision takes longer than a reduction."""
    for peer in peers:

        async def answer(*question, answer=peer.rounds.voter.answer):
            await asyncio.sleep(late_s)
            return await answer(*question)

        peer.rounds.voter.answer = answer


def reduced_early(peers):
    """A position whose parts all are at its leader before its turn, and that leader."""
    for peer in peers:
        replica = peer.replica
        for position in range(replica.position + 1, replica.position + 4):
            leader = leader_of(replica.electorate, position, 0)
            pending = peer.rounds._pending_at(position)
            exchange = pending.exchange if pending is not None else None
            if leader == peer.ctx.me and exchange and exchange.times.reduced is not None:
                return position, peer
    return None


@pytest.mark.exhaustive
def test_an_elector_more_may_lead_what_another_reduced_early(tmp_path):
    """Joiners come until one of them takes over a position in flight."""

    async def scenario(swarm):
        peers = await swarm.start(3, window_s=0.2, tau=4)
        votes_come_late(peers)
        while not any(is_in_vain(event) for p in swarm.peers for event in p.events):
            late = swarm.add(window_s=0.2, tau=4)
            await late.start()
            await swarm.until(lambda p=late: p.ctx.me in peers[0].replica.electorate, 20.0)
            assert len(swarm.peers) <= 8
        moved = peers[0].replica.position
        await swarm.until(lambda: passed(swarm.peers, moved + 4))
        await swarm.until(lambda: len(entries(peers[0])[-1].members) == len(swarm.peers))
        await expect_equal_end(swarm, swarm.peers)

    run(tmp_path, scenario)


def is_in_vain(event):
    return "reducing again what was reduced early" in event


def test_a_position_without_counted_work_is_given_up(tmp_path):
    async def scenario(swarm):
        peers = [swarm.add(window_s=0.1, tau=4) for _ in range(3)]
        for peer in peers:
            peer.tamper = lambda offer, peer=peer: weightless(offer, peer.windows == 5)
        await swarm.begin(peers)
        await swarm.until(lambda: passed(peers, 10))
        log = entries(peers[0])[:10]
        assert [e.kind for e in log].count("null") == 1
        null = next(e for e in log if e.kind == "null")
        assert len(log[null.position + 1].complete_members()) == 3
        await expect_equal_end(swarm, peers)

    run(tmp_path, scenario)


def weightless(offer, is_it):
    return replace(offer, weight=0.0) if is_it else offer


def test_an_epoch_ends_what_was_reduced_early_in_the_one_before(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(4, window_s=0.1, tau=4)
        await swarm.until(lambda: passed(peers, 4))
        survivor = next(p for p in peers if p.ctx.me != peers[0].replica.electorate[0])
        for peer in peers:
            if peer is not survivor:
                peer.kill()
        await asyncio.sleep(60.0)
        stuck = survivor.replica.position
        record = signed_epoch(2, stuck, survivor.replica.chain, [survivor.ctx.me])
        assert await survivor.replica.adopt(record)
        await swarm.until(lambda: survivor.replica.position >= stuck + 6)
        assert {e.epoch for e in entries(survivor)[stuck:]} == {2}
        assert all(e.kind == "update" for e in entries(survivor)[stuck:])
        await expect_equal_end(swarm, [survivor])

    run(tmp_path, scenario)


def test_two_sides_of_a_partition_come_together_again(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(4, window_s=0.3, tau=4)
        await swarm.until(lambda: passed(peers, 4))
        names = [p.identity.peer_id for p in peers]
        swarm.network.partition(names[:2], names[2:])
        moved = max(p.replica.position for p in peers)
        await swarm.until(lambda: max(p.replica.position for p in peers) >= moved + 6)
        ahead = [p.replica.position >= moved + 4 for p in peers]
        assert ahead in ([True, True, False, False], [False, False, True, True])
        swarm.network.heal()
        await swarm.until(lambda: passed(peers, moved + 12))
        await expect_equal_end(swarm, peers)

    run(tmp_path, scenario)


def test_what_was_withdrawn_does_not_settle_what_came_after_it(tmp_path):
    """A peer that drops its work in mid-round is in the entry with what it has dropped."""

    async def scenario(swarm):
        peers = await swarm.start(3, window_s=1.0, tau=2)
        votes_come_late(peers)
        peer = peers[1]

        def reduced():
            pending = peer.rounds._pending_at(peer.replica.position)
            return pending and pending.exchange and pending.exchange.times.reduced is not None

        await swarm.until(reduced, 10.0)
        position, fragment = peer.replica.position, swarm.replay.fragment_at(peer.replica.position)
        offer = peer.under_way[fragment].offer
        peer.rounds.withdraw()
        late = OfferedWindow(
            number=99, fragment=fragment, offer=offer, tokens=1280, steps=10, loss=None
        )
        peer.rounds.offer(late)
        await swarm.until(lambda: passed(peers, position))
        assert peer.ctx.me in {m.elector for m in entries(peer)[position].complete_members()}
        settled = next(s for s in peer.settled if s.applied.entry.position == position)
        assert (settled.settles, settled.included) == (99, None)

    run(tmp_path, scenario, fragments=2)
