"""Two ends of a stream within one process: a leader is a member of its own group too."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from atoll.dht.transport import DeadlineExceeded, Refused

Queue = asyncio.Queue[bytes | Refused | None]


class LocalStream:
    """One end of a stream from a peer to itself, as `atoll.dht.transport.Stream` has it."""

    def __init__(
        self,
        remote: str,
        method: str,
        inbox: Queue,
        outbox: Queue,
    ) -> None:
        """Use `stream_pair` instead."""
        self.remote = remote
        self.method = method
        self._inbox = inbox
        self._outbox = outbox
        self._ended = False

    async def send(self, data: bytes | bytearray | memoryview, *, timeout_s: float) -> None:
        """Never blocks: the other end is in this process."""
        self._outbox.put_nowait(bytes(data))

    async def recv(self, *, timeout_s: float) -> bytes | None:
        """The next message, or None at the end."""
        try:
            async with asyncio.timeout(timeout_s):
                message = await self._inbox.get()
        except TimeoutError:
            raise DeadlineExceeded(f"no message for {timeout_s:.1f} s", peer=self.remote) from None

        if isinstance(message, Refused):
            raise message
        return message

    def refuse(self, error: Refused) -> None:
        """End the stream with a refusal, as a handler that raises it does."""
        self._outbox.put_nowait(error)

    async def end(self, *, timeout_s: float) -> None:
        """Say that nothing more will be sent."""
        if not self._ended:
            self._ended = True
            self._outbox.put_nowait(None)

    async def close(self) -> None:
        """End both directions."""
        await self.end(timeout_s=0)
        self._inbox.put_nowait(None)

    async def __aenter__(self) -> Self:
        """The stream."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        await self.close()


def stream_pair(peer: str, method: str) -> tuple[LocalStream, LocalStream]:
    """Two ends; what one sends the other receives."""
    first: Queue = asyncio.Queue()
    second: Queue = asyncio.Queue()
    return LocalStream(peer, method, first, second), LocalStream(peer, method, second, first)
