"""The client of the coordinator's service, used by peers.

    client = CoordinatorClient(invite, identity, version="0.1.0")
    joined = await client.join()
    beat = await client.heartbeat(status, traces=[...])
    await client.publish(position=..., ...)         when beat.publish_from asks for entries

Each call has a deadline and fails with one of `atoll.coordinator.rpc.client_errors`; connections
are made in `atoll.coordinator.rpc.channel`.

Replies are checked like untrusted bytes, although the pinned certificate identifies the
coordinator: the spec must have the digest that the invite's run id names.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc

from atoll.coordinator.rpc import service_pb2 as pb
from atoll.coordinator.rpc.channel import EOF, StatusClient, stub
from atoll.coordinator.rpc.client_errors import BadReply, NotWelcome
from atoll.coordinator.rpc.messages import (
    CALL_TIMEOUT_S,
    CHUNK_BYTES,
    MAX_HEARTBEAT_S,
    PROGRESS_TIMEOUT_S,
    PROTOCOL,
    join_payload,
)
from atoll.coordinator.run.admission import Admission, AdmissionCheck, AdmissionRefused, Role
from atoll.coordinator.run.eviction import Evictions, EvictionsInvalid
from atoll.coordinator.run.invite import Invite
from atoll.coordinator.run.releases import MAX_RELEASE_CHARS
from atoll.coordinator.run.relocation import RelocationInvalid
from atoll.coordinator.run.spec import RunSpec, run_id
from atoll.coordinator.run.spec_problems import SpecError
from atoll.coordinator.run.status import Event, PeerStatus, RoundReport
from atoll.coordinator.run.tokenizer_file import MAX_PACKED_BYTES, TokenizerFileError, unpack
from atoll.dht import Identity
from atoll.optim.log.entry import SignedRoot
from atoll.optim.log.orders import MAX_PENDING
from atoll.optim.log.store import StoreHead
from atoll.optim.state.layout import Layout, LayoutError
from atoll.optim.state.outer_state import LEAF_BYTES, merkle_root, snapshot_bytes

Asking = AbstractAsyncContextManager[Callable[[int], None]]
"""A time in which bytes were asked for; gives what is to be told of their arrival."""

APPLY_B_S = 50e6  # lowest rate; the coordinator applies an entry before it acknowledges it


@dataclass(frozen=True, kw_only=True)
class Joined:
    """The coordinator's reply to a peer that joins."""

    spec: RunSpec
    admission: bytes
    """The credential for `Transport.admission`."""
    role: Role
    """As the admission states it."""
    module: str = ""
    """The module whose log this peer follows; empty in a dense run."""
    layout: Layout
    genesis_root: bytes
    epoch: bytes
    """Newest signed epoch (atoll.optim.log.entry.SignedEpoch); empty before the run starts."""
    head: StoreHead
    bootstrap: tuple[str, ...]
    clock_offset_s: float
    """Add this to our clock to get the coordinator's."""
    heartbeat_s: float


@dataclass(frozen=True, kw_only=True)
class Beat:
    """The coordinator's answer to a heartbeat."""

    epoch: bytes
    """Newest signed epoch; empty before the run starts."""
    head: StoreHead
    bootstrap: tuple[str, ...]
    publish_from: int | None
    """Position from which the coordinator asks this peer to publish entries."""
    admission: bytes
    """A renewed credential, or empty."""
    finished: bool
    heartbeat_s: float
    roster: bytes = b""
    """Signed records of peers, in answer to the heartbeat's question."""
    orders: tuple[bytes, ...] = ()
    """Signed orders of the organiser's that the coordinator's log lacks."""
    version: str = ""
    """The version of Atoll that the coordinator runs; empty if it does not tell it."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """The coordinator's answer to a published entry."""

    accepted: bool
    """False if the coordinator has it already, or expects another position: see `head`."""
    head: StoreHead


@dataclass(frozen=True, kw_only=True)
class FetchedEntry:
    """An unverified entry of the coordinator's log."""

    epoch: int
    position: int
    entry: bytes
    certificate: bytes
    chain: bytes
    body_bytes: int


@dataclass(frozen=True, kw_only=True)
class FetchedSnapshot:
    """The leaf digests of a snapshot; they hash to `root`, which is unverified."""

    position: int
    chain: bytes
    root: bytes
    leaf_digests: tuple[bytes, ...]
    layout: Layout
    first_body: int
    """Position from which the coordinator holds every body; above 0 after a gap in its log."""
    signature: bytes = b""
    """The run's key made it for the root (`root_payload`); it is not verified, and may be empty."""

    @property
    def signed_root(self) -> SignedRoot | None:
        """The root with its signature, None without one."""
        if not self.signature:
            return None
        return SignedRoot(
            position=self.position, chain=self.chain, root=self.root, signature=self.signature
        )


class CoordinatorClient(StatusClient):
    """A session with the coordinator of an invite, in the event loop of its first call.

    The coordinator admits `identity`; a `StatusClient` needs none.
    """

    def __init__(
        self,
        invite: Invite,
        identity: Identity,
        *,
        role: Role = "trainer",
        was_keeper: bool = False,
        version: str = "",
        module: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(invite)
        self.clock_offset_s = 0.0
        self.clock_error_s = 0.0
        """by how much that may be wrong at most: half of the call in which it was measured"""
        self.module = module
        """The module whose log this peer follows, or asks for; if empty, joining sets it."""
        self.before_chunk: Callable[[int], Awaitable[None]] = _at_once
        """Awaited before each piece of a body is sent, with its bytes: a link may have a cap."""
        self.asking: Callable[[int], Asking] = _at_any_time
        """Entered before so many bytes of a body or state are asked for, and told what came."""
        self.leaves_a_call = 1 << 30
        """Leaves of a state to ask for at once: gRPC takes more than is read."""
        self._identity = identity
        self._role = role
        self._was_keeper = was_keeper
        self._version = version
        self._clock = clock
        self._session = b""
        self._epoch = b""
        self._evicted_record = b""
        self._evicted = Evictions(issued_s=0, peer_ids=frozenset())
        self.admissions = AdmissionCheck(
            invite.run_key,
            invite.run_id,
            clock=self.now_s,
            is_evicted=self.is_evicted,
            is_revoked=self.is_revoked,
        )
        """Judges the admissions of others."""

    def is_evicted(self, peer_id: str) -> bool:
        """Return True if the organiser put a peer out, as far as the coordinator has reported."""
        return peer_id in self._evicted.peer_ids

    def is_revoked(self, invite: str) -> bool:
        """Return True if an invite was revoked, as far as the coordinator has reported."""
        return invite in self._evicted.invites

    @property
    def evictions(self) -> bytes:
        """The newest signed list of evictions, for a start without the coordinator."""
        return self._evicted_record

    def recall_evictions(self, record: bytes) -> None:
        """Take a list that an earlier process got; a damaged one is as good as none."""
        with suppress(BadReply):
            self._take_evicted(record)

    async def follow(self) -> None:
        """Connect to the newest address with the next call, unless this session is there."""
        newest = self.whereabouts.relocation
        if newest is not None and self._dialed not in newest.addresses:
            self._address = 0
            await self.close()

    @property
    def joined(self) -> bool:
        """True if there is a session."""
        return bool(self._session)

    def now_s(self) -> float:
        """Return seconds since 1970 by the coordinator's clock, as far as it is known."""
        return self._clock() + self.clock_offset_s

    async def join(self) -> Joined:
        """Prove the peer's identity and join the run."""
        identity = self._identity
        asked_s = self._clock()
        challenge = await self._call("Challenge", pb.ChallengeRequest(peer_id=identity.peer_id))
        self._measure_clock(challenge.server_time_s, asked_s)
        reply = await self._call("Join", self._join_request(identity, challenge.nonce))
        joined = self._read_joined(reply)
        self.module = joined.module
        self._session = reply.session
        self._epoch = reply.epoch
        self._take_evicted(reply.evicted)
        self._take_relocation(reply.relocation)
        return joined

    def _measure_clock(self, server_time_s: float, asked_s: float) -> None:
        answered_s = self._clock()
        # The reply's time is taken for the middle of the call, as in NTP.
        self.clock_offset_s = server_time_s - (asked_s + answered_s) / 2
        self.clock_error_s = abs(answered_s - asked_s) / 2

    async def probe(self, port: int, nonce: bytes) -> tuple[str, bool]:
        """Let the coordinator dial this peer back, which then sends `nonce`.

        Returns:
            The address that the coordinator sees, and whether the nonce came from there.
        """
        reply = await self._call(
            "Probe", pb.ProbeRequest(auth=self._auth(), port=port, nonce=nonce)
        )
        return reply.address, reply.reached

    async def heartbeat(
        self,
        status: PeerStatus,
        *,
        events: Sequence[Event] = (),
        traces: Sequence[RoundReport] = (),
        leaving: bool = False,
        retired: bool = False,
        roster: bytes = b"",
        evidence: bytes = b"",
    ) -> Beat:
        """Report the peer's status, or with `leaving` say goodbye.

        `retired` adds that this peer no longer votes from its epoch and position on; `roster` asks
        for records of peers (`atoll.dht.roster`); `evidence` is a record against a peer
        (`atoll.optim.log.evidence`). Raises NotWelcome when the peer must join again.
        """
        request = pb.HeartbeatRequest(
            auth=self._auth(),
            status=status.to_json(),
            events=[event.to_json() for event in events],
            traces=[trace.to_json() for trace in traces],
            leaving=leaving,
            retired=retired,
            roster=roster,
            evidence=evidence,
            # Spares the reply the record: it names all electors, 28 kB for 256 of them.
            epoch_sha256=hashlib.sha256(self._epoch).digest() if self._epoch else b"",
            evicted_sha256=hashlib.sha256(self._evicted_record).digest(),
            relocation_sha256=hashlib.sha256(self.whereabouts.record).digest(),
        )
        asked_s = self._clock()
        reply = await self._call("Heartbeat", request)
        self._measure_clock(reply.server_time_s, asked_s)
        self._epoch = reply.epoch or self._epoch
        self._take_evicted(reply.evicted)
        self._take_relocation(reply.relocation)
        if reply.admission:  # a new one, now and then
            self._open_admission(reply.admission)
        return Beat(
            epoch=self._epoch,
            head=_head(reply.head),
            bootstrap=tuple(reply.bootstrap)[:16],
            publish_from=reply.publish_from if reply.publish else None,
            admission=reply.admission,
            finished=reply.finished,
            roster=reply.roster,
            orders=tuple(reply.orders)[:MAX_PENDING],
            version=reply.version[:MAX_RELEASE_CHARS],
            heartbeat_s=min(max(reply.heartbeat_s, 0.1), MAX_HEARTBEAT_S),
        )

    async def publish(
        self,
        *,
        epoch: int,
        position: int,
        entry: bytes,
        certificate: bytes,
        body: bytes | bytearray | memoryview,
    ) -> Published:
        """Send the coordinator an entry that it lacks."""
        view = memoryview(body)
        header = pb.PublishHeader(
            auth=self._auth(),
            epoch=epoch,
            position=position,
            entry=entry,
            certificate=certificate,
            body_bytes=len(view),
            module=self.module,
        )
        reply = await self._offer(header, view)
        return Published(accepted=reply.accepted, head=_head(reply.head))

    async def fetch_entries(self, start: int, count: int) -> AsyncIterator[FetchedEntry]:
        """Yield the coordinator's entries from `start` on, in order; none if it has none."""
        what = pb.EntryRange(start=start, count=count)
        request = pb.FetchRequest(auth=self._auth(), module=self.module, entries=what)
        async for reply in self._stream_out("Fetch", request):
            header = _expect(reply, "header")
            yield FetchedEntry(
                epoch=header.epoch,
                position=header.position,
                entry=header.entry,
                certificate=header.certificate,
                chain=header.chain,
                body_bytes=header.body_bytes,
            )

    async def fetch_body(
        self, position: int, start: int, into: memoryview, *, gives_way: bool = False
    ) -> None:
        """Fetch bytes of an entry's body, from `start` on as many as `into` holds, unverified.

        Raises:
            Busy: the coordinator gives to enough others that give way, as this call does.
        """
        stop = start + len(into)
        what = pb.BodyRange(position=position, start=start, stop=stop, gives_way=gives_way)
        request = pb.FetchRequest(auth=self._auth(), module=self.module, body=what)
        replies, at = self._stream_out("Fetch", request), 0
        while at < len(into):
            async with self.asking(min(CHUNK_BYTES, len(into) - at)) as came:
                reply = await anext(replies, None)
                chunk = b"" if reply is None else _expect(reply, "chunk")
                if not 0 < len(chunk) <= len(into) - at:
                    raise BadReply(f"expected {len(into)} bytes of a body, got {at + len(chunk)}")
                into[at : at + len(chunk)] = chunk
                at += len(chunk)
                came(len(chunk))

    async def fetch_snapshot(self, position: int | None = None) -> FetchedSnapshot:
        """Return the digests of a snapshot, by default the newest; position 0 is the genesis."""
        what = pb.SnapshotRequest(latest=position is None, position=position or 0)
        request = pb.FetchRequest(auth=self._auth(), module=self.module, snapshot=what)
        async for reply in self._stream_out("Fetch", request):
            return _read_snapshot(_expect(reply, "snapshot"))
        raise BadReply("expected a snapshot, got nothing")

    async def fetch_leaves(
        self, position: int, start: int = 0, count: int = 1 << 30, *, gives_way: bool = False
    ) -> AsyncGenerator[tuple[int, bytes]]:
        """Yield a snapshot's leaves with their index, packed and unverified, for an `Assembly`.

        Raises:
            Busy: as `fetch_body`.
        """
        stop, is_there = start + count, True
        while start < stop and is_there:
            asked, is_there = min(stop - start, self.leaves_a_call), False
            what = pb.LeafRange(position=position, start=start, count=asked, gives_way=gives_way)
            request = pb.FetchRequest(auth=self._auth(), module=self.module, leaves=what)
            expected = iter(range(start, start + asked))
            async with self.asking(asked * LEAF_BYTES) as came:
                async for reply in self._stream_out("Fetch", request):
                    leaf = _expect(reply, "leaf")
                    if leaf.index != next(expected, None):  # nor may it go on without an end
                        raise BadReply(f"leaf {leaf.index} out of turn, from {start} of {asked}")
                    if len(leaf.data) > LEAF_BYTES:
                        raise BadReply(f"leaf {leaf.index}: expected at most {LEAF_BYTES} bytes")
                    is_there = True
                    came(len(leaf.data))
                    yield leaf.index, leaf.data
            start += asked

    async def fetch_tokenizer(self, *, sha256: str, size: int) -> bytes:
        """Return the run's tokenizer file, checked against the spec's digest and size.

        Raises:
            CoordinatorError: the coordinator is away, does not hold it, or sends another file.
        """
        request = pb.FetchRequest(auth=self._auth(), tokenizer=pb.TokenizerRequest())
        packed = bytearray()
        async for reply in self._stream_out("Fetch", request):
            packed += _expect(reply, "chunk")
            if len(packed) > MAX_PACKED_BYTES:
                raise BadReply(f"expected a tokenizer of at most {MAX_PACKED_BYTES} bytes")
        try:
            return await asyncio.to_thread(unpack, bytes(packed), sha256=sha256, size=size)
        except TokenizerFileError as error:
            raise BadReply(str(error)) from None

    # Inside

    def _auth(self) -> pb.Auth:
        if not self._session:
            raise NotWelcome(grpc.StatusCode.UNAUTHENTICATED, "no session; join first")
        return pb.Auth(peer_id=self._identity.peer_id, session=self._session)

    def _take_evicted(self, record: bytes) -> None:
        """Take a newer list of evictions; the coordinator sends none that is known here."""
        if not record:
            return
        try:
            evicted = Evictions.open(record, self.invite.run_key, self.invite.run_id)
        except EvictionsInvalid as error:
            raise BadReply(str(error)) from None
        if evicted.issued_s >= self._evicted.issued_s:
            self._evicted, self._evicted_record = evicted, record

    def _take_relocation(self, record: bytes) -> None:
        """Take where the coordinator is; it sends nothing that is known here."""
        if not record:
            return
        try:
            self.whereabouts.take(record)
        except RelocationInvalid as error:
            raise BadReply(str(error)) from None

    def _join_request(self, identity: Identity, nonce: bytes) -> pb.JoinRequest:
        return pb.JoinRequest(
            protocol=PROTOCOL,
            version=self._version,
            run_id=self.invite.run_id,
            peer_id=identity.peer_id,
            role=self._role,
            nonce=nonce,
            signature=identity.sign(join_payload(self.invite.run_id, nonce)),
            token=self.invite.token,
            module=self.module,
        )

    def _read_joined(self, reply: pb.JoinReply) -> Joined:
        try:
            spec = RunSpec.from_json(reply.spec)
            layout = Layout.from_json(reply.layout)
        except (SpecError, LayoutError) as error:
            raise BadReply(f"{error}; use the organiser's version of Atoll") from None
        if bytes.fromhex(run_id(spec, self.invite.run_key)) != self.invite.run_id:
            raise BadReply("expected the spec of the invite's run, got another")
        admission = self._open_admission(reply.admission)
        if reply.module not in spec.modules:
            raise BadReply(f"expected a module of the run, got {reply.module[:64]!r}")
        return Joined(
            spec=spec,
            module=reply.module,
            admission=reply.admission,
            role=admission.role,
            layout=layout,
            genesis_root=_digest(reply.genesis_root),
            epoch=reply.epoch,
            head=_head(reply.head),
            bootstrap=tuple(reply.bootstrap)[:16],
            clock_offset_s=self.clock_offset_s,
            heartbeat_s=min(max(reply.heartbeat_s, 0.1), MAX_HEARTBEAT_S),
        )

    def _open_admission(self, credential: bytes) -> Admission:
        """Return an admission of this peer; what was a keeper takes none of another role.

        A coordinator that was restored from an older copy may not know its invite. With its session
        it would count as a trainer there, so that goes too.
        """
        try:
            check = AdmissionCheck(self.invite.run_key, self.invite.run_id, clock=self.now_s)
            admission = check.check(self._identity.peer_id, credential)
        except AdmissionRefused as error:
            raise BadReply(f"the coordinator sent an invalid admission: {error.message}") from None
        if self._was_keeper and admission.role != "keeper":
            self._session = b""
            raise NotWelcome(
                grpc.StatusCode.PERMISSION_DENIED,
                "the coordinator does not know this keeper any more; ask the organiser for "
                "another invite (`atoll invite --role keeper`), and start it with that. A trainer "
                "needs a folder of its own (--state-dir)",
            )
        self._was_keeper = admission.role == "keeper"
        return admission

    async def _offer(self, header: pb.PublishHeader, body: memoryview) -> pb.PublishReply:
        async def call(channel: Any) -> pb.PublishReply:  # noqa: ANN401
            stream = stub(channel, "Publish")()
            try:
                await _write(stream, pb.PublishRequest(header=header))
                reply = await _reply(stream, CALL_TIMEOUT_S)
                if reply.send_body:
                    for start in range(0, len(body), CHUNK_BYTES):
                        chunk = bytes(body[start : start + CHUNK_BYTES])
                        await self.before_chunk(len(chunk))
                        await _write(stream, pb.PublishRequest(chunk=chunk))
                    await stream.done_writing()
                    reply = await _reply(stream, CALL_TIMEOUT_S + header.body_bytes / APPLY_B_S)
                return reply
            finally:
                stream.cancel()

        return await self._with_channel(call)


async def _at_once(num_bytes: int) -> None:
    pass


@asynccontextmanager
async def _at_any_time(num_bytes: int) -> AsyncIterator[Callable[[int], None]]:
    yield lambda arrived: None


async def _write(stream: Any, part: pb.PublishRequest) -> None:  # noqa: ANN401
    await asyncio.wait_for(stream.write(part), PROGRESS_TIMEOUT_S)


async def _reply(stream: Any, timeout_s: float) -> pb.PublishReply:  # noqa: ANN401
    reply = await asyncio.wait_for(stream.read(), timeout_s)
    if reply is EOF:
        raise BadReply("the coordinator closed the stream without answering an entry")
    return reply  # type: ignore[no-any-return]


def _expect(reply: Any, part: str) -> Any:  # noqa: ANN401
    if reply.WhichOneof("part") != part:
        raise BadReply(f"expected a {part}, got {reply.WhichOneof('part')}")
    return getattr(reply, part)


def _read_snapshot(info: pb.SnapshotInfo) -> FetchedSnapshot:
    try:
        layout = Layout.from_json(info.layout)
    except LayoutError as error:
        raise BadReply(str(error)) from None
    least = -(-snapshot_bytes(layout, 0) // LEAF_BYTES)
    if len(info.leaf_digests) % 32 or len(info.leaf_digests) < 32 * least:
        raise BadReply(
            f"expected at least {least} leaf digests of 32 bytes, "
            f"got {len(info.leaf_digests)} bytes"
        )
    raw = info.leaf_digests
    digests = tuple(raw[i : i + 32] for i in range(0, len(raw), 32))
    if merkle_root(digests) != info.root:
        raise BadReply("the leaf digests do not hash to the snapshot's root")
    return FetchedSnapshot(
        position=info.position,
        chain=_digest(info.chain),
        root=info.root,
        leaf_digests=digests,
        layout=layout,
        first_body=info.first_body,
        signature=info.signature,
    )


def _head(head: pb.Head) -> StoreHead:
    return StoreHead(epoch=head.epoch, position=head.position, chain=_digest(head.chain))


def _digest(raw: bytes) -> bytes:
    if len(raw) != 32:
        raise BadReply(f"expected a digest of 32 bytes, got {len(raw)}")
    return raw
