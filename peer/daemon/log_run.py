"""Taking part in a run with a log: replica, rounds, recovery, and the coordinator as a follower.

    LogRun        owns all of it
    Publisher     sends the coordinator the entries that it lacks
    CatchingUp    brings the replica to the head of the log, and reports a wait that lasts
    QuorumWatch   notices that too few electors are online

The coordinator gets each entry from its proposer at once. It asks for any other that it lacks in
its answers to heartbeats.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import ClassVar

from atoll.coordinator.notices import decided, of_damage
from atoll.coordinator.policies import STALL_S
from atoll.coordinator.rpc.client import Beat, Joined
from atoll.coordinator.rpc.client_errors import CoordinatorError, Evicted
from atoll.coordinator.run.levels import Level
from atoll.coordinator.run.notice import Notice
from atoll.coordinator.run.phases import RoundPhase
from atoll.coordinator.run.spec import RunSpec
from atoll.coordinator.run.text import clean
from atoll.dht.identity import verify
from atoll.dht.roster import PeerRecord
from atoll.dht.scoped import roster_of, transport_of
from atoll.dht.tasks import together
from atoll.optim.log.entry import (
    Certificate,
    Elector,
    Entry,
    LogError,
    genesis_chain,
    is_quorum,
    verify_key,
)
from atoll.optim.log.live_replica import LiveReplica, Recovered, RecoveryError
from atoll.optim.log.mending import checked_body, mend
from atoll.optim.log.module import Module, log_id
from atoll.optim.log.orders import RunSettings, read_order
from atoll.optim.log.replay import Replay
from atoll.optim.log.replica import Replica
from atoll.optim.log.store import KEPT_SNAPSHOTS, LogStore, StoreHead
from atoll.optim.log.store_errors import NotStored
from atoll.optim.reduction.cells import Bytes
from atoll.optim.reduction.robust import rule_of
from atoll.optim.state import vectors
from atoll.optim.state.mapped import MappedVectors
from atoll.optim.state.outer_state import OuterState, StateError
from atoll.peer import notices
from atoll.peer.daemon.beside.segments import Segment
from atoll.peer.daemon.decisions import Decisions, Reset
from atoll.peer.daemon.loop_thread import LoopThread
from atoll.peer.daemon.peer import Environment, Peer
from atoll.peer.daemon.reducer import NetworkReducer, TrainerProgress
from atoll.peer.daemon.reporting import Heartbeats, Reporter, RoundsView
from atoll.peer.errors import PeerEvicted, SetupError
from atoll.peer.recovery.recovery import Recovery
from atoll.peer.recovery.sources import CoordinatorSource, RosterSources
from atoll.peer.rounds.conduct import Conduct
from atoll.peer.rounds.context import Context, RoundSettings
from atoll.peer.rounds.engine import Rounds, Settled
from atoll.peer.rounds.notices import no_quorum

PATIENCE_STALLS = 20  # a round with one repair and one change of proposer takes about ten
HIDDEN_STALLS = 4  # a round takes less unless a leader is lost, or this peer is cut off
LAST_VOTE_S = 10.0  # most of what a leaving elector has voted for is decided within a second
HAND_OVER_S = 3.0  # one heartbeat learns what the coordinator lacks, another that it has it
SETTLE_PAUSE_S = 1.0  # between two tries to find a first state

LASTS_S = 15.0  # a run that begins, or an epoch, has given everybody what is missing by then
AGAIN_S = 60.0  # between two warnings of one wait

EVICTED = "the organiser has evicted this peer by an order; ask the organiser to readmit it"

_log = logging.getLogger(__name__)


def hidden_patience_s(spec: RunSpec) -> float:
    """Return how long a trainer whose rounds are hidden waits for one that takes longer than that.

    It has a copy of what it handed in, so it can train on. Waiting keeps windows of equal steps in
    step with the others'; those by deadline end together without it.
    """
    return 0.0 if spec.outer.windows == "deadline" else HIDDEN_STALLS * spec.round.stall_s


class LogRun:
    """A peer's part in a run with a log; a `RunKind`."""

    follows: ClassVar[bool] = False
    """Whether it keeps all of the log, as a follower does, instead of the newest part."""

    def __init__(self, env: Environment, joined: Joined | None) -> None:
        """Build everything; `start` also gives it a state."""
        self._env = env
        spec, membership = env.spec, env.enrolment.membership
        identifier = log_id(env.run_id, env.module)
        self._genesis_chain = genesis_chain(identifier, membership.genesis_root)
        self._source = CoordinatorSource(
            env.client,
            joined.epoch if joined else b"",
            snapshot_every=spec.round.snapshot_every,
        )
        module = Module(
            run_id=identifier,
            name=env.module,
            method=spec.method(),
            layout=membership.layout,
            snapshot_every=spec.round.snapshot_every,
            trust=spec.round.trust,
            units=spec.data.num_units,
        )
        self._replay = module.replay
        self._decisions = Decisions()
        self.replica = self._make_replica(module)
        self.progress = TrainerProgress(
            spec,
            module.method,
            len(self._replay.fragments),
            ahead=lambda: self.replica.settings.course,
        )
        self.ctx = Context(
            me=env.me,
            sign=env.identity.sign,
            verify=verify,
            transport=transport_of(module.name, env.node.transport),
            roster=roster_of(module.name, env.neighbours.roster),
            replica=self.replica,
            replay=self._replay,
            scalars=outer_scalars(spec, self._replay, lambda: self.replica.settings),
            settings=RoundSettings(
                stall_s=spec.round.stall_s,
                grace_s=spec.round.grace_s,
                electors=spec.round.electors,
            ),
            compute=env.compute,
            on_event=env.report,
            ready_in_s=self.progress.ready_in_s if env.trains else (lambda: None),
            conduct=Conduct(
                is_evicted=env.client.admissions.is_out,
                evicted_in_log=self._evicted_others,
            ),
            rule=rule_of(spec.round.reducer),
            on_evidence=env.outbox.evidence.append,
        )
        # Called by name, as the reporter is made below.
        self.ctx.link.cap(
            env.options.rates.most_mbit_s, received=lambda: self.reporter.wire_bytes()[1]
        )
        env.client.before_chunk = self.ctx.link.outflow.take
        env.client.asking = self.ctx.link.inflow.asking
        if self.ctx.link.inflow.is_limited:
            env.client.leaves_a_call = 1
        self._catching_up = CatchingUp(
            self.ctx,
            Recovery(
                self.replica,
                RosterSources(self.ctx),
                genesis=self._genesis,
                stall_s=spec.round.stall_s,
                on_event=env.report,
                on_progress=lambda what, left: env.on_phase(
                    RoundPhase.RECOVER, self.replica.position, left=left
                ),
                fallback=self._source,
                stream=self.ctx.link.inflow.stream,
            ),
            on_recovered=self._on_recovered,
            on_leap=self._on_leap,
        )
        self.rounds = Rounds(
            self.ctx,
            catch_up=self._catching_up.run,
            on_settled=self._on_settled,
            on_phase=env.on_phase,
            # Called by name, as the publisher needs the rounds and is made below.
            on_led=lambda entry, certificate, body: self.publisher.on_led(entry, certificate, body),
            uplink_mbit_s=env.options.rates.uplink_mbit_s,
            ballots=env.ballots.ballots() if env.ballots is not None else None,
        )
        self.publisher = Publisher(env, self._source, self.replica, self.rounds)
        if joined is not None:
            self.publisher.note_head(joined.head)
        self.reporter = Reporter(env, self.replica, self.progress, self._rounds_view)
        self.heartbeats = Heartbeats(
            env,
            self.reporter,
            self.publisher,
            in_touch=joined is not None,
            on_evicted=self._decisions.fail,
        )
        self._quorum = QuorumWatch()
        self._serves = False

    @classmethod
    async def start(cls, env: Environment, joined: Joined | None) -> LogRun:
        """Return a run that holds a verified state and answers the others."""
        run = cls(env, joined)
        await run._enter(joined)
        return run

    async def _enter(self, joined: Joined | None) -> None:
        await self._settle(joined)
        self._follow_settings()
        self._serves = True
        self.rounds.serve()

    def _evicted_others(self) -> Collection[str]:
        """Return whom orders have put out, as this peer judges others."""
        return [peer for peer in self.replica.settings.evicted if peer != self._env.me.peer_id]

    @property
    def epoch(self) -> int:
        """The replica's epoch."""
        return self.replica.epoch

    @property
    def position(self) -> int:
        """Entries applied."""
        return self.replica.position

    def reducer(self, thread: LoopThread[Peer]) -> NetworkReducer:
        """Return the trainer's side."""
        settings = self._env.spec.round
        return NetworkReducer(
            thread,
            self.ctx,
            self.rounds,
            self.progress,
            self._decisions,
            patience_s=PATIENCE_STALLS * settings.stall_s + 4 * settings.grace_s,
            hidden_s=hidden_patience_s(self._env.spec),
            company=self._env.company,
        )

    async def run(self) -> None:
        """Hold rounds."""
        await self.rounds.run()

    async def roster_peers(self) -> dict[str, PeerRecord]:
        """Return the peers in the run, as far as they were seen."""
        return await self.ctx.roster_peers()

    def expect_working(self) -> None:
        """Raise the failure after which this peer takes part in nothing, if there is one.

        The coordinator knows orders that no log holds yet. So an evicted peer that it admits again
        stays, although the log names it: perhaps nobody else could decide that it is readmitted.
        """
        is_evicted = self._env.me.peer_id in self.replica.settings.evicted
        if is_evicted and not self.heartbeats.in_touch:
            raise PeerEvicted(EVICTED)
        self._decisions.expect_none_failed()

    async def publish(self) -> None:
        """Put this peer's record into the roster."""
        await self._env.neighbours.publish(self.epoch, self.position, self.progress.view())

    def look(self) -> None:
        """Report a round that cannot be decided because electors are missing."""
        self.ctx.link.inflow.look()
        replica = self.replica
        rounds = self.progress.ahead().rounds(self._env.spec.run.rounds)
        if rounds and replica.position >= rounds:  # complete: nothing more is decided
            return
        known = self.ctx.seen.values()
        here = [Elector(peer_id=r.peer_id, incarnation=r.incarnation) for r in known]
        warning = self._quorum.look(
            replica.position,
            replica.electorate,
            [*here, self.ctx.me],
            in_touch=self.heartbeats.in_touch,
        )
        if warning is not None:
            self._env.report("warning", warning)

    def stored_all(self) -> bool:
        """Return whether the coordinator has every entry that this peer has."""
        return self.publisher.stored_all()

    def storing(self) -> bool:
        """Return whether an entry is on its way to the coordinator."""
        return self.publisher.storing()

    async def hand_over(self) -> None:
        """Resign as an elector, and let the coordinator have the entries up to here.

        An elector that states that it votes for nothing more lets an epoch open at once, which
        voids nothing. A keeper does not resign, as it votes again after a restart.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_VOTE_S):
                await (self.rounds.end_ballots if self._env.is_keeper else self.rounds.retire)()
        position = self.replica.position
        with suppress(TimeoutError, CoordinatorError):
            async with asyncio.timeout(HAND_OVER_S):
                while self.heartbeats.in_touch and not self.publisher.stored(position):
                    await self.heartbeats.beat()
                    await asyncio.sleep(HAND_OVER_S / 10)

    async def leave(self) -> None:
        """Close the rounds, and let the log complete what it writes."""
        await self.rounds.close()
        await self.replica.settled()

    # the first state

    def _make_replica(self, module: Module) -> LiveReplica:
        env, spec = self._env, self._env.spec
        store = LogStore(
            env.paths.log(module.name),
            run_id=module.run_id,
            genesis_chain=self._genesis_chain,
            body_budget_bytes=None if self.follows else spec.round.log_mb * 1_000_000,
            keep_snapshots=KEPT_SNAPSHOTS,
            fsync=self.follows,
        )
        env.files.callback(store.close)
        verify_run = partial(verify_key, env.options.invite.run_key)
        core = Replica(
            module,
            store,
            verify=verify,
            verify_run=verify_run,
            is_ledger=self.follows,
            follows=self.follows,
            allocate=self._allocate(env.paths.log(module.name)),
        )
        return LiveReplica(core, compute=env.compute, on_failure=self._decisions.fail)

    def _allocate(self, folder: Path) -> vectors.Allocate:
        """Return what makes the vectors of the state: in memory, or in files in a folder.

        The trainer's process maps these files too, else it would hold copies in memory.
        """
        if not self._env.options.state_on_disk:
            return vectors.empty
        return MappedVectors(folder, Segment.of_file).empty

    async def _settle(self, joined: Joined | None) -> None:
        """Resume from this machine, or fetch a state."""
        env = self._env
        verify_run = partial(verify_key, env.options.invite.run_key)
        damage = await env.compute(partial(mend, self.replica.store, verify_run=verify_run))
        if damage:
            env.report("warning", of_damage(damage))
        if await self.replica.resume():
            env.report("info", notices.state_resumed(position=self.replica.position))
        while True:
            if not self.replica.ready and (joined is None or joined.head.position == 0):
                await self._begin()
            if joined is not None and joined.epoch:
                await self.replica.adopt(joined.epoch)
            # Before there is a state: recovery asks peers that are connected already.
            await together(self.publish(), env.neighbours.connect(self.roster_peers))
            await self._catching_up.run()
            if self.replica.ready:
                return
            await asyncio.sleep(SETTLE_PAUSE_S)
            joined = joined or await self.heartbeats.join_late()

    async def _begin(self) -> None:
        """Put the first state in place, if the coordinator gives it."""
        try:
            state = await self._genesis()
        except Evicted:
            raise
        except (CoordinatorError, StateError) as error:
            self._catching_up.report_waiting(notices.no_first_state(reason=str(error)))
            return
        await self.replica.install(state)

    async def _genesis(self) -> OuterState:
        """Build the first state if torch draws the coordinator's numbers here; else fetch it.

        Else every peer that begins a run would fetch eight bytes a parameter over one link.
        """
        env = self._env
        if env.make_first is not None:
            with suppress(SetupError):  # the trainer reports it, if it is one there too
                state: OuterState = await env.compute(env.make_first, env.spec, env.module)
                if await env.compute(state.root) == env.enrolment.membership.genesis_root:
                    return state
        replay = self._replay
        return await env.fetch_state(replay.memory_numel, 0, memory_dtype=replay.memory_dtype)

    # in the loop

    def _on_settled(self, settled: Settled) -> None:
        entry = settled.applied.entry
        if entry.kind == "control":
            order = decided(read_order(entry.order), entry.position + 1)
            self._env.company.show("info", order)
            self._follow_settings()
        if self._env.trains:  # else nobody would take it
            self._decisions.put(settled)
        if not self._catching_up.is_running:
            members = [member.peer_id for member in settled.applied.entry.members]
            self._env.company.decided(members, self._env.me.peer_id)
        # What a recovery brings is of rounds that this peer was not in; an order takes no work.
        if entry.kind != "control":
            self.reporter.trace(settled, is_recovered=self._catching_up.is_running)

    def _on_recovered(self) -> None:
        self.reporter.recoveries += 1

    def _on_leap(self) -> None:
        """Drop open work that belongs to the position before; at the start there is none."""
        self._follow_settings()
        if self._serves and self._env.trains:
            self.rounds.withdraw()
            self._env.company.withdraw()
            why = f"recovered to position {self.replica.position}"
            course = self.replica.settings.course
            self._decisions.put(Reset(state=self.replica.state, why=why, course=course))

    def _follow_settings(self) -> None:
        """Do what the organiser's orders have changed beside the rounds."""
        spec, least = self._env.spec, self.replica.settings.min_peers
        if least is not None and spec.topology.num_stages == 1:
            self._env.company.needs_others = least > 1

    def _rounds_view(self) -> RoundsView:
        stats = self.rounds.statistics()
        return RoundsView(phase=stats.phase, last=stats.last, encode_s=self.progress.encode_s)


def outer_scalars(
    spec: RunSpec, replay: Replay, settings: Callable[[], RunSettings] = RunSettings
) -> Callable[[int], tuple[float, float]]:
    """Return position -> learning rate and momentum of its entry; equal on every peer.

    `settings` returns what orders have changed up to the position that is decided next.
    """
    timetable, rate = spec.timetable(len(replay.fragments)), spec.inner.rate

    def scalars(position: int) -> tuple[float, float]:
        inner_lr = rate.at(timetable.steps_until(position + 1) - 1, timetable.total_steps)
        now = settings()
        return now.scalars(*replay.method.scalars(now.course.inner_scale * inner_lr))

    return scalars


class Publisher:
    """One peer's relation to the coordinator; a `Listener` of its heartbeats."""

    def __init__(
        self, env: Environment, source: CoordinatorSource, replica: LiveReplica, rounds: Rounds
    ) -> None:
        """Keep in `source` where the coordinator stands."""
        self._env = env
        self._source = source
        self._replica = replica
        self._rounds = rounds
        self.is_complete = False
        """whether the coordinator has all rounds of all modules"""
        self._num_on_their_way = 0
        """entries that are being sent to the coordinator"""
        self._publishing = False
        self._reported_pruned = False
        self._behind_at: int | None = None
        """where this peer stood at the last heartbeat, if the coordinator was ahead then"""

    def on_led(self, entry: Entry, certificate: Certificate, body: Bytes) -> None:
        """Send an entry that this peer proposed, at once."""
        self._env.tasks.spawn(
            self._publish, entry.epoch, entry.position, entry.encode(), certificate.encode(), body
        )

    def stored_all(self) -> bool:
        """Return whether the coordinator has every entry that this peer has."""
        return self.stored(self._replica.position)

    def storing(self) -> bool:
        """Return whether an entry is on its way to the coordinator."""
        return self._num_on_their_way > 0

    def stored(self, position: int) -> bool:
        """Return whether the coordinator has every entry before a position."""
        return self._source.position >= position

    # the listener

    def has_retired(self) -> bool:
        """Return whether this peer has given up its vote from here on."""
        return self._rounds.retired

    def note_head(self, head: StoreHead) -> None:
        """Take where the coordinator stands."""
        self._source.epoch = head.epoch
        self._source.position = head.position
        self._source.chain = head.chain

    async def heed(self, beat: Beat) -> None:
        """Adopt a new epoch, catch up if the coordinator is ahead, send what it asks for."""
        self.is_complete = beat.finished
        if beat.epoch:
            self._source.epoch_record = beat.epoch
            with suppress(LogError):  # no epoch of this run: the heartbeats continue without it
                # Not at the epoch's base: entries are missing, or void ones are here.
                if not await self._replica.adopt(beat.epoch):
                    self._rounds.kick_catch_up()
        for order in beat.orders:
            with suppress(LogError):  # none of this run's
                self._rounds.ordering.take(order)
        if self._misses_entries(beat.head.position):
            self._rounds.kick_catch_up()
        if beat.publish_from is not None and not self._publishing:
            self._publishing = True
            self._env.tasks.spawn(self._publish_from, beat.publish_from)

    def _misses_entries(self, there: int) -> bool:
        """Return whether the coordinator is ahead, and no commit is on its way here."""
        here, before = self._replica.position, self._behind_at
        self._behind_at = here if there > here else None
        # One entry ahead is a commit on its way, which may be long in a group. A peer in none was
        # left out, or has nothing on offer, as when the run is paused: nobody may ever send it.
        is_stuck = before == here and not self._rounds.is_in_group
        return there > here + 1 or (there == here + 1 and is_stuck)

    async def _publish_from(self, start: int) -> None:
        try:
            for position in range(start, self._replica.position):
                if not await self._publish_stored(position):
                    return
        finally:
            self._publishing = False

    async def _publish_stored(self, position: int) -> bool:
        record = await self._env.compute(self._replica.store.get, position)
        if record is None or not record.certificate:
            return False
        try:
            # Checked: one that the disk has spoiled is dropped here, and asked of others. Sent as
            # it is, it would be refused and sent again for ever, as if this peer had it.
            body = await self._env.compute(_whole_body, self._replica.store, position)
        except NotStored:
            if not self._reported_pruned:  # once: each answer asks for the same entry again
                self._env.report("warning", notices.coordinator_lacks(entry=position))
            self._reported_pruned = True
            return False
        return await self._publish(record.epoch, position, record.entry, record.certificate, body)

    async def _publish(
        self, epoch: int, position: int, entry: bytes, certificate: bytes, body: Bytes
    ) -> bool:
        self._num_on_their_way += 1
        try:
            published = await self._env.client.publish(
                epoch=epoch, position=position, entry=entry, certificate=certificate, body=body
            )
        except CoordinatorError as error:
            _log.info("the coordinator does not have entry %d yet: %s", position, clean(error))
            return False
        finally:
            self._num_on_their_way -= 1
        self.note_head(published.head)
        return published.head.position > position


def _whole_body(store: LogStore, position: int) -> bytes:
    return b"".join(checked_body(store, position))


class CatchingUp:
    """Brings the replica to the head of the log."""

    def __init__(
        self,
        ctx: Context,
        recovery: Recovery,
        *,
        on_recovered: Callable[[], None],
        on_leap: Callable[[], None],
    ) -> None:
        """Call `on_leap` when the replica moved other than by the entries in between."""
        self._ctx = ctx
        self._recovery = recovery
        self._on_recovered = on_recovered
        self._on_leap = on_leap
        self._patience = Patience()
        self.is_running = False

    async def run(self) -> None:
        """Recover once; if that fails, report it and leave it to the next time."""
        before = self._ctx.replica.leaps
        self.is_running = True
        try:
            recovered = await self._recovery.run()
        except (RecoveryError, CoordinatorError, LogError) as error:
            self.report_waiting(notices.cannot_catch_up(reason=str(error)))
        else:
            self._patience.over()
            if recovered is not None:
                self._on_recovered()
                self._ctx.on_event("info", _account(recovered))
        finally:
            self.is_running = False
        # Also after a failure: a recovery that leapt and then found no donor has left the old
        # position behind, and the trainer would continue from parameters that nobody else has.
        if self._ctx.replica.leaps != before:
            self._on_leap()

    def report_waiting(self, notice: Notice) -> None:
        """Report that something is missing, as loudly as its duration asks."""
        level = self._patience.level(self._ctx.now())
        if level is not None:
            self._ctx.on_event(level, notice)


class Patience:
    """The level of a report on a wait: most waits are over before anyone has to act."""

    def __init__(self) -> None:
        """Start without a wait."""
        self._since_s: float | None = None
        self._warn_at_s = 0.0

    def level(self, now_s: float) -> Level | None:
        """Return the level at which to report that the wait continues; None for not at all.

        First it is a fact, then a warning once it lasts, and another every `AGAIN_S`.
        """
        if self._since_s is None:
            self._since_s, self._warn_at_s = now_s, now_s + LASTS_S
            return "info"
        if now_s < self._warn_at_s:
            return None
        self._warn_at_s = now_s + AGAIN_S
        return "warning"

    def over(self) -> None:
        """End the wait."""
        self._since_s = None


def _account(recovered: Recovered) -> Notice:
    return notices.state_recovered(
        from_position=recovered.from_position,
        to_position=recovered.to_position,
        snapshot=recovered.snapshot_position,
        entries=recovered.entries,
        donors=recovered.donors,
        seconds=recovered.seconds,
    )


class QuorumWatch:
    """Notices that the electors of a position are gone, and says so once."""

    def __init__(self) -> None:
        """Begin without anybody missing."""
        self._missing_at: int | None = None
        self._reported_at: int | None = None

    def look(
        self,
        position: int,
        electorate: Sequence[Elector],
        here: Collection[Elector],
        *,
        in_touch: bool,
    ) -> Notice | None:
        """Return a warning if a quorum was missing at this look and at the one before.

        Args:
            position: the one that the electorate decides.
            electorate: empty if this peer does not know it.
            here: the electors in the roster, and this peer.
            in_touch: whether this peer is, with the coordinator.
        """
        present = [i for i, elector in enumerate(electorate) if elector in here]
        if not electorate or is_quorum(present, len(electorate)):
            self._missing_at = None
            return None
        before, self._missing_at = self._missing_at, position
        if before != position or self._reported_at == position:
            return None  # one look is not enough, as a roster is some seconds behind
        self._reported_at = position
        until = (
            f"the coordinator opens a new epoch, at the latest after {STALL_S:.0f} s without a "
            "round (or the time of three rounds, if that is longer)"
            if in_touch
            else "the coordinator is back and opens a new epoch"
        )
        return no_quorum(until, round=position + 1, online=len(present), acceptors=len(electorate))
