"""A network in one process, with faults that a test chooses.

A peer is an object, a message a list entry. Hundreds of peers run in one loop, and in a
`VirtualTimeLoop` their round trips, bandwidth and deadlines take no real time. The faults look as
over libp2p:

- `cut`: nothing passes, nothing is lost. As over TCP, what was sent arrives after `heal`, however
  late.
- `drop`: a dropped question or answer of a call never comes; a stream never skips a message, so it
  stalls.
- `reset`: the connection of a pair breaks; its streams and calls end with PeerUnreachable, or with
  RelayedStreamLost if a relay between them died.
- `freeze`: SIGSTOP. Nothing arrives and the peer's tasks do not come out of any network operation
  until `thaw`, not even by their own deadline.
- `kill`: SIGKILL. Streams end at the other side with PeerUnreachable (`clean=True`: with None, as a
  peer that closed them all first); operations of the dead peer never return. `transport` of the
  same PeerID starts it again.

`on_message(src, dst, method, n)` is called before the n-th message (from 1; questions, answers,
opens, ends and stream messages all count) is sent: it may inject any fault, or return False to drop
this message.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import TypeVar

from atoll.dht.tasks import Tasks
from atoll.dht.testing.virtualtime import VirtualTimeLoop, run_virtual
from atoll.dht.transport import (
    MAX_CALL_BYTES,
    CallHandler,
    Check,
    Handlers,
    Mark,
    PeerUnreachable,
    Refused,
    RelayedStreamLost,
    StreamEnd,
    StreamHandler,
    TransportError,
    TransportStatistics,
    admit_everyone,
    checked_method,
    checked_size,
    decode_refusal,
    encode_refusal,
    within,
)

__all__ = ["MemoryLink", "MemoryNetwork", "MemoryTransport", "VirtualTimeLoop", "run_virtual"]

FRAME_BYTES = 5  # what libp2p's framing adds to a message
WINDOW_BYTES = 4 << 20  # unread bytes that a stream takes before its sender waits

T = TypeVar("T")
OnMessage = Callable[[str, str, str, int], bool | None]


@dataclass(kw_only=True)
class MemoryLink:
    """One direction of a pair. `jitter_s` is uniform and reorders messages across streams."""

    latency_s: float = 0.0
    jitter_s: float = 0.0
    drop: float = 0.0
    """Probability that a message is lost."""


@dataclass(kw_only=True)
class _Counters:
    sent: int = 0
    received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    calls_made: int = 0


@dataclass(eq=False)
class _Pipe:
    """One direction of an exchange. Messages keep their order through all three queues."""

    src: MemoryTransport
    dst: MemoryTransport
    method: str
    last_arrival_s: float = 0.0
    stalled: bool = False
    broken: bool = False
    flying: deque[_Message] = field(default_factory=deque)
    landing: deque[_Message] = field(default_factory=deque)
    held: deque[_Message] = field(default_factory=deque)


_Message = tuple[int, Callable[[], None]]
"""Bytes on the wire, and the action at its arrival."""


class MemoryNetwork:
    """All peers of a test. Every fault takes effect at once."""

    def __init__(
        self,
        rng: random.Random | None = None,
        *,
        latency_s: float = 0.0,
        jitter_s: float = 0.0,
        drop: float = 0.0,
        on_message: OnMessage | None = None,
        kind: type[MemoryTransport] | None = None,
    ) -> None:
        """`latency_s`, `jitter_s` and `drop` apply to links that `set_link` does not name.

        `kind` is the class of the transports, for those who need more of them.
        """
        self.rng = rng or random.Random(0)
        self._kind = kind or MemoryTransport
        self.default = MemoryLink(latency_s=latency_s, jitter_s=jitter_s, drop=drop)
        self.on_message = on_message
        self.num_messages = 0
        self.errors: list[BaseException] = []
        """Errors of handlers other than TransportError; a test expects none."""
        self._peers: dict[str, MemoryTransport] = {}
        self._links: dict[tuple[str, str], MemoryLink] = {}
        self._cut: set[tuple[str, str]] = set()
        self._frozen: dict[str, asyncio.Event] = {}
        self._holding: dict[_Pipe, None] = {}

    def transport(
        self,
        peer_id: str,
        *,
        admission: bytes = b"",
        check: Check = admit_everyone,
        uplink_bytes_s: float = 0.0,
        downlink_bytes_s: float = 0.0,
    ) -> MemoryTransport:
        """Start a peer, replacing a dead one of this PeerID. Rates of 0 are unlimited."""
        old = self._peers.get(peer_id)
        if old is not None and old.alive:
            raise ValueError(f"peer {peer_id} is alive; kill or close it before it starts again")
        self._frozen.pop(peer_id, None)
        new = self._kind(self, peer_id, admission=admission, check=check)
        new.uplink_bytes_s, new.downlink_bytes_s = uplink_bytes_s, downlink_bytes_s
        self._peers[peer_id] = new
        return new

    @property
    def peers(self) -> list[str]:
        """PeerIDs of the live peers."""
        return [name for name, peer in self._peers.items() if peer.alive]

    def reaches(self, a: str, b: str) -> bool:
        """Return whether a message between two peers would arrive now."""
        is_alive = all(peer in self._peers and self._peers[peer].alive for peer in (a, b))
        return is_alive and (a, b) not in self._cut and not {a, b} & self._frozen.keys()

    # Faults

    def set_link(self, src: str, dst: str, link: MemoryLink) -> None:
        """Replace the default for messages from `src` to `dst`."""
        self._links[src, dst] = link

    def cut(self, a: str, b: str) -> None:
        """Block both directions between `a` and `b` until `heal`."""
        self._cut |= {(a, b), (b, a)}

    def partition(self, *groups: Iterable[str]) -> None:
        """Cut all links between peers of different groups."""
        sets = [set(group) for group in groups]
        for i, left in enumerate(sets):
            for right in sets[i + 1 :]:
                for a in left:
                    for b in right:
                        self.cut(a, b)

    def heal(self, a: str | None = None, b: str | None = None) -> None:
        """Undo the cuts of one pair, of all links of `a`, or all; held messages arrive."""
        if a is None:
            self._cut.clear()
        else:
            self._cut = {pair for pair in self._cut if not ({a, b or a} <= set(pair))}
        self._release()

    def freeze(self, peer_id: str) -> None:
        """Suspend a peer, as SIGSTOP does."""
        self._frozen.setdefault(peer_id, asyncio.Event())

    def thaw(self, peer_id: str) -> None:
        """Resume a peer, as SIGCONT does."""
        event = self._frozen.pop(peer_id, None)
        if event is not None:
            event.set()
            self._release()

    def reset(self, a: str, b: str, *, at_relay: bool = False) -> None:
        """Break the connection between two peers; `at_relay`, the relay between them died."""
        kind = RelayedStreamLost if at_relay else PeerUnreachable
        for peer, other in ((a, b), (b, a)):
            if peer in self._peers:
                self._peers[peer]._lose(other, kind(f"the connection to {other} broke", peer=other))

    def kill(self, peer_id: str, *, clean: bool = False) -> None:
        """Kill a peer, as SIGKILL does."""
        peer = self._peers[peer_id]
        peer._die()
        broke = PeerUnreachable(f"the connection to {peer_id} broke", peer=peer_id)
        for other in self._peers.values():
            if other is not peer:
                other._lose(peer_id, None if clean else broke)
        self.thaw(peer_id)

    # Messages

    def _find(self, peer_id: str) -> MemoryTransport:
        peer = self._peers.get(peer_id)
        if peer is None or not peer.alive:
            raise PeerUnreachable(f"peer {peer_id} is not running", peer=peer_id)
        return peer

    def _passes(self, pipe: _Pipe) -> bool:
        self.num_messages += 1
        src, dst = pipe.src.peer_id, pipe.dst.peer_id
        if self.on_message and self.on_message(src, dst, pipe.method, self.num_messages) is False:
            return False
        drop = self._links.get((src, dst), self.default).drop
        return drop == 0 or self.rng.random() >= drop

    def _send(self, pipe: _Pipe, size: int, action: Callable[[], None]) -> float:
        """Take a message; return the seconds until it has left the sender's uplink."""
        wire_bytes, src = size + FRAME_BYTES, pipe.src
        passes = self._passes(pipe)
        if not src.alive or pipe.broken:
            return 0.0
        src.counters.sent += wire_bytes
        src.counters.messages_sent += 1
        now_s = asyncio.get_running_loop().time()
        src.uplink_free_s = _busy_until(src.uplink_free_s, now_s, wire_bytes, src.uplink_bytes_s)
        pipe.stalled = pipe.stalled or not passes
        if not pipe.stalled:
            self._depart(pipe, (wire_bytes, action), now_s)
        return src.uplink_free_s - now_s

    def _depart(self, pipe: _Pipe, message: _Message, now_s: float) -> None:
        link = self._links.get((pipe.src.peer_id, pipe.dst.peer_id), self.default)
        delay_s = link.latency_s + (self.rng.random() * link.jitter_s if link.jitter_s else 0.0)
        pipe.last_arrival_s = max(pipe.src.uplink_free_s + delay_s, pipe.last_arrival_s)
        pipe.flying.append(message)
        self._at(pipe.last_arrival_s, now_s, lambda: self._land(pipe))

    def _land(self, pipe: _Pipe) -> None:
        message, dst = pipe.flying.popleft(), pipe.dst
        now_s = asyncio.get_running_loop().time()
        dst.downlink_free_s = _busy_until(
            dst.downlink_free_s, now_s, message[0], dst.downlink_bytes_s
        )
        pipe.landing.append(message)
        self._at(dst.downlink_free_s, now_s, lambda: self._deliver(pipe))

    @staticmethod
    def _at(when_s: float, now_s: float, action: Callable[[], None]) -> None:
        if when_s <= now_s:
            action()
        else:
            asyncio.get_running_loop().call_at(when_s, action)

    def _is_blocked(self, pipe: _Pipe) -> bool:
        src, dst = pipe.src.peer_id, pipe.dst.peer_id
        return (src, dst) in self._cut or dst in self._frozen

    def _deliver(self, pipe: _Pipe) -> None:
        message = pipe.landing.popleft()
        if pipe.held or self._is_blocked(pipe):
            pipe.held.append(message)
            self._holding[pipe] = None
        else:
            self._hand_over(pipe, message)

    def _hand_over(self, pipe: _Pipe, message: _Message) -> None:
        if pipe.broken or not pipe.dst.alive:
            return
        pipe.dst.counters.received += message[0]
        pipe.dst.counters.messages_received += 1
        message[1]()

    def _release(self) -> None:
        for pipe in list(self._holding):
            while pipe.held and not self._is_blocked(pipe):
                self._hand_over(pipe, pipe.held.popleft())
            if not pipe.held:
                del self._holding[pipe]


def _busy_until(free_s: float, now_s: float, num_bytes: int, bytes_s: float) -> float:
    return max(free_s, now_s) + (num_bytes / bytes_s if bytes_s else 0.0)


async def _never() -> None:
    await asyncio.get_running_loop().create_future()


@dataclass(eq=False)
class _Call:
    """A question that waits for its answer at the caller."""

    remote: str
    answer: asyncio.Future[bytes]
    pipes: tuple[_Pipe, _Pipe]

    def lose(self, error: TransportError | None) -> None:
        for pipe in self.pipes:
            pipe.broken = True
        self.settle(error or PeerUnreachable(f"peer {self.remote} closed", peer=self.remote))

    def settle(self, outcome: bytes | TransportError) -> None:
        if self.answer.done():
            return
        if isinstance(outcome, bytes):
            self.answer.set_result(outcome)
        else:
            self.answer.set_exception(outcome)


class MemoryTransport:
    """A `Transport` in memory, created by `MemoryNetwork.transport`."""

    def __init__(
        self, network: MemoryNetwork, peer_id: str, *, admission: bytes, check: Check
    ) -> None:
        self.network = network
        self.peer_id = peer_id
        self.addresses = [f"/memory/{peer_id}"]
        self.admission = admission
        self.handlers = Handlers(check, network.errors.append)
        self.alive = True
        self.counters = _Counters()
        self.uplink_bytes_s = self.downlink_bytes_s = 0.0
        self.uplink_free_s = self.downlink_free_s = 0.0
        self._killed = False
        # Not sets: those are read in the order of addresses, which no seed repeats.
        self._calls: dict[_Call, None] = {}
        self._streams: dict[MemoryStream, None] = {}
        self._tasks = Tasks()
        self._context = copy_context()
        """of this process: what arrives is served in it, not in the sender's"""

    def __repr__(self) -> str:
        return f"MemoryTransport({self.peer_id})"

    # Transport

    def serve(self, method: str, handler: CallHandler) -> None:
        """Answer calls of `method` with `handler`."""
        self.handlers.serve(method, handler)

    def serve_stream(self, method: str, handler: StreamHandler) -> None:
        """Pass streams of `method` to `handler`."""
        self.handlers.serve_stream(method, handler)

    async def call(self, peer: str, method: str, body: bytes, *, timeout_s: float) -> bytes:
        """Send a request and return its answer."""
        checked_method(method)
        checked_size("a call", len(body), MAX_CALL_BYTES)
        return await self._bounded(
            self._call(peer, method, bytes(body)), timeout_s, f"call of {method}", peer
        )

    async def open(self, peer: str, method: str, *, timeout_s: float) -> MemoryStream:
        """Open a stream to the peer's handler of `method`."""
        checked_method(method)
        return await self._bounded(self._open(peer, method), timeout_s, f"open of {method}", peer)

    async def connect(self, peer: str, addresses: Sequence[str], *, timeout_s: float) -> None:
        """Wait until the peer can be reached; addresses are not needed here."""
        await self._bounded(self._connect(peer), timeout_s, "connect", peer)

    def statistics(self) -> TransportStatistics:
        """Return the counters; each message counts its bytes and 5 of framing."""
        c = self.counters
        return TransportStatistics(
            wire_bytes_sent=c.sent,
            wire_bytes_received=c.received,
            wire_bytes_delivered=c.sent,
            source="memory",
            messages_sent=c.messages_sent,
            messages_received=c.messages_received,
            calls_made=c.calls_made,
            calls_served=self.handlers.num_served,
            refused=self.handlers.num_refused,
            streams_open=len(self._streams),
        )

    async def close(self) -> None:
        """End all streams and handlers."""
        if not self.alive:
            return
        for stream in list(self._streams):
            await stream.close()
        self.alive = False
        await self._tasks.close()
        for other in self.network._peers.values():
            other._lose(self.peer_id, None)

    # This side of an exchange

    async def _bounded(
        self, work: Coroutine[None, None, T], timeout_s: float, what: str, peer: str
    ) -> T:
        try:
            await self._awake()
            return await within(work, timeout_s, what, peer)
        finally:
            work.close()
            await self._awake()

    async def _awake(self) -> None:
        """Return when this process may run: never if killed, at the thaw if frozen.

        Work of a killed process that is cancelled, as at a test's end, ends: what it would still
        say while it cleans up would wait here for another cancellation, each word for its own.
        """
        if self._killed:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise asyncio.CancelledError
            await _never()
        while (frozen := self.network._frozen.get(self.peer_id)) is not None:
            await frozen.wait()
        if not self.alive and not self._killed:
            raise TransportError(f"the transport of {self.peer_id} is closed", peer=self.peer_id)

    async def _connect(self, peer: str) -> None:
        while {(self.peer_id, peer), (peer, self.peer_id)} & self.network._cut:
            await asyncio.sleep(0.1)
        self.network._find(peer)

    async def _call(self, peer: str, method: str, body: bytes) -> bytes:
        dst = self.network._find(peer)
        there, back = _Pipe(self, dst, method), _Pipe(dst, self, method)
        call = _Call(peer, asyncio.get_running_loop().create_future(), (there, back))
        self._calls[call] = None
        self.counters.calls_made += 1
        admission = self.admission
        try:
            size = len(method) + len(admission) + len(body)
            self.network._send(there, size, lambda: dst._answer(call, admission, body))
            return await call.answer
        finally:
            self._calls.pop(call, None)

    async def _open(self, peer: str, method: str) -> MemoryStream:
        dst = self.network._find(peer)
        there, back = _Pipe(self, dst, method), _Pipe(dst, self, method)
        near, far = MemoryStream(self, there), MemoryStream(dst, back)
        near._far, far._far = far, near
        self._streams[near] = None
        admission = self.admission
        self.network._send(there, len(method) + len(admission), lambda: dst._accept(far, admission))
        await asyncio.sleep(0)
        return near

    # The other side

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        self._context.copy().run(self._tasks.spawn, work)

    def _answer(self, call: _Call, admission: bytes, body: bytes) -> None:
        self._spawn(self._serve_call(call, admission, body))

    async def _serve_call(self, call: _Call, admission: bytes, body: bytes) -> None:
        there, back = call.pipes
        outcome: bytes | TransportError
        try:
            remote = there.src.peer_id
            self.handlers.check(remote, admission, there.method)
            outcome = await self.handlers.answer(remote, there.method, body)
        except Exception as error:
            outcome = self._refusal(error)
        await self._awake()
        size = len(outcome) if isinstance(outcome, bytes) else len(str(outcome))
        self.network._send(back, size, lambda: call.settle(outcome))

    def _accept(self, stream: MemoryStream, admission: bytes) -> None:
        self._streams[stream] = None
        self._spawn(self._serve_stream(stream, admission))
        if not stream.far_end_lives:  # the caller died while the question was on its way
            stream.lose(PeerUnreachable(f"peer {stream.remote} is gone", peer=stream.remote))

    async def _serve_stream(self, stream: MemoryStream, admission: bytes) -> None:
        try:
            self.handlers.check(stream.remote, admission, stream.method)
            await self.handlers.run(stream)
        except Exception as error:
            await self._awake()
            stream.refuse(self._refusal(error))
        finally:
            await stream.close()

    def _refusal(self, error: Exception) -> Refused:
        """Encode and decode the error, as libp2p's framing would."""
        wire = encode_refusal(self.handlers.refusal(error, self.peer_id))
        return decode_refusal(wire, self.peer_id)

    # Faults

    def _die(self) -> None:
        self.alive, self._killed = False, True
        self._tasks.cancel()

    def _lose(self, remote: str, error: TransportError | None) -> None:
        exchanges: list[_Call | MemoryStream] = [*self._calls, *self._streams]
        for exchange in exchanges:
            if exchange.remote == remote:
                exchange.lose(error)


class MemoryStream(StreamEnd):
    """One end of a `Stream` in memory, created by `MemoryTransport.open`."""

    def __init__(self, transport: MemoryTransport, out: _Pipe) -> None:
        super().__init__(out.dst.peer_id, out.method)
        self._transport = transport
        self._out = out
        self._far: MemoryStream
        self._unread_bytes = 0  # sent by this end and not yet taken by the other

    @property
    def far_end_lives(self) -> bool:
        """True if the process at the other end still runs."""
        return self._far._transport.alive

    async def _within(self, work: Coroutine[None, None, T], timeout_s: float, what: str) -> T:
        return await self._transport._bounded(
            work, timeout_s, f"{what} on {self.method}", self.remote
        )

    async def _write(self, mark: Mark, data: bytes | bytearray | memoryview) -> None:
        while self._unread_bytes > WINDOW_BYTES:
            await self._change()
            self._check_sendable()
        self._unread_bytes += len(data)
        left_s = self._transport.network._send(self._out, len(data), self._arrival(mark, data))
        await asyncio.sleep(left_s)

    def _arrival(self, mark: Mark, data: bytes | bytearray | memoryview) -> Callable[[], None]:
        far = self._far
        if mark == Mark.DATA:
            copy = bytes(data)
            return lambda: far.on_data(copy)
        return far.on_end

    def _taken(self, num_bytes: int) -> None:
        self._far._unread_bytes -= num_bytes
        self._far._wake()

    async def _shut(self) -> None:
        self._transport._streams.pop(self, None)
        if self._transport.alive:
            with suppress(TransportError):
                await self._transport._awake()
                self._transport.network._send(self._out, 0, self._far.on_close)

    def refuse(self, error: Refused) -> None:
        """Send the reason why nothing more will come."""
        if not self._closed:
            self._transport.network._send(
                self._out, len(str(error)), lambda: self._far.on_error(error)
            )

    def lose(self, error: TransportError | None) -> None:
        """Lose the connection: cleanly if `error` is None."""
        self._out.broken = self._far._out.broken = True
        if error is None:
            self.on_close()
        else:
            self.on_lost(error)
