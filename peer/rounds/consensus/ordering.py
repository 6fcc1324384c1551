"""Bringing orders into the log: what the organiser orders is decided though nobody offers anything.

The leader of a position that knows the next order proposes it in place of a group
(`consensus/round.py`). Usually its members' reports begin its term. In a paused run nobody reports,
so an elector that knows the order begins its own terms by itself: the first one at once, a later
one when the leaders before it do not answer, have given up, or have had their time. Until then it
passes the order on to the leader whose term it is, which may be out of touch with the coordinator.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from atoll.dht.tasks import race, together
from atoll.dht.transport import Refused, TransportError
from atoll.optim.log.entry import MAX_ORDER, LogError, MalformedRecord, leader_order
from atoll.peer.rounds.consensus.ballots import Place, leader_of
from atoll.peer.rounds.consensus.leading import Leading
from atoll.peer.rounds.consensus.voter import Voter
from atoll.peer.rounds.context import Context, ask_head
from atoll.peer.rounds.messages import Head

LOOK_S = 1.0  # how often the leaders before are asked whether they are there


class Ordering:
    """One elector's part in bringing orders into the log; `run` is one task."""

    def __init__(
        self, ctx: Context, voter: Voter, leading: Leading, *, catch_up: Callable[[], None]
    ) -> None:
        """Begin no term before `run`; `catch_up` begins to look for entries that are missing."""
        self._ctx = ctx
        self._voter = voter
        self._leading = leading
        self._catch_up = catch_up
        self._came = asyncio.Event()
        """set when an order has come"""

    def take(self, signed: bytes) -> None:
        """Take an order that somebody passes on; one that the log holds changes nothing.

        Raises:
            LogError: it is none of this run's.
        """
        if len(signed) > MAX_ORDER:
            raise MalformedRecord(f"order: expected at most {MAX_ORDER} bytes, got {len(signed)}")
        if self._ctx.take_order(signed):
            self._came.set()

    async def serve(self, remote: str, body: bytes) -> bytes:
        """Answer a peer that passes an order on."""
        self._ctx.expect_unbarred(remote)
        self.take(body)
        return b""

    async def run(self) -> None:
        """See to it that each order that comes is decided, one position after the other."""
        replica = self._ctx.replica
        while True:
            self._came.clear()
            if replica.electorate and self._ctx.next_order() is not None:
                await self._bring(Place(replica.epoch, replica.position))
            else:
                await race(replica.moved(), self._came.wait())

    async def _bring(self, place: Place) -> None:
        """Lead the own terms of a position when they come, until it is decided."""
        replica, since = self._ctx.replica, self._ctx.now()
        led: set[int] = set()
        while (replica.epoch, replica.position) == place and replica.electorate:
            term = self._own_term(place, led)
            if term is not None and await self._is_due(place, term, since):
                if (replica.epoch, replica.position) != place:
                    return
                with suppress(Refused):
                    self._leading.bring_order(place, term)
                led.add(term)
            else:
                await self._pass_on(place)
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await replica.passed(place.position)

    def _own_term(self, place: Place, led: set[int]) -> int | None:
        """Return the next term that this elector leads and has not led; None if it is no elector.

        One that others have ended is led again in the next cycle of leaders.
        """
        electorate, me = self._ctx.replica.electorate, self._ctx.me
        if me not in electorate:
            return None
        order = leader_order(electorate, place.position)
        own = self._voter.term
        while electorate[order[own % len(order)]] != me:
            own += 1
        while own in led and self._leading.at(place, own) is None:
            own += len(order)
        return own

    async def _is_due(self, place: Place, term: int, since: float) -> bool:
        """Return whether the terms before are over: had their time, or are led no more."""
        ctx, skipped = self._ctx, self._ctx.skipped_terms(place.position)
        before = [each for each in range(self._voter.term, term) if each not in skipped]
        if ctx.now() >= since + sum(self._voter.time_s(each) for each in before):
            return True
        electorate, me = ctx.replica.electorate, ctx.me.peer_id
        leaders = {each: leader_of(electorate, place.position, each).peer_id for each in before}
        asked = sorted(set(leaders.values()) - {me})
        heads = dict(zip(asked, await together(*(ask_head(ctx, p) for p in asked)), strict=True))
        if any(head and _is_beyond(head, place) for head in heads.values()):
            self._catch_up()  # in a pause nobody reports, and so nobody tells who is behind
        own_term = self._voter.open_term
        return all(
            own_term > each if peer == me else _is_led_no_more(heads[peer], place, each)
            for each, peer in leaders.items()
        )

    async def _pass_on(self, place: Place) -> None:
        """Pass the order on to the leader whose term it is."""
        ctx, order, electorate = self._ctx, self._ctx.next_order(), self._ctx.replica.electorate
        if order is None or ctx.me not in electorate:
            return
        leader = leader_of(electorate, place.position, self._voter.term).peer_id
        if leader == ctx.me.peer_id:
            return
        with suppress(TransportError, LogError):
            await ctx.transport.call(leader, "order", order, timeout_s=ctx.settings.stall_s)


def _is_beyond(head: Head, place: Place) -> bool:
    return head.epoch == place.epoch and head.position > place.position


def _is_led_no_more(head: Head | None, place: Place, term: int) -> bool:
    """Return whether a term's leader does not answer, or has given the term up.

    One that failed, as its acceptors were behind, lives on, and comes back to the position only
    when all others have had their turn.
    """
    return head is None or ((head.epoch, head.position) == place and head.open_term > term)
