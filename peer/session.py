"""A peer's network side, in one event loop: what is built when it joins, and the tasks that go on.

    joins the coordinator by the invite (or goes on without it where it has joined before),
    starts the DHT node, resumes or recovers the replica, serves and takes part in rounds,
    keeps its record in the roster and its connections, and leaves cleanly.

A peer that is cut off from the coordinator trains on; one that is cut off from everybody goes on
trying.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from atoll.coordinator.admission import AdmissionCheck
from atoll.coordinator.client import CoordinatorClient, Joined
from atoll.coordinator.client_errors import CoordinatorError, CoordinatorUnreachable
from atoll.coordinator.invite import Invite
from atoll.coordinator.spec import RunSpec
from atoll.coordinator.status import Level
from atoll.dht.identity import Identity, verify
from atoll.dht.node import Node
from atoll.dht.roster import PeerRecord, RosterError
from atoll.dht.transport import TransportError
from atoll.optim.log import Elector, LogError, fp32, genesis_chain
from atoll.optim.replay import Replay
from atoll.optim.robust import rule_of
from atoll.optim.state import Assembly, OuterState, StateError
from atoll.optim.store import LogStore
from atoll.peer.contact import Contact
from atoll.peer.electors import QuorumWatch
from atoll.peer.learner import learning_rate, steps_until
from atoll.peer.membership import Membership, StateDirectory, addresses_to_keep
from atoll.peer.ports import expect_free
from atoll.peer.recovery import Recovered, Recovery, RecoveryError
from atoll.peer.reducer import NetworkReducer, Reset
from atoll.peer.replica import Replica
from atoll.peer.reporting import LinkRates, Reporter, TrainerView
from atoll.peer.rounds.context import Context, RoundSettings, short
from atoll.peer.rounds.engine import Rounds, Settled
from atoll.peer.rounds.messages import PROTOCOL
from atoll.peer.sources import CoordinatorSource
from atoll.peer.watched_roster import WatchedRoster

MAX_NAME_CHARS = 64  # dashboards have narrow columns
RECORD_TTL_S = 20.0  # a dead peer is expected in rounds for at most this long
RECORD_EVERY_S = 5.0  # three misses fit in the TTL
CONNECT_EVERY_S = 2.0
CONNECT_S = 10.0  # libp2p does not dial again for 5 s after a failure
JOIN_PAUSE_S = (0.5, 15.0)
OFFLINE_S = 10.0  # how long a peer that has joined before tries the coordinator at start
PATIENCE_STALLS = 20  # a round with one repair and one change of leader takes about ten
KEPT_SNAPSHOTS = 3  # the newest two may not have a certified root yet
HAND_OVER_S = 3.0  # a heartbeat tells the coordinator what it lacks, another tells that it has it
GOODBYE_S = 5.0
SETTLE_PAUSE_S = 1.0
RESTART_S = 1.0  # after a fault of ours, so that it does not spin

_log = logging.getLogger(__name__)

OnPhase = Callable[[str, int], None]


@dataclass(frozen=True, kw_only=True)
class LinkOptions:
    """What a peer decides for itself; none of it changes the run."""

    invite: Invite
    state_dir: Path
    name: str = ""
    """what its owner calls it"""
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    announce: tuple[str, ...] = ()
    rates: LinkRates = field(default_factory=LinkRates)

    def __post_init__(self) -> None:
        """Refuse a name that the coordinator would.

        Raises:
            ValueError: it is too long.
        """
        if len(self.name) > MAX_NAME_CHARS:
            raise ValueError(
                f"expected a name of at most {MAX_NAME_CHARS} characters, got {len(self.name)}"
            )


class Session:
    """Lives in the loop that calls ``start``."""

    def __init__(
        self,
        options: LinkOptions,
        directory: StateDirectory,
        *,
        say: Callable[[Level, str], None],
        on_phase: OnPhase,
        on_close: Callable[[], None],
    ) -> None:
        """``on_close`` is what the reducer's ``close`` calls."""
        self.options = options
        self.view: Callable[[], TrainerView] | None = None
        self.membership: Membership
        self.reducer: NetworkReducer
        self._directory = directory
        self._tell = say
        self._on_phase = on_phase
        self._on_close = on_close
        self._incarnation = f"{random.SystemRandom().getrandbits(128):032x}"
        self._work = ThreadPoolExecutor(2, thread_name_prefix="atoll-work")
        self._tasks: set[asyncio.Task[None]] = set()
        self._quorum = QuorumWatch()
        self._leaving = False
        self._started = False
        self._starting: asyncio.Task[Any] | None = None
        self.identity = Identity.load_or_create(directory.paths.identity)
        self._client = CoordinatorClient(options.invite, self.identity, version=version("atoll"))

    @property
    def spec(self) -> RunSpec:
        """Of the run."""
        return self.membership.spec

    async def start(self) -> None:
        """Join and recover; returns with a verified state and everything running.

        Raises:
            CoordinatorError: the coordinator refuses this peer.
            PortInUse: it cannot listen where it was told to.
        """
        self._starting = asyncio.current_task()
        expect_free(self.options.listen, remedy="name another with --listen, or port 0 for any")
        joined = await self._join()
        await self._start_node()
        self._build(joined)
        await self._settle_state(joined)
        self.rounds.serve()
        self._started = True
        for work in (
            self.rounds.run,
            self.contact.keep,
            self._keep_record,
            self._keep_connected,
        ):
            self._spawn(self._for_ever(work))

    async def stop(self) -> None:
        """Leave the rounds, the coordinator, the roster and the DHT, in this order."""
        self._leaving = True
        if self._started:
            await self._hand_over()
        await _end([*self._tasks, *([self._starting] if self._starting else [])])
        if self._started:
            self.reporter.leaving = True
            with suppress(CoordinatorError, TimeoutError):
                async with asyncio.timeout(GOODBYE_S):
                    await self.contact.beat(leaving=True)
            with suppress(TimeoutError):
                async with asyncio.timeout(GOODBYE_S):
                    await self.rounds.close()
        if hasattr(self, "node"):
            await self.node.close()
        await self._client.close()
        if hasattr(self, "replica"):
            self.replica.store.close()
        self._work.shutdown(wait=False, cancel_futures=True)

    async def _hand_over(self) -> None:
        """Let the coordinator have the entries up to here, while it is there to take them."""
        position, contact = self.replica.position, self.contact
        with suppress(TimeoutError):
            async with asyncio.timeout(HAND_OVER_S):
                while contact.in_touch and not contact.stored(position):
                    await asyncio.sleep(HAND_OVER_S / 100)

    # joining

    async def _join(self) -> Joined | None:
        """Join, or go on with what an earlier joining gave; for ever where there is neither."""
        began_s, pause_s = time.monotonic(), JOIN_PAUSE_S[0]
        while True:
            try:
                joined = await self._client.join()
                self._remember(joined)
                return joined
            except CoordinatorUnreachable as error:
                earlier = self._directory.recall()
                if earlier is not None and time.monotonic() - began_s > OFFLINE_S:
                    self.membership = earlier
                    self._own_bootstrap = earlier.bootstrap[:1]
                    self._say("warning", f"starting without the coordinator: {error}")
                    return None
                self._say("warning", f"{error}; trying again in {pause_s:.1f} s")
            await asyncio.sleep(pause_s * (0.5 + random.random()))
            pause_s = min(2 * pause_s, JOIN_PAUSE_S[1])

    def _remember(self, joined: Joined) -> None:
        self.membership = Membership.of(joined, self.options.invite)
        self._own_bootstrap = self.membership.bootstrap
        self._directory.remember(self.membership)

    async def _start_node(self) -> None:
        invite = self.options.invite
        self.node = await Node.start(
            self._directory.paths.identity,
            run_id=invite.run_id.hex(),
            listen_maddrs=self.options.listen,
            announce_maddrs=self.options.announce,
            bootstrap=self.membership.bootstrap,
            admission=self.membership.admission,
            check=AdmissionCheck(invite.run_key, invite.run_id, clock=self._client.now_s),
            clock_offset_s=self._client.clock_offset_s,
        )

        self._roster = WatchedRoster(self.node.roster)

    # building

    def _build(self, joined: Joined | None) -> None:
        self._coordinator = CoordinatorSource(
            self._client,
            joined.epoch if joined else b"",
            snapshot_every=self.spec.round.snapshot_every,
        )
        self._replay = Replay(self.spec.method(), self.membership.layout)
        self.replica = self._make_replica()
        self.ctx = self._make_context()
        self.rounds = Rounds(
            self.ctx,
            catch_up=self._catch_up,
            on_settled=self._on_settled,
            on_phase=self._on_phase,
            on_led=lambda entry, certificate, body: self.contact.on_led(entry, certificate, body),
            uplink_mbit_s=self.options.rates.uplink_mbit_s,
        )
        self.reducer = self._make_reducer()
        self.reporter = self._make_reporter()
        self.contact = self._make_contact()
        self.contact.in_touch = joined is not None
        if joined is not None:
            self.contact.note_head(joined.head)
        self._recovery = Recovery(
            self.ctx,
            run_id=self.options.invite.run_id,
            genesis=self._genesis,
            on_progress=lambda what, left: self._on_phase(
                f"{what}, {left} to go", self.replica.position
            ),
            fallback=self._coordinator,
        )

    def _make_replica(self) -> Replica:
        run_id, spec = self.options.invite.run_id, self.spec
        return Replica(
            run_id=run_id,
            replay=self._replay,
            store=LogStore(
                self._directory.paths.log,
                run_id=run_id,
                genesis_chain=self._genesis_chain(),
                body_budget_bytes=spec.round.log_mb * 1_000_000,
                keep_snapshots=KEPT_SNAPSHOTS,
            ),
            verify=verify,
            verify_run=run_key_verifier(self.options.invite.run_key),
            snapshot_every=spec.round.snapshot_every,
            compute=self._compute,
        )

    def _make_context(self) -> Context:
        spec = self.spec
        return Context(
            me=Elector(peer_id=self.identity.peer_id, incarnation=self._incarnation),
            sign=self.identity.sign,
            verify=verify,
            transport=self.node.transport,
            roster=self._roster,
            replica=self.replica,
            replay=self._replay,
            scalars=outer_scalars(spec, self._replay),
            settings=RoundSettings(stall_s=spec.round.stall_s, grace_s=spec.round.grace_s),
            compute=self._compute,
            on_event=self._say,
            ready_in_s=self._ready_in_s,
            rule=rule_of(spec.round.reducer),
        )

    def _make_reducer(self) -> NetworkReducer:
        settings = self.spec.round
        patience_s = PATIENCE_STALLS * settings.stall_s + 4 * settings.grace_s
        return NetworkReducer(
            loop=asyncio.get_running_loop(),
            rounds=self.rounds,
            replica=self.replica,
            me=self.ctx.me,
            spec=self.spec,
            patience_s=patience_s,
            on_event=self._say,
            close=self._on_close,
        )

    def _make_reporter(self) -> Reporter:
        return Reporter(
            me=self.ctx.me,
            name=self.options.name,
            rates=self.options.rates,
            node=self.node,
            replica=self.replica,
            rounds=self.rounds,
            last_round=self.spec.run.rounds,
            view=self._look,
            trains=lambda: self.reducer.progress() is not None,
            encode_s=lambda: self.reducer.encode_s,
            compute=self._compute,
        )

    def _make_contact(self) -> Contact:
        return Contact(
            client=self._client,
            source=self._coordinator,
            node=self.node,
            replica=self.replica,
            rounds=self.rounds,
            reporter=self.reporter,
            compute=self._compute,
            spawn=self._spawn,
            on_joined=self._remember,
            say=self._say,
        )

    # the first state

    async def _settle_state(self, joined: Joined | None) -> None:
        """Resume, or fetch; returns with a verified state."""
        resumed = await self.replica.resume()
        if resumed:
            self._say("info", f"resumed at position {self.replica.position} from this machine")
        while True:
            if not self.replica.ready and (joined is None or joined.head.position == 0):
                await self._begin()
            if joined is not None and joined.epoch:
                await self.replica.adopt(joined.epoch)
            with suppress(RosterError, TransportError, TimeoutError, OSError):
                await self._publish_record()
            await self._connect_all()
            await self._catch_up()
            if self.replica.ready:
                return
            await asyncio.sleep(SETTLE_PAUSE_S)
            joined = joined or await self._join_late()

    async def _join_late(self) -> Joined | None:
        """Join if the coordinator is there again."""
        with suppress(CoordinatorUnreachable):
            joined = await self._client.join()
            self._remember(joined)
            self.node.transport.admission = joined.admission
            self.contact.note_head(joined.head)
            self.contact.in_touch = True
            return joined
        return None

    async def _begin(self) -> None:
        """Put the first state in place, if the coordinator gives it."""
        try:
            state = await self._genesis()
        except (CoordinatorError, StateError) as error:
            self._say("warning", f"no first state from the coordinator yet: {error}")
            return
        await self.replica.install(state, self._genesis_chain(), ())

    async def _genesis(self) -> OuterState:
        """The first state, from the coordinator, verified against the root that joining gave."""
        info = await self._client.fetch_snapshot(0)
        assembly = Assembly(
            layout=self.membership.layout,
            position=0,
            leaf_digests=info.leaf_digests,
            root=self.membership.genesis_root,
            memory_numel=self._replay.memory_numel,
        )
        async for index, leaf in self._client.fetch_leaves(0):
            await self._compute(assembly.add, index, leaf)
        state: OuterState = await self._compute(assembly.finish)
        return state

    def _genesis_chain(self) -> bytes:
        return genesis_chain(self.options.invite.run_id, self.membership.genesis_root)

    async def _catch_up(self) -> None:
        before = self.replica.position if self.replica.ready else None
        try:
            recovered = await self._recovery.run()
        except (RecoveryError, CoordinatorError, LogError) as error:
            self._say("warning", f"cannot catch up yet: {error}")
            return
        if recovered is not None:
            self._tell_recovered(recovered)
        rewound = before is not None and self.replica.position < before
        jumped = recovered is not None and recovered.snapshot_position is not None
        if self._started and (rewound or jumped):
            self.rounds.withdraw()
            why = f"recovered to position {self.replica.position}"
            self.reducer.deliver(Reset(state=self.replica.state, why=why))

    def _tell_recovered(self, recovered: Recovered) -> None:
        self.reporter.recoveries += 1
        how = f"{recovered.entries} entries"
        if recovered.snapshot_position is not None:
            how = f"the snapshot at {recovered.snapshot_position} and {how}"
        donors = ", ".join(short(name) for name in recovered.donors) or "nobody"
        self._say(
            "info",
            f"recovered from position {recovered.from_position} to {recovered.to_position}: "
            f"{how} from {donors} in {recovered.seconds:.1f} s",
        )

    # what goes on

    async def _keep_record(self) -> None:
        while True:
            with suppress(RosterError, TransportError, TimeoutError, OSError):
                await self._publish_record()
            self._tell_waiting()
            await asyncio.sleep(RECORD_EVERY_S)

    def _tell_waiting(self) -> None:
        replica, rounds = self.replica, self.spec.run.rounds
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
            self._say("warning", told)

    async def _publish_record(self) -> None:
        view, rates = self._look(), self.options.rates
        record = PeerRecord(
            peer_id=self.identity.peer_id,
            addresses=tuple(self.node.addresses),
            incarnation=self._incarnation,
            role="trainer",
            epoch=self.replica.epoch,
            position=self.replica.position,
            tokens_per_s=view.tokens_per_s,
            uplink_mbit_s=rates.uplink_mbit_s,
            downlink_mbit_s=rates.downlink_mbit_s,
            ready_in_s=view.ready_in_s,
            protocol=PROTOCOL,
        )
        await self.node.roster.publish(record, RECORD_TTL_S)

    async def _keep_connected(self) -> None:
        while True:
            await self._connect_all()
            await asyncio.sleep(CONNECT_EVERY_S)

    async def _connect_all(self) -> None:
        with suppress(RosterError, TransportError, TimeoutError, OSError):
            await self._roster.look()
        records = await self.ctx.roster_peers()
        others = [r for peer, r in records.items() if peer != self.identity.peer_id]
        self._remember_addresses(others)
        await asyncio.gather(*(self._connect(record) for record in others))

    def _remember_addresses(self, others: Sequence[PeerRecord]) -> None:
        """Keep where others are, for a start at which the coordinator is not there to ask."""
        known = [address for record in others for address in record.addresses[:2]]
        kept = self.membership.bootstrap
        keep = addresses_to_keep(self._own_bootstrap, kept, known)
        if set(keep) != set(kept):
            self.membership = replace(self.membership, bootstrap=keep)
            self._directory.remember(self.membership)

    async def _connect(self, record: PeerRecord) -> None:
        with suppress(TransportError, TimeoutError, ValueError):
            await self.node.transport.connect(record.peer_id, record.addresses, timeout_s=CONNECT_S)

    def _look(self) -> TrainerView:
        """How the trainer is, by its own word or by what the reducer sees of it."""
        if self.view is not None:
            return self.view()
        return self.reducer.progress() or TrainerView()

    def _ready_in_s(self) -> float | None:
        """None while this peer has nothing to contribute, so that no group waits for it."""
        if self._leaving or self.reducer.progress() is None:
            return None
        return self._look().ready_in_s

    def _on_settled(self, settled: Settled) -> None:
        self.reducer.deliver(settled)
        self.reporter.trace(settled)

    def _say(self, level: Level, text: str) -> None:
        if hasattr(self, "reporter"):
            self.reporter.note(level, text, self._client.now_s())
        self._tell(level, text)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def _for_ever(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start ``work`` again after a fault: a peer that nobody looks after must not go deaf."""
        while True:
            try:
                await work()
            except Exception as error:
                _log.exception("%s failed", work.__qualname__)
                self._say("error", f"{work.__qualname__} failed and starts again: {error!r}")
            await asyncio.sleep(RESTART_S)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("a task of this peer failed", exc_info=task.exception())

    async def _compute(self, function: Callable[..., Any], /, *args: Any) -> Any:  # noqa: ANN401
        return await asyncio.get_running_loop().run_in_executor(self._work, function, *args)


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel, and wait for the end, but not for ever: there is a goodbye to say."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=GOODBYE_S)


def outer_scalars(spec: RunSpec, replay: Replay) -> Callable[[int], tuple[float, float]]:
    """Learning rate and momentum of the entry at a position; equal on every peer of the run."""
    count = len(replay.fragments)

    def scalars(position: int) -> tuple[float, float]:
        step = steps_until(position + 1, spec.outer.inner_steps, count) - 1
        total_steps = steps_until(spec.run.rounds, spec.outer.inner_steps, count)
        inner_lr = learning_rate(step, inner=spec.inner, total_steps=total_steps)
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
