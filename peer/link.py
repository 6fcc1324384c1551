"""A peer's place in a run: everything that talks, in one event loop in one thread.

    joins the coordinator by the invite (or goes on without it where it has joined before),
    starts the DHT node, resumes or recovers the replica, serves and takes part in rounds,
    keeps its record in the roster, stays in touch with the coordinator, and leaves cleanly.

The trainer's thread sees none of this but the reducer.  A peer that is cut off from the coordinator
trains on; a peer that is cut off from everybody goes on trying.

Errors::

    LinkError (ValueError)
     +-- StateDirectoryInUse    another peer runs on the same state directory
     +-- StateOfAnotherRun      the state directory belongs to another run
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from atoll.compression import parse
from atoll.coordinator.admission import AdmissionCheck
from atoll.coordinator.client import Beat, CoordinatorClient, Joined
from atoll.coordinator.client_errors import CoordinatorError, CoordinatorUnreachable, NotWelcome
from atoll.coordinator.invite import Invite
from atoll.coordinator.spec import RunSpec
from atoll.coordinator.status import Event, Level, PeerState, PeerStatus, RoundTrace
from atoll.dht.identity import Identity, verify
from atoll.dht.node import Node
from atoll.dht.roster import PeerRecord, RosterError
from atoll.dht.transport import TransportError
from atoll.dht.wirecount import WireCounter
from atoll.optim.defaults import outer_defaults
from atoll.optim.layout import Layout
from atoll.optim.log import Certificate, Elector, Entry, LogError, fp32, genesis_chain
from atoll.optim.state import Assembly, OuterState
from atoll.optim.store import Head, LogStore, NotStored
from atoll.peer.paths import PeerPaths
from atoll.peer.recovery import Recovered, Recovery, RecoveryError
from atoll.peer.reducer import NetworkReducer, Reset
from atoll.peer.replica import Replica
from atoll.peer.rounds.context import Context, RoundSettings, short
from atoll.peer.rounds.engine import Rounds, Settled
from atoll.peer.rounds.messages import PROTOCOL
from atoll.peer.sources import CoordinatorSource

RECORD_TTL_S = 20.0  # a dead peer is expected in rounds for at most this long
RECORD_EVERY_S = 5.0  # three misses fit in the TTL
CONNECT_EVERY_S = 2.0
CONNECT_S = 10.0
JOIN_PAUSE_S = (0.5, 15.0)
OFFLINE_S = 10.0  # how long a peer that has joined before tries the coordinator at start
UNKNOWN_MBIT_S = 100.0  # what a link is taken for until it is declared
MAX_EVENTS = 32  # of one heartbeat
PATIENCE_STALLS = 20  # a round with one repair and one change of leader takes about ten

_log = logging.getLogger(__name__)


class LinkError(ValueError):
    """A peer that cannot start as it was told to."""


class StateDirectoryInUse(LinkError):  # noqa: N818
    """Another process works in the state directory."""


class StateOfAnotherRun(LinkError):  # noqa: N818
    """The state directory holds another run."""


@dataclass(frozen=True, kw_only=True)
class LinkOptions:
    """What a peer decides for itself; none of it changes the run."""

    invite: Invite
    state_dir: Path
    name: str = ""
    """what its owner calls it"""
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    announce: tuple[str, ...] = ()
    uplink_mbit_s: float = 0.0
    """of its internet link; 0 where it is not known"""
    downlink_mbit_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TrainerView:
    """What the trainer tells the link about itself."""

    ready_in_s: float = 0.0
    step: int = 0
    inner_steps: int = 0
    tokens: int = 0
    tokens_per_s: float = 0.0
    loss: float | None = None
    valid_loss: float | None = None
    utilisation: float = 1.0
    device: str = ""


@dataclass(frozen=True, kw_only=True)
class Membership:
    """What joining gave, kept on disk for a start without the coordinator."""

    spec: RunSpec
    layout: Layout
    genesis_root: bytes
    admission: bytes
    bootstrap: tuple[str, ...]

    def to_json(self, run_id: bytes) -> bytes:
        """For ``run.json``."""
        fields = {
            "run_id": run_id.hex(),
            "spec": self.spec.canonical().decode(),
            "layout": self.layout.to_json(),
            "genesis_root": self.genesis_root.hex(),
            "admission": self.admission.hex(),
            "bootstrap": list(self.bootstrap),
        }
        return json.dumps(fields).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> Membership:
        """What ``to_json`` wrote."""
        fields = json.loads(raw)
        return cls(
            spec=RunSpec.from_json(fields["spec"].encode()),
            layout=Layout.from_json(fields["layout"]),
            genesis_root=bytes.fromhex(fields["genesis_root"]),
            admission=bytes.fromhex(fields["admission"]),
            bootstrap=tuple(fields["bootstrap"]),
        )


class Link:
    """A running peer's connections.  ``open`` starts the thread, ``close`` ends it."""

    def __init__(
        self,
        options: LinkOptions,
        *,
        on_event: Callable[[Level, str], None],
        on_phase: Callable[[str, int], None],
    ) -> None:
        """Callbacks run in the link's thread."""
        self.options = options
        self.paths = PeerPaths(root=options.state_dir)
        self.incarnation = f"{random.SystemRandom().getrandbits(128):032x}"
        self.view: Callable[[], TrainerView] = TrainerView
        self.finished = threading.Event()
        self.membership: Membership
        self.reducer: NetworkReducer
        self._on_event = on_event
        self._on_phase = on_phase
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="atoll-link", daemon=True)
        self._work = ThreadPoolExecutor(2, thread_name_prefix="atoll-work")
        self._tasks: set[asyncio.Task[None]] = set()
        self._events: deque[Event] = deque(maxlen=4 * MAX_EVENTS)
        self._traces: deque[RoundTrace] = deque(maxlen=4 * MAX_EVENTS)
        self._recoveries = 0
        self._coordinator_head: Head | None = None
        self._wire_before = (0, 0)
        self._digest: tuple[int, bytes] = (0, b"")
        self._leaving = False
        self._started = False

    # the caller's side

    @classmethod
    def open(
        cls,
        options: LinkOptions,
        *,
        on_event: Callable[[Level, str], None],
        on_phase: Callable[[str, int], None] = lambda phase, position: None,
        stopping: threading.Event | None = None,
    ) -> Link:
        """Join and recover; returns once the replica holds a verified state.

        Args:
            options: the peer's own.
            on_event: told what a person may want to read.
            on_phase: told what part of a round this peer is in, at which position.
            stopping: set by another thread or a signal, ends the waiting with ``KeyboardInterrupt``.

        Raises:
            LinkError: the state directory is not usable.
            CoordinatorError: the coordinator refuses this peer.
        """
        link = cls(options, on_event=on_event, on_phase=on_phase)
        link._lock_state_dir()
        link._thread.start()
        starting = asyncio.run_coroutine_threadsafe(link._start(), link._loop)
        try:
            while not starting.done():
                if stopping is not None and stopping.wait(0.1):
                    raise KeyboardInterrupt
                if stopping is None:
                    starting.exception()
            starting.result()
        except BaseException:
            starting.cancel()
            link.close()
            raise
        return link

    @property
    def peer_id(self) -> str:
        """This peer."""
        return self.identity.peer_id

    @property
    def spec(self) -> RunSpec:
        """Of the run."""
        return self.membership.spec

    @property
    def position(self) -> int:
        """Entries applied."""
        return self.replica.position

    def wait_until_stored(self, timeout_s: float) -> bool:
        """Wait until the coordinator has every entry that this peer has; whether it has."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            head = self._coordinator_head
            if head is not None and head.position >= self.replica.position:
                return True
            time.sleep(0.1)
        return False

    def close(self) -> None:
        """Leave the roster, say goodbye, end the thread."""
        if self._thread.is_alive():
            stopping = asyncio.run_coroutine_threadsafe(self._stop(), self._loop)
            with suppress(TimeoutError):
                stopping.result(timeout=20.0)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=5.0)
        self._work.shutdown(wait=False, cancel_futures=True)
        self._lock_file.close()

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def _lock_state_dir(self) -> None:
        self.paths.root.mkdir(parents=True, exist_ok=True)
        self._lock_file = self.paths.lock.open("w")
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock_file.close()
            raise StateDirectoryInUse(
                f"{self.paths.root}: another peer is running on this state directory; "
                "stop it, or give this one its own with --state-dir"
            ) from None
        if self.paths.run.exists():
            self._expect_run()

    def _expect_run(self) -> None:
        try:
            stored = json.loads(self.paths.run.read_bytes())["run_id"]
        except (OSError, ValueError, KeyError, TypeError):
            raise StateOfAnotherRun(
                f"{self.paths.run}: expected the description of a run, got something else; "
                "give this peer another directory with --state-dir"
            ) from None
        if stored != self.options.invite.run_id.hex():
            raise StateOfAnotherRun(
                f"{self.paths.root}: expected the state of run "
                f"{self.options.invite.run_id.hex()[:12]}, got that of run {stored[:12]}; "
                "give this peer another directory with --state-dir"
            )

    # starting, in the loop

    async def _start(self) -> None:
        invite = self.options.invite
        self.identity = Identity.load_or_create(self.paths.identity)
        self._client = CoordinatorClient(invite, self.identity, version=version("atoll"))
        joined = await self._join()
        self._coordinator = CoordinatorSource(self._client, joined.epoch if joined else b"")
        self._note_head(joined.head if joined else None)
        await self._start_node()
        self._build()
        await self._settle_state(joined)
        self._started = True
        self.rounds.serve()
        for work in (self._keep_record, self._keep_connected, self._keep_in_touch, self._take_part):
            self._spawn(work())

    async def _join(self) -> Joined | None:
        """Join, or go on with what an earlier joining gave; for ever where there is neither."""
        began, pause_s = time.monotonic(), JOIN_PAUSE_S[0]
        while True:
            try:
                joined = await self._client.join()
                self._remember(joined)
                return joined
            except CoordinatorUnreachable as error:
                if self._recall() and time.monotonic() - began > OFFLINE_S:
                    self._say("warning", f"starting without the coordinator: {error}")
                    return None
                self._say("warning", f"{error}; trying again in {pause_s:.1f} s")
            await asyncio.sleep(pause_s * (0.5 + random.random()))
            pause_s = min(2 * pause_s, JOIN_PAUSE_S[1])

    def _remember(self, joined: Joined) -> None:
        self.membership = Membership(
            spec=joined.spec,
            layout=joined.layout,
            genesis_root=joined.genesis_root,
            admission=joined.admission,
            bootstrap=joined.bootstrap or self.options.invite.bootstrap,
        )
        raw = self.membership.to_json(self.options.invite.run_id)
        partial = self.paths.run.with_suffix(".new")
        partial.write_bytes(raw)
        partial.replace(self.paths.run)

    def _recall(self) -> bool:
        if not self.paths.run.exists():
            return False
        self.membership = Membership.from_json(self.paths.run.read_bytes())
        return True

    async def _start_node(self) -> None:
        invite = self.options.invite
        check = AdmissionCheck(invite.run_key, invite.run_id, clock=self._client.now_s)
        self.node = await Node.start(
            self.paths.identity,
            run_id=invite.run_id.hex(),
            listen_maddrs=self.options.listen,
            announce_maddrs=self.options.announce,
            bootstrap=self.membership.bootstrap,
            admission=self.membership.admission,
            check=check,
            clock_offset_s=self._client.clock_offset_s,
        )
        self._grpc_wire = WireCounter([os.getpid()])

    def _build(self) -> None:
        run_id, spec = self.options.invite.run_id, self.spec
        codec = parse(spec.compression.codec)
        chain = genesis_chain(run_id, self.membership.genesis_root)
        self.replica = Replica(
            run_id=run_id,
            layout=self.membership.layout,
            codec=codec,
            store=LogStore(
                self.paths.log,
                run_id=run_id,
                genesis_chain=chain,
                body_budget_bytes=spec.round.log_mb * 1_000_000,
            ),
            verify=verify,
            verify_run=run_key_verifier(self.options.invite.run_key),
            snapshot_every=spec.round.snapshot_every,
            compute=self._compute,
        )
        self.ctx = Context(
            me=Elector(peer_id=self.identity.peer_id, incarnation=self.incarnation),
            sign=self.identity.sign,
            verify=verify,
            transport=self.node.transport,
            roster=self.node.roster,
            replica=self.replica,
            codec=codec,
            layout=self.membership.layout,
            scalars=outer_scalars(spec),
            settings=RoundSettings(stall_s=spec.round.stall_s, grace_s=spec.round.grace_s),
            compute=self._compute,
            on_event=self._say_text,
            ready_in_s=lambda: None if self._leaving else self.view().ready_in_s,
        )
        self.rounds = Rounds(
            self.ctx,
            catch_up=self._catch_up,
            on_settled=self._on_settled,
            on_phase=self._on_phase,
            on_led=self._on_led,
            uplink_mbit_s=lambda: self.options.uplink_mbit_s or UNKNOWN_MBIT_S,
        )
        self.recovery = Recovery(
            self.ctx,
            run_id=run_id,
            genesis=self._genesis,
            on_progress=lambda what, left: self._on_phase(f"{what} {left}", self.position),
            fallback=self._coordinator,
        )
        self.reducer = NetworkReducer(
            loop=self._loop,
            rounds=self.rounds,
            replica=self.replica,
            me=self.ctx.me,
            spec=spec,
            patience_s=lambda: PATIENCE_STALLS * spec.round.stall_s + 4 * spec.round.grace_s,
            on_event=self._say_text,
            close=self.close,
        )

    async def _settle_state(self, joined: Joined | None) -> None:
        """Resume, or fetch; returns with a verified state."""
        resumed = await self.replica.resume()
        if resumed:
            self._say("info", f"resumed at position {self.replica.position} from {self.paths.log}")
        if not resumed and (joined is None or joined.head.position == 0):
            state = await self._genesis()
            chain = genesis_chain(self.options.invite.run_id, self.membership.genesis_root)
            await self.replica.install(state, chain, ())
        if joined is not None and joined.epoch:
            await self.replica.adopt(joined.epoch)
        await self._publish_record()
        await self._connect_all()
        while True:
            await self._catch_up()
            if self.replica.ready:
                return
            await asyncio.sleep(1.0)

    async def _genesis(self) -> OuterState:
        """The first state, from the coordinator, verified against the root that joining gave."""
        info = await self._client.fetch_snapshot(0)
        assembly = Assembly(
            layout=self.membership.layout,
            position=0,
            leaf_digests=info.leaf_digests,
            root=self.membership.genesis_root,
        )
        async for index, leaf in self._client.fetch_leaves(0):
            await self._compute(assembly.add, index, leaf)
        return assembly.finish()

    # what goes on

    async def _take_part(self) -> None:
        await self.rounds.run()

    async def _catch_up(self) -> None:
        before = self.replica.state if self.replica.ready else None
        try:
            recovered = await self.recovery.run()
        except (RecoveryError, CoordinatorError, LogError) as error:
            self._say("warning", f"cannot catch up yet: {error}")
            return
        if recovered is not None:
            self._tell_recovered(recovered)
        moved = before is not None and self.replica.state.position < before.position
        jumped = recovered is not None and recovered.snapshot_position is not None
        if self._started and (moved or jumped):
            self.rounds.withdraw()
            self.reducer.deliver(
                Reset(state=self.replica.state, why=f"recovered to position {self.position}")
            )

    def _tell_recovered(self, recovered: Recovered) -> None:
        self._recoveries += 1
        how = f"{recovered.entries} entries"
        if recovered.snapshot_position is not None:
            how = f"the snapshot at {recovered.snapshot_position} and {how}"
        donors = ", ".join(short(name) for name in recovered.donors) or "nobody"
        self._say(
            "info",
            f"recovered from position {recovered.from_position} to {recovered.to_position}: "
            f"{how} from {donors} in {recovered.seconds:.1f} s",
        )

    async def _keep_record(self) -> None:
        while True:
            with suppress(RosterError, TransportError, TimeoutError, OSError):
                await self._publish_record()
            await asyncio.sleep(RECORD_EVERY_S)

    async def _publish_record(self) -> None:
        view = self.view()
        record = PeerRecord(
            peer_id=self.identity.peer_id,
            addresses=tuple(self.node.addresses),
            incarnation=self.incarnation,
            role="trainer",
            epoch=self.replica.epoch,
            position=self.replica.position,
            tokens_per_s=view.tokens_per_s,
            uplink_mbit_s=self.options.uplink_mbit_s,
            downlink_mbit_s=self.options.downlink_mbit_s,
            ready_in_s=view.ready_in_s,
            protocol=PROTOCOL,
        )
        await self.node.roster.publish(record, RECORD_TTL_S)

    async def _keep_connected(self) -> None:
        while True:
            with suppress(TransportError, TimeoutError, OSError):
                await self._connect_all()
            await asyncio.sleep(CONNECT_EVERY_S)

    async def _connect_all(self) -> None:
        records = await self.node.roster.peers()
        others = [r for peer, r in records.items() if peer != self.identity.peer_id]

        async def connect(record: PeerRecord) -> None:
            with suppress(TransportError, TimeoutError, ValueError):
                await self.node.transport.connect(
                    record.peer_id, record.addresses, timeout_s=CONNECT_S
                )

        await asyncio.gather(*(connect(record) for record in others))

    # the coordinator

    async def _keep_in_touch(self) -> None:
        pause_s, lost = 1.0, False
        while True:
            try:
                beat = await self._beat()
                if lost:
                    self._say("info", "in touch with the coordinator again")
                pause_s, lost = beat.heartbeat_s, False
            except NotWelcome:
                await self._join_again()
            except CoordinatorError as error:
                if not lost:
                    self._say("warning", f"out of touch with the coordinator, going on: {error}")
                lost, pause_s = True, min(2 * pause_s, JOIN_PAUSE_S[1])
            await asyncio.sleep(pause_s)

    async def _join_again(self) -> None:
        with suppress(CoordinatorError):
            self._remember(await self._client.join())
            self.node.transport.admission = self.membership.admission

    async def _beat(self, *, leaving: bool = False) -> Beat:
        events = [self._events.popleft() for _ in range(min(MAX_EVENTS, len(self._events)))]
        traces = [self._traces.popleft() for _ in range(min(MAX_EVENTS, len(self._traces)))]
        try:
            beat = await self._client.heartbeat(
                await self._status(), events=events, traces=traces, leaving=leaving
            )
        except CoordinatorError:
            self._events.extendleft(reversed(events))
            self._traces.extendleft(reversed(traces))
            raise
        await self._heed(beat)
        return beat

    async def _heed(self, beat: Beat) -> None:
        self._note_head(beat.head)
        if beat.finished:
            self.finished.set()
        if beat.admission:
            self.node.transport.admission = beat.admission
        if beat.bootstrap:
            self.node.bootstrap = beat.bootstrap
        if beat.epoch:
            self._coordinator.epoch_record = beat.epoch
            with suppress(LogError):
                if not await self.replica.adopt(beat.epoch):
                    self.rounds.kick_catch_up()
        if beat.head.position > self.replica.position + 1:
            self.rounds.kick_catch_up()
        if beat.publish_from is not None:
            self._spawn(self._publish_range(beat.publish_from))

    def _note_head(self, head: Head | None) -> None:
        if head is None:
            return
        self._coordinator_head = head
        self._coordinator.epoch = head.epoch
        self._coordinator.position = head.position
        self._coordinator.chain = head.chain

    def _on_led(self, entry: Entry, certificate: Certificate, body: bytes) -> None:
        self._spawn(self._publish(entry.position, entry.encode(), certificate.encode(), body))

    async def _publish_range(self, start: int) -> None:
        for position in range(start, self.replica.position):
            record = await self._compute(self.replica.store.get, position)
            if record is None or not record.has_body:
                return
            try:
                body = await self._compute(self.replica.store.body, position)
            except NotStored:
                return
            if not await self._publish(position, record.entry, record.certificate, body):
                return

    async def _publish(self, position: int, entry: bytes, certificate: bytes, body: bytes) -> bool:
        try:
            published = await self._client.publish(
                epoch=self.replica.epoch,
                position=position,
                entry=entry,
                certificate=certificate,
                body=body,
            )
        except CoordinatorError as error:
            _log.info("entry %d is not with the coordinator yet: %s", position, error)
            return False
        self._note_head(published.head)
        return published.head.position > position

    # what it says about itself

    async def _status(self) -> PeerStatus:
        view, replica, stats = self.view(), self.replica, self.rounds.statistics()
        sent, received = self.wire_bytes()
        position, root = await self._state_digest()
        last = stats.last
        return PeerStatus(
            peer_id=self.identity.peer_id,
            name=self.options.name,
            incarnation=self.incarnation,
            state=self._state(),
            phase=stats.phase,
            epoch=replica.epoch,
            position=replica.position,
            chain=replica.chain.hex(),
            state_digest=root.hex(),
            state_position=position,
            tokens_per_s=view.tokens_per_s,
            tokens_total=view.tokens,
            loss=view.loss,
            valid_loss=view.valid_loss,
            step=view.step,
            inner_steps=view.inner_steps,
            wire_bytes_sent=sent,
            wire_bytes_received=received,
            uplink_mbit_s=self.options.uplink_mbit_s,
            downlink_mbit_s=self.options.downlink_mbit_s,
            utilisation=view.utilisation,
            phases=self.phases(last) if last else {},
            recoveries=self._recoveries,
            device=view.device,
            version=version("atoll"),
        )

    def _state(self) -> PeerState:
        if self._leaving:
            return "leaving"
        if not self.replica.ready:
            return "joining"
        if self.replica.opened is None:
            return "ready"
        if not self.replica.electorate:
            return "recovering"
        return "training" if self.rounds.statistics().phase in ("idle", "train") else "syncing"

    async def _state_digest(self) -> tuple[int, bytes]:
        """The root of the newest snapshot, or of the last state of the run."""
        replica = self.replica
        if not replica.ready:
            return 0, b""
        state = replica.state
        rounds = self.spec.run.rounds
        if state.position % replica.snapshot_every and state.position != rounds:
            return self._digest
        if self._digest[0] != state.position or not self._digest[1]:
            self._digest = (state.position, await self._compute(state.root))
        return self._digest

    def wire_bytes(self) -> tuple[int, int]:
        """Bytes on the wire so far, sent and received: libp2p's daemon and gRPC."""
        statistics = self.node.transport.statistics()
        grpc = self._grpc_wire.totals()
        sent = statistics.wire_bytes_sent + (grpc.sent if grpc else 0)
        received = statistics.wire_bytes_received + (grpc.received if grpc else 0)
        return sent, received

    def phases(self, trace: Any) -> dict[str, float]:  # noqa: ANN401
        """Seconds of a round by phase."""
        return {
            "wait": trace.wait_s,
            "encode": self.reducer.encode_s,
            "send": trace.send_s,
            "reduce": trace.reduce_s,
            "vote": trace.vote_s,
            "apply": trace.apply_s,
        }

    def _on_settled(self, settled: Settled) -> None:
        self.reducer.deliver(settled)
        if settled.trace is None:
            return
        entry = settled.applied.entry
        sent, received = self.wire_bytes()
        mine = next((m for m in entry.members if m.elector == self.ctx.me), None)
        before, self._wire_before = self._wire_before, (sent, received)
        included = settled.included is not None and all(settled.included)
        self._traces.append(
            RoundTrace(
                epoch=entry.epoch,
                position=entry.position,
                included=included,
                loss=mine.loss if mine else None,
                tokens=mine.tokens if mine else 0,
                seconds=self.phases(settled.trace),
                wire_bytes_sent=sent - before[0],
                wire_bytes_received=received - before[1],
            )
        )

    def _say_text(self, level: str, text: str) -> None:
        self._say("error" if level == "error" else "warning" if level == "warning" else "info", text)

    def _say(self, level: Level, text: str) -> None:
        at = max(0.0, self._client.now_s() if hasattr(self, "_client") else time.time())
        self._events.append(Event(at=at, level=level, text=text[:1000]))
        self._on_event(level, text)

    # ending, in the loop

    async def _stop(self) -> None:
        self._leaving = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._started:
            with suppress(CoordinatorError, asyncio.TimeoutError):
                await asyncio.wait_for(self._beat(leaving=True), 5.0)
            await self.rounds.close()
        if hasattr(self, "node"):
            await self.node.close()
        if hasattr(self, "_client"):
            await self._client.close()
        if hasattr(self, "replica"):
            self.replica.store.close()

    def _spawn(self, work: Any) -> None:  # noqa: ANN401
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("a task of the link failed", exc_info=task.exception())

    async def _compute(self, function: Callable[..., Any], /, *args: Any) -> Any:  # noqa: ANN401
        return await self._loop.run_in_executor(self._work, lambda: function(*args))


def outer_scalars(spec: RunSpec) -> Callable[[int], tuple[float, float]]:
    """Outer learning rate and momentum by position; equal on every peer of the run."""
    auto_lr, auto_momentum = outer_defaults(
        spec.run.rounds, spec.outer.inner_steps, spec.round.min_peers
    )
    lr = auto_lr if spec.outer.lr == "auto" else float(spec.outer.lr)
    momentum = auto_momentum if spec.outer.momentum == "auto" else float(spec.outer.momentum)
    scalars = fp32(lr), fp32(momentum)
    return lambda position: scalars


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
