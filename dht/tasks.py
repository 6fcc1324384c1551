"""Owners for concurrent work, so that every task is awaited and no failure gets lost.

Five shapes cover what peers do:

    async with beside(work):      helpers that live exactly as long as a block
    await together(work, work)    parts of one thing, which fail together
    await race(work, stop)        work that is given up as soon as something else ends
    Tasks().spawn(work)           work in the background, until it is done or its owner closes
    KeptTasks(...).keep(work)     work that must not end: it starts again when it fails

`asyncio.TaskGroup` waits for all its children, and wraps even a single failure in a group. A round
waits for whichever end comes first, and its callers catch the failure itself (`Refused`,
`PeerUnreachable`). So these helpers end what is left, and raise what the work raised.

A failure that nobody can catch any more, because the work of its task has been given up or runs in
the background, goes to the event loop's exception handler, which logs it at once. A broken link is
no such failure: links of work that ends are expected to break.

Cancelled work may refuse to end. `end` and `close` wait `ENDING_S` for it; then they log its name
and leave it, because a shutdown that hangs is of no use.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Self, TypeVar

from atoll.dht.transport import TransportError

logger = logging.getLogger(__name__)

ENDING_S = 30.0  # a cancelled peer may still wait 10 s for a last vote and 13 s for goodbyes
RESTART_S = 1.0  # pause before failed work restarts, so that a permanent fault does not spin

T = TypeVar("T")

Work = Coroutine[Any, Any, T]


@asynccontextmanager
async def beside(*work: Work[Any]) -> AsyncIterator[None]:
    """Run helpers during a block, and end them with it.

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


async def together(*work: Work[T]) -> list[T]:
    """Return all results in order; the first failure ends the others, and is raised."""
    parts: list[asyncio.Task[T]] = []
    try:
        async with asyncio.TaskGroup() as group:
            parts.extend(group.create_task(each) for each in work)
    except BaseExceptionGroup as failures:
        parts.clear()  # a task holds its failure, whose traceback holds this frame
        for failure in failures.exceptions[1:]:
            _report(failure)
        raise failures.exceptions[0] from None
    return [part.result() for part in parts]


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


async def end(
    *tasks: asyncio.Task[Any],
    expected: tuple[type[Exception], ...] = (),
    timeout_s: float = ENDING_S,
) -> None:
    """Cancel tasks and wait until they have ended; report their failures but expected ones.

    A task that has not ended after `timeout_s` is logged and left; it reports its failure later.
    """
    for task in tasks:
        task.add_done_callback(partial(_report_failure, expected=expected))
    await _cancel(tasks, timeout_s)


class Tasks:
    """Owns work in the background; also a context that closes it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def spawn(self, work: Work[T]) -> asyncio.Task[T]:
        """Begin work that runs until it is done or `close` ends it.

        Its failure is reported unless a caller awaits the task, in which case both learn of it.
        """
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def cancel(self) -> None:
        """Cancel all of it without waiting."""
        for task in self._tasks:
            task.cancel()

    async def close(self, timeout_s: float = ENDING_S) -> None:
        """End all of it but the caller's own task; log and leave what resists for `timeout_s`."""
        await _cancel(self._tasks - {asyncio.current_task()}, timeout_s)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        _report_failure(task)


class KeptTasks:
    """Owns background work in which no failure ends another; open it with `async with`.

    A peer runs unattended for weeks, so a fault in its heartbeats must not end its rounds: every
    exception is logged where it happens, and work that must not end starts again.
    """

    def __init__(self, on_restart: Callable[[str], None]) -> None:
        """Report to `on_restart` why work that must not end starts again."""
        self._on_restart = on_restart
        self._tasks = Tasks()
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def spawn(self, work: Callable[..., Coroutine[Any, Any, object]], *arguments: object) -> None:
        """Run `work` once, in the background; not at all after `close`.

        It takes a function: a coroutine that never begins would warn that nobody awaits it.
        """
        if not self._closed:
            self._tasks.spawn(self._logged(work, *arguments))

    def keep(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `work` until `close`; start it again whenever it fails."""
        self.spawn(self._restarted, work)

    async def close(self, timeout_s: float = ENDING_S) -> None:
        """Cancel all work and wait for it; log and leave what resists for `timeout_s`."""
        self._closed = True
        await self._tasks.close(timeout_s)

    async def _logged(self, work: Callable[..., Awaitable[object]], *arguments: object) -> None:
        try:
            await work(*arguments)
        except Exception:
            logger.exception("%s failed", work.__qualname__)

    async def _restarted(self, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await work()
            except Exception as error:
                logger.exception("%s failed", work.__qualname__)
                self._on_restart(f"{work.__qualname__} failed and restarts: {error!r}")
            await asyncio.sleep(RESTART_S)


async def _cancel(tasks: Collection[asyncio.Task[Any]], timeout_s: float) -> None:
    """Cancel tasks and wait for them; log those that are left after `timeout_s`.

    The caller's own cancellation is passed on to them and raised once they have ended, as
    `asyncio.gather` does; `asyncio.wait` alone would leave them running without an owner.
    """
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    is_interrupted = False
    left = set(tasks)
    for task in left:
        task.cancel()
    while left and (left_s := deadline_s - loop.time()) > 0:
        try:
            _, left = await asyncio.wait(left, timeout=left_s)
        except asyncio.CancelledError:
            is_interrupted = True
            for task in left:
                task.cancel()
    for task in left:
        if not task.done():
            logger.error(
                "%s has not ended %g s after it was cancelled; leaving it", _name(task), timeout_s
            )
    if is_interrupted:
        # A new one: an error kept here would hold this frame, and the frame the error.
        raise asyncio.CancelledError


def _name(task: asyncio.Task[Any]) -> str:
    return f"{getattr(task.get_coro(), '__qualname__', 'a task')} ({task.get_name()})"


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
