"""The folder of a follower: what its peers share, and the records of the run for people.

A coordinator's folder but for its keys, with a peer's in it. Of a pipeline, each followed stage has
a log and records, and a peer: the first stage's lies at the top, as in a dense run.

    run.json, identity.key, lock, ...    see `PeerPaths`
    peers/stage-2/                       the same of a further stage
    spec.json, tokenizer.z, genesis.root, log/, history.db, checkpoints/
                                         as in a coordinator's (`atoll.coordinator.service.server`)
    exports/                             see `atoll.peer.daemon.follow_exports`
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

from atoll.coordinator.history import EventLog, History
from atoll.coordinator.rounds import RoundHistory
from atoll.coordinator.run.levels import Level
from atoll.coordinator.run.notice import Notice
from atoll.coordinator.service.server import LogFiles
from atoll.optim.log.entry import Entry
from atoll.optim.log.module import WHOLE
from atoll.optim.log.store import PAGE, LogStore


class FollowerFolder:
    """A follower's folder; it opens a file when it is asked for it first."""

    def __init__(self, root: Path, run_id: bytes) -> None:
        """Open nothing yet: somebody else may be using the folder."""
        self.root = root
        self._run_id = run_id
        self._stack = ExitStack()
        self._histories: dict[str, History] = {}
        self._events: EventLog | None = None

    def files(self, module: str) -> LogFiles:
        """Return the files of a module's log."""
        return LogFiles(self.root, self._run_id, module)

    def peer(self, module: str, *, is_first: bool) -> Path:
        """Return the directory of the peer that follows a module."""
        return self.root if is_first else self.root / "peers" / module

    def history(self, module: str) -> History:
        """Return the rounds of a module, and those of the whole run's events; blocks."""
        if module not in self._histories:
            history = History(self.files(module).file("history.db"))
            self._stack.callback(history.close)
            self._histories[module] = history
        return self._histories[module]

    def begin_events(self) -> None:
        """Keep events from now on; blocks."""
        self._events = self._events or EventLog(self.history(WHOLE), time.time)

    def keep_event(self, level: Level, source: str, notice: Notice) -> None:
        """Keep an event of the run; until `begin_events`, drop it."""
        if self._events is not None:
            self._events.add(level, source, notice)

    def close(self) -> None:
        """Close the files; idempotent."""
        self._events = None
        self._stack.close()


class Records:
    """The rounds of one log, for people."""

    def __init__(self, history: History, store: LogStore, num_fragments: int) -> None:
        """Bring the history up to the log; blocks while it reads what is new."""
        self._store = store
        self._rounds = RoundHistory(history, store, num_fragments=num_fragments)
        self._next = store.head.position

    def note(self, start: int | None = None) -> None:
        """Add what the log has from the last call on, or from a position at which it changed."""
        self._next = self._next if start is None else min(start, self._next)
        while records := self._store.headers(self._next, PAGE):
            is_late = self._store.head.position > self._next + 1
            for record in records:
                entry = Entry.decode(record.entry)
                self._rounds.add(entry, time.time(), left_out=[], valid_loss=None, late=is_late)
                self._next = record.position + 1
