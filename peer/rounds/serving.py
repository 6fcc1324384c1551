"""Giving to others what they miss: parts in progress, entries, bodies, snapshots."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from atoll.dht.refusals import RefusalCode
from atoll.dht.transport import Refused, Stream
from atoll.optim.log.entry import Record
from atoll.optim.log.store import NotStored
from atoll.peer.rounds.context import Context
from atoll.peer.rounds.fetching import MAX_SPAN, refuse_missing, send_pieces
from atoll.peer.rounds.guard import guarded_stream
from atoll.peer.rounds.messages import Decided, LeafRequest, PartRequest, SnapshotMeta, Span

R = TypeVar("R", bound=Record)

MAX_STREAMS = 8  # of bulk transfers at once; more would starve this peer's own rounds


class Archive:
    """The donor's side of `atoll.peer.rounds.fetching`."""

    def __init__(self, ctx: Context) -> None:
        """Serve from the context's replica."""
        self._ctx = ctx
        self._slots = asyncio.Semaphore(MAX_STREAMS)

    def serve(self) -> None:
        """Answer from now on."""
        transport = self._ctx.transport
        transport.serve_stream("part", guarded_stream(self._serve_part, self._ctx.fault))
        transport.serve_stream("headers", guarded_stream(self._serve_headers, self._ctx.fault))
        transport.serve_stream("body", guarded_stream(self._serve_body, self._ctx.fault))
        transport.serve_stream("leaves", guarded_stream(self._serve_leaves, self._ctx.fault))

    async def _request(self, stream: Stream, kind: type[R]) -> R:
        message = await stream.recv(timeout_s=self._ctx.settings.stall_s)
        if message is None:
            raise Refused(
                RefusalCode.BAD_REQUEST, f"expected a {kind.__name__} record, got nothing"
            )
        return kind.decode(message)

    async def _serve_part(self, remote: str, stream: Stream) -> None:
        request = await self._request(stream, PartRequest)
        body = self._ctx.parts.body(request.digest)
        if body is None:
            raise refuse_missing(f"part {request.digest.hex()[:12]}")
        async with self._slots:
            await send_pieces(self._ctx, stream, body)

    async def _serve_headers(self, remote: str, stream: Stream) -> None:
        span = await self._request(stream, Span)
        count = max(0, min(span.stop - span.start, MAX_SPAN))
        timeout_s = 4 * self._ctx.settings.stall_s
        async with self._slots:
            rows = await self._ctx.compute(self._ctx.replica.store.headers, span.start, count)
            for row in rows:
                decided = Decided(entry=row.entry, certificate=row.certificate)
                await stream.send(decided.encode(), timeout_s=timeout_s)

    async def _serve_body(self, remote: str, stream: Stream) -> None:
        span = await self._request(stream, Span)
        async with self._slots:
            try:
                body = await self._ctx.compute(self._ctx.replica.store.body, span.start)
            except NotStored:
                raise refuse_missing(f"the body of entry {span.start}") from None
            await send_pieces(self._ctx, stream, body)

    async def _serve_leaves(self, remote: str, stream: Stream) -> None:
        request = await self._request(stream, LeafRequest)
        state = self._ctx.replica.lease(request.position)
        if state is None or request.stop > state.num_leaves:
            raise refuse_missing(f"the snapshot at {request.position}")
        timeout_s = 4 * self._ctx.settings.stall_s
        async with self._slots:
            digests = await self._ctx.compute(state.leaves)
            meta = SnapshotMeta(position=request.position, leaves=b"".join(digests))
            await stream.send(meta.encode(), timeout_s=timeout_s)
            for index in range(request.start, request.stop):
                await stream.send(state.read_leaf(index), timeout_s=timeout_s)
