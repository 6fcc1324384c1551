"""Following a run: all of its log, its newest state and its checkpoints, without training.

A follower is a peer that trains nothing and votes for nothing. Unlike other peers it prunes
nothing, and what it missed before it joined it fetches, updates included. Joiners find it in the
roster and take entries and snapshots from it as from any peer.

Its folder is a peer's, with what a coordinator keeps beside its keys:

    run.json, identity.key, lock, ...    see `PeerPaths`
    spec.json, tokenizer.z, genesis.root, log/, history.db, checkpoints/
                                         as in a coordinator's (`atoll.coordinator.service.server`)

So `atoll status`, `dashboard`, `report` and `export --round` read it, and
`atoll coordinator --restore` makes a coordinator's directory of it.

Exceptions:

    ValueError
      CannotFollow     the run has no single log
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from atoll.coordinator.catching_up import Lag
from atoll.coordinator.checkpointing import Checkpointing
from atoll.coordinator.history import EventLog, History
from atoll.coordinator.rounds import RoundHistory
from atoll.coordinator.rpc.client import Joined
from atoll.coordinator.rpc.client_errors import CoordinatorError, Evicted
from atoll.coordinator.run.files import replace_private
from atoll.coordinator.run.levels import Level
from atoll.coordinator.run.notice import Notice
from atoll.coordinator.run.spec import RunSpec
from atoll.coordinator.run.tokenizer_file import pack
from atoll.coordinator.service.server import TOKENIZER_FILE, LogFiles
from atoll.optim.log.entry import Entry
from atoll.optim.log.replica import DISK_ERRORS
from atoll.optim.log.store import PAGE, LogStore
from atoll.optim.state.outer_state import StateError
from atoll.peer import notices
from atoll.peer.daemon.log_run import LogRun
from atoll.peer.daemon.peer import Environment
from atoll.peer.rounds.engine import Settled

FIRST_STATE_PAUSE_S = 5.0  # between two requests for the first state


class CannotFollow(ValueError):
    """The run has no single log to follow."""


def expect_followable(spec: RunSpec) -> None:
    """Check that a run can be followed. Raises CannotFollow."""
    if spec.method().reduction == "pairs":
        raise CannotFollow(
            f"run {spec.run.name} has no log (its peers gossip), so there is nothing to follow; "
            "the coordinator keeps its newest model"
        )
    if len(spec.modules) > 1:
        raise CannotFollow(
            f"run {spec.run.name} is a pipeline of {len(spec.modules)} stages with a log each, "
            "which `atoll follow` cannot keep; set coordinator.copies for copies of them"
        )


class Records:
    """The rounds and events of a followed run, for people."""

    def __init__(self, files: LogFiles, store: LogStore, num_fragments: int) -> None:
        """Bring the history up to the log; blocks while it reads what is new."""
        self._store = store
        self._history = History(files.file("history.db"))
        self._events = EventLog(self._history, time.time)
        self._rounds = RoundHistory(self._history, store, num_fragments=num_fragments)
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

    def report(self, level: Level, source: str, notice: Notice) -> None:
        """Keep an event."""
        self._events.add(level, source, notice)

    def close(self) -> None:
        """Close the file; idempotent."""
        self._history.close()


class FollowRun(LogRun):
    """A follower's part in a run with a log; a `RunKind`."""

    follows = True

    def __init__(
        self, env: Environment, joined: Joined | None, checkpoint_every: int | None = None
    ) -> None:
        """Build everything; `start` also gives it a state.

        `checkpoint_every` is in rounds; None: as often as the coordinator, 0: at the end alone.
        """
        super().__init__(env, joined)
        self._files = files = LogFiles(env.paths.root, env.run_id, env.module)
        self._records: Records | None = None
        self._noting = asyncio.Lock()
        self._lag = Lag()
        self._checkpoints = Checkpointing(
            _with_checkpoints(env.spec, checkpoint_every),
            {env.module: self.replica},
            {env.module: files.checkpoints},
            self._show,
        )

    @classmethod
    async def start_keeping(
        cls, env: Environment, joined: Joined | None, checkpoint_every: int | None
    ) -> FollowRun:
        """Return a run that holds a verified state, keeps records, and answers the others."""
        run = cls(env, joined, checkpoint_every)
        await run._enter(joined)
        await run._begin_records()
        return run

    async def _begin_records(self) -> None:
        """Write what a coordinator's directory has beside the log, and keep it up from now on."""
        env, files = self._env, self._files
        replace_private(env.paths.root / "spec.json", env.spec.canonical())
        root = env.enrolment.membership.genesis_root
        replace_private(files.file("genesis.root"), root.hex().encode())
        store, num_fragments = self.replica.store, len(self._replay.fragments)
        records: Records = await env.compute(Records, files, store, num_fragments)
        env.files.callback(records.close)
        self._records = records
        await self._note(self.replica.position)
        await self._keep_beside()

    async def _keep_beside(self) -> None:
        """Keep what only the coordinator has, if it is there."""
        env, store = self._env, self.replica.store
        with suppress(CoordinatorError, *DISK_ERRORS):
            if store.note("started") is None:
                started = (await env.client.status()).started_at
                if started is not None:
                    store.put_note("started", repr(started).encode())
            path, data = env.paths.root / TOKENIZER_FILE, env.spec.data
            if data.tokenizer_sha256 is None or data.tokenizer_bytes is None or path.exists():
                return
            raw = await env.client.fetch_tokenizer(
                sha256=data.tokenizer_sha256, size=data.tokenizer_bytes
            )
            replace_private(path, await env.compute(pack, raw))

    @property
    def is_complete(self) -> bool:
        """Return whether all rounds of the run are here, with the state after them."""
        rounds = self.progress.ahead().rounds(self._env.spec.run.rounds)
        return bool(rounds) and self.replica.is_current and self.position >= rounds

    def keep_event(self, level: Level, notice: Notice) -> None:
        """Keep an event with the run's records."""
        if self._records is not None:
            self._records.report(level, self._env.me.peer_id, notice)

    def look(self) -> None:
        """Look for what no peer has sent here: the log has moved on, or lacks old updates."""
        super().look()
        replica = self.replica
        seen = [
            record for peer, record in self.ctx.seen.items() if not self.ctx.conduct.is_out(peer)
        ]
        furthest = max((r.position for r in seen if r.epoch == replica.epoch), default=0)
        is_behind = any(r.epoch > replica.epoch for r in seen) or not replica.is_current
        if is_behind or replica.store.first_with_bodies() > 0:
            furthest = max(furthest, replica.position + 1)
        if self._lag.is_due(replica.position, furthest, self.ctx.now()):
            self.rounds.kick_catch_up()

    async def leave(self) -> None:
        """Close the rounds, complete the log, and write the last checkpoint."""
        await super().leave()
        await self._note(None)
        await self._checkpoints.close()

    # the first state

    async def _settle(self, joined: Joined | None) -> None:
        await self._keep_first_state()
        await super()._settle(joined)

    async def _keep_first_state(self) -> None:
        """Fetch the first state, from which the whole log leads to every other."""
        store = self.replica.store
        while not store.snapshot_positions():
            try:
                first = await self._genesis()
            except Evicted:
                raise
            except (CoordinatorError, StateError) as error:
                self._catching_up.report_waiting(notices.no_first_state(reason=str(error)))
                await asyncio.sleep(FIRST_STATE_PAUSE_S)
            else:
                await self._env.compute(store.save_snapshot, first, store.genesis_chain)

    # in the loop

    def _on_settled(self, settled: Settled) -> None:
        super()._on_settled(settled)
        self._checkpoints.look(last=self.is_complete)
        self._env.tasks.spawn(self._note, None)

    def _on_recovered(self) -> None:
        super()._on_recovered()
        self._checkpoints.look(last=self.is_complete)
        self._env.tasks.spawn(self._note, None)

    def _on_leap(self) -> None:
        super()._on_leap()
        opened = self.replica.opened
        self._env.tasks.spawn(self._note, 0 if opened is None else opened.base_position)

    async def _note(self, start: int | None) -> None:
        """Bring the records up to the log, from where an epoch began if it may have voided some."""
        async with self._noting:
            if self._records is not None:
                await self._env.compute(self._records.note, start)

    def _show(self, level: Level, notice: Notice) -> None:
        self._env.company.show(level, notice)


def _with_checkpoints(spec: RunSpec, every: int | None) -> RunSpec:
    if every is None:
        return spec
    told = spec.model_dump(mode="json")
    told["coordinator"]["checkpoint_every"] = every
    return RunSpec.from_dict(told)
