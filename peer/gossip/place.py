"""Where a peer stands in a run by gossip: what it holds, what it offers, and whom it meets."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field, replace

from atoll.coordinator.run.phases import OnPhase, RoundPhase
from atoll.dht.identity import short
from atoll.dht.refusals import RefusalCode
from atoll.dht.transport import Refused, TransportError
from atoll.optim.inprocess.gossip import Met
from atoll.optim.state.outer_state import OuterState
from atoll.peer.gossip.context import GossipContext
from atoll.peer.gossip.exchange import GossipWindow, Mine, PartnerAhead, Times
from atoll.peer.gossip.messages import PROTOCOL, Standing
from atoll.peer.gossip.others import Others
from atoll.peer.gossip.outcomes import Outcomes
from atoll.peer.gossip.policies import REFUSALS, Draw
from atoll.peer.rounds.conduct import Fault
from atoll.peer.rounds.trace import RoundTrace

ANSWERED_STALLS = 2.0  # the first word of an invited peer, which may have to be dialed


@dataclass(frozen=True, kw_only=True)
class GossipStatistics:
    """How a peer's rounds go."""

    phase: RoundPhase
    last: RoundTrace | None
    partner: str
    """whom it is meeting, or met last; empty for nobody"""
    mass: float
    encode_s: float = 0.0
    """what encoding took in the last meeting"""


@dataclass(kw_only=True, eq=False)
class Round:
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


class Place:
    """What rounds, inviting and being invited have in common."""

    def __init__(
        self, ctx: GossipContext, state: OuterState, *, mass: float, on_phase: OnPhase
    ) -> None:
        """Stand at `state` with `mass`, before the run has begun."""
        self.ctx = ctx
        self.state = state
        self.mass = mass
        self.window: GossipWindow | None = None
        """on offer, for the next round"""
        self.round: Round | None = None
        self.meeting: str | None = None
        """the partner of a meeting in progress"""
        self.begun = False
        self.closing = False
        self.others = Others(ctx)
        self.outcomes = Outcomes(ctx)
        self._statistics = GossipStatistics(phase=RoundPhase.IDLE, last=None, partner="", mass=mass)
        self._on_phase = on_phase
        self._changed = asyncio.Event()

    @property
    def position(self) -> int:
        """The round that this peer is in: its own count, brought level with the others'."""
        return self.state.position

    def statistics(self) -> GossipStatistics:
        """How the rounds go."""
        return replace(self._statistics, mass=self.mass)

    def move(self, state: OuterState, mass: float) -> None:
        """Hold another state."""
        self.state, self.mass = state, mass

    def mine(self, window: GossipWindow) -> Mine:
        """What goes into a meeting."""
        return Mine(window=window, state=self.state, mass=self.mass)

    def wake(self) -> None:
        """Let whoever waits look again."""
        self._changed.set()

    async def change(self) -> None:
        """Wait until something has changed."""
        self._changed.clear()
        await self._changed.wait()

    async def change_within(self, seconds: float) -> None:
        """Wait likewise, but no longer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.change()

    def enter(self, phase: RoundPhase) -> None:
        """Tell people what is done now."""
        self._statistics = replace(self._statistics, phase=phase)
        self._on_phase(phase, self.position)

    def agreed(self, partner: str) -> None:
        """A meeting begins."""
        self._statistics = replace(self._statistics, partner=partner)
        self.enter(RoundPhase.REDUCE)

    def ended(self, trace: RoundTrace, encode_s: float) -> None:
        """A round is over."""
        self._statistics = replace(self._statistics, last=trace, encode_s=encode_s)

    def note_failure(self, here: Round, partner: str, error: Exception) -> None:
        """Keep why a partner was not met; what breaks the rules is held against it."""
        code = error.code if isinstance(error, Refused) else None
        here.without[partner] = str(error) or type(error).__name__
        if isinstance(error, PartnerAhead):
            self.others.hear(partner, error.round)
        here.is_refused = code in REFUSALS and code is not RefusalCode.BARRED
        is_away = isinstance(error, TransportError | TimeoutError)
        if here.times.accepted is None and is_away and (code in REFUSALS or code is None):
            return
        if not is_away:
            self.ctx.fault(partner, Fault.BAD_MESSAGE)
        self.ctx.on_event(
            "warning",
            f"round {self.position + 1}: the meeting with {short(partner)} broke: {error}",
        )

    async def serve_head(self, remote: str, body: bytes) -> bytes:
        """Say where this peer stands."""
        return Standing(
            protocol=PROTOCOL,
            round=self.position,
            ready_in_s=0.0 if self.round or self.window else self.ctx.ready_in_s(),
            partner=self.meeting or "",
        ).encode()
