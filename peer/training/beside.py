"""Computing while a trainer waits for a round.

A peer of a pipeline that stands still while its round is decided holds up all other stages. So the
trainer's thread continues with microbatches, and another one waits. Commits change the parameters
between two computations.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


class ParameterTurns:
    """A lock of two threads: one that asks for it goes before the other's next turn."""

    def __init__(self) -> None:
        """Begin free."""
        self._asking, self._using = threading.Lock(), threading.Lock()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Hold it."""
        with self._asking:
            self._using.acquire()
        try:
            yield
        finally:
            self._using.release()


Work = Callable[[ParameterTurns, Callable[[], bool]], None]
"""Computes in turns of the first argument, until the second returns True."""


class BesideWaits:
    """Lets the thread that waits work meanwhile."""

    def __init__(self, work: Work) -> None:
        """`work` returns soon after the wait is over."""
        self.turns = ParameterTurns()
        self._work = work
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="round")

    def wait(self, until_settled: Callable[[], None]) -> None:
        """Work until another thread has returned from the wait; raise what that raised."""
        waiting = self._waiter.submit(until_settled)
        self._work(self.turns, waiting.done)
        waiting.result()

    def close(self) -> None:
        """End the other thread."""
        self._waiter.shutdown(wait=False)
