"""Presence: which peers are online, and the events when they come and go.

Times are seconds of any steady clock; the caller passes them in.
"""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass

from atoll.coordinator import notices
from atoll.coordinator.history import EventLog, History
from atoll.coordinator.rpc.messages import ALIVE_S, HEARTBEAT_S, MAX_HEARTBEAT_S
from atoll.coordinator.run.status import MAX_PEERS_SHOWN, PeerState, PeerStatus

FORGET_S = 3600.0  # gone peers stay in view this long
REPORTS_PER_S = 200  # from all peers together; one takes about 0.3 ms
MAX_PEERS = 12_000  # at 200 a second each reports once in 60 s; more push out the longest silent
MISSED = 3  # heartbeats in a row: two may be lost with a restarted link
LONG_AGO_S = 60.0  # a peer known from the history counts as gone until it reports
SAVE_EVERY_S = 5.0  # a restart shows statuses at most this old
MANY = 512  # peers: looking through so many with each of 200 reports a second takes a core
PAIRS_NAMED = 4  # in one look: a peer that reaches no other would fill the log
LOOK_AGAIN_S = 0.5  # the list of so many is at most this old


def interval_s(num_alive: int) -> float:
    """Return the interval of heartbeats with so many peers online."""
    return min(max(HEARTBEAT_S, num_alive / REPORTS_PER_S), MAX_HEARTBEAT_S)


@dataclass(frozen=True, kw_only=True)
class KnownPeer:
    """A peer's last report and its time."""

    status: PeerStatus
    seen_s: float
    left: bool = False
    told_s: float = HEARTBEAT_S
    """The interval that the last answer gave it."""

    @property
    def alive_s(self) -> float:
        """Return the silence allowed to a peer: by the interval it was told, not by today's."""
        return max(ALIVE_S, MISSED * self.told_s)

    def is_alive(self, now_s: float) -> bool:
        """Return True if it reported recently and did not say goodbye."""
        return not self.left and now_s - self.seen_s <= self.alive_s

    def shown(self, now_s: float) -> PeerStatus:
        """Return the status for display: with its age, and left or gone if it is."""
        age_s = max(0.0, now_s - self.seen_s)
        if self.is_alive(now_s):
            return self.status.seen(age_s)
        # A goodbye, which outlives a restart of the coordinator; an evicted peer gave none.
        state: PeerState = "left" if self.status.state == "leaving" else "gone"
        return dataclasses.replace(
            self.status, last_seen_s=age_s, state=state, phase="", tokens_per_s=0.0
        )


class KnownPeers:
    """The peers of a run by PeerID, the gone ones too."""

    def __init__(self) -> None:
        self._peers: dict[str, KnownPeer] = {}  # the longest silent first

    def __len__(self) -> int:
        return len(self._peers)

    def get(self, peer_id: str) -> KnownPeer | None:
        """Return what is known of a peer."""
        return self._peers.get(peer_id)

    def update(
        self, status: PeerStatus, now_s: float, *, left: bool = False, told_s: float = HEARTBEAT_S
    ) -> KnownPeer | None:
        """Take a status; return what was known before."""
        before = self._peers.pop(status.peer_id, None)
        if before is None and len(self._peers) >= MAX_PEERS:
            del self._peers[next(iter(self._peers))]
        self._peers[status.peer_id] = KnownPeer(
            status=status, seen_s=now_s, left=left, told_s=told_s
        )
        return before

    def alive(self, now_s: float) -> list[KnownPeer]:
        """Return the peers online, in order of PeerID."""
        alive = [peer for peer in self._peers.values() if peer.is_alive(now_s)]
        return sorted(alive, key=_by_peer_id)

    def all(self) -> list[KnownPeer]:
        """Return all known peers, in order of PeerID."""
        return sorted(self._peers.values(), key=_by_peer_id)

    def forget(self, now_s: float) -> None:
        """Drop the peers that have been gone for `FORGET_S`."""
        for peer_id, peer in list(self._peers.items()):
            if now_s - peer.seen_s > FORGET_S:
                del self._peers[peer_id]

    def newest(self, count: int) -> list[KnownPeer]:
        """Return the peers that reported last, in order of PeerID."""
        return sorted(list(self._peers.values())[-count:], key=_by_peer_id)


def _by_peer_id(peer: KnownPeer) -> str:
    return peer.status.peer_id


class Presence:
    """Tracks the peers that report, and logs their coming and going."""

    def __init__(self, history: History, events: EventLog, now_s: float) -> None:
        """Start with the peers that the history knows."""
        self.peers = KnownPeers()
        self._history = history
        self._events = events
        self._seen: set[str] = set()
        """PeerIDs whose coming is logged, but not yet their going."""
        self._joined: set[str] = set()
        """PeerIDs whose joining is logged, until their first report."""
        self._apart: frozenset[tuple[str, str]] = frozenset()
        self._saved_s = now_s
        self._alive: list[KnownPeer] = []
        self._looked_s = now_s
        for status in history.peers():
            self.peers.update(status, now_s - LONG_AGO_S)

    def alive(self, now_s: float) -> list[KnownPeer]:
        """Return the peers online; if they are many, as of the last half second."""
        is_fresh = 0 <= now_s - self._looked_s < LOOK_AGAIN_S
        if len(self._alive) < MANY or not is_fresh:
            self._alive, self._looked_s = self.peers.alive(now_s), now_s
        return self._alive

    def alive_in(self, module: str, now_s: float) -> list[KnownPeer]:
        """Return the peers online that follow the log of a module."""
        return [peer for peer in self.alive(now_s) if peer.status.module == module]

    def interval_s(self, now_s: float) -> float:
        """Return the interval of heartbeats, at which at most `REPORTS_PER_S` arrive."""
        return interval_s(len(self.alive(now_s)))

    def shown(self, now_s: float) -> list[PeerStatus]:
        """Return the statuses for display; of very many, those that reported last."""
        return [peer.shown(now_s) for peer in self.peers.newest(MAX_PEERS_SHOWN)]

    def note_joined(self, peer_id: str) -> None:
        """Note that a peer joined, which the log says already: it need not say that it is back."""
        if len(self._joined) < MAX_PEERS:  # anyone with an invite can join under many keys
            self._joined.add(peer_id)

    def report(self, status: PeerStatus, now_s: float, *, leaving: bool) -> None:
        """Take a peer's report."""
        if leaving:
            status = dataclasses.replace(status, state="leaving")
        told_s = self.interval_s(now_s)
        before = self.peers.update(status, now_s, left=leaving, told_s=told_s)
        known = status.peer_id in self._seen
        if leaving:
            self._seen.discard(status.peer_id)
            if known:
                self._events.add("info", status.peer_id, notices.peer_left())
            return
        self._seen.add(status.peer_id)
        if before and before.status.incarnation not in ("", status.incarnation):
            self._events.add("warning", status.peer_id, notices.peer_restarted())
        elif before and not known and status.peer_id not in self._joined:
            self._events.add("info", status.peer_id, notices.peer_back())
        self._joined.discard(status.peer_id)

    def apart(self, now_s: float) -> list[tuple[str, str]]:
        """Return the pairs of peers online of which one reports that it cannot reach the other."""
        alive = {m.status.peer_id: m.status.unreached for m in self.alive(now_s)}
        pairs = {
            (min(peer, other), max(peer, other))
            for peer, unreached in alive.items()
            for other in unreached
            if other in alive and other != peer
        }
        return sorted(pairs)

    def report_apart(self, now_s: float) -> None:
        """Log each pair that stays apart once; again if it comes back."""
        pairs = self.apart(now_s)
        new = [pair for pair in pairs if pair not in self._apart]
        for one, other in new[:PAIRS_NAMED]:
            self._events.report_once(
                "warning", notices.peers_apart(peers=[one, other]), key=(one, other)
            )
        if len(new) > PAIRS_NAMED:
            more = notices.more_peers_apart(pairs=len(new) - PAIRS_NAMED)
            self._events.report_once("warning", more, key="more pairs apart")
        self._apart = frozenset(pairs)

    def put_out(self, peer_id: str) -> None:
        """Count a peer as gone that the organiser evicted."""
        known = self.peers.get(peer_id)
        if known is not None:
            self.peers.update(known.status, known.seen_s, left=True)
            self._alive = []
        self._seen.discard(peer_id)

    def look(self, now_s: float) -> None:
        """Log the peers that stopped reporting; forget those gone for long."""
        self._alive, self._looked_s = self.peers.alive(now_s), now_s
        alive = {m.status.peer_id for m in self._alive}
        for peer_id in sorted(self._seen - alive):
            known = self.peers.get(peer_id)
            silent_s = known.alive_s if known is not None else ALIVE_S
            self._events.add("warning", peer_id, notices.peer_gone(silent_s=silent_s))
        self._seen &= alive
        self.report_apart(now_s)
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
        return [peer.status for peer in self.peers.newest(MAX_PEERS_SHOWN)]


def mean(values: list[float | None]) -> float | None:
    """Return the mean of the values that are known, None if there are none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
