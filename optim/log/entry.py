"""The log of a run: entries, certificates, epochs, and the hash chain that names the history.

A run is a log of compressed outer updates, state(p+1) = apply(state(p), entry(p)). This module
holds what is written in the log and the rules that make an entry valid; who proposes and who votes
is in `atoll.peer.rounds`. The rules are stated in `docs/protocol.md`.

Every record is a msgpack map with the fields of its class in declaration order. The encoding is
canonical: bytes that decode to a record but do not equal that record's own encoding are refused,
so a record has one digest.

    chain(0)   = SHA-256("atoll genesis 1" | run_id | root of the genesis state)
    chain(p+1) = SHA-256("atoll chain 1" | chain(p) | SHA-256(entry(p)))
    a vote     = sign("atoll vote 2" | run_id | epoch | position | attempt | chain(p) |
                      SHA-256(entry(p)))
    a proposal = the same with "atoll proposal 1"
    a commit   = the same with "atoll commit 1", in runs that tolerate liars (`Trust`)

Trust starts at the epoch record, which the run's key signed: it names a position, the chain there,
and who votes there. From that base on each entry carries a certificate of the electorate that the
entry before it names. Entries before the base need no certificate: they are good when their chain
ends in the base's. So whoever sends entries is trusted with nothing (`claims.py`).

Errors:

    LogError (ValueError)
     +-- MalformedRecord     bytes that are no record of the claimed kind
     +-- ChainMismatch       an entry that does not follow the entry before it
     +-- CertificateInvalid  votes that are forged, repeated, or fewer than a quorum
     +-- EpochInvalid        an epoch that the run's key did not sign
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self, TypeVar, cast

import msgpack
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    FiniteFloat,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

VERSION: Literal[5] = 5  # of `Entry`; another version is another record, refused here
MAX_ELECTORS = 64  # a certificate is then 5 kB; more than half of them seldom vanish at once
MAX_MEMBERS = 4096  # as many as a group may have; 4,096 of them take 13 ms to parse

# Of any map or tuple in a record, counted before its items are read. A map of 3 MB in place of a
# record took 6 s to refuse: each unknown key is an error of its own.
MAX_FIELDS = 32  # twice those of the longest record
MAX_ITEMS = 1 << 16  # parts of an entry of 4 billion values, a part a cell
MAX_ORDER = 1024  # bytes of a signed order: it has some 300 at most
MAX_SETTINGS = 5120  # bytes: 64 PeerIDs of 54, and some 200
MAX_UNITS = 1 << 19  # bytes of a table of 1,024 leases (`units.py`)

Verify = Callable[[str, bytes, bytes], bool]
"""(peer_id, data, signature) -> whether that peer signed that data."""

VerifyRun = Callable[[bytes, bytes], bool]
"""`verify(data, signature)` of the run's key."""

Trust = Literal["crash", "byzantine"]
"""Faults of electors that a run tolerates: crashes of less than half of them, or also lies of less
than a third. An entry is certified by votes, or with liars by commits (`locks.py`)."""

BallotKind = Literal["vote", "proposal", "commit"]
"""The statements that a peer signs about an entry at an attempt."""

_MAGIC: dict[BallotKind, bytes] = {
    "vote": b"atoll vote 2",
    "proposal": b"atoll proposal 1",
    "commit": b"atoll commit 1",
}

# Bounds of fields: a record of a stranger is refused before anything is computed from it.
Count = Annotated[int, Field(ge=0, lt=2**63)]  # fits SQLite's integers
Digest = Annotated[bytes, Field(min_length=32, max_length=32)]
PeerId = Annotated[str, Field(min_length=1, max_length=128)]
Incarnation = Annotated[str, Field(min_length=1, max_length=32)]
Signature = Annotated[bytes, Field(min_length=1, max_length=1024)]
Norm = Annotated[FiniteFloat, Field(ge=0)]
EntryKind = Literal["update", "null", "control"]
"""An update (a manifest of part digests), NULL (given up), or an order of the organiser's."""
OrderField = Annotated[bytes, Field(max_length=MAX_ORDER)]
SettingsField = Annotated[bytes, Field(max_length=MAX_SETTINGS)]
UnitsField = Annotated[bytes, Field(max_length=MAX_UNITS)]
"""Records that are left out of the encoding as long as they are empty."""


def verify_key(key: bytes, data: bytes, signature: bytes) -> bool:
    """Return whether an Ed25519 key (32 public bytes) signed `data`; False if malformed too."""
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


class LogError(ValueError):
    """Any record of the log that cannot be accepted."""


class MalformedRecord(LogError):
    """Bytes that do not decode to the record they claim to be."""


class ChainMismatch(LogError):
    """An entry whose epoch, position or previous chain is not the one that comes next."""


class CertificateInvalid(LogError):
    """Votes that do not amount to a quorum of the electorate."""


class EpochInvalid(LogError):
    """An epoch record without a valid signature of the run's key."""


class Record(BaseModel):
    """A strict, frozen, canonically encoded message."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    max_bytes: ClassVar[int] = 1 << 20  # checked before parsing

    def encode(self) -> bytes:
        """Return the canonical bytes."""
        return cast(bytes, msgpack.packb(self.model_dump(), use_bin_type=True))

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Return the record in `data`.

        Raises:
            MalformedRecord: `data` is anything but the canonical bytes of such a record.
        """
        name = cls.__name__
        if len(data) > cls.max_bytes:
            raise MalformedRecord(
                f"{name}: expected at most {cls.max_bytes} bytes, got {len(data)}"
            )
        try:
            record = cls.model_validate(_unpacked(data))
        except (ValidationError, ValueError, TypeError, RecursionError) as error:
            raise MalformedRecord(f"{name}: not a valid record: {_first_line(error)}") from None
        except Exception as error:  # msgpack has exceptions of its own outside ValueError
            raise MalformedRecord(f"{name}: not msgpack: {_first_line(error)}") from None
        if record.encode() != data:  # else one record could have two digests
            raise MalformedRecord(f"{name}: the bytes are not the record's canonical encoding")
        return record


def _unpacked(data: bytes) -> Any:  # noqa: ANN401 - msgpack
    return msgpack.unpackb(
        data,
        raw=False,
        use_list=False,
        strict_map_key=True,
        max_map_len=MAX_FIELDS,
        max_array_len=MAX_ITEMS,
    )


R = TypeVar("R", bound=Record)

HEAD_BYTES = 256  # an `EntryHead` has 150 at most


def decode_first(kind: type[R], data: bytes) -> R:
    """Return the first fields of a record, which are those of `kind`; the rest is not parsed.

    `data` may end before the record does. That the bytes are canonical is checked with the rest.

    Raises:
        MalformedRecord: the record does not begin with these fields, or one of them is a list.
    """
    reader = msgpack.Unpacker(
        raw=False,
        use_list=False,
        max_buffer_size=len(data),
        max_map_len=MAX_FIELDS,
        max_array_len=0,
    )
    try:
        reader.feed(data)
        reader.read_map_header()
        fields = {}
        for name in kind.model_fields:
            if reader.unpack() != name:
                raise MalformedRecord(f"{kind.__name__}: expected {name} first")
            fields[name] = reader.unpack()
        return kind.model_validate(fields)
    except MalformedRecord:
        raise
    except Exception as error:  # as in `Record.decode`
        raise MalformedRecord(f"{kind.__name__}: no such head: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return f"{type(error).__name__} {error}".splitlines()[0][:200]


class Elector(Record):
    """A voter. A restarted peer is another one: it has a new incarnation and no memory of votes."""

    peer_id: PeerId
    incarnation: Incarnation


class Member(Record):
    """One contribution to an entry."""

    peer_id: PeerId
    incarnation: Incarnation
    weight: Annotated[FiniteFloat, Field(ge=0)]
    clip: Annotated[FiniteFloat, Field(ge=0, le=1)]
    norm: Norm
    """of the decoded contribution before it was clipped, as the peer declared it"""
    tokens: Count
    steps: Count
    loss: FiniteFloat | None
    """nats a token over its window; None if it did not measure one"""
    units: Count = 0
    """of its lease that it has done, in runs with `data.once` (`units.py`); left out if there are
    none"""

    @model_serializer(mode="wrap")
    def _dump(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return without_units(handler(self))

    @property
    def elector(self) -> Elector:
        """The member as a voter of the next position."""
        return Elector(peer_id=self.peer_id, incarnation=self.incarnation)


def without_units(fields: dict[str, Any]) -> dict[str, Any]:
    """Leave out the units of a contribution that names none: its record keeps its bytes."""
    if not fields["units"]:
        del fields["units"]
    return fields


class Partial(Record):
    """A member of which only the first `cells` cells of a part were included."""

    member: Count
    cells: Count


class Part(Record):
    """The reduced bytes of the cells `[start_cell, stop_cell)`, encoded once by their owner."""

    start_cell: Count
    stop_cell: Count
    owner: Count
    generation: Count
    wire_bytes: Count
    digest: Digest
    partial: Annotated[tuple[Partial, ...], FailFast(), Field(max_length=MAX_MEMBERS)] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.start_cell >= self.stop_cell:
            raise ValueError("a part holds at least one chunk")
        cells = self.stop_cell - self.start_cell
        if any(p.cells >= cells for p in self.partial):
            raise ValueError("a partial inclusion is shorter than its part")
        members = [p.member for p in self.partial]
        if members != sorted(set(members)):
            raise ValueError("partial inclusions are sorted and name each member once")
        return self


class Newcomer(Record):
    """A peer that contributes and may vote later (`electorate.py`)."""

    peer_id: PeerId
    since: Count
    """position of its first contribution of late"""
    last: Count
    """position of its newest one"""
    entries: Count = 1
    """in how many entries it has contributed since the first, up to those that its trial takes"""


class StateRoot(Record):
    """The Merkle root of the state before entry `position`."""

    position: Count
    root: Digest


def _without_empty(fields: dict[str, Any]) -> dict[str, Any]:
    """Leave out what a run without orders or units has not: its records keep their bytes."""
    return {k: v for k, v in fields.items() if v or k not in ("order", "settings", "units")}


class Entry(Record):
    """One decided position."""

    max_bytes: ClassVar[int] = 16 << 20

    version: Literal[5] = VERSION
    run_id: Digest
    epoch: Count
    position: Count
    kind: EntryKind
    previous_chain: Digest
    fragment: Count
    lr: FiniteFloat
    momentum: FiniteFloat
    # The first wrong item is enough: a report of each of thousands takes seconds.
    members: Annotated[tuple[Member, ...], FailFast(), Field(max_length=MAX_MEMBERS)]
    parts: Annotated[tuple[Part, ...], FailFast()]
    reports: Annotated[bytes, Field(max_length=32)] = b""
    """SHA-256 of what the members signed about their contributions; empty in a NULL"""
    electorate: Annotated[tuple[Elector, ...], Field(min_length=1)]
    newcomers: Annotated[tuple[Newcomer, ...], Field(max_length=MAX_ELECTORS)] = ()
    norms: Annotated[tuple[Norm, ...], FailFast()] = ()
    """by fragment: the norm below which the next contributions are not clipped (`electorate.py`)"""
    state_root: StateRoot | None = None
    order: OrderField = b""
    """the signed order that a control entry brings (`orders.py`)"""
    settings: SettingsField = b""
    """what all orders up to here have changed; empty before the first"""
    units: UnitsField = b""
    """who holds which units after this entry (`units.py`); empty in runs without `data.once`"""

    @model_serializer(mode="wrap")
    def _dump(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return _without_empty(handler(self))

    def without_members(self) -> bytes:
        """Return the encoded entry but for its members, for a receiver that knows them."""
        return cast(bytes, msgpack.packb(self.model_dump() | {"members": ()}, use_bin_type=True))

    @staticmethod
    def with_members(data: bytes, members: Sequence[Member]) -> bytes:
        """Return the bytes of an entry from those without its members; they are checked elsewhere.

        Raises:
            MalformedRecord: `data` is no such record.
        """
        try:
            fields = _unpacked(data)
            if fields["members"] != ():
                raise ValueError("expected no members")
            fields["members"] = [member.model_dump() for member in members]
            return cast(bytes, msgpack.packb(fields, use_bin_type=True))
        except Exception as error:  # as in `Record.decode`
            raise MalformedRecord(f"entry without members: {_first_line(error)}") from None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.kind == "update") != bool(self.parts and self.members):
            raise ValueError("an update has members and parts, other entries have neither")
        if (self.kind == "control") != bool(self.order):
            raise ValueError("a control entry has an order, other entries have none")
        # The outer step computes in fp32; a wider scalar would leave its rounding to each replica.
        if _fp32(self.lr) != self.lr or _fp32(self.momentum) != self.momentum:
            raise ValueError("scalars are fp32 values")
        if len({e.peer_id for e in self.electorate}) != len(self.electorate):
            raise ValueError("an acceptor is named twice")
        if len({m.peer_id for m in self.members}) != len(self.members):
            raise ValueError("a member is named twice")
        self._check_parts()
        return self

    def _check_parts(self) -> None:
        start = 0
        for part in self.parts:
            if part.start_cell != start:
                raise ValueError("parts follow each other without gap or overlap from chunk 0")
            named = (part.owner, *(p.member for p in part.partial))
            if max(named) >= len(self.members):
                raise ValueError("a part names a member that is not in the entry")
            start = part.stop_cell

    @property
    def digest(self) -> bytes:
        """SHA-256 of the canonical bytes."""
        return sha256(self.encode())

    @property
    def chain(self) -> bytes:
        """The chain after this entry."""
        return extend_chain(self.previous_chain, self.digest)

    @property
    def num_cells(self) -> int:
        """Cells covered by the parts."""
        return self.parts[-1].stop_cell if self.parts else 0

    @property
    def body_bytes(self) -> int:
        """Length of the body: the bytes of all parts, one after the other."""
        return sum(part.wire_bytes for part in self.parts)

    @property
    def loss(self) -> float | None:
        """Mean training loss, weighted by tokens, of the members that measured it; else None."""
        known = [(m.loss, m.tokens) for m in self.members if m.loss is not None]
        tokens = sum(count for _, count in known)
        return sum(loss * count for loss, count in known) / tokens if tokens else None

    def included_cells(self, peer_id: str, incarnation: str) -> list[bool] | None:
        """Return which cells hold a peer's contribution; None if the peer is not a member."""
        for index, member in enumerate(self.members):
            if (member.peer_id, member.incarnation) == (peer_id, incarnation):
                return self._included(index)
        return None

    def _included(self, member: int) -> list[bool]:
        mask: list[bool] = []
        for part in self.parts:
            size = part.stop_cell - part.start_cell
            cells = next((p.cells for p in part.partial if p.member == member), size)
            mask += [True] * cells + [False] * (size - cells)
        return mask

    def complete_members(self) -> tuple[Member, ...]:
        """Return the members whose contributions are in every part to the last cell."""
        partial = {p.member for part in self.parts for p in part.partial}
        return tuple(m for i, m in enumerate(self.members) if i not in partial)


class EntryHead(Record):
    """The first fields of an entry, by which a peer decides whether to read the rest."""

    version: Literal[5]
    run_id: Digest
    epoch: Count
    position: Count
    kind: EntryKind
    previous_chain: Digest


class Named(Protocol):
    """An entry as far as electors sign it: an `Entry`, or a `NamedEntry`."""

    @property
    def run_id(self) -> bytes:
        """The run."""
        ...

    @property
    def epoch(self) -> int:
        """The epoch."""
        ...

    @property
    def position(self) -> int:
        """The position."""
        ...

    @property
    def previous_chain(self) -> bytes:
        """The chain before it."""
        ...

    @property
    def digest(self) -> bytes:
        """SHA-256 of the canonical bytes."""
        ...


@dataclass(frozen=True, kw_only=True)
class NamedEntry:
    """An entry of which only the head was parsed, so that signatures are checked before the rest.

    Its digest is of the bytes as they came: if they are not canonical, they are no entry.
    """

    run_id: bytes
    epoch: int
    position: int
    previous_chain: bytes
    digest: bytes

    @classmethod
    def of(cls, record: bytes) -> Self:
        """Return the name of an encoded entry.

        Raises:
            MalformedRecord: it does not begin like one.
        """
        head = decode_first(EntryHead, record[:HEAD_BYTES])
        return cls(
            run_id=head.run_id,
            epoch=head.epoch,
            position=head.position,
            previous_chain=head.previous_chain,
            digest=sha256(record),
        )


class Vote(Record):
    """The signature of the elector at index `elector` of the electorate."""

    elector: Count
    signature: Signature


class Certificate(Record):
    """A quorum of votes for one entry at one attempt; of commits in a run that tolerates liars."""

    attempt: Count
    votes: Annotated[tuple[Vote, ...], FailFast()]


class Epoch(Record):
    """A new start that the run's key names: a position, the chain there, and those who vote."""

    run_id: Digest
    epoch: Count
    base_position: Count
    base_chain: Digest
    electorate: Annotated[tuple[Elector, ...], Field(min_length=1)]
    newcomers: Annotated[tuple[Newcomer, ...], Field(max_length=MAX_ELECTORS)] = ()
    """peers known before the base that do not vote now; electors of before are among them"""
    norms: Annotated[tuple[Norm, ...], FailFast()] = ()
    """of the entry before the base"""
    first_term: Annotated[Count, Field(lt=MAX_ELECTORS)] = 0
    """with which the base begins: those before it are led by electors whose terms failed there"""
    settings: SettingsField = b""
    """of the entry before the base"""
    units: UnitsField = b""
    """of the entry before the base"""

    @model_serializer(mode="wrap")
    def _dump(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return _without_empty(handler(self))


class SignedEpoch(Record):
    """An epoch record under the signature of the run's key."""

    epoch: bytes
    signature: Signature

    def open(self, verify: Callable[[bytes, bytes], bool]) -> Epoch:
        """Return the epoch if `verify(data, signature)` with the run's public key holds.

        Raises:
            EpochInvalid: it does not.
        """
        if not verify(epoch_payload(self.epoch), self.signature):
            raise EpochInvalid("epoch record: expected a signature of the run's key; got another")
        return Epoch.decode(self.epoch)


def sha256(data: bytes | bytearray | memoryview) -> bytes:
    """Return the SHA-256 digest."""
    return hashlib.sha256(data).digest()


def genesis_chain(run_id: bytes, root: bytes) -> bytes:
    """Return the chain before the first entry."""
    return sha256(b"atoll genesis 1" + run_id + root)


def extend_chain(chain: bytes, entry_digest: bytes) -> bytes:
    """Return the chain after an entry."""
    return sha256(b"atoll chain 1" + chain + entry_digest)


def epoch_payload(epoch: bytes) -> bytes:
    """Return what the run's key signs to open an epoch."""
    return b"atoll epoch 1" + epoch


@dataclass(frozen=True, kw_only=True)
class SignedRoot:
    """The root of a state that the coordinator computed, signed by the run's key.

    It stands for a certified root where none can be had: whoever needs the state lacks an update
    that nobody holds any more.
    """

    position: int
    chain: bytes
    """The chain there."""
    root: bytes
    signature: bytes

    def holds(self, run_id: bytes, verify_run: VerifyRun) -> bool:
        """Return whether the run's key signed it for this log."""
        payload = root_payload(run_id, self.position, self.chain, self.root)
        return verify_run(payload, self.signature)


def root_payload(run_id: bytes, position: int, chain: bytes, root: bytes) -> bytes:
    """Return what the run's key signs of a state that the coordinator computed."""
    return b"atoll root 1" + run_id + position.to_bytes(8, "big") + chain + root


def ballot_payload(
    kind: BallotKind,
    *,
    run_id: bytes,
    epoch: int,
    position: int,
    attempt: int,
    previous_chain: bytes,
    digest: bytes,
) -> bytes:
    """Return what a peer signs to vote for an entry, propose it or commit it, from its digest."""
    place = struct.pack(">QQQ", epoch, position, attempt)
    return _MAGIC[kind] + run_id + place + previous_chain + digest


def _signed(kind: BallotKind, entry: Named, attempt: int) -> bytes:
    return ballot_payload(
        kind,
        run_id=entry.run_id,
        epoch=entry.epoch,
        position=entry.position,
        attempt=attempt,
        previous_chain=entry.previous_chain,
        digest=entry.digest,
    )


def vote_payload(entry: Named, attempt: int) -> bytes:
    """Return what an elector signs to vote for `entry` at `attempt`."""
    return _signed("vote", entry, attempt)


def proposal_payload(entry: Named, attempt: int) -> bytes:
    """Return what a leader signs to propose `entry` at `attempt`."""
    return _signed("proposal", entry, attempt)


def commit_payload(entry: Named, attempt: int) -> bytes:
    """Return what an elector signs to commit `entry`, which a quorum voted for at `attempt`."""
    return _signed("commit", entry, attempt)


def fp32(value: float) -> float:
    """Round to the nearest fp32 value."""
    return _fp32(value)


def _fp32(value: float) -> float:
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


def max_liars(electors: int) -> int:
    """Return how many lying electors a run that tolerates liars withstands: less than a third."""
    return max(0, (electors - 1) // 3)


def is_quorum(voters: Sequence[int], electors: int, trust: Trust = "crash") -> bool:
    """Return whether electors decide, if no more of them fail than `trust` says.

    With crashes alone, these are more than half, or half including the first. With f liars they are
    all but f: any two quorums then share f + 1 electors, one of which is honest.
    """
    distinct = set(voters)
    if trust == "byzantine":
        return bool(distinct) and len(distinct) >= electors - max_liars(electors)
    return 2 * len(distinct) > electors or (2 * len(distinct) == electors and 0 in distinct)


def choose_electors(candidates: Sequence[Elector]) -> tuple[Elector, ...]:
    """Return all candidates, or the 64 with the lowest hashes, in the order given.

    The hash is of the elector alone, so that the electorate stays while the members do.
    """
    lowest = sorted(candidates, key=lambda elector: _rank("elector", elector))[:MAX_ELECTORS]
    chosen = set(lowest)
    return tuple(elector for elector in candidates if elector in chosen)


def leader_order(electorate: Sequence[Elector], position: int) -> list[int]:
    """Return the indices of the electors in the order in which they lead attempts 0, 1, 2, ..."""
    return sorted(range(len(electorate)), key=lambda index: _rank(position, electorate[index]))


def first_sound_term(electorate: Sequence[Elector], position: int, failed: Collection[str]) -> int:
    """Return the first term at `position` that none of these PeerIDs leads; 0 if they lead all."""
    leaders = [electorate[index].peer_id for index in leader_order(electorate, position)]
    return next((term for term, peer in enumerate(leaders) if peer not in failed), 0)


def _rank(what: str | int, elector: Elector) -> bytes:
    return sha256(f"{what}|{elector.peer_id}|{elector.incarnation}".encode())


def check_certificate(
    entry: Named,
    certificate: Certificate,
    electorate: Sequence[Elector],
    verify: Verify,
    trust: Trust = "crash",
) -> None:
    """Raise CertificateInvalid unless a quorum of `electorate` decided `entry`."""
    payload = commit_payload if trust == "byzantine" else vote_payload
    signed = payload(entry, certificate.attempt)
    check_signatures(entry, signed, certificate.votes, electorate, verify, trust)


def check_signatures(
    entry: Named,
    signed: bytes,
    votes: Sequence[Vote],
    electorate: Sequence[Elector],
    verify: Verify,
    trust: Trust,
) -> None:
    """Raise CertificateInvalid unless a quorum of `electorate` signed these bytes for `entry`."""
    voters = [vote.elector for vote in votes]
    if len(set(voters)) != len(voters) or any(v >= len(electorate) for v in voters):
        raise CertificateInvalid(
            f"entry {entry.position}: expected distinct acceptors below {len(electorate)}, "
            f"got {voters}"
        )
    if not is_quorum(voters, len(electorate), trust):
        raise CertificateInvalid(
            f"entry {entry.position}: expected a quorum of {len(electorate)} acceptors, "
            f"got {len(voters)} votes"
        )
    for vote in votes:
        peer_id = electorate[vote.elector].peer_id
        if not verify(peer_id, signed, vote.signature):
            raise CertificateInvalid(f"entry {entry.position}: the vote of {peer_id} is forged")


def check_follows(entry: Entry, *, run_id: bytes, epoch: int, position: int, chain: bytes) -> None:
    """Raise ChainMismatch unless `entry` is the one that comes next."""
    for what, expected, got in (
        ("run", run_id.hex()[:12], entry.run_id.hex()[:12]),
        ("epoch", epoch, entry.epoch),
        ("position", position, entry.position),
        ("previous chain", chain.hex()[:12], entry.previous_chain.hex()[:12]),
    ):
        if expected != got:
            raise ChainMismatch(f"entry {entry.position}: expected {what} {expected}, got {got}")


def split_body(entry: Entry, body: bytes | memoryview) -> list[memoryview]:
    """Return the parts of a body, each checked against its digest.

    Raises:
        MalformedRecord: the length or a digest differs.
    """
    view = memoryview(body)
    if len(view) != entry.body_bytes:
        raise MalformedRecord(
            f"body of entry {entry.position}: expected {entry.body_bytes} bytes, got {len(view)}"
        )
    return split_parts(entry, range(len(entry.parts)), view)


def split_parts(entry: Entry, indices: range, view: memoryview) -> list[memoryview]:
    """Return consecutive parts of a body, whose bytes these are, each checked against its digest.

    Raises:
        MalformedRecord: a digest differs.
    """
    parts: list[memoryview] = []
    start = 0
    for index in indices:
        part = entry.parts[index]
        piece = view[start : start + part.wire_bytes]
        if sha256(piece) != part.digest:
            raise MalformedRecord(
                f"body of entry {entry.position}: part {index} has another digest"
            )
        parts.append(piece)
        start += part.wire_bytes
    return parts
