"""The coordinator's decisions: which entries it accepts, when an epoch opens, how the run is.

`admission_control` admits peers; `presence` knows which are online. This module knows neither gRPC
nor TLS: `service` calls it. All methods run in one event loop and return soon; what blocks (the
replica) runs in threads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from atoll.coordinator.admission_control import AdmissionControl, Refusal, RefusalStatus
from atoll.coordinator.catching_up import CatchUp, Recover, Taken
from atoll.coordinator.checkpointing import Checkpointing
from atoll.coordinator.epochs import Epochs
from atoll.coordinator.gossip import FetchModel, KeptModels, ReportedRounds
from atoll.coordinator.heads import AskHead, Heads
from atoll.coordinator.history import EventLog, History
from atoll.coordinator.invites import InviteDesk, InvitesError
from atoll.coordinator.policies import PublisherChoice, common_position, window_s
from atoll.coordinator.presence import Presence, mean
from atoll.coordinator.rounds import RoundHistory, contributors
from atoll.coordinator.run.keys import RunKeys
from atoll.coordinator.run.levels import Level
from atoll.coordinator.run.spec import RunSpec
from atoll.coordinator.run.status import (
    MAX_GAPS,
    Event,
    Gap,
    PeerStatus,
    RoundReport,
    RunStatus,
)
from atoll.coordinator.signing import EpochSigner
from atoll.optim.log.entry import Claim, Elector, Entry, LogError, Verify
from atoll.optim.log.evidence import Evidence
from atoll.optim.log.mending import Damage
from atoll.optim.log.replica import DISK_ERRORS, LiveReplica, NotNext
from atoll.optim.log.store import StoreHead
from atoll.optim.reduction.cells import Bytes

TICK_S = 0.5  # a new epoch opens at most this long after it is due
DISK_PAUSE_S = 15.0  # a body that could not be stored is not requested again sooner


@dataclass(frozen=True, kw_only=True)
class HeartbeatAnswer:
    """The coordinator's decisions at a heartbeat."""

    publish_from: int | None
    admission: bytes
    """Renewed, or empty."""
    finished: bool


class Coordinator:
    """The coordinator of one run."""

    def __init__(
        self,
        *,
        spec: RunSpec,
        keys: RunKeys,
        replica: LiveReplica,
        history: History,
        checkpoints: Path,
        verify: Verify,
        bootstrap: Callable[[], Sequence[str]] = tuple,
        signer: EpochSigner,
        desk: InviteDesk,
        damage: Damage,
        accept_loss: bool = False,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        """`replica` has resumed; `clock` returns seconds since 1970, `steady` monotonic ones.

        With `accept_loss` the run continues from the log here, whatever the history knows.
        """
        self.spec = spec
        self._codec = spec.method().codec.spec
        self.keys = keys
        self.replica = replica
        self.run_id = replica.run_id
        self._verify = verify
        self._logged = spec.method().reduction != "pairs"
        fragments = self.replica.replay.fragments if self._logged else ()
        self._timetable = spec.timetable(len(fragments) or 1)
        self.finished = asyncio.Event()
        self._bootstrap = bootstrap
        self._clock = clock
        self._steady = steady
        self._events = events = EventLog(history, self.now_s)
        self.presence = Presence(history, events, steady())
        self.admission = AdmissionControl(
            spec.coordinator,
            keys,
            self.run_id,
            desk=desk,
            has_keepers=spec.round.electors == "keepers",
            verify=verify,
            events=events,
            on_joined=self.presence.note_joined,
            clock=self.now_s,
            steady=lambda: self._steady(),
        )
        self._epochs = Epochs(
            replica,
            signer=signer,
            min_peers=spec.round.min_peers,
            min_keepers=spec.round.min_keepers,
            known_rounds=0 if accept_loss else history.last_round(),
            is_evicted=self.admission.is_evicted,
            report=events.report,
        )
        self._epochs.is_by_heartbeats = not self._logged
        if self._logged:
            self._epochs.report_loss()
        self._introduce: Callable[[bytes], Awaitable[bytes]] | None = None
        self._damage = damage
        if damage:
            events.report("error", str(damage))
        self.rounds = self._open_rounds(history)
        self._publisher = PublisherChoice()
        self._checkpoints = Checkpointing(spec, replica, checkpoints, events.report)
        self._catching_up: CatchUp | None = None
        self._models: KeptModels | None = None
        self._gaps = replica.store.gaps()
        self._divergence_reported = False
        self._ask_from_s = 0.0
        self._looking: asyncio.Task[None] | None = None
        """Looks whether an epoch is due."""
        started = replica.store.note("started")
        self._started_s = float(started) if started else None
        if self._is_finished():
            self.finished.set()

    def now_s(self) -> float:
        """Return seconds since 1970 by the run's clock."""
        return self._clock()

    def report(self, level: Level, text: str) -> None:
        """Add an event to the run's."""
        self._events.report(level, text)

    async def introduce(self, question: bytes) -> bytes:
        """Return signed records of peers; none before the first DHT node runs."""
        return await self._introduce(question) if self._introduce is not None else b""

    # Heartbeats

    def heartbeat(
        self,
        status: PeerStatus,
        events: Sequence[Event],
        traces: Sequence[RoundReport],
        *,
        leaving: bool,
        retired: bool = False,
        evidence: bytes = b"",
    ) -> HeartbeatAnswer:
        """Take the report of an authenticated peer.

        Args:
            status: its status.
            events: its events, for people.
            traces: its reports on rounds.
            leaving: True if it says goodbye.
            retired: True if it resigns: it has voted for nothing from its position on and never
                will.
            evidence: a record against a peer, or empty.
        """
        now_s = self._steady()
        role = self.admission.role_of(status.peer_id, status.role)
        status = replace(status, role=role)
        self.presence.report(status, now_s, leaving=leaving)
        if leaving and retired:
            self._epochs.retire(status)
        for event in self.admission.paced(status.peer_id, events):
            self._events.add(event.level, status.peer_id, event.text, at_s=event.at)
        for trace in traces:
            self.rounds.trace(status.peer_id, trace, self._clock())
        if evidence:
            self._take_evidence(status.peer_id, evidence)
        return HeartbeatAnswer(
            publish_from=self._publish_from(status, now_s),
            admission=self.admission.renewed(status.peer_id, role),
            finished=self.finished.is_set(),
        )

    def _take_evidence(self, reporter: str, record: bytes) -> None:
        """Evict the signer of two contradicting entries; it does not matter who reports it."""
        try:
            evidence = Evidence.decode(record)
            evidence.check(self.run_id, self._verify)
        except LogError as error:
            text = f"sent evidence that proves nothing: {error}"
            for event in self.admission.paced(
                reporter, [Event(at=self._clock(), level="warning", text=text)]
            ):
                self._events.add(event.level, reporter, event.text)
            return
        # Keys are free: the lies of those that never came here would only fill the list.
        electors = {elector.peer_id for elector in self.replica.electorate}
        known = self.presence.peers.get(evidence.peer_id)
        if known is not None or evidence.peer_id in electors:
            reason = f"it signed two {evidence.kind}s in round {evidence.position + 1}"
            try:
                self.admission.evict(evidence.peer_id, reason)
            except (OSError, InvitesError) as error:
                self.report_disk(error)

    def heartbeat_s(self) -> float:
        """Return the interval of heartbeats that peers are asked for."""
        return self.presence.interval_s(self._steady())

    def bootstrap(self) -> list[str]:
        """Return the multiaddrs of the run's first DHT node."""
        return list(self._bootstrap())

    # The log

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
            self._events.add("warning", source, f"sent an invalid body: {error}")
            raise Refusal(RefusalStatus.INVALID_ARGUMENT, str(error)) from None
        except DISK_ERRORS as error:
            self.report_disk(error)
            raise Refusal(
                RefusalStatus.RESOURCE_EXHAUSTED,
                f"the coordinator cannot write to its disk: {error}",
            ) from None
        left_out = self._left_out(electorate, claim.entry)
        # Half of the trainers decided the next entry before this one arrived.
        alive = self.presence.alive(self._steady())
        late = common_position(alive, epoch=claim.entry.epoch) > claim.entry.position + 1
        # Today's measurement is not that of a round of an hour ago.
        valid_loss = None if late else self._mean_valid_loss()
        self.rounds.add(
            claim.entry, self._clock(), left_out=left_out, valid_loss=valid_loss, late=late
        )
        self._moved_on()
        return True

    def recover_with(self, recover: Recover) -> CatchUp:
        """Let the replica recover what no peer publishes; the caller closes the result."""
        self._catching_up = CatchUp(
            self.replica,
            recover,
            on_taken=self._on_recovered,
            report=self._events.report,
            lacks_some=bool(self._damage.bodies or self.replica.store.uncertified()),
        )
        return self._catching_up

    def introduce_with(self, introduce: Callable[[bytes], Awaitable[bytes]]) -> None:
        """Answer questions for records of peers by `introduce` from now on."""
        self._introduce = introduce

    def ask_head_with(self, ask: AskHead) -> None:
        """Let epochs be opened with peers that answer a call."""
        self._epochs.heads = Heads(ask)

    def fetch_models_with(self, fetch: FetchModel) -> KeptModels:
        """Keep models that `fetch` gets from peers; the caller closes the result."""
        self._models = KeptModels(
            self.replica,
            fetch,
            every=self.spec.coordinator.checkpoint_every,
            last=self.spec.run.rounds,
            on_kept=self._on_kept,
            report=self._events.report,
        )
        return self._models

    def _on_kept(self) -> None:
        self._note_finished()
        self._checkpoints.look(last=True)

    def _open_rounds(self, history: History) -> RoundHistory:
        if not self._logged:
            return ReportedRounds(history, self._mean_valid_loss)
        num_fragments = self._timetable.num_fragments
        return RoundHistory(
            history,
            self.replica.store,
            num_fragments=num_fragments,
            # The entries come again from the peers.
            keeps_later=self._epochs.lacks_epochs or self._epochs.lacks_entries,
        )

    def _mean_valid_loss(self) -> float | None:
        return self.presence.mean_valid_loss(self._steady())

    def _on_recovered(self, taken: Sequence[Taken]) -> None:
        for each in taken:
            left_out = self._left_out(each.electorate, each.entry)
            self.rounds.add(
                each.entry, self._clock(), left_out=left_out, valid_loss=None, late=True
            )
        self._gaps = self.replica.store.gaps()
        self._publisher = PublisherChoice()
        self._moved_on()

    def _moved_on(self) -> None:
        self._note_finished()
        if self.replica.diverged and not self._divergence_reported:
            self._divergence_reported = True
            self._events.report("error", self.replica.diverged)
        self._checkpoints.look(last=self.finished.is_set())

    async def tick(self) -> None:
        """Do what is due by time alone; call it every `TICK_S`."""
        now_s = self._steady()
        for peer_id in self.admission.refresh():
            self.presence.put_out(peer_id)
        self.presence.look(now_s)
        self._epochs.note(self.presence.alive(now_s), now_s)
        await self._look_for_epochs(now_s)
        if self._catching_up is not None:
            self._catching_up.look(self._claimed(now_s), now_s)
        if self._models is not None:
            self._models.look(self._position(now_s), now_s)
        await self.presence.save_when_due(now_s)

    async def _look_for_epochs(self, now_s: float) -> None:
        """Open an epoch if one is due; peers that do not answer hold up nothing else."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(now_s))
        looking = self._looking
        if (await asyncio.wait({looking}, timeout=TICK_S))[0]:
            looking.result()

    async def _look(self, now_s: float) -> None:
        if not self.finished.is_set() and (self._logged or self.replica.opened is None):
            await self._epochs.look(self.presence.alive(now_s), now_s, self._round_s(now_s))
            if self._started_s is None and self.replica.opened is not None:
                self._started_s = self._clock()
                self.replica.store.put_note("started", repr(self._started_s).encode())

    async def close(self) -> None:
        """Write the last checkpoint and the peers' statuses."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        await self._checkpoints.close()
        self.presence.save()

    # Status

    def status(self) -> RunStatus:
        """Return the run's current status."""
        now_s, head = self._steady(), self.replica.head
        alive = [m.status for m in self.presence.alive(now_s)]
        trainers = [s for s in alive if s.role == "trainer"]
        history = self.rounds.newest()
        return RunStatus(
            run_name=self.spec.run.name,
            run_id=self.run_id.hex(),
            state=self._state(now_s, alive),
            epoch=head.epoch,
            position=self._position(now_s),
            rounds_total=self.spec.run.rounds,
            min_peers=self.spec.round.min_peers,
            min_keepers=self.spec.round.min_keepers,
            chain=head.chain.hex(),
            started_at=self._started_s,
            now=self._clock(),
            tokens_total=self.rounds.tokens_total,
            tokens_per_s=sum(s.tokens_per_s for s in trainers),
            loss=next((r.loss for r in reversed(history) if r.loss is not None), None),
            valid_loss=next((r.valid_loss for r in reversed(history) if r.valid_loss), None),
            utilisation=mean([s.utilisation for s in trainers]) or 0.0,
            peers=self.presence.shown(now_s),
            history=history,
            gaps=[Gap(first=start + 1, last=stop) for start, stop in self._gaps[-MAX_GAPS:]],
            events=self._events.newest(),
            codec=self._codec,
            method=self.spec.outer.method,
            inner_steps=self._window(now_s),
            params=self.replica.state.layout.numel,
        )

    def head(self) -> StoreHead:
        """Return the end of the coordinator's log."""
        return self.replica.head

    def last_checkpoint(self) -> Path | None:
        """Return the newest checkpoint on disk."""
        return self._checkpoints.last()

    def report_disk(self, error: Exception) -> None:
        """Report a failed write, and ask no peer for entries for `DISK_PAUSE_S`."""
        self._ask_from_s = self._steady() + DISK_PAUSE_S
        self._events.report_once(
            "error",
            f"the coordinator cannot write its state ({error}); free space on its disk. Training "
            "continues, and the coordinator then fetches what it missed",
            key=type(error).__name__,
        )

    def _publish_from(self, status: PeerStatus, now_s: float) -> int | None:
        head = self.replica.head
        is_ahead = status.epoch == head.epoch and status.position > head.position
        if not self._logged or not is_ahead or now_s < self._ask_from_s:
            return None
        asked = self._publisher.asked(
            status.peer_id,
            self.presence.alive(now_s),
            epoch=head.epoch,
            position=head.position,
            now_s=now_s,
        )
        return head.position if asked else None

    def _round_s(self, now_s: float) -> float:
        tokens = self.spec.step_tokens * self._window(now_s)
        window = window_s(self.presence.alive(now_s), tokens=tokens)
        return max(self.rounds.interval_s(), window)

    def _window(self, now_s: float) -> int:
        """The inner steps of a window at the run's position."""
        return self._timetable.window(self._position(now_s))

    def _position(self, now_s: float) -> int:
        """The end of the log; in a gossip run, the position that half of the trainers reached."""
        head = self.replica.head
        if self._logged:
            return head.position
        return max(head.position, common_position(self.presence.alive(now_s), epoch=head.epoch))

    def _claimed(self, now_s: float) -> int:
        """The highest position that any peer online claims to have."""
        epoch = self.replica.head.epoch
        alive = (m.status for m in self.presence.alive(now_s))
        return max((s.position for s in alive if s.epoch == epoch), default=0)

    def _state(
        self, now_s: float, alive: Sequence[PeerStatus]
    ) -> Literal["waiting", "training", "stalled", "finished"]:
        if self.finished.is_set():
            return "finished"
        if self.replica.opened is None:
            return "waiting"
        if sum(peer.role == "trainer" for peer in alive) < min(2, self.spec.round.min_peers) and (
            alive and self._logged
        ):
            return "waiting"  # a trainer alone offers nothing (docs/protocol.md, part 2)
        stalled = self._epochs.is_stalled(now_s, self._round_s(now_s))
        return "stalled" if stalled or not alive else "training"

    def _is_finished(self) -> bool:
        rounds = self.spec.run.rounds
        return bool(rounds) and self.replica.head.position >= rounds

    def _note_finished(self) -> None:
        if self._is_finished() and not self.finished.is_set():
            self.finished.set()
            rounds = self.spec.run.rounds
            self._events.report("info", f"run complete: all {rounds} rounds committed")

    def _left_out(self, electorate: Sequence[Elector], entry: Entry) -> list[str]:
        """Return the electors without a contribution; keepers bring none."""
        if self.spec.round.electors == "keepers":
            return []
        counted = {member.peer_id for member in contributors(entry)}
        return [elector.peer_id for elector in electorate if elector.peer_id not in counted]
