"""Presence: which peers are online, and the events when they come and go.

Times are seconds of any steady clock; the caller passes them in.
"""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass

from atoll.coordinator.history import EventLog, History
from atoll.coordinator.rpc.messages import ALIVE_S
from atoll.coordinator.run.status import PeerStatus

FORGET_S = 3600.0  # gone peers stay in view this long
MAX_PEERS = 4096  # a flood of new identities pushes out the oldest peers
LONG_AGO_S = 60.0  # a peer known from the history counts as gone until it reports
SAVE_EVERY_S = 5.0  # a restart shows statuses at most this old


@dataclass(frozen=True, kw_only=True)
class KnownPeer:
    """A peer's last report and its time."""

    status: PeerStatus
    seen_s: float
    left: bool = False

    def is_alive(self, now_s: float) -> bool:
        """Return True if it reported recently and did not say goodbye."""
        return not self.left and now_s - self.seen_s <= ALIVE_S

    def shown(self, now_s: float) -> PeerStatus:
        """Return the status for display: with its age, and gone if it is."""
        age_s = max(0.0, now_s - self.seen_s)
        if self.is_alive(now_s):
            return dataclasses.replace(self.status, last_seen_s=age_s)
        return dataclasses.replace(
            self.status, last_seen_s=age_s, state="gone", phase="", tokens_per_s=0.0
        )


class KnownPeers:
    """The peers of a run by PeerID, the gone ones too."""

    def __init__(self) -> None:
        self._peers: dict[str, KnownPeer] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def get(self, peer_id: str) -> KnownPeer | None:
        """Return what is known of a peer."""
        return self._peers.get(peer_id)

    def update(self, status: PeerStatus, now_s: float, *, left: bool = False) -> KnownPeer | None:
        """Take a status; return what was known before."""
        before = self._peers.get(status.peer_id)
        if before is None and len(self._peers) >= MAX_PEERS:
            del self._peers[min(self._peers, key=lambda peer_id: self._peers[peer_id].seen_s)]
        self._peers[status.peer_id] = KnownPeer(status=status, seen_s=now_s, left=left)
        return before

    def alive(self, now_s: float) -> list[KnownPeer]:
        """Return the peers online, in order of PeerID."""
        peers = sorted(self._peers.items())
        return [peer for _, peer in peers if peer.is_alive(now_s)]

    def all(self) -> list[KnownPeer]:
        """Return all known peers, in order of PeerID."""
        return [peer for _, peer in sorted(self._peers.items())]

    def forget(self, now_s: float) -> None:
        """Drop the peers that have been gone for `FORGET_S`."""
        for peer_id, peer in list(self._peers.items()):
            if now_s - peer.seen_s > FORGET_S:
                del self._peers[peer_id]


class Presence:
    """Tracks the peers that report, and logs their coming and going."""

    def __init__(self, history: History, events: EventLog, now_s: float) -> None:
        """Start with the peers that the history knows."""
        self.peers = KnownPeers()
        self._history = history
        self._events = events
        self._seen: set[str] = set()
        """PeerIDs whose coming is logged, but not yet their going."""
        self._saved_s = now_s
        for status in history.peers():
            self.peers.update(status, now_s - LONG_AGO_S)

    def alive(self, now_s: float) -> list[KnownPeer]:
        """Return the peers online."""
        return self.peers.alive(now_s)

    def mean_valid_loss(self, now_s: float) -> float | None:
        """Return the mean of the last validation losses of the peers online, or None."""
        return mean([m.status.valid_loss for m in self.alive(now_s)])

    def report(self, status: PeerStatus, now_s: float, *, leaving: bool) -> None:
        """Take a peer's report."""
        before = self.peers.update(status, now_s, left=leaving)
        known = status.peer_id in self._seen
        if leaving:
            self._seen.discard(status.peer_id)
            if known:
                self._events.add("info", status.peer_id, "left")
            return
        self._seen.add(status.peer_id)
        if before and before.status.incarnation not in ("", status.incarnation):
            self._events.add("warning", status.peer_id, "restarted")
        elif before and not known:
            self._events.add("info", status.peer_id, "is back")

    def put_out(self, peer_id: str) -> None:
        """Count a peer as gone that the organiser evicted."""
        known = self.peers.get(peer_id)
        if known is not None:
            self.peers.update(known.status, known.seen_s, left=True)
        self._seen.discard(peer_id)

    def look(self, now_s: float) -> None:
        """Log the peers that stopped reporting; forget those gone for long."""
        alive = {m.status.peer_id for m in self.alive(now_s)}
        for peer_id in sorted(self._seen - alive):
            self._events.add("warning", peer_id, f"no report for {ALIVE_S:g} s; counts as gone")
        self._seen &= alive
        self.peers.forget(now_s)

    async def save_when_due(self, now_s: float) -> None:
        """Save the peers' statuses every `SAVE_EVERY_S`."""
        if now_s - self._saved_s > SAVE_EVERY_S:
            self._saved_s = now_s
            await asyncio.to_thread(self._history.put_peers, self._statuses())

    def save(self) -> None:
        """Save the peers' statuses; blocks."""
        self._history.put_peers(self._statuses())

    def _statuses(self) -> list[PeerStatus]:
        return [peer.status for peer in self.peers.all()]


def mean(values: list[float | None]) -> float | None:
    """Return the mean of the values that are known, None if there are none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
