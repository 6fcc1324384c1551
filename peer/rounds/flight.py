"""A contribution under way to one position: the driver of its `MemberRound`.

The machine in `consensus/membership.py` decides which leader this peer reports to, and when; a
flight owns the session with that leader, and the timers.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from atoll.coordinator.run.phases import RoundPhase
from atoll.dht.tasks import beside, end
from atoll.dht.transport import Refused, Stream, TransportError
from atoll.optim.reduction.feedback import Offer
from atoll.peer.rounds.allreduce.exchange import Exchange
from atoll.peer.rounds.consensus.ballot import Place
from atoll.peer.rounds.consensus.leading import Leading
from atoll.peer.rounds.consensus.member import CONNECT_STALLS, AttemptFailed, join
from atoll.peer.rounds.consensus.membership import (
    Action,
    CountFailure,
    Failed,
    FetchEntries,
    Grouped,
    Join,
    Leave,
    MemberRound,
    MemberState,
    MemberView,
    NoteTurn,
    ReportTurn,
    SendReport,
    Show,
)
from atoll.peer.rounds.consensus.voter import Voter
from atoll.peer.rounds.context import Context, failure_key
from atoll.peer.rounds.messages import PROTOCOL, READY, Ready, tagged


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


@dataclass(kw_only=True, eq=False)
class Pending:
    """The contribution that waits for a decision."""

    window: OfferedWindow
    since: float
    turn_at: float | None = None
    """when its position was the next to be decided; None before that"""
    exchange: Exchange | None = None


class Host(Protocol):
    """The engine, as a flight needs it."""

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
        """Not begun."""
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
                        await self._do_all(actions)
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

    async def _do_all(self, actions: Sequence[Action]) -> None:
        for action in actions:
            await self._do(action)

    async def _do(self, action: Action) -> None:
        match action:
            case Join():
                await self._leave()
                self._session = asyncio.create_task(self._take_part(action.leader, action.term))
            case Leave():
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
                self._ctx.on_event(action.level, action.text, key=action.key)

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
        self._member.receive(failed)
        self._changed.set()

    async def _join(self, leader: str, term: int) -> None:
        stream = await self._line_to(leader)
        self._stream = stream
        try:
            ready = self._ready(term)
            frames = self.pending.window.offer.frames
            await join(self._ctx, stream, ready, frames, partial(self._joined, term))
        finally:
            self._stream = None
            if self.pending.exchange is not None:
                await self.pending.exchange.close()

    def _joined(self, term: int, exchange: Exchange) -> None:
        self.pending.exchange = exchange
        leadership = self._host.leading.at(self.place, term)
        if leadership is not None:
            leadership.exchange = exchange
            exchange.on_part = leadership.changed.set
        for action in self._member.receive(Grouped()):
            if isinstance(action, Show):  # all that a group asks for
                self._host.show(self)

    async def _line_to(self, leader: str) -> Stream:
        if leader == self._ctx.me.peer_id:
            return self._host.leading.line_to_myself()
        connect_s = CONNECT_STALLS * self._ctx.settings.stall_s
        return await self._ctx.transport.open(leader, "round", timeout_s=connect_s)

    async def _report_turn(self, term: int) -> None:
        if self._stream is not None:
            message = tagged(READY, self._ready(term))
            with suppress(TransportError):  # the end of the session shows in what is read from it
                await self._stream.send(message, timeout_s=self._ctx.settings.stall_s)

    def _ready(self, term: int) -> Ready:
        replica, window = self._ctx.replica, self.pending.window
        return Ready(
            protocol=PROTOCOL,
            epoch=self.place.epoch,
            position=self.place.position,
            term=term,
            stands_at=replica.position,
            chain=replica.chain,
            incarnation=self._ctx.me.incarnation,
            weight=window.offer.weight,
            tokens=window.tokens,
            steps=window.steps,
            loss=window.loss,
            norm=window.offer.norm,
            uplink_mbit_s=self._ctx.link.uplink_mbit_s,
        )
