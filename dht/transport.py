"""Calls and streams between peers, with one interface over libp2p and in memory.

Every exchange opens with the caller's *admission* (opaque bytes, signed by the coordinator); the
called side passes it with the authenticated remote PeerID to its `check` before it reads anything
else.

Frame::

    mark u8 | length u32 big-endian | payload[length]

    OPEN     first frame of the opening side, and only that:
             version u8 = 1 | kind u8 (0 call, 1 stream) | n u8 | method[n] | admission[rest]
    DATA     one message: at most 1 MiB on a stream, 3 MiB in a call
    END      (empty) this side will send nothing more
    CLOSE    (empty) this side will neither send nor read
    REFUSED  n u8 | code[n] | message[rest], UTF-8, at most 1 KiB: the handler's refusal

A call is OPEN DATA one way and DATA or REFUSED the other. Lengths are checked against mark and kind
before memory is taken; anything unexpected ends the stream. A connection that ends before END,
CLOSE or REFUSED means that the peer died: p2pd ends streams in the same way whether a peer closed
them or was killed.

`Connection` splits a socket's bytes into frames. `StreamEnd` is independent of the transport: it
keeps order, ends and refusals at one side; a subclass carries what `_write` is given, and reports
arrivals through the `on_` methods, in order.

Errors::

    TransportError                an exchange with `peer` failed
    ├── PeerUnreachable           no connection, or it ended without an end mark (the peer died)
    │   └── RelayedStreamLost     such an end through a relay: perhaps only the relay died
    ├── DeadlineExceeded          nothing finished within `timeout_s` (also a TimeoutError)
    │   └── RelayedStreamSilent   such a wait on a stream through a relay: as for a lost one
    └── Refused                   the peer refused: `code` for programs, `message` for people
    FrameError (ValueError)       the bytes are not of this protocol

A message that is too long, a wrong type or a stream used after its `close` is the caller's own
mistake and raises ValueError, TypeError or TransportError at the caller.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType
from typing import Literal, Protocol, Self, TypeVar

from atoll.dht.refusals import RefusalCode

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 1 << 20  # of a stream; 16 chunks of int8, 84 ms at 100 Mbit/s
MAX_CALL_BYTES = 3 << 20  # of a call's body or reply
MAX_ADMISSION_BYTES = 4096  # read from strangers, before they are admitted
PING = "ping"  # a call that every peer answers, with nothing
MAX_METHOD_CHARS = 64  # one byte carries the length; names are a word


class TransportError(Exception):
    """An exchange with a peer failed."""

    def __init__(self, message: str, *, peer: str = "") -> None:
        """`peer` is the PeerID of the other side, if there is one."""
        super().__init__(message)
        self.peer = peer


class PeerUnreachable(TransportError):
    """No connection could be made, or it broke before the peer said that it had finished."""


class RelayedStreamLost(PeerUnreachable):
    """A stream through a relay broke: its peer may live, and be reached through another."""


class DeadlineExceeded(TransportError, TimeoutError):
    """An operation did not finish within its `timeout_s`."""


class RelayedStreamSilent(DeadlineExceeded):
    """A relay that dies with its machine breaks no stream: nothing comes any more."""


RELAY_LOST = (RelayedStreamLost, RelayedStreamSilent)
"""Perhaps only the relay is gone: the same peer may be reached through another."""


class Refused(TransportError):
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
    relayed_bytes: int = 0
    """Sent and received through third peers, before encryption."""


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


class Check(Protocol):
    """Judges the admissions of others; any thread may call it."""

    def __call__(self, remote: str, credential: bytes, /, use: str = "") -> float | None:
        """Return until when a peer is admitted, in seconds since 1970 by the run's clock.

        Args:
            remote: the authenticated PeerID.
            credential: that it presents.
            use: the method that it calls, or `record:ROLE` of its record; empty: any.

        Returns:
            The time; None: without an end.

        Raises:
            Refused: it is not admitted, or not for this use.
        """
        ...


def admit_everyone(remote: str, credential: bytes, /, use: str = "") -> None:
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
        self.serve(PING, _pong)

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
        # Checked here, so that an answer that is too long blames the handler and not the caller.
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
        # The kind alone: the text is for our own log, not for a stranger.
        return Refused(RefusalCode.INTERNAL, f"{type(error).__name__} in the handler", peer=me)


async def _pong(remote: str, body: bytes) -> bytes:
    return b""


T = TypeVar("T")

VERSION = 1  # of these frames; part of the protocol's name, so versions never meet
CALL, STREAM = 0, 1
HEADER_BYTES = 5  # mark and length
MAX_OPEN_BYTES = 3 + MAX_METHOD_CHARS + MAX_ADMISSION_BYTES
MAX_REFUSAL_BYTES = 1024  # a sentence for a log; a stranger writes it
MAX_CODE_BYTES = 64  # every `RefusalCode` fits; longer words are cut
SCRATCH_BYTES = 1 << 14  # longer payloads are read straight into their own memory
# Memory that a header alone obtains; it doubles as bytes arrive. Five bytes that announce 3 MiB
# must not cost 3 MiB: 256 streams of one member took 770 MB.
FIRST_BYTES = 1 << 16
WRITE_WINDOW_BYTES = 1 << 18  # unsent bytes after which `send` waits


class Mark(IntEnum):
    """The kind of a stream's frame."""

    OPEN = 1
    DATA = 2
    END = 3
    """The sender will send nothing more."""
    CLOSE = 4
    """The sender will neither send nor read any more."""
    REFUSED = 5


class FrameError(ValueError):
    """The bytes are not of this protocol."""


class Sink(Protocol):
    """Receives frames and limits their lengths."""

    def max_payload(self, mark: Mark) -> int:
        """Return the longest payload this mark may have. Raises FrameError if it is out of turn."""
        ...

    def claim(self, num_bytes: int) -> None:
        """Account for memory of a frame that is arriving. Raises FrameError if it is too much."""
        ...

    def release(self, num_bytes: int) -> None:
        """Give back what a frame has claimed; it is complete, or its connection is lost."""
        ...

    def on_frame(self, mark: Mark, payload: bytes) -> None:
        """Take a whole frame."""
        ...

    def on_connection_lost(self, error: Exception | None) -> None:
        """Note that no more frames will come or go."""
        ...

    def on_writable(self) -> None:
        """Note that `Connection.is_full` became False."""
        ...


class FrameReader:
    """Splits arriving bytes into frames; memory follows the bytes, not the announced length."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._scratch = bytearray(SCRATCH_BYTES)
        self._header = bytearray()
        self._mark = Mark.OPEN
        self._pieces: list[bytearray] = []
        """memory of the payload so far; all but the last are full"""
        self._filled = 0
        """bytes of the last piece that have arrived"""
        self._claimed = 0
        """bytes of all pieces"""
        self._length = 0
        """bytes of the payload once it is complete"""
        self.is_stopped = False
        """True once further input is unwanted."""

    def get_buffer(self) -> memoryview:
        """Return where the next bytes go: a long payload's own memory, or the scratch."""
        if self._room() > SCRATCH_BYTES:
            return memoryview(self._pieces[-1])[self._filled :]
        return memoryview(self._scratch)

    def updated(self, num_bytes: int) -> None:
        """Take `num_bytes` from the last buffer. Raises FrameError."""
        if self._room() > SCRATCH_BYTES:
            self._filled += num_bytes  # asyncio has read into the payload itself: no copy
            self._grow_or_finish()
        else:
            self.feed(memoryview(self._scratch)[:num_bytes])

    def drop(self) -> None:
        """Forget a frame that will never be complete."""
        if self._pieces:
            self._sink.release(self._claimed)
            self._pieces = []

    def _room(self) -> int:
        return len(self._pieces[-1]) - self._filled if self._pieces else 0

    def feed(self, data: memoryview) -> None:
        """Take bytes from anywhere. Raises FrameError."""
        while data and not self.is_stopped:
            data = self._feed_payload(data) if self._pieces else self._feed_header(data)

    def _feed_header(self, data: memoryview) -> memoryview:
        missing = HEADER_BYTES - len(self._header)
        self._header += data[:missing]
        if len(self._header) == HEADER_BYTES:
            self._begin(self._header[0], int.from_bytes(self._header[1:]))
            self._header.clear()
        return data[missing:]

    def _begin(self, mark: int, length: int) -> None:
        try:
            self._mark = Mark(mark)
        except ValueError:
            raise FrameError(f"mark {mark}, expected {[int(m) for m in Mark]}") from None
        limit = self._sink.max_payload(self._mark)
        if length > limit:
            raise FrameError(f"{self._mark.name} of {length} bytes, at most {limit} are allowed")
        self._claimed, self._length = 0, length
        self._add_piece(min(length, FIRST_BYTES))
        self._grow_or_finish()

    def _add_piece(self, num_bytes: int) -> None:
        self._sink.claim(num_bytes)
        self._pieces.append(bytearray(num_bytes))
        self._filled = 0
        self._claimed += num_bytes

    def _feed_payload(self, data: memoryview) -> memoryview:
        taken = data[: self._room()]
        self._pieces[-1][self._filled : self._filled + len(taken)] = taken
        self._filled += len(taken)
        self._grow_or_finish()
        return data[len(taken) :]

    def _grow_or_finish(self) -> None:
        if self._room():
            return
        if self._claimed < self._length:  # as much again as has arrived
            self._add_piece(min(self._length - self._claimed, self._claimed))
            return
        pieces, self._pieces = self._pieces, []
        self._sink.release(self._claimed)
        self._sink.on_frame(self._mark, b"".join(pieces))


class Connection(asyncio.BufferedProtocol):
    """A socket of p2pd that carries frames to a sink."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._reader = FrameReader(sink)
        self._transport: asyncio.Transport | None = None
        self._is_lost = False
        self.is_full = False
        self.is_paused = False

    @property
    def is_wanted(self) -> bool:
        """False after `ignore_input`."""
        return not self._reader.is_stopped

    @property
    def is_made(self) -> bool:
        """True once it owns its socket."""
        return self._transport is not None

    @property
    def is_open(self) -> bool:
        """True until either side has ended it."""
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep asyncio's transport."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=WRITE_WINDOW_BYTES, low=WRITE_WINDOW_BYTES // 2)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for asyncio to fill."""
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """Parse what asyncio read."""
        try:
            if not self._reader.is_stopped:
                self._reader.updated(nbytes)
        except FrameError as error:
            self._fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the end to the sink."""
        self._is_lost, self.is_full = True, False
        self._reader.drop()
        self._sink.on_connection_lost(exc)
        self._sink.on_writable()  # a sender that waits for room must learn that none will come

    def pause_writing(self) -> None:
        """Note that unsent bytes exceed the write window."""
        self.is_full = True

    def resume_writing(self) -> None:
        """Note that the write window has room again."""
        self.is_full = False
        self._sink.on_writable()

    def write(self, mark: Mark, payload: bytes | bytearray | memoryview = b"") -> None:
        """Send a frame; the caller waits while `is_full`."""
        if self._transport is not None and self.is_open:
            header = bytes([mark]) + len(payload).to_bytes(4)
            if len(payload) < SCRATCH_BYTES:
                self._transport.write(header + payload)
            else:
                self._transport.writelines((header, payload))  # p2pd sends at once what it reads

    def pause_reading(self, pause: bool) -> None:
        """Stop or resume taking bytes from p2pd."""
        if self._transport is not None and self.is_open and pause != self.is_paused:
            self.is_paused = pause
            (self._transport.pause_reading if pause else self._transport.resume_reading)()

    def ignore_input(self) -> None:
        """Ignore further input; continue to read only to notice the end."""
        self._reader.is_stopped = True

    def close(self) -> None:
        """Close the socket once everything written has left."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the socket now; do nothing if it has ended, when asyncio's transport may raise."""
        if self._transport is not None and not self._is_lost:
            self._transport.abort()

    def _fail(self, error: FrameError) -> None:
        # Not answered: after a broken frame nothing says where the next one begins.
        self.abort()
        self._sink.on_connection_lost(error)


def encode_open(*, is_call: bool, method: str, admission: bytes) -> bytes:
    """Return the payload of OPEN."""
    checked_size("an admission", len(admission), MAX_ADMISSION_BYTES)
    name = method.encode("ascii")
    return bytes([VERSION, CALL if is_call else STREAM, len(name)]) + name + admission


def decode_open(payload: bytes) -> tuple[bool, str, bytes]:
    """Decode OPEN to (is it a call, method, admission). Raises FrameError."""
    if len(payload) < 3 or payload[0] != VERSION or payload[1] not in (CALL, STREAM):
        raise FrameError(
            f"OPEN of another protocol version, expected {VERSION}: {payload[:3].hex()}"
        )
    end = 3 + payload[2]
    method = payload[3:end]
    if len(payload) < end or not method or not method.isascii():
        raise FrameError("OPEN with a broken method name")
    text = method.decode("ascii")
    if len(text) > MAX_METHOD_CHARS or not text.isprintable():
        raise FrameError("OPEN with a broken method name")
    if len(payload) - end > MAX_ADMISSION_BYTES:
        raise FrameError(f"OPEN with an admission of more than {MAX_ADMISSION_BYTES} bytes")
    return payload[1] == CALL, text, payload[end:]


def encode_refusal(error: Refused) -> bytes:
    """Return the payload of REFUSED, shortened to fit."""
    code = error.code.encode()[:MAX_CODE_BYTES]
    text = error.message.encode()[: MAX_REFUSAL_BYTES - 1 - len(code)]
    return bytes([len(code)]) + code + text


def decode_refusal(payload: bytes, peer: str) -> Refused:
    """Decode REFUSED; replace anything unreadable in it.

    A code that this version does not list becomes `RefusalCode.UNKNOWN`, its word part of the text.
    """
    end = 1 + (payload[0] if payload else 0)
    word = _printable(payload[1:end][:MAX_CODE_BYTES])
    code, text = RefusalCode.read(word), _printable(payload[end:])
    if code is RefusalCode.UNKNOWN and word not in ("", code):
        text = f"{word}: {text}"
    return Refused(code, text, peer=peer)


def _printable(data: bytes) -> str:
    return "".join(c if c.isprintable() else "?" for c in data.decode(errors="replace"))


async def within(work: Coroutine[None, None, T], timeout_s: float, what: str, peer: str) -> T:
    """Return the result of `work`, or raise DeadlineExceeded."""
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except TransportError:
        raise  # DeadlineExceeded is a TimeoutError too, and names its own exchange
    except TimeoutError:
        text = f"{what} with {peer}: not done in {timeout_s:g} s"
        raise DeadlineExceeded(text, peer=peer) from None
    finally:
        work.close()  # cancelled before its first step, it would warn that nobody awaits it


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
        if self._inbox:  # no timer for what needs no wait: it costs as much as a message
            return self._take()
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
            # Messages that arrived come before an end, and a clean end before a later break.
            if self._closed:
                raise TransportError(f"stream {self.method} was closed here", peer=self.remote)
            if self._peer_ended:
                return None
            if self._error:
                raise self._error
            await self._change()
        return self._take()

    def _take(self) -> bytes:
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
        if self._error is None:  # a refusal is followed by CLOSE; the reader must see the refusal
            self._peer_ended = True
        self._wake()

    def on_error(self, error: TransportError) -> None:
        """Note that the other side refused or is gone."""
        self._error = self._error or error  # the first is the cause, the others follow from it
        self._wake()

    def on_lost(self, error: TransportError) -> None:
        """Note that the carrier is gone, for the reason `error` unless the other side had ended."""
        if self._peer_ended:
            self.on_close()
        else:
            self.on_error(error)
