"""Trainers take turns at what one of them does for all, and tell when their windows end."""

import pytest

from atoll.peer.daemon.reach.neighbours import RECORD_TTL_S, is_turn, window_ends
from atoll.peer.rounds.messages import PROTOCOL
from support.records import record_of


def record(**told):
    told = {"role": "trainer", "position": 7, "ready_in_s": 30.0, "step_s": 1.0} | told
    return record_of("other", protocol=PROTOCOL, **told)


def test_a_window_ends_by_the_last_record_of_its_peer():
    now_s = 1000.0
    old = record(expires_at=now_s + RECORD_TTL_S - 4.0)
    overdue = record(ready_in_s=3.0, expires_at=now_s + RECORD_TTL_S - 10.0)
    assert [end.in_s for end in window_ends([old, overdue], 7, now_s)] == [26.0, -7.0]


@pytest.mark.parametrize("told", [{"role": "keeper"}, {"position": 6}, {"step_s": 0.0}])
def test_who_is_in_no_window_of_this_position_has_no_end(told):
    assert window_ends([record(expires_at=1000.0, **told)], 7, 0.0) == []


@pytest.mark.parametrize("names", [["a"], ["b", "a"], ["c", "a", "b", "a"]])
def test_each_position_is_of_one_and_each_one_has_positions(names):
    for start in (0, 17):
        positions = range(start, start + len(set(names)))
        of = [[me for me in set(names) if is_turn(at, me, names)] for at in positions]
        assert sorted(me for (me,) in of) == sorted(set(names))


def test_a_peer_that_nobody_knows_yet_takes_turns_as_well():
    assert [is_turn(at, "b", ["a", "c"]) for at in range(3)] == [False, True, False]
    assert is_turn(5, "b", [])
