"""Windows of a worker's own length: shares are kept, and unequal workers end them together."""

import pytest
import torch

from support.toys import Team


def ends(team, steps):
    """Steps after which each worker has ended a window, when worker i takes `paces[i]` a tick."""
    before = [worker.statistics().windows for worker in team.workers]
    found = [[] for _ in before]
    for tick in range(steps):
        for index, worker in enumerate(team.workers):
            for stride in range(team.paces[index]):
                team.turn(index, 10 * tick + stride)
            if worker.statistics().windows > before[index]:
                before[index] = worker.statistics().windows
                found[index].append(tick)
    return found


@pytest.mark.parametrize("spec", ["diloco", "streaming(count=2, tau=2)", "eager", "co2"])
def test_windows_as_long_as_speeds_end_together(spec):
    team = Team(3, spec, 8, codec="fp32")
    team.paces = [1, 2, 4]
    for worker, pace in zip(team.workers, team.paces, strict=True):
        worker.resize(4 * pace)
    fast, medium, slow = ends(team, 24)
    assert fast == medium == slow
    assert len(fast) == 24 // 4 * len(team.workers[0].fragments)
    assert team.group.statistics().rounds >= len(fast) - 1
    assert all(torch.equal(w.synced_N, team.workers[0].synced_N) for w in team.workers)


def test_a_delay_keeps_its_share_of_a_window():
    worker = Team(1, "streaming(count=2, tau=4)", 8).workers[0]
    assert worker.delay == 4
    for inner_steps, delay in [(16, 8), (4, 2), (1, 0), (8, 4)]:
        worker.resize(inner_steps)
        assert (worker.inner_steps, worker.delay) == (inner_steps, delay)
    quarter = Team(1, "diloco(tau=2)", 8).workers[0]
    quarter.resize(16)
    assert quarter.delay == 4


def test_a_commit_that_waits_for_its_time_is_counted_after_a_restart():
    one, other = (Team(2, "diloco(tau=3)", 4) for _ in range(2))
    one.run(range(5))
    other.load(one.save())
    worker, resumed = one.workers[0], other.workers[0]
    assert worker.statistics().position == 0 < worker.reducer.position
    assert resumed.next_position == worker.next_position == 1


def test_a_delay_that_is_given_stays_as_many_steps_and_is_resumed():
    one, other = (Team(1, "diloco(tau=3)", 8) for _ in range(2))
    one.workers[0].resize(20, delay=3)
    one.run(range(7))
    other.workers[0].load_state_dict(one.workers[0].state_dict())
    assert [(t.workers[0].inner_steps, t.workers[0].delay) for t in (one, other)] == [(20, 3)] * 2
    with pytest.raises(ValueError, match="a delay of 0 to 20 inner steps, got 21"):
        one.workers[0].resize(20, delay=21)


@pytest.mark.parametrize("spec", ["diloco", "diloco(tau=3)", "eager", "streaming(count=2, tau=2)"])
def test_open_windows_are_for_the_position_after_all_that_is_under_way(spec):
    team = Team(2, spec, 4, codec="fp32")
    worker, ended = team.workers[0], 0
    for step in range(30):
        assert worker.next_position == ended == worker.statistics().windows
        team.run(range(step, step + 1))
        ended = worker.statistics().windows


def test_a_worker_that_joins_knows_where_the_log_stands():
    team = Team(2, "diloco", 2, codec="fp32", present=1)
    team.run(range(6))
    team.join(1)
    late = team.workers[1]
    assert late.next_position == late.statistics().position == late.reducer.position == 3


def test_fragments_stay_apart_however_often_windows_change():
    team = Team(1, "streaming(count=2, tau=0)", 10, codec="fp32")
    worker = team.workers[0]
    for step in range(400):
        if worker.step_in_window == 0:
            worker.resize(9 + step % 3)
        team.turn(0, step)
    first, second = (window.step_in_window for window in worker._windows)
    apart = (second - first) % worker.inner_steps
    assert abs(apart - worker.inner_steps / 2) <= 1


def test_a_resized_worker_resumes_to_the_bit():
    one, other = (Team(1, "streaming(count=2, tau=4)", 8) for _ in range(2))
    one.workers[0].resize(4)
    one.run(range(7))
    other.workers[0].load_state_dict(one.workers[0].state_dict())
    assert (other.workers[0].inner_steps, other.workers[0].delay) == (4, 2)


def test_a_window_has_at_least_one_step():
    with pytest.raises(ValueError, match="at least one inner step a window, got 0"):
        Team(1, "diloco", 8).workers[0].resize(0)


def test_a_worker_copies_what_it_handed_in_only_if_it_trains_on_undecided(monkeypatch):
    team = Team(2, "diloco", 4, codec="fp32")
    waits, other = team.workers
    seen, wait = [], waits.reducer.wait

    def spy():
        seen.append(waits._windows[0].pending.local_N)
        wait()

    monkeypatch.setattr(waits.reducer, "wait", spy)
    for step in range(4):
        team.turn(0, step)
    assert seen == [None]
    submitted_N = waits.layout.flatten(waits.model)
    assert torch.equal(waits._windows[0].pending.local_N, submitted_N)
    team.turn(0, 4)
    trained_N = waits.layout.flatten(waits.model) - submitted_N
    for step in range(4):
        team.turn(1, step)
    assert waits._windows[0].pending is None and bool(trained_N.any())
    assert torch.allclose(waits.layout.flatten(waits.model) - waits.synced_N, trained_N, atol=1e-6)
    assert torch.equal(other.layout.flatten(other.model), other.synced_N)
