"""What each peer has contributed up to a round, from the log and the summaries of its rounds.

Counting from the first entry takes minutes in a long run. So a mark is kept at every `MARK_EVERY`
rounds, with the sums up to there, and any round is reached from the mark before it. A round is
counted into a mark once its members' reports are complete, which tell the bytes.

    LedgerSums    the sums, by PeerID
    Ledger        counts rounds, and writes the marks
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from pydantic import ConfigDict, Field

from atoll.coordinator.history import LAST, History
from atoll.coordinator.run.status import (
    MAX_PEERS_SHOWN,
    POINTS,
    Count,
    LossPoint,
    Name,
    PeerShare,
    RoundSummary,
    StatusError,
    StatusRecord,
)
from atoll.optim.log.entry import Entry, MalformedRecord, Member

MARK_EVERY = 32  # rounds: counted in some 30 ms with 200 members; a mark of these takes 25 kB
MAX_POINTS = 4096  # of the curve in memory: marks of 130,000 rounds; of more, every other one

ReadEntries = Callable[[int, int], Iterable[bytes]]
"""Returns the entries of a range of positions that there are; none in a run by gossip."""


@dataclass(frozen=True, kw_only=True)
class Tally(StatusRecord):
    """What one peer has contributed."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    peer_id: Name
    before: Count = 0
    """Rounds with an update before the first one that took its work."""
    last: Count = 0
    """The last one that took its work, as in `RoundSummary.position`; 0 before the first."""
    rounds: Count = 0
    """Rounds that took its work, at least in part."""
    tokens: Count = 0
    wire_bytes: Count = 0
    """Sent, in the rounds of which it reported."""
    round_tokens: Count = 0
    """In its last round."""
    loss: float | None = None
    """Of its last window, in nats per token."""


@dataclass(frozen=True, kw_only=True)
class LedgerSums(StatusRecord):
    """The sums up to a position."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    _max_bytes = 2 << 20

    position: Count = 0
    tokens: Count = 0
    rounds: Count = 0
    """Those with an update; in the others no work was to be had."""
    peers: Annotated[list[Tally], Field(max_length=MAX_PEERS_SHOWN)] = field(default_factory=list)

    def after(
        self, rounds: Sequence[RoundSummary], entries: Iterable[Entry], until: int
    ) -> LedgerSums:
        """Return the sums at `until`, after these rounds and their entries."""
        sums = _Sums(self)
        summaries = {row.position: row for row in rounds}
        logged = set()
        for entry in entries:
            logged.add(entry.position + 1)
            sums.add_entry(entry, summaries.get(entry.position + 1))
        for row in rounds:
            if row.position not in logged:  # by gossip: the peers that reported the round
                sums.add_reported(row)
            sums.add_bytes(row)
        return sums.at(until)

    def contributions(self, module: str) -> list[PeerShare]:
        """Return the sums as a status shows them."""
        return [
            PeerShare(
                peer_id=peer.peer_id,
                module=module,
                tokens=peer.tokens,
                rounds=peer.rounds,
                missed=max(0, self.rounds - peer.before - peer.rounds) if peer.rounds else 0,
            )
            for peer in self.peers
        ]


class _Sums:
    """The sums while rounds are added."""

    def __init__(self, start: LedgerSums) -> None:
        self._tokens, self._rounds = start.tokens, start.rounds
        self._peers = {peer.peer_id: peer for peer in start.peers}

    def add_entry(self, entry: Entry, summary: RoundSummary | None) -> None:
        """Add what an entry took; `summary` is its round's."""
        counted = contributors(entry)
        if not counted:
            return
        offered = weighed_tokens(counted)
        # A token of a fragment's round counts once, although each fragment takes it. Rounds of
        # earlier versions count those of weight 0 as well.
        told = min(summary.tokens, offered) if summary is not None else offered
        for member in counted:
            if not member.weight:  # a peer's first window moves nothing
                continue
            tokens = member.tokens * told // offered if offered else 0
            self._take(member.peer_id, entry.position + 1, tokens=tokens, loss=member.loss)
        self._tokens += told
        self._rounds += 1

    def add_reported(self, row: RoundSummary) -> None:
        """Add a round without an entry."""
        for peer_id in row.peer_bytes:
            self._take(peer_id, row.position)
        self._tokens += row.tokens
        self._rounds += bool(row.peer_bytes)

    def add_bytes(self, row: RoundSummary) -> None:
        """Add the bytes that peers reported to have sent in a round."""
        for peer_id, wire_bytes in row.peer_bytes.items():
            before = self._peers.get(peer_id) or Tally(peer_id=peer_id)
            total = min(before.wire_bytes + wire_bytes, LAST)
            self._peers[peer_id] = replace(before, wire_bytes=total)

    def at(self, position: int) -> LedgerSums:
        """Return the sums; of very many peers, those whose work counted last."""
        kept = sorted(self._peers.values(), key=lambda peer: -peer.last)[:MAX_PEERS_SHOWN]
        return LedgerSums(
            position=position,
            tokens=self._tokens,
            rounds=self._rounds,
            peers=sorted(kept, key=lambda peer: peer.peer_id),
        )

    def _take(
        self, peer_id: str, position: int, *, tokens: int = 0, loss: float | None = None
    ) -> None:
        before = self._peers.get(peer_id) or Tally(peer_id=peer_id)
        self._peers[peer_id] = Tally(
            peer_id=peer_id,
            before=before.before if before.rounds else self._rounds,
            last=position,
            rounds=before.rounds + 1,
            tokens=before.tokens + tokens,
            wire_bytes=before.wire_bytes,
            round_tokens=tokens,
            loss=before.loss if loss is None else loss,
        )


def contributors(entry: Entry) -> list[Member]:
    """Return the members with at least one chunk of their contribution in the entry.

    The others offer the same tokens again, so nothing of theirs counts now.
    """
    empty = Counter(p.member for part in entry.parts for p in part.partial if not p.cells)
    return [m for i, m in enumerate(entry.members) if empty[i] < len(entry.parts)]


def weighed_tokens(counted: Iterable[Member]) -> int:
    """Return the tokens that moved the model: a peer's first window has weight 0."""
    return sum(member.tokens for member in counted if member.weight)


class Ledger:
    """Counts the rounds of one log."""

    def __init__(self, history: History, entries: ReadEntries) -> None:
        """Continue from the marks in the history; reads entries again to count after them."""
        self._history = history
        self.entries = entries
        self._last = self._mark(LAST)
        self._newest = self._last
        self._recent = self._last
        """what `at` returned last: a replay asks for the next round each time"""
        self._points = history.points()

    def at(self, position: int) -> LedgerSums:
        """Return the sums at a position."""
        start = self._recent
        nearest = min(position - position % MARK_EVERY, self._last.position)  # mark there may be
        if not nearest <= start.position <= position:
            start = self._last if self._last.position <= position else self._mark(position)
        while start.position < position:  # in steps, as an unmarked history may be long
            start = self._counted(start, min(position, start.position + MARK_EVERY))
        self._recent = start
        return start

    def newest(self, position: int) -> LedgerSums:
        """Return the sums at the newest position, but for bytes that are yet to be reported."""
        if self._newest.position > position or self._newest.position < self._last.position:
            self._newest = self._last
        while self._newest.position < position:
            until = min(position, self._newest.position + MARK_EVERY)
            self._newest = self._counted(self._newest, until)
        return self._newest

    def points(self, before: int) -> list[LossPoint]:
        """Return at most `POINTS` of the curve's points before a position, oldest first."""
        found = [point for point in self._points if point.position < before]
        return found[:: -max(1, -(-len(found) // POINTS))][::-1]

    def mark(self, closed: int) -> None:
        """Write the marks up to `closed`, a position up to which no report is expected any more."""
        while self._last.position + MARK_EVERY <= closed:
            until = self._last.position + MARK_EVERY
            rounds = self._rounds(self._last.position, until)
            self._last = self._last.after(rounds, self._read(self._last.position, until), until)
            self._recent = self._last  # reports may have come since others were counted
            if rounds:
                point = point_of(rounds, self._last.tokens)
                self._history.put_mark(point, self._last.to_json())
                self._points.append(point)
                if len(self._points) > MAX_POINTS:
                    self._points = self._points[::2]

    def forget(self, after: int) -> None:
        """Forget the marks beyond a position, which the history has forgotten too."""
        if self._last.position > after:
            self._last = self._mark(after)
        self._recent = self._last
        if self._newest.position > after:
            self._newest = self._last
        if self._points and self._points[-1].position > after:
            self._points = [point for point in self._points if point.position <= after]

    def _mark(self, position: int) -> LedgerSums:
        raw = self._history.tallies(position)
        try:
            return LedgerSums.from_json(raw) if raw is not None else LedgerSums()
        except StatusError:  # damaged: count from the start
            return LedgerSums()

    def _counted(self, start: LedgerSums, until: int) -> LedgerSums:
        rounds = self._rounds(start.position, until)
        return start.after(rounds, self._read(start.position, until), until)

    def _rounds(self, start: int, until: int) -> list[RoundSummary]:
        found = self._history.rounds(until - start, until=until)
        return [row for row in found if row.position > start]

    def _read(self, start: int, stop: int) -> Iterable[Entry]:
        for raw in self.entries(start, stop):
            if entry := read_entry(raw):
                yield entry


@functools.lru_cache(maxsize=2)  # of a replay's step: it asks for each of two entries again
def read_entry(raw: bytes) -> Entry | None:
    """Parse an entry; None if it is damaged on the disk, which the log mends."""
    try:
        return Entry.decode(raw)
    except MalformedRecord:
        return None


def point_of(rounds: Sequence[RoundSummary], tokens: int) -> LossPoint:
    """Return consecutive rounds as one point; `tokens` are those of all rounds up to there."""
    losses = [row.loss for row in rounds if row.loss is not None]
    return LossPoint(
        position=rounds[-1].position,
        at=rounds[-1].at,
        tokens=tokens,
        loss=sum(losses) / len(losses) if losses else None,
        valid_loss=next((r.valid_loss for r in reversed(rounds) if r.valid_loss is not None), None),
    )
