"""Entries that the coordinator missed and that no peer can publish, because none has the bodies.

Peers keep the bodies of `round.log_mb` megabytes and all headers. A coordinator that was away for
longer cannot replay. It does as a joiner does: takes the entries without their bodies, and a
snapshot whose root one of them certifies. The updates in between are lost to its ledger, and it
says so (`RunStatus.gaps`).

How they are fetched is not its business: `FetchMissed` comes from whoever starts the run's first
DHT node. Nothing that it gives is believed (`Follower.install`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass

from atoll.coordinator.follower import DISK_ERRORS, Followed, Follower, FollowerError, Missed
from atoll.coordinator.run.levels import Level
from atoll.optim.log.entry import LogError
from atoll.optim.log.store import StoreError
from atoll.optim.state.outer_state import OuterState

LAG_S = 5.0  # without progress; meanwhile peers prune more, and asking them where they are is cheap

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the peers have of the missing entries."""

    state: OuterState
    """A snapshot with a certified root."""
    missed: Sequence[Missed]
    """From the follower's head on, to the peers'."""
    donors: tuple[str, ...]
    """For people."""


FetchMissed = Callable[[Follower], AbstractAsyncContextManager[Found | None]]
"""Ask the peers; None where they have nothing that is missing, or can publish all of it."""


@dataclass
class Lag:
    """Watches for a follower that stays behind its peers. Times are of any steady clock."""

    position: int = -1
    since_s: float = 0.0

    def is_due(self, position: int, furthest: int, now_s: float) -> bool:
        """Whether to look for what is missing; then not again for `LAG_S`.

        Args:
            position: of the follower's state.
            furthest: the highest position that a peer claims; a false one costs a look.
            now_s: the time.
        """
        if position != self.position or furthest <= position:
            self.position, self.since_s = position, now_s
        if now_s - self.since_s < LAG_S:
            return False
        self.since_s = now_s
        return True


class CatchUp:
    """Brings a follower past a gap."""

    def __init__(
        self,
        follower: Follower,
        fetch: FetchMissed,
        *,
        on_taken: Callable[[Sequence[Followed]], None],
        say: Callable[[Level, str], None],
    ) -> None:
        """`on_taken` is told of the entries that were taken, `say` what people should know."""
        self._follower = follower
        self._fetch = fetch
        self._on_taken = on_taken
        self._say = say
        self._lag = Lag()
        self._task: asyncio.Task[None] | None = None
        self._failure = ""
        """why the last try failed"""
        self.is_installing = False
        """Whether the follower is busy with what was found, for as long as applying it takes."""

    def look(self, furthest: int, now_s: float) -> None:
        """Begin where it is due; `furthest` is the highest position of a peer."""
        running = self._task is not None and not self._task.done()
        if not running and self._lag.is_due(self._follower.state.position, furthest, now_s):
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """End what is under way, but let the store finish what it is given."""
        if self._task is not None:
            if not self.is_installing:
                self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        try:
            async with self._fetch(self._follower) as found:
                if found is not None:
                    self.is_installing = True
                    await self._install(found)
            self._failure = ""
        except (StoreError, *DISK_ERRORS) as error:
            self._tell_failure(str(error))
        except Exception:
            log.exception("catching up failed; it is tried again")
        finally:
            self.is_installing = False

    def _tell_failure(self, failure: str) -> None:
        """Once for each reason: it is tried again each LAG_S."""
        if failure != self._failure:
            self._say("warning", f"catching up failed, it is tried again: {failure}")
        self._failure = failure

    async def _install(self, found: Found) -> None:
        before = self._follower.state.position
        try:
            taken = await asyncio.to_thread(self._follower.install, found.state, found.missed)
        except (LogError, FollowerError, StoreError) as error:
            self._say("warning", f"what {_names(found)} sent of missed rounds is no use: {error}")
            return
        self._on_taken(taken)
        lost = [each.entry.position + 1 for each in taken if not each.has_body]
        self._say(
            "warning" if lost else "info",
            f"caught up from round {before} to {self._follower.head.position} by the "
            f"snapshot after round {found.state.position} and entries of {_names(found)}"
            + (f"; no peer has kept the updates of rounds {lost[0]} to {lost[-1]}" if lost else ""),
        )


def _names(found: Found) -> str:
    return ", ".join(name[-6:] for name in found.donors) or "nobody"
