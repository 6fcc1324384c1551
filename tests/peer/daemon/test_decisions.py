"""Of what was decided, as few parameters wait for the trainer as it needs."""

import weakref

import pytest

from support.reducer_bench import ME, OTHER, decided


def test_states_that_are_decided_before_a_trainer_starts_are_not_kept(bench):
    """A recovery of many entries would hold the parameters of each of them."""
    each, settled = bench(), decided(0, OTHER)
    held = weakref.ref(settled.applied.state)
    each.deliver(settled)
    del settled
    assert held() is None
    each.start()
    each.deliver(decided(1, OTHER))
    each.reducer.wait()
    assert [commit.position for commit in each.commits] == [2]


def test_what_a_slow_trainer_missed_holds_the_newest_parameters_alone(bench):
    """A trainer in a long step would hold those after each entry."""
    each, missed = bench(), [decided(position, OTHER) for position in range(3)]
    held = [weakref.ref(each.applied.state) for each in missed]
    each.start()
    while missed:
        each.deliver(missed.pop(0))
    assert [state() is not None for state in held] == [False, False, True]
    each.reducer.wait()
    assert [(commit.position, float(commit.params_N[0])) for commit in each.commits] == [
        (1, 3.0),
        (2, 3.0),
        (3, 3.0),
    ]


@pytest.mark.parametrize("included", [None, [True] * 2], ids=["left out", "member"])
def test_work_is_settled_by_the_parameters_of_its_entry(bench, included):
    each = bench()
    each.start()
    number = each.submit().number
    each.deliver(decided(0, OTHER))
    each.deliver(decided(1, OTHER, ME, settles=number, included=included))
    each.deliver(decided(2, OTHER))
    each.deliver(decided(3, OTHER))
    each.reducer.wait()
    each.reducer.wait()
    assert [(commit.position, float(commit.params_N[0])) for commit in each.commits] == [
        (1, 1.0),
        (2, 2.0),
        (3, 4.0),
        (4, 4.0),
    ]
