"""Summaries of a run's rounds, for people: entries of the log, completed by the peers' reports."""

from __future__ import annotations

import itertools
import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from atoll.coordinator.history import History
from atoll.coordinator.ledger import Ledger, LedgerSums, contributors, weighed_tokens
from atoll.coordinator.run.status import (
    HISTORY,
    NAMED_PEERS,
    RoundReport,
    RoundSummary,
    seconds_between,
)
from atoll.optim.log.entry import Entry
from atoll.optim.log.store import LogStore

KEPT_OPEN = 64  # newest rounds that still accept reports
AHEAD = 1024  # positions beyond the log, which may be behind, for which reports are kept
_RECENT = 8  # rounds that the interval is measured over


@dataclass
class OpenRound:
    """A round that still accepts reports."""

    summary: RoundSummary | None = None
    counted: frozenset[str] | None = None
    """PeerIDs whose contribution is in its entry, at least in part; None without a log."""
    traces: dict[str, RoundReport] = field(default_factory=dict)


class RoundHistory:
    """Summaries by position, completed as reports arrive."""

    def __init__(
        self,
        history: History,
        store: LogStore | None = None,
        *,
        num_fragments: int = 1,
        keeps_later: bool = False,
    ) -> None:
        """Bring the history up to the log, which may end before or after it.

        Args:
            history: the records for people.
            store: the log; None without one.
            num_fragments: fragments of the run. A token counts once, although it contributes to
                each of them.
            keeps_later: keep rounds beyond the log: it lost them, and they come again.
        """
        self._history = history
        self._num_fragments = num_fragments
        self._open: dict[int, OpenRound] = {}
        if store is not None and not keeps_later:
            history.forget_rounds(store.head.position)
        self.tokens_total = history.tokens_total()
        self.ledger = Ledger(history, partial(_entries, store))
        self._newest: deque[RoundSummary] = deque(history.rounds(HISTORY), maxlen=HISTORY)
        for record in _records(store, history.last_round()) if store is not None else ():
            entry = Entry.decode(record)
            self.add(entry, time.time(), left_out=[], valid_loss=None, late=True)

    def newest(self) -> list[RoundSummary]:
        """Return the newest summaries, oldest first."""
        return list(self._newest)

    def contributed(self) -> LedgerSums:
        """Return what each peer has contributed until now."""
        return self.ledger.newest(self._newest[-1].position if self._newest else 0)

    def interval_s(self) -> float:
        """Return the median seconds between the last few rounds, 0 if there were none."""
        return interval_s(list(self._newest))

    def add(
        self,
        entry: Entry,
        at_s: float,
        *,
        left_out: Sequence[str],
        valid_loss: float | None,
        late: bool = False,
    ) -> None:
        """Add a decided position; `late` if the run has moved on since.

        A round that the history has already, because the log was lost and comes again, stays as it
        is: with the time and the reports of its members.
        """
        known = self._history.round(entry.position + 1)
        if known is not None and known.chain == entry.chain.hex():
            return
        if known is not None:
            self._history.forget_rounds(entry.position)
            self.ledger.forget(entry.position)
            self.tokens_total = self._history.tokens_total()
            self._newest = deque(self._history.rounds(HISTORY), maxlen=HISTORY)
        counted = contributors(entry)
        summary = RoundSummary(
            epoch=entry.epoch,
            position=entry.position + 1,
            at=at_s,
            late=late,
            loss=entry.loss,
            valid_loss=valid_loss,
            tokens=weighed_tokens(counted) // self._num_fragments,
            members=len(counted),
            left_out=list(left_out),
            chain=entry.chain.hex(),
        )
        self.tokens_total += summary.tokens
        self._newest.append(summary)
        current = self._open.setdefault(entry.position, OpenRound())
        current.summary = summary
        current.counted = frozenset(member.peer_id for member in counted)
        self._close_old(entry.position)
        self._complete(current)

    def trace(self, peer_id: str, trace: RoundReport, at_s: float) -> None:
        """Take one member's report; drop it if its round is long past.

        Args:
            peer_id: the member.
            trace: its report.
            at_s: time of its arrival by the run's clock; not needed with a log.
        """
        newest = self._newest[-1].position if self._newest else 0
        if not newest - KEPT_OPEN <= trace.position < newest + AHEAD:
            return
        current = self._open.setdefault(trace.position, OpenRound())
        if peer_id in current.traces:
            return  # one report a round: each is a write to the disk
        current.traces[peer_id] = trace
        if current.summary is not None:
            self._complete(current)

    def _complete(self, current: OpenRound) -> None:
        summary = current.summary
        if summary is None:
            return
        complete = with_traces(summary, current.traces)
        if current.counted is not None:
            without = [peer for peer in complete.reasons if peer not in current.counted]
            left_out = dict.fromkeys([*complete.left_out, *without])
            complete = replace(complete, left_out=list(left_out))
        current.summary = complete
        for index in range(len(self._newest) - 1, -1, -1):
            if self._newest[index].position == complete.position:
                self._newest[index] = complete
                break
        self._history.put_round(complete)

    def _close_old(self, position: int) -> None:
        for old in [p for p in self._open if p < position - KEPT_OPEN]:
            del self._open[old]
        self.ledger.mark(position - KEPT_OPEN)


def interval_s(rounds: Sequence[RoundSummary]) -> float:
    """Return the median seconds between the last few rounds, 0 if there were none."""
    pairs = itertools.pairwise(rounds[-_RECENT:])
    found = [s for a, b in pairs if (s := seconds_between(a, b)) is not None]
    return statistics.median(found or [0.0])


def with_traces(summary: RoundSummary, traces: Mapping[str, RoundReport]) -> RoundSummary:
    """Return the summary with the reports of its epoch: mean phase times, bytes and reasons."""
    reports = {peer: t for peer, t in traces.items() if t.epoch == summary.epoch}
    ours = list(reports.values())
    absent = [peer for peer, t in reports.items() if not t.included and peer in t.reasons]
    most = sorted(((p, t.wire_bytes_sent) for p, t in reports.items()), key=lambda s: (-s[1], s[0]))
    # Sums of what peers claim may overflow; a summary holds finite values of 63 bits.
    return replace(
        summary,
        rejected=min(math.hypot(*(t.rejected for t in ours)), sys.float_info.max),
        left_out=list(dict.fromkeys([*summary.left_out, *absent]))[
            : max(len(summary.left_out), NAMED_PEERS)
        ],
        reasons=_reasons(ours),
        seconds=_mean_phases([t.seconds for t in ours if t.included] or [t.seconds for t in ours]),
        wire_bytes=min(sum(t.wire_bytes_sent for t in ours), 2**63 - 1),
        peer_bytes=dict(most[:NAMED_PEERS]),
    )


def _reasons(traces: Sequence[RoundReport]) -> dict[str, str]:
    """The first reason that any member gives for each peer."""
    reasons: dict[str, str] = {}
    for trace in traces:
        for peer, why in trace.reasons.items():
            reasons.setdefault(peer, why)
    return dict(list(reasons.items())[:NAMED_PEERS])


def _mean_phases(seconds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    # Names are the peers' own; a summary holds 32.
    names = list(dict.fromkeys(name for each in seconds for name in each))[:32]
    return {name: sum(s.get(name, 0.0) for s in seconds) / len(seconds) for name in names}


def _entries(store: LogStore | None, start: int, stop: int) -> list[bytes]:
    if store is None:
        return []
    return [record.entry for record in store.headers(start, stop - start)]


def _records(store: LogStore, start: int) -> Iterable[bytes]:
    while records := store.headers(start, 256):
        yield from (record.entry for record in records)
        start = records[-1].position + 1
