"""A contribution under way to one position: from its offer to its decision.

A position that is not decided next is reduced early, by the leader that its first term will have
if the electorate stays as it is.  When its turn comes the term goes on where it stands.  If by
then another elector leads it, or the early reduction failed, the same frozen contribution begins
anew: nothing was decided with it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from atoll.coordinator.run.phases import RoundPhase
from atoll.dht.identity import short
from atoll.dht.refusals import RefusalCode
from atoll.dht.tasks import race
from atoll.dht.transport import Refused, Stream, TransportError
from atoll.optim.log.entry import Elector
from atoll.optim.reduction.feedback import Offer
from atoll.peer.rounds.allreduce.exchange import Exchange
from atoll.peer.rounds.consensus.ballot import Place, leader_of
from atoll.peer.rounds.consensus.leading import Leading
from atoll.peer.rounds.consensus.member import CONNECT_STALLS, AttemptFailed, join
from atoll.peer.rounds.consensus.voter import Voter
from atoll.peer.rounds.context import Context, failure_key
from atoll.peer.rounds.messages import PROTOCOL, READY, Ready, tagged

CLOSED_STALLS = 20  # how long who came too late waits for the decision


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
        """What the flight does has changed."""
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
        self.phase = RoundPhase.WAIT
        self._stream: Stream | None = None

    @property
    def _is_early(self) -> bool:
        return self._ctx.replica.position < self.place.position

    @property
    def _is_over(self) -> bool:
        replica = self._ctx.replica
        return replica.epoch != self.place.epoch or replica.position > self.place.position

    async def run(self) -> None:
        """One term after the other, until the position is decided."""
        term = 0
        while not self._is_over:
            electorate = self._ctx.replica.electorate
            if not electorate:
                await asyncio.sleep(self._ctx.alive_s)
                continue
            if not self._is_early:
                term = max(term, self._host.voter.term)
            leader = leader_of(electorate, self.place.position, term)
            if await self._may_try_again(leader, term):
                continue
            term += 1
            if term % len(electorate) == 0:
                await asyncio.sleep(self._ctx.settings.stall_s)

    async def _may_try_again(self, leader: Elector, term: int) -> bool:
        """Go through a term; whether the same one is next, else the next leader's is."""
        try:
            await self._attempt(leader, term)
        except (AttemptFailed, TransportError) as error:
            if self._is_early:
                return await self._failed_early(error)
            if self._lost_lead(leader, term):
                return True
            if isinstance(error, Refused):
                return await self._refused(error, leader.peer_id)
            self._host.count_failure()
            text = f"round {self.place.position + 1}, term {term}: {error}"
            key = "term failed", self.place.position, failure_key(error)
            self._ctx.on_event("warning", text, key=key)
            return False
        return True

    def _lost_lead(self, leader: Elector, term: int) -> bool:
        """Whether the entry before gave the term to another: it was a wrong leader that failed."""
        electorate = self._ctx.replica.electorate
        return bool(electorate) and leader_of(electorate, self.place.position, term) != leader

    async def _failed_early(self, error: Exception) -> bool:
        """Begin anew with the next entry: it may name another leader, or bring the turn."""
        self._show(RoundPhase.LATE)
        stands_at = self._ctx.replica.position
        if isinstance(error, Refused) and error.code is RefusalCode.DECIDED:
            await self._host.catch_up()
        await self._ctx.replica.passed(stands_at)
        return True

    async def _refused(self, error: Refused, leader: str) -> bool:
        """Whether the decision came; else it is the next leader's turn."""
        position, replica = self.place.position, self._ctx.replica
        if error.code in (RefusalCode.CLOSED, RefusalCode.BARRED):
            self._show(RoundPhase.LATE)
            self._ctx.on_event("info", f"round {position + 1}: {error.message}")
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSED_STALLS * self._ctx.settings.stall_s):
                    await replica.passed(position)
                return True
            return False
        if error.code is RefusalCode.DECIDED:
            await self._host.catch_up()
            return replica.position > position
        self._ctx.on_event(
            "warning",
            f"round {position + 1}: {short(leader)} refused: {error}",
            key=("leader refused", position, leader, failure_key(error)),
        )
        return False

    async def _attempt(self, leader: Elector, term: int) -> None:
        """Take part until that fails, or until an entry gives the first term to another."""
        self._show(RoundPhase.WAIT)
        joining, watching = self._join(leader.peer_id, term), self._watch(leader, term)
        await race(joining, watching, expected=(AttemptFailed,))

    async def _watch(self, leader: Elector, term: int) -> None:
        """Return when the leader is the wrong one; at the turn, tell the right one."""
        replica, early = self._ctx.replica, self._is_early
        while self._is_early:
            await replica.passed(replica.position)
            electorate = replica.electorate
            if self._is_over or not electorate:
                return
            if leader_of(electorate, self.place.position, term) != leader:
                self._tell_in_vain(leader)
                return
        if self.pending.turn_at is None:
            self.pending.turn_at = self._ctx.now()
        self._show(self.phase)
        if early and self._stream is not None:
            with suppress(TransportError):
                await self._report(self._stream, term)
        await replica.passed(self.place.position)

    def _tell_in_vain(self, leader: Elector) -> None:
        if self.pending.exchange is not None:
            self._ctx.on_event(
                "info",
                f"round {self.place.position + 1}: what was reduced early is reduced again: "
                f"{short(leader.peer_id)} does not lead it",
            )

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
        self._show(RoundPhase.REDUCE)

    async def _line_to(self, leader: str) -> Stream:
        if leader == self._ctx.me.peer_id:
            return self._host.leading.line_to_myself()
        connect_s = CONNECT_STALLS * self._ctx.settings.stall_s
        return await self._ctx.transport.open(leader, "round", timeout_s=connect_s)

    async def _report(self, stream: Stream, term: int) -> None:
        message = tagged(READY, self._ready(term))
        await stream.send(message, timeout_s=self._ctx.settings.stall_s)

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

    def _show(self, phase: RoundPhase) -> None:
        self.phase = phase
        self._host.show(self)
