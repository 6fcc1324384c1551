"""The rules of ballots: single-decree Paxos, one decree a position.

Lamport, "Paxos Made Simple" (2001). Ballots are numbered by attempts. `TERM` attempts in a row
are a term, which one elector leads, `leader_order[term % electors]`: a leader whose proposal lost
its bytes has others left. Attempt 0 has a fixed leader and needs no promises. All of it lives in
memory and dies with the process: a restarted peer is another incarnation, and so another elector.

Nothing here waits or sends. `tests/peer/rounds/consensus/test_model_check.py` drives these same
classes through every order of messages, crashes and restarts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from atoll.dht.refusals import RefusalCode
from atoll.dht.transport import Refused
from atoll.optim.log.entry import Elector, is_quorum, leader_order

TERM = 4  # attempts of one leader: each but the first is for a proposal that nobody can vote for


class Place(NamedTuple):
    """The subject of a decree. Places are in order: a higher epoch comes after all of a lower."""

    epoch: int
    position: int


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """The entry that an elector voted for last."""

    attempt: int
    entry: bytes


def term_of(attempt: int) -> int:
    """The term that an attempt belongs to."""
    return attempt // TERM


def leader_of(electorate: Sequence[Elector], position: int, term: int) -> Elector:
    """Return the leader of a term."""
    order = leader_order(electorate, position)
    return electorate[order[term % len(order)]]


class Acceptor:
    """One elector's memory of one place."""

    def __init__(self) -> None:
        """Nothing promised, nothing accepted."""
        self.promised = 0
        self.accepted: Accepted | None = None

    def prepare(self, attempt: int) -> bool:
        """Promise to refuse attempts below `attempt`; False if a later one was promised."""
        if attempt < self.promised:
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


class Booth:
    """The acceptor state of one process: it votes where it stands, and never where it has left.

    A replica may go back within an epoch, if it recovers from an older snapshot. What it
    promised at the places ahead of it is forgotten then, so it must not vote there once more.
    """

    def __init__(self, me: Elector) -> None:
        """No place yet."""
        self._me = me
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
        here = self.here == self.furthest
        return self._retiring and here and self.acceptor.accepted is None

    def turn(self, place: Place, electorate: Sequence[Elector]) -> bool:
        """Stand at `place`; whether that is another place than before."""
        moved = place != self.here
        self.here, self._electorate = place, tuple(electorate)
        if place > self.furthest:
            self.furthest, self.acceptor = place, Acceptor()
        return moved

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
        if self.here != self.furthest:
            raise Refused(
                RefusalCode.LEFT,
                f"voted up to {tuple(self.furthest)}, got {tuple(place)}: no way back",
            )
        if self._me not in self._electorate:
            raise Refused(RefusalCode.NO_ELECTOR, "this peer does not vote at this position")
        if self.retired:
            raise Refused(RefusalCode.RETIRED, "this peer leaves, and votes no more")
        leader = leader_of(self._electorate, place.position, term_of(attempt))
        if remote != leader.peer_id:
            raise Refused(
                RefusalCode.NOT_THE_LEADER, f"expected {leader.peer_id} at attempt {attempt}"
            )

    def prepare(self, remote: str, place: Place, attempt: int) -> Accepted | None:
        """Promise; what was accepted before.

        Raises:
            Refused: with the reason.
        """
        self.check(remote, place, attempt)
        if not self.acceptor.prepare(attempt):
            raise self._superseded(attempt)
        return self.acceptor.accepted

    def accept(self, remote: str, place: Place, attempt: int, entry: bytes) -> None:
        """Vote for `entry`.

        Raises:
            Refused: with the reason.
        """
        self.check(remote, place, attempt)
        if not self.acceptor.accept(attempt, entry):
            raise self._superseded(attempt)

    def _superseded(self, attempt: int) -> Refused:
        return Refused(
            RefusalCode.SUPERSEDED, f"attempt {self.promised} was promised, got {attempt}"
        )


class Proposer:
    """A leader's choice of the one entry of its attempt."""

    def __init__(self, *, attempt: int, electors: int) -> None:
        """Without promises; attempt 0 needs none."""
        self.attempt = attempt
        self._electors = electors
        self.promises: dict[int, Accepted | None] = {}
        self.chosen: bytes | None = None

    @property
    def free(self) -> bool:
        """Return whether it may choose: it leads attempt 0, or a quorum has promised."""
        return self.attempt == 0 or is_quorum(list(self.promises), self._electors)

    def promise(self, elector: int, accepted: Accepted | None) -> None:
        """Note the promise of the elector of this index; later ones change nothing."""
        self.promises.setdefault(elector, accepted)

    def adopted(self) -> bytes | None:
        """The entry that it has to propose, if any."""
        return value_to_propose(list(self.promises.values()))

    def choose(self, own: bytes) -> bytes:
        """The entry to propose: the one accepted before, else `own`; the first choice stands.

        Raises:
            RuntimeError: without the promises of a quorum.
        """
        if not self.free:
            raise RuntimeError(f"expected promises of a quorum before attempt {self.attempt}")
        if self.chosen is None:
            adopted = self.adopted()
            self.chosen = own if adopted is None else adopted
        return self.chosen


class Leads:
    """The attempts that one process leads: those of its incarnation, each once, and never back."""

    def __init__(self, me: Elector) -> None:
        """None yet."""
        self._me = me
        self._furthest = Place(-1, -1)
        self._led: set[int] = set()

    def begin(self, place: Place, attempt: int, electorate: Sequence[Elector]) -> Proposer:
        """Lead an attempt.

        Raises:
            Refused: another elector leads it, or it was led before: a leader that proposed twice
                could decide a position twice.
        """
        self.check(place, term_of(attempt), electorate)
        if place > self._furthest:
            self._furthest, self._led = place, set()
        if place < self._furthest or attempt in self._led:
            raise Refused(
                RefusalCode.SUPERSEDED, f"attempt {attempt} is over; come with the next one"
            )
        self._led.add(attempt)
        return Proposer(attempt=attempt, electors=len(electorate))

    def check(self, place: Place, term: int, electorate: Sequence[Elector]) -> None:
        """Return whether the term is this process's to lead.

        Raises:
            Refused: it is not.
        """
        if not electorate:
            raise Refused(
                RefusalCode.NO_ELECTOR, "this peer knows no electorate; it has to recover first"
            )
        leader = leader_of(electorate, place.position, term)
        if leader != self._me:
            raise Refused(
                RefusalCode.NOT_THE_LEADER, f"expected {leader.peer_id} to lead term {term}"
            )


def value_to_propose(promises: Sequence[Accepted | None]) -> bytes | None:
    """The entry of the highest attempt among a quorum's promises; None leaves the choice free."""
    accepted = [promise for promise in promises if promise is not None]
    return max(accepted, key=lambda a: a.attempt).entry if accepted else None
