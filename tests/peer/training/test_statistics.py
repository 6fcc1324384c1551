"""A trainer's use of its time over the last windows."""

from atoll.peer.training.statistics import RECENT_WINDOWS, RecentTimes, TrainerStatistics


def used(times, compute_s, wait_s):
    recent_s, waited_s = times.since(compute_s, wait_s)
    return TrainerStatistics(recent_compute_s=recent_s, recent_wait_s=waited_s).utilisation


def test_waiting_for_the_run_to_begin_is_apart():
    times = RecentTimes()
    assert used(times, 5.0, 3600.0) == 1.0  # in the lobby, with the first window in hand
    times.mark(0, 5.0, 0.0)
    times.mark(1, 10.0, 3600.0)
    assert used(times, 19.0, 3601.0) == 0.9


def test_only_the_last_windows_count():
    times = RecentTimes()
    for window in range(1, 2 * RECENT_WINDOWS):
        times.mark(window, float(window), 100.0 if window < RECENT_WINDOWS else 900.0)
    assert used(times, 40.0, 900.0) == 1.0
