"""Following one log of a run: all of it, its newest state, and its records, without training.

A follower is a peer that trains nothing and votes for nothing. Unlike other peers it prunes
nothing, and what it missed before it joined it fetches, updates included. Joiners find it in the
roster and take entries and snapshots from it as from any peer.

What it keeps lies in a `FollowerFolder`. So `atoll status`, `dashboard`, `report` and `export
--round` read that, and `atoll coordinator --restore` makes a coordinator's directory of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from atoll.coordinator.catching_up import Lag
from atoll.coordinator.first_state import ROOT_FILE
from atoll.coordinator.history import History
from atoll.coordinator.rpc.client import Joined
from atoll.coordinator.rpc.client_errors import CoordinatorError, Evicted
from atoll.coordinator.run.files import replace_private
from atoll.coordinator.run.tokenizer_file import pack
from atoll.coordinator.service.server import TOKENIZER_FILE
from atoll.optim.log.replica import DISK_ERRORS
from atoll.optim.state import vectors
from atoll.optim.state.outer_state import StateError
from atoll.peer import notices
from atoll.peer.daemon.follow_folder import FollowerFolder, Records
from atoll.peer.daemon.log_run import LogRun
from atoll.peer.daemon.peer import Environment
from atoll.peer.rounds.engine import Settled

FIRST_STATE_PAUSE_S = 5.0  # between two requests for the first state


class FollowRun(LogRun):
    """A follower's part in a run with a log; a `RunKind`."""

    follows = True

    def __init__(
        self,
        env: Environment,
        joined: Joined | None,
        folder: FollowerFolder,
        on_moved: Callable[[], None],
    ) -> None:
        """Build everything; `start_keeping` also gives it a state.

        `on_moved` is called in the loop when the log has moved on.
        """
        super().__init__(env, joined)
        self._folder = folder
        self._on_moved = on_moved
        self._records: Records | None = None
        self._noting = asyncio.Lock()
        self._lag = Lag()

    @classmethod
    async def start_keeping(
        cls,
        env: Environment,
        joined: Joined | None,
        folder: FollowerFolder,
        on_moved: Callable[[], None],
    ) -> FollowRun:
        """Return a run that holds a verified state, keeps records, and answers the others."""
        run = cls(env, joined, folder, on_moved)
        await run._enter(joined)
        # What fetching the first state left; a ledger needs no vector again.
        vectors.release()
        await env.compute(vectors.trim, run.replica.layout.numel)
        await run._begin_records()
        return run

    async def _begin_records(self) -> None:
        """Write what a coordinator's directory has beside the log, and keep it up from now on."""
        env, folder = self._env, self._folder
        replace_private(folder.root / "spec.json", env.spec.canonical())
        root = env.enrolment.membership.genesis_root
        replace_private(folder.files(env.module).file(ROOT_FILE), root.hex().encode())
        history: History = await env.compute(folder.history, env.module)
        await env.compute(folder.begin_events)
        store, num_fragments = self.replica.store, len(self._replay.fragments)
        self._records = await env.compute(Records, history, store, num_fragments)
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
            path, data = self._folder.root / TOKENIZER_FILE, env.spec.data
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
        """Close the rounds, and complete the log and its records."""
        await super().leave()
        await self._note(None)

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
        # Others drop parts of decided rounds as they vote or reduce, which a follower never does.
        self.ctx.parts.decided_up_to(self.replica.position)
        self._on_moved()
        self._env.tasks.spawn(self._note, None)

    def _on_recovered(self) -> None:
        super()._on_recovered()
        self._on_moved()
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
