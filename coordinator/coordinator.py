"""The coordinator of a run: its logs, and what they share.

`admission_control` admits peers; `presence` knows which are online; `kept_log` decides which
entries a log accepts and when an epoch opens. This module knows neither gRPC nor TLS: `service`
calls it. All methods run in one event loop and return soon; what blocks (the replicas) runs in
threads.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from atoll.coordinator import notices, past
from atoll.coordinator.admission_control import AdmissionControl, Refusal, RefusalStatus
from atoll.coordinator.catching_up import AT_ONCE
from atoll.coordinator.checkpointing import Checkpointing
from atoll.coordinator.history import EventLog, History
from atoll.coordinator.invites import InviteDesk, InvitesError
from atoll.coordinator.kept_log import KeptLog, LogParts, Surroundings
from atoll.coordinator.module_status import with_peers, with_valid_losses
from atoll.coordinator.orders import OrderDesk, OrderRefused
from atoll.coordinator.policies import electable, needs_most
from atoll.coordinator.presence import MAX_PEERS, Presence, mean
from atoll.coordinator.run.keys import RunKeys
from atoll.coordinator.run.levels import Level
from atoll.coordinator.run.notice import Notice
from atoll.coordinator.run.spec import RunSpec
from atoll.coordinator.run.status import (
    MAX_GAPS,
    CopyStatus,
    Event,
    Gap,
    ModuleStatus,
    PeerStatus,
    RoundReport,
    RoundSummary,
    RunState,
    RunStatus,
)
from atoll.dht.tasks import together
from atoll.optim.log.entry import LogError, Verify
from atoll.optim.log.evidence import Evidence
from atoll.optim.log.orders import EvictPeer, ReadmitPeer, RunSettings

PLACED_S = 120.0  # within which a peer that joined reports where it is: it may download first


@dataclass(frozen=True, kw_only=True)
class HeartbeatAnswer:
    """The coordinator's decisions at a heartbeat."""

    publish_from: int | None
    admission: bytes
    """Renewed, or empty."""
    finished: bool


@dataclass(frozen=True, kw_only=True)
class OrdersGiven:
    """The organiser's orders so far."""

    next_number: int
    settings: RunSettings
    """In force once all of them are decided."""
    decided: tuple[int, ...]
    """By module, the newest order in its log."""


class Coordinator:
    """The coordinator of one run."""

    def __init__(
        self,
        *,
        spec: RunSpec,
        keys: RunKeys,
        run_id: bytes,
        parts: Sequence[LogParts],
        history: History,
        verify: Verify,
        bootstrap: Callable[[], Sequence[str]] = tuple,
        desk: InviteDesk,
        orders: OrderDesk,
        costs: Sequence[float] = (),
        accept_loss: bool = False,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the logs of a run.

        Args:
            spec: the run's.
            keys: the run's.
            run_id: the run's.
            parts: of each module, in the order of `RunSpec.modules`.
            history: the run's events and peers.
            verify: checks a peer's signature.
            bootstrap: returns the multiaddrs of the run's first DHT node.
            desk: checks invites.
            orders: keeps the organiser's.
            costs: of a token, by module, which place newcomers; equal by default.
            accept_loss: continue from the logs here, whatever the history knows.
            clock: returns seconds since 1970.
            steady: returns monotonic seconds.
        """
        self.spec = spec
        self._codec = spec.method().codec.spec
        self.keys = keys
        self.run_id = run_id
        self._verify = verify
        self._orders = orders
        self._costs = costs
        self.finished = asyncio.Event()
        self._bootstrap = bootstrap
        self._clock = clock
        self._steady = steady
        self._records = history
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
            ordered_out=lambda: self._orders.evicted(self._settings()),
            clock=self.now_s,
            steady=lambda: self._steady(),
        )
        self._introduce: Callable[[bytes], Awaitable[bytes]] | None = None
        around = Surroundings(
            spec=spec,
            presence=self.presence,
            events=events,
            is_evicted=self.admission.is_evicted,
            clock=self.now_s,
            steady=lambda: self._steady(),
            may_begin=self._may_begin,
            lacking=orders.lacking,
            on_moved=self._on_moved,
            on_kept=self._on_kept,
            turns=asyncio.Semaphore(AT_ONCE),
        )
        logs = [KeptLog(around, each, accept_loss=accept_loss) for each in parts]
        self.logs = {log.name: log for log in logs}
        """The logs of the run's modules, by name."""
        self._checkpoints = Checkpointing(
            spec,
            {log.name: log.replica for log in logs},
            {log.name: each.checkpoints for log, each in zip(logs, parts, strict=True)},
            events.report,
        )
        self._placed: dict[str, tuple[str, float]] = {}
        """By PeerID: the module that a peer of a pipeline was given when it joined, and when; those
        that came first are first."""
        self._moves: Counter[str] = Counter()
        """By module, the peers that came from another one."""
        self.relocation = b""
        """The record of its addresses (`run/relocation.py`); empty until they are known."""
        self.copies: Callable[[], CopyStatus] | None = None
        """Tells how far the copies of this run are; None if none are kept."""
        if self._is_finished():
            self.finished.set()

    @property
    def log(self) -> KeptLog:
        """The only log of a dense run; of a pipeline the last stage's, which knows the loss."""
        return next(reversed(self.logs.values()))

    def last_checkpoint(self) -> Path | None:
        """Return the newest checkpoint on disk; of a pipeline that of the last stage."""
        return self._checkpoints.last()

    def place(self, peer_id: str, module: str, *, trains: bool = True) -> KeptLog:
        """Return the log that a peer shall follow: its own choice, or what needs it most.

        Args:
            peer_id: of the peer.
            module: its choice, or empty.
            trains: whether it takes a place, which the next ones then leave to it.

        Raises:
            Refusal: it chose a module that the run does not have.
        """
        chooses = module or len(self.logs) == 1
        log = self.log_of(module if chooses else self._needs_most(peer_id))
        if len(self.logs) > 1 and trains:
            self._placed.pop(peer_id, None)
            self._placed[peer_id] = (log.name, self._steady())
            self._forget_placed()
        return log

    def _forget_placed(self) -> None:
        """Forget who joined long ago; of very many, since anyone can join under many keys, more."""
        long_ago_s = self._steady() - PLACED_S
        while self._placed:
            first, (_, at_s) = next(iter(self._placed.items()))
            if at_s > long_ago_s and len(self._placed) <= MAX_PEERS:
                break
            del self._placed[first]

    def _needs_most(self, newcomer: str) -> str:
        """Return the module that a newcomer serves, by what all trainers can do in theirs.

        Those count that have joined and are about to begin.
        """
        self._forget_placed()
        of_peer = {peer: (module, 0.0) for peer, (module, _) in self._placed.items()}
        for status in (m.status for m in self.presence.alive(self._steady())):
            if status.role == "trainer":
                rate = status.flow.able_tokens_per_s if status.flow is not None else 0.0
                of_peer[status.peer_id] = (status.module, rate)
        of_peer.pop(newcomer, None)
        rates: dict[str, list[float]] = {module: [] for module in self.logs}
        for module, rate in of_peer.values():
            rates[module].append(rate)
        return needs_most(rates, self._costs)

    def log_of(self, module: str) -> KeptLog:
        """Return the log of a module. Raises Refusal."""
        if module not in self.logs:
            raise Refusal(
                RefusalStatus.INVALID_ARGUMENT,
                f"expected a module of {', '.join(map(repr, self.logs))}, got {module[:64]!r}",
            )
        return self.logs[module]

    def now_s(self) -> float:
        """Return seconds since 1970 by the run's clock."""
        return self._clock()

    def report(self, level: Level, notice: Notice) -> None:
        """Add an event to the run's."""
        self._events.report(level, notice)

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
        """Take the report of an authenticated peer. Raises Refusal.

        Args:
            status: its status.
            events: its events, for people.
            traces: its reports on rounds.
            leaving: True if it says goodbye.
            retired: True if it resigns: it has voted for nothing from its position on and never
                will.
            evidence: a record against a peer, or empty.
        """
        now_s, log = self._steady(), self.log_of(status.module)
        role = self.admission.role_of(status.peer_id, status.role)
        status = replace(status, role=role)
        self._note_move(status)
        self.presence.report(status, now_s, leaving=leaving)
        if leaving and retired:
            log.retire(status)
        for event in self.admission.paced(status.peer_id, events):
            self._events.add(event.level, status.peer_id, event.notice, at_s=event.at)
        for trace in traces if role != "follower" else ():
            log.rounds.trace(status.peer_id, trace, self._clock())
        if evidence:
            self._take_evidence(log, status.peer_id, evidence)
        return HeartbeatAnswer(
            publish_from=log.publish_from(status, now_s),
            admission=self.admission.renewed(status.peer_id, role),
            finished=self.finished.is_set(),
        )

    def _note_move(self, status: PeerStatus) -> None:
        """Count a peer that serves another module than before."""
        known = self.presence.peers.get(status.peer_id)
        if known is not None and known.status.module != status.module:
            self._moves[status.module] += 1

    def _take_evidence(self, log: KeptLog, reporter: str, record: bytes) -> None:
        """Evict the signer of two contradicting entries; it does not matter who reports it."""
        try:
            evidence = Evidence.decode(record)
            evidence.check(log.replica.run_id, self._verify)
        except LogError as error:
            useless = notices.bad_evidence(reason=str(error))
            for event in self.admission.paced(
                reporter, [Event.of(useless, "warning", at=self._clock())]
            ):
                self._events.add(event.level, reporter, event.notice)
            return
        # Keys are free: the lies of those that never came here would only fill the list.
        electors = {elector.peer_id for elector in log.replica.electorate}
        known = self.presence.peers.get(evidence.peer_id)
        if known is not None or evidence.peer_id in electors:
            reason = f"it signed two {evidence.kind}s in round {evidence.position + 1}"
            try:
                self.admission.evict(evidence.peer_id, reason)
            except (OSError, InvitesError) as error:
                self.report_disk(error)

    async def manage_invites(self, request: bytes, signature: bytes) -> bytes:
        """Do what the organiser's key asks about invites; return all of them. Raises Refusal."""
        verify = self._orders.verify_organiser(self._settings())
        return await self.admission.manage_invites(request, signature, verify)

    # Orders

    def give_order(self, signed: bytes) -> None:
        """Take an order of the organiser's, which the run's key signed. Raises Refusal."""
        # Its number may be that of another one there, which would void it.
        if any(log.lacks_rounds for log in self.logs.values()):
            raise Refusal(
                RefusalStatus.RESOURCE_EXHAUSTED,
                "this coordinator lacks rounds that peers may have, as after a restore; it takes "
                "orders once they have sent them: give it again in two minutes",
            )
        try:
            order = self._orders.give(signed, self._settings())
        except OrderRefused as error:
            raise Refusal(RefusalStatus.INVALID_ARGUMENT, str(error)) from None
        except OSError as error:
            self.report_disk(error)
            raise Refusal(
                RefusalStatus.RESOURCE_EXHAUSTED,
                f"the coordinator cannot write to its disk: {error}; free space there",
            ) from None
        if order is None:
            return
        self.report("info", notices.given(order))
        match order.change:
            case EvictPeer(peer_id=peer):
                self.presence.put_out(peer)
            case ReadmitPeer(peer_id=peer):
                try:
                    self.admission.readmit(peer)
                except (OSError, InvitesError) as error:
                    self.report_disk(error)

    def orders(self) -> OrdersGiven:
        """Return how far the organiser's orders are."""
        logs = self._settings()
        position = max(log.head().position for log in self.logs.values())
        return OrdersGiven(
            next_number=self._orders.next_number(logs),
            settings=self._orders.settings(logs, position),
            decided=tuple(each.number for each in logs),
        )

    def _settings(self) -> list[RunSettings]:
        return [log.settings for log in self.logs.values()]

    def heartbeat_s(self) -> float:
        """Return the interval of heartbeats that peers are asked for."""
        return self.presence.interval_s(self._steady())

    def bootstrap(self) -> list[str]:
        """Return the multiaddrs of the run's first DHT node."""
        return list(self._bootstrap())

    # The run's first node

    def introduce_with(self, introduce: Callable[[bytes], Awaitable[bytes]]) -> None:
        """Answer questions for records of peers by `introduce` from now on."""
        self._introduce = introduce

    async def tick(self) -> None:
        """Do what is due by time alone; call it every `TICK_S`."""
        now_s = self._steady()
        for peer_id in self.admission.refresh():
            self.presence.put_out(peer_id)
        self.presence.look(now_s)
        # A log waits up to `TICK_S` for peers that do not answer; the others must not wait too.
        await together(*(log.tick(now_s) for log in self.logs.values()))
        await self.presence.save_when_due(now_s)

    def report_disk(self, error: Exception) -> None:
        """Report a failed write; no log asks for entries for a while."""
        for log in self.logs.values():
            log.report_disk(error)

    async def close(self) -> None:
        """Write the last checkpoints and the peers' statuses."""
        for log in self.logs.values():
            await log.close()
        await self._checkpoints.close()
        self.presence.save()

    # Status

    def status(self, module: str = "") -> RunStatus:
        """Return the run's current status.

        Args:
            module: the one of which it lists rounds, and those whose updates are missing; by
                default the last stage of a pipeline.

        Raises:
            Refusal: the run has no such module.
        """
        now_s, log = self._steady(), self.log
        listed = self.log_of(module) if module else log
        alive = [m.status for m in self.presence.alive(now_s)]
        trainers = [s for s in alive if s.role == "trainer"]
        history = self._history(log)
        return RunStatus(
            run_name=self.spec.run.name,
            run_id=self.run_id.hex(),
            state=self._state(now_s),
            epoch=log.head().epoch,
            position=min(each.position(now_s) for each in self.logs.values()),
            rounds_total=log.rounds_total,
            min_peers=log.settings.min_peers or self.spec.round.min_peers,
            min_keepers=self.spec.round.min_keepers,
            chain=log.head().chain.hex(),
            started_at=log.started_s,
            now=self._clock(),
            tokens_total=log.rounds.tokens_total,
            tokens_per_s=sum(s.tokens_per_s for s in trainers if s.module == log.name),
            loss=next((r.loss for r in reversed(history) if r.loss is not None), None),
            valid_loss=next((r.valid_loss for r in reversed(history) if r.valid_loss), None),
            utilisation=mean([s.utilisation for s in trainers]) or 0.0,
            peers=self.presence.shown(now_s),
            contributions=past.contributions(
                {name: each.rounds.contributed() for name, each in self.logs.items()}
            ),
            history=history if listed is log else self._history(listed),
            earlier=log.rounds.ledger.points(history[0].position) if history else [],
            gaps=[Gap(first=start + 1, last=stop) for start, stop in listed.gaps[-MAX_GAPS:]],
            events=self._events.newest(),
            codec=log.settings.codec or self._codec,
            method=self.spec.outer.method,
            inner_steps=log.window(now_s),
            settings=log.settings.numbers,
            evicted=list(log.settings.evicted),
            reducer=log.settings.reducer or "",
            orders_waiting=len(self._orders.lacking(min(self._settings(), key=lambda s: s.number))),
            params=sum(each.params for each in self.logs.values()),
            modules=self._modules(trainers, now_s),
            copies=self.copies() if self.copies is not None else None,
            rows=past.rows_of(log.replica.standing.units, self.spec.data.num_units),
        )

    def status_at(self, now: RunStatus, position: int) -> RunStatus:
        """Return the status after an earlier round; reads the disk, so call it in a thread.

        Args:
            now: from `status`.
            position: the round, of the last module.
        """
        logs = {name: log.past for name, log in self.logs.items()}
        return past.status_at(now, logs, self._records, position)

    def _history(self, log: KeptLog) -> list[RoundSummary]:
        """Return the newest rounds of a log."""
        first, *others = self.logs.values()
        measured = first.rounds.newest()
        return with_valid_losses(log.rounds.newest(), measured) if others else measured

    def _modules(self, trainers: Sequence[PeerStatus], now_s: float) -> list[ModuleStatus]:
        """Return how each module of a pipeline is; none of a dense run's only one."""
        if len(self.logs) == 1:
            return []
        standings = [
            ModuleStatus(
                name=log.name,
                state=log.state(now_s),
                epoch=log.head().epoch,
                position=log.position(now_s),
                chain=log.head().chain.hex(),
                params=log.params,
                moves=self._moves[log.name],
            )
            for log in self.logs.values()
        ]
        return with_peers(standings, trainers)

    def _state(self, now_s: float) -> RunState:
        """Return the state of the log that is least far."""
        order: tuple[RunState, ...] = ("waiting", "stalled", "paused", "training", "finished")
        states: list[RunState] = [log.state(now_s) for log in self.logs.values()]
        return min(states, key=order.index)

    def _may_begin(self) -> bool:
        """Return whether a pipeline has a peer at each stage, and as many as it begins with."""
        if len(self.logs) == 1 or any(log.started_s is not None for log in self.logs.values()):
            return True
        now_s = self._steady()
        ready = [len(electable(log.alive(now_s), epoch=None)) for log in self.logs.values()]
        return min(ready) > 0 and sum(ready) >= self.spec.round.min_peers

    def _is_finished(self) -> bool:
        return all(log.is_finished for log in self.logs.values())

    def _on_moved(self) -> None:
        self._note_finished()
        self._checkpoints.look(last=self._is_finished())

    def _on_kept(self) -> None:
        self._note_finished()
        self._checkpoints.look(last=True)

    def _note_finished(self) -> None:
        if self._is_finished() and not self.finished.is_set():
            self.finished.set()
            rounds = self.log.rounds_total
            self._events.report("info", notices.run_complete(rounds=rounds))
