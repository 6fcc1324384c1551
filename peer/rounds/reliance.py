"""A peer remembers others that break no rule and cost the rounds time.

A peer that answers "ready now" and never reports makes a group wait for its grace. A leader that
sends keepalives and closes no group costs its term's time, and one that leaves a member out costs
that member's round. None can be told from a peer that is slow or cut off, so none is banned: a
leader expects the first no longer, and members report to the leader after the others. All rules are
local. They change how long this peer waits, and for whom; no decision depends on them, so peers
need not agree on what they remember.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from atoll.optim.log.entry import Elector, EntryKind, leader_order

MAX_PEERS = 4096  # as many as a group may have; those noted first are forgotten first
# An entry with the peer makes up for half a promise that it broke: one that reports to every second
# group would otherwise make each of the others wait.
BROKEN, KEPT = 2, 1
DISBELIEVED = 3 * BROKEN  # one may be a window that took longer, two a bad hour
# Points of a leader that decides without this peer's report: if it had taken the report, or if it
# refused it as too late or lost the session. A member that is late for every second group hears
# eight such refusals in a row from one leader once in 256 times.
TAKEN, REFUSED = 3, 1
DISTRUSTED = 8
USURPED = 3  # terms of this peer's own: one may be a connection that was lost, two a bad hour
# Positions at which a leader is passed over. It costs a run of 5 s a position half a minute in five
# to try it again, and a leader that was cut off leads again after that time.
SKIPPED_POSITIONS = 64
# Beyond the usual time of a position, what the silence of a leader costs at least: less than
# members wait for its group, or for its decision (`policies.py`).
SILENT_GRACES, MARGIN_STALLS, DECISION_STALLS = 4, 4, 20


class Promises:
    """Count how often peers said when they would be ready, and did not report by then."""

    def __init__(self) -> None:
        self._broken: dict[str, int] = {}

    def broke(self, peer: str) -> bool:
        """Note a broken promise; return whether the peer is believed no longer."""
        was_believed = self.believes(peer)
        self._broken[peer] = self._broken.pop(peer, 0) + BROKEN
        if len(self._broken) > MAX_PEERS:
            del self._broken[next(iter(self._broken))]
        return was_believed and not self.believes(peer)

    def kept(self, members: Iterable[str]) -> None:
        """Note the members of an entry."""
        for peer in members:
            if peer in self._broken:
                self._broken[peer] -= KEPT
                if not self._broken[peer]:
                    del self._broken[peer]

    def believes(self, peer: str) -> bool:
        """Return whether a group is to wait for a peer that says when it will be ready."""
        return self._broken.get(peer, 0) < DISBELIEVED


class Omissions:
    """Count how often leaders decided updates without this peer, which had reported to them.

    A peer believes its own account alone. Another one cannot know whether a report came too late or
    was left out, so a member that accuses a leader has no effect on others, and a leader that
    leaves out most members loses them all.
    """

    def __init__(self) -> None:
        self._points: dict[str, int] = {}
        self._served: set[str] = set()
        """leaders of `_points` since whose last omission another leader included this peer"""

    @property
    def is_empty(self) -> bool:
        """Return whether no leader has left this peer out since it last included it."""
        return not self._points

    def included(self, leader: str) -> None:
        """Note an entry with this peer's contribution."""
        self._points.pop(leader, None)
        self._served = set(self._points)

    def omitted(self, leader: str, *, was_taken: bool) -> bool:
        """Note an entry without it; return whether this peer reports to the leader no longer.

        A peer that others leave out as well is too slow, or cut off: that counts once.

        Args:
            leader: PeerID.
            was_taken: the leader held this peer's report when it closed the group; else it refused
                the report as too late, or the session broke.
        """
        before = self._points.get(leader)
        if before is None or leader in self._served:
            self._points[leader] = (before or 0) + (TAKEN if was_taken else REFUSED)
            self._served.discard(leader)
        if len(self._points) > MAX_PEERS:
            del self._points[next(iter(self._points))]
        return self._points.get(leader, 0) >= DISTRUSTED


class Usurpers:
    """Count how often leaders ended the terms that this peer led, before these had their time.

    A leader asks for promises once the leader before it is gone. One that asks that leader itself,
    and so reaches it, was wrong or lies. A peer believes its own account alone, and all that
    follows is that it leaves other terms their time before it promises one to such a leader.
    """

    def __init__(self) -> None:
        self._taken_at: dict[str, list[int]] = {}

    def took(self, leader: str, position: int) -> bool:
        """Note a term that was ended; return whether this peer trusts the leader no longer."""
        was_trusted = not self.is_known(leader, position)
        at = [each for each in self._taken_at.pop(leader, []) if each != position]
        self._taken_at[leader] = [*at, position][-USURPED:]
        if len(self._taken_at) > MAX_PEERS:
            del self._taken_at[next(iter(self._taken_at))]
        return was_trusted and self.is_known(leader, position)

    def is_known(self, leader: str, position: int) -> bool:
        """Return whether a leader has to wait for its turn at a position."""
        at = self._taken_at.get(leader, [])
        return len(at) == USURPED and position - at[0] <= SKIPPED_POSITIONS


class FailedLeaders:
    """Leaders whose terms decided nothing, by this peer's own account.

    An entry that was decided at a later term does not prove that the leaders before it failed. With
    `trust = "crash"` a liar may end their terms by preparing its own, and propose what an honest
    leader's group has reduced, so that all others would report to the liar alone. A term therefore
    has failed only if the position took longer than honest leaders do. A peer that is new, and has
    no such account, believes most acceptors, if they reported to a later leader.

    So peers may remember different leaders; they then report to different ones, and the leader of a
    later term waits until a quorum has called it.
    """

    def __init__(self) -> None:
        self._failed_at: dict[str, int] = {}
        self._left_at: dict[str, int] = {}
        """leaders that leave this peer out, whatever they decide with others"""
        self.began_at: int | None = None
        """the first position of which this peer has an account of its own"""

    @property
    def is_empty(self) -> bool:
        """Return whether no leader is passed over."""
        return not self.passed_over

    @property
    def passed_over(self) -> frozenset[str]:
        """Return the PeerIDs of the leaders that are passed over."""
        return frozenset({*self._failed_at, *self._left_at})

    def leave(self, leader: str, position: int) -> None:
        """Pass over a leader that leaves this peer out (`Omissions`)."""
        self._left_at[leader] = position

    def is_new(self, position: int) -> bool:
        """Return whether others may pass over leaders that failed before this peer was here."""
        if self.began_at is None:
            # Nobody failed before the first entry of a run.
            self.began_at = position or -SKIPPED_POSITIONS - 1
        return position <= self.began_at + SKIPPED_POSITIONS

    def note(
        self,
        kind: EntryKind,
        position: int,
        electorate: Sequence[Elector],
        term: int,
        *,
        over: int,
        first_term: int = 0,
    ) -> None:
        """Take what was decided at a position, and at which term.

        The leader of a NULL has failed as well, as it may propose one whenever it leads; unless the
        term is a later one, which has to adopt a NULL that a liar before it proposed.

        Args:
            kind: of the entry.
            position: its.
            electorate: of the position.
            term: of the certificate.
            over: how many terms, of those that this peer did not pass over, can have failed
                (`terms_over`).
            first_term: with which the position began: leaders of those before it have failed.
        """
        order, skipped = _order(electorate, position), self.skipped(electorate, position)
        waited = [each for each in range(first_term, term) if each not in skipped][:over]
        for each in [*range(min(first_term, term)), *waited]:
            if each < len(order):
                self._failed_at[order[each]] = position
        if not order:
            return
        if kind != "null":
            self._failed_at.pop(order[term % len(order)], None)
        elif term == first_term:
            self._failed_at[order[term % len(order)]] = position
        oldest = position - SKIPPED_POSITIONS
        self._failed_at = {peer: at for peer, at in self._failed_at.items() if at >= oldest}
        self._left_at = {peer: at for peer, at in self._left_at.items() if at >= oldest}

    def skipped(self, electorate: Sequence[Elector], position: int) -> Collection[int]:
        """Return the terms at a position whose leaders are passed over.

        They are of the first cycle of leaders only, and none if all leaders would be passed over:
        a run whose other leaders are gone comes to each of its leaders.
        """
        noted = (self._failed_at, self._left_at)
        terms = {
            term
            for term, peer in enumerate(() if self.is_empty else _order(electorate, position))
            for at in noted
            if 0 <= position - at.get(peer, position + 1) <= SKIPPED_POSITIONS
        }
        return frozenset(terms if len(terms) < len(electorate) else ())


def terms_over(stood_s: float, usual_s: float, *, grace_s: float, stall_s: float) -> int:
    """Return how many terms of a position can have failed in silence while it was the next one.

    Honest leaders close their groups within four graces and some stalls (`group_patience_s`), and
    members wait for a decision for twenty stalls at least. A leader that fails sooner, because it
    died or refuses its members, costs the run so little that nobody has to remember it.

    Args:
        stood_s: how long the position was the next one.
        usual_s: how long the last position was, or this peer's window took.
        grace_s: of the run.
        stall_s: of the run.
    """
    least_s = min(SILENT_GRACES * grace_s + MARGIN_STALLS * stall_s, DECISION_STALLS * stall_s)
    return max(0, int((stood_s - usual_s) / least_s))


def _order(electorate: Sequence[Elector], position: int) -> list[str]:
    return [electorate[index].peer_id for index in leader_order(electorate, position)]
