"""State of a peer in a gossip run: its model, its window on offer, its meetings, others' rounds."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

from atoll.coordinator.run.phases import OnPhase, RoundPhase
from atoll.dht.refusals import RefusalCode
from atoll.dht.tasks import together
from atoll.dht.transport import Refused, TransportError
from atoll.optim.inprocess.gossip import Met
from atoll.optim.log.entry import LogError
from atoll.optim.state.outer_state import OuterState
from atoll.peer.gossip.context import GossipContext
from atoll.peer.gossip.meeting import GossipWindow, MeetingTimes, OwnSide, PartnerAhead
from atoll.peer.gossip.messages import PROTOCOL, GossipHead, MeetingOutcome, Question, Terms
from atoll.peer.gossip.policies import REFUSALS, Draw, brought_level
from atoll.peer.rounds import notices
from atoll.peer.rounds.conduct import Fault, guarded_call
from atoll.peer.rounds.context import RoundTrace

ASKED_AROUND = 3  # peers asked when this one is behind: it believes a round that two report
# Stall times for which a peer in doubt asks for the outcome of a meeting. A partner that froze for
# half a minute still answers; a longer wait would cost the rounds that it could do with others.
DOUBT_STALLS = 20.0
KEPT_IDS = 256  # of meetings that this peer committed

Known = Literal["committed", "not committed", "unknown"]


class KnownRounds:
    """Rounds of the other live trainers, from the roster and from the peers themselves."""

    def __init__(self, ctx: GossipContext) -> None:
        self._ctx = ctx
        self._heard: dict[str, int] = {}

    def hear(self, peer: str, round_: int) -> None:
        """Record the round that a peer reports."""
        self._heard[peer] = round_

    def heard(self, peer: str) -> int:
        """Return the round that a peer last reported; 0 if it reported none."""
        return self._heard.get(peer, 0)

    async def rounds(self) -> dict[str, int]:
        """Return the highest known round of each live trainer."""
        records = await self._ctx.trainers()
        self._heard = {p: r for p, r in self._heard.items() if p in records}
        return {p: max(r.position, self._heard.get(p, 0)) for p, r in records.items()}

    async def level(self, own: int, *, by: int) -> int:
        """Return the round in which a peer at `own` continues, by `policies.brought_level`."""
        level = brought_level(own, (await self.rounds()).values(), by=by)
        last = self._ctx.last_round
        return max(own, min(level, last)) if last else level

    async def ask_around(self, own: int) -> None:
        """Ask a sample of the other peers for their rounds; it differs by peer and by round."""
        others = sorted(await self._ctx.trainers())
        choice = random.Random(f"{self._ctx.me.peer_id}/{own}")
        asked = choice.sample(others, min(ASKED_AROUND, len(others)))
        await together(*(self.head(peer) for peer in asked))

    async def head(self, peer: str) -> GossipHead | str:
        """Return a peer's head, or the reason why it cannot be asked."""
        timeout_s = self._ctx.settings.stall_s
        try:
            reply = await self._ctx.transport.call(peer, "gossip-head", b"", timeout_s=timeout_s)
            head = GossipHead.decode(reply)
        except (TransportError, LogError) as error:
            return str(error)
        self.hear(peer, head.round)
        return head


class Outcomes:
    """Outcomes of meetings; the inviting peer decides and answers a partner in doubt."""

    def __init__(self, ctx: GossipContext) -> None:
        self._ctx = ctx
        self._committed: deque[bytes] = deque(maxlen=KEPT_IDS)
        self.deciding: bytes | None = None
        """Id of the meeting that this peer is deciding."""

    def serve(self) -> None:
        """Register the call `gossip-outcome`."""
        handler = guarded_call(self._serve, self._ctx.fault)
        self._ctx.transport.serve("gossip-outcome", handler)

    def commit(self, name: bytes) -> None:
        """Record that a meeting is committed; any other counts as not committed."""
        self._committed.append(name)

    async def _serve(self, remote: str, body: bytes) -> bytes:
        question = Question.decode(body)
        committed = question.exchange in self._committed
        pending = question.exchange == self.deciding and not committed
        return MeetingOutcome(
            incarnation=self._ctx.me.incarnation,
            decided="committed" if committed else "pending" if pending else "not committed",
        ).encode()

    async def ask(self, partner: str, terms: Terms) -> Known:
        """Ask a partner whether a meeting was committed, until it answers or time is up.

        Return "unknown" if the partner has restarted, because it no longer knows, or cannot be
        reached for `DOUBT_STALLS` stall times.
        """
        stall_s, now = self._ctx.settings.stall_s, self._ctx.now
        until = now() + DOUBT_STALLS * stall_s
        question = Question(exchange=terms.exchange).encode()
        while now() < until:
            with suppress(TransportError, LogError):
                reply = await self._ctx.transport.call(
                    partner, "gossip-outcome", question, timeout_s=stall_s
                )
                outcome = MeetingOutcome.decode(reply)
                if outcome.incarnation != terms.incarnation:  # outcomes are not on disk
                    return "unknown"
                if outcome.decided != "pending":
                    return outcome.decided
            await asyncio.sleep(stall_s / 4)  # as often as signs of life
        return "unknown"


@dataclass(frozen=True, kw_only=True)
class GossipStatistics:
    """State of a gossip peer at one moment."""

    phase: RoundPhase
    last: RoundTrace | None
    partner: str
    """PeerID of the current or last partner; empty if there was none."""
    mass: float
    encode_s: float = 0.0
    """Seconds of encoding in the last meeting."""


@dataclass(kw_only=True, eq=False)
class GossipRound:
    """One round in progress."""

    window: GossipWindow
    since_s: float
    deadline_s: float
    """Time until which it waits for a partner."""
    draw: Draw
    is_open: bool = False
    """True if this peer waits for an invitation."""
    is_refused: bool = False
    """True if the partner is online but not ready in time."""
    ended: asyncio.Future[Met | None] | None = None
    """Result of a meeting to which this peer was invited; None as a result if it broke."""
    times: MeetingTimes = field(default_factory=MeetingTimes)
    without: dict[str, str] = field(default_factory=dict)
    """Reasons by PeerID for partners that were drawn and not met."""


class GossipPeer:
    """State that rounds, invitations and meetings of one peer share."""

    def __init__(
        self, ctx: GossipContext, state: OuterState, *, mass: float, on_phase: OnPhase
    ) -> None:
        """Start with a state and its push-sum weight, before the run begins."""
        self.ctx = ctx
        self.state = state
        self.mass = mass
        self.window: GossipWindow | None = None
        """Completed window for the next round."""
        self.round: GossipRound | None = None
        self.meeting: str | None = None
        """Partner of a meeting in progress."""
        self.begun = False
        self.closing = False
        self.known = KnownRounds(ctx)
        self.outcomes = Outcomes(ctx)
        self._statistics = GossipStatistics(phase=RoundPhase.IDLE, last=None, partner="", mass=mass)
        self._on_phase = on_phase
        self._changed = asyncio.Event()

    @property
    def position(self) -> int:
        """Round of this peer: its own count, kept level with the others'."""
        return self.state.position

    def statistics(self) -> GossipStatistics:
        """Return the latest statistics."""
        return replace(self._statistics, mass=self.mass)

    def move(self, state: OuterState, mass: float) -> None:
        """Replace the state and its mass."""
        self.state, self.mass = state, mass

    def mine(self, window: GossipWindow) -> OwnSide:
        """Return this peer's side of a meeting."""
        return OwnSide(window=window, state=self.state, mass=self.mass)

    def wake(self) -> None:
        """Wake all that wait for a change."""
        self._changed.set()

    async def change(self) -> None:
        """Wait for the next `wake`."""
        self._changed.clear()
        await self._changed.wait()

    async def change_within(self, seconds: float) -> None:
        """Wait for the next `wake`, for at most `seconds`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.change()

    def enter(self, phase: RoundPhase) -> None:
        """Enter a phase and report it."""
        self._statistics = replace(self._statistics, phase=phase)
        self._on_phase(phase, self.position)

    def agreed(self, partner: str) -> None:
        """Record that a meeting begins."""
        self._statistics = replace(self._statistics, partner=partner)
        self.enter(RoundPhase.REDUCE)

    def ended(self, trace: RoundTrace, encode_s: float) -> None:
        """Record the trace of a completed round."""
        self._statistics = replace(self._statistics, last=trace, encode_s=encode_s)

    def note_failure(self, here: GossipRound, partner: str, error: Exception) -> None:
        """Record why a partner was not met; count a broken rule as a fault."""
        code = error.code if isinstance(error, Refused) else None
        here.without[partner] = str(error) or type(error).__name__
        if isinstance(error, PartnerAhead):
            self.known.hear(partner, error.round)
        here.is_refused = code in REFUSALS and code is not RefusalCode.BARRED
        is_away = isinstance(error, TransportError | TimeoutError)
        if here.times.accepted is not None and isinstance(error, TimeoutError):
            self.ctx.lags.fault(partner, Fault.NO_PROGRESS, self.ctx.now())  # it lived all the time
        if here.times.accepted is None and is_away and (code in REFUSALS or code is None):
            return  # never met: declining and absence are ordinary, and the trace has the reason
        if not is_away:
            self.ctx.fault(partner, Fault.BAD_MESSAGE)
        failed = notices.exchange_failed(round=self.position + 1, peer=partner, reason=str(error))
        self.ctx.on_event("warning", failed)

    async def serve_head(self, remote: str, body: bytes) -> bytes:
        """Answer the call `gossip-head`."""
        return GossipHead(
            protocol=PROTOCOL,
            round=self.position,
            ready_in_s=0.0 if self.round or self.window else self.ctx.ready_in_s(),
            partner=self.meeting or "",
        ).encode()
