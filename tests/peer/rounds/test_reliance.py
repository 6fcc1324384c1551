"""Promises that peers break, and leaders whose terms fail."""

import pytest

from atoll.optim.log.entry import Elector, leader_order
from atoll.peer.rounds import reliance
from atoll.peer.rounds.reliance import SKIPPED_POSITIONS, FailedLeaders, Promises

ELECTORATE = [Elector(peer_id=name, incarnation="1") for name in "abcd"]


def order(position, electorate=ELECTORATE):
    return [electorate[index].peer_id for index in leader_order(electorate, position)]


def skipped(failed, position, electorate=ELECTORATE):
    """The leaders that are passed over, by name."""
    terms = failed.skipped(electorate, position)
    return {order(position, electorate)[term] for term in terms}


def test_three_broken_promises_are_one_too_many():
    promises = Promises()
    assert [promises.broke("a") for _ in range(4)] == [False, False, True, False]
    assert not promises.believes("a") and promises.believes("b")


def test_a_member_of_an_entry_is_believed_again():
    promises = Promises()
    for _ in range(3):
        promises.broke("a")
    promises.kept(["b", "a"])
    assert promises.believes("a")
    assert promises.broke("a")


def test_a_peer_that_reports_to_every_second_group_is_not_believed():
    promises = Promises()
    waits = []
    for _ in range(30):
        waits.append(promises.believes("a"))
        if waits[-1]:  # a group that does not expect it takes no promise of it
            promises.broke("a")
        promises.kept(["a"])
    assert sum(waits[-12:]) == 6, "of 24 groups, half of which have it as a member"


def test_promises_kept_in_time_leave_nothing_behind():
    promises = Promises()
    promises.broke("a")
    promises.kept(["a"])
    promises.kept(["a"])
    assert not promises._broken


def test_promises_are_remembered_of_so_many_peers(monkeypatch):
    monkeypatch.setattr(reliance, "MAX_PEERS", 2)
    promises = Promises()
    for peer in "aaabbbccc":
        promises.broke(peer)
    assert [promises.believes(peer) for peer in "abc"] == [True, False, False]


def test_leaders_of_failed_terms_are_passed_over_for_a_while():
    failed = FailedLeaders()
    failed.note("update", 7, ELECTORATE, 2)
    assert skipped(failed, 8) == set(order(7)[:2])
    assert skipped(failed, 7 + SKIPPED_POSITIONS) == set(order(7)[:2])
    assert skipped(failed, 8 + SKIPPED_POSITIONS) == set()


def test_a_first_term_that_decides_fails_nobody():
    failed = FailedLeaders()
    failed.note("update", 7, ELECTORATE, 0)
    assert failed.is_empty and skipped(failed, 8) == set()


def test_a_null_is_its_leaders_failure():
    failed = FailedLeaders()
    failed.note("null", 7, ELECTORATE, 1)
    assert skipped(failed, 8) == set(order(7)[:2])


def test_a_leader_that_decides_an_update_is_passed_over_no_more():
    failed = FailedLeaders()
    failed.note("update", 7, ELECTORATE, 1)
    (leader,) = skipped(failed, 8)
    term = order(8).index(leader)
    failed.note("update", 8, ELECTORATE, term)
    assert leader not in skipped(failed, 9)


def test_terms_that_were_passed_over_have_not_failed_again():
    failed = FailedLeaders()
    failed.note("update", 0, ELECTORATE, 1)
    (leader,) = skipped(failed, 1)
    for position in range(1, SKIPPED_POSITIONS + 1):
        assert skipped(failed, position) == {leader}
        failed.note("update", position, ELECTORATE, int(order(position)[0] == leader))
    assert skipped(failed, SKIPPED_POSITIONS + 1) == set()


@pytest.mark.parametrize("term", [3, 4, 9])
def test_nobody_is_passed_over_if_all_have_failed(term):
    failed = FailedLeaders()
    failed.note("null", 7, ELECTORATE, term)
    assert skipped(failed, 8) == set()
    assert skipped(failed, 8, [*ELECTORATE, Elector(peer_id="e", incarnation="1")]) == set("abcd")
