"""A thread with an event loop, in which one async context stays open."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent import futures
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, suppress
from typing import Generic, TypeVar

CLOSE_S = 20.0  # a peer that leaves waits 10 s for a last vote, 3 s and twice 5 s for goodbyes
POLL_S = 0.1  # until a Ctrl-C during the start is noticed
ASK_S = 60.0  # for a question that the loop answers at once, unless the machine is suspended

T = TypeVar("T")
R = TypeVar("R")

_log = logging.getLogger(__name__)


class LoopThread(Generic[T]):
    """The thread in which a peer's event loop runs; the trainer's reducer owns it.

    `value` is what the context gave. It belongs to the loop: the methods below are the only ways
    across, besides reads of single attributes.
    """

    def __init__(
        self,
        context: AbstractAsyncContextManager[T],
        stopping: threading.Event | None = None,
        *,
        timeout_s: float = math.inf,
    ) -> None:
        """Start the thread, and return once the context is entered.

        Args:
            context: entered and left in the loop.
            stopping: ends the wait, from another thread or a signal handler.
            timeout_s: seconds for which to wait.

        Raises:
            KeyboardInterrupt: `stopping` was set while the context was being entered.
            TimeoutError: entering took longer.
            Exception: whatever entering raised.
        """
        self.stopping = stopping or threading.Event()
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._entered: Future[T] = Future()
        self._failure: Exception | None = None
        # No `Tasks`: it begins before the loop runs, and `close` ends it from another thread, with
        # its own deadline.
        self._holding = self._loop.create_task(self._hold(context))
        self._thread = threading.Thread(target=self._run, name="atoll-peer", daemon=True)
        self._thread.start()
        end_s = time.monotonic() + timeout_s
        try:
            while not self._entered.done():
                if self.stopping.is_set():
                    raise KeyboardInterrupt
                if time.monotonic() > end_s:
                    raise TimeoutError(f"not ready after {timeout_s:g} s")
                futures.wait([self._entered], timeout=POLL_S)
            self.value = self._entered.result()
        except BaseException:
            self.close()
            raise

    def ask(self, function: Callable[[], R]) -> R:
        """Call a function in the loop and return its result."""

        async def call() -> R:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(timeout=ASK_S)

    def run(self, coroutine: Coroutine[None, None, R], *, timeout_s: float) -> R:
        """Await a coroutine in the loop and return its result.

        Raises:
            TimeoutError: it took longer.
            Exception: whatever it raised.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout=timeout_s)
        except TimeoutError:
            future.cancel()
            raise

    def post(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function in the loop, without waiting for it.

        Raises:
            RuntimeError: the loop has ended.
        """
        self._loop.call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        """Leave the context and end the thread. Idempotent.

        Raises:
            Exception: whatever leaving raised.
        """
        with suppress(RuntimeError):  # the loop has ended already, as after a failure to enter
            self.post(self._end)
        self._thread.join(timeout=CLOSE_S)
        if self._thread.is_alive():
            _log.warning("the peer did not leave within %.0f s; cancelling", CLOSE_S)
            self.post(self._holding.cancel)
            self._thread.join(timeout=CLOSE_S)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _run(self) -> None:
        async def wait() -> None:
            await self._holding

        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(wait())

    def _end(self) -> None:
        """Leave; if the context is still being entered, abandon that."""
        if self._entered.done():
            self._closing.set()
        else:
            self._holding.cancel()

    async def _hold(self, context: AbstractAsyncContextManager[T]) -> None:
        # Never raises: the failure belongs to the thread that waits in `__init__` or `close`.
        try:
            async with context as value:
                self._entered.set_result(value)
                await self._closing.wait()
        except BaseException as error:
            if not self._entered.done():
                self._entered.set_exception(error)
            elif isinstance(error, Exception):
                self._failure = error
