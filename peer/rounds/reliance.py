"""What a peer remembers of others that break no rule and cost the rounds time.

A peer that answers "ready now" and never reports makes a group wait for its grace. A leader that
sends keepalives and closes no group costs its term's time. Neither can be told from a peer that is
slow or cut off, so neither is banned: a leader expects the first no longer, and members report to
the leader after the second. Both rules are local. They change how long this peer waits, and for
whom; what is decided does not depend on them, so peers need not agree on what they remember.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Literal

from atoll.optim.log.entry import Elector, leader_order

MAX_PEERS = 4096  # as many as a group may have; those noted first are forgotten first
# An entry with the peer makes up for half a promise that it broke: one that reports to every second
# group would otherwise make each of the others wait.
BROKEN, KEPT = 2, 1
DISBELIEVED = 3 * BROKEN  # one may be a window that took longer, two a bad hour
# Positions at which a leader is passed over. It costs a run of 5 s a position half a minute in five
# to try it again, and a leader that was cut off leads again after that time.
SKIPPED_POSITIONS = 64


class Promises:
    """How often peers said when they would be ready, and did not report by then."""

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


class FailedLeaders:
    """Leaders whose terms decided nothing, by the certificates that this peer saw.

    An entry that was decided at a later term shows that the leaders of the terms before it failed,
    or were passed over. Two certificates of one entry may name different terms, so two peers may
    remember different leaders; they then report to different leaders, and the leader of a later
    term waits until a quorum has called it.
    """

    def __init__(self) -> None:
        self._failed_at: dict[str, int] = {}

    @property
    def is_empty(self) -> bool:
        """Return whether no leader has failed."""
        return not self._failed_at

    def note(
        self,
        kind: Literal["update", "null"],
        position: int,
        electorate: Sequence[Elector],
        term: int,
    ) -> None:
        """Take what was decided at a position, and at which term.

        The leader of a NULL has failed as well: it may propose one whenever it leads.
        """
        order, skipped = _order(electorate, position), self.skipped(electorate, position)
        for each, peer in enumerate(order[:term]):
            if each not in skipped:
                self._failed_at[peer] = position
        if not order:
            return
        if kind == "update":
            self._failed_at.pop(order[term % len(order)], None)
        else:
            self._failed_at[order[term % len(order)]] = position
        oldest = position - SKIPPED_POSITIONS
        self._failed_at = {peer: at for peer, at in self._failed_at.items() if at >= oldest}

    def skipped(self, electorate: Sequence[Elector], position: int) -> Collection[int]:
        """Return the terms at a position whose leaders are passed over.

        They are of the first cycle of leaders only, and none if all leaders would be passed over:
        a run whose other leaders are gone comes to each of its leaders.
        """
        terms = {
            term
            for term, peer in enumerate(_order(electorate, position) if self._failed_at else ())
            if 0 <= position - self._failed_at.get(peer, position + 1) <= SKIPPED_POSITIONS
        }
        return frozenset(terms if len(terms) < len(electorate) else ())


def _order(electorate: Sequence[Elector], position: int) -> list[str]:
    return [electorate[index].peer_id for index in leader_order(electorate, position)]
