"""A peer's reports about itself: to its owner, to the coordinator, and to everyone who watches.

    Announcer    shows events on this machine and keeps them for the coordinator
    Outbox       keeps events and accounts of rounds for the next heartbeat
    Reporter     gathers the status, with the use of the link that a `Meter` measures
    Heartbeats   sends all of it, and heeds the answers

Training needs none of it: while the coordinator is away the peer continues.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Protocol

from atoll.coordinator.rpc.client import Beat, Joined
from atoll.coordinator.rpc.client_errors import (
    CoordinatorError,
    CoordinatorUnreachable,
    Evicted,
    NotWelcome,
)
from atoll.coordinator.run.levels import Level
from atoll.coordinator.run.notice import Notice, Report
from atoll.coordinator.run.outcome import ABSENCES, Outcome
from atoll.coordinator.run.phases import AT_REST, RoundPhase, RoundStage
from atoll.coordinator.run.status import (
    NAMED_PEERS,
    Event,
    FlowStatus,
    PeerState,
    PeerStatus,
    RoundReport,
)
from atoll.dht import clock
from atoll.dht.addresses import peer_of
from atoll.dht.roster import RecordError
from atoll.dht.wirecount import WireCounter
from atoll.optim.log.entry import Elector
from atoll.optim.log.store import StoreHead
from atoll.optim.state.outer_state import OuterState, StateGone
from atoll.peer.daemon.reducer import TrainerProgress
from atoll.peer.daemon.tally import RoundTally, outcome_of
from atoll.peer.daemon.touch import Touch
from atoll.peer.errors import PeerEvicted
from atoll.peer.pipeline.tallies import HopStatistics
from atoll.peer.rounds.bulk import BITS
from atoll.peer.rounds.context import RoundTrace
from atoll.peer.rounds.engine import Settled

if TYPE_CHECKING:
    from atoll.peer.daemon.peer import Environment
    from atoll.peer.daemon.views import TrainerView

MAX_KEPT = 128  # events, and accounts of rounds, while the coordinator is away
MAX_SENT = 32  # of each in one heartbeat: the coordinator refuses more (`MAX_REPORTS`)
KEPT_KEYS = 256  # keys of events that repeat; a round has some tens of them
QUIET_S = 60.0  # after which an event is news again; waits pause for at most a quarter of it

QUIET_MBIT_S = 1.0  # a lower rate may be heartbeats alone, and shows nothing of the link
MIN_INTERVAL_S = 0.5  # shorter readings measure buffers instead of the link

MAX_REASON = 200  # characters; a trace with a longer one would be refused
MAX_LEFT_OUT = 512  # PeerIDs; a trace with more would be refused for its length, again and again

FIRST_PAUSE_S = 1.0  # the coordinator gives the next ones
MAX_PAUSE_S = 15.0  # between tries while it is away


class Outbox:
    """Bounded: while the coordinator is away, the oldest are dropped."""

    def __init__(self) -> None:
        """Start empty."""
        self.events: deque[Event] = deque(maxlen=MAX_KEPT)
        self.traces: deque[RoundReport] = deque(maxlen=MAX_KEPT)
        self.evidence: deque[bytes] = deque(maxlen=MAX_KEPT)
        """records against peers, one a heartbeat; they are kept in the log too"""

    def note(self, level: Level, notice: Notice, at_s: float) -> None:
        """Keep an event for the coordinator."""
        self.events.append(Event.of(notice, level, at=max(0.0, at_s)))

    def take(self) -> tuple[list[Event], list[RoundReport]]:
        """Remove and return what one heartbeat carries."""
        events = [self.events.popleft() for _ in range(min(MAX_SENT, len(self.events)))]
        traces = [self.traces.popleft() for _ in range(min(MAX_SENT, len(self.traces)))]
        return events, traces

    def put_back(self, events: list[Event], traces: list[RoundReport]) -> None:
        """Return what a failed heartbeat had taken, in its order."""
        self.events.extendleft(reversed(events))
        self.traces.extendleft(reversed(traces))


class Announcer:
    """Shows events on this machine and keeps them for the coordinator; safe in any thread."""

    def __init__(self, on_event: Report, outbox: Outbox, now_s: Callable[[], float]) -> None:
        """Stamp events with `now_s`, the run's clock."""
        self._on_event = on_event
        self._outbox = outbox
        self._now_s = now_s
        self._repeats = Repeats()
        self._lock = threading.Lock()  # the loop and the trainer both report

    def report(self, level: Level, notice: Notice, *, key: Hashable | None = None) -> None:
        """Report an event, here and to the coordinator; see `OnEvent`."""
        shown = self._throttled(level, notice, key)
        if shown is not None:
            self._outbox.note(level, shown, self._now_s())
            self._on_event(level, shown)

    def show(self, level: Level, notice: Notice, *, key: Hashable | None = None) -> None:
        """Report an event here only."""
        shown = self._throttled(level, notice, key)
        if shown is not None:
            self._on_event(level, shown)

    def _throttled(self, level: Level, notice: Notice, key: Hashable | None) -> Notice | None:
        if level == "info":
            return notice
        with self._lock:
            return self._repeats.shown(notice, time.monotonic(), key=key)


class Repeats:
    """Counts events by key."""

    def __init__(self) -> None:
        self._said: OrderedDict[Hashable, tuple[int, float]] = OrderedDict()
        """By key: the count and the time of the last one; the latest key is at the end."""

    def shown(self, notice: Notice, now_s: float, *, key: Hashable | None = None) -> Notice | None:
        """Return the event to report, with its count if it repeats; None to leave it out.

        Args:
            notice: the event.
            now_s: on any steady clock.
            key: equal for events that repeat one another; by default the text.
        """
        key = notice if key is None else key
        times, last_s = self._said.pop(key, (0, now_s))
        times = 1 if now_s - last_s > QUIET_S else times + 1
        self._said[key] = times, now_s
        if len(self._said) > KEPT_KEYS:
            self._said.popitem(last=False)
        if times & (times - 1):  # not a power of two
            return None
        return Notice.of(notice).repeated(times)


@dataclass(frozen=True, kw_only=True)
class LinkUse:
    """One direction of a link."""

    capacity_mbit_s: float = 0.0
    use: float = 0.0
    """Share of the capacity in use, 0 to 1."""


class Meter:
    """Measures one direction of a link."""

    def __init__(self, declared_mbit_s: float = 0.0) -> None:
        """Take the capacity that the owner declared; 0 if unknown."""
        self._declared_mbit_s = declared_mbit_s
        self._peak_mbit_s = 0.0
        self._bytes = 0
        self._at_s: float | None = None
        self._last = LinkUse(capacity_mbit_s=declared_mbit_s)

    @property
    def capacity_mbit_s(self) -> float:
        """The capacity as of the last reading; 0 if unknown."""
        return self._last.capacity_mbit_s

    def read(self, wire_bytes: int, now_s: float) -> LinkUse:
        """Take a reading of a growing counter; return the use since the last one."""
        if self._at_s is None:
            self._bytes, self._at_s = wire_bytes, now_s
        seconds = now_s - self._at_s
        if seconds >= MIN_INTERVAL_S:
            self._last = self._use((wire_bytes - self._bytes) * BITS / seconds)
            self._bytes, self._at_s = wire_bytes, now_s
        return self._last

    def _use(self, rate_mbit_s: float) -> LinkUse:
        if rate_mbit_s > QUIET_MBIT_S:
            self._peak_mbit_s = max(self._peak_mbit_s, rate_mbit_s)
        capacity = self._declared_mbit_s or self._peak_mbit_s
        use = min(1.0, rate_mbit_s / capacity) if capacity else 0.0
        return LinkUse(capacity_mbit_s=capacity, use=use)


class Standing(Protocol):
    """The state of a peer: its replica of the log, or its own run by gossip."""

    @property
    def snapshot_every(self) -> int:
        """Positions between two snapshots."""
        ...

    @property
    def epoch(self) -> int:
        """The epoch that this peer is in; 0 by gossip."""
        ...

    @property
    def chain(self) -> bytes:
        """The hash of the log up to here; empty by gossip."""
        ...

    @property
    def ready(self) -> bool:
        """Return whether there is a state."""
        ...

    @property
    def opened(self) -> object | None:
        """The record that opened the run; None before the run has begun."""
        ...

    @property
    def electorate(self) -> Sequence[Elector]:
        """The electors of the position; empty while this peer must recover."""
        ...

    @property
    def state(self) -> OuterState:
        """The present state."""
        ...

    @property
    def position(self) -> int:
        """Entries applied; by gossip, the round."""
        ...


@dataclass(frozen=True, kw_only=True)
class RoundsView:
    """The progress of rounds, by log or by gossip."""

    phase: RoundPhase
    """Part of the round that this peer is in."""
    last: RoundTrace | None
    encode_s: float
    """Seconds that encoding the last contribution took."""
    partner: str = ""
    """PeerID of the peer that this one meets or met last, by gossip"""


class Reporter:
    """Gathers status and accounts of rounds; sends nothing itself."""

    def __init__(
        self,
        env: Environment,
        standing: Standing,
        progress: TrainerProgress,
        rounds: Callable[[], RoundsView],
    ) -> None:
        """Read everything again at each `status`."""
        self._env = env
        self._standing = standing
        self._progress = progress
        self._rounds = rounds
        rates = env.options.rates
        self._up, self._down = Meter(rates.uplink_mbit_s), Meter(rates.downlink_mbit_s)
        # The transport counts p2pd's sockets. Those of this process are gRPC's; a streamed data
        # set's are the trainer's.
        self._grpc_wire = WireCounter([os.getpid()])
        self._wire_before = (0, 0)
        self._digest: tuple[int, bytes] = (0, b"")
        self.tally = RoundTally(progress.num_fragments)
        self.recoveries = 0
        self.leaving = False
        self.newest: PeerStatus | None = None
        """what was gathered last"""
        self._flow: Callable[[], HopStatistics | None] = lambda: None

    @property
    def download_mbit_s(self) -> float:
        """Measured or declared capacity of the downlink; 0 if unknown."""
        return self._down.capacity_mbit_s

    def watch_flow(self, flow: Callable[[], HopStatistics | None]) -> None:
        """Report what flows through this peer of a pipeline from now on."""
        self._flow = flow

    def trace(self, settled: Settled, *, is_recovered: bool = False) -> None:
        """Keep this peer's account of a round by log; of one from a recovery, if it had work."""
        entry = settled.applied.entry
        mine = next((m for m in entry.members if m.elector == self._env.me), None)
        loss, tokens = (mine.loss, mine.tokens) if mine else (None, 0)
        is_offered = settled.settles is not None
        outcome = outcome_of(
            entry,
            self._env.me,
            settled.included,
            is_offered=is_offered,
            missed=settled.missed,
        )
        if is_offered or not is_recovered:
            self._count(entry.position, outcome, loss=loss, tokens=tokens)
        if settled.trace is None:
            return
        if outcome in ABSENCES:
            settled.trace.left_out.setdefault(self._env.me.peer_id, ABSENCES[outcome])
        self._keep(
            settled.trace,
            epoch=entry.epoch,
            position=entry.position,
            included=settled.included is not None and all(settled.included),
            loss=loss,
            tokens=tokens,
        )

    def trace_meeting(
        self, trace: RoundTrace, *, met: bool, loss: float | None, tokens: int
    ) -> None:
        """Keep this peer's account of a round by gossip, in which it met its partner or not."""
        outcome = Outcome.COUNTED if met else Outcome.NO_PARTNER
        self._count(trace.position, outcome, loss=loss, tokens=tokens)
        self._keep(
            trace,
            epoch=0,
            position=trace.position,
            included=met,
            loss=loss,
            tokens=tokens if met else 0,
        )

    def _count(self, position: int, outcome: Outcome, *, loss: float | None, tokens: int) -> None:
        """Count a round, once the trainer has begun: without one, or before, there is no work."""
        if not self._env.trains or not self._progress.started:
            return
        self.tally.add(
            position + 1,
            outcome,
            loss=loss,
            tokens=tokens,
            wire_bytes_sent=self.wire_bytes()[0],
        )

    def _keep(
        self,
        trace: RoundTrace,
        *,
        epoch: int,
        position: int,
        included: bool,
        loss: float | None,
        tokens: int,
    ) -> None:
        """Keep a round's account, with the bytes since the last one."""
        sent, received = self.wire_bytes()
        before, self._wire_before = self._wire_before, (sent, received)
        self._env.outbox.traces.append(
            RoundReport(
                epoch=epoch,
                position=position,
                included=included,
                loss=loss,
                tokens=tokens,
                seconds=_phases(trace, self._rounds().encode_s),
                wire_bytes_sent=sent - before[0],
                wire_bytes_received=received - before[1],
                rejected=trace.rejected,
                left_out=sorted(trace.left_out)[:MAX_LEFT_OUT],
                reasons=reasons(trace.left_out),
            )
        )

    def wire_bytes(self) -> tuple[int, int]:
        """Return bytes on the wire so far, sent and received: p2pd and gRPC together."""
        statistics = self._env.node.transport.statistics()
        grpc = self._grpc_wire.totals()
        sent = statistics.wire_bytes_sent + (grpc.sent if grpc else 0)
        received = statistics.wire_bytes_received + (grpc.received if grpc else 0)
        return sent, received

    async def status(self) -> PeerStatus:
        """Return how this peer is."""
        view, standing, rounds = self._progress.view(), self._standing, self._rounds()
        sent, received = self.wire_bytes()
        now_s = time.monotonic()
        up, down = self._up.read(sent, now_s), self._down.read(received, now_s)
        position, root = await self._state_digest()
        self.newest = PeerStatus(
            module=self._env.module,
            peer_id=self._env.me.peer_id,
            name=self._env.options.name,
            role=self._env.role,
            incarnation=self._env.me.incarnation,
            state=self._state(),
            phase=rounds.phase,
            epoch=standing.epoch,
            position=standing.position,
            chain=standing.chain.hex(),
            state_digest=root.hex(),
            state_position=position,
            tokens_per_s=_amount(view.tokens_per_s),
            tokens_total=view.tokens,
            loss=view.loss,
            valid_loss=view.valid_loss,
            step=view.step,
            inner_steps=view.inner_steps,
            wire_bytes_sent=sent,
            wire_bytes_received=received,
            uplink_mbit_s=up.capacity_mbit_s,
            downlink_mbit_s=down.capacity_mbit_s,
            uplink_use=up.use,
            downlink_use=down.use,
            utilisation=_amount(view.utilisation),
            time_shares={use: round(_amount(share), 4) for use, share in view.time_shares.items()},
            phases=_phases(rounds.last, rounds.encode_s) if rounds.last else {},
            recoveries=self.recoveries,
            partner=rounds.partner,
            device=view.device,
            version=version("atoll"),
            reach=self._env.neighbours.reachability.kind,
            relays=list(map(peer_of, self._env.node.relays)),
            relayed_bytes=self._env.node.transport.statistics().relayed_bytes,
            unreached=list(self._env.company.unreached),
            rounds_seen=self.tally.rounds_seen,
            rounds_counted=self.tally.rounds_counted,
            tokens_counted=self.tally.tokens_counted,
            outcome=self.tally.last.outcome if self.tally.last else None,
            flow=None if (flow := self._flow()) is None else flow_status(flow, view),
        )
        return self.newest

    def _state(self) -> PeerState:
        if self.leaving:
            return "leaving"
        if not self._standing.ready:
            return "joining"
        if self._standing.opened is None:
            # An epoch opens once enough peers are ready; a peer that cannot train yet is not.
            return "ready" if self._progress.started or not self._env.trains else "joining"
        if not self._standing.electorate:
            return "recovering"
        if self._env.company.is_alone or self._progress.ahead().is_paused:
            return "ready"  # it waits for another trainer, or for the organiser
        return "training" if self._rounds().phase in AT_REST else "syncing"

    async def _state_digest(self) -> tuple[int, bytes]:
        """Return the root of the newest snapshot, or of the last state of the run.

        Peers compare them to find a replica that went another way. Each takes seconds for a large
        model, so other positions keep the digest before.
        """
        standing = self._standing
        if not standing.ready:
            return self._digest
        state = standing.state
        is_last = state.position == self._progress.ahead().rounds(self._env.spec.run.rounds)
        if state.position % standing.snapshot_every and not is_last:
            return self._digest
        if self._digest[0] != state.position or not self._digest[1]:
            with suppress(StateGone):  # the run has moved on
                self._digest = (state.position, await self._env.compute(state.root))
        return self._digest


def flow_status(hop: HopStatistics, progress: TrainerView) -> FlowStatus:
    """Return what a hop has counted, and what its trainer can do, as a peer reports it."""
    return FlowStatus(
        counted=hop.counted,
        in_flight=hop.in_flight,
        queued=hop.queued_jobs,
        omitted={reason: count for reason, count in hop.omitted.items() if count},
        resends=hop.resends,
        busy_answers=hop.busy_answers,
        late_returns=hop.late_returns,
        double_counts=sum(hop.double_counts.values()),
        held_bytes=hop.held_bytes,
        able_tokens_per_s=_amount(progress.able_tokens_per_s),
        waited_s={reason: _amount(s) for reason, s in hop.waited_s.items() if s > 0},
    )


def _phases(trace: RoundTrace, encode_s: float) -> dict[str, float]:
    return {
        RoundStage.WAIT: trace.wait_s,
        RoundStage.ENCODE: encode_s,
        RoundStage.SEND: trace.send_s,
        RoundStage.REDUCE: trace.reduce_s,
        RoundStage.VOTE: trace.vote_s,
        RoundStage.APPLY: trace.apply_s,
    }


def reasons(left_out: Mapping[str, str]) -> dict[str, str]:
    """Return as many reasons as a trace may hold, each no longer than it may be."""
    shown = sorted(left_out.items())[:NAMED_PEERS]
    return {peer: why[:MAX_REASON] for peer, why in shown}


def _amount(value: float) -> float:
    return value if math.isfinite(value) and value > 0 else 0.0


class Listener(Protocol):
    """A kind of run, as it takes the coordinator's answers."""

    def note_head(self, head: StoreHead) -> None:
        """Take where the coordinator stands."""
        ...

    async def heed(self, beat: Beat) -> None:
        """Do what the coordinator asks for."""
        ...

    def has_retired(self) -> bool:
        """Return whether this peer has given up its vote from here on."""
        ...


class Heartbeats:
    """Sends what a peer reports, and heeds the answers."""

    def __init__(
        self,
        env: Environment,
        reporter: Reporter,
        listener: Listener,
        *,
        in_touch: bool,
        on_evicted: Callable[[Exception], None],
    ) -> None:
        """Make them; `keep` sends them.

        Args:
            env: of the peer.
            reporter: gives what is sent.
            listener: takes the answers.
            in_touch: whether the coordinator was there when this peer started.
            on_evicted: takes the failure after which this peer takes part in nothing more.
        """
        self._env = env
        self._reporter = reporter
        self._listener = listener
        self._on_evicted = on_evicted
        self._touch = Touch(env.report, in_touch=in_touch)

    @property
    def in_touch(self) -> bool:
        """True if the coordinator answered the last call."""
        return self._touch.in_touch

    async def keep(self) -> None:
        """Stay in touch with the coordinator until cancelled."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                beat = await self._beat_or_join()
                self._touch.answered(beat.version)
                pause_s = beat.heartbeat_s
            except Evicted as error:
                self._on_evicted(PeerEvicted(str(error)))
                await asyncio.Event().wait()  # the peer ends, and this with it
            except CoordinatorError as error:
                self._touch.failed(error)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
            await asyncio.sleep(pause_s)

    async def beat(self, *, leaving: bool = False) -> Beat:
        """Send one heartbeat and heed the answer; keep what could not be sent for the next.

        Raises:
            CoordinatorError: the coordinator is away, or refuses this peer.
        """
        outbox = self._env.outbox
        events, traces = outbox.take()
        evidence = outbox.evidence.popleft() if outbox.evidence else b""
        # Asked before the status is taken, as it holds from the position in the status on.
        retired = leaving and self._listener.has_retired()
        try:
            beat = await self._env.client.heartbeat(
                await self._reporter.status(),
                events=events,
                traces=traces,
                leaving=leaving,
                retired=retired,
                roster=self._env.node.roster.question(),
                evidence=evidence,
            )
        except CoordinatorError:
            outbox.put_back(events, traces)
            if evidence:
                outbox.evidence.appendleft(evidence)
            raise
        clock.follow(self._env.client.clock_offset_s, self._env.client.clock_error_s)
        self._listener.note_head(beat.head)
        if beat.admission:  # renewed at half its life; empty in most answers
            self._env.node.transport.admission = beat.admission
        if beat.roster:
            with suppress(RecordError):
                await self._env.node.roster.hear(beat.roster)
        if beat.bootstrap:
            self._env.node.bootstrap = beat.bootstrap
        self._env.enrolment.keep_evictions(self._env.client.evictions)
        await self._listener.heed(beat)
        return beat

    async def leave(self) -> None:
        """Say goodbye.

        Raises:
            CoordinatorError: the coordinator is away.
        """
        self._reporter.leaving = True
        await self.beat(leaving=True)

    async def join_late(self) -> Joined | None:
        """Join if the coordinator is back; None if it is not."""
        with suppress(CoordinatorUnreachable):
            joined = await self._env.join_again()
            self._listener.note_head(joined.head)
            self._touch.in_touch = True
            return joined
        return None

    async def _beat_or_join(self) -> Beat:
        try:
            return await self.beat()
        except Evicted:
            raise
        except NotWelcome:  # the coordinator restarted without its sessions, or dropped ours
            await self._env.join_again()
            return await self.beat()
