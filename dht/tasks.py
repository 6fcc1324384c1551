"""Owners for concurrent work, so that every task is awaited and no failure gets lost.

Four shapes cover what peers do:

    async with beside(work):      helpers that live exactly as long as a block
    await together(work, work)    parts of one thing, which fail together
    await race(work, stop)        work that is given up as soon as something else ends
    Tasks().spawn(work)           work in the background, until it is done or its owner closes

`asyncio.TaskGroup` waits for all its children, and wraps even a single failure in a group. A round
waits for whichever end comes first, and its callers catch the failure itself (`Refused`,
`PeerUnreachable`). So these helpers end what is left, and raise what the work raised.

A failure that nobody can catch any more, because the work of its task has been given up or runs in
the background, goes to the event loop's exception handler, which logs it at once. A broken link is
no such failure: links of work that ends are expected to break.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from atoll.dht.transport import TransportError

T = TypeVar("T")

Work = Coroutine[Any, Any, T]


@asynccontextmanager
async def beside(*work: Work[Any]) -> AsyncIterator[None]:
    """Run helpers beside a block, and end them with it.

    A helper that fails ends the block, which then raises that failure. A helper that returns early
    changes nothing, nor does one that loses its link: the block uses the same link, and learns why
    it was lost, which may be a refusal.
    """
    try:
        async with asyncio.TaskGroup() as group:
            helpers = [group.create_task(_until_cut_off(each)) for each in work]
            try:
                yield
            finally:
                for helper in helpers:
                    helper.cancel()
    except BaseExceptionGroup as failures:
        # The block's own failure comes last. It is the one that callers expect.
        for failure in failures.exceptions[:-1]:
            _report(failure)
        raise failures.exceptions[-1] from None
    finally:
        for each in work:
            each.close()  # a task that is cancelled before it begins never awaits its work


async def together(*work: Work[Any]) -> None:
    """Return when all are done; the first failure ends the others, and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for each in work:
                group.create_task(each)
    except BaseExceptionGroup as failures:
        for failure in failures.exceptions[1:]:
            _report(failure)
        raise failures.exceptions[0] from None


async def race(
    work: Work[T], *stops: Work[Any], expected: tuple[type[Exception], ...] = ()
) -> T | None:
    """Return what `work` returns, or None if one of `stops` ends first.

    Raises whatever ended first raised. If both have ended, `work` counts. What is given up may fail
    while it ends: such a failure is reported unless it is `expected`.
    """
    working, *stopping = tasks = [asyncio.create_task(each) for each in (work, *stops)]
    first: asyncio.Task[Any] | None = None
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        first = next(task for task in (working, *stopping) if task.done())
        ended = first.result()
        return ended if first is working else None
    finally:
        await end(*(task for task in tasks if task is not first), expected=expected)


async def end(*tasks: asyncio.Task[Any], expected: tuple[type[Exception], ...] = ()) -> None:
    """Cancel tasks and wait until they have ended; report their failures but expected ones."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        _report_failure(task, expected)


class Tasks:
    """Owns work in the background."""

    def __init__(self) -> None:
        """Nothing is under way."""
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Work[T]) -> asyncio.Task[T]:
        """Begin work that runs until it is done or `close` ends it.

        Its failure is reported unless a caller awaits the task, in which case both learn of it.
        """
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def close(self) -> None:
        """End all of it."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        _report_failure(task)


async def _until_cut_off(work: Work[Any]) -> None:
    with suppress(TransportError):
        await work


def _report_failure(task: asyncio.Task[Any], expected: tuple[type[Exception], ...] = ()) -> None:
    if task.done() and not task.cancelled() and (failure := task.exception()) is not None:
        if not isinstance(failure, expected):
            _report(failure, task)


def _report(failure: BaseException, task: asyncio.Task[Any] | None = None) -> None:
    if isinstance(failure, TransportError):
        return
    context: dict[str, Any] = {"message": "a background task failed", "exception": failure}
    if task is not None:
        context["task"] = task
    asyncio.get_running_loop().call_exception_handler(context)
