"""A member's way through the terms of one position: a machine without sockets, and its driver.

A contribution is offered at one position. Its member reports to the leader of a term, waits for the
group, and reduces, until the position is decided; a term that fails leads to the next one. A
position that is not decided next is reduced early, by the leader that its first term will have if
the electorate stays as it is. If an entry in between names another leader, or the early reduction
failed, the same frozen contribution starts again: nothing was decided with it.

`MemberRound` is the machine: events and the time go in, actions come out, and it decides which
leader this peer reports to, and when. A `Flight` does what it asks for: it owns the session with
that leader, and the timers. `join` is one such session. See `round.py` for the leader's side.

    SEEKING     no electorate is known yet
    REPORTED    a session with the leader, or on the way to one
    REDUCING    the leader's group came
    LATE        this peer is not in the group, or too early: it waits for a decision
    PAUSED      all electors have led without success: a short pause
    OVER        the position is decided, or its epoch has ended
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Protocol

from atoll.coordinator.run.levels import Level
from atoll.coordinator.run.notice import Notice
from atoll.coordinator.run.outcome import Outcome
from atoll.coordinator.run.phases import RoundPhase
from atoll.dht.refusals import RefusalCode
from atoll.dht.tasks import beside, end, race
from atoll.dht.transport import RELAY_LOST, Refused, Stream, TransportError
from atoll.optim.log.entry import Elector, MalformedRecord
from atoll.optim.reduction.cells import Bytes
from atoll.optim.reduction.contribution import Offer
from atoll.peer.rounds import notices
from atoll.peer.rounds.allreduce.exchange import Exchange, begin_upfront, exchange_of
from atoll.peer.rounds.consensus.ballots import Place, leader_of
from atoll.peer.rounds.consensus.dissemination import Seat, group_of, own_deadline_s
from atoll.peer.rounds.consensus.leading import Leading
from atoll.peer.rounds.consensus.voter import Voter
from atoll.peer.rounds.context import AttemptFailed, Context, Reporting, failure_key
from atoll.peer.rounds.messages import (
    ALIVE,
    GONE,
    GROUP,
    PART_DONE,
    PROTOCOL,
    READY,
    REPAIR,
    SEATED,
    Closed,
    Gone,
    Group,
    PartDone,
    Ready,
    Repair,
    Report,
    Seated,
    report_payload,
    tagged,
)
from atoll.peer.rounds.policies import decision_patience_s, group_patience_s

CONNECT_STALLS = 3  # a first contact with a leader may have to dial
# How long a peer that came too late waits for the decision before it reports again. The decision
# ends the wait; this is for a leader that died after it closed its group.
CLOSED_STALLS = 20

OTHER_RELEASE = (
    ": it runs another release, whose rounds cannot take this peer's work; install the "
    "organiser's version of Atoll"
)
WAITS_FOR_DECISION = frozenset({RefusalCode.CLOSED, RefusalCode.BARRED})
"""Refusals after which the round goes on without this peer."""

MISSED = {RefusalCode.CLOSED: Outcome.LATE, RefusalCode.BARRED: Outcome.LEFT_OUT}
"""The outcome of this peer's work after such a refusal."""


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
    patience_s: Callable[[int], float] = lambda term: math.inf
    """by term, how long to wait for its group from the turn on"""
    skipped: Collection[int] = ()
    """terms whose leaders have failed of late: this member reports to none of them"""


# Events


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """The leader's group came."""

    within_s: float = math.inf
    """how long to wait for its decision, by this member's own account"""


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
    notice: Notice
    key: Hashable = None
    """what repeats have in common; None: their text"""


Action = Join | Leave | NoteTurn | ReportTurn | FetchEntries | CountFailure | Show | SendReport


class MemberRound:
    """One contribution's way to the decision of its position."""

    def __init__(self, place: Place, *, stall_s: float) -> None:
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
        self._turn_at = 0.0
        """when this session's turn came: at its beginning, or later if it began early"""
        self._within_s: float | None = None
        """how long to wait for the group's decision; None: there is no group"""

    def receive(self, event: Grouped | Failed) -> list[Action]:
        """Take an event; what is to be done at once."""
        if self.state not in (MemberState.REPORTED, MemberState.REDUCING):
            return []  # of a session that has been given up
        if isinstance(event, Failed):
            self._failure = event
            return []
        self.state, self._has_group = MemberState.REDUCING, True
        self._within_s, self.wake_at = event.within_s, None
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
        while self._term in view.skipped:
            if self._was_early:
                return self._await_entry(view)  # of later terms nothing is reduced early
            self._term += 1
        self._leader = leader_of(view.electorate, self.place.position, self._term)
        self._electors = len(view.electorate)
        self._has_turn, self._failure, self.wake_at = False, None, None
        self.state, self._within_s = MemberState.REPORTED, None
        join = Join(leader=self._leader.peer_id, term=self._term)
        return [*self._show(RoundPhase.WAIT), join]

    def _watch(self, view: MemberView) -> list[Action]:
        """Leave the leader if it is the wrong one; at the turn, report to the right one."""
        if self._is_early(view):
            if view.electorate and not self._lost_lead(view):
                return []
            return self._give_up(view)
        if self._has_turn:
            return self._look_at_clock(view)
        if self._was_early and (not view.electorate or self._lost_lead(view)):
            return self._give_up(view)
        self._has_turn, self._turn_at = True, view.now
        actions: list[Action] = [NoteTurn(), Show(phase=self.phase)]
        return [*actions, ReportTurn(term=self._term)] if self._was_early else actions

    def _look_at_clock(self, view: MemberView) -> list[Action]:
        """Give up a leader of which nothing comes, whoever sends signs of life.

        Both deadlines start again with the group: a leader that closes one late was alive.
        """
        if self._within_s is None:
            limit_s, missing = view.patience_s(self._term), "group"
        else:
            limit_s, missing = self._within_s, "decision"
        if limit_s == math.inf:
            return []
        if self.wake_at is None:
            since = self._turn_at if self._within_s is None else view.now
            self.wake_at = since + limit_s
        if view.now < self.wake_at:
            return []
        failed = Failed(why=f"no {missing} within {limit_s:.0f} s", key="nothing came")
        return [Leave(), *self._fail(failed, view)]

    def _lost_lead(self, view: MemberView) -> bool:
        """Return whether an entry gave the term to another."""
        electorate = view.electorate
        return bool(electorate) and self._leader != leader_of(
            electorate, self.place.position, self._term
        )

    def _give_up(self, view: MemberView) -> list[Action]:
        """Start again: another elector leads the term now."""
        self._seek()
        if not self._has_group or self._leader is None or not view.electorate:
            return [Leave()]
        again = notices.reduced_again(round=self.place.position + 1, peer=self._leader.peer_id)
        return [Leave(), SendReport(level="info", notice=again)]

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
            closed = notices.closed_before(round=position + 1, reason=failure.reason)
            return [*self._show(RoundPhase.LATE), SendReport(level="info", notice=closed)]
        if failure.code == RefusalCode.DECIDED:
            self._try_next()
            return [FetchEntries()]
        if failure.code is not None and self._leader is not None:
            name = self._leader.peer_id
            advice = OTHER_RELEASE if failure.code == RefusalCode.PROTOCOL else ""
            refused = notices.leader_refused(
                advice, round=position + 1, peer=name, reason=failure.why
            )
            key = "leader refused", position, name, failure.key
            self._try_next()
            return [SendReport(level="warning", notice=refused, key=key)]
        failed = notices.term_failed(round=position + 1, term=self._term, reason=failure.why)
        again_as = "term failed", position, failure.key
        report = SendReport(level="warning", notice=failed, key=again_as)
        self._try_next()
        return [CountFailure(), report]

    def _fail_early(self, failure: Failed, view: MemberView) -> list[Action]:
        show = self._await_entry(view)
        return [*show, FetchEntries()] if failure.code == RefusalCode.DECIDED else show

    def _await_entry(self, view: MemberView) -> list[Action]:
        """Wait for the next entry: it may name another leader, or bring the turn."""
        self.state, self.wake_at = MemberState.LATE, None
        self._late_since = view.place.position
        return self._show(RoundPhase.LATE)

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


async def join(
    ctx: Context,
    leader: str,
    open_line: Callable[[], Awaitable[Stream]],
    ready: Ready,
    codes: Sequence[Bytes],
    on_exchange: Callable[[Exchange], None],
    ended: bytes = b"",
) -> None:
    """Take part until the position is decided (the caller cancels) or the leader is lost.

    If a relay to the leader is lost, report once more through another: the leader may live, and a
    promise to the next one would take this peer's vote from it. What is under way with the owners
    of parts continues.

    Args:
        ctx: this peer's.
        leader: its PeerID.
        open_line: opens a stream to the leader.
        ready: the report.
        codes: one frame for each cell of the position.
        on_exchange: takes the exchange of the leader's group.
        ended: the digest of a group whose exchange has ended here, with which none begins again:
            its streams are over, and an owner would count its own chunks alone.

    Raises:
        AttemptFailed: the leader died, fell silent, or broke the rules.
        Refused: the leader said no, and why.
    """

    def begin(group: Group) -> Exchange:
        if group.digest == ended:
            raise Refused(RefusalCode.CLOSED, "this peer's part in the group is over")
        exchange = exchange_of(ctx, group, codes if group_weight(ctx, group) else (), upfront)
        on_exchange(exchange)
        return exchange

    line = _Line(ctx, open_line, ready)
    await line.open()
    upfront = begin_upfront(ctx, ready, codes)
    try:
        async with Seat(ctx, ready, leader, begin) as seat:
            try:
                await line.hold(seat)
            except RELAY_LOST:
                await line.open()
                await line.hold(seat)
    except MalformedRecord as error:
        raise AttemptFailed(f"invalid message from the leader: {error}") from error
    finally:
        if upfront is not None:
            await upfront.close()
        await line.close()


def group_weight(ctx: Context, group: Group) -> float:
    """The weight that the leader gave to this peer."""
    return next((m.weight for m in group.members if m.peer_id == ctx.me.peer_id), 0.0)


class _Line:
    """A member's line to its leader: one stream, or another after a relay was lost."""

    def __init__(
        self, ctx: Context, open_stream: Callable[[], Awaitable[Stream]], ready: Ready
    ) -> None:
        self._ctx = ctx
        self._open_stream = open_stream
        self._ready = ready
        self._stream: Stream | None = None
        self._reported: list[PartDone] = []

    async def open(self) -> None:
        """Report to the leader on a new stream."""
        await self.close()
        self._stream = await self._open_stream()
        with suppress(*RELAY_LOST):  # `hold` learns of it too
            await self._send(READY, self._ready)

    async def hold(self, seat: Seat) -> None:
        """Follow the leader's orders, and report finished parts, until the line is lost."""
        async with beside(self._send_alive(), self._send_reports(seat)):
            await self._follow_orders(seat)

    async def close(self) -> None:
        """Close the stream."""
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.close()

    @property
    def _open(self) -> Stream:
        if self._stream is None:
            raise RuntimeError("expected an open line to the leader")
        return self._stream

    async def _send(self, kind: bytes, record: Ready | Seated | PartDone) -> None:
        await self._open.send(tagged(kind, record), timeout_s=self._ctx.settings.stall_s)

    async def _follow_orders(self, seat: Seat) -> None:
        while True:
            message = await self._open.recv(timeout_s=self._ctx.settings.stall_s)
            if message is None:
                raise AttemptFailed("the leader ended the session before the position was decided")
            if message[:1] == GROUP:
                closed = Closed.decode(message[1:])
                seat.take(closed, group_of(closed), passed=False)
            elif message[:1] == REPAIR:
                seat.order(Repair.decode(message[1:]))
            elif message[:1] == GONE:
                seat.order(Gone.decode(message[1:]))

    async def _send_reports(self, seat: Seat) -> None:
        exchange = await seat.begun()
        if seat.was_passed:
            await self._send(SEATED, Seated(group=exchange.digest))
        for done in self._reported:  # what a lost line carried may have been lost with it
            await self._send(PART_DONE, done)
        while True:
            done = await exchange.reports.get()
            self._reported.append(done)
            await self._send(PART_DONE, done)

    async def _send_alive(self) -> None:
        while True:
            await asyncio.sleep(self._ctx.alive_s)
            await self._open.send(ALIVE, timeout_s=self._ctx.settings.stall_s)


@dataclass(frozen=True, kw_only=True)
class OfferedWindow:
    """A contribution as it is offered at the next position of its fragment."""

    number: int
    """counts the offers of this process, so that a settlement finds its own"""
    fragment: int = 0
    offer: Offer
    tokens: int
    steps: int
    loss: float | None
    codec: str | None = None
    """that an order has set and it is encoded in; None: the spec's"""
    units: int = 0
    """of this peer's lease that it has done"""


@dataclass(kw_only=True, eq=False)
class Pending:
    """The contribution that waits for a decision."""

    window: OfferedWindow
    since: float
    turn_at: float | None = None
    """when its position was the next to be decided; None before that"""
    exchange: Exchange | None = None
    failed: Failed | None = None
    """how the last session with a leader ended; None while there is a group, or before"""
    reported: dict[str, Reporting] = field(default_factory=dict)
    """by leader, the newest session with each; only the last one can go on"""

    def end_sessions(self) -> None:
        """Note that no session with a leader goes on."""
        for leader, reported in self.reported.items():
            self.reported[leader] = replace(reported, has_ended=True)

    def reported_in(self, term: int) -> Reporting | None:
        """Return the session with the leader of a term, if it was the newest with that one."""
        return next((each for each in self.reported.values() if each.term == term), None)

    @property
    def missed(self) -> Outcome:
        """Why a group that was decided would be without this contribution."""
        if self.failed is None:
            return Outcome.NOT_IN_GROUP if self.exchange is None else Outcome.LEFT_OUT
        if self.failed.code is None:
            return Outcome.LEADER_LOST
        return MISSED.get(self.failed.code, Outcome.NOT_IN_GROUP)


class Host(Protocol):
    """The part of the engine that a flight uses; the engine imports flights, not the reverse."""

    voter: Voter
    leading: Leading

    def show(self, flight: Flight) -> None:
        """Take a change of the flight's phase."""
        ...

    def count_failure(self) -> None:
        """A term failed."""
        ...

    async def catch_up(self) -> None:
        """Look for what is missing, and return when that was done."""
        ...


class Flight:
    """Runs until it is cancelled, which its host does when the position is decided."""

    def __init__(self, ctx: Context, host: Host, place: Place, pending: Pending) -> None:
        self._ctx = ctx
        self._host = host
        self.place = place
        self.pending = pending
        self._member = MemberRound(place, stall_s=ctx.settings.stall_s)
        self._changed = asyncio.Event()
        self._session: asyncio.Task[None] | None = None
        self._stream: Stream | None = None

    @property
    def phase(self) -> RoundPhase:
        """The phase of this contribution."""
        return self._member.phase

    async def run(self) -> None:
        """One term after the other, until the position is decided."""
        try:
            async with beside(self._watch_log()):
                while self._member.state is not MemberState.OVER:
                    self._changed.clear()
                    while actions := self._member.advance(self._view()):
                        for action in actions:
                            await self._do(action)
                    await self._await_change()
                    if self._session is not None and self._session.done():
                        self._session.result()
        finally:
            await self._leave()

    def _view(self) -> MemberView:
        replica = self._ctx.replica
        place = Place(replica.epoch, replica.position)
        return MemberView(
            now=self._ctx.now(),
            place=place,
            electorate=tuple(replica.electorate),
            # A voter stands at a position only once it knows who else votes there.
            term=self._host.voter.term if place == self.place and replica.electorate else 0,
            patience_s=self._patience_s,
            skipped=self._ctx.skipped_terms(self.place.position),
        )

    def _patience_s(self, term: int) -> float:
        replica, settings = self._ctx.replica, self._ctx.settings
        return group_patience_s(
            term,
            grace_s=settings.grace_s,
            stall_s=settings.stall_s,
            last_s=replica.stood_s,
            window_s=max(0.0, self.pending.since - replica.moved_at),
        )

    async def _watch_log(self) -> None:
        while True:
            await self._ctx.replica.passed(self._ctx.replica.position)
            self._changed.set()

    async def _await_change(self) -> None:
        """Return when something happened, or the member wants to look again."""
        limit_s = self._ctx.alive_s  # an electorate may come without an entry
        if self._member.state is not MemberState.SEEKING:
            wake_at = self._member.wake_at
            limit_s = math.inf if wake_at is None else max(0.0, wake_at - self._ctx.now())
        with suppress(TimeoutError):
            async with asyncio.timeout(None if limit_s == math.inf else limit_s):
                await self._changed.wait()

    # actions of the machine

    async def _do(self, action: Action) -> None:
        match action:
            case Join():
                await self._leave()
                self._session = asyncio.create_task(self._take_part(action.leader, action.term))
                self._session.add_done_callback(lambda _: self._changed.set())
            case Leave():
                self.pending.end_sessions()
                await self._leave()
            case ReportTurn():
                await self._report_turn(action.term)
            case NoteTurn():
                if self.pending.turn_at is None:
                    self.pending.turn_at = self._ctx.now()
            case FetchEntries():
                await self._host.catch_up()
            case CountFailure():
                self._host.count_failure()
            case Show():
                self._host.show(self)
            case SendReport():
                self._ctx.on_event(action.level, action.notice, key=action.key)

    async def _leave(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await end(session)

    async def _take_part(self, leader: str, term: int) -> None:
        """Hold a session with a leader; its end is an event."""
        try:
            await self._join(leader, term)
        except Refused as error:
            failed = Failed(
                why=str(error), code=error.code, reason=error.message, key=failure_key(error)
            )
        except (AttemptFailed, TransportError) as error:
            failed = Failed(why=str(error), key=failure_key(error))
        else:
            return
        self.pending.failed = failed
        self.pending.end_sessions()
        self._member.receive(failed)
        self._changed.set()

    async def _join(self, leader: str, term: int) -> None:
        if self._ctx.conduct.is_out(leader):
            raise AttemptFailed("the leader is banned")
        open_line = partial(self._open_line, leader, term)
        try:
            ready = self._ready(term)
            frames = self.pending.window.offer.frames
            joined = partial(self._joined, term)
            ended = b"" if self.pending.exchange is None else self.pending.exchange.digest
            joining = join(self._ctx, leader, open_line, ready, frames, joined, ended)
            await race(joining, self._until_barred(leader), expected=(AttemptFailed,))
            if self._ctx.conduct.is_out(leader):
                raise AttemptFailed("the leader is banned")
        finally:
            self._stream = None
            if self.pending.exchange is not None:
                await self.pending.exchange.close()

    async def _open_line(self, leader: str, term: int) -> Stream:
        if leader == self._ctx.me.peer_id:  # no transport dials itself
            stream = self._host.leading.line_to_myself()
        else:
            connect_s = CONNECT_STALLS * self._ctx.settings.stall_s
            stream = await self._ctx.transport.open(leader, "round", timeout_s=connect_s)
        self._stream = stream
        session = Reporting(leader=leader, term=term, since=self._ctx.now())
        self.pending.reported[leader] = session
        return stream

    async def _until_barred(self, leader: str) -> None:
        """Wait until the leader is left out; a liar may keep its sessions alive for long."""
        while not self._ctx.conduct.is_out(leader):
            await asyncio.sleep(self._ctx.alive_s)

    def _joined(self, term: int, exchange: Exchange) -> None:
        self.pending.exchange, self.pending.failed = exchange, None
        leadership = self._host.leading.at(self.place, term)
        if leadership is not None:
            leadership.exchange = exchange
            exchange.on_part = leadership.changed.set
        stall_s = self._ctx.settings.stall_s
        within_s = decision_patience_s(own_deadline_s(self._ctx, exchange.group), stall_s)
        self._changed.set()  # the machine looks at the clock again
        for action in self._member.receive(Grouped(within_s=within_s)):
            if isinstance(action, Show):  # all that a group asks for
                self._host.show(self)

    async def _report_turn(self, term: int) -> None:
        if self._stream is not None:
            message = tagged(READY, self._ready(term))
            with suppress(TransportError):  # the end of the session shows in what is read from it
                await self._stream.send(message, timeout_s=self._ctx.settings.stall_s)

    def _ready(self, term: int) -> Ready:
        replica, window = self._ctx.replica, self.pending.window
        report = Report(
            epoch=self.place.epoch,
            position=self.place.position,
            incarnation=self._ctx.me.incarnation,
            weight=window.offer.weight,
            tokens=window.tokens,
            steps=window.steps,
            loss=window.loss,
            norm=window.offer.norm,
            uplink_mbit_s=self._ctx.link.uplink_mbit_s,
            units=window.units,
        )
        return Ready(
            protocol=PROTOCOL,
            term=term,
            stands_at=replica.position,
            chain=replica.chain,
            report=report,
            signature=self._ctx.sign(report_payload(replica.run_id, report)),
        )
