"""Whom a leader waits for: what it knows of the others is a little old."""

import asyncio

import pytest

from atoll.dht.testing.memory import run_virtual
from atoll.peer.rounds.conduct import MAX_FAULTS, Fault
from atoll.peer.rounds.consensus.leader import CATCHES_UP
from support.swarm import SETTINGS, Swarm, run_swarm, signed_epoch

POSITIONS = 4


def rosters_of_before(peers):
    """Everyone's roster is as it was before anybody had come."""

    async def nobody():
        return {}

    for peer in peers:
        peer.ctx.roster_peers = nobody


def decisions_arrive_late(peers):
    """What is decided reaches the last peer when the others have trained a window more."""
    accept = peers[-1].replica.accept

    async def late(*arguments, **options):
        await asyncio.sleep(2 * peers[-1].window_s)
        return await accept(*arguments, **options)

    peers[-1].replica.accept = late


@pytest.mark.parametrize("lag", [rosters_of_before, decisions_arrive_late])
def test_a_peer_of_which_the_leader_knows_too_little_is_waited_for(tmp_path, lag):
    async def main():
        swarm = Swarm(tmp_path)
        try:
            peers = [swarm.add(window_s=0.3 + number / 10) for number in range(3)]
            lag(peers)
            await swarm.begin(peers)
            await swarm.until(lambda: all(p.replica.position >= POSITIONS for p in peers))
            groups = [s.applied.entry.members for s in peers[0].settled[:POSITIONS]]
            assert [len(members) for members in groups] == [3] * POSITIONS
        finally:
            await swarm.stop()

    run_virtual(main())


def test_nobody_waits_for_a_peer_whose_report_would_be_refused(tmp_path):
    """It is barred for minutes, answers all the same, and cost each round a grace."""

    async def scenario(swarm):
        peers = await swarm.start(4, window_s=1.0)
        await swarm.until(lambda: all(p.replica.position >= 2 for p in peers))
        barred, others = peers[0].identity.peer_id, peers[1:]
        for peer in others:
            for _ in range(MAX_FAULTS):
                peer.ctx.fault(barred, Fault.BAD_CELL)
        at, began_s = others[0].replica.position, swarm.now()
        await swarm.until(lambda: all(p.replica.position >= at + 8 for p in others))
        lost_terms = 2 * SETTINGS.grace_s  # of the barred peer, which nobody asks
        assert swarm.now() - began_s < 8 * (1.0 + SETTINGS.grace_s / 2) + lost_terms

    run_swarm(tmp_path, scenario)


@pytest.mark.parametrize("late_s", [11.0, pytest.param(15.0, marks=pytest.mark.exhaustive), 19.0])
def test_peers_whose_windows_are_out_of_step_come_together_again(tmp_path, late_s):
    """Windows are longer than any grace; one of two peers stands still for a while."""

    async def main():
        swarm = Swarm(tmp_path)
        try:
            peers = [swarm.add(window_s=30.0) for _ in range(2)]
            await swarm.begin(peers)
            await swarm.until(lambda: all(p.replica.position >= 2 for p in peers), timeout_s=300)
            peers[1].window_s += late_s
            await swarm.until(lambda: peers[0].replica.position >= 3, timeout_s=300)
            peers[1].window_s -= late_s
            await swarm.until(lambda: peers[0].replica.position >= 9, timeout_s=900)
            groups = [s.applied.entry.members for s in peers[0].settled[5:9]]
            assert [len(members) for members in groups] == [2] * 4
        finally:
            await swarm.stop()

    run_virtual(main())


@pytest.mark.parametrize("slower", [pytest.param(2.5, marks=pytest.mark.exhaustive), 3.5])
def test_a_lone_fast_peer_does_not_spend_the_rounds_of_the_run(tmp_path, slower):
    async def scenario(swarm):
        fast, slow = swarm.add(), swarm.add()
        fast.window_s, slow.window_s = 30.0, 30.0 * slower
        await swarm.begin([fast, slow])
        await swarm.until(lambda: fast.replica.position >= 7, timeout_s=6000.0)
        return [len(s.applied.entry.members) for s in fast.settled]

    members = run_swarm(tmp_path, scenario)

    # A wait that was too short is longer at one of the next positions.
    assert members.count(2) >= 3


def applies_slowly(peer, seconds):
    """Let a peer take its time over each entry: `seconds` has the next ones, the last stays."""
    accept, processor = peer.replica._accept, asyncio.Lock()

    async def slow(*arguments, **options):
        async with processor:
            await asyncio.sleep(seconds.pop(0) if len(seconds) > 1 else seconds[0])
            return await accept(*arguments, **options)

    peer.replica._accept = slow


async def begin_behind(swarm, seconds):
    """Begin with two peers, one of which applies slowly and has no vote."""
    quick, slow = swarm.add(window_s=1.0), swarm.add(window_s=1.0)
    record = signed_epoch(1, 0, swarm.chain, [quick.ctx.me])
    for peer in (quick, slow):
        await peer.start(record)
    applies_slowly(slow, seconds)
    return quick, slow


def test_a_peer_alone_lets_one_as_slow_as_its_rounds_catch_up(tmp_path):
    """It stood still for a while, and would stay as far behind as it was then."""

    async def scenario(swarm):
        quick, _ = await begin_behind(swarm, [30.0, 1.0])
        await swarm.until(lambda: quick.replica.position >= 20)
        return [len(s.applied.entry.members) for s in quick.settled]

    members = run_swarm(tmp_path, scenario)
    assert 1 in members[:5]
    assert members[5:20] == [2] * 15


def test_promises_made_on_the_way_cost_a_peer_no_trust_here(tmp_path):
    """Its window was over, the entries that it lacks ended it, and the next one takes a while."""

    async def scenario(swarm):
        quick, late = await begin_behind(swarm, [1.0])
        head, name = late.rounds.head, late.identity.peer_id

        def arriving(known):
            is_behind = swarm.now() - quick.replica.moved_at < 4.0
            at = quick.replica.position - 2 * is_behind
            return head(known).model_copy(update={"position": max(0, at), "ready_in_s": 0.0})

        late.rounds.head = arriving
        late.rounds.offer = lambda window: None
        await swarm.until(lambda: not quick.ctx.arrivals.believes(name), timeout_s=200.0)
        assert quick.ctx.promises.believes(name)

    run_swarm(tmp_path, scenario)


def test_a_peer_alone_waits_three_times_for_one_that_does_not_catch_up(tmp_path):
    async def scenario(swarm):
        quick, slow = await begin_behind(swarm, [14.0])
        name = slow.identity.peer_id
        await swarm.until(lambda: not quick.ctx.arrivals.believes(name), timeout_s=100.0)
        lacks = quick.replica.position - slow.replica.position
        assert lacks <= CATCHES_UP, "expected one for which groups would wait otherwise"
        at, began_s = quick.replica.position, swarm.now()
        await swarm.until(lambda: quick.replica.position >= at + 3)
        assert swarm.now() - began_s < 3 * (1.0 + SETTINGS.grace_s)

    run_swarm(tmp_path, scenario)
