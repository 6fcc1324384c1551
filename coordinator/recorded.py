"""The status of a run as its coordinator's directory records it, for a run that has ended.

Only reads, and takes no lock, so it may look at the directory of a coordinator that runs; but then
it knows only what is on disk. Peers are as they were last seen.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from atoll.coordinator import past
from atoll.coordinator.history import History
from atoll.coordinator.ledger import Ledger
from atoll.coordinator.module_status import with_valid_losses
from atoll.coordinator.run.keys import KEYS_FILE
from atoll.coordinator.run.spec import RunSpec
from atoll.coordinator.run.spec_problems import SpecError
from atoll.coordinator.run.status import (
    EVENTS,
    HISTORY,
    ModuleStatus,
    RoundSummary,
    RunState,
    RunStatus,
)
from atoll.optim.log.entry import Entry
from atoll.optim.log.module import WHOLE, log_folder
from atoll.optim.log.orders import RunSettings, read_settings
from atoll.optim.log.store import LOG_FILE

FOLLOWER_FILE = "run.json"  # with spec.json beside it, as no other peer has
MAX_ROUNDS = 1_000_000  # read at once; 100,000 are about 60 MB


def keeps_log(folder: Path) -> bool:
    """Return whether a folder is a coordinator's or a follower's: they keep a whole log."""
    owned = (folder / name for name in (KEYS_FILE, FOLLOWER_FILE))
    return (folder / "spec.json").is_file() and any(path.is_file() for path in owned)


class NoRecord(ValueError):
    """The folder is no coordinator's, or nothing in it can be read."""


@dataclass(frozen=True, kw_only=True)
class PastRun:
    """A run as a directory records it."""

    status: RunStatus
    rounds: list[RoundSummary]
    """All of them, oldest first; those of the last stage of a pipeline."""


class Recording:
    """A directory that is read again and again, as for a replay; close it at the end."""

    def __init__(self, state_dir: Path) -> None:
        """Open the records. Raises NoRecord."""
        self._state_dir = state_dir
        self.now = read(state_dir, newest=HISTORY).status
        spec = RunSpec.from_json((state_dir / "spec.json").read_bytes())
        self._stack = ExitStack()
        self._events = self._stack.enter_context(closing(_history(state_dir, WHOLE)))
        self._logs = {name: _past_log(self._stack, state_dir, name) for name in spec.modules}
        self._last = spec.modules[-1]
        self._num_rounds = self._logs[self._last].history.last_round()

    def at(self, position: int) -> RunStatus:
        """Return the status after a round of the last module."""
        return past.status_at(self.now, self._logs, self._events, position)

    def refresh(self) -> RunStatus:
        """Return the newest status: of a run that goes on there may be another."""
        num_rounds = self._logs[self._last].history.last_round()
        if num_rounds != self._num_rounds:  # reading all of it takes a second in a long run
            self.now = read(self._state_dir, newest=HISTORY).status
            self._num_rounds = num_rounds
        return self.now

    def close(self) -> None:
        """Close the files."""
        self._stack.close()


def _past_log(stack: ExitStack, state_dir: Path, name: str) -> past.PastLog:
    history = stack.enter_context(closing(_history(state_dir, name)))
    db = stack.enter_context(_database(state_dir / log_folder(name) / LOG_FILE))
    entries = partial(entries_of, db)
    return past.PastLog(history=history, ledger=Ledger(history, entries), entries=entries)


def read(state_dir: Path, *, module: str = "", newest: int = MAX_ROUNDS) -> PastRun:
    """Read the status and the newest rounds of a run.

    Args:
        state_dir: of its coordinator.
        module: the one whose rounds are read; by default the last stage of a pipeline.
        newest: rounds to read.

    Raises:
        NoRecord: the folder is no coordinator's, or is damaged.
    """
    if not keeps_log(state_dir):
        raise NoRecord(
            f"{state_dir}: expected the state directory of a coordinator, which has {KEYS_FILE} "
            "and spec.json, or the folder of a follower; pass the one that `atoll coordinator` or "
            "`atoll follow` printed at its start"
        )
    try:
        spec = RunSpec.from_json((state_dir / "spec.json").read_bytes())
        _expect_logs(state_dir, spec)
        return _read(state_dir, spec, module or spec.modules[-1], newest)
    except (OSError, SpecError, sqlite3.Error, ValueError) as error:
        raise NoRecord(f"{state_dir}: cannot be read: {error}") from None


def _expect_logs(state_dir: Path, spec: RunSpec) -> None:
    """Raise NoRecord for the folder of a follower of some stages."""
    there = [name for name in spec.modules if (state_dir / log_folder(name) / LOG_FILE).is_file()]
    if 0 < len(there) < len(spec.modules):
        raise NoRecord(
            f"it holds {', '.join(there)} of {len(spec.modules)} stages alone; pass an invite, or "
            "the folder of the coordinator or of a follower of all stages"
        )


def _read(state_dir: Path, spec: RunSpec, module: str, newest: int) -> PastRun:
    if module not in spec.modules:
        raise NoRecord(f"expected a module of {', '.join(spec.modules)}, got {module[:64]!r}")
    heads = {name: _log_end(state_dir, name) for name in spec.modules}
    rounds = _rounds(state_dir, module, newest)
    if module != WHOLE and module == spec.modules[-1]:
        rounds = with_valid_losses(rounds, _rounds(state_dir, spec.modules[0], newest))
    with closing(_history(state_dir, WHOLE)) as history:
        peers, events = history.peers(), history.events(EVENTS)
    with closing(_history(state_dir, spec.modules[-1])) as history:
        tokens = history.tokens_total()
    shown = rounds[-HISTORY:]
    with ExitStack() as stack:
        logs = {name: _past_log(stack, state_dir, name) for name in spec.modules}
        earlier = logs[spec.modules[-1]].ledger.points(shown[0].position) if shown else []
        given = past.contributions(
            {name: log.ledger.at(log.history.last_round()) for name, log in logs.items()}
        )
    if not spec.method().logged and rounds:  # peers of a gossip run report them; no log decides
        heads = {name: replace(head, position=rounds[-1].position) for name, head in heads.items()}
    last = heads[spec.modules[-1]]
    times = [last.started_s or 0.0, *(r.at for r in rounds[-1:]), *(e.at for e in events)]
    standings = [head.standing(spec, name) for name, head in heads.items()]
    status = RunStatus(
        run_name=spec.run.name,
        run_id=last.run_id,
        state=_state(standings),
        epoch=last.epoch,
        position=min(standing.position for standing in standings),
        rounds_total=last.settings.course.rounds(spec.run.rounds),
        min_peers=last.settings.min_peers or spec.round.min_peers,
        chain=last.chain,
        started_at=last.started_s,
        now=max(times),
        tokens_total=tokens,
        loss=next((r.loss for r in reversed(rounds) if r.loss is not None), None),
        valid_loss=next((r.valid_loss for r in reversed(rounds) if r.valid_loss), None),
        peers=[replace(peer, state="gone") for peer in peers],
        contributions=given,
        history=shown,
        earlier=earlier,
        events=events,
        codec=spec.method().codec.spec,
        method=spec.outer.method,
        inner_steps=spec.outer.inner_steps,
        settings=last.settings.numbers,
        params=sum(standing.params for standing in standings),
        modules=standings if len(standings) > 1 else [],
        rows=past.rows_of(last.units, spec.data.num_units),
    )
    return PastRun(status=status, rounds=rounds)


def _rounds(state_dir: Path, module: str, newest: int) -> list[RoundSummary]:
    with closing(_history(state_dir, module)) as history:
        return history.rounds(newest)


def _history(state_dir: Path, module: str) -> History:
    name = f"{module}.history.db" if module else "history.db"
    return History(state_dir / name, reads_only=True)


def _state(standings: list[ModuleStatus]) -> RunState:
    """Return "finished", or "waiting": nobody can tell more of a run from its directory."""
    return "finished" if all(s.state == "finished" for s in standings) else "waiting"


@dataclass(frozen=True, kw_only=True)
class _LogEnd:
    """The end of one log."""

    run_id: str
    epoch: int
    position: int
    chain: str
    started_s: float | None
    settings: RunSettings
    units: bytes
    """The table of units (`atoll.optim.log.units`), as the last entry carries it."""
    params: int

    def standing(self, spec: RunSpec, name: str) -> ModuleStatus:
        rounds = self.settings.course.rounds(spec.run.rounds)
        return ModuleStatus(
            name=name,
            state="finished" if rounds and self.position >= rounds else "waiting",
            epoch=self.epoch,
            position=self.position,
            chain=self.chain,
            params=self.params,
        )


def _log_end(state_dir: Path, module: str) -> _LogEnd:
    with _database(state_dir / log_folder(module) / LOG_FILE) as db:
        meta = {key: bytes(value) for key, value in db.execute("SELECT key, value FROM meta")}
        last = db.execute(
            "SELECT position, epoch, chain, entry FROM entries ORDER BY position DESC LIMIT 1"
        ).fetchone()
        layout = db.execute("SELECT layout FROM snapshots LIMIT 1").fetchone()
    position, epoch, chain, entry = last or (-1, 0, b"", b"")
    shapes = json.loads(layout[0])["shapes"] if layout else []
    started = meta.get("note:started")
    newest = Entry.decode(bytes(entry)) if entry else None
    return _LogEnd(
        run_id=meta["run_id"].hex(),
        epoch=epoch,
        position=position + 1,
        chain=bytes(chain).hex(),
        started_s=float(started) if started else None,
        settings=read_settings(newest.settings if newest else b""),
        units=newest.units if newest else b"",
        params=sum(math.prod(shape) for shape in shapes),
    )


def entries_of(db: sqlite3.Connection, start: int, stop: int) -> list[bytes]:
    """Return the entries of a range of positions that a log on disk has."""
    query = "SELECT entry FROM entries WHERE position >= ? AND position < ? ORDER BY position"
    return [bytes(row[0]) for row in db.execute(query, (start, stop))]


@contextmanager
def _database(path: Path) -> Iterator[sqlite3.Connection]:
    uri = f"{path.absolute().as_uri()}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True, check_same_thread=False)) as db:
        yield db
