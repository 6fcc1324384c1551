"""One stream of libp2p: framed messages, with deadlines and a bounded window of unread ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TypeVar

from atoll.dht.arrivals import ArrivalMemory
from atoll.dht.transport import (
    HEADER_BYTES,
    MAX_CALL_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_OPEN_BYTES,
    MAX_REFUSAL_BYTES,
    Connection,
    DeadlineExceeded,
    FrameError,
    Mark,
    PeerUnreachable,
    Refused,
    RelayedStreamLost,
    RelayedStreamSilent,
    StreamEnd,
    checked_size,
    decode_open,
    decode_refusal,
    encode_open,
    encode_refusal,
)

T = TypeVar("T")
READ_WINDOW_BYTES = 2 << 20  # unread bytes after which reading from p2pd stops
CALL_REUSE_S = 20.0  # well before the other side stops waiting, and while an admission holds
MESSAGE_COST_BYTES = 64  # counted for an empty message, so that endless ones fill the window too
LINGER_S = 5.0  # for the other side to close; cutting earlier could lose what we sent last


class LibP2PStream(StreamEnd):
    """One end of a `Stream` over libp2p.

    `admit` judges the OPEN at the accepting side; it is None at the opening side.
    """

    def __init__(
        self,
        remote: str,
        method: str,
        *,
        is_call: bool,
        admit: Admit | None,
        memory: ArrivalMemory | None = None,
    ) -> None:
        super().__init__(remote, method)
        self._memory = memory or ArrivalMemory()
        self.connection = Connection(self)
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.admission = b""
        self.num_received = self.num_sent = 0
        self.bytes_received = self.bytes_sent = 0
        self.relay = ""
        """PeerID of the peer that carries it; empty if no peer does"""
        self.heard_s = 0.0
        self.on_gone: Callable[[LibP2PStream], None] = lambda stream: None
        self.on_silent_relay: Callable[[str], None] = lambda relay: None
        self.on_broken_relay: Callable[[str], None] = lambda relay: None
        self._admit = admit
        self._unread_bytes = 0
        self._is_lost = False
        self._made_at_s = asyncio.get_running_loop().time()
        self._set_kind(is_call)

    def _set_kind(self, is_call: bool) -> None:
        self.is_call = is_call
        self.max_message_bytes = MAX_CALL_BYTES if is_call else MAX_MESSAGE_BYTES

    @property
    def is_fresh(self) -> bool:
        """True if another call may use it."""
        age_s = asyncio.get_running_loop().time() - self._made_at_s
        is_sound = not (self._inbox or self._error or self._peer_ended or self._ended)
        return is_sound and age_s < CALL_REUSE_S and self.connection.is_open

    async def ask(self, body: bytes) -> bytes:
        """Make one call; close the stream unless an answer comes."""
        try:
            await self._send(body)
            reply = await self._recv()
            if reply is None:
                text = f"{self.remote} closed a call of {self.method} unanswered"
                raise PeerUnreachable(text, peer=self.remote)
            return reply
        except BaseException:
            await self.close()
            raise

    async def send(self, data: bytes | bytearray | memoryview, *, timeout_s: float) -> None:
        """Send one message."""
        if self.connection.is_full:
            return await super().send(data, timeout_s=timeout_s)
        # No timer for what needs no wait: it costs as much as a message.
        checked_size("a message", len(data), self.max_message_bytes)
        self._check_sendable()
        self._put(Mark.DATA, data)
        if self.connection.is_full:
            await self._within(self._room(), timeout_s, "send")

    async def _within(self, work: Coroutine[None, None, T], timeout_s: float, what: str) -> T:
        try:
            return await super()._within(work, timeout_s, what)
        except DeadlineExceeded as error:
            if not self.relay:
                raise
            self.on_silent_relay(self.relay)
            raise RelayedStreamSilent(str(error), peer=self.remote) from None

    # The carrier

    async def _write(self, mark: Mark, data: bytes | bytearray | memoryview) -> None:
        await self._room()
        self._put(mark, data)
        await self._room()

    def _put(self, mark: Mark, data: bytes | bytearray | memoryview) -> None:
        self.connection.write(mark, data)
        self._count_sent(len(data))

    async def _room(self) -> None:
        while self.connection.is_full:
            await self._change()
        if self._error:
            raise self._error

    def _count_sent(self, num_bytes: int) -> None:
        self.num_sent += 1
        self.bytes_sent += num_bytes + HEADER_BYTES

    def open_with(self, admission: bytes) -> None:
        """Send OPEN."""
        self.admission = admission
        payload = encode_open(is_call=self.is_call, method=self.method, admission=admission)
        self.connection.write(Mark.OPEN, payload)
        self._count_sent(len(payload))

    def refuse(self, error: Refused) -> None:
        """Send the reason why nothing more will come."""
        self.connection.write(Mark.REFUSED, encode_refusal(error))

    def _taken(self, num_bytes: int) -> None:
        self._release_unread(num_bytes + MESSAGE_COST_BYTES)
        is_tight = self._memory.is_tight(self.remote)
        if self._unread_bytes < (1 if is_tight else READ_WINDOW_BYTES // 2):
            self.connection.pause_reading(False)

    def _release_unread(self, num_bytes: int) -> None:
        self._unread_bytes -= num_bytes
        self._memory.release(self.remote, num_bytes)

    async def _shut(self) -> None:
        self._release_unread(self._unread_bytes)  # `close` has dropped the messages
        self.connection.write(Mark.CLOSE)
        if self._peer_closed or not self.connection.is_open:
            self.connection.close()
        else:
            self.connection.pause_reading(False)
            asyncio.get_running_loop().call_later(LINGER_S, self.connection.abort)

    # Arrivals

    def max_payload(self, mark: Mark) -> int:
        """Return the longest payload this mark may have. Raises FrameError if it is out of turn."""
        if not self._may_come(mark):
            raise FrameError(f"{mark.name} out of turn")
        lengths = {
            Mark.OPEN: MAX_OPEN_BYTES,
            Mark.DATA: self.max_message_bytes,
            Mark.REFUSED: MAX_REFUSAL_BYTES,
        }
        return lengths.get(mark, 0)

    def _may_come(self, mark: Mark) -> bool:
        if self._admit is not None or mark == Mark.OPEN:
            return self._admit is not None and mark == Mark.OPEN
        if self._peer_ended:
            return mark in (Mark.CLOSE, Mark.REFUSED) and not self._peer_closed
        return True

    def claim(self, num_bytes: int) -> None:
        """Account for memory of a frame that is arriving. Raises FrameError if it is too much."""
        self._memory.claim(self.remote, num_bytes)

    def release(self, num_bytes: int) -> None:
        """Give back what a frame has claimed."""
        self._memory.release(self.remote, num_bytes)

    def on_frame(self, mark: Mark, payload: bytes) -> None:
        """Take a whole frame."""
        self.heard_s = asyncio.get_running_loop().time()
        self.num_received += 1
        self.bytes_received += len(payload) + HEADER_BYTES
        if mark == Mark.DATA:
            self._on_message(payload)
        elif mark == Mark.OPEN:
            self._on_open(payload)
        elif mark == Mark.REFUSED:
            self.on_error(decode_refusal(payload, self.remote))
        elif mark == Mark.END:
            self.on_end()
        else:
            self.on_close()
            if self._closed:
                self.connection.close()

    def _on_open(self, payload: bytes) -> None:
        is_call, self.method, admission = decode_open(payload)
        self._set_kind(is_call)
        admit, self._admit = self._admit, None
        assert admit is not None
        if admit(self, admission):
            self.opened.set_result(None)
        else:
            self.connection.ignore_input()

    def _on_message(self, payload: bytes) -> None:
        if self._closed:
            return
        num_bytes = len(payload) + MESSAGE_COST_BYTES
        self._memory.claim(self.remote, num_bytes)
        self._unread_bytes += num_bytes
        self.on_data(payload)
        if self._unread_bytes > READ_WINDOW_BYTES or self._memory.is_tight(self.remote):
            self.connection.pause_reading(True)

    def on_connection_lost(self, error: Exception | None) -> None:
        """Report the lost connection to both directions, once."""
        if self._is_lost:
            return
        self._is_lost = True
        reason = (error.strerror or error) if isinstance(error, OSError) else error
        why = f": {reason}" if reason else ""
        kind = RelayedStreamLost if self.relay else PeerUnreachable
        lost = kind(f"the stream to {self.remote} broke{why}", peer=self.remote)
        self.opened.cancel()
        if self.relay:
            self.on_broken_relay(self.relay)
        self.on_lost(lost)
        self._peer_closed = True
        self.on_gone(self)

    def on_writable(self) -> None:
        """Wake a waiting sender."""
        self._wake()


Admit = Callable[[LibP2PStream, bytes], bool]
"""Returns True if the other side's admission is good; refuses on the stream if not."""
