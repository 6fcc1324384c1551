"""The coordinator's part in a gossip run, which has no log: it opens the run and keeps a model.

    ModelKeeper       holds the model of one peer instead of the state at the end of a log
    KeptModels        fetches it at regular intervals, and at the end of the run
    ReportedRounds    summaries of rounds from the peers' reports

No quorum certifies a model: the coordinator trusts the peer that sends it, which it admitted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from atoll.coordinator import notices
from atoll.coordinator.history import History
from atoll.coordinator.rounds import KEPT_OPEN, OpenRound, RoundHistory
from atoll.coordinator.run.notice import Report
from atoll.coordinator.run.status import HISTORY, RoundReport, RoundSummary
from atoll.dht.tasks import Tasks
from atoll.optim.log.claims import Claim
from atoll.optim.log.entry import Certificate, Entry
from atoll.optim.log.live_replica import LiveReplica
from atoll.optim.log.replica import Replica
from atoll.optim.log.standing import NotNext
from atoll.optim.log.store import StoreHead
from atoll.optim.state.outer_state import OuterState

RETRY_S = 5.0  # between two attempts to fetch a model

log = logging.getLogger(__name__)


class ModelKeeper(Replica):
    """Holds the first state, or the newest model from a peer."""

    def resume(self) -> bool:
        """Hold the newest stored model."""
        self._resume_epoch()
        state = self._newest_snapshot()
        if state is not None:
            self._stand_at(state)
        return state is not None

    def check(self, entry: Entry, certificate: Certificate) -> Claim:
        """Refuse every entry. Raises NotNext."""
        raise NotNext("a run by gossip has no entries")

    def keep(self, state: OuterState) -> None:
        """Replace the current model by a peer's."""
        self.store.save_snapshot(state, state.root())
        self._stand_at(state)

    def store_again(self) -> int:
        """Store the current model, whose file the disk has spoiled; return its round; blocks."""
        self.store.save_snapshot(self.state, self.state.root())
        return self.state.position

    def _stand_at(self, state: OuterState) -> None:
        # Nothing is chained: the root stands in for the chain, so that an epoch names the model.
        head = StoreHead(epoch=self.epoch, position=state.position, chain=state.root())
        self.standing = replace(self.standing, head=head, state=state)


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model of one peer."""

    state: OuterState
    peer_id: str


FetchModel = Callable[[int], Awaitable[Model | None]]
"""Asks the peers for a model of at least this round; None if no peer sends one."""


class KeptModels:
    """Keeps the model of a `ModelKeeper` up to date."""

    def __init__(
        self,
        replica: LiveReplica,
        fetch: FetchModel,
        *,
        every: int,
        last: int,
        on_kept: Callable[[], None],
        report: Report,
    ) -> None:
        """Fetch a model every `every` rounds (0: only at the end), and one of round `last`."""
        self._replica = replica
        self._fetch = fetch
        self._every = every
        self._last = last
        self._on_kept = on_kept
        self._report = report
        self._tasks = Tasks()
        self._task: asyncio.Task[None] | None = None
        self._not_before_s = 0.0

    def look(self, position: int, now_s: float) -> None:
        """Start fetching if a model is due; `position` is that of the run."""
        due = due_round(position, self._replica.head.position, every=self._every, last=self._last)
        running = self._task is not None and not self._task.done()
        if due is not None and not running and now_s >= self._not_before_s:
            self._not_before_s = now_s + RETRY_S
            self._task = self._tasks.spawn(self._run(due))

    async def close(self) -> None:
        """Cancel a fetch under way."""
        await self._tasks.close()

    async def _run(self, due: int) -> None:
        try:
            model = await self._fetch(due)
            keeper = self._replica.core
            if model is None or not isinstance(keeper, ModelKeeper):
                return
            await self._replica.change(partial(keeper.keep, model.state))
        except Exception:
            log.exception("could not keep a model; retrying")
            return
        stored = notices.model_stored(peer=model.peer_id, round=model.state.position)
        self._report("info", stored)
        self._on_kept()


def due_round(position: int, kept: int, *, every: int, last: int) -> int | None:
    """Return the earliest round of which a model is due; None if none is.

    Args:
        position: position of the run.
        kept: round of the current model.
        every: rounds between two models; 0: only at the end.
        last: last round of the run; 0: no end.
    """
    if last and position >= last:
        return last if kept < last else None
    due = position // every * every if every else 0
    return due if due > kept else None


class ReportedRounds(RoundHistory):
    """Summaries from the members' reports, which arrive over several rounds."""

    def __init__(self, history: History, valid_loss: Callable[[], float | None]) -> None:
        """`valid_loss` returns the mean of the peers' last measurements."""
        super().__init__(history)
        self._valid_loss = valid_loss

    def trace(self, peer_id: str, trace: RoundReport, at_s: float) -> None:
        """Take one peer's report on a round."""
        newest = self._newest[-1].position if self._newest else 0
        if not newest - KEPT_OPEN <= trace.position < newest + KEPT_OPEN:
            return
        known = any(row.position == trace.position + 1 for row in self._newest)
        if known and trace.position not in self._open:
            return  # reported before this process began
        current = self._open.setdefault(trace.position, OpenRound())
        current.traces[peer_id] = trace
        before = current.summary
        summary = _summary(list(current.traces.values()), before, at_s, self._valid_loss())
        self.tokens_total += summary.tokens - (before.tokens if before else 0)
        current.summary = summary
        if before is None:
            self._insert(summary)
        self._close_old(newest)
        self._complete(current)

    def _insert(self, summary: RoundSummary) -> None:
        rows = [row for row in self._newest if row.position != summary.position]
        rows = sorted([*rows, summary], key=lambda row: row.position)
        self._newest = deque(rows, maxlen=HISTORY)


def _summary(
    traces: Sequence[RoundReport],
    before: RoundSummary | None,
    at_s: float,
    valid_loss: float | None,
) -> RoundSummary:
    losses = [(t.loss, max(1, t.tokens)) for t in traces if t.loss is not None]
    tokens = sum(tokens for _, tokens in losses)
    return RoundSummary(
        position=traces[0].position + 1,
        at=before.at if before is not None else at_s,
        loss=sum(loss * count for loss, count in losses) / tokens if losses else None,
        valid_loss=valid_loss,
        tokens=sum(t.tokens for t in traces),
        members=sum(t.included for t in traces),
    )
