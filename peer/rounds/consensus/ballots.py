"""The ballots of one position: single-decree Paxos, one decree a position.

    Acceptor    what one elector has promised, accepted and locked at one place
    Ballots     the places at which an elector may have signed, over restarts of its process
    Booth       the acceptor of a process: it votes where it stands, and never where it has left
    Proposer    a leader's choice of the one entry of its attempt
    Leads       the attempts that one process leads, each once

Ballots (Lamport, "Paxos Made Simple", 2001) are numbered by attempts. `TERM` attempts in a row are
a term, which one elector leads, `leader_order[term % electors]`: a leader whose proposal lost its
bytes has others left. Attempt 0 has a fixed leader and needs no promises. If the run tolerates
liars (`Trust`), a quorum of votes is only a lock, which promises name, and a quorum of commits
decides (`optim/log/locks.py`). All of it lives in memory and dies with the process: a restarted
peer is another incarnation, and so another elector. `test_model_check.py` (ballots) and
`test_liars_check.py` (liars) in `tests/peer/rounds/consensus` drive these classes through every
order of messages, crashes, restarts and losses within a bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from atoll.dht.refusals import RefusalCode
from atoll.dht.transport import Refused
from atoll.optim.log.entry import Elector, Trust, is_quorum, leader_order
from atoll.optim.log.locks import Justification, Lock, SignedPromise
from atoll.peer.rounds.consensus.terms import OwnTerms

TERM = 4  # attempts of one leader: each but the first is for a proposal that nobody can vote for
# Terms beyond one's own that others may be at. A term takes a stall or so, so no outage explains
# a million. Whoever skips as many at a time needs 2^40 messages to come to the last number there
# is, after which nobody could lead at that position.
MAX_TERMS_AHEAD = 1 << 20
TERMS_AT_ONCE = 64  # of one position that a process may lead beside each other


class Place(NamedTuple):
    """The subject of a decree. Places are in order: a higher epoch comes after all of a lower."""

    epoch: int
    position: int


NOWHERE = Place(-1, -1)  # before all places


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """The entry that an elector voted for last, or the one that it is locked on."""

    attempt: int
    entry: bytes
    lock: Lock | None = None
    """the votes of a quorum, if the run tolerates liars"""


def term_of(attempt: int) -> int:
    """The term that an attempt belongs to."""
    return attempt // TERM


def first_attempt(term: int) -> int:
    """Return the first attempt of a term."""
    return term * TERM


def leader_of(electorate: Sequence[Elector], position: int, term: int) -> Elector:
    """Return the leader of a term."""
    order = leader_order(electorate, position)
    return electorate[order[term % len(order)]]


class Acceptor:
    """One elector's memory of one place."""

    def __init__(self) -> None:
        self.promised = 0
        self.accepted: Accepted | None = None
        self.locked: Accepted | None = None

    def prepare(self, attempt: int) -> bool:
        """Promise to refuse attempts below `attempt`; False if a later one was promised."""
        if attempt < self.promised or (self.locked and self.locked.attempt >= attempt):
            return False
        self.promised = attempt
        return True

    def accept(self, attempt: int, entry: bytes) -> bool:
        """Vote for `entry`; False if a later attempt was promised, or at another entry.

        An attempt has one leader and a leader proposes once, so a second entry at the same attempt
        comes from a faulty leader and is refused.
        """
        if attempt < self.promised:
            return False
        if self.accepted and self.accepted.attempt == attempt and self.accepted.entry != entry:
            return False
        self.promised = attempt
        self.accepted = Accepted(attempt=attempt, entry=entry)
        return True

    def commit(self, locked: Accepted) -> bool:
        """Keep a lock; False if a later attempt was promised, or this one has another lock."""
        if locked.attempt < self.promised:
            return False
        if self.locked and self.locked.attempt == locked.attempt:
            return self.locked.entry == locked.entry
        self.promised, self.locked = locked.attempt, locked
        return True


@dataclass(kw_only=True)
class Ballots:
    """The places at which one elector may have voted or proposed, its earlier processes included.

    Only the furthest one counts, as an elector never goes back. An elector that remembers it over
    a restart stays the same elector: it abstains up to there, and votes beyond. All others get a
    new incarnation instead.
    """

    left: Place = NOWHERE
    """the furthest place of earlier processes, whose promises are forgotten"""
    keep: Callable[[Place], None] = lambda place: None
    """stores a place before anything is signed there; if it fails, nothing is signed"""
    furthest: Place = NOWHERE
    """the furthest place of this process"""
    closed: bool = False
    """whether nothing is signed beyond the furthest place, as this process ends"""

    def note(self, place: Place) -> None:
        """Store a place at which something is about to be signed, unless it is stored already.

        Raises:
            Refused: this process ends, and has signed nothing at this place.
        """
        if place <= self.furthest:
            return
        if self.closed:
            raise Refused(
                RefusalCode.RETIRED, "this peer is stopping; it can vote again after a restart"
            )
        self.keep(place)
        self.furthest = place

    def expect_open(self, place: Place) -> None:
        """Raise Refused at a place at which an earlier process may have voted or proposed."""
        if place <= self.left:
            raise Refused(
                RefusalCode.LEFT,
                f"may have voted up to {tuple(self.left)} before a restart, got {tuple(place)}",
            )


class Booth:
    """The acceptor state of one process: it votes where it stands, and never where it has left.

    A replica may go back within an epoch, if it recovers from an older snapshot. What it
    promised at the places ahead of it is forgotten then, so it must not vote there once more.
    """

    def __init__(self, me: Elector, ballots: Ballots | None = None, trust: Trust = "crash") -> None:
        """Without `ballots`, no process before this one has voted as this elector."""
        self._me = me
        self._ballots = ballots or Ballots()
        self._trust: Trust = trust
        self._electorate: tuple[Elector, ...] = ()
        self._retiring = False
        self.here = self.furthest = Place(-1, -1)
        self.acceptor = Acceptor()

    def retire(self) -> None:
        """Resign: vote for nothing more, except what this process has voted for here already."""
        self._retiring = True

    @property
    def retired(self) -> bool:
        """Return whether this process has voted for nothing here or further on, and never will."""
        if self.here > self.furthest:
            return self._retiring
        has_signed = self.acceptor.accepted is not None or self.acceptor.locked is not None
        return self._retiring and self.here == self.furthest and not has_signed

    def turn(self, place: Place, electorate: Sequence[Elector], first_term: int = 0) -> bool:
        """Stand at `place`, which begins with a term; whether anything here has begun anew.

        Without electors nobody votes at `place`: a replica stands there between the news of an
        epoch and its way to the base, which may be further back.
        """
        moved = place != self.here or bool(electorate) != bool(self._electorate)
        self.here, self._electorate = place, tuple(electorate)
        if electorate and place > self.furthest:
            self.furthest, self.acceptor = place, Acceptor()
            self.acceptor.promised = first_attempt(first_term)
        return moved

    def has_accepted(self, entry: bytes) -> bool:
        """Return whether this process has voted for an entry here."""
        accepted = self.acceptor.accepted
        return self.here == self.furthest and accepted is not None and accepted.entry == entry

    @property
    def promised(self) -> int:
        """The attempt below which nothing is accepted here."""
        return self.acceptor.promised if self.here == self.furthest else 0

    def check(self, remote: str, place: Place, attempt: int) -> None:
        """Return whether this process votes at `place` for `remote` as the leader of `attempt`.

        Raises:
            Refused: with the reason.
        """
        if place != self.here:
            raise Refused(
                RefusalCode.ELSEWHERE,
                f"expected (epoch, position) {tuple(self.here)}, got {tuple(place)}",
            )
        if self.here < self.furthest:
            raise Refused(
                RefusalCode.LEFT,
                f"already voted at {tuple(self.furthest)}; refusing older position {tuple(place)}",
            )
        self._ballots.expect_open(place)
        if self._me not in self._electorate:
            raise Refused(RefusalCode.NO_ELECTOR, "this peer does not vote at this position")
        if self.retired:
            raise Refused(RefusalCode.RETIRED, "this peer has resigned as an acceptor")
        self.expect_near(term_of(attempt))
        leader = leader_of(self._electorate, place.position, term_of(attempt))
        if remote != leader.peer_id:
            raise Refused(
                RefusalCode.NOT_THE_LEADER, f"expected {leader.peer_id} at ballot {attempt}"
            )

    def expect_near(self, term: int) -> None:
        """Raise Refused at a term that no honest peer can have come to."""
        last = term_of(self.promised) + MAX_TERMS_AHEAD
        if term > last:
            raise Refused(RefusalCode.FAR_TERM, f"expected a term up to {last}, got {term}")

    def prepare(self, remote: str, place: Place, attempt: int) -> Accepted | None:
        """Promise; what was accepted before, or in a run that tolerates liars, locked.

        Raises:
            Refused: with the reason.
        """
        self.check(remote, place, attempt)
        self._ballots.note(place)
        if not self.acceptor.prepare(attempt):
            raise self._superseded(attempt)
        is_locked = self._trust == "byzantine"
        return self.acceptor.locked if is_locked else self.acceptor.accepted

    def accept(self, remote: str, place: Place, attempt: int, entry: bytes) -> None:
        """Vote for `entry`.

        Raises:
            Refused: with the reason.
        """
        self.check(remote, place, attempt)
        self._ballots.note(place)
        if not self.acceptor.accept(attempt, entry):
            raise self._superseded(attempt)

    def commit(self, remote: str, place: Place, locked: Accepted) -> None:
        """Keep a lock that was checked; whoever returns from here may sign its commit.

        Raises:
            Refused: with the reason.
        """
        self.check(remote, place, locked.attempt)
        self._ballots.note(place)
        if not self.acceptor.commit(locked):
            raise self._superseded(locked.attempt)

    def _superseded(self, attempt: int) -> Refused:
        return Refused(RefusalCode.SUPERSEDED, f"promised ballot {self.promised}, got {attempt}")


class Proposer:
    """A leader's choice of the one entry of its attempt."""

    def __init__(
        self,
        *,
        attempt: int,
        electors: int,
        trust: Trust = "crash",
        on_choice: Callable[[], None] = lambda: None,
    ) -> None:
        """Without promises; attempt 0 needs none. `on_choice` comes before there is a choice."""
        self._on_choice = on_choice
        self.attempt = attempt
        self._electors = electors
        self._trust: Trust = trust
        self._signed: dict[int, SignedPromise] = {}
        self.promises: dict[int, Accepted | None] = {}
        self._passed_over: set[bytes] = set()
        self.chosen: bytes | None = None

    @property
    def free(self) -> bool:
        """Return whether it may choose: it leads attempt 0, or a quorum has promised."""
        promised = list(self.promises)
        return self.attempt == 0 or is_quorum(promised, self._electors, self._trust)

    def promise(
        self, elector: int, accepted: Accepted | None, signed: SignedPromise | None = None
    ) -> None:
        """Note the promise of the elector of this index; later ones change nothing."""
        if elector not in self.promises:
            self.promises[elector] = accepted
            if signed is not None:
                self._signed[elector] = signed

    @property
    def justification(self) -> Justification:
        """The reason for its choice, in a run that tolerates liars."""
        highest = _highest(list(self.promises.values()))
        signed = tuple(self._signed[elector] for elector in sorted(self._signed))
        return Justification(promises=signed, lock=highest.lock if highest else None)

    def adopted(self) -> bytes | None:
        """The entry that it has to propose, if any."""
        named = [p for p in self.promises.values() if p and p.entry not in self._passed_over]
        return value_to_propose(named)

    def may_be_decided(self, entry: bytes) -> bool:
        """Return whether a quorum may have accepted the entry of the highest attempt.

        Had one, all of it that promised here would name this entry: nothing else was proposed
        since. The others may have accepted it, those also that name an entry passed over: they may
        lie.
        """
        others = [
            i
            for i, promise in self.promises.items()
            if promise is None or promise.entry not in {entry, *self._passed_over}
        ]
        rest = set(range(self._electors)) - set(others)
        return is_quorum(list(rest), self._electors, self._trust)

    def pass_over(self) -> None:
        """Adopt the entry of the next highest attempt, if any, as no quorum accepted this one.

        Raises:
            RuntimeError: the entry may be decided.
        """
        accepted = self.adopted()
        if accepted is None or self.may_be_decided(accepted):
            raise RuntimeError("expected an entry that no quorum has accepted")
        self._passed_over.add(accepted)

    def choose(self, own: bytes) -> bytes:
        """The entry to propose: the one accepted before, else `own`; the first choice stands.

        Raises:
            RuntimeError: without the promises of a quorum.
        """
        if not self.free:
            raise RuntimeError(f"expected promises of a quorum before ballot {self.attempt}")
        if self.chosen is None:
            self._on_choice()
            adopted = self.adopted()
            self.chosen = own if adopted is None else adopted
        return self.chosen


class Leads:
    """The attempts that one process leads: those of its incarnation, each once, and never back."""

    def __init__(self, me: Elector, ballots: Ballots | None = None, trust: Trust = "crash") -> None:
        self.trust: Trust = trust
        self._me = me
        self._ballots = ballots or Ballots()
        self._furthest = Place(-1, -1)
        self._led = OwnTerms(0)
        """terms of the furthest place"""
        self._attempts: dict[int, int] = {}
        """the last attempt of each of its newest terms"""

    def begin(self, place: Place, attempt: int, electorate: Sequence[Elector]) -> Proposer:
        """Lead an attempt.

        Raises:
            Refused: another elector leads it, or it was led before: a leader that proposed twice
                could decide a position twice.
        """
        self.check(place, term_of(attempt), electorate)
        if place > self._furthest:
            self._furthest, self._led, self._attempts = place, OwnTerms(len(electorate)), {}
        if place < self._furthest or not self._is_new(attempt):
            raise Refused(RefusalCode.SUPERSEDED, f"ballot {attempt} has ended; use a later one")
        self._note(attempt)
        return Proposer(
            attempt=attempt,
            electors=len(electorate),
            trust=self.trust,
            # Not before: a process that only gathered a group may lead here after a restart.
            on_choice=lambda: self._ballots.note(place),
        )

    def _is_new(self, attempt: int) -> bool:
        """Return whether an attempt comes after all of its term; none does after an old term's."""
        term = term_of(attempt)
        return term not in self._led or attempt > self._attempts.get(term, attempt)

    def _note(self, attempt: int) -> None:
        term = term_of(attempt)
        self._led.add(term)
        self._attempts[term] = attempt
        if len(self._attempts) > TERMS_AT_ONCE:
            del self._attempts[next(iter(self._attempts))]

    def check(self, place: Place, term: int, electorate: Sequence[Elector]) -> None:
        """Return whether the term is this process's to lead.

        Raises:
            Refused: it is not.
        """
        if not electorate:
            raise Refused(
                RefusalCode.NO_ELECTOR, "this peer knows no electorate; it must recover first"
            )
        leader = leader_of(electorate, place.position, term)
        if leader != self._me:
            raise Refused(
                RefusalCode.NOT_THE_LEADER, f"expected {leader.peer_id} to lead term {term}"
            )
        self._ballots.expect_open(place)


def value_to_propose(promises: Sequence[Accepted | None]) -> bytes | None:
    """The entry of the highest attempt among a quorum's promises; None leaves the choice free."""
    highest = _highest(promises)
    return highest.entry if highest else None


def _highest(promises: Sequence[Accepted | None]) -> Accepted | None:
    accepted = [promise for promise in promises if promise is not None]
    return max(accepted, key=lambda a: a.attempt, default=None)
