import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.peer.pipeline.steps import Steps
from support.pipelines import pass_key


def steps(size=2, staleness=0):
    return Steps(step_microbatches=size, staleness=staleness)


def forward(one, *sequences):
    for sequence in sequences:
        one.admit(pass_key(sequence))
        one.begin_forward(pass_key(sequence))


def test_without_staleness_a_step_drains():
    one = steps(2)
    forward(one, 0, 1)
    assert not one.has_room and not one.is_due
    one.count(pass_key(0))
    assert not one.has_room and not one.is_due
    one.count(pass_key(1))
    assert one.is_due and one.take() == 2
    assert one.has_room and one.version == 1


@pytest.mark.parametrize("staleness", [0, 1])
def test_only_without_staleness_microbatches_wait_for_a_step(staleness):
    one = steps(1, staleness=staleness)
    forward(one, 0)
    one.count(pass_key(0))
    assert not one.stands_still
    one.take()
    assert one.stands_still is (staleness == 0)
    one.taken()
    assert not one.stands_still


def test_an_omitted_microbatch_makes_room_for_another():
    one = steps(2)
    forward(one, 0, 1)
    one.drop(pass_key(0))
    assert one.has_room and one.num_in_flight == 1


def test_with_staleness_a_step_waits_for_those_that_are_too_old():
    one = steps(1, staleness=1)
    forward(one, 0, 1)
    assert not one.has_room
    one.count(pass_key(1))
    assert one.is_due and one.take() == 1  # the first is one version old now
    forward(one, 2)
    one.count(pass_key(2))
    assert not one.is_due  # it would be two versions old
    one.count(pass_key(0))
    assert one.is_due and one.take() == 2


def test_a_pass_counts_in_one_step_only():
    one = steps(2)
    forward(one, 0)
    one.count(pass_key(0))
    one.count(pass_key(0))
    assert one.counted == 1


@pytest.mark.parametrize(("size", "staleness"), [(0, 0), (1, -1)])
def test_steps_that_never_come_are_refused(size, staleness):
    with pytest.raises(ValueError, match="step_microbatches"):
        steps(size, staleness)


@given(st.integers(1, 4), st.integers(0, 3), st.lists(st.integers(0, 10**6), max_size=80))
def test_no_gradient_is_staler_than_allowed(size, staleness, choices):
    one, flying, began = steps(size, staleness), [], {}
    for number, choice in enumerate(choices):
        if one.is_due:
            one.take()
        if choice % 2 and one.has_room:
            forward(one, number)
            flying.append(number)
            began[number] = one.version
        elif flying:
            done = flying.pop(choice % len(flying))
            assert one.version - began[done] <= staleness
            one.count(pass_key(done))
        assert one.counted + one.num_in_flight <= size * (1 + staleness)
