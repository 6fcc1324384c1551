"""A trainer's use of its time over the last windows."""

import pytest

from atoll.peer.training.statistics import RECENT_WINDOWS, RecentTimes, TimeSpent, TrainerStatistics


def spent(train_s, total_s, **others):
    return TimeSpent(train_s=train_s, total_s=total_s, **others)


def test_waiting_for_the_run_to_begin_is_apart():
    times = RecentTimes()
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


def test_only_the_last_windows_count():
    times = RecentTimes()
    for window in range(1, 2 * RECENT_WINDOWS):
        waited_s = 100.0 if window < RECENT_WINDOWS else 900.0
        times.mark(window, spent(float(window), window + waited_s))
    assert times.since(spent(40.0, 940.0)).utilisation == 1.0


def test_what_is_no_training_is_told_apart_and_counts_as_time():
    times = RecentTimes()
    times.mark(1, spent(0.0, 10.0, wait_s=10.0))
    now = spent(60.0, 110.0, wait_s=20.0, validate_s=14.0, save_s=6.0, outer_s=8.0)
    shares = times.since(now).shares()
    assert shares == pytest.approx(
        {"train": 0.6, "outer": 0.08, "wait": 0.1, "validate": 0.14, "save": 0.06, "other": 0.02}
    )
    assert times.since(now).utilisation == pytest.approx(0.6)
    assert TimeSpent().shares() == {}
