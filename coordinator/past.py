"""The status of a run as it was after an earlier round, as far as the records tell.

The log has who contributed, the history what the rounds brought and what happened. Nobody recorded
what peers reported in between, such as their speed within a window or the use of their links: these
numbers are 0 in an earlier status, as if they were not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from atoll.coordinator.history import History
from atoll.coordinator.ledger import Ledger, LedgerSums, ReadEntries, Tally
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
from atoll.optim.log.entry import Entry, MalformedRecord
from atoll.optim.log.orders import RunSettings, read_settings
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
    settings = _settings(logs[last], position)
    tallies = {name: log.ledger.at(stands[name]) for name, log in logs.items()}
    given = contributions(tallies)
    sums = {(name, t.peer_id): t for name, each in tallies.items() for t in each.peers}
    today = {peer.peer_id: peer for peer in now.peers}
    peers = [
        _peer(
            sums[row.module, row.peer_id],
            row,
            stands[row.module],
            rounds if row.module == last else [],
            at_s,
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
        tokens_per_s=_speed(rounds[-1].tokens, rounds),
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
        rows=rows_of(_units(logs[last], position), now.rows.total if now.rows else 0),
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


def _units(log: PastLog, position: int) -> bytes | None:
    """Return the table of units after a round; None if its entry cannot be read."""
    for raw in log.entries(position - 1, position):
        try:
            return Entry.decode(raw).units
        except MalformedRecord:
            break
    return None


def _settings(log: PastLog, position: int) -> RunSettings:
    """What the orders up to a round had changed."""
    for raw in log.entries(position - 1, position):
        try:
            return read_settings(Entry.decode(raw).settings)
        except MalformedRecord:
            break
    return read_settings(b"")


def _peer(
    tally: Tally,
    given: PeerShare,
    position: int,
    rounds: Sequence[RoundSummary],
    at_s: float,
    today: PeerStatus | None,
) -> PeerStatus:
    """A peer as the log knows it: its name and role are those of today."""
    state: PeerState = "training" if position - tally.last < AWAY_AFTER else "gone"
    seen_s = next((row.at for row in rounds if row.position >= tally.last), at_s)
    return PeerStatus(
        peer_id=tally.peer_id,
        name=today.name if today is not None else "",
        module=given.module,
        state=state,
        position=position if state == "training" else tally.last,
        tokens_per_s=_speed(tally.round_tokens, rounds) if tally.last == position else 0.0,
        loss=tally.loss,
        wire_bytes_sent=tally.wire_bytes,
        last_seen_s=max(0.0, at_s - seen_s),
        device=today.device if today is not None else "",
        rounds_seen=given.rounds + given.missed,
        rounds_counted=tally.rounds,
        tokens_counted=tally.tokens,
    )


def _speed(tokens: int, rounds: Sequence[RoundSummary]) -> float:
    seconds = interval_s(rounds)
    return tokens / seconds if seconds else 0.0


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
