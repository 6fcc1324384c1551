"""One log of a run at its coordinator: what it accepts, when an epoch opens, how the log is.

A run decides each of its modules in a log of its own (`atoll.optim.log.module`); a dense
run has one. `Coordinator` owns the logs, and what they share: admission, presence and events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.coordinator import notices
from atoll.coordinator.admission_control import Refusal, RefusalStatus
from atoll.coordinator.catching_up import CatchUp, Recover, Taken
from atoll.coordinator.epochs import Epochs
from atoll.coordinator.first_state import ROOT_NOTE, FirstState
from atoll.coordinator.gossip import FetchModel, KeptModels, ReportedRounds
from atoll.coordinator.heads import AskHead, Heads
from atoll.coordinator.history import EventLog, History
from atoll.coordinator.ledger import contributors
from atoll.coordinator.past import PastLog
from atoll.coordinator.policies import (
    PublisherChoice,
    common_position,
    expected_round_s,
    window_s,
)
from atoll.coordinator.presence import KnownPeer, Presence, mean
from atoll.coordinator.rounds import RoundHistory
from atoll.coordinator.run.levels import Level
from atoll.coordinator.run.notice import Notice
from atoll.coordinator.run.spec import RunSpec
from atoll.coordinator.run.status import PeerStatus, RunState
from atoll.coordinator.scrubbing import Scrubbing
from atoll.coordinator.signing import EpochSigner
from atoll.optim.log.claims import Claim
from atoll.optim.log.entry import Elector, Entry, LogError
from atoll.optim.log.live_replica import LiveReplica
from atoll.optim.log.mending import Damage
from atoll.optim.log.orders import RunSettings, read_order
from atoll.optim.log.replica import DISK_ERRORS
from atoll.optim.log.standing import NotNext
from atoll.optim.log.store import StoreHead
from atoll.optim.log.stored_snapshots import SnapshotInfo
from atoll.optim.reduction.cells import Bytes

TICK_S = 0.5  # a new epoch opens at most this long after it is due
DISK_PAUSE_S = 15.0  # a body that could not be stored is not requested again sooner


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Hold what all logs of a run share."""

    spec: RunSpec
    presence: Presence
    events: EventLog
    is_evicted: Callable[[str], bool]
    clock: Callable[[], float]
    """Seconds since 1970."""
    steady: Callable[[], float]
    """Monotonic seconds."""
    may_begin: Callable[[], bool]
    """Returns whether the run has enough peers to begin, wherever in it they are."""
    lacking: Callable[[RunSettings], Sequence[bytes]]
    """Returns the orders that a log lacks, given the settings at its head."""
    on_moved: Callable[[], None]
    """Called when a log has moved on."""
    on_kept: Callable[[], None]
    """Called when a gossip run has a newer model."""
    turns: asyncio.Semaphore
    """It limits how many logs recover at a time what no peer publishes."""


@dataclass(frozen=True, kw_only=True)
class LogParts:
    """Hold what a log has on the coordinator's disk."""

    replica: LiveReplica
    """It has resumed."""
    history: History
    """The rounds of this log."""
    checkpoints: Path
    signer: EpochSigner
    first: FirstState
    damage: Damage


class KeptLog:
    """The coordinator's copy of one log, and its decisions about it."""

    def __init__(self, around: Surroundings, parts: LogParts, *, accept_loss: bool = False) -> None:
        """With `accept_loss` the log continues from what is here, whatever the history knows."""
        replica, history, damage = parts.replica, parts.history, parts.damage
        self.replica = replica
        self.name = replica.module.name
        self._around = around
        self._spec = spec = around.spec
        self._logged = spec.method().reduction != "pairs"
        fragments = self.replica.replay.fragments if self._logged else ()
        self._timetable = spec.timetable(len(fragments) or 1)
        self._epochs = Epochs(
            replica,
            signer=parts.signer,
            min_peers=self.min_peers,
            min_keepers=spec.round.min_keepers,
            known_rounds=0 if accept_loss else history.last_round(),
            may_begin=around.may_begin,
            is_evicted=around.is_evicted,
            orders_wait=lambda: bool(self.orders()),
            report=self._report,
        )
        self._epochs.is_by_heartbeats = not self._logged
        self._signer = parts.signer
        if self._logged:
            self._epochs.report_loss()
        self._damage = damage
        if damage:
            self._report("error", notices.of_damage(damage))
        self.rounds = self._open_rounds(history)
        self._history = history
        self._publisher = PublisherChoice()
        self._catching_up: CatchUp | None = None
        self._models: KeptModels | None = None
        self._scrubbing = Scrubbing(replica, parts.first, self._report)
        self.gaps = replica.store.gaps()
        self._divergence_reported = False
        self._ask_from_s = 0.0
        self._looking: asyncio.Task[None] | None = None
        """Looks whether an epoch is due."""
        started = replica.store.note("started")
        self.started_s = float(started) if started else None
        """Seconds since 1970 when the first epoch opened."""

    @property
    def past(self) -> PastLog:
        """The records from which an earlier status is made."""
        ledger = self.rounds.ledger
        return PastLog(history=self._history, ledger=ledger, entries=ledger.entries)

    @property
    def min_peers(self) -> int:
        """Trainers of this log that must hold the first state before it begins.

        A pipeline counts the peers of all stages together (`Surroundings.may_begin`), and a stage
        may be served by one peer alone.
        """
        return self._spec.round.min_peers if len(self._spec.modules) == 1 else 1

    @property
    def settings(self) -> RunSettings:
        """Return what the organiser's orders have changed up to the end of the log."""
        return self.replica.settings

    @property
    def rounds_total(self) -> int:
        """Return the round after which the run ends; 0 if it runs until it is stopped."""
        return self.settings.course.rounds(self._spec.run.rounds)

    @property
    def lacks_rounds(self) -> bool:
        """Return whether peers may have rounds that the log here has lost, or has yet to fetch."""
        epochs = self._epochs
        return self._logged and (epochs.lacks_epochs or epochs.lacks_entries)

    def orders(self) -> Sequence[bytes]:
        """Return the orders that the log lacks."""
        return self._around.lacking(self.settings)

    @property
    def params(self) -> int:
        """Parameters that the log decides."""
        return self.replica.state.layout.numel

    @property
    def is_finished(self) -> bool:
        """Return whether all rounds of the run are in the log."""
        rounds = self.rounds_total
        return bool(rounds) and self.replica.head.position >= rounds

    def head(self) -> StoreHead:
        """Return the end of the log."""
        return self.replica.head

    def alive(self, now_s: float) -> list[KnownPeer]:
        """Return the peers online that follow this log."""
        return self._around.presence.alive_in(self.name, now_s)

    def genesis_root(self) -> bytes:
        """Return the root of the first state, which need not be here; blocks."""
        store = self.replica.store
        return store.note(ROOT_NOTE) or store.snapshot(0).root

    # Entries

    async def precheck(self, entry: bytes, certificate: bytes) -> Claim | None:
        """Check an offered entry; None if it is not the next one. Raises Refusal."""
        if self.replica.is_installing:
            return None  # its body would wait in memory until the state is installed
        try:
            return await self.replica.claim(entry, certificate)
        except NotNext:
            return None
        except LogError as error:
            raise Refusal(RefusalStatus.INVALID_ARGUMENT, str(error)) from None

    async def accept(self, claim: Claim, body: Bytes, source: str) -> bool:
        """Accept an entry with its body; False if another peer was quicker. Raises Refusal."""
        electorate = self.replica.electorate
        try:
            if not await self.replica.accept_claim(claim, body):
                return False
        except LogError as error:
            # The certificate is valid and covers the body's digest, so the sender is at fault.
            self._around.events.add("warning", source, notices.bad_body(reason=str(error)))
            raise Refusal(RefusalStatus.INVALID_ARGUMENT, str(error)) from None
        except DISK_ERRORS as error:
            self.report_disk(error)
            raise Refusal(
                RefusalStatus.RESOURCE_EXHAUSTED,
                f"the coordinator cannot write to its disk: {error}",
            ) from None
        left_out = self._left_out(electorate, claim.entry)
        # Half of the trainers decided the next entry before this one arrived.
        alive = self.alive(self._around.steady())
        late = common_position(alive, epoch=claim.entry.epoch) > claim.entry.position + 1
        # Today's measurement is not that of a round of an hour ago.
        valid_loss = None if late else self._mean_valid_loss()
        self.rounds.add(
            claim.entry, self._around.clock(), left_out=left_out, valid_loss=valid_loss, late=late
        )
        self._tell_order(claim.entry)
        self._moved_on()
        return True

    def publish_from(self, status: PeerStatus, now_s: float) -> int | None:
        """Return the position from which a peer shall send entries; None if it shall not."""
        head = self.replica.head
        is_ahead = status.epoch == head.epoch and status.position > head.position
        if not self._logged or not is_ahead or now_s < self._ask_from_s:
            return None
        asked = self._publisher.asked(
            status.peer_id,
            self.alive(now_s),
            epoch=head.epoch,
            position=head.position,
            now_s=now_s,
        )
        return head.position if asked else None

    def retire(self, status: PeerStatus) -> None:
        """Note that a peer resigned: it has not voted from its position on, and never will."""
        self._epochs.retire(status)

    def sign_root(self, info: SnapshotInfo) -> bytes:
        """Sign the root of a snapshot here; empty if this machine computes wrongly."""
        if self.replica.diverged or not self._logged:
            return b""
        return self._signer.sign_root(self.replica.run_id, info.position, info.chain, info.root)

    def report_disk(self, error: Exception) -> None:
        """Report a failed write, and ask no peer for entries for `DISK_PAUSE_S`."""
        self._ask_from_s = self._around.steady() + DISK_PAUSE_S
        full = notices.disk_full(reason=str(error))
        self._around.events.report_once("error", full, key=type(error).__name__)

    # What the run's first node brings

    def recover_with(self, recover: Recover) -> CatchUp:
        """Let the replica recover what no peer publishes; the caller closes the result."""
        self._catching_up = CatchUp(
            self.replica,
            recover,
            on_taken=self._on_recovered,
            report=self._report,
            turns=self._around.turns,
            lacks_some=bool(self._damage.bodies or self.replica.store.uncertified()),
        )
        return self._catching_up

    def ask_head_with(self, ask: AskHead) -> None:
        """Let epochs be opened with peers that answer a call."""
        self._epochs.heads = Heads(ask)

    def fetch_models_with(self, fetch: FetchModel) -> KeptModels:
        """Keep models that `fetch` gets from peers; the caller closes the result."""
        self._models = KeptModels(
            self.replica,
            fetch,
            every=self._spec.coordinator.checkpoint_every,
            last=self._spec.run.rounds,
            on_kept=self._around.on_kept,
            report=self._report,
        )
        return self._models

    # Time

    async def tick(self, now_s: float) -> None:
        """Do what is due by time alone; call it every `TICK_S`."""
        self._epochs.note(self.alive(now_s), now_s, self._round_s(now_s))
        if self._catching_up is not None:
            self._epochs.is_stuck = self._catching_up.is_stuck(now_s)
            self._catching_up.look(self._claimed(now_s), now_s)
        self._scrubbing.look(now_s)
        await self._look_for_epochs(now_s)
        if self._models is not None:
            self._models.look(self.position(now_s), now_s)

    async def close(self) -> None:
        """End what runs beside the log."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        await self._scrubbing.close()

    # Standing

    def position(self, now_s: float) -> int:
        """The end of the log; in a gossip run, the position that half of the trainers reached."""
        head = self.replica.head
        if self._logged:
            return head.position
        return max(head.position, common_position(self.alive(now_s), epoch=head.epoch))

    def window(self, now_s: float) -> int:
        """The inner steps of a window at the log's position."""
        return self.settings.course.window(self._timetable.window(self.position(now_s)))

    def state(self, now_s: float) -> RunState:
        """Return whether the log waits for peers, moves, stands still, or is complete."""
        if self.is_finished:
            return "finished"
        if self.replica.opened is None:
            return "waiting"
        alive = [member.status for member in self.alive(now_s)]
        if sum(peer.role == "trainer" for peer in alive) < min(2, self.min_peers) and (
            alive and self._logged
        ):
            return "waiting"  # a trainer alone offers nothing (docs/protocol.md, part 2)
        if self.settings.is_paused:
            return "paused"
        stalled = self._epochs.is_stalled(now_s)
        return "stalled" if stalled or not alive else "training"

    # inside

    def _report(self, level: Level, notice: Notice) -> None:
        self._around.events.report(level, notice.within(self.name))

    def _open_rounds(self, history: History) -> RoundHistory:
        if not self._logged:
            return ReportedRounds(history, self._mean_valid_loss)
        num_fragments = self._timetable.num_fragments
        return RoundHistory(
            history,
            self.replica.store,
            num_fragments=num_fragments,
            # The entries come again from the peers.
            keeps_later=self.lacks_rounds,
        )

    def _mean_valid_loss(self) -> float | None:
        alive = self.alive(self._around.steady())
        return mean([member.status.valid_loss for member in alive])

    def _on_recovered(self, taken: Sequence[Taken]) -> None:
        for each in taken:
            left_out = self._left_out(each.electorate, each.entry)
            self.rounds.add(
                each.entry, self._around.clock(), left_out=left_out, valid_loss=None, late=True
            )
            self._tell_order(each.entry)
        self.gaps = self.replica.store.gaps()
        self._publisher = PublisherChoice()
        self._moved_on()

    def _tell_order(self, entry: Entry) -> None:
        if entry.kind == "control":
            decided = notices.decided(read_order(entry.order), entry.position + 1)
            self._report("info", decided)

    def _moved_on(self) -> None:
        self._around.on_moved()
        if self.replica.diverged and not self._divergence_reported:
            self._divergence_reported = True
            self._report("error", notices.log_diverged(reason=self.replica.diverged))

    async def _look_for_epochs(self, now_s: float) -> None:
        """Open an epoch if one is due; peers that do not answer hold up nothing else."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(now_s))
        looking = self._looking
        if (await asyncio.wait({looking}, timeout=TICK_S))[0]:
            looking.result()

    async def _look(self, now_s: float) -> None:
        if self.settings.is_paused and not self.orders():
            self._epochs.rest(now_s)
        if not self.is_finished and (self._logged or self.replica.opened is None):
            await self._epochs.look(self.alive(now_s), now_s)
            if self.started_s is None and self.replica.opened is not None:
                self.started_s = self._around.clock()
                self.replica.store.put_note("started", repr(self.started_s).encode())

    def _round_s(self, now_s: float) -> float:
        tokens = self._spec.step_tokens * self.window(now_s)
        window = window_s(self.alive(now_s), tokens=tokens)
        return expected_round_s(window, self.rounds.interval_s())

    def _claimed(self, now_s: float) -> int:
        """The highest position that any peer online claims to have."""
        epoch = self.replica.head.epoch
        alive = (m.status for m in self.alive(now_s))
        return max((s.position for s in alive if s.epoch == epoch), default=0)

    def _left_out(self, electorate: Sequence[Elector], entry: Entry) -> list[str]:
        """Return the electors without a contribution; keepers bring none, nor does anybody here."""
        if self._spec.round.electors == "keepers" or entry.kind == "control":
            return []
        counted = {member.peer_id for member in contributors(entry)}
        return [elector.peer_id for elector in electorate if elector.peer_id not in counted]
