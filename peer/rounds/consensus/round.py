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

The ballots are those of `ballots.py`, the parts those of `parts.py`, events and actions those of
`round_events.py`; the rules of groups are those of `policies.py`, of electorates those of
`atoll.optim.log.entry`. `test_round_check.py` drives this class through every order of messages,
crashes and losses within a bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

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
    Vote,
    is_quorum,
)
from atoll.optim.log.locks import Lock
from atoll.optim.reduction.cells import Cells
from atoll.peer.rounds import notices
from atoll.peer.rounds.consensus.ballots import TERM, Leads, Place, Proposer, first_attempt, term_of
from atoll.peer.rounds.consensus.parts import Parts
from atoll.peer.rounds.consensus.round_events import (
    Action,
    AskPromises,
    CloseGroup,
    CommitArrived,
    Decide,
    ElectorsProbed,
    Event,
    Fail,
    FetchEnded,
    LeaderAbsent,
    LeaderView,
    Left,
    PartReduced,
    Polled,
    Probed,
    Promised,
    Readmit,
    ReportArrived,
    Reported,
    SendLock,
    SendProposal,
    StopPoll,
    TellGone,
    Unreachable,
    VoteArrived,
)
from atoll.peer.rounds.messages import Group, Ready
from atoll.peer.rounds.policies import ALONE_GRACES, Close, Rendezvous, close_decision

# A leader that no quorum calls lets a position take so many times as long as the last one: its
# callers may lie. They wait once themselves before they call, and then longer than the second time.
CALLED_ALONE_ROUNDS = 2
# A member that a relay has cut off reports again at once, through another relay: in half a second,
# or a stall more if the relay gave no sign of its end. An owner that is repaired meanwhile waits as
# long for its stream.
RETURN_STALLS = 2
LATE_STALLS = 2  # past the group's deadline: owners may finish at it, and their word takes a moment


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
        self._behind: frozenset[str] = frozenset()
        """those of them for which only a group of one waits"""
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
                self.expected, self._behind = event.ready_at, event.behind
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
            attempt = first_attempt(self.term)
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
        live, electorate = set(self.live), self.electorate(view)
        if self._rules.electors == "keepers":
            trainers = set(self.expected or ()) - (self._behind - live)
            return 2 * len(trainers & live) > len(trainers) > 0
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
        late = self._behind if len(live) > 1 else ()  # the last probe may be older than a report
        awaited = [p for p in self.expected if p not in view.evicted and p not in late]
        expected = {p: self.expected[p] for p in awaited}
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
