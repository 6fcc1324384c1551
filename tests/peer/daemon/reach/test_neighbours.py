"""Trainers take turns at what one of them does for all."""

import pytest

from atoll.peer.daemon.reach.neighbours import is_turn


@pytest.mark.parametrize("names", [["a"], ["b", "a"], ["c", "a", "b", "a"]])
def test_each_position_is_of_one_and_each_one_has_positions(names):
    for start in (0, 17):
        positions = range(start, start + len(set(names)))
        of = [[me for me in set(names) if is_turn(at, me, names)] for at in positions]
        assert sorted(me for (me,) in of) == sorted(set(names))


def test_a_peer_that_nobody_knows_yet_takes_turns_as_well():
    assert [is_turn(at, "b", ["a", "c"]) for at in range(3)] == [False, True, False]
    assert is_turn(5, "b", [])
