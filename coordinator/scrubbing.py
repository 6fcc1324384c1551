"""Scrubbing: the coordinator reads its log again and again, so that it notices a disk that rots.

Peers keep the newest updates alone. One that is found damaged while they have it comes back from
them (`CatchUp`); one that is noticed at the next start, weeks later, is lost.

A run by gossip has no updates. Its coordinator holds one model, in memory as well, and joiners get
the one that is stored: while that is damaged, nobody can join.
"""

from __future__ import annotations

import asyncio

from atoll.coordinator import notices
from atoll.coordinator.first_state import FirstState
from atoll.coordinator.gossip import ModelKeeper
from atoll.coordinator.run.notice import Report
from atoll.dht.tasks import ENDING_S, Tasks
from atoll.optim.log.live_replica import LiveReplica
from atoll.optim.log.mending import Damage, Scrub
from atoll.optim.log.replica import DISK_ERRORS
from atoll.optim.log.store_errors import StoreError

STEP_S = 10.0  # between two steps
STEP_BYTES = 16 << 20  # 140 GB a day, at under 1% of a core
PASS_S = 60.0  # between two passes: a small log need not be read all the time


class Scrubbing:
    """Reads the log of a replica, a step at a time."""

    def __init__(self, replica: LiveReplica, first: FirstState, report: Report) -> None:
        """Scrub a replica's log, which was read at the start; `report` logs an event."""
        self._replica = replica
        self._first = first
        self._log_event = report
        self._scrub = Scrub(replica.store)
        self._due_s: float | None = None
        self._tasks = Tasks()
        self._task: asyncio.Task[None] | None = None

    def look(self, now_s: float) -> None:
        """Begin the next step if it is due. Times are of any steady clock."""
        if self._due_s is None:
            self._due_s = now_s + PASS_S
        if now_s >= self._due_s and (self._task is None or self._task.done()):
            self._task = self._tasks.spawn(self._step(now_s))

    async def close(self) -> None:
        """Wait for the end of the step under way, which reads the store: a thread never stops."""
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=ENDING_S)
        await self._tasks.close()

    async def _step(self, now_s: float) -> None:
        try:
            is_over: bool = await self._replica.compute(self._scrub.step, STEP_BYTES)
        except (StoreError, *DISK_ERRORS) as error:
            self._log_event("error", notices.log_unreadable(reason=str(error)))
            is_over = True
        self._due_s = now_s + (PASS_S if is_over else STEP_S)
        positions, self._scrub.damaged_snapshots = self._scrub.damaged_snapshots, []
        damage = Damage(snapshots=[position for position in positions if position])
        core = self._replica.core
        if isinstance(core, ModelKeeper) and core.head.position in positions:
            await self._store_model(core, damage)
        elif 0 in positions:
            await self._mend_first(damage)
        if damage:
            self._log_event("error", notices.of_damage(damage))

    async def _store_model(self, keeper: ModelKeeper, damage: Damage) -> None:
        try:
            position = await self._replica.change(keeper.store_again, is_move=False)
        except (StoreError, *DISK_ERRORS) as error:
            self._log_event("error", notices.log_unreadable(reason=str(error)))
        else:
            damage.first_state = position == 0

    async def _mend_first(self, damage: Damage) -> None:
        try:
            found = await self._replica.compute(self._first.mend, self._replica.store)
        except Exception as error:  # the organiser's model and files: anything, and the run goes on
            reason = f"its first state is damaged, and cannot be made again: {error}"
            self._log_event("error", notices.log_unreadable(reason=reason))
        else:
            damage.first_state = found.first_state
            damage.snapshots += found.snapshots
