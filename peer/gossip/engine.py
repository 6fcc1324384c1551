"""A peer's rounds by gossip: it draws a partner, asks it or waits to be asked, and steps.

A round ends in one of four ways, and none of them takes longer than its deadlines:

    met      both committed; this peer's window is counted
    alone    there was nobody to meet: the step is taken on this peer's own pseudo-gradient
    kept     a meeting broke before it was agreed: no step, the window goes on
    doubt    it broke when this peer was prepared: it asks until it knows, then met or kept

A peer in doubt whose partner can't tell any more goes on without its mass, so that what it may
have handed over is not counted twice (`atoll.optim.inprocess.gossip`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from atoll.coordinator.run.phases import OnPhase, RoundPhase
from atoll.optim.inprocess.gossip import Met, Side, meet
from atoll.optim.state.outer_state import OuterState
from atoll.peer.gossip.asked import Asked
from atoll.peer.gossip.asking import Asking
from atoll.peer.gossip.context import GossipContext
from atoll.peer.gossip.exchange import GossipWindow
from atoll.peer.gossip.place import GossipStatistics, Place, Round
from atoll.peer.gossip.policies import LATE_BY, Draw, draw, patience_s
from atoll.peer.gossip.snapshots import Lender
from atoll.peer.rounds.guard import guarded_stream
from atoll.peer.rounds.trace import RoundTrace


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


class Gossip:
    """Single-loop: what blocks runs in the context's `compute`."""

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
        """Stand at `state` with `mass`; `begin` lets rounds start."""
        self._ctx = ctx
        self._place = Place(ctx, state, mass=mass, on_phase=on_phase)
        self._asking = Asking(self._place)
        self._asked = Asked(self._place)
        self._on_settled = on_settled
        self._hungry = 0
        """rounds in a row whose partner was there, but not ready"""
        self._window_s = 0.0
        self._settled_s: float | None = None
        self._lender = Lender(ctx, self._place)
        ctx.link.declare(uplink_mbit_s)

    @property
    def state(self) -> OuterState:
        """What this peer holds."""
        return self._place.state

    @property
    def mass(self) -> float:
        """Its push-sum weight."""
        return self._place.mass

    @property
    def position(self) -> int:
        """The round that this peer is in."""
        return self._place.position

    @property
    def begun(self) -> bool:
        """Whether the run has."""
        return self._place.begun

    def statistics(self) -> GossipStatistics:
        """How the rounds go."""
        return self._place.statistics()

    def serve(self) -> None:
        """Answer others from now on."""
        transport, fault = self._ctx.transport, self._ctx.fault
        transport.serve("gossip-head", self._place.serve_head)
        transport.serve_stream("gossip", guarded_stream(self._asked.serve, fault))
        self._place.outcomes.serve()
        self._lender.serve()

    def begin(self) -> None:
        """The run has begun: meet others from now on."""
        self._place.begun = True
        self._place.wake()

    def offer(self, window: GossipWindow) -> None:
        """A window is done."""
        if self._settled_s is not None:
            self._window_s = self._ctx.now() - self._settled_s
        self._place.window = window
        self._place.wake()

    def install(self, state: OuterState) -> None:
        """Stand somewhere else, without mass; between two rounds."""
        self._place.move(state, 0.0)

    async def close(self) -> None:
        """Meet nobody any more; a meeting in progress breaks with the transport."""
        self._place.closing = True

    async def run(self) -> None:
        """Take round after round, for ever."""
        place = self._place
        while True:
            while place.window is None or not place.begun or place.closing:
                await place.change()
            window = place.window
            try:
                await self._hold(window)
            except Exception:
                place.window = window  # whoever looks after us starts again
                raise
            finally:
                place.round = None
                place.enter(RoundPhase.TRAIN)

    # one round

    async def _hold(self, window: GossipWindow) -> None:
        await self._bring_level(by=LATE_BY)
        draw = await self._draw()
        now = self._ctx.now()
        here = Round(
            window=window,
            since_s=now,
            deadline_s=now + patience_s(self._ctx.settings.grace_s, self._window_s, self._hungry),
            draw=draw,
        )
        self._place.enter(RoundPhase.WAIT)
        self._place.round, self._place.window = here, None
        met = await self._meet_somebody(here)
        self._settle(here, met, members=2 if here.times.accepted else 1)

    async def _meet_somebody(self, here: Round) -> Met | None:
        """What the round leaves this peer with; None where its window is kept."""
        while not self._is_over and (partner := here.draw.partner) is not None:
            reach = self._asking.invite if here.draw.invites else self._asked.wait
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
        if self._place.others.heard(partner) <= self.position:
            return False
        await self._place.others.ask_around(self.position)
        before = self.position
        await self._bring_level(by=1)
        return self.position > before

    async def _bring_level(self, *, by: int) -> None:
        """Take over the round of those that are further."""
        level = await self._place.others.level(self.position, by=by)
        if level > self.position:
            self._place.state = self.state.at(level)

    async def _draw(self) -> Draw:
        ctx, others = self._ctx, await self._place.others.rounds()
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

    def _settle(self, here: Round, met: Met | None, *, members: int) -> None:
        if met is None and not self._is_over:
            self._place.state = self.state.at(self.position + 1)
        elif met is not None and met.state is not self.state:
            self._place.move(met.state, met.mass)
        trace = self._trace(here)
        self._place.ended(trace, here.times.encode_s)
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

    def _trace(self, here: Round) -> RoundTrace:
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
