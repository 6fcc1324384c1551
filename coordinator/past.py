"""The status of a run as it was after an earlier round, as far as the records tell.

The log has who contributed, the history what the rounds brought and what happened. Nobody recorded
what peers reported in between, such as their speed within a window or the use of their links: these
numbers are 0 in an earlier status, as if they were not known.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from atoll.coordinator.history import History
from atoll.coordinator.ledger import Ledger, LedgerSums, ReadEntries, Tally, read_entry
from atoll.coordinator.module_status import with_peers, with_valid_losses
from atoll.coordinator.rounds import interval_s
from atoll.coordinator.run.status import (
    EVENTS,
    HISTORY,
    MAX_PEERS_SHOWN,
    ModuleStatus,
    PeerShare,
    PeerState,
    PeerStatus,
    RoundSummary,
    RowsStatus,
    RunStatus,
)
from atoll.optim.log.entry import Entry
from atoll.optim.log.orders import read_settings
from atoll.optim.log.units import progress

AWAY_AFTER = 8  # rounds without a peer's work: it is gone, or far too slow


@dataclass(frozen=True, kw_only=True)
class PastLog:
    """The records of one log."""

    history: History
    ledger: Ledger
    entries: ReadEntries


def status_at(
    now: RunStatus, logs: Mapping[str, PastLog], events: History, position: int
) -> RunStatus:
    """Return the status after a round.

    Args:
        now: the newest one; what does not change is taken from it.
        logs: the records of the run's logs by module, in order.
        events: the history with the run's events.
        position: the round, of the last module, as in `RoundSummary.position`.
    """
    (*_, last) = logs
    rounds = logs[last].history.rounds(HISTORY, until=position)
    if last and rounds:
        first = next(iter(logs.values())).history.rounds(HISTORY, until=rounds[-1].position)
        rounds = with_valid_losses(rounds, first)
    if not rounds:
        return before_all(now)
    at_s, position = rounds[-1].at, rounds[-1].position
    stands = {name: position_at(log.history, at_s) for name, log in logs.items() if name != last}
    stands[last] = position
    entry = _entry(logs[last], position)
    settings = read_settings(entry.settings if entry is not None else b"")
    tallies = {name: log.ledger.at(stands[name]) for name, log in logs.items()}
    given = contributions(tallies)
    sums = {(name, t.peer_id): t for name, each in tallies.items() for t in each.peers}
    today = {peer.peer_id: peer for peer in now.peers}
    tempo = _Tempo(rounds, at_s)
    peers = [
        _peer(
            sums[row.module, row.peer_id],
            row,
            stands[row.module],
            tempo if row.module == last else _Tempo([], at_s),
            today.get(row.peer_id),
        )
        for row in given
    ]
    known = {module.name: module for module in now.modules}
    total = settings.course.rounds(now.rounds_total)
    is_over = bool(total) and position >= total and now.state == "finished"
    return replace(
        now,
        state="finished" if is_over else "paused" if settings.is_paused else "training",
        epoch=rounds[-1].epoch,
        position=min(stands.values()),
        rounds_total=total,
        chain=rounds[-1].chain,
        now=at_s,
        tokens_total=tallies[last].tokens,
        tokens_per_s=tempo.speed(rounds[-1].tokens),
        loss=next((r.loss for r in reversed(rounds) if r.loss is not None), None),
        valid_loss=next((r.valid_loss for r in reversed(rounds) if r.valid_loss), None),
        utilisation=0.0,
        peers=peers,
        contributions=given,
        history=rounds,
        earlier=logs[last].ledger.points(rounds[0].position),
        events=sorted(events.events(EVENTS, until_s=at_s), key=lambda event: event.at),
        settings=settings.numbers,
        evicted=list(settings.evicted),
        reducer=settings.reducer or "",
        codec=settings.codec or now.codec,
        orders_waiting=0,
        rows=rows_of(entry.units if entry is not None else None, now.rows.total if now.rows else 0),
        modules=_modules([known[name] for name in logs if name in known], logs, stands, peers),
    )


def contributions(tallies: Mapping[str, LedgerSums]) -> list[PeerShare]:
    """Return what peers gave to each module, in order, as far as a status holds them."""
    found = (row for name, each in tallies.items() for row in each.contributions(name))
    return list(islice(found, MAX_PEERS_SHOWN))


def position_at(history: History, at_s: float) -> int:
    """Return the position after the last round up to a time, 0 before the first."""
    low, high = 0, history.last_round()
    while low < high:
        middle = (low + high + 1) // 2
        found = history.rounds(1, until=middle)
        if found and found[0].at <= at_s:
            low = middle
        else:
            high = middle - 1
    return low


def before_all(now: RunStatus) -> RunStatus:
    """Return a run's status before its first round."""
    return replace(
        now, state="waiting", epoch=0, position=0, chain="", now=now.started_at or now.now,
        tokens_total=0, tokens_per_s=0.0, loss=None, valid_loss=None, utilisation=0.0, peers=[],
        history=[], earlier=[], gaps=[], events=[], settings={}, evicted=[], reducer="",
        orders_waiting=0, modules=[], rows=None,
    )  # fmt: skip


def rows_of(units: bytes | None, total: int) -> RowsStatus | None:
    """Return the progress through a run's rows; None without `data.once`.

    Args:
        units: who holds which, as an entry carries it; None if that is not known.
        total: units of a pass; 0 for a run without.
    """
    if not total or units is None:
        return None
    now = progress(units, total)
    return RowsStatus(number=now.number, done=now.done, held=now.held, total=total)


def _entry(log: PastLog, position: int) -> Entry | None:
    """Return the entry of a round; None if it cannot be read."""
    return next((read_entry(raw) for raw in log.entries(position - 1, position)), None)


def _peer(
    tally: Tally,
    given: PeerShare,
    position: int,
    tempo: _Tempo,
    today: PeerStatus | None,
) -> PeerStatus:
    """A peer as the log knows it: its name and role are those of today."""
    state: PeerState = "training" if position - tally.last < AWAY_AFTER else "gone"
    return PeerStatus(
        peer_id=tally.peer_id,
        name=today.name if today is not None else "",
        module=given.module,
        state=state,
        position=position if state == "training" else tally.last,
        tokens_per_s=tempo.speed(tally.round_tokens) if tally.last == position else 0.0,
        loss=tally.loss,
        wire_bytes_sent=tally.wire_bytes,
        last_seen_s=tempo.since(tally.last),
        device=today.device if today is not None else "",
        rounds_seen=given.rounds + given.missed,
        rounds_counted=tally.rounds,
        tokens_counted=tally.tokens,
    )


class _Tempo:
    """Says how fast rounds came up to a time; it is asked for each of hundreds of peers."""

    def __init__(self, rounds: Sequence[RoundSummary], now_s: float) -> None:
        self._positions = [row.position for row in rounds]
        self._rounds, self._now_s = rounds, now_s
        self._interval_s = interval_s(rounds)

    def speed(self, tokens: int) -> float:
        """Return the tokens of a round per second."""
        return tokens / self._interval_s if self._interval_s else 0.0

    def since(self, position: int) -> float:
        """Return the seconds since a round, or since the first one that is known after it."""
        index = bisect_left(self._positions, position)
        return max(0.0, self._now_s - self._rounds[index].at) if index < len(self._rounds) else 0.0


def _modules(
    modules: Sequence[ModuleStatus],
    logs: Mapping[str, PastLog],
    stands: Mapping[str, int],
    peers: Sequence[PeerStatus],
) -> list[ModuleStatus]:
    """The modules of a pipeline as they were; none of a dense run."""
    if len(modules) < 2:
        return []
    newest = {name: log.history.rounds(1, until=stands[name]) for name, log in logs.items()}
    then = [
        ModuleStatus(
            name=module.name,
            state="training",
            epoch=newest[module.name][-1].epoch if newest[module.name] else 0,
            position=stands[module.name],
            chain=newest[module.name][-1].chain if newest[module.name] else "",
            params=module.params,
        )
        for module in modules
    ]
    return with_peers(then, [peer for peer in peers if peer.state != "gone"])
