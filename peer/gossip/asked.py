"""Being invited: the side that waits to be asked, and commits when the other has."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import NoReturn

from atoll.coordinator.run.phases import RoundPhase
from atoll.dht.identity import short
from atoll.dht.refusals import RefusalCode
from atoll.dht.transport import Refused, Stream, TransportError
from atoll.optim.inprocess.gossip import Met
from atoll.optim.log.entry import MalformedRecord
from atoll.peer.gossip.exchange import BROKEN, Exchange, InDoubt, check_weight
from atoll.peer.gossip.messages import AHEAD, ALIVE, PROTOCOL, TERMS, Ahead, Terms, tagged
from atoll.peer.gossip.place import Place, Round
from atoll.peer.gossip.policies import Invited, Verdict, answer

LOOK_S = 1.0  # between two looks at a partner that is awaited
MAX_PATIENCE_S = 3600.0  # an inviting peer is kept waiting
KEPT_IDS = 256  # of meetings that others began


class Asked:
    """Takes part in meetings that others begin."""

    def __init__(self, place: Place) -> None:
        """At where this peer stands."""
        self._place, self._ctx = place, place.ctx
        self._invited: deque[bytes] = deque(maxlen=KEPT_IDS)
        self._waiting: set[str] = set()
        """whose invitations have no answer yet"""

    async def wait(self, here: Round, partner: str) -> Met | None:
        """Wait to be asked by a partner; None where it comes to nothing."""
        here.is_open = True
        self._place.wake()
        why = await self._until_asked(here, partner)
        here.is_open = False
        if here.ended is None:
            here.without[partner] = why
            return None
        return await here.ended

    async def _until_asked(self, here: Round, partner: str) -> str:
        """Wait for the partner; why it will not ask, empty where it has."""
        looked_s = self._ctx.now()
        while here.ended is None:
            now = self._ctx.now()
            if now >= here.deadline_s:
                return "did not ask in time"
            if now >= looked_s:
                looked_s = now + LOOK_S
                if why := await self._look_at(partner, here):
                    return why
            await self._place.change_within(self._ctx.alive_s)
        return ""

    async def _look_at(self, partner: str, here: Round) -> str:
        """Why a partner will not ask; empty where it may."""
        standing = await self._place.others.standing(partner)
        if isinstance(standing, str):
            return standing
        here.is_refused = True
        if standing.round > self._place.position:
            return "is ahead"
        if standing.partner not in ("", self._ctx.me.peer_id):
            return "meets somebody else"
        left_s = here.deadline_s - self._ctx.now()
        if standing.ready_in_s is None or standing.ready_in_s > left_s:
            return "is not ready in time"
        return ""

    async def serve(self, remote: str, stream: Stream) -> None:
        """Take part in a meeting that another peer begins, or say no."""
        message = await stream.recv(timeout_s=self._ctx.settings.stall_s)
        if message is None or message[:1] != TERMS:
            raise MalformedRecord("expected terms, got another message")
        terms = Terms.decode(message[1:])
        check_weight(self._ctx, terms)
        self._expect_welcome(remote, terms)
        self._place.others.hear(remote, terms.round)
        self._waiting.add(remote)
        try:
            here = await self._until_ready(remote, terms, stream)
        finally:
            self._waiting.discard(remote)
        here.ended = asyncio.get_running_loop().create_future()
        self._place.meeting = remote
        self._place.wake()
        watch = self._ctx.link.watch(self._ctx.transport)
        met: Met | None = None
        try:
            met = await self._take_part(here, remote, terms, stream)
        except BROKEN as error:
            watch.disturbed = True
            self._place.note_failure(here, remote, error)
            if isinstance(error, TransportError | TimeoutError):
                raise
            raise Refused(RefusalCode.BAD_MESSAGE, str(error)) from error
        finally:
            watch.close()
            self._place.meeting = None
            here.ended.set_result(met)

    def _expect_welcome(self, remote: str, terms: Terms) -> None:
        barred = self._ctx.conduct.barred(remote, self._ctx.now())
        if barred is not None:
            raise Refused(RefusalCode.BARRED, str(barred))
        if terms.protocol != PROTOCOL:
            raise Refused(
                RefusalCode.PROTOCOL, f"expected protocol {PROTOCOL}, got {terms.protocol}"
            )
        if terms.exchange in self._invited:
            raise Refused(RefusalCode.REPLAYED, "this meeting was begun before")
        if remote in self._waiting:
            raise Refused(RefusalCode.PAIRED, "another invitation of yours waits for an answer")
        if not self._place.begun or self._place.closing:
            raise Refused(RefusalCode.NOT_BEGUN, "expected a peer that takes part in rounds")
        self._invited.append(terms.exchange)

    async def _until_ready(self, remote: str, terms: Terms, stream: Stream) -> Round:
        """Keep an inviting peer waiting until this one can meet it, or say no."""
        until = self._ctx.now() + min(terms.patience_s, MAX_PATIENCE_S)
        while True:
            here = self._place.round
            view = Invited(
                remote=remote,
                their_round=terms.round,
                own_round=self._place.position,
                partner=here.draw.partner if here is not None else None,
                meeting=self._place.meeting,
                has_window=here is not None,
                is_open=here is not None and here.is_open and here.ended is None,
                ready_in_s=self._ctx.ready_in_s() if self._place.window is None else 0.0,
                left_s=until - self._ctx.now(),
            )
            verdict = answer(view)
            if verdict is Verdict.ACCEPT and here is not None:
                return here
            if verdict is Verdict.WAIT and self._ctx.now() >= until:
                verdict = RefusalCode.TRAINING
            if isinstance(verdict, RefusalCode):
                await self._refuse(verdict, stream)
            await stream.send(ALIVE, timeout_s=self._ctx.settings.stall_s)
            await self._place.change_within(self._ctx.alive_s)

    async def _refuse(self, code: RefusalCode, stream: Stream) -> NoReturn:
        position = self._place.position
        if code is RefusalCode.AHEAD:
            await stream.send(
                tagged(AHEAD, Ahead(round=position)), timeout_s=self._ctx.settings.stall_s
            )
        raise Refused(code, f"this peer is in round {position}")

    async def _take_part(
        self, here: Round, remote: str, terms: Terms, stream: Stream
    ) -> Met | None:
        mine = self._place.mine(here.window)
        exchange = Exchange(self._ctx, stream, mine, terms.exchange)
        exchange.take_terms(terms)
        here.times = exchange.times
        await exchange.send_terms()
        self._place.agreed(remote)
        met = await exchange.trade()
        try:
            await exchange.follow()
        except InDoubt:
            self._place.enter(RoundPhase.DOUBT)
            known = await self._place.outcomes.ask(remote, terms)
            if known == "unknown":
                self._give_up(remote)
            if known != "committed":
                return None
        self._place.move(met.state, met.mass)
        return met

    def _give_up(self, partner: str) -> None:
        """Go on without mass: what may have been handed over is not counted twice."""
        self._place.mass = 0.0
        number = self._place.position + 1
        self._ctx.on_event(
            "warning",
            f"{short(partner)} is gone and cannot tell whether round {number} was "
            "committed: this peer's weights count again once it has met another one",
        )
