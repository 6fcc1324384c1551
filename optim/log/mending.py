"""Mending a log on disk: finding flipped bits by the digests, and dropping what they spoiled.

A disk or memory flips bits that SQLite does not notice. Everything in a log is under a digest:
entries under their chain, bodies under their entries, epoch records under the run's signature,
snapshots under their leaves (which loading verifies) and the chain. Certificates, which any quorum
of votes may replace, have a checksum in the store. What does not fit is dropped, never guessed;
peers send it again:

    an entry             it goes, and all after it
    a body               after the newest snapshot, as an entry; before it, alone
    a certificate        it goes alone; nobody gets its entry from here until it is back
    a snapshot, epoch    it goes

The check reads the whole log once, about 1 GB a second.

A log in use is checked too: bodies as they are sent (`checked_body`), and all that is stored again
and again, slowly (`Scrub`). A body that does not fit is dropped alone, for the state here is right;
the ledger's owner learns of it (`LogStore.take_damaged`) while peers may still have the body.
"""

from __future__ import annotations

import hashlib
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import accumulate
from zlib import crc32

from atoll.optim.log.entry import (
    Certificate,
    Entry,
    LogError,
    SignedEpoch,
    VerifyRun,
    extend_chain,
    sha256,
    split_body,
)
from atoll.optim.log.store import PAGE, LogStore, StoredEntry
from atoll.optim.log.store_errors import Damaged, NotStored, StoreCorrupt, StoreError
from atoll.optim.state.layout import LayoutError


@dataclass(kw_only=True)
class Damage:
    """The records that did not fit their digests, and were dropped."""

    entries_from: int | None = None
    """Position of the first entry that was dropped; all after it went too."""
    entries: int = 0
    bodies: list[int] = field(default_factory=list)
    """Positions of entries that stay, without their bodies."""
    certificates: list[int] = field(default_factory=list)
    """Positions of entries that stay, without their certificates."""
    snapshots: list[int] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    first_state: bool = False
    """True if the first state was damaged; the coordinator makes it again."""

    def __bool__(self) -> bool:
        found = (self.bodies, self.certificates, self.snapshots, self.epochs)
        return bool(self.entries) or any(found) or self.first_state

    def __str__(self) -> str:
        """Return one line for people."""
        found = []
        if self.entries:
            found.append(f"{self.entries} entries from round {(self.entries_from or 0) + 1} on")
        for name, positions in (("updates", self.bodies), ("certificates", self.certificates)):
            if positions:
                rounds = ", ".join(str(position + 1) for position in positions[:8])
                found.append(f"the {name} of rounds {rounds}{', ...' * (len(positions) > 8)}")
        for name, numbers in (("snapshots", self.snapshots), ("epochs", self.epochs)):
            if numbers:
                found.append(f"{name} {', '.join(map(str, numbers[:8]))}")
        if self.first_state:
            found.append("the first state, which is made again here")
        return (
            f"the log on disk is damaged and dropped {'; '.join(found)}. Peers send them again; "
            "check the disk and the memory of this machine"
        )


def mend(store: LogStore, *, verify_run: VerifyRun) -> Damage:
    """Check a log against its digests and drop what does not fit; blocks.

    Raises:
        StoreCorrupt: the file is damaged so that SQLite cannot read it.
    """
    damage = Damage()
    with _readable():
        _mend_epochs(store, verify_run, damage)
        chains = _mend_entries(store, damage)
        _mend_snapshots(store, chains, damage)
        _mend_bodies(store, damage)
        _mend_certificates(store, damage)
    return damage


def _mend_epochs(store: LogStore, verify_run: VerifyRun, damage: Damage) -> None:
    for number, record in store.epochs():
        try:
            is_whole = SignedEpoch.decode(record).open(verify_run).epoch == number
        except LogError:
            is_whole = False
        if not is_whole:
            damage.epochs.append(number)
    store.drop_epochs(damage.epochs)


def _mend_entries(store: LogStore, damage: Damage) -> dict[int, bytes]:
    """Drop the entries from the first one on that breaks the chain; return all chains."""
    position, chain = store.base
    chains = {position: chain}
    for record in store.records(store.base[0], store.head.position):
        if record.position != position or not _fits(record, chain):
            break
        position, chain = position + 1, record.chain
        chains[position] = chain
    if position < store.head.position:
        _drop_from(store, position, damage)
    return chains


def _fits(record: StoredEntry, chain: bytes) -> bool:
    if extend_chain(chain, sha256(record.entry)) != record.chain:
        return False
    with suppress(LogError):  # of an earlier version: whole, but not for this one to read
        entry = Entry.decode(record.entry)
        fields = (entry.position, entry.epoch, entry.body_bytes)
        return fields == (record.position, record.epoch, record.body_bytes)
    return True


def _mend_snapshots(store: LogStore, chains: dict[int, bytes], damage: Damage) -> None:
    for position in store.snapshot_positions():
        try:
            is_whole = store.snapshot(position).chain == chains.get(position)
        except (StoreError, LayoutError):
            is_whole = False
        if not is_whole:
            damage.snapshots.append(position)
    store.drop_snapshots(damage.snapshots)


def reads_whole(store: LogStore, position: int) -> bool:
    """Return whether a snapshot is here and all of its file has its digests; blocks."""
    try:
        snapshot = store.open_snapshot(position)
        for index in range(snapshot.num_leaves):
            snapshot.read_leaf(index)
    except (NotStored, StoreCorrupt):
        return False
    return True


def _mend_bodies(store: LogStore, damage: Damage) -> None:
    newest = max(store.snapshot_positions(), default=0)
    for record in store.records(store.base[0], store.head.position):
        if not record.has_body or not record.body_bytes or _body_fits(store, record):
            continue
        if record.position >= newest:
            _drop_from(store, record.position, damage)
            break
        damage.bodies.append(record.position)
    store.drop_bodies(damage.bodies)


def _body_fits(store: LogStore, record: StoredEntry) -> bool:
    try:
        entry = Entry.decode(record.entry)
    except LogError:  # of an earlier version
        return True
    try:
        split_body(entry, store.body(record.position))
    except (LogError, StoreError):
        return False
    return True


def _mend_certificates(store: LogStore, damage: Damage) -> None:
    start, stop = store.base[0], store.head.position
    for first in range(start, stop, PAGE):
        checks, unchecked = store.certificate_checks(first, PAGE), list[tuple[int, bytes]]()
        for record in store.headers(first, PAGE):
            check = checks.get(record.position)
            is_whole = check == crc32(record.certificate)
            if check is None and (is_whole := _decodes(record.certificate)):
                unchecked.append((record.position, record.certificate))
            if not is_whole:
                damage.certificates.append(record.position)
        store.check_certificates(unchecked)
    for position in damage.certificates:
        store.put_certificate(position, b"")


def _decodes(certificate: bytes) -> bool:
    """Return whether a certificate of an earlier version of the log has its form at least."""
    try:
        Certificate.decode(certificate)
    except LogError:
        return not certificate  # it is known to be gone
    return True


def _drop_from(store: LogStore, position: int, damage: Damage) -> None:
    gone = store.rewind(position)
    first = position if damage.entries_from is None else min(damage.entries_from, position)
    damage.entries, damage.entries_from = damage.entries + gone, first


def checked_body(
    store: LogStore, position: int, start: int = 0, stop: int | None = None
) -> Iterator[bytes]:
    """Yield bytes of a stored body in pieces of at most 1 MiB, each whole part checked at its end.

    No more is read than is yielded: who asks for little must not cost much. The rest of a part that
    begins before `start` or ends behind `stop` is not here to be checked; the reader checks it.

    Args:
        store: holds it.
        position: of its entry.
        start: first byte.
        stop: byte behind the last one; by default the body's end.

    Raises:
        NotStored: it is not here.
        Damaged: the disk has spoiled it, and it was dropped; what was yielded of it is no use.
    """
    record = store.get(position)
    if record is None:
        raise NotStored(f"entry {position} is not here")
    stop = record.body_bytes if stop is None else min(stop, record.body_bytes)
    if start > stop:
        raise NotStored(f"the body of entry {position} has no byte {start}")
    try:
        parts = _PartDigests(Entry.decode(record.entry), start, stop)
    except LogError as error:
        raise NotStored(f"entry {position} is damaged on the disk: {error}") from None
    until = stop if stop < record.body_bytes else sys.maxsize  # one that is too long is damaged
    for chunk in store.part_chunks(position, start, until):
        if not parts.fit(chunk):
            break
        yield chunk
    else:
        if parts.are_whole:
            return
    if not store.drop_damaged(position, record.entry):
        raise NotStored(f"entry {position} was replaced while its body was read")
    raise Damaged(f"the body of entry {position} was damaged on the disk: ask another peer")


class _PartDigests:
    """Compares the parts of a body that lie in [start, stop) with their digests, as bytes come."""

    def __init__(self, entry: Entry, start: int, stop: int) -> None:
        parts = [part for part in entry.parts if part.wire_bytes]
        ends = accumulate(part.wire_bytes for part in parts)
        whole = [
            (end - part.wire_bytes, end, part)
            for part, end in zip(parts, ends, strict=True)
            if start <= end - part.wire_bytes and end <= stop
        ]
        self._parts = [part for _, _, part in whole][::-1]
        self._head = whole[0][0] - start if whole else stop - start
        """bytes of a part that begins earlier"""
        self._tail = stop - whole[-1][1] if whole else 0
        """bytes of one that ends later"""
        self._seen, self._hash = 0, hashlib.sha256()

    @property
    def are_whole(self) -> bool:
        """Return whether all bytes have come, and all parts have their digests."""
        return not self._head and not self._parts and not self._tail

    def fit(self, chunk: bytes) -> bool:
        """Take the next bytes; return False if they do not end a part as its digest says."""
        skipped = min(self._head, len(chunk))
        self._head, left = self._head - skipped, memoryview(chunk)[skipped:]
        while left:
            if not self._parts:
                self._tail -= len(left)
                return self._tail >= 0
            part = self._parts[-1]
            piece = left[: part.wire_bytes - self._seen]
            self._hash.update(piece)
            self._seen, left = self._seen + len(piece), left[len(piece) :]
            if self._seen == part.wire_bytes:
                if self._hash.digest() != part.digest:
                    return False
                self._parts.pop()
                self._seen, self._hash = 0, hashlib.sha256()
        return True


class Scrub:
    """Reads the bodies and snapshots of a log in use, the newest first, and checks them.

    Peers keep the newest bodies alone, so these can be had again.
    """

    def __init__(self, store: LogStore) -> None:
        """Begin with nothing read."""
        self._store = store
        self._pass = self._read()
        self.damaged_snapshots: list[int] = []
        """Positions of those that were found damaged, and dropped unless they are the first."""

    def step(self, max_bytes: int) -> bool:
        """Read about so many bytes; return True once all of the log was read. Blocks."""
        for read in self._pass:
            max_bytes -= read
            if max_bytes <= 0:
                return False
        self._pass = self._read()
        return True

    def _read(self) -> Iterator[int]:
        for position in reversed(self._store.snapshot_positions()):
            yield from self._read_snapshot(position)
        stop = self._store.head.position
        while stop > self._store.base[0]:
            first = max(self._store.base[0], stop - PAGE)
            for record in reversed(self._store.headers(first, stop - first)):
                if record.has_body:
                    yield from self._read_body(record.position)
            stop = first

    def _read_body(self, position: int) -> Iterator[int]:
        with suppress(NotStored):  # pruned meanwhile, or damaged
            for chunk in checked_body(self._store, position):
                yield len(chunk)

    def _read_snapshot(self, position: int) -> Iterator[int]:
        try:
            snapshot = self._store.open_snapshot(position)
            for index in range(snapshot.num_leaves):
                yield len(snapshot.read_leaf(index))
        except NotStored:  # pruned meanwhile
            return
        except StoreCorrupt:
            self.damaged_snapshots.append(position)
            if position:  # the first state is made again by its owner, or kept if that fails
                self._store.drop_snapshots([position])


@contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError:
        raise  # the log is well, the disk is not
    except sqlite3.DatabaseError as error:
        raise StoreCorrupt(
            f"the log is damaged ({error}); move its directory away: the log is then fetched from "
            "the peers"
        ) from None
