"""The methods that a peer serves: handlers by name, behind the admission check."""

from __future__ import annotations

import logging
from collections.abc import Callable

from atoll.dht.refusals import RefusalCode
from atoll.dht.transport import (
    MAX_CALL_BYTES,
    CallHandler,
    Check,
    Refused,
    Stream,
    StreamHandler,
    TransportError,
    checked_method,
    checked_size,
)

logger = logging.getLogger(__name__)


def log_failure(error: Exception) -> None:
    """Log an error that a handler should not have raised."""
    logger.error("a handler failed", exc_info=error)


class Handlers:
    """The methods of one peer.

    `on_failure` gets every error other than TransportError that a handler raises.
    """

    def __init__(self, check: Check, on_failure: Callable[[Exception], None]) -> None:
        self.check = check
        self.num_served = 0
        self.num_refused = 0
        self._on_failure = on_failure
        self._calls: dict[str, CallHandler] = {}
        self._streams: dict[str, StreamHandler] = {}

    def serve(self, method: str, handler: CallHandler) -> None:
        """Answer calls of `method` with `handler`."""
        self._calls[checked_method(method)] = handler

    def serve_stream(self, method: str, handler: StreamHandler) -> None:
        """Pass streams of `method` to `handler`."""
        self._streams[checked_method(method)] = handler

    async def answer(self, remote: str, method: str, body: bytes) -> bytes:
        """Answer a call of an admitted peer. Raises whatever the handler raises."""
        handler = self._calls.get(method)
        if handler is None:
            raise Refused(RefusalCode.UNKNOWN_METHOD, f"this peer serves no calls of {method}")
        reply = await handler(remote, body)
        checked_size("an answer", len(reply), MAX_CALL_BYTES)
        self.num_served += 1
        return bytes(reply)

    async def run(self, stream: Stream) -> None:
        """Run the handler of an admitted peer's stream. Raises whatever it raises."""
        handler = self._streams.get(stream.method)
        if handler is None:
            raise Refused(
                RefusalCode.UNKNOWN_METHOD, f"this peer serves no streams of {stream.method}"
            )
        await handler(stream.remote, stream)

    def refusal(self, error: Exception, me: str) -> Refused:
        """Return the refusal to send when a handler of the peer `me` raises `error`."""
        self.num_refused += 1
        if isinstance(error, Refused):
            return Refused(error.code, error.message, peer=me)
        if not isinstance(error, TransportError):
            self._on_failure(error)
        return Refused(RefusalCode.INTERNAL, f"{type(error).__name__} in the handler", peer=me)
