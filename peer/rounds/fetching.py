"""Fetch bytes that a digest or the log names, and serve them to others.

A peer serves parts in progress, entries, bodies and snapshots. Every length is known from the log
before the first byte arrives, so a donor can neither make a peer take memory nor keep it waiting
beyond a stall for each piece.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar

from atoll.compression import planes
from atoll.dht.refusals import RefusalCode
from atoll.dht.roster import Roster
from atoll.dht.tasks import end
from atoll.dht.transport import (
    DeadlineExceeded,
    PeerUnreachable,
    Refused,
    Stream,
    Transport,
    TransportError,
)
from atoll.optim.log.entry import MalformedRecord, Record, sha256
from atoll.optim.log.mending import checked_body
from atoll.optim.log.store_errors import Damaged, NotStored, StoreCorrupt
from atoll.optim.log.stored_snapshots import SnapshotFile
from atoll.optim.reduction.cells import Bytes
from atoll.optim.state.outer_state import DIGEST_BYTES, LEAF_BYTES
from atoll.peer.notices import disk_damaged
from atoll.peer.rounds.bulk import Came
from atoll.peer.rounds.conduct import guarded_stream
from atoll.peer.rounds.context import Context, RoundSettings
from atoll.peer.rounds.messages import (
    PIECE_BYTES,
    BodyRequest,
    Decided,
    LeafRequest,
    LeavesRequest,
    PartRequest,
    Span,
)
from atoll.peer.rounds.pacing import Link
from atoll.peer.rounds.slots import Slots, Turn

# Headers of one request: a joiner verifies them before it asks for more, so this many of a liar's
# are all that it ever holds. On a line of 100 ms they are 2,500 entries a second.
MAX_SPAN = 256
MAX_SPAN_BYTES = 4 << 20  # of headers in one answer: 256 entries of 16 kB
# What a donor has to deliver on average, beyond a few stalls for the start. A home uplink of
# 10 Mbit/s that serves eight others at once gives more; a slower one would hold a joiner for hours.
FLOOR_BYTES_S = 64e3
QUIET_STALLS = 0.5  # after which another peer is asked too

R = TypeVar("R", bound=Record)


class Asking(Protocol):
    """The means to ask a peer for what is in the log."""

    @property
    def transport(self) -> Transport:
        """Reaches the peer."""
        ...

    @property
    def roster(self) -> Roster:
        """Takes the records of other peers that it sends along."""
        ...

    @property
    def settings(self) -> RoundSettings:
        """Patience with it."""
        ...

    @property
    def known_epoch(self) -> int | None:
        """The epoch whose record is here, so need not be sent."""
        ...

    @property
    def link(self) -> Link:
        """What its owner lets it use."""
        ...


async def fetch_part(ctx: Context, peers: Iterable[str], digest: bytes, wire_bytes: int) -> Bytes:
    """Fetch a reduced part of the position in progress from the first peer that has it.

    They are asked one after the other. One that sends nothing for half a stall may be gone: the
    next is asked beside it.

    Raises:
        PeerUnreachable: no peer has it.
    """
    request = PartRequest(digest=digest, wire_bytes=wire_bytes)
    async with ctx.link.inflow.asking(wire_bytes) as came:
        return await _fetch_from_any(ctx, peers, request, came)


async def _fetch_from_any(
    ctx: Context, peers: Iterable[str], request: PartRequest, came: Came
) -> Bytes:
    waiting = deque(peer for peer in dict.fromkeys(peers) if peer != ctx.me.peer_id)
    asked: dict[asyncio.Task[Bytes], _Progress] = {}
    quiet_s = QUIET_STALLS * ctx.settings.stall_s
    try:
        while waiting or asked:
            if waiting and all(ctx.now() >= each.came_at + quiet_s for each in asked.values()):
                progress = _Progress(came_at=ctx.now())
                work = _fetch_part(ctx, waiting.popleft(), request, progress, came)
                asked[asyncio.create_task(work)] = progress
            timeout_s = quiet_s if waiting else None
            done, _ = await asyncio.wait(
                asked, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                del asked[task]
                with suppress(TransportError, MalformedRecord):
                    return task.result()
    finally:
        await end(*asked, expected=(MalformedRecord,))
    raise PeerUnreachable(f"no peer has the part {request.digest.hex()[:12]}")


@dataclass(kw_only=True)
class _Progress:
    """The progress of one fetch."""

    came_at: float
    """when the last bytes came, or when it began"""


async def _fetch_part(
    ctx: Context, peer: str, request: PartRequest, progress: _Progress, came: Came
) -> Bytes:
    body = bytearray()
    async with await _open(ctx, peer, "part", request) as stream:
        floor = _Floor(ctx, came)
        while len(body) < request.wire_bytes:
            body += await floor.message(stream)
            progress.came_at = ctx.now()
    if sha256(body) != request.digest:
        raise MalformedRecord(f"expected the part {request.digest.hex()[:12]}, got other bytes")
    return memoryview(body).toreadonly()


async def fetch_headers(ctx: Asking, peer: str, start: int, stop: int) -> list[Decided]:
    """Fetch unverified entries and certificates from `start`, perhaps fewer than asked."""
    headers: list[Decided] = []
    request = Span(start=start, stop=min(stop, start + MAX_SPAN))
    async with await _open(ctx, peer, "headers", request) as stream:
        floor = _Floor(ctx)
        while len(headers) < request.stop - request.start and floor.came < MAX_SPAN_BYTES:
            message = await floor.recv(stream)
            if message is None:
                break
            headers.append(Decided.decode(message))
    return headers


async def fetch_body(
    ctx: Asking, peer: str, position: int, start: int, into: memoryview, *, gives_way: bool = False
) -> None:
    """Fetch bytes of an entry's body, from `start` on as many as `into` holds, unverified.

    Over a link with a cap they are asked for a little at a time: else all of them come at once.
    Then the first request alone gives way: what has come would be lost, as all comes again.
    """
    step = LEAF_BYTES if ctx.link.inflow.is_limited else max(1, len(into))
    for first in range(0, len(into), step):
        some, at = into[first : first + step], start + first
        request = BodyRequest(
            position=position,
            start=at,
            stop=at + len(some),
            gives_way=gives_way and first == 0,
        )
        await _fill(ctx, peer, request, some)


async def _fill(ctx: Asking, peer: str, request: BodyRequest, into: memoryview) -> None:
    async with ctx.link.inflow.asking(len(into)) as came:
        async with await _open(ctx, peer, "body", request) as stream:
            floor = _Floor(ctx, came)
            while floor.came < len(into):
                at, message = floor.came, await floor.message(stream)
                if floor.came > len(into):
                    raise MalformedRecord(f"expected {len(into)} bytes, got {floor.came}")
                into[at : floor.came] = message


async def fetch_leaf_digests(ctx: Asking, peer: str, position: int, count: int) -> list[bytes]:
    """Fetch the digests of the first `count` leaves of a snapshot, unverified."""
    request = LeafRequest(position=position, start=0, stop=count)
    async with await _open(ctx, peer, "digests", request) as stream:
        joined = await _exactly(ctx, stream, DIGEST_BYTES * count)
    return [bytes(joined[i : i + DIGEST_BYTES]) for i in range(0, len(joined), DIGEST_BYTES)]


async def fetch_leaves(
    ctx: Asking, peer: str, position: int, indices: Sequence[int], *, gives_way: bool = False
) -> AsyncGenerator[tuple[int, bytes]]:
    """Fetch consecutive leaves of a snapshot, packed and unverified.

    Over a link with a cap each is asked for alone.
    """
    step = 1 if ctx.link.inflow.is_limited else len(indices)
    for some in (indices[i : i + step] for i in range(0, len(indices), step)):
        request = LeavesRequest(
            position=position, start=some[0], stop=some[-1] + 1, gives_way=gives_way
        )
        async with ctx.link.inflow.asking(len(some) * LEAF_BYTES) as came:
            async with await _open(ctx, peer, "leaves", request) as stream:
                floor = _Floor(ctx, came)
                for index in some:
                    yield index, await floor.message(stream)


def _patience_s(ctx: Asking) -> float:
    return 4 * ctx.settings.stall_s  # a donor shares its uplink with its own round


async def _open(ctx: Asking, peer: str, method: str, request: Record) -> Stream:
    stream = await ctx.transport.open(peer, method, timeout_s=_patience_s(ctx))
    await stream.send(request.encode(), timeout_s=_patience_s(ctx))
    return stream


class _Floor:
    """Receives from one donor, for as long as it delivers at a rate worth waiting for."""

    def __init__(self, ctx: Asking, came: Came | None = None) -> None:
        """`came` is told the bytes of each message."""
        self._now = asyncio.get_running_loop().time
        self._began_at = self._now()
        self._patience_s = _patience_s(ctx)
        self._tell_came = came
        self.came = 0
        """bytes"""

    async def recv(self, stream: Stream) -> bytes | None:
        """Return the next message, or None at the end of the stream.

        Raises:
            DeadlineExceeded: the donor is too slow, or silent.
        """
        until = self._began_at + self._patience_s + self.came / FLOOR_BYTES_S
        left_s = min(self._patience_s, until - self._now())
        if left_s <= 0:
            raise DeadlineExceeded(
                f"{self.came} bytes in {self._now() - self._began_at:.0f} s; expected "
                f"{FLOOR_BYTES_S / 1e3:g} kB/s at least"
            )
        message = await stream.recv(timeout_s=left_s)
        self.came += len(message or b"")
        if self._tell_came is not None:
            self._tell_came(len(message or b""))
        return message

    async def message(self, stream: Stream) -> bytes:
        """Return the next message.

        Raises:
            DeadlineExceeded: as `recv`.
            PeerUnreachable: the stream ended.
        """
        message = await self.recv(stream)
        if message is None:
            raise PeerUnreachable("the stream ended before everything was sent")
        return message


class _Outflow:
    """Sends to one reader, for as long as it takes bytes at a rate that is worth a slot."""

    def __init__(self, ctx: Asking, stream: Stream, turn: Turn) -> None:
        self._now = asyncio.get_running_loop().time
        self._patience_s = _patience_s(ctx)
        self._outflow = ctx.link.outflow
        self._stream = stream
        self._turn = turn
        self._took_s = 0.0
        self.sent = 0
        """bytes"""

    async def send(self, data: bytes | memoryview) -> None:
        """Send a message once it is this reader's turn.

        The floor is that of readers, `FLOOR_BYTES_S`. Only the time that the reader takes counts,
        and not the waits for a slot or for the disk.

        Raises:
            DeadlineExceeded: the reader is too slow, or takes nothing.
        """
        await self._turn.cede()
        await self._outflow.take(len(data))
        left_s = self._patience_s + self.sent / FLOOR_BYTES_S - self._took_s
        if left_s <= 0:
            raise DeadlineExceeded(
                f"{self.sent} bytes taken in {self._took_s:.0f} s; expected "
                f"{FLOOR_BYTES_S / 1e3:g} kB/s at least"
            )
        began_at = self._now()
        await self._stream.send(data, timeout_s=min(self._patience_s, left_s))
        self._took_s += self._now() - began_at
        self.sent += len(data)

    async def send_pieces(self, data: Bytes) -> None:
        """Send bytes as messages of at most `PIECE_BYTES`."""
        view = memoryview(data)
        for start in range(0, len(view), PIECE_BYTES):
            await self.send(view[start : start + PIECE_BYTES])
            await asyncio.sleep(0)


async def _exactly(
    ctx: Asking, stream: Stream, wire_bytes: int, came: Came | None = None
) -> bytearray:
    body = bytearray()
    floor = _Floor(ctx, came)
    while len(body) < wire_bytes:
        body += await floor.message(stream)
    if len(body) != wire_bytes:
        raise MalformedRecord(f"expected {wire_bytes} bytes, got {len(body)}")
    return body


def refuse_missing(what: str) -> Refused:
    """Return the refusal of a request for data that this peer does not have."""
    return Refused(RefusalCode.NOT_HERE, f"expected {what}; ask another peer")


def _packed_leaf(snapshot: SnapshotFile, index: int) -> bytes:
    return planes.pack(snapshot.read_leaf(index))


class Archive:
    """The donor's side."""

    def __init__(self, ctx: Context, *, is_awaited: Callable[[], bool]) -> None:
        """`is_awaited` tells whether the trainer waits for bytes of a round."""
        self._ctx = ctx
        self._is_awaited = is_awaited
        self.slots = Slots(ctx.link.max_readers)

    def serve(self) -> None:
        """Answer from now on."""
        transport = self._ctx.transport
        for method, handler in (
            ("part", self._serve_part),
            ("headers", self._serve_headers),
            ("body", self._serve_body),
            ("digests", self._serve_digests),
            ("leaves", self._serve_leaves),
        ):
            guarded = guarded_stream(handler, self._ctx.fault, self._ctx.reading_door)
            transport.serve_stream(method, guarded)

    @asynccontextmanager
    async def _outflow(self, remote: str, stream: Stream) -> AsyncIterator[_Outflow]:
        async with self.slots.turn(remote) as turn:
            yield _Outflow(self._ctx, stream, turn)

    async def _request(self, stream: Stream, kind: type[R]) -> R:
        message = await stream.recv(timeout_s=self._ctx.settings.stall_s)
        if message is None:
            raise Refused(
                RefusalCode.BAD_REQUEST, f"expected a {kind.__name__} record, got nothing"
            )
        return kind.decode(message)

    async def _serve_part(self, remote: str, stream: Stream) -> None:
        request = await self._request(stream, PartRequest)
        what = f"part {request.digest.hex()[:12]}"
        body, stored = self._ctx.parts.body(request.digest), self._ctx.parts.stored(request.digest)
        if body is None and stored is None:
            raise refuse_missing(what)
        async with self._outflow(remote, stream) as out:
            if body is not None:
                await out.send_pieces(body)
            elif stored is not None:
                await self._send_stored(out, self._ctx.replica.store.part_chunks(*stored), what)

    async def _serve_headers(self, remote: str, stream: Stream) -> None:
        span = await self._request(stream, Span)
        count = max(0, min(span.stop - span.start, MAX_SPAN))
        async with self._outflow(remote, stream) as out:
            rows = await self._ctx.compute(self._ctx.replica.store.headers, span.start, count)
            sent = 0
            for row in rows:
                if sent >= MAX_SPAN_BYTES:  # the caller takes no more, and asks again
                    break
                if not row.certificate:  # it was damaged on the disk
                    break
                sent += len(row.entry) + len(row.certificate)
                decided = Decided(entry=row.entry, certificate=row.certificate)
                await out.send(decided.encode())

    async def _serve_body(self, remote: str, stream: Stream) -> None:
        request = await self._request(stream, BodyRequest)
        self._expect_spare(request)
        position = request.position
        async with self._outflow(remote, stream) as out:
            store = self._ctx.replica.store
            chunks = checked_body(store, position, request.start, request.stop)
            await self._send_stored(out, chunks, f"the body of entry {position}")

    async def _send_stored(self, out: _Outflow, chunks: Iterator[bytes], what: str) -> None:
        """Send what is on the disk, of which a stream that waits for a slot holds a megabyte."""
        try:
            while (chunk := await self._ctx.compute(next, chunks, None)) is not None:
                await out.send_pieces(chunk)
        except NotStored as error:
            if isinstance(error, Damaged):
                self._ctx.on_event("warning", disk_damaged(reason=str(error)))
            raise refuse_missing(what) from None

    async def _serve_digests(self, remote: str, stream: Stream) -> None:
        request = await self._request(stream, LeafRequest)
        self._leased(request)  # before a wait for nothing
        async with self._outflow(remote, stream) as out:
            digests = self._leased(request).leaves()
            await out.send_pieces(b"".join(digests[request.start : request.stop]))

    async def _serve_leaves(self, remote: str, stream: Stream) -> None:
        request = await self._request(stream, LeavesRequest)
        self._leased(request)  # before a wait for nothing
        self._expect_spare(request)
        async with self._outflow(remote, stream) as out:
            snapshot = self._leased(request)  # and no file is held for a stream that waits
            for index in range(request.start, request.stop):
                try:
                    leaf: bytes = await self._ctx.compute(_packed_leaf, snapshot, index)
                except StoreCorrupt:  # the disk spoiled it; whoever asks finds another donor
                    raise refuse_missing(f"leaf {index} of {request.position}") from None
                await out.send(leaf)

    def _expect_spare(self, request: BodyRequest | LeavesRequest) -> None:
        """Refuse a reader that is in no hurry while this peer's own training waits for the link."""
        if request.gives_way and self._is_awaited():
            raise Refused(RefusalCode.BUSY, "training waits for a round; ask again in a second")

    def _leased(self, request: LeafRequest) -> SnapshotFile:
        snapshot = self._ctx.replica.lease(request.position)
        if snapshot is None or request.stop > snapshot.num_leaves:
            raise refuse_missing(f"the snapshot at {request.position}")
        return snapshot
