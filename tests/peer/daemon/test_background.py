import os
import sys
import threading

import pytest
import torch

from atoll.compression import threads as own
from atoll.compression.threads import FEW
from atoll.peer.daemon.background import MOST, NICENESS, background_threads


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_background_threads_yield_to_the_one_that_made_them():
    before = niceness()
    with background_threads(2, "atoll-test") as threads:
        found = [threads.submit(niceness).result() for _ in range(4)]
    assert set(found) == {min(MOST, before + NICENESS)}
    assert niceness() == before


def test_background_threads_are_named():
    with background_threads(1, "atoll-test") as threads:
        name = threads.submit(lambda: threading.current_thread().name).result()
    assert name.startswith("atoll-test")


@pytest.mark.skipif(own._set_threads is None, reason="torch has another OpenMP, or none")
@pytest.mark.parametrize(
    ("process_has", "short_calls", "expected"),
    [(FEW, True, 1), (FEW, False, FEW), (FEW + 1, True, FEW + 1)],
)
def test_short_calls_take_one_thread_of_few(process_has, short_calls, expected):
    before = torch.get_num_threads()
    torch.set_num_threads(process_has)
    try:
        with background_threads(1, "atoll-test", short_calls=short_calls) as threads:
            assert threads.submit(torch.get_num_threads).result() == expected
            assert threads.submit(own.usable).result() == process_has
        with background_threads(1, "atoll-test") as threads:
            assert threads.submit(torch.get_num_threads).result() == process_has
        assert torch.get_num_threads() == process_has
    finally:
        torch.set_num_threads(before)
