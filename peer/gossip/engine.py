"""Rounds of a gossip peer: draw a partner, invite it or wait for its invitation, and step.

A round ends in one of four ways, within its deadlines:

    met      both committed; this peer's window counts
    alone    there was no partner; the step uses this peer's own pseudo-gradient
    kept     the meeting broke before it was agreed; no step, and the window continues
    doubt    it broke when this peer was prepared; it asks for the outcome, then met or kept

If the partner of a peer in doubt no longer knows the outcome, the peer continues without its mass,
so that mass that it may have handed over is not counted twice (`atoll.optim.inprocess.gossip`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from atoll.coordinator.run.phases import OnPhase, RoundPhase
from atoll.optim.inprocess.gossip import Met, Side, meet
from atoll.optim.state.outer_state import OuterState
from atoll.peer.gossip.context import GossipContext
from atoll.peer.gossip.invitations import Invitee, Inviter
from atoll.peer.gossip.meeting import GossipWindow
from atoll.peer.gossip.peer import GossipPeer, GossipRound, GossipStatistics
from atoll.peer.gossip.policies import LATE_BY, Draw, draw, patience_s
from atoll.peer.gossip.snapshots import Lender
from atoll.peer.rounds.conduct import guarded_stream
from atoll.peer.rounds.context import RoundTrace


@dataclass(frozen=True, kw_only=True)
class GossipSettled:
    """Result of a round."""

    state: OuterState
    number: int
    """Number of the window that was on offer."""
    included: bool
    members: int
    loss: float | None
    tokens: int
    trace: RoundTrace


class Gossip:
    """A peer's rounds in a gossip run.

    All methods run on one event loop; blocking work runs in the context's `compute`.
    """

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
        """Start with a state; rounds start after `begin`.

        Args:
            ctx: context of this peer.
            state: the state to start with.
            mass: push-sum weight of the state.
            on_settled: called with the result of each round.
            on_phase: called when the phase changes.
            uplink_mbit_s: declared rate of the uplink; 0 to measure it.
        """
        self._ctx = ctx
        self._peer = GossipPeer(ctx, state, mass=mass, on_phase=on_phase)
        self._inviter = Inviter(self._peer)
        self._invitee = Invitee(self._peer)
        self._on_settled = on_settled
        self._hungry = 0
        """Rounds in a row whose partner was online but not ready."""
        self._window_s = 0.0
        self._settled_s: float | None = None
        self._lender = Lender(ctx, self._peer)
        ctx.link.declare(uplink_mbit_s)

    @property
    def state(self) -> OuterState:
        """Current state of this peer."""
        return self._peer.state

    @property
    def mass(self) -> float:
        """Push-sum weight of the state."""
        return self._peer.mass

    @property
    def position(self) -> int:
        """Round of this peer."""
        return self._peer.position

    @property
    def begun(self) -> bool:
        """Return whether the run has begun."""
        return self._peer.begun

    def statistics(self) -> GossipStatistics:
        """Return the latest statistics."""
        return self._peer.statistics()

    def serve(self) -> None:
        """Register the calls and streams of gossip."""
        transport, fault = self._ctx.transport, self._ctx.fault
        transport.serve("gossip-head", self._peer.serve_head)
        transport.serve_stream("gossip", guarded_stream(self._invitee.serve, fault))
        self._peer.outcomes.serve()
        self._lender.serve()

    def begin(self) -> None:
        """Start rounds, because the run has begun."""
        self._peer.begun = True
        self._peer.wake()

    def offer(self, window: GossipWindow) -> None:
        """Offer a completed window for the next round."""
        if self._settled_s is not None:  # a window begins where the round before it ended
            self._window_s = self._ctx.now() - self._settled_s
        self._peer.window = window
        self._peer.wake()

    def install(self, state: OuterState) -> None:
        """Replace the state, without mass; call only between two rounds."""
        self._peer.move(state, 0.0)

    async def close(self) -> None:
        """Start no more meetings; one in progress breaks when the transport closes."""
        self._peer.closing = True

    async def run(self) -> None:
        """Hold rounds until cancelled."""
        peer = self._peer
        while True:
            while peer.window is None or not peer.begun or peer.closing:
                await peer.change()
            window = peer.window
            try:
                await self._hold(window)
            except Exception:
                peer.window = window  # for the restart by the supervising task
                raise
            finally:
                peer.round = None
                peer.enter(RoundPhase.TRAIN)

    async def _hold(self, window: GossipWindow) -> None:
        # Before the draw, so that all draw pairs for the same round.
        await self._bring_level(by=LATE_BY)
        draw = await self._draw()
        now = self._ctx.now()
        here = GossipRound(
            window=window,
            since_s=now,
            deadline_s=now + patience_s(self._ctx.settings.grace_s, self._window_s, self._hungry),
            draw=draw,
        )
        self._peer.enter(RoundPhase.WAIT)
        self._peer.round, self._peer.window = here, None
        met = await self._meet(here)
        self._settle(here, met, members=2 if here.times.accepted else 1)

    async def _meet(self, here: GossipRound) -> Met | None:
        """Return the result of the round; None if the window is kept."""
        while not self._is_over and (partner := here.draw.partner) is not None:
            if self._ctx.lags.barred(partner, self._ctx.now()) is not None:
                here.without[partner] = "made no progress before"
                break
            reach = self._inviter.invite if here.draw.invites else self._invitee.wait
            met = await reach(here, partner)
            if here.times.accepted:
                self._hungry = 0
                return met
            # Without a new round there is no new partner: a round's pairs are fixed.
            if not await self._catch_up_with(partner) or self._ctx.now() >= here.deadline_s:
                self._hungry += here.is_refused
                break
            here.draw = await self._draw()
        return None if self._is_over else await self._alone(here.window)

    @property
    def _is_over(self) -> bool:
        return 0 < self._ctx.last_round <= self.position

    async def _catch_up_with(self, partner: str) -> bool:
        """Adopt the others' round if the partner is ahead; return whether that changed it."""
        if self._peer.known.heard(partner) <= self.position:
            return False
        await self._peer.known.ask_around(self.position)
        before = self.position
        await self._bring_level(by=1)  # the partner itself says so, hence no tolerance
        return self.position > before

    async def _bring_level(self, *, by: int) -> None:
        level = await self._peer.known.level(self.position, by=by)
        if level > self.position:
            self._peer.state = self.state.at(level)

    async def _draw(self) -> Draw:
        ctx, others = self._ctx, await self._peer.known.rounds()
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

    def _settle(self, here: GossipRound, met: Met | None, *, members: int) -> None:
        if met is None and not self._is_over:
            self._peer.state = self.state.at(self.position + 1)
        elif met is not None and met.state is not self.state:
            self._peer.move(met.state, met.mass)
        trace = self._trace(here)
        self._peer.ended(trace, here.times.encode_s)
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

    def _trace(self, here: GossipRound) -> RoundTrace:
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
