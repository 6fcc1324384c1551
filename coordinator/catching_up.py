"""Recovery of the coordinator's replica: entries that it missed and that no peer publishes.

Peers keep the bodies of `round.log_mb` megabytes and all entries without bodies. A coordinator that
was away for longer cannot have them published. It recovers as a joining peer does: it takes the
entries without their bodies, and a snapshot whose root one of them certifies. The updates in
between are missing from its log for good, and it reports that (`RunStatus.gaps`).

How it recovers is not decided here: the run's first DHT node brings a `Recover`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from atoll.coordinator import notices
from atoll.coordinator.run.notice import Report
from atoll.dht.tasks import Tasks
from atoll.optim.log.entry import Elector, Entry
from atoll.optim.log.live_replica import LiveReplica, Nowhere, OnTaken, Recovered, RecoveryError
from atoll.optim.log.mending import Damage
from atoll.optim.log.replica import DISK_ERRORS
from atoll.optim.log.store_errors import StoreError

SETTLING_S = 300.0  # a change that has begun hashes and writes a whole model before it ends
AT_ONCE = 2  # logs that recover, each with bodies in memory; one that takes long holds up no other
TRIES_FOR_DAMAGED = 12  # a minute; then what no peer has kept stays a gap
# All that peers answer for so long is that nobody has what is missing: then the coordinator is
# stuck. A peer that has it may be on its way back until then.
STUCK_S = 300.0
LAG_S = 5.0  # without progress; meanwhile peers prune more, and asking them where they are is cheap

log = logging.getLogger(__name__)

Recover = Callable[[LiveReplica, OnTaken], Awaitable[Recovered | None]]
"""Recovers a replica, and reports each entry that it got."""


@dataclass(frozen=True, kw_only=True)
class Taken:
    """An entry that came by recovery."""

    entry: Entry
    electorate: tuple[Elector, ...]
    """The electors that voted on it."""
    has_body: bool


@dataclass
class Lag:
    """Watches for a replica that stays behind its peers. Times are of any steady clock."""

    position: int = -1
    since_s: float = 0.0

    def is_due(self, position: int, furthest: int, now_s: float) -> bool:
        """Return True if recovery is due; then not again for `LAG_S`.

        Args:
            position: position of the replica's state.
            furthest: highest position that a peer claims; a false claim costs one attempt.
            now_s: the time.
        """
        if position != self.position or furthest <= position:
            self.position, self.since_s = position, now_s
        if now_s - self.since_s < LAG_S:
            return False
        self.since_s = now_s
        return True


class CatchUp:
    """Lets the replica recover when it stays behind."""

    def __init__(
        self,
        replica: LiveReplica,
        recover: Recover,
        *,
        on_taken: Callable[[Sequence[Taken]], None],
        report: Report,
        turns: asyncio.Semaphore,
        lacks_some: bool = False,
    ) -> None:
        """Watch a replica.

        Args:
            replica: the coordinator's.
            recover: brings it up to the peers'.
            on_taken: gets the recovered entries.
            report: logs an event.
            turns: the run's, of `AT_ONCE`, so that its logs do not all hold bodies together.
            lacks_some: old bodies or certificates were dropped as damaged; look for a peer that
                has them.
        """
        self._tries_for_damaged = TRIES_FOR_DAMAGED if lacks_some else 0
        self._replica = replica
        self._recover = recover
        self._on_taken = on_taken
        self._log_event = report
        self._turns = turns
        self._lag = Lag()
        self._tasks = Tasks()
        self._task: asyncio.Task[None] | None = None
        self._failure = ""
        """Why the last attempt failed."""
        self._looked_s = 0.0
        self._stuck_since_s: float | None = None
        """Since when peers answer that nobody has what is missing."""

    def is_stuck(self, now_s: float) -> bool:
        """Return whether peers have long answered that nobody has what is missing here."""
        since_s = self._stuck_since_s
        return since_s is not None and now_s - since_s >= STUCK_S

    def look(self, furthest: int, now_s: float) -> None:
        """Start recovery if it is due; `furthest` is the highest position of a peer."""
        running = self._task is not None and not self._task.done()
        # A replica that diverged no longer updates its state: only its log can fall behind.
        replica = self._replica
        position = replica.position if replica.diverged else replica.state.position
        if furthest <= position:
            self._stuck_since_s = None  # those that come next may have what is missing
        self._take_damaged()
        if self._tries_for_damaged:
            furthest = max(furthest, position + 1)
        if not running and self._lag.is_due(position, furthest, now_s):
            self._tries_for_damaged = max(0, self._tries_for_damaged - 1)
            self._looked_s = now_s
            self._task = self._tasks.spawn(self._in_turn())

    def _take_damaged(self) -> None:
        """Look for the updates that the disk has spoiled since the last look."""
        damaged = self._replica.store.take_damaged()
        if damaged:
            self._log_event("error", notices.of_damage(Damage(bodies=damaged)))
            self._tries_for_damaged = TRIES_FOR_DAMAGED

    async def close(self) -> None:
        """Cancel a recovery under way; the replica completes a change that it has begun."""
        await self._tasks.close(SETTLING_S)

    async def _in_turn(self) -> None:
        async with self._turns:
            await self._run()

    async def _run(self) -> None:
        before, positions = self._replica.state.position, list[int]()
        try:
            if self._tries_for_damaged:
                await self._replica.bridge_gap()
                self._on_taken(())
            recovered = await self._recover(self._replica, positions.append)
            if recovered is not None:
                self._report(recovered, before, await self._note(positions))
            store = self._replica.store
            if self._tries_for_damaged and not (store.gaps() or store.uncertified()):
                self._tries_for_damaged = 0
                self._log_event("info", notices.log_recovered())
                self._on_taken(())
            self._failure, self._stuck_since_s = "", None
        except Nowhere as error:
            if self._stuck_since_s is None:
                self._stuck_since_s = self._looked_s
            self._report_failure(str(error))
        except (RecoveryError, StoreError, *DISK_ERRORS) as error:
            self._stuck_since_s = None
            self._report_failure(str(error))
        except Exception:
            log.exception("catching up failed; retrying")
        finally:
            await self._replica.settled()  # if cancelled, the last entry may still be arriving
            await self._note(positions)

    async def _note(self, positions: list[int]) -> Sequence[Taken]:
        """Pass the recovered entries on, once, even if the rest failed."""
        if not positions:
            return ()
        taken: list[Taken] = await self._replica.compute(self._read, tuple(positions))
        positions.clear()
        self._on_taken(taken)
        return taken

    def _read(self, positions: Sequence[int]) -> list[Taken]:
        taken = []
        for position in positions:
            record = self._replica.store.get(position)
            if record is not None:
                electorate = self._replica.core.electorate_at(position)
                entry = Entry.decode(record.entry)
                taken.append(Taken(entry=entry, electorate=electorate, has_body=record.has_body))
        return taken

    def _report_failure(self, failure: str) -> None:
        """Report each reason once: recovery is retried every `LAG_S`."""
        if failure != self._failure:
            self._log_event("warning", notices.behind(reason=failure))
        self._failure = failure

    def _report(self, recovered: Recovered, before: int, taken: Sequence[Taken]) -> None:
        lost = [each.entry.position + 1 for each in taken if not each.has_body]
        caught_up = notices.caught_up(
            from_round=before,
            to_round=recovered.to_position,
            snapshot=recovered.snapshot_position,
            donors=recovered.donors,
            lost=lost,
        )
        self._log_event("warning" if lost else "info", caught_up)
