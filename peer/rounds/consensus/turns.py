"""The terms of one position that have begun at an acceptor of a run that tolerates liars.

A promise for a later term ends all terms before it. A liar would end each of them by preparing its
own next one, so an acceptor opens one term after the other, and leaves each of them its time. It
does so when it is asked for a promise: a position at which nobody trains opens no terms.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from atoll.optim.log.entry import Elector, max_liars
from atoll.peer.rounds.consensus.ballots import leader_of
from atoll.peer.rounds.consensus.terms import OwnTerms

# Terms get twice the time after each turn of all leaders, so that a reduction that takes longer
# than the last ones ends in one of them. A liar may use up such turns while nobody trains, and the
# run waits for the last of its terms then: for 16 times its time, not for days.
MAX_DOUBLINGS = 4


class Turns:
    """The newest open term of one position."""

    def __init__(
        self, electorate: Sequence[Elector], position: int, *, first_term: int, now: float
    ) -> None:
        """The first term opens now, in seconds of the clock of the calls below."""
        self._electorate = tuple(electorate)
        self._position = position
        self._first_term = first_term
        self.open_term = first_term
        self._opened_at = now
        self._given_up = OwnTerms(len(self._electorate))
        """terms that this acceptor led, also those whose turn has not come"""

    def time_s(self, term: int, base_s: float) -> float:
        """Return the time of a term of which the first one with its leader has `base_s`."""
        cycle = max(0, term - self._first_term) // max(1, len(self._electorate))
        return base_s * float(1 << min(cycle, MAX_DOUBLINGS))

    def open(self, term: int, now: float) -> None:
        """Open all terms up to this one."""
        if term > self.open_term:
            self.open_term, self._opened_at = term, now
        while self.open_term in self._given_up:
            self.open_term, self._opened_at = self.open_term + 1, now

    def ends_early(
        self, term: int, me: str, *, since: int, now: float, base_s: float, skipped: Collection[int]
    ) -> bool:
        """Return whether the promise of a term ends one that this acceptor leads before its time.

        Args:
            term: of the promise.
            me: PeerID of this acceptor.
            since: the newest term that it has promised.
            now: seconds.
            base_s: the time of its own term, if that is among the first with their leaders.
            skipped: terms that get no time.
        """
        leaders = {
            leader_of(self._electorate, self._position, each).peer_id: each
            for each in range(self._first_term, self._first_term + len(self._electorate))
        }
        mine = leaders.get(me, term)
        is_live = since <= mine < term and mine not in skipped and mine not in self._given_up
        return is_live and now < self._opened_at + self.time_s(mine, base_s)

    def give_up(self, term: int, now: float) -> None:
        """Leave no time to a term that this acceptor led, and leads no longer."""
        self._given_up.add(term)
        self.open(self.open_term, now)

    def advance(
        self,
        wanted: int,
        me: str,
        *,
        now: float,
        base_s: float,
        told: Mapping[str, int | None],
        skipped: Collection[int] = (),
    ) -> None:
        """Open what may be open up to a term: those that others have, and those that are over.

        Args:
            wanted: a leader asks for the promise of this term.
            me: PeerID of this acceptor.
            now: seconds.
            base_s: the time of the open term, if it is among the first with their leaders.
            told: the newest term that each other acceptor has open here, 0 if it stands elsewhere;
                None: it is gone.
            skipped: terms that get no time, as their leaders have failed of late.
        """
        others = [e.peer_id for e in self._electorate if e.peer_id != me]
        terms = sorted((told.get(peer) or 0 for peer in others), reverse=True)
        liars = max_liars(len(self._electorate))
        if liars < len(terms):
            # An honest one is as far: this acceptor was away, or came to the position later.
            self.open(terms[liars], now)
        while self.open_term < wanted and (
            self.open_term in skipped or self._is_over(me, now, base_s, told)
        ):
            self.open(self.open_term + 1, now)

    def _is_over(self, me: str, now: float, base_s: float, told: Mapping[str, int | None]) -> bool:
        """Return whether the open term had its time, or its leader is gone or gave it up."""
        if now >= self._opened_at + self.time_s(self.open_term, base_s):
            return True
        leader = leader_of(self._electorate, self._position, self.open_term).peer_id
        if leader == me:
            return False
        term = told.get(leader)
        return term is None or term > self.open_term
