import os
import sys
import threading

import pytest

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
