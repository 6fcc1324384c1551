"""The log on disk: entries, their bodies, epochs and snapshots, in one SQLite file.

Peers keep a bounded log, the coordinator all of it. The store checks order and size, not meaning:
whoever appends has verified the entry (`atoll.optim.log.replica`). What is in the file is one
history: a new epoch first rewinds to its base.

    store.append(epoch=0, position=7, entry=..., certificate=..., body=..., chain=...)
    store.head                  epoch, next position, and the chain there
    with store.lease(position): ...     bodies from there on, and that snapshot, stay

Writing is one transaction a call, in WAL mode: after `kill -9` the file holds exactly the calls
that returned (with `fsync=True` also after a loss of power). A body may follow its entry: until
`write_bodies` has written it, it is read from memory, and a process that dies by then leaves an
entry without a body, as pruning does. One connection under a lock serves all threads. Bodies are
cut into rows of 1 MiB, so that no copy of a large one is made in SQLite and parts of it can be
read. Snapshots are files beside the database (`stored_snapshots`); writing one takes no lock, so
that the log may move on meanwhile (`write_snapshot`); the row is put only if the log still leads to
that state. What is raised is a `StoreError` (`store_errors`).
"""

from __future__ import annotations

import itertools
import json
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from zlib import crc32

import torch

from atoll.optim.log.log_file import open_log, open_to_read
from atoll.optim.log.store_errors import (
    Conflict,
    NotStored,
    OutOfOrder,
    StoreCorrupt,
)
from atoll.optim.log.stored_snapshots import (
    SnapshotFile,
    SnapshotInfo,
    Snapshots,
    WrittenSnapshot,
)
from atoll.optim.state import vectors
from atoll.optim.state.outer_state import OuterState

PAGE = 64  # entries read at once
MAX_POSITION = 2**63 - 1  # as SQLite has them; a stranger may ask for more
LOG_FILE = "log.sqlite"  # in the directory of a log
CHUNK_BYTES = 1 << 20  # a row of a body: SQLite reads whole rows
WRITTEN_BYTES = 64 << 20  # of a body in one transaction; readers have their turn between two
KEPT_SNAPSHOTS = 3  # at a peer: the newest two may not have a certified root yet


@dataclass(frozen=True, kw_only=True)
class StoreHead:
    """The end of the log."""

    epoch: int
    position: int
    """Position of the next entry."""
    chain: bytes
    """The one that the next entry names as its previous chain."""


@dataclass(frozen=True, kw_only=True)
class StoredEntry:
    """One stored position without its body."""

    epoch: int
    position: int
    entry: bytes
    certificate: bytes
    chain: bytes
    """The chain after this entry."""
    body_bytes: int
    has_body: bool
    """True while the body is here; a body of no bytes always is."""


@dataclass(frozen=True, kw_only=True)
class StoreStatistics:
    """Counts and sizes of a store."""

    entries: int
    bodies: int
    body_bytes: int
    snapshots: int
    leases: int
    pruned_bodies: int
    """Since the store was opened."""


class LogStore:
    """The log of one run, in a directory of its own."""

    def __init__(
        self,
        directory: Path,
        *,
        run_id: bytes,
        genesis_chain: bytes,
        body_budget_bytes: int | None = None,
        keep_snapshots: int = 2,
        fsync: bool = False,
    ) -> None:
        """Open the log in `directory`, or begin it.

        Args:
            directory: made if absent; holds log.sqlite and the snapshots.
            run_id: 32 bytes.
            genesis_chain: the chain before entry 0.
            body_budget_bytes: most bytes of bodies to keep; None keeps all.
            keep_snapshots: newest snapshots to keep, besides those under a lease and the genesis.
            fsync: survive a loss of power too, for a sync of the disk with every write.

        Raises:
            WrongRun: when the directory holds the log of another run. Nothing is changed.
            StoreCorrupt: when the file cannot be read as a log. Nothing is changed.
        """
        self._prepare(
            genesis_chain=genesis_chain,
            body_budget_bytes=body_budget_bytes,
            keep_snapshots=keep_snapshots,
        )
        directory.mkdir(parents=True, exist_ok=True)
        self.run_id = run_id
        self._open(open_log(directory / LOG_FILE, run_id, fsync=fsync), directory)

    @classmethod
    def reading(cls, directory: Path) -> Self:
        """Open a log that another process may be writing; only read from it.

        The chain before its entry 0 is not known here.

        Raises:
            StoreCorrupt: when the file cannot be read as a log.
        """
        db, run_id = open_to_read(directory / LOG_FILE)
        store = cls.__new__(cls)
        store.run_id = run_id
        store._prepare(genesis_chain=b"", body_budget_bytes=None, keep_snapshots=1)
        store._open(db, directory, reads_only=True)
        return store

    def _prepare(
        self, *, genesis_chain: bytes, body_budget_bytes: int | None, keep_snapshots: int
    ) -> None:
        self._genesis_chain = genesis_chain
        self._budget_bytes = body_budget_bytes
        self._keep_snapshots = keep_snapshots
        self._lock = threading.RLock()
        self._leases: dict[int, int] = {}
        self._pruned = 0
        self._damaged: list[int] = []
        """positions of bodies that the disk has spoiled, of which nobody knows yet"""
        self._unwritten: dict[int, memoryview] = {}
        """bodies that `write_bodies` has yet to write, by position"""
        self._writing = threading.Lock()

    def _open(self, db: sqlite3.Connection, directory: Path, *, reads_only: bool = False) -> None:
        self._db = db
        self._snapshots = Snapshots(db, self._lock, directory, reads_only=reads_only)
        self._first_with_bodies = self._find_first_with_bodies()

    # Entries

    @property
    def genesis_chain(self) -> bytes:
        """The chain before entry 0."""
        return self._genesis_chain

    @property
    def base(self) -> tuple[int, bytes]:
        """The position at which this log begins, and the chain there."""
        with self._lock:
            return self._base()

    @property
    def head(self) -> StoreHead:
        """The epoch, position and chain that the next entry must have."""
        with self._lock:
            row = self._one("SELECT position, epoch, chain FROM entries ORDER BY position DESC")
            epoch = self._one("SELECT max(epoch) FROM epochs")[0] or 0
        if row is None:
            return StoreHead(epoch=epoch, position=self._base()[0], chain=self._base()[1])
        newest = row[1] if isinstance(row[1], int) else 0  # rot; `mend` drops that entry
        return StoreHead(epoch=max(epoch, newest), position=row[0] + 1, chain=row[2])

    def append(
        self,
        *,
        epoch: int,
        position: int,
        entry: bytes,
        certificate: bytes,
        body: bytes | bytearray | memoryview,
        chain: bytes,
        before_base: bool = False,
        writes_body: bool = True,
    ) -> bool:
        """Add a verified entry; False if it is here already.

        Args:
            epoch: of the entry; not older than the newest epoch that is known here.
            position: of the entry; the next one.
            entry: as signed.
            certificate: of its electorate.
            body: the update, empty if there is none.
            chain: after the entry.
            before_base: it lies before the base of the newest epoch, and may be of an older one.
            writes_body: False leaves the body to `write_bodies`.

        Raises:
            OutOfOrder: when it does not come next.
            Conflict: when its position holds another entry.
        """
        with self._lock:
            known = self.get(position)
            if known is not None and known.entry != entry:
                raise Conflict(f"position {position} is decided: another entry is stored there")
            if known is None:
                self._expect_next(epoch, position, before_base=before_base)
            lacks_body = known is None or not known.has_body
            with self._changing():
                if known is None:
                    row = (position, epoch, entry, certificate, chain, len(body), int(not body))
                    self._db.execute("INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?)", row)
                    self._check([(position, certificate)])
                if lacks_body and writes_body:
                    self._insert_body(position, memoryview(body))
                    self._mark_body(position)
            if writes_body:
                self.prune()
            elif lacks_body:
                self._unwritten[position] = memoryview(body)
                self._first_with_bodies = self._find_first_with_bodies()
            return known is None

    @property
    def has_unwritten(self) -> bool:
        """Return whether bodies are left to `write_bodies`."""
        return bool(self._unwritten)

    def write_bodies(self) -> None:
        """Write the bodies that `append` has left, in any thread; others read and append meanwhile.

        Raises:
            OSError, sqlite3.Error: the disk takes no more. Bodies that are not written stay in
                memory.
        """
        with self._writing:
            while self._unwritten:
                self._write_body(*next(iter(self._unwritten.items())))

    def _write_body(self, position: int, body: memoryview) -> None:
        """Write a body in several transactions, unless it is dropped meanwhile."""
        for start in range(0, len(body), WRITTEN_BYTES):
            with self._lock, self._db:
                if self._unwritten.get(position) is not body:
                    return
                self._insert_body(position, body[start : start + WRITTEN_BYTES], start)
        with self._changing():
            if self._unwritten.get(position) is not body:
                return
            del self._unwritten[position]
            self._mark_body(position)
        self.prune()

    def append_header(
        self,
        *,
        epoch: int,
        position: int,
        entry: bytes,
        certificate: bytes,
        body_bytes: int,
        chain: bytes,
    ) -> None:
        """Add a verified entry whose body is not here, as a joiner does up to its snapshot.

        Raises:
            OutOfOrder: when it does not come next.
        """
        row = (position, epoch, entry, certificate, chain, body_bytes, int(not body_bytes))
        with self._lock:
            if position != self.head.position:
                raise OutOfOrder(f"expected position {self.head.position}, got {position}")
            with self._changing():
                self._db.execute("INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?)", row)
                self._check([(position, certificate)])

    def get(self, position: int) -> StoredEntry | None:
        """Return the entry at a position, if it is here."""
        return next(iter(self.headers(position, 1)), None)

    def headers(self, start: int, count: int) -> list[StoredEntry]:
        """Return at most `count` entries from `start` on, without bodies."""
        columns = "epoch, position, entry, certificate, chain, body_bytes, has_body"
        query = f"SELECT {columns} FROM entries WHERE position >= ? AND position < ? ORDER BY 2"
        stop = min(start + count, MAX_POSITION)
        if start >= stop:
            return []
        with self._lock:
            rows = self._db.execute(query, (start, stop)).fetchall()
            unwritten = set(self._unwritten)
        return [_record(row, is_unwritten=row[1] in unwritten) for row in rows]

    def records(self, start: int, stop: int) -> Iterator[StoredEntry]:
        """Yield the entries of a range, without bodies, a few at a time: others may write."""
        for first in range(start, stop, PAGE):
            yield from self.headers(first, min(PAGE, stop - first))

    def body(self, position: int) -> bytes:
        """Return the body of an entry. Raises NotStored."""
        return b"".join(self.body_chunks(position))

    def part_chunks(self, position: int, start: int, stop: int) -> Iterator[bytes]:
        """Yield the bytes [start, stop) of a body in pieces of at most 1 MiB. Raises NotStored."""
        first = start // CHUNK_BYTES
        chunks = self.body_chunks(position, first, -(-stop // CHUNK_BYTES))
        for at, chunk in zip(itertools.count(first * CHUNK_BYTES, CHUNK_BYTES), chunks):
            yield chunk[max(0, start - at) : stop - at]

    def body_chunks(
        self, position: int, first: int = 0, stop: int | None = None
    ) -> Iterator[bytes]:
        """Yield the body in pieces of at most 1 MiB, those from `first` up to `stop`.

        Take a lease to keep it. Raises NotStored.
        """
        record = self.get(position)
        if record is None or not record.has_body:
            raise NotStored(f"the body of entry {position} is not here: ask another peer")
        num_chunks = -(-record.body_bytes // CHUNK_BYTES)
        for part in range(first, num_chunks if stop is None else min(stop, num_chunks)):
            unwritten = self._unwritten.get(position)
            if unwritten is not None:
                yield bytes(unwritten[part * CHUNK_BYTES : (part + 1) * CHUNK_BYTES])
                continue
            query = "SELECT data FROM bodies WHERE position = ? AND part = ?"
            with self._lock:
                row = self._one(query, position, part)
            if row is None:
                raise NotStored(f"the body of entry {position} was pruned while it was read")
            yield row[0]

    def add_body(self, position: int, body: bytes | bytearray | memoryview) -> None:
        """Put back the body of a stored entry, verified by the caller. Raises NotStored."""
        with self._changing():
            record = self.get(position)
            if record is None or record.body_bytes != len(body):
                raise NotStored(f"entry {position} with a body of {len(body)} bytes is not here")
            if not record.has_body:
                self._insert_body(position, memoryview(body))
                self._mark_body(position)

    def drop_bodies(self, positions: Sequence[int]) -> None:
        """Drop damaged bodies; their entries stay."""
        with self._changing():
            for position in positions:
                self._drop_body(position)

    def drop_damaged(self, position: int, entry: bytes) -> bool:
        """Drop the body of an entry that was found damaged while the log is in use.

        Returns:
            False if the log went back meanwhile, and another entry is there: nothing is dropped.
        """
        with self._lock:
            record = self.get(position)
            if record is None or record.entry != entry:
                return False
            self.drop_bodies([position])
            self._damaged.append(position)
            return True

    def take_damaged(self) -> list[int]:
        """Return the positions of such bodies, each once, oldest first."""
        with self._lock:
            damaged, self._damaged = self._damaged, []
        return sorted(damaged)

    def certificate_checks(self, start: int, count: int) -> dict[int, int]:
        """Return the CRC-32 of certificates by position; none of a log of an earlier version."""
        query = "SELECT position, certificate FROM checks WHERE position >= ? AND position < ?"
        with self._lock:
            return dict(self._db.execute(query, (start, start + count)).fetchall())

    def check_certificates(self, certificates: Sequence[tuple[int, bytes]]) -> None:
        """Begin to check certificates that are stored, by position."""
        with self._lock, self._db:
            self._check(certificates)

    def put_certificate(self, position: int, certificate: bytes) -> None:
        """Replace the certificate of a stored entry, verified by the caller; empty: it is gone."""
        with self._lock, self._db:
            query = "UPDATE entries SET certificate = ? WHERE position = ?"
            self._db.execute(query, (certificate, position))
            self._check([(position, certificate)])

    def uncertified(self) -> list[int]:
        """Return the positions of the entries whose certificates are gone."""
        query = "SELECT position FROM entries WHERE certificate = x'' ORDER BY 1"
        with self._lock:
            return [row[0] for row in self._db.execute(query).fetchall()]

    def drop_snapshots(self, positions: Sequence[int]) -> None:
        """Drop damaged snapshots, which need not be readable."""
        with self._lock, self._db:
            rows = [(position,) for position in positions]
            self._db.executemany("DELETE FROM snapshots WHERE position = ?", rows)

    def drop_epochs(self, epochs: Sequence[int]) -> None:
        """Drop damaged epoch records."""
        with self._lock, self._db:
            rows = [(epoch,) for epoch in epochs]
            self._db.executemany("DELETE FROM epochs WHERE epoch = ?", rows)

    def first_with_bodies(self) -> int:
        """Return the position from which on all bodies are here; waits for no writer."""
        return self._first_with_bodies

    def gaps(self) -> list[tuple[int, int]]:
        """Return runs `(start, stop)` of entries whose bodies are not here, oldest first."""
        query = """
            SELECT min(position), max(position) + 1 FROM (
                SELECT position, position - row_number() OVER (ORDER BY position) AS run
                FROM entries
                WHERE has_body = 0 AND position NOT IN (SELECT value FROM json_each(?)))
            GROUP BY run ORDER BY 1"""
        with self._lock:
            unwritten = json.dumps(list(self._unwritten))
            return [(row[0], row[1]) for row in self._db.execute(query, (unwritten,))]

    def rewind(self, position: int) -> int:
        """Void the entries and snapshots beyond a new epoch's base; returns how many entries.

        A snapshot at `position` itself is the state before that entry, and stays.

        Raises:
            OutOfOrder: when the log begins after that position: recover a snapshot instead.
        """
        start = self._base()[0]
        if position < start:
            raise OutOfOrder(f"expected a base from {start} on, got {position}: recover a snapshot")
        with self._lock:
            beyond = [p for p in self.snapshot_positions() if p > position]
            for each in [p for p in self._unwritten if p >= position]:
                del self._unwritten[each]
            with self._changing():
                self._db.execute("DELETE FROM bodies WHERE position >= ?", (position,))
                self._db.execute("DELETE FROM checks WHERE position >= ?", (position,))
                query = "DELETE FROM entries WHERE position >= ?"
                gone = self._db.execute(query, (position,)).rowcount
                files = self._snapshots.forget(beyond)
        _unlink(files)
        return gone

    def begin_at(self, *, position: int, chain: bytes) -> None:
        """Begin the log again after a recovered snapshot; drop what was stored before."""
        with self._lock:
            self._unwritten.clear()
            with self._changing():
                self._db.execute("DELETE FROM bodies")
                self._db.execute("DELETE FROM entries")
                self._db.execute("DELETE FROM checks")
                self._put_meta("base_position", str(position).encode())
                self._put_meta("base_chain", chain)
                files = self._snapshots.forget(self.snapshot_positions())
        _unlink(files)

    # Epochs and notes

    def put_epoch(self, epoch: int, record: bytes) -> None:
        """Keep the signed record of an epoch."""
        with self._lock, self._db:
            self._db.execute("INSERT OR REPLACE INTO epochs VALUES (?, ?)", (epoch, record))

    def epochs(self) -> list[tuple[int, bytes]]:
        """Return all epoch records, oldest first."""
        with self._lock:
            rows = self._db.execute("SELECT epoch, record FROM epochs ORDER BY 1").fetchall()
        return [(row[0], row[1]) for row in rows]

    def latest_epoch(self) -> bytes | None:
        """Return the signed record of the highest epoch."""
        epochs = self.epochs()
        return epochs[-1][1] if epochs else None

    def put_note(self, key: str, value: bytes) -> None:
        """Keep a small value with the log."""
        with self._lock, self._db:
            self._put_meta(f"note:{key}", value)

    def note(self, key: str) -> bytes | None:
        """Return a value kept by `put_note`."""
        return self._meta(f"note:{key}")

    # Snapshots

    def save_snapshot(self, state: OuterState, chain: bytes) -> SnapshotInfo:
        """Write the state before entry `state.position`; older snapshots without a lease go.

        Hashes the state if that was not done yet: call it off the training thread.
        """
        self._snapshots.put(self._snapshots.write(state, chain))
        self.prune()
        return self.snapshot(state.position)

    def write_snapshot(
        self, state: OuterState, chain: bytes, *, on_read: Callable[[], None] = lambda: None
    ) -> WrittenSnapshot:
        """Write a state beside the changes of the log; `put_snapshot` has to follow.

        After a crash between the two, the older snapshot and the entries after it are there still.
        `on_read` is called when the values of the state are no longer needed.
        """
        return self._snapshots.write(state, chain, on_read)

    def put_snapshot(self, written: WrittenSnapshot) -> bool:
        """Keep a written snapshot; False if the log no longer leads to it, and then it is gone.

        Older snapshots without a lease go.
        """
        with self._lock:
            if self._chain_at(written.position) != written.chain:
                written.drop()
                return False
            self._snapshots.put(written)
            self.prune()
            return True

    def open_snapshot(self, position: int) -> SnapshotFile:
        """Return a snapshot that can be read for as long as somebody holds it.

        Raises:
            NotStored: it is not here.
            StoreCorrupt: its file cannot be opened.
        """
        info = self.snapshot(position)
        try:
            return SnapshotFile(info)
        except OSError as error:
            raise StoreCorrupt(f"{info.path}: {error}; fetch the snapshot again") from None

    def snapshot_positions(self) -> list[int]:
        """Return the positions of the stored snapshots, oldest first."""
        return self._snapshots.positions()

    def snapshot(self, position: int) -> SnapshotInfo:
        """Return digests and file of a snapshot. Raises NotStored."""
        return self._snapshots.info(position)

    def load_snapshot(
        self,
        position: int,
        memory_dtype: torch.dtype = torch.float32,
        *,
        allocate: vectors.Allocate = vectors.empty,
    ) -> OuterState:
        """Read a snapshot, whose memory has a format, into new vectors; verify every leaf.

        Raises:
            NotStored: it is not here.
            StoreCorrupt: it is damaged, or has another format.
        """
        return self._snapshots.load(position, memory_dtype, allocate)

    @contextmanager
    def lease(self, position: int) -> Iterator[None]:
        """Keep the snapshot at `position`, and all bodies from there on, while in the block."""
        with self._lock:
            self._leases[position] = self._leases.get(position, 0) + 1
        try:
            yield
        finally:
            with self._lock:
                self._leases[position] -= 1
                if not self._leases[position]:
                    del self._leases[position]

    # Bounds

    def prune(self) -> int:
        """Drop bodies over the budget, oldest first, and old snapshots; returns bodies dropped.

        Bodies that a kept snapshot or a lease needs stay, whatever the budget says: the root of
        the newest snapshot may not be certified yet, so joiners start from the one before.
        """
        with self._lock:
            positions = self._over_budget()
            with self._changing():
                files = self._snapshots.forget(self._old_snapshots())
                for position in positions:
                    self._drop_body(position)
            _unlink(files)
            self._pruned += len(positions)
            return len(positions)

    def statistics(self) -> StoreStatistics:
        """Return counts and sizes."""
        query = (
            "SELECT count(*), coalesce(sum(has_body), 0), coalesce(sum(body_bytes * has_body), 0)"
        )
        with self._lock:
            entries, bodies, body_bytes = self._one(f"{query} FROM entries")
            return StoreStatistics(
                entries=entries,
                bodies=bodies,
                body_bytes=body_bytes,
                snapshots=len(self.snapshot_positions()),
                leases=sum(self._leases.values()),
                pruned_bodies=self._pruned,
            )

    def close(self) -> None:
        """Close the file; idempotent. Bodies that are not written are lost."""
        with self._lock:
            self._unwritten.clear()
            self._db.close()

    # Inside

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """A transaction on entries and bodies."""
        with self._lock, self._db:
            yield
            self._first_with_bodies = self._find_first_with_bodies()

    def _check(self, certificates: Sequence[tuple[int, bytes]]) -> None:
        rows = [(position, crc32(certificate)) for position, certificate in certificates]
        self._db.executemany("INSERT OR REPLACE INTO checks VALUES (?, ?)", rows)

    def _find_first_with_bodies(self) -> int:
        # As many more rows as may be of bodies that are on their way.
        query = "SELECT position FROM entries WHERE has_body = 0 ORDER BY 1 DESC LIMIT ?"
        rows = self._db.execute(query, (1 + len(self._unwritten),)).fetchall()
        gone = next((row[0] for row in rows if row[0] not in self._unwritten), None)
        return self._base()[0] if gone is None else gone + 1

    def _one(self, query: str, *values: object) -> Any:  # noqa: ANN401  # a row of SQLite
        return self._db.execute(query, values).fetchone()

    def _meta(self, key: str) -> bytes | None:
        with self._lock:
            row = self._one("SELECT value FROM meta WHERE key = ?", key)
        return None if row is None else bytes(row[0])

    def _put_meta(self, key: str, value: bytes) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def _base(self) -> tuple[int, bytes]:
        position, chain = self._meta("base_position"), self._meta("base_chain")
        if position is None or chain is None:
            return 0, self._genesis_chain
        return int(position), chain

    def _chain_at(self, position: int) -> bytes | None:
        base, chain = self._base()
        if position == base:
            return chain
        before = self.get(position - 1)
        return before.chain if before is not None else None

    def _expect_next(self, epoch: int, position: int, *, before_base: bool) -> None:
        head = self.head
        if position != head.position:
            raise OutOfOrder(f"expected the entry at position {head.position}, got {position}")
        if epoch < head.epoch and not before_base:
            raise OutOfOrder(f"expected an entry of epoch {head.epoch} or later, got {epoch}")

    def _insert_body(self, position: int, body: memoryview, begins: int = 0) -> None:
        """Insert bytes of a body, which begin at a multiple of `CHUNK_BYTES` in it."""
        # Replaced: a process that died may have left some of them.
        query = "INSERT OR REPLACE INTO bodies VALUES (?, ?, ?)"
        for start in range(0, len(body), CHUNK_BYTES):
            part, data = (begins + start) // CHUNK_BYTES, body[start : start + CHUNK_BYTES]
            self._db.execute(query, (position, part, data))

    def _mark_body(self, position: int) -> None:
        self._db.execute("UPDATE entries SET has_body = 1 WHERE position = ?", (position,))

    def _drop_body(self, position: int) -> None:
        self._unwritten.pop(position, None)
        self._db.execute("DELETE FROM bodies WHERE position = ?", (position,))
        self._db.execute("UPDATE entries SET has_body = 0 WHERE position = ?", (position,))

    def _over_budget(self) -> list[int]:
        if self._budget_bytes is None:
            return []
        query = "SELECT position, body_bytes FROM entries WHERE has_body AND body_bytes ORDER BY 1"
        rows = self._db.execute(query).fetchall()
        excess = sum(row[1] for row in rows) - self._budget_bytes
        needed_from = self._needed_from()
        dropped: list[int] = []
        for position, body_bytes in rows:
            if excess <= 0 or position >= needed_from:
                break
            excess -= body_bytes
            dropped.append(position)
        return dropped

    def _needed_from(self) -> int:
        later = [p for p in self.snapshot_positions() if p > 0][-self._keep_snapshots :]
        kept = later[0] if len(later) == self._keep_snapshots else self._base()[0]
        return min([kept, *self._leases])

    def _old_snapshots(self) -> list[int]:
        later = [p for p in self.snapshot_positions() if p > 0]
        old = later[: -self._keep_snapshots or None]
        return [p for p in old if p not in self._leases]


def _record(row: tuple[Any, ...], *, is_unwritten: bool) -> StoredEntry:
    """Return a row of `entries`. A value of another type has rotted: `mend` drops such an entry."""
    numbers = [value if isinstance(value, int) else -1 for value in (row[0], row[5])]
    texts = [value if isinstance(value, bytes) else b"" for value in row[2:5]]
    return StoredEntry(
        epoch=numbers[0],
        position=row[1],
        entry=texts[0],
        certificate=texts[1],
        chain=texts[2],
        body_bytes=numbers[1],
        has_body=bool(row[6]) or is_unwritten,
    )


def _unlink(files: list[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)
