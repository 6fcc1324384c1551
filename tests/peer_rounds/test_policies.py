"""When a group closes, who reduces what."""

import itertools

import pytest

from atoll.peer.rounds.policies import (
    Close,
    Rendezvous,
    close_decision,
    new_owner,
    round_deadline_s,
    split_cells,
)


def view(**changes):
    fields = {
        "ready": {"a", "b", "c"},
        "expected": {"a": 0.0, "b": 0.0, "c": 0.0},
        "electors_ready": 3,
        "electors": 4,
        "first_ready_at": 100.0,
        "quorum_ready_at": 101.0,
        "grace_s": 3.0,
        "alone_s": 9.0,
    }
    return Rendezvous(**(fields | changes))


def test_a_group_closes_at_once_when_all_are_there():
    assert close_decision(view(), 101.0) is Close.CLOSE


def test_nobody_ready_closes_nothing():
    assert close_decision(view(ready=set(), expected={}), 200.0) is Close.WAIT


def test_a_peer_that_comes_within_the_grace_is_waited_for():
    late = view(expected={"a": 0.0, "d": 103.5})
    assert close_decision(late, 103.9) is Close.WAIT
    assert close_decision(late, 104.0) is Close.CLOSE


def test_a_peer_that_says_it_comes_later_is_not_waited_for():
    assert close_decision(view(expected={"a": 0.0, "d": 110.0}), 101.1) is Close.CLOSE


def test_without_a_quorum_a_group_waits_longer_but_not_for_ever():
    few = view(expected={"a": 0.0, "d": 500.0}, quorum_ready_at=None)
    assert close_decision(few, 108.9) is Close.WAIT
    assert close_decision(few, 109.0) is Close.CLOSE


@pytest.mark.parametrize(
    ("cells", "uplinks", "expected"),
    [
        (16, [100.0] * 4, [4, 4, 4, 4]),
        (10, [100.0, 100.0, 100.0], [4, 3, 3]),
        (10, [300.0, 100.0, 100.0], [6, 2, 2]),
        (2, [100.0] * 4, [1, 1]),
        (1, [1.0], [1]),
        (100, [1000.0, 1.0], [100]),
        (5, [0.0, 0.0], [3, 2]),
    ],
)
def test_parts_follow_the_uplinks(cells, uplinks, expected):
    plans = split_cells(cells, uplinks)
    assert [p.stop_cell - p.start_cell for p in plans] == expected
    assert plans[0].start_cell == 0
    assert plans[-1].stop_cell == cells
    assert all(a.stop_cell == b.start_cell for a, b in itertools.pairwise(plans))


def test_a_lost_part_goes_to_the_survivor_with_the_least_to_do():
    assert new_owner((0,), [1, 2, 3], {1: 8, 2: 4, 3: 4}) == 2
    assert new_owner((0,), [0], {}) is None


def test_the_deadline_follows_the_slowest_link():
    slow, fast = round_deadline_s(10_000_000, 10.0, 1.5), round_deadline_s(10_000_000, 100.0, 1.5)
    assert slow == pytest.approx(8 * 8.0 + 15.0)
    assert fast == pytest.approx(8 * 0.8 + 15.0)
