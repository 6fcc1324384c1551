"""A peer's rounds by gossip: it draws a partner, asks it or waits to be asked, and steps.

A round ends in one of four ways, and none of them takes longer than its deadlines:

    met      both committed; this peer's window is counted
    alone    there was nobody to meet: the step is taken on this peer's own pseudo-gradient
    kept     a meeting broke before it was agreed: no step, the window goes on
    doubt    it broke when this peer was prepared: it asks until it knows, then met or kept

A peer in doubt whose partner can't tell any more goes on without its mass, so that what it may
have handed over is not counted twice (``atoll.optim.gossip``).
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from atoll.dht.transport import Refused, Stream, TransportError
from atoll.optim.gossip import Met, Side, meet
from atoll.optim.log import MalformedRecord
from atoll.optim.state import OuterState
from atoll.peer.gossip.context import GossipContext
from atoll.peer.gossip.exchange import (
    BROKEN,
    Exchange,
    GossipWindow,
    InDoubt,
    Mine,
    Times,
    check_weight,
)
from atoll.peer.gossip.messages import (
    ALIVE,
    PROTOCOL,
    TERMS,
    Standing,
    Terms,
)
from atoll.peer.gossip.others import Others
from atoll.peer.gossip.outcomes import Outcomes
from atoll.peer.gossip.policies import (
    LATE_BY,
    REFUSALS,
    Draw,
    Invited,
    answer,
    draw,
    patience_s,
)
from atoll.peer.gossip.snapshots import Lender
from atoll.peer.rounds.context import short
from atoll.peer.rounds.guard import guarded_stream
from atoll.peer.rounds.trace import RoundTrace

ANSWERED_STALLS = 2.0  # the first word of an invited peer, which may have to be dialed
LOOK_S = 1.0  # between two looks at a partner that is awaited
MAX_PATIENCE_S = 3600.0  # an inviting peer is kept waiting
KEPT_IDS = 256  # of meetings that others began

OnPhase = Callable[[str, int], None]


@dataclass(frozen=True, kw_only=True)
class GossipSettled:
    """What became of a round."""

    state: OuterState
    number: int
    """of the window that was on offer"""
    included: bool
    members: int
    loss: float | None
    tokens: int
    trace: RoundTrace


@dataclass(frozen=True, kw_only=True)
class GossipStatistics:
    """How a peer's rounds go."""

    phase: str
    last: RoundTrace | None
    partner: str
    """whom it is meeting, or met last; empty for nobody"""
    mass: float
    encode_s: float = 0.0
    """what encoding took in the last meeting"""


@dataclass(kw_only=True, eq=False)
class _Round:
    """One round in progress."""

    window: GossipWindow
    since_s: float
    deadline_s: float
    """until when a partner is awaited"""
    draw: Draw
    is_open: bool = False
    """whether this peer waits to be asked"""
    is_refused: bool = False
    """whether the partner is there, but not ready in time"""
    ended: asyncio.Future[Met | None] | None = None
    """of a meeting to which this peer was invited: what it is left with, None where it broke"""
    times: Times = field(default_factory=Times)
    without: dict[str, str] = field(default_factory=dict)
    """who was drawn and not met, and why"""


class Gossip:
    """Single-loop: what blocks runs in the context's ``compute``."""

    def __init__(
        self,
        ctx: GossipContext,
        state: OuterState,
        *,
        mass: float,
        on_settled: Callable[[GossipSettled], None],
        on_phase: OnPhase,
        uplink_mbit_s: float = 0.0,
    ) -> None:
        """Stand at ``state`` with ``mass``; ``begin`` lets rounds start."""
        self._ctx = ctx
        self.state = state
        self.mass = mass
        self._on_settled = on_settled
        self._on_phase = on_phase
        self._window: GossipWindow | None = None
        self._round: _Round | None = None
        self._meeting: str | None = None
        self._others = Others(ctx)
        self._outcomes = Outcomes(ctx)
        self._invited: deque[bytes] = deque(maxlen=KEPT_IDS)
        self._waiting: set[str] = set()
        """whose invitations have no answer yet"""
        self._hungry = 0
        self._window_s = 0.0
        self._settled_s: float | None = None
        self._changed = asyncio.Event()
        self._closing = False
        self.begun = False
        self._statistics = GossipStatistics(phase="idle", last=None, partner="", mass=mass)
        self._lender = Lender(ctx, self)
        ctx.link.declare(uplink_mbit_s)

    @property
    def position(self) -> int:
        """The round that this peer is in: its own count, brought level with the others'."""
        return self.state.position

    def statistics(self) -> GossipStatistics:
        """How the rounds go."""
        return replace(self._statistics, mass=self.mass)

    def serve(self) -> None:
        """Answer others from now on."""
        transport, fault = self._ctx.transport, self._ctx.fault
        transport.serve("gossip-head", self._serve_head)
        transport.serve_stream("gossip", guarded_stream(self._serve_meeting, fault))
        self._outcomes.serve()
        self._lender.serve()

    def begin(self) -> None:
        """The run has begun: meet others from now on."""
        self.begun = True
        self._changed.set()

    def offer(self, window: GossipWindow) -> None:
        """A window is done."""
        if self._settled_s is not None:
            self._window_s = self._ctx.now() - self._settled_s
        self._window = window
        self._changed.set()

    def install(self, state: OuterState) -> None:
        """Stand somewhere else, without mass; between two rounds."""
        self._move(state, 0.0)

    async def close(self) -> None:
        """Meet nobody any more; a meeting in progress breaks with the transport."""
        self._closing = True

    async def run(self) -> None:
        """Take round after round, for ever."""
        while True:
            while self._window is None or not self.begun or self._closing:
                await self._change()
            window = self._window
            try:
                await self._hold(window)
            except Exception:
                self._window = window  # whoever looks after us starts again
                raise
            finally:
                self._round = None
                self._phase("train")

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _change_within(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._change()

    # one round

    async def _hold(self, window: GossipWindow) -> None:
        await self._bring_level(by=LATE_BY)
        draw = await self._draw()
        now = self._ctx.now()
        here = _Round(
            window=window,
            since_s=now,
            deadline_s=now + patience_s(self._ctx.settings.grace_s, self._window_s, self._hungry),
            draw=draw,
        )
        self._phase("wait")
        self._round, self._window = here, None
        met = await self._meet_somebody(here)
        self._settle(here, met, members=2 if here.times.accepted else 1)

    async def _meet_somebody(self, here: _Round) -> Met | None:
        """What the round leaves this peer with; None where its window is kept."""
        while not self._is_over and (partner := here.draw.partner) is not None:
            reach = self._invite if here.draw.invites else self._await_invitation
            met = await reach(here, partner)
            if here.times.accepted:
                self._hungry = 0
                return met
            if not await self._catch_up_with(partner) or self._ctx.now() >= here.deadline_s:
                self._hungry += here.is_refused
                break
            here.draw = await self._draw()
        return None if self._is_over else await self._alone(here.window)

    @property
    def _is_over(self) -> bool:
        return 0 < self._ctx.last_round <= self.position

    async def _catch_up_with(self, partner: str) -> bool:
        """Take over the others' round where the partner is ahead; whether that is another one."""
        if self._others.heard(partner) <= self.position:
            return False
        await self._others.ask_around(self.position)
        before = self.position
        await self._bring_level(by=1)
        return self.position > before

    async def _bring_level(self, *, by: int) -> None:
        """Take over the round of those that are further."""
        level = await self._others.level(self.position, by=by)
        if level > self.position:
            self.state = self.state.at(level)

    async def _draw(self) -> Draw:
        ctx, others = self._ctx, await self._others.rounds()
        return draw(ctx.me.peer_id, others, run_id=ctx.run_id, position=self.position)

    async def _alone(self, window: GossipWindow) -> Met:
        state = self.state
        side = Side(
            delta_N=window.delta_N,
            params_N=state.params_N,
            mass=self.mass,
            weight=window.weight,
            steps=window.steps,
        )
        ctx, lr = self._ctx, window.inner_lr
        met: Met = await ctx.compute(
            lambda: meet(ctx.method, ctx.fragment, state, side, None, inner_lr=lr)
        )
        return met

    def _settle(self, here: _Round, met: Met | None, *, members: int) -> None:
        if met is None and not self._is_over:
            self.state = self.state.at(self.position + 1)
        elif met is not None and met.state is not self.state:
            self._move(met.state, met.mass)
        trace = self._trace(here)
        encode_s = here.times.encode_s
        self._statistics = replace(self._statistics, last=trace, encode_s=encode_s)
        self._settled_s = self._ctx.now()
        self._on_settled(
            GossipSettled(
                state=self.state,
                number=here.window.number,
                included=met is not None,
                members=members,
                loss=here.window.loss,
                tokens=here.window.tokens,
                trace=trace,
            )
        )

    def _move(self, state: OuterState, mass: float) -> None:
        self.state, self.mass = state, mass

    def _trace(self, here: _Round) -> RoundTrace:
        now, times = self._ctx.now(), here.times
        trace = RoundTrace(position=self.position - 1, left_out=dict(here.without))
        if times.accepted is None:
            trace.wait_s = now - here.since_s
            return trace
        sent = times.sent or now
        received = max(sent, times.received or now)
        trace.wait_s = times.accepted - here.since_s
        trace.send_s = max(0.0, sent - times.accepted - times.encode_s)
        trace.reduce_s = received - sent
        trace.apply_s = times.met_s
        trace.vote_s = max(0.0, now - received - times.met_s)
        return trace

    def _phase(self, phase: str) -> None:
        self._statistics = replace(self._statistics, phase=phase)
        self._on_phase(phase, self.position)

    # asking

    async def _invite(self, here: _Round, partner: str) -> Met | None:
        """Ask a partner, and meet it if it agrees; None where it comes to nothing."""
        name = os.urandom(16)
        self._meeting, self._outcomes.deciding = partner, name
        watch = self._ctx.link.watch(self._ctx.transport)
        try:
            timeout_s = ANSWERED_STALLS * self._ctx.settings.stall_s
            async with await self._ctx.transport.open(
                partner, "gossip", timeout_s=timeout_s
            ) as stream:
                return await self._propose(here, partner, stream, name)
        except BROKEN as error:
            watch.disturbed = True
            self._note_failure(here, partner, error)
            return None
        finally:
            watch.close()
            self._meeting = self._outcomes.deciding = None

    async def _propose(self, here: _Round, partner: str, stream: Stream, name: bytes) -> Met | None:
        mine = Mine(window=here.window, state=self.state, mass=self.mass)
        exchange = Exchange(self._ctx, stream, mine, name)
        left_s = max(0.0, here.deadline_s - self._ctx.now())
        await exchange.send_terms(patience_s=left_s)
        async with asyncio.timeout(left_s + ANSWERED_STALLS * self._ctx.settings.stall_s):
            await exchange.receive_terms()
        here.times = exchange.times
        self._agreed(partner)
        met = await exchange.trade()
        await exchange.decide(lambda: self._commit(name, met))
        return met

    def _commit(self, name: bytes, met: Met) -> None:
        self._outcomes.commit(name)
        self._move(met.state, met.mass)

    def _agreed(self, partner: str) -> None:
        self._statistics = replace(self._statistics, partner=partner)
        self._phase("reduce")

    def _note_failure(self, here: _Round, partner: str, error: Exception) -> None:
        """Keep why a partner was not met; what breaks the rules is held against it."""
        code = error.code if isinstance(error, Refused) else ""
        here.without[partner] = str(error) or type(error).__name__
        if code == "ahead" and isinstance(error, Refused):
            self._hear(partner, error.message)
        here.is_refused = code in REFUSALS and code != "barred"
        is_away = isinstance(error, TransportError | TimeoutError)
        if here.times.accepted is None and is_away and (code in REFUSALS or not code):
            return
        if not is_away:
            self._ctx.fault(partner, "bad-message")
        self._ctx.on_event(
            "warning",
            f"round {self.position + 1}: the meeting with {short(partner)} broke: {error}",
        )

    def _hear(self, peer: str, told: str) -> None:
        """Heed the round in a refusal, whose text begins with it."""
        number = told.split(" ", 1)[0]
        if number.isdecimal() and len(number) < 16:
            self._others.hear(peer, int(number))

    # being asked

    async def _await_invitation(self, here: _Round, partner: str) -> Met | None:
        """Wait to be asked by a partner; None where it comes to nothing."""
        here.is_open = True
        self._changed.set()
        why = await self._until_asked(here, partner)
        here.is_open = False
        if here.ended is None:
            here.without[partner] = why
            return None
        return await here.ended

    async def _until_asked(self, here: _Round, partner: str) -> str:
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
            await self._change_within(self._ctx.alive_s)
        return ""

    async def _look_at(self, partner: str, here: _Round) -> str:
        """Why a partner will not ask; empty where it may."""
        standing = await self._others.standing(partner)
        if isinstance(standing, str):
            return standing
        here.is_refused = True
        if standing.round > self.position:
            return "is ahead"
        if standing.partner not in ("", self._ctx.me.peer_id):
            return "meets somebody else"
        left_s = here.deadline_s - self._ctx.now()
        if standing.ready_in_s is None or standing.ready_in_s > left_s:
            return "is not ready in time"
        return ""

    async def _serve_meeting(self, remote: str, stream: Stream) -> None:
        message = await stream.recv(timeout_s=self._ctx.settings.stall_s)
        if message is None or message[:1] != TERMS:
            raise MalformedRecord("expected terms, got another message")
        terms = Terms.decode(message[1:])
        check_weight(self._ctx, terms)
        self._expect_welcome(remote, terms)
        self._others.hear(remote, terms.round)
        self._waiting.add(remote)
        try:
            here = await self._until_ready(remote, terms, stream)
        finally:
            self._waiting.discard(remote)
        here.ended = asyncio.get_running_loop().create_future()
        self._meeting = remote
        self._changed.set()
        watch = self._ctx.link.watch(self._ctx.transport)
        met: Met | None = None
        try:
            met = await self._take_part(here, remote, terms, stream)
        except BROKEN as error:
            watch.disturbed = True
            self._note_failure(here, remote, error)
            if isinstance(error, TransportError | TimeoutError):
                raise
            raise Refused("bad-message", str(error)) from error
        finally:
            watch.close()
            self._meeting = None
            here.ended.set_result(met)

    def _expect_welcome(self, remote: str, terms: Terms) -> None:
        barred = self._ctx.conduct.barred(remote, self._ctx.now())
        if barred is not None:
            raise Refused("barred", str(barred))
        if terms.protocol != PROTOCOL:
            raise Refused("protocol", f"expected protocol {PROTOCOL}, got {terms.protocol}")
        if terms.exchange in self._invited:
            raise Refused("replayed", "this meeting was begun before")
        if remote in self._waiting:
            raise Refused("paired", "another invitation of yours waits for an answer")
        if not self.begun or self._closing:
            raise Refused("not-begun", "expected a peer that takes part in rounds")
        self._invited.append(terms.exchange)

    async def _until_ready(self, remote: str, terms: Terms, stream: Stream) -> _Round:
        """Keep an inviting peer waiting until this one can meet it, or say no."""
        until = self._ctx.now() + min(terms.patience_s, MAX_PATIENCE_S)
        while True:
            here = self._round
            view = Invited(
                remote=remote,
                their_round=terms.round,
                own_round=self.position,
                partner=here.draw.partner if here is not None else None,
                meeting=self._meeting,
                has_window=here is not None,
                is_open=here is not None and here.is_open and here.ended is None,
                ready_in_s=self._ctx.ready_in_s() if self._window is None else 0.0,
                left_s=until - self._ctx.now(),
            )
            verdict = answer(view)
            if verdict == "accept" and here is not None:
                return here
            if verdict == "wait" and self._ctx.now() >= until:
                verdict = "training"
            if verdict != "wait":
                raise Refused(verdict, f"{self.position} is the round of this peer")
            await stream.send(ALIVE, timeout_s=self._ctx.settings.stall_s)
            await self._change_within(self._ctx.alive_s)

    async def _take_part(
        self, here: _Round, remote: str, terms: Terms, stream: Stream
    ) -> Met | None:
        mine = Mine(window=here.window, state=self.state, mass=self.mass)
        exchange = Exchange(self._ctx, stream, mine, terms.exchange)
        exchange.take_terms(terms)
        here.times = exchange.times
        await exchange.send_terms()
        self._agreed(remote)
        met = await exchange.trade()
        try:
            await exchange.follow()
        except InDoubt:
            self._phase("doubt")
            known = await self._outcomes.ask(remote, terms)
            if known == "unknown":
                self._give_up(remote)
            if known != "committed":
                return None
        self._move(met.state, met.mass)
        return met

    def _give_up(self, partner: str) -> None:
        """Go on without mass: what may have been handed over is not counted twice."""
        self.mass = 0.0
        self._ctx.on_event(
            "warning",
            f"{short(partner)} is gone and cannot tell whether round {self.position + 1} was "
            "committed: this peer's weights count again once it has met another one",
        )

    async def _serve_head(self, remote: str, body: bytes) -> bytes:
        return Standing(
            protocol=PROTOCOL,
            round=self.position,
            ready_in_s=0.0 if self._round or self._window else self._ctx.ready_in_s(),
            partner=self._meeting or "",
        ).encode()
