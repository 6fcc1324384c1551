"""Taking part in a run with a log: replica, rounds, recovery, what the coordinator lacks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from atoll.coordinator.rpc.client import Joined
from atoll.coordinator.rpc.client_errors import CoordinatorError
from atoll.coordinator.run.phases import RoundPhase
from atoll.coordinator.run.spec import RunSpec
from atoll.dht.identity import verify
from atoll.dht.roster import PeerRecord, RosterError
from atoll.dht.transport import TransportError
from atoll.optim.log.entry import Elector, LogError, fp32, genesis_chain
from atoll.optim.log.replay import Replay
from atoll.optim.log.replica import Replica
from atoll.optim.log.store import LogStore
from atoll.optim.reduction.robust import rule_of
from atoll.optim.state.outer_state import OuterState, StateError
from atoll.peer.daemon.contact import Contact
from atoll.peer.daemon.electors import QuorumWatch
from atoll.peer.daemon.patience import Patience
from atoll.peer.daemon.reducer import NetworkReducer, Reset
from atoll.peer.daemon.reporting import Reporter, TrainerView
from atoll.peer.recovery.recovery import Recovered, Recovery, RecoveryError
from atoll.peer.recovery.sources import CoordinatorSource
from atoll.peer.rounds.context import Context, RoundSettings, short
from atoll.peer.rounds.engine import Rounds, Settled

if TYPE_CHECKING:
    from atoll.peer.daemon.session import Session

PATIENCE_STALLS = 20  # a round with one repair and one change of leader takes about ten
KEPT_SNAPSHOTS = 3  # the newest two may not have a certified root yet
LAST_VOTE_S = 10.0  # what an elector that leaves has voted for is mostly decided within a second
HAND_OVER_S = 3.0  # a heartbeat tells the coordinator what it lacks, another tells that it has it
SETTLE_PAUSE_S = 1.0


class LogParticipation:
    """See ``atoll.peer.daemon.session.Participation``."""

    def __init__(self, session: Session, joined: Joined | None) -> None:
        """Build everything; ``settle`` gives it a state."""
        self._session = session
        self._quorum = QuorumWatch()
        self._patience = Patience()
        self._started = False
        self._build(joined)

    @property
    def epoch(self) -> int:
        """Of the replica."""
        return self.replica.epoch

    @property
    def position(self) -> int:
        """Entries applied."""
        return self.replica.position

    def progress(self) -> TrainerView | None:
        """Of the trainer."""
        return self.reducer.progress()

    async def settle(self, joined: Joined | None) -> None:
        """Resume, or fetch; returns with a verified state."""
        await self._settle_state(joined)
        self._started = True

    def serve(self) -> None:
        """Answer in rounds."""
        self.rounds.serve()

    async def run(self) -> None:
        """Hold rounds."""
        await self.rounds.run()

    async def roster_peers(self) -> dict[str, PeerRecord]:
        """See ``Context.roster_peers``."""
        return await self.ctx.roster_peers()

    def stored_all(self) -> bool:
        """Whether the coordinator has every entry that this peer has."""
        return self.contact.stored_all()

    async def leave(self) -> None:
        """Close the rounds."""
        await self.rounds.close()

    def close(self) -> None:
        """Close the log."""
        self.replica.store.close()

    async def hand_over(self) -> None:
        """Vote no more; let the coordinator have the entries up to here, while it is there."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_VOTE_S):
                await self.rounds.retire()
        position, contact = self.replica.position, self.contact
        with suppress(TimeoutError, CoordinatorError):
            async with asyncio.timeout(HAND_OVER_S):
                while contact.in_touch and not contact.stored(position):
                    await contact.beat()  # tells what is here, and hears what is there
                    await asyncio.sleep(HAND_OVER_S / 10)

    # building

    def _build(self, joined: Joined | None) -> None:
        self._coordinator = CoordinatorSource(
            self._session.client,
            joined.epoch if joined else b"",
            snapshot_every=self._session.spec.round.snapshot_every,
        )
        self._replay = Replay(self._session.spec.method(), self._session.membership.layout)
        self.replica = self._make_replica()
        self.ctx = self._make_context()
        self.rounds = Rounds(
            self.ctx,
            catch_up=self._catch_up,
            on_settled=self._on_settled,
            on_phase=self._session.on_phase,
            on_led=lambda entry, certificate, body: self.contact.on_led(entry, certificate, body),
            uplink_mbit_s=self._session.options.rates.uplink_mbit_s,
        )
        self.reducer = self._make_reducer()
        self.reporter = self._make_reporter()
        self.contact = self._make_contact()
        self.contact.in_touch = joined is not None
        if joined is not None:
            self.contact.note_head(joined.head)
        self._recovery = Recovery(
            self.ctx,
            run_id=self._session.options.invite.run_id,
            genesis=self._genesis,
            on_progress=self._note_recovery,
            fallback=self._coordinator,
        )

    def _note_recovery(self, what: str, left: int) -> None:
        self._session.on_phase(RoundPhase.RECOVER, self.replica.position, left=left)

    def _make_replica(self) -> Replica:
        run_id, spec = self._session.options.invite.run_id, self._session.spec
        return Replica(
            run_id=run_id,
            replay=self._replay,
            store=LogStore(
                self._session.paths.log,
                run_id=run_id,
                genesis_chain=self._genesis_chain(),
                body_budget_bytes=spec.round.log_mb * 1_000_000,
                keep_snapshots=KEPT_SNAPSHOTS,
            ),
            verify=verify,
            verify_run=run_key_verifier(self._session.options.invite.run_key),
            snapshot_every=spec.round.snapshot_every,
            compute=self._session.compute,
            on_failure=lambda error: self.reducer.fail(error),
        )

    def _make_context(self) -> Context:
        spec = self._session.spec
        return Context(
            me=self._session.me,
            sign=self._session.identity.sign,
            verify=verify,
            transport=self._session.node.transport,
            roster=self._session.roster,
            replica=self.replica,
            replay=self._replay,
            scalars=outer_scalars(spec, self._replay),
            settings=RoundSettings(stall_s=spec.round.stall_s, grace_s=spec.round.grace_s),
            compute=self._session.compute,
            on_event=self._session.say,
            ready_in_s=self._session.ready_in_s,
            rule=rule_of(spec.round.reducer),
        )

    def _make_reducer(self) -> NetworkReducer:
        settings = self._session.spec.round
        patience_s = PATIENCE_STALLS * settings.stall_s + 4 * settings.grace_s
        return NetworkReducer(
            loop=asyncio.get_running_loop(),
            rounds=self.rounds,
            replica=self.replica,
            me=self.ctx.me,
            spec=self._session.spec,
            patience_s=patience_s,
            on_event=self._session.say,
            close=self._session.on_close,
        )

    def _make_reporter(self) -> Reporter:
        return Reporter(
            me=self.ctx.me,
            name=self._session.options.name,
            rates=self._session.options.rates,
            node=self._session.node,
            replica=self.replica,
            rounds=self.rounds,
            last_round=self._session.spec.run.rounds,
            view=self._session.trainer,
            trains=lambda: self.reducer.progress() is not None,
            encode_s=lambda: self.reducer.encode_s,
            compute=self._session.compute,
        )

    def _make_contact(self) -> Contact:
        return Contact(
            client=self._session.client,
            source=self._coordinator,
            node=self._session.node,
            replica=self.replica,
            rounds=self.rounds,
            reporter=self.reporter,
            compute=self._session.compute,
            spawn=self._session.spawn,
            on_joined=self._session.remember,
            say=self._session.say,
        )

    # the first state

    async def _settle_state(self, joined: Joined | None) -> None:
        resumed = await self.replica.resume()
        if resumed:
            self._session.say(
                "info", f"resumed at position {self.replica.position} from this machine"
            )
        while True:
            if not self.replica.ready and (joined is None or joined.head.position == 0):
                await self._begin()
            if joined is not None and joined.epoch:
                await self.replica.adopt(joined.epoch)
            with suppress(RosterError, TransportError, TimeoutError, OSError):
                await self._session.publish_record()
            await self._session.connect_all()
            await self._catch_up()
            if self.replica.ready:
                return
            await asyncio.sleep(SETTLE_PAUSE_S)
            joined = joined or await self._session.join_late()

    async def _begin(self) -> None:
        """Put the first state in place, if the coordinator gives it."""
        try:
            state = await self._genesis()
        except (CoordinatorError, StateError) as error:
            self._tell_waiting(f"no first state from the coordinator yet: {error}")
            return
        await self.replica.install(state, self._genesis_chain(), ())

    async def _genesis(self) -> OuterState:
        return await self._session.first_state(self._replay.memory_numel)

    def _genesis_chain(self) -> bytes:
        return genesis_chain(
            self._session.options.invite.run_id, self._session.membership.genesis_root
        )

    async def _catch_up(self) -> None:
        before = self.replica.leaps
        try:
            recovered = await self._recovery.run()
        except (RecoveryError, CoordinatorError, LogError) as error:
            self._tell_waiting(f"cannot catch up yet: {error}")
        else:
            self._patience.over()
            if recovered is not None:
                self._tell_recovered(recovered)
        if self._started and self.replica.leaps != before:
            self.rounds.withdraw()
            why = f"recovered to position {self.replica.position}"
            self.reducer.deliver(Reset(state=self.replica.state, why=why))

    def _tell_waiting(self, text: str) -> None:
        level = self._patience.level(self.ctx.now())
        if level is not None:
            self._session.say(level, text)

    def _tell_recovered(self, recovered: Recovered) -> None:
        self.reporter.recoveries += 1
        how = f"{recovered.entries} entries"
        if recovered.snapshot_position is not None:
            how = f"the snapshot at {recovered.snapshot_position} and {how}"
        donors = ", ".join(map(_donor, recovered.donors)) or "nobody"
        self._session.say(
            "info",
            f"recovered from position {recovered.from_position} to {recovered.to_position}: "
            f"{how} from {donors} in {recovered.seconds:.1f} s",
        )

    def look(self) -> None:
        """Say where the run waits for electors that are not there."""
        replica, rounds = self.replica, self._session.spec.run.rounds
        if rounds and replica.position >= rounds:
            return
        known = self.ctx.seen.values()
        here = [Elector(peer_id=r.peer_id, incarnation=r.incarnation) for r in known]
        told = self._quorum.look(
            replica.position,
            replica.electorate,
            [*here, self.ctx.me],
            in_touch=self.contact.in_touch,
        )
        if told is not None:
            self._session.say("warning", told)

    def _on_settled(self, settled: Settled) -> None:
        self.reducer.deliver(settled)
        self.reporter.trace(settled)


def outer_scalars(spec: RunSpec, replay: Replay) -> Callable[[int], tuple[float, float]]:
    """Learning rate and momentum of the entry at a position; equal on every peer of the run."""
    timetable, rate = spec.timetable(len(replay.fragments)), spec.inner.rate

    def scalars(position: int) -> tuple[float, float]:
        inner_lr = rate.at(timetable.steps_until(position + 1) - 1, timetable.total_steps)
        lr, momentum = replay.method.scalars(inner_lr)
        return fp32(lr), fp32(momentum)

    return scalars


def run_key_verifier(run_key: bytes) -> Callable[[bytes, bytes], bool]:
    """(data, signature) -> whether the run's key signed it."""
    key = Ed25519PublicKey.from_public_bytes(run_key)

    def check(data: bytes, signature: bytes) -> bool:
        try:
            key.verify(signature, data)
        except InvalidSignature:
            return False
        return True

    return check


def _donor(name: str) -> str:
    return name if name == CoordinatorSource.name else short(name)
