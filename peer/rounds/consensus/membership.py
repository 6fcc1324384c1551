"""The terms of one position as a member goes through them: a machine without sockets.

A contribution is offered at one position. Its member reports to the leader of a term, waits for the
group, and reduces, until the position is decided; a term that fails leads to the next one. A
position that is not decided next is reduced early, by the leader that its first term will have if
the electorate stays as it is. If an entry in between names another leader, or the early reduction
failed, the same frozen contribution begins anew: nothing was decided with it.

Events and the time go in, actions come out; `flight.py` owns the session and the timers. See
`round.py` for the leader's side.

    SEEKING     no electorate is known yet
    REPORTED    a session with the leader, or on the way to one
    REDUCING    the leader's group came
    LATE        this peer is not in the group, or too early: it waits for a decision
    PAUSED      all electors have led in vain: a moment's rest
    OVER        the position is decided, or its epoch has ended
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum

from atoll.coordinator.run.levels import Level
from atoll.coordinator.run.phases import RoundPhase
from atoll.dht.identity import short
from atoll.dht.refusals import RefusalCode
from atoll.optim.log.entry import Elector
from atoll.peer.rounds.consensus.ballot import Place, leader_of

CLOSED_STALLS = 20  # how long a peer that came too late waits for the decision

WAITS_FOR_DECISION = frozenset({RefusalCode.CLOSED, RefusalCode.BARRED})
"""Refusals after which the round goes on without this peer."""


class MemberState(Enum):
    """The states of a member; the module's docstring describes each."""

    SEEKING = "seeking"
    REPORTED = "reported"
    REDUCING = "reducing"
    LATE = "late"
    PAUSED = "paused"
    OVER = "over"


@dataclass(frozen=True, kw_only=True)
class MemberView:
    """A member's view of clock and log; `now` is in seconds."""

    now: float
    place: Place
    """of the entry that is decided next"""
    electorate: tuple[Elector, ...]
    term: int
    """the term below which this elector accepts nothing at that place"""


# Events


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """The leader's group came."""


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The session with the leader has ended."""

    why: str
    code: RefusalCode | None = None
    """of a refusal; None: the leader is lost, or broke the rules"""
    reason: str = ""
    """what the leader gave as the reason of its refusal"""
    key: Hashable = None
    """what is alike in such failures"""


# Actions


@dataclass(frozen=True, kw_only=True)
class Join:
    """Report to a leader, and take part."""

    leader: str
    term: int


@dataclass(frozen=True, kw_only=True)
class Leave:
    """End the session with the leader."""


@dataclass(frozen=True, kw_only=True)
class NoteTurn:
    """The position is the one that is decided next."""


@dataclass(frozen=True, kw_only=True)
class ReportTurn:
    """Report to the leader again, that the turn of an early position has come."""

    term: int


@dataclass(frozen=True, kw_only=True)
class FetchEntries:
    """Look for what is missing, and return when that was done."""


@dataclass(frozen=True, kw_only=True)
class CountFailure:
    """A term failed; others may know of a decision."""


@dataclass(frozen=True, kw_only=True)
class Show:
    """Show a new phase."""

    phase: RoundPhase


@dataclass(frozen=True, kw_only=True)
class SendReport:
    """Report an event to the operator."""

    level: Level
    text: str
    key: Hashable = None
    """what repeats have in common; None: their text"""


Action = Join | Leave | NoteTurn | ReportTurn | FetchEntries | CountFailure | Show | SendReport


class MemberRound:
    """One contribution's way to the decision of its position."""

    def __init__(self, place: Place, *, stall_s: float) -> None:
        """Nothing is reported yet."""
        self.place = place
        self.state = MemberState.SEEKING
        self.phase = RoundPhase.WAIT
        self.wake_at: float | None = None
        """when it wants to be looked at, if nothing happens before"""
        self._stall_s = stall_s
        self._term = 0
        self._leader: Elector | None = None
        self._electors = 0
        """of the electorate that named the leader"""
        self._was_early = False
        """whether the leader was joined before the turn"""
        self._has_turn = False
        """whether the turn has come since"""
        self._has_group = False
        """whether the contribution was in a group, of this session or an earlier one"""
        self._failure: Failed | None = None
        self._late_since: int | None = None
        """the position at which an early failure waits for the next entry"""

    def receive(self, event: Grouped | Failed) -> list[Action]:
        """Take an event; what is to be done at once."""
        if self.state not in (MemberState.REPORTED, MemberState.REDUCING):
            return []  # of a session that has been given up
        if isinstance(event, Failed):
            self._failure = event
            return []
        self.state, self._has_group = MemberState.REDUCING, True
        return self._show(RoundPhase.REDUCE)

    def advance(self, view: MemberView) -> list[Action]:
        """Look at the clock and the log; what is to be done.

        Call it again after doing that, until nothing is left to do.
        """
        in_session = self.state in (MemberState.REPORTED, MemberState.REDUCING)
        if self._is_over(view):
            return self._end()
        match self.state:
            case MemberState.SEEKING:
                return self._join(view)
            case MemberState.LATE | MemberState.PAUSED:
                return self._rest(view)
        if in_session and self._failure is not None:
            return self._fail(self._failure, view)
        return self._watch(view) if in_session else []

    def _is_over(self, view: MemberView) -> bool:
        return view.place.epoch != self.place.epoch or view.place > self.place

    def _is_early(self, view: MemberView) -> bool:
        return view.place < self.place

    def _end(self) -> list[Action]:
        if self.state is MemberState.OVER:
            return []
        self.state, self.wake_at = MemberState.OVER, None
        return [Leave()]

    def _show(self, phase: RoundPhase) -> list[Action]:
        self.phase = phase
        return [Show(phase=phase)]

    def _join(self, view: MemberView) -> list[Action]:
        """Report to the leader of the term; at the turn, of one that may still be decided."""
        if not view.electorate:
            return []
        self._was_early = self._is_early(view)
        if not self._was_early:
            self._term = max(self._term, view.term)
        self._leader = leader_of(view.electorate, self.place.position, self._term)
        self._electors = len(view.electorate)
        self._has_turn, self._failure, self.wake_at = False, None, None
        self.state = MemberState.REPORTED
        join = Join(leader=self._leader.peer_id, term=self._term)
        return [*self._show(RoundPhase.WAIT), join]

    def _watch(self, view: MemberView) -> list[Action]:
        """Leave the leader if it is the wrong one; at the turn, report to the right one."""
        if self._is_early(view):
            if view.electorate and not self._lost_lead(view):
                return []
            return self._give_up(view)
        if self._has_turn:
            return []
        if self._was_early and (not view.electorate or self._lost_lead(view)):
            return self._give_up(view)
        self._has_turn = True
        actions: list[Action] = [NoteTurn(), Show(phase=self.phase)]
        return [*actions, ReportTurn(term=self._term)] if self._was_early else actions

    def _lost_lead(self, view: MemberView) -> bool:
        """Return whether an entry gave the term to another."""
        electorate = view.electorate
        return bool(electorate) and self._leader != leader_of(
            electorate, self.place.position, self._term
        )

    def _give_up(self, view: MemberView) -> list[Action]:
        """Another elector leads the term now: begin anew with it."""
        self._seek()
        if not self._has_group or self._leader is None or not view.electorate:
            return [Leave()]
        text = (
            f"round {self.place.position + 1}: what was reduced early is reduced again: "
            f"{short(self._leader.peer_id)} does not lead it"
        )
        return [Leave(), SendReport(level="info", text=text)]

    def _seek(self) -> None:
        self.state, self.wake_at = MemberState.SEEKING, None

    # failures

    def _fail(self, failure: Failed, view: MemberView) -> list[Action]:
        self._failure = None
        if self._is_early(view):
            return self._fail_early(failure, view)
        if self._lost_lead(view):  # it was a wrong leader that failed
            self._seek()
            return [Leave()]
        position = self.place.position
        if failure.code in WAITS_FOR_DECISION:
            self.state, self._late_since = MemberState.LATE, None
            self.wake_at = view.now + CLOSED_STALLS * self._stall_s
            text = f"round {position + 1}: {failure.reason}"
            return [*self._show(RoundPhase.LATE), SendReport(level="info", text=text)]
        if failure.code == RefusalCode.DECIDED:
            self._try_next()
            return [FetchEntries()]
        if failure.code is not None and self._leader is not None:
            name = self._leader.peer_id
            text = f"round {position + 1}: {short(name)} refused: {failure.why}"
            key = "leader refused", position, name, failure.key
            self._try_next()
            return [SendReport(level="warning", text=text, key=key)]
        text = f"round {position + 1}, term {self._term}: {failure.why}"
        report = SendReport(level="warning", text=text, key=("term failed", position, failure.key))
        self._try_next()
        return [CountFailure(), report]

    def _fail_early(self, failure: Failed, view: MemberView) -> list[Action]:
        """Wait for the next entry: it may name another leader, or bring the turn."""
        self.state, self.wake_at = MemberState.LATE, None
        self._late_since = view.place.position
        show = self._show(RoundPhase.LATE)
        return [*show, FetchEntries()] if failure.code == RefusalCode.DECIDED else show

    def _try_next(self) -> None:
        """The next leader's turn; after the last one's, a stall later."""
        self._seek()
        self._term += 1
        if self._term % self._electors == 0:
            self.state = MemberState.PAUSED

    def _rest(self, view: MemberView) -> list[Action]:
        if self.state is MemberState.PAUSED and self.wake_at is None:
            self.wake_at = view.now + self._stall_s
        if self.wake_at is None:  # late for an early round
            over = self._late_since is None or view.place.position > self._late_since
        else:
            over = view.now >= self.wake_at
        if not over:
            return []
        if self.state is MemberState.LATE and self.wake_at is not None:
            self._try_next()
            return self.advance(view)
        self._seek()
        return self._join(view)
