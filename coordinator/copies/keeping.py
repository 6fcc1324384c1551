"""Copies of a coordinator that runs: one after another, in a thread that nothing waits for.

A target that fails is tried again, ever more rarely, and reported; the run goes on. A back end may
hang without an end, so the thread is a daemon: what it takes too long for is reported as well, and
the process ends without it.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from atoll.coordinator import notices
from atoll.coordinator.copies.target import NotOurs, Superseded, TargetFailed, reason
from atoll.coordinator.copies.writing import CopyWriter, WrittenCopy
from atoll.coordinator.run.notice import Report
from atoll.coordinator.run.status import CopyStatus
from atoll.dht.tasks import together
from atoll.optim.log.store_errors import StoreError

EVERY_S = 10.0  # what a lost machine costs, if copies are quick; some 8 requests to a bucket
SHARE = 0.25  # of the time, that uploads may take: the link is the peers' too
LOOK_S = 20.0  # a restored coordinator opens no epoch for 60 s: by then the old one has ended
LONGEST_S = 600.0  # between two tries of a target that fails
STUCK_S = 120.0  # without progress: the target does not answer
LAST_S = 20.0  # for a last copy when the coordinator stops; a service manager waits 90 s

log = logging.getLogger(__name__)

T = TypeVar("T")


class Copies:
    """Keeps the copies of one run current. Times of `status` are seconds since 1970."""

    def __init__(
        self,
        writer: CopyWriter,
        report: Report,
        *,
        every_s: float = EVERY_S,
        look_s: float = LOOK_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Keep what `writer` writes; `report` logs an event of the run."""
        self._writer = writer
        self._report = report
        self._every_s = every_s
        self._look_s = look_s
        self._clock = clock
        self._failures = 0
        self._took_s = 0.0
        self._working: asyncio.Future[WrittenCopy] | None = None
        self._is_pruned = True
        self.status = CopyStatus()

    async def run(self) -> None:
        """Copy until cancelled.

        Raises:
            Superseded: the run was restored elsewhere.
        """
        await together(self._copy_on(), self._look_on())

    async def _look_on(self) -> None:
        """Look whether the run was restored elsewhere, however long a copy or a pause takes."""
        while True:
            await asyncio.sleep(self._look_s)
            with suppress(TargetFailed):  # copies fail as well then, and tell it
                await _in_thread(self._writer.expect_newest)

    async def _copy_on(self) -> None:
        while True:
            await self.copy()
            await asyncio.sleep(self._pause_s())

    async def close(self) -> None:
        """Write a last copy, unless the target fails or takes too long."""
        with suppress(TimeoutError, Superseded):
            async with asyncio.timeout(LAST_S):
                if self._working is not None:
                    await self._finished(self._working)
                await self.copy()

    async def copy(self) -> None:
        """Write one copy, if anything has changed; a failure is reported and noted.

        Raises:
            Superseded: the run was restored elsewhere.
        """
        started_s = time.monotonic()
        self._working = self._working or _in_thread(self._work)
        await self._finished(self._working)
        self._took_s = time.monotonic() - started_s

    async def _finished(self, working: asyncio.Future[WrittenCopy]) -> None:
        while not (await asyncio.wait({working}, timeout=self._every_s))[0]:
            if time.monotonic() - self._writer.moved_s > STUCK_S:
                self._note_failure("it does not answer", "copies: the target does not answer")
        self._working = None
        try:
            self._note(working.result())
        except Superseded:
            raise
        except (TargetFailed, NotOurs, StoreError, OSError, sqlite3.Error) as error:
            self._note_failure(reason(error), str(error))
        except Exception as error:  # a fault of ours must not end the run either
            log.exception("a copy failed")
            self._note_failure(type(error).__name__, str(error))

    def _work(self) -> WrittenCopy:
        self._writer.moved_s = time.monotonic()
        copied = self._writer.write()
        if copied.is_new or not self._is_pruned:
            self._is_pruned = False
            self._writer.prune()
            self._is_pruned = True
        return copied

    def _pause_s(self) -> float:
        if self._failures:
            return min(LONGEST_S, self._every_s * 2.0 ** min(self._failures, 16))
        return max(self._every_s, self._took_s * (1 / SHARE - 1))

    def _note(self, copied: WrittenCopy) -> None:
        position = min(copied.positions)
        if self._failures:
            self._report("info", notices.copies_recovered(round=position))
        elif self.status.at is None:
            self._report("info", notices.copies_begun(round=position))
        self._failures = 0
        self.status = CopyStatus(at=self._clock(), position=position)

    def _note_failure(self, why: str, full: str) -> None:
        self._failures += 1
        before = self.status
        if why != before.failing:
            # Events are for all peers to read; where copies go is not.
            log.warning("%s", full)
            self._report("warning", notices.copies_failing(reason=why))
        self.status = CopyStatus(
            at=before.at,
            position=before.position,
            failing=why,
            failing_since=before.failing_since or self._clock(),
        )


def _in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Begin work in a daemon thread; the pool's would be waited for when the process ends."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, failure: BaseException | None) -> None:
        if future.cancelled():
            return
        if failure is not None:
            future.set_exception(failure)
            future.exception()  # read: if nobody awaits it any more, nothing is to be said
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = work()
        except BaseException as error:
            failure = error
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="copies", daemon=True).start()
    return future
