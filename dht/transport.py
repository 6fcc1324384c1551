"""What peers say to each other with: calls and streams, over libp2p or in memory, with one face.

Every exchange opens with the caller's *admission* (opaque bytes, signed by the coordinator); the
called side hands it with the authenticated remote PeerID to its `check` before it reads anything
else.

Errors::

    TransportError                an exchange failed; `peer` says with whom
    ├── PeerUnreachable           no connection, or it ended without an end mark (the peer died)
    ├── DeadlineExceeded          nothing finished within `timeout_s` (also a TimeoutError)
    └── Refused                   the peer answered no: `code` for programs, `message` for people

A message that is too long, a wrong type or a stream used after its `close` is the caller's own
mistake and raises ValueError, TypeError or TransportError at the caller.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol, Self

from atoll.dht.refusals import RefusalCode

MAX_MESSAGE_BYTES = 1 << 20  # of a stream; 16 grid cells of int8, 84 ms at 100 Mbit/s
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
    """How a transport is. `source` says where the wire bytes come from."""

    wire_bytes_sent: int
    wire_bytes_received: int
    wire_bytes_delivered: int
    """Of those sent, what the other sides' systems have confirmed; all where that is not known."""
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
    """How often the daemon died and was started again."""


class Stream(Protocol):
    """A two-way sequence of messages of at most `MAX_MESSAGE_BYTES`; boundaries are kept.

    One task may send while another receives. What was sent before `close` still arrives.
    """

    remote: str
    method: str

    async def send(self, data: bytes | bytearray | memoryview, *, timeout_s: float) -> None:
        """Returns when the message has left for the peer; blocks while the peer does not keep up.

        After DeadlineExceeded the message may or may not arrive: close the stream.
        """
        ...

    async def recv(self, *, timeout_s: float) -> bytes | None:
        """The next message, or None when the peer has ended or closed its side.

        Raises PeerUnreachable when the peer dies before it says so, Refused when its handler does.
        After DeadlineExceeded nothing is lost: call again.
        """
        ...

    async def end(self, *, timeout_s: float) -> None:
        """Says that nothing more will be sent; receiving goes on."""
        ...

    async def close(self) -> None:
        """Ends both directions. Idempotent, never raises, returns soon."""
        ...

    async def __aenter__(self) -> Self:
        """The stream itself."""
        ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes the stream."""
        ...


CallHandler = Callable[[str, bytes], Awaitable[bytes]]
StreamHandler = Callable[[str, Stream], Awaitable[None]]
Check = Callable[[str, bytes], None]
"""`check(remote, credential)` returns, or raises Refused."""


def admit_everyone(remote: str, credential: bytes) -> None:
    """The `check` of an open run without admissions, and of tests."""


class Transport(Protocol):
    """One peer's way to all others. All coroutines run in the loop in which it was made."""

    @property
    def peer_id(self) -> str:
        """Our own PeerID in base58."""
        ...

    @property
    def addresses(self) -> list[str]:
        """Multiaddrs at which others may dial us."""
        ...

    admission: bytes
    """The credential that goes with every exchange; may be replaced when it is renewed."""

    async def call(self, peer: str, method: str, body: bytes, *, timeout_s: float) -> bytes:
        """One question, one answer, each of at most `MAX_CALL_BYTES`."""
        ...

    async def open(self, peer: str, method: str, *, timeout_s: float) -> Stream:
        """A new stream to the peer's handler of `method`.

        Does not wait for the handler: its refusal comes from the first `recv` or a later `send`.
        """
        ...

    def serve(self, method: str, handler: CallHandler) -> None:
        """Answers calls of `method` with what `handler(remote, body)` returns."""
        ...

    def serve_stream(self, method: str, handler: StreamHandler) -> None:
        """Runs `handler(remote, stream)` for every stream of `method`, and closes it then."""
        ...

    async def connect(self, peer: str, addresses: Sequence[str], *, timeout_s: float) -> None:
        """Makes sure of a connection. The lower PeerID of a pair dials, the other waits first.

        libp2p does not dial again within 5 s of a failure: allow 7 s or more.
        """
        ...

    def statistics(self) -> TransportStatistics:
        """Counters since the start."""
        ...

    async def close(self) -> None:
        """Ends all streams and handlers. Idempotent."""
        ...


def checked_method(method: str) -> str:
    """`method` if it may travel, else ValueError."""
    if not 0 < len(method) <= MAX_METHOD_CHARS or not method.isascii() or not method.isprintable():
        raise ValueError(
            f"method {method!r}: expected 1 to {MAX_METHOD_CHARS} printable ASCII characters"
        )
    return method


def checked_size(what: str, size: int, limit: int) -> int:
    """`size` if it is within `limit`, else ValueError."""
    if size > limit:
        raise ValueError(f"{what} of {size} bytes, at most {limit} can travel: split it")
    return size
