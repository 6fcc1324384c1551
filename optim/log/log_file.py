"""The SQLite file of a log: its tables, and opening one that is whole and of this run."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from atoll.optim.log.store_errors import StoreCorrupt, WrongRun

PRIMARY = 0xFF  # bits of an SQLite error code that say which, without the details
SCHEMA_VERSION = 2  # of tables and digests; in `user_version`, where 0 means a new file

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE entries (
    position INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, entry BLOB NOT NULL,
    certificate BLOB NOT NULL, chain BLOB NOT NULL, body_bytes INTEGER NOT NULL,
    has_body INTEGER NOT NULL);
CREATE TABLE bodies (
    position INTEGER NOT NULL, part INTEGER NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (position, part));
CREATE TABLE epochs (epoch INTEGER PRIMARY KEY, record BLOB NOT NULL);
CREATE TABLE snapshots (
    position INTEGER PRIMARY KEY, chain BLOB NOT NULL, root BLOB NOT NULL,
    leaf_digests BLOB NOT NULL, layout TEXT NOT NULL, file TEXT NOT NULL);
"""

# Queries at every entry must not read all of them: a row is kilobytes, and the log only grows.
_INDEXES = """
CREATE INDEX IF NOT EXISTS held ON entries (position, body_bytes) WHERE has_body AND body_bytes;
CREATE INDEX IF NOT EXISTS gone ON entries (position) WHERE has_body = 0;
CREATE INDEX IF NOT EXISTS bare ON entries (position) WHERE certificate = x'';
"""

# Nothing else covers the bytes of a certificate. A log of an earlier version has no such table.
_CHECKS = """
CREATE TABLE IF NOT EXISTS checks (position INTEGER PRIMARY KEY, certificate INTEGER NOT NULL);
"""


def open_log(path: Path, run_id: bytes, *, fsync: bool) -> sqlite3.Connection:
    """Open the log's file, or make it.

    Raises:
        WrongRun, StoreCorrupt: nothing is changed.
    """
    with _readable(path):
        db = sqlite3.connect(path, check_same_thread=False, timeout=10.0)
        try:
            _prepare(db, path, run_id, fsync=fsync)
        except BaseException:
            db.close()
            raise
        return db


def open_to_read(path: Path) -> tuple[sqlite3.Connection, bytes]:
    """Open a log's file that another process may be writing; return the id of its run, too.

    Raises:
        StoreCorrupt: it cannot be read as a log.
    """
    with _readable(path):
        uri = f"{path.absolute().as_uri()}?mode=ro"
        db = sqlite3.connect(uri, uri=True, check_same_thread=False, timeout=10.0)
        try:
            version = db.execute("PRAGMA user_version").fetchone()[0]
            row = db.execute("SELECT value FROM meta WHERE key = 'run_id'").fetchone()
            if version != SCHEMA_VERSION or row is None:
                raise StoreCorrupt(f"{path}: not a log of this version of Atoll")
        except BaseException:
            db.close()
            raise
        return db, bytes(row[0])


def _prepare(db: sqlite3.Connection, path: Path, run_id: bytes, *, fsync: bool) -> None:
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version not in (0, SCHEMA_VERSION):
        raise StoreCorrupt(
            f"{path}: expected a log of version {SCHEMA_VERSION}, got {version}; use the version "
            f"of Atoll that wrote it. A peer may move the directory {path.parent} away instead and "
            "fetch the log from others; a coordinator may not"
        )
    if version == 0:
        _create(db, run_id)
    _expect_run(db, run_id, path)
    db.executescript(_INDEXES + _CHECKS)
    # After a kill, WAL holds the calls that returned. NORMAL syncs at checkpoints alone: a loss of
    # power may cost the last calls, never the file.
    db.execute("PRAGMA journal_mode = WAL")
    db.execute(f"PRAGMA synchronous = {'FULL' if fsync else 'NORMAL'}")


def _create(db: sqlite3.Connection, run_id: bytes) -> None:
    tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if tables:
        raise StoreCorrupt("expected a log of Atoll, got another database; choose a new directory")
    db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION};")
    db.execute("INSERT INTO meta VALUES ('run_id', ?)", (run_id,))
    db.commit()


def _expect_run(db: sqlite3.Connection, run_id: bytes, path: Path) -> None:
    row = db.execute("SELECT value FROM meta WHERE key = 'run_id'").fetchone()
    stored = bytes(row[0]) if row else b""
    if stored != run_id:
        raise WrongRun(
            f"{path}: expected the log of run {run_id.hex()[:12]}, got that of run "
            f"{stored.hex()[:12]}; use another directory for this run"
        )


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", 0) & PRIMARY  # the module's own have none
        if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            raise  # the log is well, the disk is not
        raise StoreCorrupt(
            f"{path}: {error}; move the directory {path.parent} away, and nothing else: "
            "the log can be fetched again from peers"
        ) from None
