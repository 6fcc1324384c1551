import pytest

from atoll.optim import schedules


def test_qsr_grows_with_the_square_of_the_inverse_rate():
    assert schedules.qsr(0.1, shortest=4, growth=0.4) == 16
    assert schedules.qsr(0.05, shortest=4, growth=0.4) == 64
    assert schedules.qsr(1.0, shortest=4, growth=0.4) == 4


def test_unequal_peers_arrive_together():
    step_s = [0.1, 0.13, 0.2, 0.15]
    steps = schedules.deadline(step_s, inner_steps=30)
    window_s = 30 * 0.13
    assert steps[1] == 30
    for seconds, count in zip(step_s, steps, strict=True):
        assert window_s - seconds < count * seconds <= window_s + 1e-9


def test_windows_stay_within_half_to_twice_the_median():
    assert schedules.deadline([0.01, 0.1, 10.0], inner_steps=30) == [60, 30, 15]
    assert schedules.deadline([1.0, 1.0, 4.0], inner_steps=1) == [1, 1, 1]


def test_equal_peers_take_the_same_window():
    assert schedules.deadline([0.3] * 5, inner_steps=25) == [25] * 5
    assert schedules.fixed(25) == 25


@pytest.mark.parametrize(
    "call",
    [
        lambda: schedules.fixed(0),
        lambda: schedules.qsr(0.0, shortest=1, growth=1.0),
        lambda: schedules.qsr(0.1, shortest=0, growth=1.0),
        lambda: schedules.deadline([], inner_steps=3),
        lambda: schedules.deadline([0.1, float("nan")], inner_steps=3),
    ],
)
def test_numbers_out_of_range_are_refused(call):
    with pytest.raises(ValueError, match="expected"):
        call()
