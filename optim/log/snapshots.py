"""Snapshots of the outer state on disk: a file each, their digests in the log's database.

A file is written under another name, synced and renamed, and only then put in the table; a file
that no row names is removed when the log is opened. Reading verifies every leaf.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import RLock

from atoll.optim.log.store_file import NotStored, StoreCorrupt
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import DIGEST_BYTES, LEAF_BYTES, Assembly, OuterState, StateError


@dataclass(frozen=True, kw_only=True)
class SnapshotInfo:
    """A stored snapshot."""

    position: int
    """Of the entry that comes next: so many are applied."""
    chain: bytes
    root: bytes
    leaf_digests: tuple[bytes, ...]
    layout: Layout
    path: Path


class Snapshots:
    """The table `snapshots` and the files beside it; the lock is the store's."""

    def __init__(self, db: sqlite3.Connection, lock: RLock, directory: Path) -> None:
        """Remove what an interrupted write left."""
        self._db = db
        self._lock = lock
        self._directory = directory
        self._discard_stray_files()

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

    def load(self, position: int) -> OuterState:
        """Read a snapshot and verify every leaf. Raises NotStored or StoreCorrupt."""
        info = self.info(position)
        try:
            assembly = Assembly(
                layout=info.layout,
                position=position,
                leaf_digests=info.leaf_digests,
                root=info.root,
                memory_numel=max(0, info.path.stat().st_size // 4 - info.layout.numel),
            )
            with info.path.open("rb") as file:
                for index in range(len(info.leaf_digests)):
                    assembly.add(index, file.read(LEAF_BYTES))
            return assembly.finish()
        except (OSError, StateError) as error:
            raise StoreCorrupt(f"{info.path}: {error}; fetch the snapshot again") from None

    def save(self, state: OuterState, chain: bytes) -> None:
        """Write the state before entry `state.position`; hashes it if that was not done yet."""
        name = f"snapshot-{state.position:012d}.bin"
        self._write(state, name)
        layout, digests = state.layout.to_json(), b"".join(state.leaves())
        row = (state.position, chain, state.root(), digests, layout, name)
        with self._lock, self._db:
            self._db.execute("INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?, ?, ?, ?)", row)

    def forget(self, positions: Sequence[int]) -> list[Path]:
        """Take snapshots out of the table, in the caller's transaction; returns their files."""
        files = [self.info(position).path for position in positions]
        rows = [(position,) for position in positions]
        self._db.executemany("DELETE FROM snapshots WHERE position = ?", rows)
        return files

    def _write(self, state: OuterState, name: str) -> None:
        partial = self._directory / f"{name}.new"
        with partial.open("wb") as file:
            for index in range(state.num_leaves):
                file.write(state.read_leaf(index))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self._directory / name)

    def _discard_stray_files(self) -> None:
        with self._lock:
            known = {row[0] for row in self._db.execute("SELECT file FROM snapshots")}
        for path in self._directory.glob("snapshot-*"):
            if path.name not in known:
                path.unlink(missing_ok=True)
