"""The snapshots of a log: files of whole states, and the rows that name them.

A file is written under another name, synced and renamed, and only then put in the table; one that
no row names is removed when the log is opened. Reading one verifies every leaf.
"""

from __future__ import annotations

import itertools
import os
import sqlite3
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import RLock

import torch

from atoll.optim.log.store_errors import NotStored, StoreCorrupt
from atoll.optim.state import vectors
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import (
    DIGEST_BYTES,
    LEAF_BYTES,
    Assembly,
    OuterState,
    StateError,
    leaf_digest,
)


@dataclass(frozen=True, kw_only=True)
class SnapshotInfo:
    """A stored snapshot."""

    position: int
    """Position of the next entry: so many are applied."""
    chain: bytes
    root: bytes
    leaf_digests: tuple[bytes, ...]
    layout: Layout
    path: Path


@dataclass(frozen=True, kw_only=True)
class WrittenSnapshot:
    """A state in a file, synced, that no row names yet."""

    position: int
    chain: bytes
    root: bytes
    leaf_digests: tuple[bytes, ...]
    layout: Layout
    partial: Path

    def drop(self) -> None:
        """Delete the file."""
        self.partial.unlink(missing_ok=True)


class SnapshotFile:
    """A stored snapshot, read a leaf at a time; it stays readable after the store has pruned it.

    The file's pages are the system's to keep or drop, so a snapshot takes no memory of the process.
    """

    def __init__(self, info: SnapshotInfo) -> None:
        """Open the file; it is closed with the last reference to this object.

        Raises:
            OSError: it cannot be opened.
        """
        self.position = info.position
        self._root, self._digests, self._path = info.root, info.leaf_digests, info.path
        self._descriptor = os.open(info.path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)

    @property
    def num_leaves(self) -> int:
        """Return the number of leaves."""
        return len(self._digests)

    def root(self) -> bytes:
        """Return the state root that it was stored with."""
        return self._root

    def leaves(self) -> list[bytes]:
        """Return the digest of each leaf."""
        return list(self._digests)

    def read_leaf(self, index: int) -> bytes:
        """Read a leaf and verify it; blocks.

        Raises:
            IndexError: when there is no such leaf.
            StoreCorrupt: the file does not hold it (any more).
        """
        if not 0 <= index < self.num_leaves:
            raise IndexError(f"expected a leaf in [0, {self.num_leaves}), got {index}")
        try:
            data = os.pread(self._descriptor, LEAF_BYTES, index * LEAF_BYTES)
        except OSError as error:
            raise StoreCorrupt(f"{self._path}: {error}; fetch the snapshot again") from None
        if leaf_digest(data) != self._digests[index]:
            raise StoreCorrupt(f"{self._path}: leaf {index} is damaged; fetch the snapshot again")
        return data


class Snapshots:
    """The table `snapshots` and its files; the lock is the store's."""

    def __init__(
        self, db: sqlite3.Connection, lock: RLock, directory: Path, *, reads_only: bool = False
    ) -> None:
        """Remove what an interrupted write left, unless others may be writing."""
        self._db = db
        self._lock = lock
        self._directory = directory
        self._numbers = itertools.count()
        if reads_only:
            return
        with lock:
            known = {row[0] for row in db.execute("SELECT file FROM snapshots")}
        for path in directory.glob("snapshot-*"):
            if path.name not in known:
                path.unlink(missing_ok=True)

    def positions(self) -> list[int]:
        """Positions of the stored snapshots, oldest first."""
        with self._lock:
            rows = self._db.execute("SELECT position FROM snapshots ORDER BY 1").fetchall()
        return [row[0] for row in rows]

    def info(self, position: int) -> SnapshotInfo:
        """Digests and file of a snapshot. Raises NotStored."""
        query = "SELECT chain, root, leaf_digests, layout, file FROM snapshots WHERE position = ?"
        with self._lock:
            row = self._db.execute(query, (position,)).fetchone()
        if row is None:
            raise NotStored(f"snapshot {position} is not here; here are {self.positions()}")
        digests = (row[2][i : i + DIGEST_BYTES] for i in range(0, len(row[2]), DIGEST_BYTES))
        return SnapshotInfo(
            position=position,
            chain=row[0],
            root=row[1],
            leaf_digests=tuple(digests),
            layout=Layout.from_json(row[3]),
            path=self._directory / row[4],
        )

    def load(
        self, position: int, memory_dtype: torch.dtype, allocate: vectors.Allocate
    ) -> OuterState:
        """Read a snapshot and verify every leaf. Raises NotStored or StoreCorrupt."""
        info = self.info(position)
        try:
            beside = info.path.stat().st_size - 4 * info.layout.numel
            assembly = Assembly(
                layout=info.layout,
                position=position,
                leaf_digests=info.leaf_digests,
                root=info.root,
                memory_numel=max(0, beside // memory_dtype.itemsize),
                memory_dtype=memory_dtype,
                allocate=allocate,
            )
            with info.path.open("rb") as file:
                for index in range(len(info.leaf_digests)):
                    assembly.add(index, file.read(LEAF_BYTES))
            return assembly.finish()
        except (OSError, StateError) as error:
            raise StoreCorrupt(f"{info.path}: {error}; fetch the snapshot again") from None

    def write(
        self, state: OuterState, chain: bytes, on_read: Callable[[], None] = lambda: None
    ) -> WrittenSnapshot:
        """Write the state before entry `state.position`; hashes it if that was not done yet.

        `on_read` is called when its values are no longer needed, and perhaps not on the disk yet.
        """
        digests = tuple(state.leaves())  # first: others may wait for the root
        number = next(self._numbers)  # two may be written at once
        partial = self._directory / f"snapshot-{state.position:012d}.{number}.new"
        try:
            with partial.open("wb") as file:
                for index in range(state.num_leaves):
                    file.write(state.leaf(index))
                file.flush()
                on_read()
                os.fsync(file.fileno())  # or the name could stand for bytes that are not there
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        return WrittenSnapshot(
            position=state.position,
            chain=chain,
            root=state.root(),
            leaf_digests=digests,
            layout=state.layout,
            partial=partial,
        )

    def put(self, written: WrittenSnapshot) -> None:
        """Give the file its name, and name it in the table."""
        name = f"snapshot-{written.position:012d}.bin"
        layout, digests = written.layout.to_json(), b"".join(written.leaf_digests)
        row = (written.position, written.chain, written.root, digests, layout, name)
        with self._lock, self._db:
            written.partial.replace(self._directory / name)
            sync_folder(self._directory)  # or the row could outlive the name
            self._db.execute("INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?, ?, ?, ?)", row)

    def forget(self, positions: Sequence[int]) -> list[Path]:
        """Take snapshots out of the table, in the caller's transaction; returns their files."""
        files = [self.info(position).path for position in positions]
        rows = [(position,) for position in positions]
        self._db.executemany("DELETE FROM snapshots WHERE position = ?", rows)
        return files


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on the disk, as a rename alone does not. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
