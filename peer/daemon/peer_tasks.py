"""The background tasks of a peer: one `asyncio.TaskGroup` owns them all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

RESTART_S = 1.0  # pause before a failed task restarts, so that a permanent fault does not spin

_log = logging.getLogger(__name__)


class PeerTasks:
    """A task group in which the failure of one task ends no other; open it with `async with`.

    A peer runs unattended for weeks, so a fault in its heartbeats must not end its rounds: every
    exception is logged where it happens, and work that must not end starts again.
    """

    def __init__(self, on_restart: Callable[[str], None]) -> None:
        """Report to `on_restart` why work that must not end starts again."""
        self._on_restart = on_restart
        self._group = asyncio.TaskGroup()
        self._running: set[asyncio.Task[None]] = set()
        self._ended = False

    async def __aenter__(self) -> PeerTasks:
        """Open the group."""
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        """Cancel what still runs and wait for it.

        The group does not see the block's own error, which it would wrap in an `ExceptionGroup`:
        callers catch `CoordinatorError` and its like.
        """
        self._cancel()
        await self._group.__aexit__(None, None, None)

    def spawn(self, work: Callable[..., Coroutine[Any, Any, object]], *arguments: object) -> None:
        """Run `work` once, in the background; not at all after `end`."""
        if self._ended:
            return
        task = self._group.create_task(self._logged(work, *arguments))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def keep(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `work` until `end`; start it again whenever it fails."""
        self.spawn(self._restarted, work)

    async def end(self, timeout_s: float) -> None:
        """Cancel all tasks and wait for them, at most `timeout_s`."""
        self._cancel()
        if self._running:
            await asyncio.wait(set(self._running), timeout=timeout_s)

    def _cancel(self) -> None:
        self._ended = True
        for task in self._running:
            task.cancel()

    async def _logged(self, work: Callable[..., Awaitable[object]], *arguments: object) -> None:
        try:
            await work(*arguments)
        except Exception:
            _log.exception("%s failed", work.__qualname__)

    async def _restarted(self, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await work()
            except Exception as error:
                _log.exception("%s failed", work.__qualname__)
                self._on_restart(f"{work.__qualname__} failed and restarts: {error!r}")
            await asyncio.sleep(RESTART_S)
