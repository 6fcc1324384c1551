"""Calls and streams between peers, with one interface over libp2p and in memory.

Every exchange opens with the caller's *admission* (opaque bytes, signed by the coordinator); the
called side passes it with the authenticated remote PeerID to its `check` before it reads anything
else.

Errors::

    TransportError                an exchange with `peer` failed
    ├── PeerUnreachable           no connection, or it ended without an end mark (the peer died)
    ├── DeadlineExceeded          nothing finished within `timeout_s` (also a TimeoutError)
    └── Refused                   the peer refused: `code` for programs, `message` for people

A message that is too long, a wrong type or a stream used after its `close` is the caller's own
mistake and raises ValueError, TypeError or TransportError at the caller.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol, Self

from atoll.dht.refusals import RefusalCode

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 1 << 20  # of a stream; 16 chunks of int8, 84 ms at 100 Mbit/s
MAX_CALL_BYTES = 3 << 20  # of a call's body or reply
MAX_ADMISSION_BYTES = 4096
MAX_METHOD_CHARS = 64


class TransportError(Exception):
    """An exchange with a peer failed."""

    def __init__(self, message: str, *, peer: str = "") -> None:
        """`peer` is the PeerID of the other side, if there is one."""
        super().__init__(message)
        self.peer = peer


class PeerUnreachable(TransportError):  # noqa: N818 - a state of the peer
    """No connection could be made, or it broke before the peer said that it had finished."""


class DeadlineExceeded(TransportError, TimeoutError):  # noqa: N818
    """An operation did not finish within its `timeout_s`."""


class Refused(TransportError):  # noqa: N818
    """The other side answered no. A handler raises it to answer with a status."""

    def __init__(self, code: RefusalCode, message: str, *, peer: str = "") -> None:
        """`code` is for programs; `message` states expected, got and remedy."""
        super().__init__(f"{code}: {message}", peer=peer)
        self.code = code
        self.message = message


@dataclass(frozen=True, kw_only=True)
class TransportStatistics:
    """A transport's counters. `source` names where the wire bytes come from."""

    wire_bytes_sent: int
    wire_bytes_received: int
    wire_bytes_delivered: int
    """Bytes sent that the receiving systems have confirmed; all, if that is not known."""
    source: Literal["tcp", "application", "memory"]
    """tcp: counted by the kernel; application: frames given to the daemon; memory: in-process."""
    messages_sent: int = 0
    messages_received: int = 0
    calls_made: int = 0
    calls_served: int = 0
    refused: int = 0
    """Exchanges that this side refused."""
    streams_open: int = 0
    restarts: int = 0
    """Number of times the daemon died and was restarted."""


class Stream(Protocol):
    """A two-way sequence of messages of at most `MAX_MESSAGE_BYTES`; boundaries are kept.

    One task may send while another receives. What was sent before `close` still arrives.
    """

    remote: str
    method: str

    async def send(self, data: bytes | bytearray | memoryview, *, timeout_s: float) -> None:
        """Send a message; block while the peer does not keep up, and return once it has left.

        After DeadlineExceeded the message may or may not arrive: close the stream.
        """
        ...

    async def recv(self, *, timeout_s: float) -> bytes | None:
        """Return the next message, or None when the peer has ended or closed its side.

        Raises PeerUnreachable when the peer dies before it says so, Refused when its handler does.
        After DeadlineExceeded nothing is lost: call again.
        """
        ...

    async def end(self, *, timeout_s: float) -> None:
        """Announce that nothing more will be sent; receiving continues."""
        ...

    async def close(self) -> None:
        """End both directions. Idempotent, never raises, returns soon."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


CallHandler = Callable[[str, bytes], Awaitable[bytes]]
StreamHandler = Callable[[str, Stream], Awaitable[None]]
Check = Callable[[str, bytes], None]
"""`check(remote, credential)` returns, or raises Refused."""


def admit_everyone(remote: str, credential: bytes) -> None:
    """Admit every peer: the `check` of tests and of runs without admissions."""


class Transport(Protocol):
    """One peer's connections to all others, in the event loop in which it was created."""

    @property
    def peer_id(self) -> str:
        """This peer's PeerID in base58."""
        ...

    @property
    def addresses(self) -> list[str]:
        """Multiaddrs at which others can dial this peer."""
        ...

    admission: bytes
    """The credential sent with every exchange; replaced when it is renewed."""

    async def call(self, peer: str, method: str, body: bytes, *, timeout_s: float) -> bytes:
        """Send a request and return its answer, each of at most `MAX_CALL_BYTES`."""
        ...

    async def open(self, peer: str, method: str, *, timeout_s: float) -> Stream:
        """Open a stream to the peer's handler of `method`.

        Does not wait for the handler: its refusal comes from the first `recv` or a later `send`.
        """
        ...

    def serve(self, method: str, handler: CallHandler) -> None:
        """Answer calls of `method` with the result of `handler(remote, body)`."""
        ...

    def serve_stream(self, method: str, handler: StreamHandler) -> None:
        """Run `handler(remote, stream)` for every stream of `method`; close the stream after it."""
        ...

    async def connect(self, peer: str, addresses: Sequence[str], *, timeout_s: float) -> None:
        """Ensure a connection. The lower PeerID of a pair dials; the other waits first.

        libp2p does not dial again within 5 s of a failure: allow 7 s or more.
        """
        ...

    def statistics(self) -> TransportStatistics:
        """Return the counters since the start."""
        ...

    async def close(self) -> None:
        """End all streams and handlers. Idempotent."""
        ...


def checked_method(method: str) -> str:
    """Return `method` if its name is valid. Raises ValueError."""
    if not 0 < len(method) <= MAX_METHOD_CHARS or not method.isascii() or not method.isprintable():
        raise ValueError(
            f"method {method!r}: expected 1 to {MAX_METHOD_CHARS} printable ASCII characters"
        )
    return method


def checked_size(what: str, size: int, limit: int) -> int:
    """Return `size` if it is within `limit`. Raises ValueError."""
    if size > limit:
        raise ValueError(f"{what} of {size} bytes is too long; split it into at most {limit} bytes")
    return size


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
