"""Who is in touch with the coordinator, and what people are told of their coming and going."""

from __future__ import annotations

import asyncio

from atoll.coordinator.history import History
from atoll.coordinator.journal import Journal
from atoll.coordinator.members import Member, Members
from atoll.coordinator.run.status import PeerStatus

LONG_AGO_S = 60.0  # whoever the history knows is silent until it reports
SAVE_EVERY_S = 5.0


class Presence:
    """The peers that reported lately. Times are of any steady clock."""

    def __init__(self, history: History, journal: Journal, now_s: float) -> None:
        """Remember whom the history knows."""
        self.members = Members()
        self._history = history
        self._journal = journal
        self._told: set[str] = set()
        """whose coming was told, but not yet their going"""
        self._saved_s = now_s
        for status in history.peers():
            self.members.update(status, now_s - LONG_AGO_S)

    def alive(self, now_s: float) -> list[Member]:
        """Who is in touch."""
        return self.members.alive(now_s)

    def mean_valid_loss(self, now_s: float) -> float | None:
        """Of what those in touch measured last; None where nobody did."""
        return mean([m.status.valid_loss for m in self.alive(now_s)])

    def report(self, status: PeerStatus, now_s: float, *, leaving: bool) -> None:
        """Take what a peer says about itself."""
        before = self.members.update(status, now_s, left=leaving)
        known = status.peer_id in self._told
        if leaving:
            self._told.discard(status.peer_id)
            if known:
                self._journal.say("info", status.peer_id, "left")
            return
        self._told.add(status.peer_id)
        if before and before.status.incarnation not in ("", status.incarnation):
            self._journal.say("warning", status.peer_id, "was started again")
        elif before and not known:
            self._journal.say("info", status.peer_id, "is back")

    def look(self, now_s: float) -> None:
        """Tell who has become silent; forget who has been for long."""
        alive = {m.status.peer_id for m in self.alive(now_s)}
        for peer_id in sorted(self._told - alive):
            self._journal.say("warning", peer_id, "is silent")
        self._told &= alive
        self.members.forget(now_s)

    async def save_when_due(self, now_s: float) -> None:
        """Write what is known of the peers, now and then."""
        if now_s - self._saved_s > SAVE_EVERY_S:
            self._saved_s = now_s
            await asyncio.to_thread(self._history.put_peers, self._statuses())

    def save(self) -> None:
        """Write what is known of the peers; blocks."""
        self._history.put_peers(self._statuses())

    def _statuses(self) -> list[PeerStatus]:
        return [member.status for member in self.members.all()]


def mean(values: list[float | None]) -> float | None:
    """Of those that are known; None where none is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
