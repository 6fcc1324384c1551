"""One term of one position, as its leader goes through it: a machine without sockets.

Events and the time go in, actions come out; nothing here waits or sends. `leader.py` owns the
sessions, tasks and timers, feeds this machine, and does what it asks for. `receive` takes an event
as it happens; `advance` looks at the clock, at the log and at the parts in hand. Both return what
is to be done now.

    CALLED      a later term, until it is wanted: by a quorum that reports, or by the absence of the
                leader before
    PREPARING   promises, before any ballot but the first (docs/protocol.md, part 2)
    FORMING     reports come in until the group closes (part 4, step 2)
    REDUCING    owners finish their parts; parts of owners that are lost are repaired (steps 5 to 7)
    REDUCED     all parts are done before the position's turn
    VOTING      the entry is proposed; back to REDUCING if a part of it is lost meanwhile (step 8)
    LOCKING     a quorum voted, and is asked to commit; only in a run that tolerates liars
    DECIDED     a quorum voted, or committed: there is a certificate
    FAILED      this term decides nothing; the next leader tries

A part is *done* when its owner has named its digest. The entry can be proposed then, while the
bytes are still on their way to the voters: whoever votes holds them. A part is *lost* when nothing
brings its bytes any more; it is reduced again under a new owner.

Ballots are single-decree Paxos, one decree a position (Lamport, "Paxos Made Simple", 2001),
numbered by attempts. `TERM` attempts in a row are a term, which one elector leads,
`leader_order[term % electors]`: a leader whose proposal lost its bytes has others left. Attempt 0
has a fixed leader and needs no promises. If the run tolerates liars (`Trust`), a quorum of votes is
only a lock, which promises name, and a quorum of commits decides (`optim/log/locks.py`). All of it
lives in memory and dies with the process: a restarted peer is another incarnation, and so another
elector. The rules of groups are those of `policies.py`, of electorates those of
`atoll.optim.log.entry`. `tests/peer/rounds/consensus/test_model_check.py` (ballots),
`test_liars_check.py` (liars) and `test_round_check.py` drive these same classes through every order
of messages, crashes, restarts and losses within a bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from atoll.coordinator.run.levels import Level
from atoll.coordinator.run.notice import Notice
from atoll.dht.refusals import RefusalCode
from atoll.dht.transport import Refused
from atoll.optim.log.electorate import Electors
from atoll.optim.log.entry import (
    Certificate,
    Elector,
    Entry,
    EntryKind,
    Member,
    Part,
    Partial,
    Trust,
    Vote,
    is_quorum,
    leader_order,
)
from atoll.optim.log.locks import Justification, Lock, SignedPromise
from atoll.optim.reduction.cells import Cells
from atoll.peer.rounds import notices
from atoll.peer.rounds.consensus.terms import OwnTerms
from atoll.peer.rounds.messages import Group, PartDone, PartPlan, Ready, Repair
from atoll.peer.rounds.policies import (
    ALONE_GRACES,
    OWNERS_SHARE,
    Close,
    Rendezvous,
    close_decision,
    new_owner,
)

TERM = 4  # attempts of one leader: each but the first is for a proposal that nobody can vote for
# Terms beyond one's own that others may be at. A term takes a stall or so, so no outage explains
# a million. Whoever skips as many at a time needs 2^40 messages to come to the last number there
# is, after which nobody could lead at that position.
MAX_TERMS_AHEAD = 1 << 20
TERMS_AT_ONCE = 64  # of one position that a process may lead beside each other
# A leader that no quorum calls lets a position take so many times as long as the last one: its
# callers may lie. They wait once themselves before they call, and then longer than the second time.
CALLED_ALONE_ROUNDS = 2
# A member that a relay has cut off reports again at once, through another relay: in half a second,
# or a stall more if the relay gave no sign of its end. An owner that is repaired meanwhile waits as
# long for its stream.
RETURN_STALLS = 2
LATE_STALLS = 2  # past the group's deadline: owners may finish at it, and their word takes a moment

IsLive = Callable[[str], bool]
"""Returns True as long as a member's session lasts."""


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
            self.acceptor.promised = first_term * TERM
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


@dataclass(frozen=True, kw_only=True)
class Fetch:
    """Get a part that is done and does not come by itself, from any of these members."""

    part: int
    done: PartDone
    members: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class FetchEnded:
    """A fetch has ended, with the bytes in hand or without."""

    part: int
    digest: bytes


@dataclass(frozen=True, kw_only=True)
class RepairPart:
    """Order all members to reduce a part again under a new owner."""

    order: Repair
    owner: str
    overdue: str = ""
    """PeerID of the owner before, if it is there and did not finish the part in time"""


@dataclass(kw_only=True)
class PartState:
    """The progress of one part."""

    plan: PartPlan
    owner: int
    due: float
    """when an owner that lives but has not finished loses the part; on the leader's clock"""
    generation: int = 0
    done: PartDone | None = None
    is_fetched: bool = False
    """whether a fetch has begun"""
    fetch_ended: bool = False
    order: Repair | None = None
    """the last one by which it is reduced again"""


class Parts:
    """The parts of one group."""

    def __init__(self, group: Group, cells: Cells, *, now: float) -> None:
        """All with their first owners; `cells` are those of the position's fragment."""
        self._group = group
        self._cells = cells
        due = now + OWNERS_SHARE * group.deadline_s
        self._parts = [PartState(plan=plan, owner=plan.owner, due=due) for plan in group.parts]
        self._untrue: set[int] = set()
        """owners that named a part whose bytes no peer has"""

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def done(self) -> dict[int, PartDone]:
        """The owners' words on finished parts, by part."""
        return {i: part.done for i, part in enumerate(self._parts) if part.done}

    @property
    def digests(self) -> dict[int, bytes]:
        """The digests that owners have named, by part."""
        return {i: done.digest for i, done in self.done.items()}

    @property
    def orders(self) -> tuple[Repair, ...]:
        """The orders by which parts are reduced again."""
        return tuple(part.order for part in self._parts if part.order is not None)

    def note(self, remote: str, done: PartDone) -> None:
        """Take an owner's word on a part; that of another member counts for nothing."""
        if done.part >= len(self._parts):
            return
        part = self._parts[done.part]
        owner = self._group.members[part.owner].peer_id
        if owner == remote and done.generation == part.generation and self._is_sound(part, done):
            part.done = done

    def fetched(self, event: FetchEnded) -> None:
        """Note the end of a fetch; one of an earlier generation changes nothing."""
        part = self._parts[event.part]
        if part.done is not None and part.done.digest == event.digest:
            part.fetch_ended = True

    def look_after(self, view: LeaderView, is_live: IsLive) -> list[Fetch | RepairPart]:
        """Begin what brings back parts that are lost."""
        actions: list[Fetch | RepairPart] = []
        for index in range(len(self._parts)):
            if self._is_lost(index, view, is_live):
                actions += self._repair(index, view, is_live)
            else:
                actions += self._fetch(index, view, is_live)
        return actions

    def fetch_missing(self, view: LeaderView, is_live: IsLive) -> list[Fetch]:
        """Fetch parts that are done and do not come by themselves."""
        return [each for i in range(len(self._parts)) for each in self._fetch(i, view, is_live)]

    def held(self, view: LeaderView) -> bool:
        """Return whether all parts are done and here."""
        return all(self._is_held(index, view) for index in range(len(self._parts)))

    def settled(self, view: LeaderView, is_live: IsLive) -> bool:
        """Return whether all parts are done, and here or on their way."""
        return all(
            part.done is not None and (index in view.held or self._comes(index, view, is_live))
            for index, part in enumerate(self._parts)
        )

    def lost(self, view: LeaderView, is_live: IsLive) -> bool:
        """Return whether a part is neither here nor anywhere."""
        return any(self._is_lost(index, view, is_live) for index in range(len(self._parts)))

    def logged(self) -> tuple[Part, ...]:
        """Return the parts as an entry names them; all must be done."""
        return tuple(_logged(part, part.done) for part in self._parts if part.done)

    def _is_sound(self, part: PartState, done: PartDone) -> bool:
        """Check that an owner's word can be logged: its length, and members by their prefixes."""
        start, stop = part.plan.start_cell, part.plan.stop_cell
        members = len(self._group.members)
        named = [p.member for p in done.partial]
        return (
            done.wire_bytes <= self._cells.max_body_bytes(members, start, stop)
            and named == sorted(set(named))
            and all(m < members for m in named)
            and all(p.cells < stop - start for p in done.partial)
        )

    def _is_held(self, index: int, view: LeaderView) -> bool:
        return self._parts[index].done is not None and index in view.held

    def _comes(self, index: int, view: LeaderView, is_live: IsLive) -> bool:
        """Return whether the leader's own exchange still brings it."""
        part = self._parts[index]
        is_kept = part.done is not None and part.owner in self._untrue
        return index in view.coming and self._owner_lives(part, view.now, is_live) and not is_kept

    def _is_lost(self, index: int, view: LeaderView, is_live: IsLive) -> bool:
        part = self._parts[index]
        if self._is_held(index, view) or self._comes(index, view, is_live):
            return False
        if part.done is None:
            return not self._owner_lives(part, view.now, is_live)
        return part.fetch_ended

    def _fetch(self, index: int, view: LeaderView, is_live: IsLive) -> list[Fetch]:
        part = self._parts[index]
        if part.done is None or part.is_fetched:
            return []
        if self._is_held(index, view) or self._comes(index, view, is_live):
            return []
        part.is_fetched = True
        members = tuple(self._group.members[i].peer_id for i in self._alive(is_live))
        return [Fetch(part=index, done=part.done, members=members)]

    def _owner_lives(self, part: PartState, now: float, is_live: IsLive) -> bool:
        """Return whether its owner may still finish a part: it is there, and not overdue."""
        owner = self._group.members[part.owner].peer_id
        return is_live(owner) and (part.done is not None or now < part.due)

    def _alive(self, is_live: IsLive) -> list[int]:
        return [i for i, m in enumerate(self._group.members) if is_live(m.peer_id)]

    def _repair(self, index: int, view: LeaderView, is_live: IsLive) -> list[RepairPart]:
        """The live member that owns the fewest cells; the old owner if no other is left."""
        part, alive = self._parts[index], self._alive(is_live)
        before = self._group.members[part.owner].peer_id
        overdue = before if part.done is None and is_live(before) else ""
        if part.done is not None:
            self._untrue.add(part.owner)
        load: dict[int, int] = {}
        for state in self._parts:
            cells = state.plan.stop_cell - state.plan.start_cell
            load[state.owner] = load.get(state.owner, 0) + cells
        owner = new_owner({part.owner, *self._untrue}, alive, load)
        if owner is None:
            owner = new_owner((), alive, load)
        if owner is None:
            return []
        part.owner, part.done = owner, None
        part.is_fetched = part.fetch_ended = False
        part.due = view.now + OWNERS_SHARE * self._group.deadline_s
        part.generation += 1
        order = Repair(part=index, generation=part.generation, owner=owner, senders=tuple(alive))
        part.order = order
        name = self._group.members[owner].peer_id
        return [RepairPart(order=order, owner=name, overdue=overdue)]


def _logged(part: PartState, done: PartDone) -> Part:
    return Part(
        start_cell=part.plan.start_cell,
        stop_cell=part.plan.stop_cell,
        owner=part.owner,
        generation=part.generation,
        wire_bytes=done.wire_bytes,
        digest=done.digest,
        partial=tuple(Partial(member=p.member, cells=p.cells) for p in done.partial),
    )


class RoundState(Enum):
    """The states of a term; the module's docstring describes each."""

    CALLED = "called"
    PREPARING = "preparing"
    FORMING = "forming"
    REDUCING = "reducing"
    REDUCED = "reduced"
    VOTING = "voting"
    LOCKING = "locking"
    DECIDED = "decided"
    FAILED = "failed"


OVER = frozenset({RoundState.DECIDED, RoundState.FAILED})
# A later term has been called if this leader's own acceptor has promised it. Those that report
# here, the leader among them, are then waited for there, while this term lacks its leader's vote.
# With a quorum that reports here it goes on: one promise to a liar must not end it.
WITHOUT_GROUP = frozenset({RoundState.CALLED, RoundState.FORMING})
BEFORE_PROPOSAL = frozenset({RoundState.FORMING, RoundState.REDUCING, RoundState.REDUCED})


@dataclass(frozen=True, kw_only=True)
class LeaderView:
    """A leader's view of clock, log and parts; times are seconds on one clock."""

    now: float
    turn: bool
    """whether the position is the one that is decided next"""
    electorate: tuple[Elector, ...]
    """of the position that is decided next"""
    opened_at: float
    """when that position came to be decided next"""
    last_s: float
    """how long the last position was next, of those decided by their first ballots"""
    promised_term: int = 0
    """the term below which the leader's own acceptor accepts nothing there"""
    held: frozenset[int] = frozenset()
    """parts whose named bytes are in hand"""
    coming: frozenset[int] = frozenset()
    """parts that the leader's own exchange may still bring"""
    control: Entry | None = None
    """the entry that brings an order, if one waits and this is the turn"""
    takes_updates: bool = True
    """whether an update may be decided there: the run is neither paused nor over"""
    evicted: frozenset[str] = frozenset()
    """peers that orders have put out: no entry may have them as members"""


# Events


@dataclass(frozen=True, kw_only=True)
class Reported:
    """A member's session began with its report."""

    peer: str
    ready: Ready


@dataclass(frozen=True, kw_only=True)
class Left:
    """A member's session ended."""

    peer: str
    is_cut_off: bool = False
    """whether a relay was lost: the member may report again through another"""


@dataclass(frozen=True, kw_only=True)
class Unreachable:
    """A message to a member could not be sent; its session is about to end."""

    peer: str


@dataclass(frozen=True, kw_only=True)
class Probed:
    """All who may come were asked: when each expects to be ready, on the leader's clock."""

    ready_at: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class ElectorsProbed:
    """All electors without a session were asked where they stand, and the others about them."""

    silent: frozenset[str]
    """PeerIDs of those that do not answer, or far behind, or as another incarnation, by the word of
    a quorum"""


@dataclass(frozen=True, kw_only=True)
class LeaderAbsent:
    """The leader of the term before does not answer, or its time is over and an order waits."""


@dataclass(frozen=True, kw_only=True)
class PartReduced:
    """A member says that it has finished a part."""

    peer: str
    done: PartDone


@dataclass(frozen=True, kw_only=True)
class Promised:
    """An elector promised an attempt; what it accepted before."""

    attempt: int
    elector: int
    accepted: Accepted | None
    signed: SignedPromise | None = None
    """checked, like the lock; only in a run that tolerates liars"""


@dataclass(frozen=True, kw_only=True)
class VoteArrived:
    """An elector voted for the entry of an attempt, with a signature that was checked."""

    attempt: int
    elector: int
    signature: bytes


@dataclass(frozen=True, kw_only=True)
class CommitArrived:
    """An elector committed the entry of an attempt, with a signature that was checked."""

    attempt: int
    elector: int
    signature: bytes


@dataclass(frozen=True, kw_only=True)
class Polled:
    """All electors have answered the question of an attempt, or will not."""

    attempt: int


Event = (
    Reported
    | Left
    | Unreachable
    | Probed
    | ElectorsProbed
    | LeaderAbsent
    | PartReduced
    | FetchEnded
    | Promised
    | VoteArrived
    | CommitArrived
    | Polled
)


# Actions


@dataclass(frozen=True, kw_only=True)
class AskPromises:
    """Ask all electors for promises."""

    attempt: int


@dataclass(frozen=True, kw_only=True)
class CloseGroup:
    """Bring a group to its members."""

    group: Group
    uplinks_mbit_s: Mapping[str, float]
    broke: frozenset[str] = frozenset()
    """peers that said that they would be ready by now, and have not reported"""


@dataclass(frozen=True, kw_only=True)
class TellGone:
    """Report to all members that one is gone, by its index."""

    member: int


@dataclass(frozen=True, kw_only=True)
class Readmit:
    """Bring the group to a member that has reported again, and what was ordered since."""

    peer: str
    orders: tuple[Repair, ...]
    gone: tuple[int, ...]
    """indices of members"""


@dataclass(frozen=True, kw_only=True)
class SendProposal:
    """Ask all electors for votes."""

    attempt: int
    entry: Entry
    deadline_s: float | None
    """for each vote; None before there is a group"""
    is_own: bool
    """whether the entry is an update of this leader's group"""
    justification: Justification
    """empty unless the run tolerates liars"""


@dataclass(frozen=True, kw_only=True)
class SendLock:
    """Ask all electors for commits."""

    attempt: int
    entry: Entry
    lock: Lock


@dataclass(frozen=True, kw_only=True)
class StopPoll:
    """Wait for no more answers to the last question."""


@dataclass(frozen=True, kw_only=True)
class Decide:
    """The position is decided."""

    entry: Entry
    certificate: Certificate


@dataclass(frozen=True, kw_only=True)
class Fail:
    """The term ends without a decision."""

    why: str


@dataclass(frozen=True, kw_only=True)
class ReportArrived:
    """Report an event to the operator."""

    level: Level
    notice: Notice


Action = (
    AskPromises
    | CloseGroup
    | TellGone
    | Readmit
    | Fetch
    | RepairPart
    | SendProposal
    | SendLock
    | StopPoll
    | Decide
    | Fail
    | ReportArrived
)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Results that follow from the run and the log at the moment of asking."""

    form: Callable[[Mapping[str, Ready]], Group]
    """the group of these members, in their order"""
    entry: Callable[[EntryKind, Sequence[Member], Sequence[Part], Collection[str]], Entry]
    """(kind, members, parts, electors that do not answer) -> the entry of the position"""
    cells: Cells
    """of the position's fragment"""
    grace_s: float
    electors: Electors = "members"
    """who votes; keepers bring no contributions, so a group waits for most trainers instead"""


class Round:
    """One term of a position that one process leads."""

    def __init__(
        self, place: Place, term: int, *, leads: Leads, rules: Rules, view: LeaderView
    ) -> None:
        """Begin.

        Raises:
            Refused: it is the position's turn, and another's to lead, or was led before.
        """
        self.place = place
        self.term = term
        self.state = RoundState.CALLED if term else RoundState.FORMING
        self.group: Group | None = None
        self.parts: Parts | None = None
        self.left_out: dict[str, str] = {}
        """peers that the group was closed without, and why"""
        self.expected: Mapping[str, float] | None = None
        """by peer, when it expects to be ready; None before all were asked once"""
        self._promised: dict[str, float] = {}
        """by peer, the earliest time at which it said that it would be ready"""
        self._silent: frozenset[str] = frozenset()
        self._leads = leads
        self._rules = rules
        self._reports: dict[str, Ready] = {}
        self._gone: set[str] = set()
        self._told_gone: set[str] = set()
        self._cut_off: dict[str, float | None] = {}
        """members that may return: until when, None before the next look at the clock"""
        self._returned: set[str] = set()
        self._electorate: tuple[Elector, ...] | None = None
        self._proposer: Proposer | None = None
        self._wanted_since = view.now
        self._first_at: float | None = None
        self._quorum_at: float | None = None
        self._reduce_by: float | None = None
        self._failure = ""
        self._absent = False
        self._proposed: Entry | None = None
        self._named: dict[int, bytes | None] = {}
        """the entry that each elector named in its first promise of this term"""
        self._tried: set[bytes] = set()
        """entries that this leader has proposed"""
        self._refused: set[bytes] = set()
        """entries that this leader adopted, and that got no votes"""
        self._is_own = False
        """whether the proposed entry is an update of this leader's group"""
        self._signatures: dict[int, bytes] = {}
        """of votes, then of commits"""
        self._polled = False
        if view.turn:
            self._fix(view)

    def electorate(self, view: LeaderView) -> tuple[Elector, ...]:
        """Return the electors of the position; before its turn, those if nothing changes."""
        return self._electorate if self._electorate is not None else view.electorate

    def is_live(self, peer: str) -> bool:
        """Return whether a peer has a session."""
        return peer in self._reports and peer not in self._gone

    @property
    def live(self) -> list[str]:
        """The peers that have a session, in the order of their first reports."""
        return [peer for peer in self._reports if peer not in self._gone]

    @property
    def reported(self) -> list[str]:
        """All peers that have reported."""
        return list(self._reports)

    @property
    def question(self) -> int | None:
        """The attempt about which electors are asked, if they are."""
        asking = self.state in (RoundState.PREPARING, RoundState.VOTING, RoundState.LOCKING)
        return self._proposer.attempt if asking and self._proposer is not None else None

    # events

    def receive(self, event: Event) -> list[Action]:
        """Take an event; what is to be done at once.

        Raises:
            Refused: a report after the group was closed.
        """
        match event:
            case Reported():
                return self._take_report(event)
            case Unreachable() if event.peer not in self._cut_off:
                self._gone.add(event.peer)
            case Left() if event.is_cut_off and self._may_return(event.peer):
                self._cut_off.setdefault(event.peer, None)
            case Left():
                return self._take_end(event.peer)
            case Probed():
                self.expected = event.ready_at
                for peer, at in event.ready_at.items():
                    self._promised[peer] = min(at, self._promised.get(peer, at))
            case ElectorsProbed():
                self._silent = event.silent
            case LeaderAbsent():
                self._absent = True
            case PartReduced() if self.parts is not None:
                self.parts.note(event.peer, event.done)
            case FetchEnded() if self.parts is not None:
                self.parts.fetched(event)
            case Promised() if self._is_asked(RoundState.PREPARING, event.attempt):
                if self._is_consistent(event):
                    self._voting().promise(event.elector, event.accepted, event.signed)
            case VoteArrived() if self._is_asked(RoundState.VOTING, event.attempt):
                self._signatures[event.elector] = event.signature
            case CommitArrived() if self._is_asked(RoundState.LOCKING, event.attempt):
                self._signatures[event.elector] = event.signature
            case Polled() if event.attempt == self.question:
                self._polled = True
            case _:
                pass  # late: of an earlier question, or of a group that is not there yet
        return []

    def _take_report(self, event: Reported) -> list[Action]:
        if self.group is not None:
            if self._may_return(event.peer) and event.ready.repeats(self._reports[event.peer]):
                return self._readmit(event.peer)
            if event.peer not in {member.peer_id for member in self.group.members}:
                self.left_out.setdefault(event.peer, "came after the group was closed")
            raise Refused(
                RefusalCode.CLOSED,
                f"the group of round {self.place.position + 1} is closed; "
                "your work stays in your next contribution",
            )
        self._reports[event.peer] = event.ready
        self._gone.discard(event.peer)
        return []

    def _may_return(self, peer: str) -> bool:
        """Return whether a member may report again: once, as it may have no reason."""
        is_member = self.group is not None and any(m.peer_id == peer for m in self.group.members)
        return is_member and self.is_live(peer) and peer not in self._returned

    def _readmit(self, peer: str) -> list[Action]:
        group, parts = self._closed()
        self._returned.add(peer)
        self._cut_off.pop(peer, None)
        gone = tuple(i for i, m in enumerate(group.members) if m.peer_id in self._told_gone)
        return [Readmit(peer=peer, orders=parts.orders, gone=gone)]

    def _end_absences(self, now: float) -> list[Action]:
        """Count members that did not return as gone."""
        actions: list[Action] = []
        for peer, until in list(self._cut_off.items()):
            if until is None:
                group, _ = self._closed()
                self._cut_off[peer] = now + RETURN_STALLS * group.stall_s
            elif now >= until:
                del self._cut_off[peer]
                actions += self._take_end(peer)
        return actions

    def _take_end(self, peer: str) -> list[Action]:
        """Owners stop waiting for streams that the member has not opened."""
        self._gone.add(peer)
        members = [m.peer_id for m in self.group.members] if self.group is not None else []
        if peer not in members or peer in self._told_gone or self.state in OVER:
            return []
        self._told_gone.add(peer)
        return [TellGone(member=members.index(peer))]

    def _is_asked(self, state: RoundState, attempt: int) -> bool:
        return self.state is state and attempt == self.question

    def _is_consistent(self, event: Promised) -> bool:
        """Return whether an elector names what it named before, or this leader has proposed since.

        After its first promise of the term it accepts nothing else. A liar that named another entry
        each time could end the term: none of them would get votes.
        """
        named = event.accepted.entry if event.accepted is not None else None
        return named == self._named.setdefault(event.elector, named) or named in self._tried

    # time

    def advance(self, view: LeaderView) -> list[Action]:
        """Look at the clock, the log and the parts in hand; what is to be done.

        Call it again after doing that, until nothing is left to do.

        Raises:
            Refused: the term is not this process's to lead, now that its turn has come.
        """
        if gone := self._end_absences(view.now):
            return gone
        is_passed = view.promised_term > self.term and not self._has_quorum(view)
        if self.state in WITHOUT_GROUP and is_passed:
            return self._fail(f"term {view.promised_term} is under way")
        if self._has_evicted(view):
            return self._fail("a member of the group was evicted")
        if view.control is not None and self._may_order(view):
            return self._propose_order(view.control, view)
        match self.state:
            case RoundState.CALLED:
                return self._wait_for_call(view)
            case RoundState.PREPARING:
                return self._count_promises(view)
            case RoundState.FORMING:
                return self._form(view)
            case RoundState.REDUCING:
                return self._reduce(view)
            case RoundState.REDUCED:
                return self._propose_own(view) if view.turn else []
            case RoundState.VOTING:
                return self._count_votes(view)
            case RoundState.LOCKING:
                return self._count_commits()
            case RoundState.DECIDED | RoundState.FAILED:
                return []

    def _fix(self, view: LeaderView) -> Proposer:
        """Fix what the term is about, once: its electorate and its first attempt."""
        if self._proposer is None:
            attempt = self.term * TERM
            self._proposer = self._leads.begin(self.place, attempt, view.electorate)
            self._electorate = view.electorate
        return self._proposer

    def _voting(self) -> Proposer:
        if self._proposer is None:
            raise RuntimeError("expected a ballot to have begun")
        return self._proposer

    def _wait_for_call(self, view: LeaderView) -> list[Action]:
        """One peer with a bad link to a healthy leader, or one liar, must not end that round."""
        called_by = self._wanted_since + ALONE_GRACES * self._rules.grace_s
        round_by = view.opened_at + CALLED_ALONE_ROUNDS * view.last_s
        overdue = view.now > max(called_by, round_by)
        if not (overdue or self._absent or self._has_quorum(view)):
            return []
        self._fix(view)
        return self._ask_promises()

    def _ask_promises(self) -> list[Action]:
        self.state, self._polled = RoundState.PREPARING, False
        return [AskPromises(attempt=self._voting().attempt)]

    def _count_promises(self, view: LeaderView) -> list[Action]:
        proposer = self._voting()
        if not proposer.free:
            return self._expect_more(proposer.promises, f"promised attempt {proposer.attempt}")
        while (adopted := proposer.adopted()) is not None and adopted in self._refused:
            if proposer.may_be_decided(adopted):
                why = "an entry that may be decided got no votes"
                return self._fail(why) if self._polled else []
            proposer.pass_over()
        if adopted is not None:
            return [StopPoll(), *self._propose(Entry.decode(adopted), is_own=False)]
        if view.control is not None:
            return [StopPoll(), *self._propose_order(view.control, view)]
        if self.group is None:
            self.state = RoundState.FORMING
            return [StopPoll()]
        return [StopPoll(), *self._propose_own(view)]

    def _expect_more(self, answers: Mapping[int, object], did: str) -> list[Action]:
        """Wait for a quorum unless all electors are through."""
        if not self._polled:
            return []
        electors = len(self._electorate or ())
        return self._fail(f"{len(answers)} of {electors} acceptors {did}, expected a quorum")

    def _fail(self, why: str) -> list[Action]:
        self.state = RoundState.FAILED
        return [Fail(why=why)]

    # the group

    def _has_evicted(self, view: LeaderView) -> bool:
        """Return whether a group that was closed before the turn has a member that is out now.

        Nobody votes for an entry with such a member, and whoever proposes it breaks a rule.
        """
        if self.group is None or self.state not in BEFORE_PROPOSAL:
            return False
        return any(member.peer_id in view.evicted for member in self.group.members)

    def _has_quorum(self, view: LeaderView) -> bool:
        """Return whether a quorum of the electors is ready, or with keepers, of the trainers."""
        if self._rules.electors == "keepers":
            trainers = self.expected or {}
            return 2 * len(trainers.keys() & set(self.live)) > len(trainers) > 0
        live, electorate = set(self.live), self.electorate(view)
        return is_quorum(
            [i for i, e in enumerate(electorate) if e.peer_id in live], len(electorate)
        )

    def _form(self, view: LeaderView) -> list[Action]:
        live = [peer for peer in self.live if peer not in view.evicted]
        self._first_at = (self._first_at or view.now) if live else None
        self._quorum_at = (self._quorum_at or view.now) if self._has_quorum(view) else None
        if self.expected is None or not live:
            return []
        electors = {elector.peer_id for elector in self.electorate(view)}
        expected = {p: at for p, at in self.expected.items() if p not in view.evicted}
        rendezvous = Rendezvous(
            ready=live,
            expected=expected,
            awaited=set(expected) if self._rules.electors == "keepers" else electors,
            opened_at=view.opened_at if view.turn else math.inf,
            last_s=view.last_s,
            first_ready_at=self._first_at if self._first_at is not None else view.now,
            quorum_ready_at=self._quorum_at,
            grace_s=self._rules.grace_s,
            alone_s=ALONE_GRACES * self._rules.grace_s,
        )
        if close_decision(rendezvous, view.now) is Close.WAIT:
            return []
        ready = {peer: self._reports[peer] for peer in live}
        self.group = self._rules.form(ready)
        self.parts = Parts(self.group, self._rules.cells, now=view.now)
        self.left_out = {peer: "not ready in time" for peer in expected if peer not in ready}
        self.state = RoundState.REDUCING
        uplinks = {peer: one.report.uplink_mbit_s for peer, one in ready.items()}
        due = {peer for peer, at in self._promised.items() if at <= view.now}
        broke = frozenset(due & self.left_out.keys())
        return [CloseGroup(group=self.group, uplinks_mbit_s=uplinks, broke=broke)]

    # the reduction

    def _closed(self) -> tuple[Group, Parts]:
        if self.group is None or self.parts is None:
            raise RuntimeError("expected the group to be closed")
        return self.group, self.parts

    def _reduce(self, view: LeaderView) -> list[Action]:
        """Repair what is lost, until all parts are done and here or coming, or it is too late."""
        group, parts = self._closed()
        if self._reduce_by is None:
            self._reduce_by = view.now + group.deadline_s + LATE_STALLS * group.stall_s
        if not any(member.weight > 0 for member in group.members):
            return self._end_reduction(view, "no member contributed work with weight above 0")
        actions: list[Action] = list(parts.look_after(view, self.is_live))
        if parts.settled(view, self.is_live):
            return [*actions, *self._end_reduction(view, "")]
        if view.now > self._reduce_by:
            return [*actions, *self._end_reduction(view, "no part could be reduced in time")]
        if not self.live:
            return [*actions, *self._end_reduction(view, "every member left")]
        return actions

    def _end_reduction(self, view: LeaderView, failure: str) -> list[Action]:
        self._failure = failure
        if self._proposer is not None and self._proposer.chosen is not None:
            return self._try_again()
        if view.turn:
            return self._propose_own(view)
        if failure:
            return self._fail(f"reduced early: {failure}")
        self.state = RoundState.REDUCED
        return []

    # votes

    def _try_again(self) -> list[Action]:
        """Begin the term's next attempt, for an entry instead of one that got no votes."""
        attempt = self._voting().attempt + 1
        if term_of(attempt) != self.term:
            return self._fail(f"{TERM} proposals got no votes")
        self._proposer = self._leads.begin(self.place, attempt, self._electorate or ())
        return self._ask_promises()

    def _pass_over(self) -> list[Action]:
        """Ask for promises again if an entry that was accepted before gets no more votes.

        An elector that it drops may have come back, or a liar alone may have accepted it. The
        promises of all, or of most, show that no quorum did; the choice is free then.
        """
        adopted = self._voting().adopted()
        if adopted is None or self._leads.trust == "byzantine":
            return []
        self._refused.add(adopted)
        return self._try_again()

    def _may_order(self, view: LeaderView) -> bool:
        """Return whether the choice is still open; what is reduced will be offered again."""
        is_open = self._proposer is None or self._proposer.chosen is None
        return view.turn and self.state in BEFORE_PROPOSAL and is_open

    def _propose_order(self, control: Entry, view: LeaderView) -> list[Action]:
        self._fix(view)
        return self._propose(control, is_own=False)

    def _propose_own(self, view: LeaderView) -> list[Action]:
        """Propose the group's update; NULL if it cannot be reduced."""
        if not view.takes_updates:
            return self._fail("the run is paused, or has ended")
        self._fix(view)
        group, parts = self._closed()
        if not self._failure:
            dropped = frozenset(peer for peer in self._silent if not self.is_live(peer))
            update = self._rules.entry("update", group.members, parts.logged(), dropped)
            return self._propose(update, is_own=True)
        given_up = notices.given_up(round=self.place.position + 1, reason=self._failure)
        null = self._rules.entry("null", (), (), frozenset())
        return [ReportArrived(level="error", notice=given_up), *self._propose(null, is_own=False)]

    def _propose(self, entry: Entry, *, is_own: bool) -> list[Action]:
        proposer = self._voting()
        self.state, self._polled = RoundState.VOTING, False
        self._signatures, self._is_own = {}, is_own
        chosen = proposer.choose(entry.encode())
        self._proposed = Entry.decode(chosen)
        self._tried.add(chosen)
        deadline_s = self.group.deadline_s if self.group is not None else None
        proposal = SendProposal(
            attempt=proposer.attempt,
            entry=self._proposed,
            deadline_s=deadline_s,
            is_own=is_own,
            justification=proposer.justification,
        )
        return [proposal]

    def _signed_by_quorum(self) -> tuple[Vote, ...]:
        """Return the signatures for what was asked last, once they are a quorum's."""
        electors = len(self._electorate or ())
        if not is_quorum(list(self._signatures), electors, self._leads.trust):
            return ()
        return tuple(Vote(elector=i, signature=s) for i, s in sorted(self._signatures.items()))

    def _decide(self, entry: Entry, votes: tuple[Vote, ...]) -> list[Action]:
        self.state = RoundState.DECIDED
        certificate = Certificate(attempt=self._voting().attempt, votes=votes)
        return [StopPoll(), Decide(entry=entry, certificate=certificate)]

    def _count_commits(self) -> list[Action]:
        votes = self._signed_by_quorum()
        if votes and self._proposed is not None:
            return self._decide(self._proposed, votes)
        return self._expect_more(self._signatures, "committed")

    def _lock(self, entry: Entry, votes: tuple[Vote, ...]) -> list[Action]:
        self.state, self._polled = RoundState.LOCKING, False
        self._signatures = {}
        lock = Lock(attempt=self._voting().attempt, votes=votes)
        return [StopPoll(), SendLock(attempt=lock.attempt, entry=entry, lock=lock)]

    def _count_votes(self, view: LeaderView) -> list[Action]:
        votes = self._signed_by_quorum()
        if votes and self._proposed is not None:
            is_lock = self._leads.trust == "byzantine"
            return (self._lock if is_lock else self._decide)(self._proposed, votes)
        if self._polled and not self._loses_part(view):
            return self._pass_over() or self._expect_more(self._signatures, "voted")
        if not self._is_own:
            return []
        _, parts = self._closed()
        actions: list[Action] = list(parts.fetch_missing(view, self.is_live))
        if parts.lost(view, self.is_live):
            # Otherwise electors would wait for its bytes until their deadlines.
            self.state = RoundState.REDUCING
            actions.append(StopPoll())
        return actions

    def _loses_part(self, view: LeaderView) -> bool:
        """Return whether a part of this leader's entry is on the way: it may never come.

        Electors may know before this leader that nobody has it, and refuse all at once.
        """
        return self._is_own and not self._closed()[1].held(view)
