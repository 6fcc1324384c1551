"""A person is told once what a run without a quorum waits for."""

from atoll.optim.log.entry import Elector
from atoll.peer.daemon.log_run import QuorumWatch

ELECTORS = [Elector(peer_id=name, incarnation="1") for name in "abcd"]
AGAIN = Elector(peer_id="a", incarnation="2")


def looks(*here, position=7, electorate=ELECTORS, in_touch=True, watch=None):
    watch = watch or QuorumWatch()
    return [watch.look(position, electorate, each, in_touch=in_touch) for each in here]


def test_a_quorum_needs_no_words():
    assert looks(ELECTORS[:3], ELECTORS[1:4], ELECTORS[:2]) == [None] * 3


def test_electors_that_were_started_again_are_none():
    first, second, third = looks({AGAIN}, {AGAIN}, {AGAIN})
    assert first is None  # the roster may be behind
    assert third is None  # told once
    assert "no quorum for round 8: 0 of 4 acceptors online" in second
    assert "after 60 s" in second


def test_half_without_the_first_is_no_quorum():
    _, told = looks(ELECTORS[2:], ELECTORS[2:])
    assert "2 of 4 acceptors" in told


def test_without_the_coordinator_it_is_said_that_it_must_come_back():
    _, told = looks({AGAIN}, {AGAIN}, in_touch=False)
    assert "until the coordinator is back" in told
    assert "60 s" not in told


def test_a_gap_of_one_look_is_none():
    watch = QuorumWatch()
    assert looks({AGAIN}, ELECTORS, {AGAIN}, ELECTORS, watch=watch) == [None] * 4


def test_the_next_position_is_told_again():
    watch = QuorumWatch()
    assert looks({AGAIN}, {AGAIN}, watch=watch)[1] is not None
    told = looks({AGAIN}, {AGAIN}, position=8, watch=watch)
    assert told[0] is None
    assert "round 9" in told[1]


def test_an_unknown_electorate_is_not_judged():
    assert looks({AGAIN}, {AGAIN}, electorate=[]) == [None, None]
