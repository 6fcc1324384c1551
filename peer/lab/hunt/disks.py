"""A machine's disk: real files in a folder, and what a crash leaves of them.

A process that is killed loses nothing that it has written. A loss of power also loses what was not
synced, in part or whole:

    SQLite      with `synchronous = FULL` nothing that was committed. With `NORMAL` any number of
                the last frames of the write-ahead log that no checkpoint has copied; of the first
                lost one some bytes may be there
    files       an unsynced one is empty, cut off, or whole
    renames     in a folder that was not synced, the old file may be back

After `WRITEBACK_S` the system has written everything. `crash_in` ends the machine at a later sync,
commit or rename, as a crash in the middle of a change does.
"""

from __future__ import annotations

import errno
import os
import random
import sqlite3
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

WRITEBACK_S = 30.0  # after which Linux writes dirty pages
WAL_HEADER_BYTES, FRAME_HEADER_BYTES = 32, 24  # https://www.sqlite.org/fileformat2.html#walformat
CHECKPOINTED_AT, FRAMES_AT = 96, 16  # in the wal-index, https://www.sqlite.org/walformat.html

Files = dict[str, bytes]
"""By path below the folder."""


class HuntConnection(sqlite3.Connection):
    """A connection whose commits are events of a disk."""

    disk: Disk | None = None
    path = Path()
    is_synced = False
    """whether each commit is synced"""

    def execute(self, sql: str, *arguments: Any) -> sqlite3.Cursor:  # noqa: ANN401
        """Run a statement; one that changes something fails on a full disk."""
        if sql.startswith("PRAGMA synchronous"):
            self.is_synced = sql.endswith("FULL")
            sql = "PRAGMA synchronous = OFF"  # the disk is simulated, so nobody waits for it
        elif self.disk is not None and sql.startswith(("INSERT", "UPDATE", "DELETE")):
            self.disk.expect_room()
        return super().execute(sql, *arguments)

    def executemany(self, sql: str, rows: Any, /) -> sqlite3.Cursor:  # noqa: ANN401
        """Run a statement for each row."""
        rows = list(rows)
        if self.disk is not None and rows:
            self.disk.expect_room()
        return super().executemany(sql, rows)

    def __enter__(self) -> Self:
        """Begin a transaction."""
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> Literal[False]:  # noqa: ANN401
        """Commit, with an event before and after."""
        if error[0] is None and self.in_transaction and self.disk is not None:
            self.disk.event()
            super().__exit__(*error)
            self.disk.event()
            return False
        super().__exit__(*error)
        return False


@dataclass(eq=False)
class Disk:
    """The files of one start of a machine."""

    folder: Path
    chance: random.Random
    now_s: Callable[[], float]
    on_crash: Callable[[], None] = lambda: None
    """called at the event that `crash_in` counts to, with the files as they are then"""
    is_full: bool = False
    crash_in: int | None = None
    _open: list[HuntConnection] = field(default_factory=list)
    _durable: set[tuple[int, int, int]] = field(default_factory=set)
    """inode, size and time of change of files when they were synced"""
    _renamed: dict[str, tuple[float, bytes | None]] = field(default_factory=dict)
    """by target: when a rename happened, and what was there before"""
    _before: bytes | None = None
    num_events: int = 0

    def connect(
        self,
        connect: Callable[..., Any],
        path: Path,
        **options: Any,  # noqa: ANN401
    ) -> sqlite3.Connection:
        """Open a database."""
        opened: HuntConnection = connect(path, factory=HuntConnection, **options)
        opened.path, opened.disk = Path(path), self
        self._open.append(opened)
        return opened

    def expect_room(self) -> None:
        """Raise what SQLite raises on a full disk, if it is full."""
        if self.is_full:
            failure = sqlite3.OperationalError("database or disk is full")
            failure.sqlite_errorcode = sqlite3.SQLITE_FULL
            failure.sqlite_errorname = "SQLITE_FULL"
            raise failure

    def fsync(self, descriptor: int) -> None:
        """Note that what a descriptor stands for is on the disk."""
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.event()
        known = os.fstat(descriptor)
        self._renamed = {
            name: old
            for name, old in self._renamed.items()
            if not os.path.samestat((self.folder / name).parent.stat(), known)
        }
        self._durable.add(_version(known))
        self.event()

    def before_replace(self, target: Path) -> None:
        """Remember what a rename replaces."""
        self.event()
        target = Path(target)
        self._before = target.read_bytes() if target.is_file() else None

    def replaced(self, target: Path) -> None:
        """Note that a rename has happened, which the folder's sync makes last."""
        path = Path(target)
        if self.folder not in path.parents:
            return
        self._renamed[self._name(path)] = (self.now_s(), self._before)
        self.event()

    def event(self) -> None:
        """Count a sync, commit or rename; crash if one was to end the machine."""
        self.num_events += 1
        if self.crash_in is not None:
            self.crash_in -= 1
            if self.crash_in <= 0:
                self.crash_in = None
                self.on_crash()

    def write_back(self) -> None:
        """Put everything on the disk, as the system does after a while."""
        for path in self._paths():
            if path.is_file():
                self._durable.add(_version(path.stat()))
        soon_s = self.now_s() - WRITEBACK_S
        self._renamed = {n: old for n, old in self._renamed.items() if old[0] > soon_s}

    def image(self, *, lost_power: bool) -> Files:
        """Return the files as a crash leaves them."""
        logs = {self._name(each.path) + "-wal": each for each in self._living()}
        files: Files = {}
        for path in self._paths():
            name = self._name(path)
            if not path.is_file() or name.endswith("-shm"):
                continue
            data = path.read_bytes()
            if lost_power and name in logs:
                data = self._cut_log(data, logs[name])
            elif lost_power and name + "-wal" not in logs:
                data = self._torn(path, data)
            files[name] = data
        if lost_power:
            self._undo_renames(files)
        return files

    def close(self) -> None:
        """Close what a process that has died left open."""
        for each in self._open:
            each.close()

    def _living(self) -> Iterator[HuntConnection]:
        for each in self._open:
            try:
                each.total_changes  # noqa: B018  # raises if it was closed
            except sqlite3.ProgrammingError:
                continue
            yield each

    def _paths(self) -> list[Path]:
        return [self.folder, *sorted(self.folder.rglob("*"))]

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def _cut_log(self, log: bytes, opened: HuntConnection) -> bytes:
        """Lose the last frames of a write-ahead log, as far as nothing has synced them."""
        index = Path(f"{opened.path}-shm")
        if opened.is_synced or len(log) <= WAL_HEADER_BYTES or not index.exists():
            return log
        raw = index.read_bytes()
        (frames,) = struct.unpack_from("=I", raw, FRAMES_AT)
        (copied,) = struct.unpack_from("=I", raw, CHECKPOINTED_AT)
        (page,) = struct.unpack_from(">I", log, 8)
        kept = self.chance.randint(min(copied, frames), frames)
        frame = FRAME_HEADER_BYTES + page
        end = WAL_HEADER_BYTES + kept * frame
        torn = self.chance.randrange(frame) if kept < frames else 0
        return log[: end + torn]

    def _torn(self, path: Path, data: bytes) -> bytes:
        if _version(path.stat()) in self._durable or not data:
            return data
        return data[: self.chance.choice([0, self.chance.randrange(len(data)), len(data)])]

    def _undo_renames(self, files: Files) -> None:
        for name, (_, before) in self._renamed.items():
            if name in files and self.chance.random() < 0.5:
                if before is None:
                    del files[name]
                else:
                    files[name] = before


def _version(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_size, found.st_mtime_ns


def write(folder: Path, files: Files) -> None:
    """Write files into a new folder."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
