"""An event loop whose clock jumps to the next timer when there is nothing else to do.

Code under test uses asyncio and `loop.time()` only; a test that waits out an hour of deadlines then
takes no time. While a job runs in an executor the clock stands still, so real work never looks like
a timeout.

Errors::

    Deadlock    every task waits, no timer is set and nothing outside can wake the loop
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")

OUTSIDE_S = (
    5.0  # real seconds that a wake-up from another thread may take before the loop counts as stuck
)

LOOK_EVERY = 16  # turns of the loop, while it has callbacks to run


class Deadlock(RuntimeError):
    """No task of the loop can ever continue."""


class _JumpingSelector(selectors.DefaultSelector):  # type: ignore[misc, valid-type, unused-ignore]
    """Asks the loop how far to jump instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.num_outside_jobs = 0
        self._selects = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._selects += 1
        # While callbacks are ready, nothing from outside is urgent, and asking the system before
        # each of them takes as long as many callbacks do.
        if timeout == 0 and self._selects % LOOK_EVERY:
            return []
        events = super().select(0)
        if events or timeout == 0:
            return events
        if self.num_outside_jobs:
            return super().select(OUTSIDE_S)
        if timeout is None or timeout < 0:
            return self._wait_for_outside()
        self.now_s += timeout
        return events

    def _wait_for_outside(self) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(OUTSIDE_S)
        if not events:
            raise Deadlock("every task waits and no timer is set; give the waits a deadline")
        return events


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`time()` starts at 0 and advances only when all tasks wait for timers."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Return virtual seconds."""
        return self._jumping.now_s

    def run_in_executor(  # type: ignore[override]
        self,
        executor: Executor | None,
        func: Callable[..., T],
        *args: Any,  # noqa: ANN401
    ) -> asyncio.Future[T]:
        """Run a job in an executor; the clock stands still until it is done."""
        self._jumping.num_outside_jobs += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._job_done)
        return future

    def _job_done(self, _: asyncio.Future[Any]) -> None:
        self._jumping.num_outside_jobs -= 1


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a new loop, as `asyncio.run` does, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


async def inline(function: Callable[..., Any], /, *args: Any) -> Any:  # noqa: ANN401
    """Run in the loop what otherwise runs in a thread, so that a test is deterministic."""
    return function(*args)
