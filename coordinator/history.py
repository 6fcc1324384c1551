"""What the coordinator remembers for people: rounds, events and peers, in one SQLite file.

Losing this file loses nothing that training needs; it is made again from the log. So a disk that
takes nothing more is no failure here: what cannot be written is forgotten with the process.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from atoll.coordinator.run.status import Event, PeerStatus, RoundSummary, StatusError

R = TypeVar("R", RoundSummary, Event, PeerStatus)

MAX_EVENTS = 10_000  # on disk; some 2 MB

_SCHEMA = """
CREATE TABLE IF NOT EXISTS rounds (
    position INTEGER PRIMARY KEY, tokens INTEGER NOT NULL, record BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS events (id INTEGER PRIMARY KEY AUTOINCREMENT, record BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS peers (peer_id TEXT PRIMARY KEY, record BLOB NOT NULL) WITHOUT ROWID;
"""


class History:
    """Rounds, events and peers of one run."""

    def __init__(self, path: Path) -> None:
        """Open the file, or make it; a damaged one is put aside and begun anew."""
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._db = _open(path)
        except sqlite3.OperationalError:  # a full disk: the file may be whole
            raise
        except sqlite3.DatabaseError:
            path.replace(path.with_name(f"{path.name}.damaged"))
            self._db = _open(path)

    def put_round(self, summary: RoundSummary) -> None:
        """Keep a round, in place of what was known of it."""
        row = (summary.position, summary.tokens, summary.to_json())
        with self._changing():
            self._db.execute("INSERT OR REPLACE INTO rounds VALUES (?, ?, ?)", row)

    def rounds(self, newest: int) -> list[RoundSummary]:
        """The newest rounds, oldest first."""
        query = "SELECT record FROM rounds ORDER BY position DESC LIMIT ?"
        return [r for raw in self._blobs(query, newest) if (r := _read(RoundSummary, raw))]

    def forget_rounds(self, after: int) -> None:
        """Drop rounds beyond a position: the log does not have them."""
        with self._changing():
            self._db.execute("DELETE FROM rounds WHERE position > ?", (after,))

    def last_round(self) -> int:
        """Position of the newest round, 0 if there is none."""
        with self._lock:
            row = self._db.execute("SELECT max(position) FROM rounds").fetchone()
        return row[0] or 0

    def tokens_total(self) -> int:
        """Tokens of all rounds."""
        with self._lock:
            row = self._db.execute("SELECT sum(tokens) FROM rounds").fetchone()
        return row[0] or 0

    def add_event(self, event: Event) -> None:
        """Keep an event; the oldest go."""
        with self._changing():
            cursor = self._db.execute("INSERT INTO events (record) VALUES (?)", (event.to_json(),))
            oldest = (cursor.lastrowid or 0) - MAX_EVENTS
            self._db.execute("DELETE FROM events WHERE id <= ?", (oldest,))

    def events(self, newest: int) -> list[Event]:
        """The newest events, oldest first."""
        query = "SELECT record FROM events ORDER BY id DESC LIMIT ?"
        return [e for raw in self._blobs(query, newest) if (e := _read(Event, raw))]

    def put_peers(self, peers: Iterable[PeerStatus]) -> None:
        """Keep the last status of each of these peers, and of no others."""
        rows = [(peer.peer_id, peer.to_json()) for peer in peers]
        with self._changing():
            self._db.execute("DELETE FROM peers")
            self._db.executemany("INSERT INTO peers VALUES (?, ?)", rows)

    def peers(self) -> list[PeerStatus]:
        """The last status of every peer."""
        blobs = self._blobs("SELECT record FROM peers ORDER BY peer_id DESC LIMIT ?", 4096)
        return [p for raw in blobs if (p := _read(PeerStatus, raw))]

    def close(self) -> None:
        """Close the file; idempotent."""
        with self._lock:
            self._db.close()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """All of the block's changes, or none where the disk takes no more."""
        with suppress(sqlite3.OperationalError), self._lock, self._db:
            yield

    def _blobs(self, query: str, limit: int) -> list[bytes]:
        with self._lock:
            rows = self._db.execute(query, (limit,)).fetchall()
        return [bytes(row[0]) for row in reversed(rows)]


def _open(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, check_same_thread=False, timeout=10.0)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.executescript(_SCHEMA)
    except BaseException:
        db.close()
        raise
    return db


def _read(kind: type[R], raw: bytes) -> R | None:
    try:
        return kind.from_json(raw)
    except StatusError:  # of an older version; it is for people to read only
        return None
