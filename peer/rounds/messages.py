"""Messages between peers in a round. The rules are in `docs/protocol.md`.

Calls (one message, one reply)::

    head     Known     -> Head       where the peer stands; also the test whether it is alive
    prepare  Prepare   -> Promise    a later leader asks what was accepted before
    propose  Propose   -> Ballot     the leader asks for a vote
    voted    Voted     -> b""        an elector tells the others of its vote
    evidence Evidence  -> b""        two signatures that contradict each other (`evidence.py`)
    commit   Announced -> b""        an entry with its certificate, and whom to pass it on to
    group    Closed    -> b""        a closed group, and whom to pass it on to
    seals    Seals     -> b""        its reports' signatures, for acceptors, that pass them on

Streams (duplex; an empty message is a sign of life)::

    round    Ready -> ; <- Closed, (Repair | Gone)* ; Seated, PartDone* ->   member and leader
    reduce   (Reduce | Upfront), cells -> ; <- cells, PartDone     member and relay; both and owner
    part     PartRequest ->  <- pieces of a part that the entry names by digest
    headers  Span ->         <- Decided*                                 entries with certificates
    body     BodyRequest ->  <- pieces of the body of an entry
    digests  LeafRequest ->  <- pieces of the digests of a snapshot's leaves
    leaves   LeavesRequest ->  <- leaves of a snapshot

A message of the streams ``round`` and ``reduce`` is one byte naming the kind, then the record; for
cells the kind ``CELL`` and whole frames, each with its length before it
(``atoll.optim.reduction.cells``).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    AfterValidator,
    FailFast,
    Field,
    FiniteFloat,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from atoll.optim.log.entry import (
    HEAD_BYTES,
    MAX_ELECTORS,
    MAX_MEMBERS,
    Count,
    Digest,
    EntryHead,
    Incarnation,
    MalformedRecord,
    Member,
    Part,
    PeerId,
    Record,
    Signature,
    decode_first,
    sha256,
    without_units,
)
from atoll.optim.log.locks import Justification, Lock
from atoll.optim.state.outer_step import to_fp32

PROTOCOL = 15  # peers of another protocol refuse each other's reports
# Members above which relays add up their rows' codes (`rows`), nothing goes up front, and only
# acceptors get the reports' signatures: an owner would hold the codes of all before it knows what
# they weigh, and signatures are half of a group's bytes. With fewer members the bytes of sums cost
# more than connections do.
RELAYED_ABOVE = 64
PIECE_BYTES = 256 * 1024  # the message size at which libp2p streams are fastest (measured)
MAX_SNAPSHOTS = 64  # that a peer names; it keeps a few, and each named one is looked up
MAX_GROUP_BYTES = 2 << 20  # 4,096 members of some 290 bytes, their reports and parts
SMALL_BYTES = 4096  # of a record without lists: twice what its signatures may take
PACED_BYTES = 64 * 1024  # of cells in a round: 5 ms at 100 Mbit/s, so that receivers take turns

Weight = Annotated[FiniteFloat, Field(ge=0)]


def is_large(members: int) -> bool:
    """Return whether a group is too large for eager sends, and may reduce in rows."""
    return members > RELAYED_ABOVE


def _with_fp32_weight(member: Member) -> Member:
    try:
        held = to_fp32(member.weight)
    except ValueError:
        held = None
    if held != member.weight:
        raise ValueError(f"expected a weight that fp32 holds, got {member.weight}")
    return member


Admitted = Annotated[Member, AfterValidator(_with_fp32_weight)]
"""A member as the leader admitted it; updates carry its weight in fp32, and what that does not hold
would differ from member to member."""


class Known(Record):
    """The epoch whose record the caller has; None if it has none."""

    epoch: Count | None
    roster: bytes = b""
    """a question for signed records of peers (`atoll.dht.roster`); empty if none are wanted"""


class Head(Record):
    """A peer's place in the log, and what it can give to others."""

    protocol: Count
    epoch: Count
    position: Count
    chain: Digest
    incarnation: Incarnation | None
    """none of a follower, which has no process of a peer"""
    role: str
    ready_in_s: Weight
    first_body: Count
    snapshots: Annotated[tuple[Count, ...], Field(max_length=MAX_SNAPSHOTS)]
    epoch_record: bytes
    """empty where the caller has it, or a newer one"""
    roster: bytes = b""
    """signed records of peers, at most 32, in answer to the caller's question"""
    open_term: Count = 0
    """the newest term at its position that this peer may promise, as an elector"""


class Report(Record):
    """A member signs this about its contribution; all its weights follow from it."""

    epoch: Count
    position: Count
    incarnation: Incarnation
    weight: Weight
    tokens: Count
    steps: Count
    loss: FiniteFloat | None
    norm: Weight
    uplink_mbit_s: Weight
    units: Count = 0
    """of its lease that it has done (`optim/log/units.py`); left out if there are none"""

    @model_serializer(mode="wrap")
    def _dump(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return without_units(handler(self))


def report_payload(run_id: bytes, report: Report) -> bytes:
    """Return what a member signs."""
    return b"atoll report 1" + run_id + sha256(report.encode())


class Ready(Record):
    """A contribution is encoded and waits for a group."""

    max_bytes: ClassVar[int] = 16 << 20

    protocol: Count
    term: Count
    stands_at: Count
    """the sender's place in the log: the report's position, or before it, if it reduces early"""
    chain: Digest
    """the log's chain there"""
    report: Report
    signature: Signature
    """of the report, by the sender"""

    @property
    def epoch(self) -> int:
        """The epoch of the contribution."""
        return self.report.epoch

    @property
    def position(self) -> int:
        """The position of the contribution."""
        return self.report.position

    def repeats(self, other: Ready) -> bool:
        """Return whether it reports the same contribution in the same term."""
        one, before = (self.term, self.report), (other.term, other.report)
        return one == before and self.signature == other.signature


class Sworn(Record):
    """The part of a member's signed report that its `Member` does not show."""

    counts: bool
    """whether the reported weight is above 0; then it follows from tokens and steps"""
    uplink_mbit_s: Weight
    signature: Annotated[bytes, Field(max_length=1024)]
    """empty in a large group on its way to its members"""


Reports = Annotated[tuple[Sworn, ...], FailFast(), Field(max_length=MAX_MEMBERS)]


def reports_root(sworn: Sequence[Sworn]) -> bytes:
    """Return the digest by which an entry names its members' reports; empty without members."""
    return sha256(b"".join(one.encode() for one in sworn)) if sworn else b""


class PartPlan(Record):
    """Cells, and the member that reduces them."""

    start_cell: Count
    stop_cell: Count
    owner: Count


class Group(Record):
    """A closed group."""

    max_bytes: ClassVar[int] = MAX_GROUP_BYTES

    epoch: Count
    position: Count
    term: Count
    members: Annotated[
        tuple[Admitted, ...], FailFast(), Field(min_length=1, max_length=MAX_MEMBERS)
    ]
    parts: Annotated[tuple[PartPlan, ...], FailFast()]
    stall_s: Weight
    deadline_s: Weight
    reports: Reports = ()
    """one for each member, in their order"""

    @property
    def digest(self) -> bytes:
        """The group's name."""
        return sha256(self.sent().encode())

    def sent(self) -> Group:
        """Return the group as its members get it: a large one without its reports' signatures.

        These do not compress, and only the acceptors check them all (`Seals`).
        """
        if not is_large(len(self.members)) or not any(one.signature for one in self.reports):
            return self
        return self.model_copy(update={"reports": _signed(self.reports, repeat(b""))})


def _signed(reports: Reports, signatures: Iterable[bytes]) -> Reports:
    return tuple(
        one.model_copy(update={"signature": signature})
        for one, signature in zip(reports, signatures, strict=False)
    )


class Seals(Record):
    """The signatures of a large group's reports, on their way to its acceptors."""

    max_bytes: ClassVar[int] = 1 << 19  # 4,096 members have 270 KB of signatures

    epoch: Count
    position: Count
    term: Count
    group: Digest
    signatures: Annotated[tuple[Signature, ...], FailFast(), Field(max_length=MAX_MEMBERS)]
    signature: Signature
    """of the leader, over the group and the reports with these signatures"""
    tell: Annotated[tuple[Count, ...], FailFast(), Field(max_length=MAX_MEMBERS)]
    """members that the receiver passes them on to"""

    def sealed(self, group: Group, digest: bytes) -> Reports:
        """Return the reports of a group, signed.

        Raises:
            MalformedRecord: these signatures are of another group than that of this digest.
        """
        if self.group != digest or len(self.signatures) != len(group.members):
            raise MalformedRecord("seals: expected those of this peer's group")
        return _signed(group.reports, self.signatures)


class Closed(Record):
    """A group on its way to its members, as its leader closed it."""

    group: Annotated[bytes, Field(max_length=MAX_GROUP_BYTES)]
    """the record, deflated"""
    signature: Signature
    """of the leader, by which members believe it whoever it comes from"""
    tell: Annotated[tuple[Count, ...], FailFast(), Field(max_length=MAX_MEMBERS)]
    """members that the receiver passes it on to"""


class Seated(Record):
    """A member says that somebody passed it the group."""

    group: Digest


class Repair(Record):
    """A part is reduced again under a new owner, from the members that are left."""

    part: Count
    generation: Count
    owner: Count
    senders: tuple[Count, ...]


class Prefix(Record):
    """A member of which only the first cells of a part arrived."""

    member: Count
    cells: Count


class Gone(Record):
    """A member's session ended: no owner has to wait for a stream that it has not opened."""

    member: Count


class PartDone(Record):
    """An owner's word on a finished part."""

    part: Count
    generation: Count
    wire_bytes: Count
    digest: Digest
    partial: tuple[Prefix, ...]


class Reduce(Record):
    """The head of a reduction stream: which part of which group it carries."""

    position: Count
    group: Digest
    """of the Group record: a position may have several groups, one after the other"""
    part: Count
    generation: Count
    sums: bool
    """whether it carries the sums of its sender's row, not its sender's cells"""


class PlannedPart(Record):
    """Cells, and the peer that is expected to reduce them."""

    start_cell: Count
    stop_cell: Count
    owner: PeerId


def planned_parts(
    parts: Sequence[PartPlan | Part], members: Sequence[Member]
) -> tuple[PlannedPart, ...]:
    """The parts of a group or of an entry, by their owners' names."""
    return tuple(
        PlannedPart(
            start_cell=part.start_cell,
            stop_cell=part.stop_cell,
            owner=members[part.owner].peer_id,
        )
        for part in parts
    )


class Plan(Record):
    """The cut of a position, whoever its members are."""

    epoch: Count
    position: Count
    parts: tuple[PlannedPart, ...]

    @property
    def digest(self) -> bytes:
        """The plan's name."""
        return sha256(self.encode())


class Upfront(Record):
    """The head of a reduction stream that comes before the group is closed."""

    position: Count
    plan: Digest
    part: Count
    norm: Weight
    """as in the Ready record of the contribution that the codes are of"""


class Prepare(Record):
    """A leader asks, before any attempt but the first, for promises."""

    max_bytes: ClassVar[int] = SMALL_BYTES

    epoch: Count
    position: Count
    attempt: Count


class Promise(Record):
    """Nothing below ``attempt`` will be accepted any more; ``entry`` was accepted before."""

    max_bytes: ClassVar[int] = 17 << 20

    attempt: Count
    accepted_attempt: Count
    entry: bytes
    """deflated; empty: none"""
    reports: Reports = ()
    """of the entry's members"""


class LockedPromise(Record):
    """A promise in a run that tolerates liars: signed, with the highest lock that is kept."""

    max_bytes: ClassVar[int] = 17 << 20

    lock: Lock | None
    entry: bytes
    """the lock's, deflated; empty: none"""
    signature: Signature
    reports: Reports = ()
    """of the entry's members"""


class Propose(Record):
    """The leader asks for a vote."""

    max_bytes: ClassVar[int] = 17 << 20

    attempt: Count
    entry: bytes
    """deflated"""
    signature: Signature
    """of the leader, so that two proposals at one attempt prove its lie to everyone"""
    group: Annotated[bytes, Field(max_length=32)] = b""
    """the digest of the group whose members the entry has; then it comes without them"""
    reports: Reports = ()
    """of the entry's members; empty with a group, whose reports the acceptor has"""


class JustifiedPropose(Propose):
    """The same in a run that tolerates liars, with the promises that allow it."""

    justification: Justification


class AskCommit(Record):
    """The leader asks for a commit: a quorum has voted."""

    max_bytes: ClassVar[int] = 17 << 20

    epoch: Count
    position: Count
    lock: Lock
    entry: bytes
    """deflated; empty for an elector whose vote is in the lock"""
    reports: Reports = ()
    """of its members; empty with it"""


class ProposeHead(Record):
    """The first fields of `Propose`."""

    attempt: Count
    entry: bytes


class AnnouncedHead(Record):
    """The first fields of `Announced`."""

    entry: bytes
    certificate: bytes


class GroupHead(Record):
    """The first fields of `Group`."""

    epoch: Count
    position: Count
    term: Count


class AskCommitHead(Record):
    """The first fields of `AskCommit`."""

    epoch: Count
    position: Count


class Ballot(Record):
    """The signature of a vote or of a commit."""

    signature: Signature


class AskHeard(Record):
    """A leader asks which acceptors of a position another one hears, of those that it does not."""

    max_bytes: ClassVar[int] = SMALL_BYTES

    epoch: Count
    position: Count
    peers: Annotated[tuple[PeerId, ...], Field(max_length=MAX_ELECTORS)]


class Heard(Record):
    """Names those that answer; the others may be dropped from the next position's electorate."""

    max_bytes: ClassVar[int] = SMALL_BYTES

    peers: Annotated[tuple[PeerId, ...], Field(max_length=MAX_ELECTORS)]


class Voted(Record):
    """A vote, as the electors of a small electorate tell each other."""

    max_bytes: ClassVar[int] = SMALL_BYTES

    epoch: Count
    position: Count
    attempt: Count
    entry: Digest
    signature: Signature
    proposal: Signature
    """of the leader for the same entry"""


class Decided(Record):
    """An entry and the certificate that makes it so."""

    max_bytes: ClassVar[int] = 17 << 20

    entry: bytes
    certificate: bytes


class Announced(Record):
    """A decided entry on its way to everyone."""

    max_bytes: ClassVar[int] = 18 << 20

    entry: bytes
    """deflated"""
    certificate: bytes
    tell: Annotated[tuple[PeerId, ...], FailFast(), Field(max_length=MAX_MEMBERS)]
    """whom the receiver passes it on to"""


class PartRequest(Record):
    """A part of the position in progress, by digest."""

    digest: Digest
    wire_bytes: Count


class Span(Record):
    """The entries ``[start, stop)``."""

    start: Count
    stop: Count


class BodyRequest(Record):
    """The bytes ``[start, stop)`` of the body of the entry at ``position``."""

    position: Count
    start: Count
    stop: Count
    gives_way: bool
    """the reader asks again if a round needs the donor's link; it is in no hurry"""


class LeafRequest(Record):
    """Leaves ``[start, stop)`` of the snapshot at ``position``."""

    position: Count
    start: Count
    stop: Count


class LeavesRequest(LeafRequest):
    """Leaves themselves, which are many bytes."""

    gives_way: bool
    """as in `BodyRequest`"""


class SnapshotMeta(Record):
    """The leaves' digests; their Merkle root is the snapshot's state root."""

    max_bytes: ClassVar[int] = 16 << 20

    position: Count
    leaves: bytes


READY, GROUP, SEATED, REPAIR, GONE = b"R", b"G", b"S", b"P", b"X"
PART_DONE, CELL, REDUCE, UPFRONT, ALIVE = b"D", b"C", b"H", b"E", b""


def tagged(kind: bytes, record: Record) -> bytes:
    """A stream message."""
    return kind + record.encode()


R = TypeVar("R", bound=Record)

# The tables of a block have 300 bytes, and no byte takes more than 15 bits.
DEFLATED_HEAD_BYTES = 1024
LEVEL = 1  # of zlib: higher ones take longer and shrink these no further


def deflated(record: bytes) -> bytes:
    """A record's bytes as they travel."""
    return zlib.compress(record, LEVEL)


def inflated(data: bytes, max_bytes: int) -> bytes:
    """The bytes that travelled.

    Raises:
        MalformedRecord: they are not deflated, or are more than `max_bytes`, which is noticed
            before they take memory.
    """
    reader = zlib.decompressobj()
    try:
        record = reader.decompress(data, max_bytes)
    except zlib.error as error:
        raise MalformedRecord(f"not deflated: {error}") from None
    if not reader.eof or reader.unused_data:
        raise MalformedRecord(f"deflated: expected one stream of at most {max_bytes} bytes")
    return record


def is_longer(data: bytes, num_bytes: int) -> bool:
    """Return whether deflated bytes inflate to more than `num_bytes`, without inflating the rest.

    Raises:
        MalformedRecord: they are not deflated.
    """
    return len(_first_inflated(data, num_bytes + 1)) > num_bytes


def head_of(kind: type[R], data: bytes) -> R:
    """Return the first fields of a record that travels deflated; nothing else of it is inflated.

    Raises:
        MalformedRecord: it does not begin with them.
    """
    return decode_first(kind, _first_inflated(data[:DEFLATED_HEAD_BYTES], HEAD_BYTES))


def entry_head(data: bytes) -> EntryHead:
    """Return the head of an entry that travels deflated; see `head_of`."""
    return head_of(EntryHead, data)


def _first_inflated(data: bytes, num_bytes: int) -> bytes:
    try:
        return zlib.decompressobj().decompress(data, num_bytes)
    except zlib.error as error:
        raise MalformedRecord(f"not deflated: {error}") from None
