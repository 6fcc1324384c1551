"""The gRPC interface of a coordinator: it checks sizes, sessions and deadlines first.

A client can harm nothing but its own call: gRPC bounds messages before they are parsed, decoders
bound records, the entry's certificate bounds bodies, and the call of a client that neither sends
nor reads is ended. Any stranger can begin calls, so what a call without its first message may take
is bounded by address (`places.py`); what peers stream to themselves, by PeerID.

To gRPC the requests of every method are a stream, which looks the same on the wire: it would wait
for a single one itself, without a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from importlib.metadata import version
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from atoll.compression import planes
from atoll.coordinator.admission_control import JoinRequest, Refusal, RefusalStatus
from atoll.coordinator.coordinator import Coordinator
from atoll.coordinator.history import LAST
from atoll.coordinator.kept_log import KeptLog
from atoll.coordinator.policies import CallLimits, host_of, source_of
from atoll.coordinator.rpc import service_pb2 as pb
from atoll.coordinator.rpc.messages import (
    CHUNK_BYTES,
    MAX_ENTRIES,
    MAX_RECORD_BYTES,
    MAX_REPORTS,
    METHODS,
    PROBE_NONCE_BYTES,
    PROBE_TIMEOUT_S,
    PROGRESS_TIMEOUT_S,
    SERVICE,
)
from atoll.coordinator.run.invite_request import MAX_REQUEST_BYTES
from atoll.coordinator.run.status import Event, PeerStatus, RoundReport, RunStatus, StatusError
from atoll.coordinator.service.places import CallPlaces
from atoll.coordinator.service.status_pages import StatusPages, pack
from atoll.coordinator.service.watching import PortsWatch
from atoll.optim.log.claims import Claim
from atoll.optim.log.entry import MAX_ORDER, Entry
from atoll.optim.log.mending import checked_body
from atoll.optim.log.store import LogStore, StoreHead
from atoll.optim.log.store_errors import NotStored
from atoll.optim.log.stored_snapshots import SnapshotInfo
from atoll.optim.state import vectors
from atoll.optim.state.outer_state import LEAF_BYTES

log = logging.getLogger(__name__)

T = TypeVar("T")
_Call = Any
"""grpc.aio.ServicerContext; grpc has no types."""

MAX_PUBLISHERS = 4  # bodies received at once
MAX_RECEIVED_BYTES = 64 << 20  # of them together; a larger body comes alone
FIRST_MESSAGE_S = 5.0  # it leaves with the call; one of 2 MiB takes 5 s at 3.4 Mbit/s
# Calls without their first message, which holds up to 4 MiB: 128 MiB of one address, if it sends
# that within 5 s. Peers behind one router use a place for a round trip.
UNBEGUN_OF_ONE, MAX_UNBEGUN = 32, 1024
FETCHES_OF_ONE, MAX_FETCHES = 16, 256  # a joiner: six bodies, and five questions about snapshots
# Calls for bodies and leaves that give way: more of them, on a home's uplink, would starve the rest
# of what the coordinator sends, and one MiB of each takes 11 s at 3 Mbit/s.
MAX_GIVING_WAY = 4
MAX_LOOKING_BACK = 16  # calls for an earlier status that wait: each is answered within a second


class Service:
    """Serves one run by the methods of service.proto."""

    def __init__(
        self, coordinator: Coordinator, tokenizer: bytes = b"", watch: PortsWatch | None = None
    ) -> None:
        """`tokenizer` is the run's, compressed, if it travels with the run."""
        self._watch = watch
        self.true_caller: Callable[[str], str] = str
        """Returns gRPC's name of a caller with its true source, if we forward connections."""
        self._run = coordinator
        self._packed_tokenizer = tokenizer
        self._version = version("atoll")
        self._receiving: dict[tuple[bytes, int], int] = {}
        """bytes of the bodies that are on their way, by log and position"""
        self._looking_back = asyncio.Lock()
        self._num_looking_back = 0
        self._calls = CallLimits()
        self._pages = StatusPages(coordinator.status)
        self._unbegun = CallPlaces(of_one=UNBEGUN_OF_ONE, total=MAX_UNBEGUN)
        self._fetches = CallPlaces(of_one=FETCHES_OF_ONE, total=MAX_FETCHES)
        self._giving_way = 0
        """calls that give way, under way"""

    def _source(self, context: _Call) -> str:
        return source_of(self.true_caller(context.peer()))

    def _pace(self, context: _Call) -> None:
        """Refuse the calls of an address that makes far too many of them."""
        if not self._calls.take(self._source(context), time.monotonic()):
            raise Refusal(RefusalStatus.RESOURCE_EXHAUSTED, "too many calls; slow down")

    def handler(self) -> Any:  # noqa: ANN401  # grpc has no types
        """Return the handler for a gRPC server."""
        return grpc.method_handlers_generic_handler(
            SERVICE, {method.name: self._method(method) for method in METHODS}
        )

    def _method(self, method: Any) -> Any:  # noqa: ANN401
        serve = getattr(self, f"_{method.name.lower()}")
        if method.streams_out:
            make, guarded = grpc.stream_stream_rpc_method_handler, self._guarded_stream(serve)
        else:
            make, guarded = grpc.stream_unary_rpc_method_handler, self._guarded(serve)
        return make(
            guarded,
            request_deserializer=_reader(method.request),
            response_serializer=method.reply.SerializeToString,
        )

    def _guarded(
        self, serve: Callable[[Any, _Call], Awaitable[T]]
    ) -> Callable[[AsyncIterator[Any], _Call], Awaitable[T]]:
        """Bound the wait of a call; answer errors with a status that reveals nothing else."""

        async def call(requests: AsyncIterator[Any], context: _Call) -> T:
            try:
                return await serve(await self._first(requests, context), context)
            except Exception as error:
                code, text = _answer(error)
            await context.abort(code, text)
            raise AssertionError("abort returned")

        return call

    def _guarded_stream(
        self, serve: Callable[[Any, _Call, AsyncIterator[Any]], AsyncGenerator[Any]]
    ) -> Callable[[AsyncIterator[Any], _Call], Awaitable[None]]:
        """Guard a method that streams replies; end the call of a reader that stalls."""

        async def call(requests: AsyncIterator[Any], context: _Call) -> None:
            try:
                first = await self._first(requests, context)
                replies = serve(first, context, requests)
                async with self._place(first), contextlib.aclosing(replies):
                    async for reply in replies:
                        async with asyncio.timeout(PROGRESS_TIMEOUT_S):
                            await context.write(reply)
                return
            except Exception as error:
                code, text = _answer(error)
            await context.abort(code, text)

        return call

    async def _first(self, requests: AsyncIterator[Any], context: _Call) -> Any:  # noqa: ANN401
        """Return the first message of a call."""
        try:
            async with self._unbegun.held(self._source(context), FIRST_MESSAGE_S):
                return _expect_parsed(await anext(requests, _MALFORMED))
        except TimeoutError:
            raise Refusal(
                RefusalStatus.RESOURCE_EXHAUSTED,
                f"expected a message within {FIRST_MESSAGE_S:.0f} s, or fewer calls at once",
            ) from None

    def _place(self, first: Any) -> contextlib.AbstractAsyncContextManager[None]:  # noqa: ANN401
        """Return what bounds the calls that stream for as long as their reader takes."""
        if not isinstance(first, pb.FetchRequest):
            return contextlib.nullcontext()
        self._authenticate(first.auth)
        return self._fetches.held(first.auth.peer_id)

    async def _challenge(self, request: pb.ChallengeRequest, _: _Call) -> pb.ChallengeReply:
        _expect_size("peer_id", request.peer_id, 128)
        nonce = self._run.admission.challenge(request.peer_id)
        return pb.ChallengeReply(nonce=nonce, server_time_s=self._run.now_s())

    async def _join(self, request: pb.JoinRequest, call: _Call) -> pb.JoinReply:
        self._pace(call)
        _expect_size("peer_id", request.peer_id, 128)
        welcome = self._run.admission.join(
            JoinRequest(
                protocol=request.protocol,
                version=request.version,
                run_id=request.run_id,
                peer_id=request.peer_id,
                role=request.role,
                nonce=request.nonce,
                signature=request.signature,
                token=request.token,
            )
        )
        if self._watch is not None:
            self._watch.joined(request.peer_id, host_of(self.true_caller(call.peer())))
        trains = request.role != "follower"
        log = self._run.place(request.peer_id, request.module, trains=trains)
        genesis_root = await asyncio.to_thread(log.genesis_root)
        return pb.JoinReply(
            module=log.name,
            spec=self._run.spec.canonical(),
            admission=welcome.admission,
            session=welcome.session,
            layout=log.replica.layout.to_json(),
            genesis_root=genesis_root,
            epoch=log.replica.epoch_record,
            head=_head(log.head()),
            bootstrap=self._run.bootstrap(),
            server_time_s=self._run.now_s(),
            heartbeat_s=self._run.heartbeat_s(),
            evicted=self._run.admission.evicted(),
            relocation=self._run.relocation,
        )

    async def _probe(self, request: pb.ProbeRequest, call: _Call) -> pb.ProbeReply:
        self._authenticate(request.auth)
        self._pace(call)
        if not 0 < request.port < 65536 or len(request.nonce) != PROBE_NONCE_BYTES:
            raise Refusal(RefusalStatus.INVALID_ARGUMENT, "expected a port and a nonce")
        host = host_of(self.true_caller(call.peer()))
        reached = await _dial_back(host, request.port, request.nonce) if host else False
        if self._watch is not None:
            self._watch.probed(request.auth.peer_id, is_reached=reached)
        return pb.ProbeReply(address=host, reached=reached)

    async def _heartbeat(self, request: pb.HeartbeatRequest, _: _Call) -> pb.HeartbeatReply:
        self._authenticate(request.auth)
        self._run.admission.limit_reports(request.auth.peer_id)
        if max(len(request.events), len(request.traces)) > MAX_REPORTS:
            raise Refusal(
                RefusalStatus.INVALID_ARGUMENT, f"expected at most {MAX_REPORTS} events and traces"
            )
        status = PeerStatus.from_json(request.status)
        if status.peer_id != request.auth.peer_id:
            raise Refusal(RefusalStatus.PERMISSION_DENIED, "expected the status of the peer itself")
        beat = self._run.heartbeat(
            status,
            [Event.from_json(raw) for raw in request.events],
            [RoundReport.from_json(raw) for raw in request.traces],
            leaving=request.leaving,
            retired=request.retired,
            evidence=request.evidence,
        )
        roster = await self._run.introduce(request.roster) if request.roster else b""
        log = self._run.log_of(status.module)
        return pb.HeartbeatReply(
            epoch=_unless_known(log.replica.epoch_record, request.epoch_sha256),
            head=_head(log.head()),
            server_time_s=self._run.now_s(),
            bootstrap=self._run.bootstrap(),
            publish=beat.publish_from is not None,
            roster=roster,
            publish_from=beat.publish_from or 0,
            admission=beat.admission,
            finished=beat.finished,
            heartbeat_s=self._run.heartbeat_s(),
            evicted=_unless_known(self._run.admission.evicted(), request.evicted_sha256),
            orders=log.orders(),
            relocation=_unless_known(self._run.relocation, request.relocation_sha256),
            version=self._version,
        )

    async def _order(self, request: pb.OrderRequest, call: _Call) -> pb.OrderReply:
        self._pace(call)
        if request.order:  # the run's key signed it, which proves more than a token
            _expect_size("order", request.order, MAX_ORDER)
            self._run.give_order(request.order)
        else:
            self._run.admission.expect_token(request.token, request.viewer)
        given = self._run.orders()
        return pb.OrderReply(
            spec=self._run.spec.canonical(),
            next_number=given.next_number,
            settings=given.settings.stored,
            decided=given.decided,
        )

    async def _invites(self, request: pb.InvitesRequest, call: _Call) -> pb.InvitesReply:
        self._pace(call)
        _expect_size("request", request.request, MAX_REQUEST_BYTES)
        answer = await self._run.manage_invites(request.request, request.signature)
        return pb.InvitesReply(invites=answer)

    async def _publish(
        self, first: pb.PublishRequest, call: _Call, parts: AsyncIterator[pb.PublishRequest]
    ) -> AsyncGenerator[pb.PublishReply]:
        self._pace(call)
        if first.WhichOneof("part") != "header":
            raise Refusal(RefusalStatus.INVALID_ARGUMENT, "expected a header first")
        self._authenticate(first.header.auth)
        log = self._run.log_of(first.header.module)
        claim = await self._claim(log, first.header)
        accepted = False
        if claim is not None:
            with self._slot(claim.entry):
                yield pb.PublishReply(send_body=True, head=_head(log.head()))
                # Under no name here: this generator stays until its last reply is fetched.
                accepted = await log.accept(
                    claim,
                    await _receive(parts, claim.entry.body_bytes),
                    first.header.auth.peer_id,
                )
        yield pb.PublishReply(accepted=accepted, head=_head(log.head()))

    async def _claim(self, log: KeptLog, header: pb.PublishHeader) -> Claim | None:
        _expect_size("entry", header.entry, MAX_RECORD_BYTES)
        _expect_size("certificate", header.certificate, MAX_RECORD_BYTES)
        claim = await log.precheck(header.entry, header.certificate)
        if claim is None or (claim.entry.run_id, claim.entry.position) in self._receiving:
            return None  # not needed, or on its way from another peer
        if header.body_bytes != claim.entry.body_bytes:
            raise Refusal(
                RefusalStatus.INVALID_ARGUMENT,
                f"expected a body of {claim.entry.body_bytes} bytes, got {header.body_bytes}",
            )
        return claim

    @contextlib.contextmanager
    def _slot(self, entry: Entry) -> Iterator[None]:
        together = sum(self._receiving.values()) + entry.body_bytes
        is_full = len(self._receiving) >= MAX_PUBLISHERS or together > MAX_RECEIVED_BYTES
        if self._receiving and is_full:
            raise Refusal(
                RefusalStatus.RESOURCE_EXHAUSTED, "too many entries at once; try again later"
            )
        self._receiving[entry.run_id, entry.position] = entry.body_bytes
        try:
            yield
        finally:
            del self._receiving[entry.run_id, entry.position]

    async def _fetch(
        self, request: pb.FetchRequest, _: _Call, __: AsyncIterator[Any]
    ) -> AsyncGenerator[pb.FetchReply]:
        what = request.WhichOneof("what")
        if what == "tokenizer":  # of the run, not of a module
            async for reply in self._tokenizer():
                yield reply
            return
        log = self._run.log_of(request.module)
        kinds: dict[str | None, Callable[[KeptLog, Any], AsyncGenerator[pb.FetchReply]]] = {
            "entries": self._entries,
            "body": self._body,
            "snapshot": self._snapshot,
            "leaves": self._leaves,
        }
        if what not in kinds:
            raise Refusal(
                RefusalStatus.INVALID_ARGUMENT,
                "expected entries, body, snapshot, leaves or tokenizer",
            )
        async with contextlib.aclosing(kinds[what](log, getattr(request, what or ""))) as replies:
            async for reply in replies:
                yield reply

    async def _entries(self, log: KeptLog, request: pb.EntryRange) -> AsyncGenerator[pb.FetchReply]:
        store = log.replica.store
        start, stop = request.start, request.start + min(request.count, MAX_ENTRIES)
        while start < stop:
            records = await asyncio.to_thread(store.headers, start, min(64, stop - start))
            if not records:
                return
            for record in records:
                if not record.certificate:  # it was damaged on the disk
                    return
                header = pb.EntryHeader(
                    epoch=record.epoch,
                    position=record.position,
                    entry=record.entry,
                    certificate=record.certificate,
                    chain=record.chain,
                    body_bytes=record.body_bytes,
                )
                yield pb.FetchReply(header=header)
            start = records[-1].position + 1

    async def _body(self, log: KeptLog, request: pb.BodyRange) -> AsyncGenerator[pb.FetchReply]:
        chunks = checked_body(log.replica.store, request.position, request.start, request.stop)
        with self._spare_place(request.gives_way):
            async for chunk in _in_thread(chunks):
                yield pb.FetchReply(chunk=chunk)

    async def _snapshot(
        self, log: KeptLog, request: pb.SnapshotRequest
    ) -> AsyncGenerator[pb.FetchReply]:
        store = log.replica.store
        info = await asyncio.to_thread(_find_snapshot, store, request)
        first_body = await asyncio.to_thread(store.first_with_bodies)
        yield pb.FetchReply(
            snapshot=pb.SnapshotInfo(
                position=info.position,
                chain=info.chain,
                root=info.root,
                leaf_digests=b"".join(info.leaf_digests),
                layout=info.layout.to_json(),
                first_body=first_body,
                signature=log.sign_root(info),
            )
        )

    async def _leaves(self, log: KeptLog, request: pb.LeafRange) -> AsyncGenerator[pb.FetchReply]:
        store = log.replica.store
        with self._spare_place(request.gives_way), store.lease(request.position):
            info = await asyncio.to_thread(store.snapshot, request.position)
            stop = min(request.start + request.count, len(info.leaf_digests))
            indices = range(request.start, stop)
            async for index, data in _in_thread(_packed_leaves(info, indices)):
                yield pb.FetchReply(leaf=pb.Leaf(index=index, data=data))

    @contextlib.contextmanager
    def _spare_place(self, gives_way: bool) -> Iterator[None]:
        if gives_way and self._giving_way >= MAX_GIVING_WAY:
            raise Refusal(
                RefusalStatus.RESOURCE_EXHAUSTED, "gives to enough others; ask your other donors"
            )
        self._giving_way += gives_way
        try:
            yield
        finally:
            self._giving_way -= gives_way

    async def _tokenizer(self) -> AsyncIterator[pb.FetchReply]:
        packed = self._packed_tokenizer
        if not packed:
            raise NotStored("the run's tokenizer does not travel with the run")
        for start in range(0, len(packed), CHUNK_BYTES):
            yield pb.FetchReply(chunk=packed[start : start + CHUNK_BYTES])

    async def _status(self, request: pb.StatusRequest, call: _Call) -> pb.StatusReply:
        self._pace(call)
        self._run.admission.expect_token(request.token, request.viewer)
        if not request.after:
            return pb.StatusReply(packed=await self._pages.page(request.module))
        status = self._run.status(request.module)
        earlier = await self._status_after(status, request.after)
        return pb.StatusReply(packed=await asyncio.to_thread(pack, earlier))

    async def _status_after(self, now: RunStatus, position: int) -> RunStatus:
        """Read an earlier status: it takes tens of milliseconds, so one at a time."""
        if self._num_looking_back >= MAX_LOOKING_BACK:
            raise Refusal(
                RefusalStatus.RESOURCE_EXHAUSTED, "too many look at earlier rounds; slow down"
            )
        self._num_looking_back += 1
        try:
            async with self._looking_back:
                last = min(position, LAST)
                return await asyncio.to_thread(self._run.status_at, now, last)
        finally:
            self._num_looking_back -= 1

    def _authenticate(self, auth: pb.Auth) -> None:
        _expect_size("peer_id", auth.peer_id, 128)
        self._run.admission.authenticate(auth.peer_id, auth.session)


_MALFORMED: Any = object()


def _reader(message: Any) -> Callable[[bytes], Any]:  # noqa: ANN401
    """Return a parser that marks bad messages: gRPC would log a traceback for each."""

    def read(raw: bytes) -> Any:  # noqa: ANN401
        try:
            return message.FromString(raw)
        except DecodeError:
            return _MALFORMED

    return read


def _expect_parsed(message: T) -> T:
    if message is _MALFORMED:
        raise Refusal(RefusalStatus.INVALID_ARGUMENT, "expected a message of service.proto")
    return message


def _head(head: StoreHead) -> pb.Head:
    return pb.Head(epoch=head.epoch, position=head.position, chain=head.chain)


def _expect_size(name: str, value: str | bytes, limit: int) -> None:
    if not 0 < len(value) <= limit:
        raise Refusal(
            RefusalStatus.INVALID_ARGUMENT, f"{name}: expected 1 to {limit} bytes, got {len(value)}"
        )


async def _dial_back(host: str, port: int, nonce: bytes) -> bool:
    """Return whether the caller itself answers at its own address; no other peer is ever dialed."""
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port, limit=len(nonce))
            return await reader.readexactly(len(nonce)) == nonce
    except (OSError, EOFError, TimeoutError):
        return False
    finally:
        if writer is not None:
            writer.transport.abort()


async def _receive(parts: AsyncIterator[pb.PublishRequest], size: int) -> memoryview:
    body, came = vectors.buffer(size), 0
    while came < size:
        part = await _next(parts)
        if part is None or part.WhichOneof("part") != "chunk" or not part.chunk:
            raise Refusal(RefusalStatus.INVALID_ARGUMENT, f"expected {size} bytes, got {came}")
        stop = came + len(part.chunk)
        if stop > size:
            raise Refusal(
                RefusalStatus.INVALID_ARGUMENT, f"expected {size} bytes, got {stop} or more"
            )
        body[came:stop] = part.chunk
        came = stop
    return body


async def _next(parts: AsyncIterator[pb.PublishRequest]) -> pb.PublishRequest | None:
    try:
        async with asyncio.timeout(PROGRESS_TIMEOUT_S):
            return _expect_parsed(await anext(parts, None))
    except TimeoutError:
        raise Refusal(
            RefusalStatus.RESOURCE_EXHAUSTED,
            f"nothing arrived for {PROGRESS_TIMEOUT_S:.0f} s; the call is ended",
        ) from None


async def _in_thread(items: Iterator[T]) -> AsyncIterator[T]:
    """Step through a blocking iterator without blocking the loop."""
    while (item := await asyncio.to_thread(next, items, None)) is not None:
        yield item


def _unless_known(record: bytes, known_sha256: bytes) -> bytes:
    """Return a record; nothing if the caller has it."""
    return b"" if known_sha256 == hashlib.sha256(record).digest() else record


def _find_snapshot(store: LogStore, request: pb.SnapshotRequest) -> SnapshotInfo:
    positions = store.snapshot_positions()
    return store.snapshot(positions[-1] if request.latest else request.position)


def _packed_leaves(info: SnapshotInfo, indices: range) -> Iterator[tuple[int, bytes]]:
    with info.path.open("rb") as file:
        for index in indices:
            file.seek(index * LEAF_BYTES)
            yield index, planes.pack(file.read(LEAF_BYTES))


def _answer(error: Exception) -> tuple[Any, str]:
    if isinstance(error, Refusal):
        return grpc.StatusCode[error.status.name], str(error)[:500]
    if isinstance(error, StatusError):
        return grpc.StatusCode.INVALID_ARGUMENT, str(error)[:500]
    if isinstance(error, NotStored):
        return grpc.StatusCode.NOT_FOUND, str(error)[:500]
    if isinstance(error, TimeoutError):
        return grpc.StatusCode.DEADLINE_EXCEEDED, (
            "the call is ended: nothing was read in time, or too many run at once"
        )
    log.error("a call failed", exc_info=error)
    return grpc.StatusCode.INTERNAL, "the coordinator failed at this call; its log gives the reason"
