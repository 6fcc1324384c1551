import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.optim import schedules
from atoll.optim.schedules import QSR, Rate, WindowEnd


def test_qsr_grows_with_the_square_of_the_inverse_rate():
    rule = QSR(shortest=4, longest=100, growth=0.4)
    assert rule.inner_steps(0.1) == 16
    assert rule.inner_steps(0.05) == 64
    assert rule.inner_steps(0.09) == 19  # of 19.75
    assert rule.inner_steps(1.0) == 4
    assert rule.inner_steps(0.03) == rule.inner_steps(0.0) == 100


def test_unequal_peers_arrive_together():
    step_s = [0.1, 0.13, 0.2, 0.15]
    steps = schedules.deadline(step_s, inner_steps=30)
    window_s = 30 * 0.13
    assert steps[1] == 30
    for seconds, count in zip(step_s, steps, strict=True):
        assert abs(count * seconds - window_s) <= seconds / 2


def test_windows_stay_within_half_to_twice_the_median():
    assert schedules.deadline([0.01, 0.1, 10.0], inner_steps=30) == [60, 30, 15]
    assert schedules.deadline([1.0, 1.0, 4.0], inner_steps=1) == [1, 1, 1]
    assert schedules.deadline([1.0, 1.0, 1e-320], inner_steps=30) == [30, 30, 60]  # a lie


def test_peers_of_about_one_speed_take_the_same_window():
    assert schedules.deadline([0.3, 0.3001, 0.2999, 0.305], inner_steps=25) == [25] * 4


@pytest.mark.parametrize(
    ("others_s", "expected"),
    [
        ([], 45.0),
        ([44.0, 46.0, 43.0], 45.0),  # in step
        ([42.0], 42.0),  # 3 s late, longer than others wait: so it would be each time
        ([47.0], 45.0),  # it waits for 2 s once
        ([30.0], 30.0),  # this peer began 15 s late
        ([15.0], 65.0),  # 30 s late: their window after this one is nearer
        ([-5.0], 45.0),  # overdue by 5 s: of the window that ended when this one began
        ([30.0, 31.0, 45.0], 31.0),  # with most of them
    ],
)
def test_a_peer_out_of_step_ends_its_window_with_the_others(others_s, expected):
    assert until_others_end(others_s) == pytest.approx(expected)


def until_others_end(others_s, *, step_s=1.0, other_step_s=1.0, **changes):
    others = [WindowEnd(step_s=other_step_s, in_s=in_s) for in_s in others_s]
    told = {"window_s": 50.0, "step_s": step_s, "late_s": 1.5} | changes
    return schedules.until_others_end(45.0, others, **told)


@given(st.floats(-1e15, 1e15))
def test_a_claim_moves_the_end_of_a_window_by_half_of_it_at_most(claim_s):
    assert 20.0 <= until_others_end([claim_s]) <= 70.0


def test_a_window_at_a_bound_is_of_another_duration_and_stays_as_it_is():
    assert until_others_end([30.0] * 3, step_s=2.1) == 45.0
    assert until_others_end([30.0] * 3, step_s=0.4) == 45.0
    assert until_others_end([30.0] * 3, step_s=1.9) == 30.0
    slow = [WindowEnd(step_s=2.1, in_s=20.0)] * 2
    others = [WindowEnd(step_s=1.0, in_s=30.0)] * 2
    rule = {"window_s": 50.0, "step_s": 1.0, "late_s": 1.5}
    assert schedules.until_others_end(45.0, [*slow, *others], **rule) == 30.0


def test_no_window_grows_by_less_than_reports_tell_apart():
    assert until_others_end([51.0] * 3, step_s=7.0, other_step_s=7.0) == 45.0
    assert until_others_end([51.0] * 3) == 51.0


def test_windows_of_equal_steps_end_with_those_of_about_this_pace():
    assert until_others_end([30.0] * 3, other_step_s=1.2, alike=schedules.ALIKE) == 45.0
    assert until_others_end([30.0] * 3, other_step_s=1.05, alike=schedules.ALIKE) == 30.0


@pytest.mark.parametrize(("ends_s", "expected"), [(10.0, 10.0), (-5.0, 45.0), (0.5, 50.5)])
def test_a_window_that_counts_nothing_ends_with_the_others_next(ends_s, expected):
    assert until_others_end([ends_s], counts=False) == pytest.approx(expected)


@pytest.mark.parametrize(
    "call",
    [
        lambda: QSR(shortest=0, longest=5, growth=1.0),
        lambda: QSR(shortest=6, longest=5, growth=1.0),
        lambda: QSR(shortest=1, longest=5, growth=0.0),
        lambda: QSR(shortest=1, longest=5, growth=math.inf),
        lambda: schedules.deadline([], inner_steps=3),
        lambda: schedules.deadline([0.1, float("nan")], inner_steps=3),
        lambda: schedules.deadline([0.1], inner_steps=0),
    ],
)
def test_numbers_out_of_range_are_refused(call):
    with pytest.raises(ValueError, match="expected"):
        call()


# --- which steps belong to which position

RATE = Rate(peak=1e-3, warmup_steps=50, min_ratio=0.1)
RULE = QSR(shortest=10, longest=80, growth=4e-3)


def walked(rule, rate, total_steps):
    """First steps of the windows, one after the other, as the paper's algorithm has them."""
    begins = [0]
    while begins[-1] < total_steps:
        lr = rate.at(max(begins[-1], rate.warmup_steps), total_steps)
        begins.append(begins[-1] + rule.inner_steps(lr))
    return begins


def test_equal_windows_of_fragments_follow_each_other():
    windows = schedules.equal(10, rounds=7, num_fragments=3)
    assert [windows.steps_until(p) for p in range(8)] == [0, 3, 6, 10, 13, 16, 20, 23]
    assert windows.total_steps == 23
    assert {windows.window(p) for p in range(7)} == {10}
    assert [windows.turn_at(step) for step in (0, 9, 10, 25)] == [0, 0, 1, 2]
    assert schedules.equal(10, rounds=0).total_steps == 0


@pytest.mark.parametrize("total_steps", [1, 40, 1000, 7777])
def test_growing_windows_are_those_of_a_walk_from_the_beginning(total_steps):
    windows = schedules.growing(RULE, RATE, total_steps=total_steps)
    begins = walked(RULE, RATE, total_steps)
    assert [windows.steps_until(p) for p in range(len(begins))] == begins
    lengths = [after - before for before, after in pairwise(begins)]
    assert [windows.window(p) for p in range(len(lengths))] == lengths
    assert lengths == sorted(lengths)
    assert [windows.turn_at(step) for step in begins] == list(range(len(begins)))


@given(
    rounds=st.integers(1, 400),
    shortest=st.integers(1, 40),
    more=st.integers(1, 200),
    share=st.floats(0.2, 3.0),
    warmup_steps=st.integers(0, 300),
    min_ratio=st.floats(0.0, 0.99),
    num_fragments=st.integers(1, 4),
)
def test_a_run_of_so_many_rounds_ends_where_its_rate_does(
    rounds, shortest, more, share, warmup_steps, min_ratio, num_fragments
):
    rate = Rate(peak=1e-3, warmup_steps=warmup_steps, min_ratio=min_ratio)
    rule = QSR(shortest=shortest, longest=shortest + more, growth=share * 1e-3 * shortest**0.5)
    windows = schedules.growing_over(rule, rate, rounds=rounds, num_fragments=num_fragments)
    assert windows.steps_until(rounds) <= windows.total_steps
    fewer = windows.total_steps - 1
    one_less = schedules.growing(rule, rate, total_steps=fewer, num_fragments=num_fragments)
    if windows.total_steps > rounds * shortest // num_fragments:
        assert one_less.steps_until(rounds) > fewer
    assert windows.window(rounds) == windows.window(rounds - 1)
    turns = rounds // num_fragments
    begins = walked(rule, rate, windows.total_steps)[: turns + 1]
    assert [windows.steps_until(num_fragments * turn) for turn in range(len(begins))] == begins


def test_fragments_move_at_equal_shares_of_a_window_that_grows():
    windows = schedules.growing_over(RULE, RATE, rounds=200, num_fragments=4)
    for turn in range(50):
        first, step = 4 * turn, windows.steps_until(4 * turn)
        inner_steps = windows.window(first)
        shares = [windows.steps_until(first + moved) - step for moved in range(5)]
        assert shares == [moved * inner_steps // 4 for moved in range(5)]


def test_a_run_without_an_end_has_no_falling_rate_to_grow_by():
    with pytest.raises(ValueError, match="expected a run with an end"):
        schedules.growing_over(RULE, RATE, rounds=0)
