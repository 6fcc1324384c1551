"""A trainer's use of its time."""

import pytest

from atoll.peer.training.statistics import TimeInRun, TimeSpent, TrainerStatistics


def spent(train_s, total_s, **others):
    return TimeSpent(train_s=train_s, total_s=total_s, **others)


def test_waiting_for_the_run_to_begin_is_apart():
    times = TimeInRun()
    assert times.since(spent(5.0, 3600.0)).utilisation == 1.0  # in the lobby with the first window
    times.mark(0, spent(5.0, 5.0))
    times.mark(1, spent(10.0, 3610.0))
    assert times.since(spent(10.0, 3612.0)) == TimeSpent()  # the first round is decided
    assert times.since(spent(19.0, 3620.0)).utilisation == 0.9


def test_a_held_out_loss_is_new_for_two_positions():
    def is_new(position, valid_position):
        return TrainerStatistics(position=position, valid_position=valid_position).valid_is_new

    assert is_new(7, 7) and is_new(7, 6)
    assert not is_new(7, 5)
    assert not is_new(0, -1)


def test_all_windows_but_the_first_count():
    times = TimeInRun()
    for window in range(1, 40):
        waited_s = 100.0 if window < 20 else 140.0
        times.mark(window, spent(float(window), window + waited_s))
    assert times.since(spent(41.0, 181.0)).utilisation == 0.5  # 40 of 80 s


def test_what_is_no_training_is_told_apart_and_counts_as_time():
    times = TimeInRun()
    times.mark(1, spent(0.0, 10.0, wait_s=10.0))
    now = spent(50.0, 110.0, pause_s=10.0, wait_s=20.0, validate_s=14.0, save_s=6.0, outer_s=8.0)
    shares = times.since(now).shares()
    assert shares == pytest.approx(
        {"train": 0.5, "pause": 0.1, "outer": 0.08, "wait": 0.1, "validate": 0.14, "save": 0.06}
        | {"other": 0.02}
    )
    assert times.since(now).utilisation == pytest.approx(0.5)
    assert TimeSpent().shares() == {}
