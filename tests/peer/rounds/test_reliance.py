"""Promises that peers break, and leaders whose terms fail."""

import pytest

from atoll.optim.log.entry import Elector, leader_order
from atoll.peer.rounds import reliance
from atoll.peer.rounds.consensus.ballots import leader_of
from atoll.peer.rounds.consensus.turns import Turns
from atoll.peer.rounds.policies import (
    decision_patience_s,
    group_patience_s,
    round_deadline_s,
)
from atoll.peer.rounds.reliance import (
    SKIPPED_POSITIONS,
    FailedLeaders,
    Promises,
    Usurpers,
    terms_over,
)

ELECTORATE = [Elector(peer_id=name, incarnation="1") for name in "abcd"]


def order(position, electorate=ELECTORATE):
    return [electorate[index].peer_id for index in leader_order(electorate, position)]


def skipped(failed, position, electorate=ELECTORATE):
    """The leaders that are passed over, by name."""
    terms = failed.skipped(electorate, position)
    return {order(position, electorate)[term] for term in terms}


def note(failed, kind, position, electorate, term, *, over=99, first_term=0):
    failed.note(kind, position, electorate, term, over=over, first_term=first_term)


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
    note(failed, "update", 7, ELECTORATE, 2)
    assert skipped(failed, 8) == set(order(7)[:2])
    assert skipped(failed, 7 + SKIPPED_POSITIONS) == set(order(7)[:2])
    assert skipped(failed, 8 + SKIPPED_POSITIONS) == set()


def test_a_first_term_that_decides_fails_nobody():
    failed = FailedLeaders()
    note(failed, "update", 7, ELECTORATE, 0)
    assert failed.is_empty and skipped(failed, 8) == set()


def test_a_null_is_its_leaders_failure():
    failed = FailedLeaders()
    note(failed, "null", 7, ELECTORATE, 0)
    assert skipped(failed, 8) == {order(7)[0]}


def test_a_null_that_a_later_leader_may_have_had_to_adopt_is_not():
    failed = FailedLeaders()
    note(failed, "null", 7, ELECTORATE, 1)
    assert skipped(failed, 8) == {order(7)[0]}


def test_terms_that_had_no_time_have_not_failed():
    """A liar ended them by a promise that it asked for at once."""
    failed = FailedLeaders()
    note(failed, "update", 7, ELECTORATE, 3, over=0)
    assert failed.is_empty
    note(failed, "update", 8, ELECTORATE, 3, over=1)
    assert skipped(failed, 9) == {order(8)[0]}


def test_terms_before_that_of_an_epoch_have_failed_whatever_the_time():
    failed = FailedLeaders()
    note(failed, "update", 7, ELECTORATE, 2, over=0, first_term=2)
    assert skipped(failed, 8) == set(order(7)[:2])


def test_each_silent_leader_takes_its_time():
    def over(stood_s):
        return terms_over(stood_s, 5.0, grace_s=2.0, stall_s=1.0)

    assert [over(stood_s) for stood_s in (0.0, 5.0, 16.9, 17.0, 28.9, 29.0)] == [0, 0, 0, 1, 1, 2]
    # A leader that closes its group and decides nothing is left after twice a deadline.
    assert terms_over(25.0, 5.0, grace_s=100.0, stall_s=1.0) == 1


def test_silent_leaders_cost_more_than_what_counts_as_silence():
    for term in range(3):
        patience_s = group_patience_s(term, grace_s=2.0, stall_s=1.0, last_s=5.0, window_s=4.0)
        assert terms_over(patience_s, 5.0, grace_s=2.0, stall_s=1.0) >= 1
    decision_s = decision_patience_s(round_deadline_s(0, 100.0, 1.0), 1.0)
    assert terms_over(decision_s, 0.0, grace_s=100.0, stall_s=1.0) >= 1


def test_a_peer_is_new_for_as_long_as_leaders_are_passed_over():
    failed = FailedLeaders()
    assert failed.is_new(10) and failed.is_new(10 + SKIPPED_POSITIONS)
    assert not failed.is_new(11 + SKIPPED_POSITIONS)


def test_a_leader_that_decides_an_update_is_passed_over_no_more():
    failed = FailedLeaders()
    note(failed, "update", 7, ELECTORATE, 1)
    (leader,) = skipped(failed, 8)
    term = order(8).index(leader)
    note(failed, "update", 8, ELECTORATE, term)
    assert leader not in skipped(failed, 9)


def test_terms_that_were_passed_over_have_not_failed_again():
    failed = FailedLeaders()
    note(failed, "update", 0, ELECTORATE, 1)
    (leader,) = skipped(failed, 1)
    for position in range(1, SKIPPED_POSITIONS + 1):
        assert skipped(failed, position) == {leader}
        note(failed, "update", position, ELECTORATE, int(order(position)[0] == leader))
    assert skipped(failed, SKIPPED_POSITIONS + 1) == set()


@pytest.mark.parametrize("term", [4, 9])
def test_nobody_is_passed_over_if_all_have_failed(term):
    failed = FailedLeaders()
    note(failed, "null", 7, ELECTORATE, term)
    assert skipped(failed, 8) == set()
    assert skipped(failed, 8, [*ELECTORATE, Elector(peer_id="e", incarnation="1")]) == set("abcd")


def test_three_of_its_own_terms_are_one_too_many():
    usurpers = Usurpers()
    assert [usurpers.took("a", at) for at in (10, 10, 20)] == [False] * 3
    assert not usurpers.is_known("a", 20)
    assert usurpers.took("a", 30)
    assert not usurpers.took("a", 31), "it is said once"
    assert usurpers.is_known("a", 20 + SKIPPED_POSITIONS)
    assert not usurpers.is_known("a", 21 + SKIPPED_POSITIONS)
    assert not usurpers.is_known("b", 31)


def test_usurpers_are_remembered_of_so_many_peers(monkeypatch):
    monkeypatch.setattr(reliance, "MAX_PEERS", 2)
    usurpers = Usurpers()
    for at in range(3):
        usurpers.took("a", at)
    for peer in ("b", "c"):
        usurpers.took(peer, 3)
    assert not usurpers.is_known("a", 3)


ELECTORS = tuple(Elector(peer_id=f"p{i}", incarnation="1") for i in range(4))


@pytest.mark.parametrize(
    ("promised", "since", "now", "skipped", "gave_up", "early"),
    [
        (2, 0, 109.0, (), (), True),
        (1, 0, 109.0, (), (), False),  # the promise of its own term
        (2, 0, 110.0, (), (), False),  # it has had its time
        (2, 2, 109.0, (), (), False),  # it was ended before
        (2, 0, 109.0, (1,), (), False),
        (2, 0, 109.0, (), (1,), False),
        (1 << 20, 0, 109.0, (), (), True),
    ],
)
def test_a_term_of_ones_own_is_ended_early(promised, since, now, skipped, gave_up, early):
    turns = Turns(ELECTORS, 7, first_term=0, now=100.0)
    me = leader_of(ELECTORS, 7, 1).peer_id
    for term in gave_up:
        turns.give_up(term, 100.0)
    found = turns.ends_early(promised, me, since=since, now=now, base_s=10.0, skipped=skipped)
    assert found is early
