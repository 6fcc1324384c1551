"""P19: a leader leaves members out of its groups that reported to it in time."""

import pytest

from atoll.optim.log.entry import Elector, Entry
from atoll.peer.rounds.consensus.ballots import leader_of
from atoll.peer.rounds.reliance import DISTRUSTED, FailedLeaders, Omissions
from support import attackers
from support.swarm import reached, run_swarm


def led_by(peer, start, leader):
    """The entries since a position whose first leader is this one."""
    replica = peer.replica
    rows = replica.store.headers(start, replica.position - start)
    return [
        Entry.decode(row.entry)
        for row in rows
        if leader_of(replica.electorate_at(row.position), row.position, 0) == leader
    ]


@pytest.mark.parametrize("victims", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
def test_a_leader_that_leaves_members_out_is_shown_and_loses_them(tmp_path, monkeypatch, victims):
    async def scenario(swarm):
        # The group waits for the liar, so that the others know that it has their reports.
        peers = [*(swarm.add() for _ in range(3)), swarm.add(window_s=7.5)]
        await swarm.begin(peers)
        await swarm.until(lambda: reached(peers, 3))
        *honest, liar = peers
        out = [peer.identity.peer_id for peer in honest[:victims]]
        attackers.leave_out(monkeypatch, liar.ctx.me, out)
        at = max(p.replica.position for p in peers) + 1

        def passed_over():
            name = liar.identity.peer_id
            return all(name in peer.ctx.failed.passed_over for peer in honest[:victims])

        await swarm.until(passed_over, timeout_s=900.0)
        for peer in honest[:victims]:
            shown = [event for event in peer.events if "left this peer out" in event]
            assert len(shown) >= 3
            assert sum("no longer for a while" in event for event in peer.events) == 1
        for peer in honest[victims:]:
            assert peer.ctx.failed.is_empty, "only those that it leaves out mind"
        left_out = led_by(honest[0], at, liar.ctx.me)
        assert len(left_out) >= 3
        at = max(p.replica.position for p in peers) + 1
        await swarm.until(lambda: reached(peers, at + 8), timeout_s=900.0)
        later = led_by(honest[0], at, liar.ctx.me)
        assert later
        if victims == 3:  # they are most of the acceptors: another leader decides, with them
            assert all({m.peer_id for m in entry.members} >= set(out) for entry in later)
        assert swarm.same_bits(peers)

    run_swarm(tmp_path, scenario, codec="int8")


def test_a_member_that_never_reports_accuses_nobody(tmp_path, monkeypatch):
    """What a member does or says counts with nobody else, so none can stop an honest leader."""

    async def scenario(swarm):
        peers = await swarm.start(4)
        await swarm.until(lambda: reached(peers, 3))
        *honest, liar = peers
        attackers.never_report(monkeypatch, liar.ctx.me)
        at = max(p.replica.position for p in peers)
        await swarm.until(lambda: reached(honest, at + 12), timeout_s=900.0)
        for peer in honest:
            assert peer.ctx.failed.is_empty and peer.ctx.omissions.is_empty

    run_swarm(tmp_path, scenario, codec="int8")


def omit(omissions, times, *, was_taken, leader="a"):
    """How often the leader leaves this peer out, while another one includes it."""
    got = []
    for _ in range(times):
        got.append(omissions.omitted(leader, was_taken=was_taken))
        omissions.included("another")
    return got


def test_three_omissions_of_a_report_that_was_taken_are_too_many():
    assert omit(Omissions(), 4, was_taken=True) == [False, False, True, True]


def test_a_report_that_was_late_counts_less():
    got = omit(Omissions(), DISTRUSTED, was_taken=False)
    assert got == [False] * (DISTRUSTED - 1) + [True]


def test_a_peer_that_all_leave_out_blames_none():
    omissions = Omissions()
    for _ in range(20):
        assert not omissions.omitted("a", was_taken=True)
        assert not omissions.omitted("b", was_taken=False)


def test_a_leader_that_includes_the_peer_again_begins_anew():
    omissions = Omissions()
    omit(omissions, 2, was_taken=True)
    omissions.included("a")
    assert omissions.is_empty
    assert omit(omissions, 3, was_taken=True) == [False, False, True]


def test_a_leader_that_others_follow_stays_passed_over():
    failed = FailedLeaders()
    failed.leave("a", 7)
    electorate = [Elector(peer_id=name, incarnation="1") for name in "abc"]
    order = [leader_of(electorate, 8, term).peer_id for term in range(3)]
    failed.note("update", 8, electorate, order.index("a"), over=0)
    assert failed.skipped(electorate, 8) == {order.index("a")}
