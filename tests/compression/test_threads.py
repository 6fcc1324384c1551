import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from atoll.compression import threads
from atoll.compression.threads import AT_MOST, share, usable

WAIT_S = 10.0

pytestmark = pytest.mark.skipif(
    threads._set_threads is None, reason="torch has another OpenMP, or none: nothing is shared"
)


@pytest.fixture(autouse=True)
def torch_has_two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def in_both(work):
    """Share two runs, each of which waits for the other; return the own thread's result."""
    met, caller = threading.Barrier(2), threading.get_ident()

    def run(_: int) -> object:
        met.wait(WAIT_S)
        return None if threading.get_ident() == caller else work()

    (result,) = [each for each in share(run, range(2)) if each is not None]
    return result


def test_results_have_the_order_of_the_runs():
    done = []
    assert share(lambda run: done.append(run) or 2 * run, range(100)) == list(range(0, 200, 2))
    assert sorted(done) == list(range(100))
    assert share(abs, []) == []


def test_own_threads_call_torch_on_one_thread_without_gradients():
    assert in_both(lambda: (torch.get_num_threads(), torch.is_inference_mode_enabled())) == (
        1,
        True,
    )
    assert torch.get_num_threads() == 2


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_own_threads_have_the_priority_of_the_one_that_shares():
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def lower() -> tuple[int, int]:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        return niceness(), in_both(niceness)

    before = niceness()
    assert in_both(niceness) == before
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(lower).result(WAIT_S) == (19, 19)
    assert in_both(niceness) == before


def test_this_thread_calls_torch_alone_while_it_shares():
    caller = threading.get_ident()
    found = share(lambda _: (threading.get_ident() == caller, torch.get_num_threads()), range(50))
    assert {number for is_caller, number in found if is_caller} == {1}
    assert torch.get_num_threads() == usable() == 2


def test_what_is_shared_within_a_run_stays_in_its_thread():
    def inner(_: int) -> bool:
        own = threading.get_ident()
        return share(lambda _: threading.get_ident(), range(4)) == [own] * 4

    def outer() -> list[bool]:
        threads.call_torch_alone()
        return share(inner, range(8))

    with ThreadPoolExecutor(1) as thread:
        assert all(thread.submit(outer).result(WAIT_S))


def test_an_error_is_raised_and_ends_the_rest():
    done, met = [], threading.Barrier(2)

    def run(index: int) -> None:
        done.append(index)
        if index < 2:
            met.wait(WAIT_S)
        if index == 1:
            raise ValueError("run 1")
        time.sleep(0.001)

    with pytest.raises(ValueError, match="run 1"):
        share(run, range(500))
    assert len(done) < 500
    assert torch.get_num_threads() == 2
    assert share(abs, [-1, -2]) == [1, 2]


def test_an_error_of_an_own_thread_is_raised():
    def fail() -> None:
        raise ValueError("of an own thread")

    with pytest.raises(ValueError, match="of an own thread"):
        in_both(fail)


def test_busy_threads_are_not_waited_for():
    begun, ended = threading.Semaphore(0), threading.Event()

    def hold(_: int) -> bool:
        begun.release()
        return ended.wait(WAIT_S)

    torch.set_num_threads(AT_MOST)
    with ThreadPoolExecutor(1) as another:
        holding = another.submit(share, hold, range(AT_MOST))
        for _ in range(AT_MOST):
            assert begun.acquire(timeout=WAIT_S)
        caller = threading.get_ident()
        assert share(lambda _: threading.get_ident(), range(8)) == [caller] * 8
        ended.set()
        assert all(holding.result(WAIT_S))


def test_a_thread_that_calls_torch_alone_shares_with_as_many_as_before():
    def begin() -> tuple[int, int]:
        threads.call_torch_alone()
        in_both(lambda: True)
        return torch.get_num_threads(), usable()

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(begin).result(WAIT_S) == (1, 2)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own():
    assert in_both(lambda: True)
    child = os.fork()
    if child == 0:
        shared = False
        try:
            shared = in_both(lambda: True)
        finally:
            os._exit(0 if shared else 1)
    assert os.waitpid(child, 0)[1] == 0
