"""The coordinator's records for people: rounds, marks, events and peers, in one SQLite file.

Training needs nothing in this file; it is rebuilt from the log. So a full disk is no failure here:
what cannot be written is lost at the next restart.
"""

from __future__ import annotations

import functools
import math
import sqlite3
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from atoll.coordinator.run.levels import Level
from atoll.coordinator.run.notice import Notice
from atoll.coordinator.run.status import (
    EVENTS,
    HISTORY,
    Event,
    LossPoint,
    PeerStatus,
    RoundSummary,
    StatusError,
)

R = TypeVar("R", RoundSummary, Event, PeerStatus, LossPoint)

MAX_EVENTS = 10_000  # on disk; some 2 MB
READ_BACK = 2048  # events at a start: 256 of them could be one peer's
LATE_S = 24 * 3600.0  # an event that claims to be older comes from a wrong clock
LAST = 2**63 - 1  # a position beyond all; SQLite's largest integer
REPEAT_S = 600.0  # a lasting fault is logged again after this

_SCHEMA = """
CREATE TABLE IF NOT EXISTS rounds (
    position INTEGER PRIMARY KEY, tokens INTEGER NOT NULL, record BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS events (id INTEGER PRIMARY KEY AUTOINCREMENT, record BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS peers (peer_id TEXT PRIMARY KEY, record BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS marks (position INTEGER PRIMARY KEY, point BLOB NOT NULL,
    tallies BLOB NOT NULL);
"""


class History:
    """Rounds, events and peers of one run."""

    def __init__(self, path: Path, *, reads_only: bool = False) -> None:
        """Open or create the file; a damaged one is renamed and replaced by a new one.

        With `reads_only` the file must be there, and stays as it is; it raises sqlite3.Error.
        """
        self._lock = threading.Lock()
        if reads_only:
            uri = f"{path.absolute().as_uri()}?mode=ro"
            self._db = sqlite3.connect(uri, uri=True, check_same_thread=False, timeout=10.0)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._db = _open(path)
        except sqlite3.OperationalError:  # a full disk; the file may be intact
            raise
        except sqlite3.DatabaseError:
            path.replace(path.with_name(f"{path.name}.damaged"))
            self._db = _open(path)

    def put_round(self, summary: RoundSummary) -> None:
        """Save a round, replacing an earlier version of it."""
        row = (summary.position, summary.tokens, summary.to_json())
        with self._changing():
            self._db.execute("INSERT OR REPLACE INTO rounds VALUES (?, ?, ?)", row)

    def rounds(self, newest: int, *, until: int = LAST) -> list[RoundSummary]:
        """Return the newest rounds up to the one that led to `until`, oldest first."""
        query = "SELECT record FROM rounds WHERE position <= ? ORDER BY position DESC LIMIT ?"
        return [r for raw in self._blobs(query, until, newest) if (r := _read_round(raw))]

    def round(self, position: int) -> RoundSummary | None:
        """Return the round that led to a position."""
        query = "SELECT record FROM rounds WHERE position = ?"
        return next(
            (r for raw in self._blobs(query, position) if (r := _read(RoundSummary, raw))), None
        )

    def forget_rounds(self, after: int) -> None:
        """Delete rounds beyond a position, which the log does not have."""
        with self._changing():
            self._db.execute("DELETE FROM rounds WHERE position > ?", (after,))
            self._db.execute("DELETE FROM marks WHERE position > ?", (after,))

    def last_round(self) -> int:
        """Return the position of the newest round, 0 if there is none."""
        with self._lock:
            row = self._db.execute("SELECT max(position) FROM rounds").fetchone()
        return row[0] or 0

    def tokens_total(self) -> int:
        """Return the tokens of all rounds."""
        with self._lock:
            row = self._db.execute("SELECT sum(tokens) FROM rounds").fetchone()
        return row[0] or 0

    def add_event(self, event: Event) -> None:
        """Save an event; delete the oldest beyond `MAX_EVENTS`."""
        with self._changing():
            cursor = self._db.execute("INSERT INTO events (record) VALUES (?)", (event.to_json(),))
            oldest = (cursor.lastrowid or 0) - MAX_EVENTS
            self._db.execute("DELETE FROM events WHERE id <= ?", (oldest,))

    def events(self, newest: int, *, until_s: float = math.inf) -> list[Event]:
        """Return the newest events up to a time, oldest first as they were noted."""
        # A damaged record is skipped, here as in `_read`; text, as not every SQLite reads blobs.
        query = (
            "SELECT record FROM (SELECT *, CAST(record AS TEXT) AS text FROM events) WHERE "
            "CASE WHEN json_valid(text) THEN json_extract(text, '$.at') <= ? END "
            "ORDER BY id DESC LIMIT ?"
        )
        return [e for raw in self._blobs(query, until_s, newest) if (e := _read_event(raw))]

    def put_mark(self, point: LossPoint, tallies: bytes) -> None:
        """Save a mark: what peers had done up to a round, and its place on the curve."""
        row = (point.position, point.to_json(), tallies)
        with self._changing():
            self._db.execute("INSERT OR REPLACE INTO marks VALUES (?, ?, ?)", row)

    def points(self) -> list[LossPoint]:
        """Return the points of all marks, oldest first."""
        query = "SELECT point FROM marks ORDER BY position DESC LIMIT ?"
        return [p for raw in self._blobs(query, LAST) if (p := _read(LossPoint, raw))]

    def tallies(self, until: int) -> bytes | None:
        """Return what the last mark up to a position says of peers; None without one."""
        query = "SELECT tallies FROM marks WHERE position <= ? ORDER BY position DESC LIMIT ?"
        return next(iter(self._blobs(query, until, 1)), None)

    def put_peers(self, peers: Iterable[PeerStatus]) -> None:
        """Save the last status of these peers, and of no others."""
        rows = [(peer.peer_id, peer.to_json()) for peer in peers]
        with self._changing():
            self._db.execute("DELETE FROM peers")
            self._db.executemany("INSERT INTO peers VALUES (?, ?)", rows)

    def peers(self) -> list[PeerStatus]:
        """Return the last status of every peer."""
        blobs = self._blobs("SELECT record FROM peers ORDER BY peer_id DESC LIMIT ?", 4096)
        return [p for raw in blobs if (p := _read(PeerStatus, raw))]

    def close(self) -> None:
        """Close the file; idempotent."""
        with self._lock:
            self._db.close()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Commit all of the block's changes, or none if the disk is full."""
        with suppress(sqlite3.OperationalError), self._lock, self._db:
            yield

    def _blobs(self, query: str, *values: float) -> list[bytes]:
        with self._lock:
            rows = self._db.execute(query, values).fetchall()
        return [bytes(row[0]) for row in reversed(rows)]


class EventLog:
    """The newest events; the history keeps more of them."""

    def __init__(self, history: History, clock: Callable[[], float]) -> None:
        """Continue from the history; `clock` returns seconds since 1970."""
        self._history = history
        self._clock = clock
        self._events: deque[Event] = deque()
        self._reported_s: dict[Hashable, float] = {}
        """by key of `report_once`: when it was logged"""
        self._counts: Counter[str] = Counter()
        for event in history.events(READ_BACK):
            self._keep(event)

    def newest(self) -> list[Event]:
        """Return the newest events by their time: a peer's come late after a reboot."""
        return sorted(self._events, key=lambda event: event.at)

    def report(self, level: Level, notice: Notice) -> None:
        """Log an event of the coordinator."""
        self.add(level, "coordinator", notice)

    def report_once(self, level: Level, notice: Notice, *, key: Hashable) -> None:
        """Log an event of the coordinator unless one of its key was logged within `REPEAT_S`."""
        now_s = self._clock()
        self._reported_s = {k: s for k, s in self._reported_s.items() if s > now_s - REPEAT_S}
        if key not in self._reported_s:
            self._reported_s[key] = now_s
            self.report(level, notice)

    def add(self, level: Level, source: str, notice: Notice, *, at_s: float | None = None) -> None:
        """Log an event.

        Args:
            level: level of the event.
            source: PeerID, or "coordinator".
            notice: what happened.
            at_s: time by the run's clock as the source knows it; by default now.
        """
        now_s = self._clock()
        at_s = now_s if at_s is None or not now_s - LATE_S <= at_s <= now_s else at_s
        event = Event.of(notice, level, at=at_s, source=source)
        self._keep(event)
        self._history.add_event(event)

    def _keep(self, event: Event) -> None:
        """Keep the newest events; the oldest one of the source that has most makes room.

        So one peer's events push out its own: with n sources, each keeps at least 256 / n.
        """
        self._events.append(event)
        self._counts[event.source] += 1
        if len(self._events) > EVENTS:
            loudest = max(self._counts, key=lambda source: self._counts[source])
            index = next(i for i, kept in enumerate(self._events) if kept.source == loudest)
            del self._events[index]
            self._counts[loudest] -= 1
            self._counts += Counter()  # drops those without an event


def _open(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, check_same_thread=False, timeout=10.0)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        # A power cut may cost the last rows, which only people read, but not the file.
        db.execute("PRAGMA synchronous = NORMAL")
        db.executescript(_SCHEMA)
    except BaseException:
        db.close()
        raise
    return db


def _read(kind: type[R], raw: bytes) -> R | None:
    try:
        return kind.from_json(raw)
    except StatusError:  # of an older version; only people read it, so it is skipped
        return None


@functools.lru_cache(maxsize=2 * EVENTS)
def _read_event(raw: bytes) -> Event | None:
    """Parse an event, as `_read_round`."""
    return _read(Event, raw)


@functools.lru_cache(maxsize=2 * HISTORY)
def _read_round(raw: bytes) -> RoundSummary | None:
    """Parse a round; a replay asks for nearly the same ones each time."""
    return _read(RoundSummary, raw)
