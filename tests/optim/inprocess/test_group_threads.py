"""Loops of people's own with members of a group: in turns, in threads, and wrongly."""

import copy
import logging
import threading

import pytest
import torch

from atoll.optim import GroupError, InProcessGroup
from atoll.optim.inprocess import group as groups
from atoll.optim.inprocess import in_process
from support.toys import backward, flat, net, sgd

SIZE = 3
TOKENS = 5
NET = net()  # threads would draw from one generator


def worker_of(group, index, inner_steps=2):
    model = copy.deepcopy(NET)
    return group.method.worker(model, sgd(model), group.member(index), inner_steps=inner_steps)


def loop(group, index, workers, steps=8):
    """The loop of README, on worker-specific data."""
    reducer = group.member(index)
    workers[index] = worker = worker_of(group, index, reducer.spec.outer.inner_steps)
    for step in range(steps):
        backward(worker.model, 100 * step + index)
        worker.step(tokens=TOKENS)
        if reducer.finished:
            break
    reducer.close()


def in_threads(target, count=SIZE):
    failures = []

    def guarded(index):
        try:
            target(index)
        except Exception as error:
            failures.append(error)

    threads = [
        threading.Thread(target=guarded, args=(index,), daemon=True) for index in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return failures


def in_turns(group, steps=8):
    workers = [worker_of(group, index) for index in range(SIZE)]
    for step in range(steps):
        for index, worker in enumerate(workers):
            backward(worker.model, 100 * step + index)
            worker.step(tokens=TOKENS)
    return workers


@pytest.mark.parametrize(
    "method", ["diloco", "diloco(tau=1)", "streaming(count=2, tau=1)", "noloco", "sparseloco"]
)
def test_threads_end_in_the_bits_of_turns(method):
    ours, threads = {}, in_process(SIZE, method, inner_steps=2, threads=True)
    assert in_threads(lambda index: loop(threads, index, ours)) == []
    theirs = in_turns(in_process(SIZE, method, inner_steps=2))
    for index, worker in enumerate(theirs):
        assert torch.equal(flat(ours[index].model), flat(worker.model))
        assert ours[index].statistics().included == worker.statistics().included


def test_threads_end_after_the_rounds_of_their_group():
    ours, group = {}, InProcessGroup(SIZE, inner_steps=2, rounds=2, threads=True)
    assert in_threads(lambda index: loop(group, index, ours, steps=100)) == []
    assert group.statistics().rounds == 2
    assert all(worker.statistics().steps == 4 for worker in ours.values())


def test_a_thread_that_ends_early_holds_nobody_up():
    ours, group = {}, InProcessGroup(SIZE, inner_steps=2, threads=True)
    assert in_threads(lambda index: loop(group, index, ours, steps=2 if index else 8)) == []
    assert group.statistics().rounds == 4
    assert ours[0].statistics().included == 4


def test_a_thread_that_dies_is_left_out(caplog, monkeypatch):
    monkeypatch.setattr(groups, "POLL_S", 0.01)
    ours, group = {}, InProcessGroup(SIZE, inner_steps=2, threads=True)

    def target(index):
        if index:
            return loop(group, index, ours)
        worker_of(group, index)
        raise ArithmeticError

    with caplog.at_level(logging.WARNING):
        (failure,) = in_threads(target)
    assert isinstance(failure, ArithmeticError)
    assert group.statistics().rounds == 4
    assert [r.getMessage() for r in caplog.records] == [
        "worker 0 left: its thread ended without close()"
    ]


def test_a_thread_reports_for_whom_it_waits(caplog, monkeypatch):
    monkeypatch.setattr(groups, "POLL_S", 0.01)
    monkeypatch.setattr(groups, "REPORT_S", 0.02)
    ours, group = {}, InProcessGroup(2, inner_steps=2, threads=True)
    said = threading.Event()
    handler = logging.Handler()
    handler.emit = lambda record: said.set()
    logger = logging.getLogger("atoll.optim.inprocess.group")
    logger.addHandler(handler)

    def target(index):
        if index:
            assert said.wait(30)
        loop(group, index, ours)

    try:
        with caplog.at_level(logging.WARNING):
            assert in_threads(target, 2) == []
    finally:
        logger.removeHandler(handler)
    assert "worker 0 waits for the workers 1 to end their windows" in caplog.text


def test_threads_that_the_group_does_not_expect_are_refused():
    ours, group = {}, InProcessGroup(SIZE, inner_steps=2)
    together = threading.Barrier(SIZE)

    def target(index):
        try:
            loop(group, index, ours, steps=1)
        finally:
            together.wait(30)  # all threads are alive while another begins

    failures = in_threads(target)
    assert [type(failure) for failure in failures] == [GroupError] * (SIZE - 1)
    assert "make the group with threads=True" in str(failures[0])


def test_workers_made_in_one_thread_are_refused_in_others():
    group = InProcessGroup(2, inner_steps=1)
    workers = [worker_of(group, index, inner_steps=1) for index in range(2)]

    def target(index):
        backward(workers[index].model, index)
        workers[index].step(tokens=TOKENS)

    failures = in_threads(target, 1)
    assert "expected all workers in one thread" in str(failures[0])


def test_loops_one_after_the_other_are_refused():
    group = InProcessGroup(2, inner_steps=2)
    first, second = worker_of(group, 0), worker_of(group, 1)
    with pytest.raises(GroupError, match=r"worker 0 has trained \d+ steps beyond.* workers 1 did"):
        for step in range(100):
            backward(first.model, step)
            first.step(tokens=TOKENS)
    assert second.statistics().steps == 0


# what a loop asks of a reducer


def test_a_member_knows_its_run_as_a_networked_reducer_does():
    member = InProcessGroup(2, "diloco(count=2)", inner_steps=4, rounds=6).member(0)
    assert (member.spec.outer.inner_steps, member.spec.run.rounds) == (4, 6)
    assert not member.finished
    model = net()
    member.method.worker(model, sgd(model), member, inner_steps=4)
    assert member.timetable.window(0) == 4
    assert member.timetable.steps_until(6) == 12
    assert member.timetable.total_steps == 12


def test_a_member_is_never_finished_without_a_number_of_rounds():
    group = InProcessGroup(1, inner_steps=1)
    worker = worker_of(group, 0, inner_steps=1)
    for step in range(3):
        backward(worker.model, step)
        worker.step(tokens=TOKENS)
    assert worker.reducer.position == 3
    assert not worker.reducer.finished


def test_closing_twice_is_fine_and_lets_the_others_go_on():
    group = InProcessGroup(2, inner_steps=1)
    first, second = worker_of(group, 0, 1), worker_of(group, 1, 1)
    first.reducer.close()
    first.reducer.close()
    backward(second.model, 1)
    second.step(tokens=TOKENS)
    assert group.statistics().rounds == 1


def test_closing_with_a_window_that_nobody_took_is_reported(caplog):
    group = InProcessGroup(2, inner_steps=1)
    first, _ = worker_of(group, 0, 1), worker_of(group, 1, 1)
    backward(first.model, 1)
    first.step(tokens=TOKENS)
    with caplog.at_level(logging.WARNING):
        first.reducer.close()
    assert "worker 0 left with a window that no round has taken; the workers 1" in caplog.text


@pytest.mark.parametrize("numbers", [{"inner_steps": 0}, {"rounds": -1}])
def test_a_group_of_absurd_numbers_is_refused(numbers):
    with pytest.raises(ValueError, match="expected at least one worker, one inner step"):
        InProcessGroup(1, **numbers)


def test_a_round_of_one_worker_alone_is_reported_once(caplog):
    group = InProcessGroup(2, inner_steps=1)
    with caplog.at_level(logging.WARNING):
        loop(group, 0, {}, steps=40)
    (record,) = caplog.records
    assert "a round takes the work of worker 0 alone, of a group of 2" in record.getMessage()
