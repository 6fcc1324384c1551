"""The transport-independent half of a stream: message order, ends and refusals at one side.

What carries it subclasses `StreamEnd`, writes what `_write` is given, and reports what arrives
through the `on_` methods, in order.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Coroutine
from enum import IntEnum
from types import TracebackType
from typing import Self, TypeVar

from atoll.dht.transport import (
    MAX_MESSAGE_BYTES,
    DeadlineExceeded,
    PeerUnreachable,
    TransportError,
    checked_size,
)

T = TypeVar("T")


class Mark(IntEnum):
    """The kind of a stream's frame."""

    OPEN = 1
    DATA = 2
    END = 3
    """The sender will send nothing more."""
    CLOSE = 4
    """The sender will neither send nor read any more."""
    REFUSED = 5


async def within(work: Coroutine[None, None, T], timeout_s: float, what: str, peer: str) -> T:
    """Return the result of `work`, or raise DeadlineExceeded."""
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except TransportError:
        raise
    except TimeoutError:
        text = f"{what} with {peer}: not done in {timeout_s:g} s"
        raise DeadlineExceeded(text, peer=peer) from None
    finally:
        work.close()


class StreamEnd(ABC):
    """One end of a `Stream`, without what carries it."""

    max_message_bytes = MAX_MESSAGE_BYTES

    def __init__(self, remote: str, method: str) -> None:
        self.remote = remote
        self.method = method
        self._inbox: deque[bytes] = deque()
        self._error: TransportError | None = None
        self._peer_ended = self._peer_closed = False
        self._ended = self._closed = False
        self._wakers: list[asyncio.Future[None]] = []

    # The carrier

    @abstractmethod
    async def _write(self, mark: Mark, data: bytes | bytearray | memoryview) -> None:
        """Send a frame; return once it has left."""

    @abstractmethod
    def _taken(self, num_bytes: int) -> None:
        """Note that the reader has taken a message of this size."""

    @abstractmethod
    async def _shut(self) -> None:
        """Send CLOSE and release the carrier; never raise."""

    async def _within(self, work: Coroutine[None, None, T], timeout_s: float, what: str) -> T:
        return await within(work, timeout_s, f"{what} on {self.method}", self.remote)

    # Stream

    async def send(self, data: bytes | bytearray | memoryview, *, timeout_s: float) -> None:
        """Send one message."""
        checked_size("a message", len(data), self.max_message_bytes)
        await self._within(self._send(data), timeout_s, "send")

    async def recv(self, *, timeout_s: float) -> bytes | None:
        """Return the next message, or None at the end."""
        return await self._within(self._recv(), timeout_s, "recv")

    async def end(self, *, timeout_s: float) -> None:
        """End this side; receiving continues."""
        if not self._ended:
            await self._within(self._end(), timeout_s, "end")

    async def close(self) -> None:
        """Close both directions."""
        if not self._closed:
            self._closed = self._ended = True
            self._inbox.clear()
            self._wake()
            await self._shut()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _send(self, data: bytes | bytearray | memoryview) -> None:
        self._check_sendable()
        await self._write(Mark.DATA, data)

    def _check_sendable(self) -> None:
        if self._ended:
            text = f"stream {self.method} was ended here; nothing more can be sent"
            raise TransportError(text, peer=self.remote)
        if self._error:
            raise self._error
        if self._peer_closed:
            text = f"{self.remote} has closed stream {self.method}"
            raise PeerUnreachable(text, peer=self.remote)

    async def _recv(self) -> bytes | None:
        while not self._inbox:
            if self._closed:
                raise TransportError(f"stream {self.method} was closed here", peer=self.remote)
            if self._peer_ended:
                return None
            if self._error:
                raise self._error
            await self._change()
        data = self._inbox.popleft()
        self._taken(len(data))
        return data

    async def _end(self) -> None:
        self._check_sendable()
        self._ended = True
        await self._write(Mark.END, b"")

    async def _change(self) -> None:
        """Return when anything has changed at this end."""
        waker = asyncio.get_running_loop().create_future()
        self._wakers.append(waker)
        await waker

    def _wake(self) -> None:
        wakers, self._wakers = self._wakers, []
        for waker in wakers:
            if not waker.done():
                waker.set_result(None)

    # Arrivals, reported by the carrier

    def on_data(self, data: bytes) -> None:
        """Take a message; drop it if this end is closed."""
        if not self._closed:
            self._inbox.append(data)
            self._wake()

    def on_end(self) -> None:
        """Note that the other side will send nothing more."""
        self._peer_ended = True
        self._wake()

    def on_close(self) -> None:
        """Note that the other side will neither send nor read."""
        self._peer_closed = True
        if self._error is None:
            self._peer_ended = True
        self._wake()

    def on_error(self, error: TransportError) -> None:
        """Note that the other side refused or is gone."""
        self._error = self._error or error
        self._wake()

    def on_lost(self, error: TransportError) -> None:
        """Note that the carrier is gone, for the reason `error` unless the other side had ended."""
        if self._peer_ended:
            self.on_close()
        else:
            self.on_error(error)
