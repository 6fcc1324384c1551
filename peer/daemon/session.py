"""A peer's network side, in one event loop: what is built when it joins, and the tasks that go on.

    joins the coordinator by the invite (or goes on without it where it has joined before),
    starts the DHT node, takes part in the run's rounds (`Participation`: with a log, or by gossip),
    keeps its record in the roster and its connections, and leaves cleanly.

A peer that is cut off from the coordinator trains on; one that is cut off from everybody goes on
trying.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from atoll.coordinator.rpc.client import CoordinatorClient, Joined
from atoll.coordinator.rpc.client_errors import CoordinatorError, CoordinatorUnreachable
from atoll.coordinator.run.admission import AdmissionCheck
from atoll.coordinator.run.invite import Invite
from atoll.coordinator.run.levels import Level
from atoll.coordinator.run.phases import OnPhase
from atoll.coordinator.run.spec import RunSpec
from atoll.dht.identity import Identity
from atoll.dht.node import Node
from atoll.dht.roster import PeerRecord, RosterError
from atoll.dht.transport import TransportError
from atoll.optim.log.entry import Elector
from atoll.optim.state.outer_state import Assembly, OuterState
from atoll.peer.daemon.background import background_threads
from atoll.peer.daemon.contact import Heartbeats
from atoll.peer.daemon.membership import Membership, StateDirectory, addresses_to_keep
from atoll.peer.daemon.ports import expect_free
from atoll.peer.daemon.repeats import Repeats
from atoll.peer.daemon.reporting import LinkRates, Reporter, TrainerView
from atoll.peer.daemon.run_reducer import RunReducer
from atoll.peer.daemon.watched_roster import WatchedRoster
from atoll.peer.paths import PeerPaths
from atoll.peer.rounds.messages import PROTOCOL

MAX_NAME_CHARS = 64  # dashboards have narrow columns
RECORD_TTL_S = 20.0  # a dead peer is expected in rounds for at most this long
RECORD_EVERY_S = 5.0  # three misses fit in the TTL
CONNECT_EVERY_S = 2.0
CONNECT_S = 10.0  # libp2p does not dial again for 5 s after a failure
JOIN_PAUSE_S = (0.5, 15.0)
OFFLINE_S = 10.0  # how long a peer that has joined before tries the coordinator at start
GOODBYE_S = 5.0
RESTART_S = 1.0  # after a fault of ours, so that it does not spin

_log = logging.getLogger(__name__)


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


class Participation(Protocol):
    """What a peer does in a run, by the kind of its method."""

    @property
    def reducer(self) -> RunReducer:
        """For the trainer."""
        ...

    @property
    def reporter(self) -> Reporter:
        """Gathers what the coordinator is told."""
        ...

    @property
    def contact(self) -> Heartbeats:
        """With the coordinator."""
        ...

    @property
    def epoch(self) -> int:
        """In which this peer is."""
        ...

    @property
    def position(self) -> int:
        """How far it is."""
        ...

    def progress(self) -> TrainerView | None:
        """What can be told of a trainer that does not tell itself; None before it has started."""
        ...

    async def settle(self, joined: Joined | None) -> None:
        """Return with a state from which to train."""
        ...

    def serve(self) -> None:
        """Answer other peers from now on."""
        ...

    async def run(self) -> None:
        """Take part in rounds, for ever."""
        ...

    async def roster_peers(self) -> dict[str, PeerRecord]:
        """Who is in the run, as far as it was seen."""
        ...

    def look(self) -> None:
        """Look now and then whether there is something to tell people."""
        ...

    def stored_all(self) -> bool:
        """Whether the coordinator has all that this peer has to give it."""
        ...

    async def hand_over(self) -> None:
        """Let the coordinator have what it lacks, while it is there to take it."""
        ...

    async def leave(self) -> None:
        """Take part no longer."""
        ...

    def close(self) -> None:
        """Let go of what lies on disk."""
        ...


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
        take_part: Callable[[Session, Joined | None], Participation],
    ) -> None:
        """``on_close`` is what the reducer's ``close`` calls.

        ``take_part`` makes of a session that has joined what the run's method asks for.
        """
        self._take_part = take_part
        self.options = options
        self.view: Callable[[], TrainerView] | None = None
        self.membership: Membership
        self.taking_part: Participation
        self.node: Node
        self.roster: WatchedRoster
        self._directory = directory
        self.on_phase = on_phase
        self.on_close = on_close
        self._tell = say
        self._repeats = Repeats()
        self._incarnation = f"{random.SystemRandom().getrandbits(128):032x}"
        self._work = background_threads(2, "atoll-work")
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving = False
        self._started = False
        self._starting: asyncio.Task[Any] | None = None
        self.identity = Identity.load_or_create(directory.paths.identity)
        self.client = CoordinatorClient(options.invite, self.identity, version=version("atoll"))

    @property
    def me(self) -> Elector:
        """This peer, in this process."""
        return Elector(peer_id=self.identity.peer_id, incarnation=self._incarnation)

    @property
    def paths(self) -> PeerPaths:
        """Where it keeps what outlives the process."""
        return self._directory.paths

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
        self.taking_part = taking_part = self._take_part(self, joined)
        await taking_part.settle(joined)
        taking_part.serve()
        self._started = True
        for work in (
            taking_part.run,
            taking_part.contact.keep,
            self._keep_record,
            self._keep_connected,
        ):
            self.spawn(self._for_ever(work))

    async def stop(self) -> None:
        """Leave the rounds, the coordinator, the roster and the DHT, in this order."""
        self._leaving = True
        if self._started:
            await self.taking_part.hand_over()
        await _end([*self._tasks, *([self._starting] if self._starting else [])])
        if self._started:
            self.taking_part.reporter.leaving = True
            with suppress(CoordinatorError, TimeoutError):
                async with asyncio.timeout(GOODBYE_S):
                    await self.taking_part.contact.beat(leaving=True)
            with suppress(TimeoutError):
                async with asyncio.timeout(GOODBYE_S):
                    await self.taking_part.leave()
        if hasattr(self, "node"):
            await self.node.close()
        await self.client.close()
        if hasattr(self, "taking_part"):
            self.taking_part.close()
        self._work.shutdown(wait=False, cancel_futures=True)

    # joining

    async def _join(self) -> Joined | None:
        """Join, or go on with what an earlier joining gave; for ever where there is neither."""
        began_s, pause_s = time.monotonic(), JOIN_PAUSE_S[0]
        while True:
            try:
                joined = await self.client.join()
                self.remember(joined)
                return joined
            except CoordinatorUnreachable as error:
                earlier = self._directory.recall()
                if earlier is not None and time.monotonic() - began_s > OFFLINE_S:
                    self.membership = earlier
                    self._own_bootstrap = earlier.bootstrap[:1]
                    self.say("warning", f"starting without the coordinator: {error}")
                    return None
                text = f"{error}; retrying in {pause_s:.1f} s"
                self.say("warning", text, key=("cannot join", type(error)))
            await asyncio.sleep(pause_s * (0.5 + random.random()))
            pause_s = min(2 * pause_s, JOIN_PAUSE_S[1])

    def remember(self, joined: Joined) -> None:
        """Keep what joining gave."""
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
            check=AdmissionCheck(invite.run_key, invite.run_id, clock=self.client.now_s),
            clock_offset_s=self.client.clock_offset_s,
        )

        self.roster = WatchedRoster(self.node.roster)

    async def join_late(self) -> Joined | None:
        """Join if the coordinator is there again."""
        with suppress(CoordinatorUnreachable):
            joined = await self.client.join()
            self.remember(joined)
            self.node.transport.admission = joined.admission
            self.taking_part.contact.note_head(joined.head)
            self.taking_part.contact.in_touch = True
            return joined
        return None

    async def first_state(self, memory_numel: int) -> OuterState:
        """The state at position 0, from the coordinator, verified against what joining gave.

        Args:
            memory_numel: values that the outer step keeps beside the parameters.

        Raises:
            CoordinatorError: it is not there.
            StateError: what it sends is not that state.
        """
        info = await self.client.fetch_snapshot(0)
        assembly = Assembly(
            layout=self.membership.layout,
            position=0,
            leaf_digests=info.leaf_digests,
            root=self.membership.genesis_root,
            memory_numel=memory_numel,
        )
        async for index, leaf in self.client.fetch_leaves(0):
            await self.compute(assembly.add, index, leaf)
        state: OuterState = await self.compute(assembly.finish)
        return state

    # what goes on

    async def _keep_record(self) -> None:
        while True:
            with suppress(RosterError, TransportError, TimeoutError, OSError):
                await self.publish_record()
            self.taking_part.look()
            await asyncio.sleep(RECORD_EVERY_S)

    async def publish_record(self) -> None:
        """Tell the roster where this peer is.

        Raises:
            RosterError, TransportError, TimeoutError, OSError: the DHT did not take it.
        """
        view, rates = self.trainer(), self.options.rates
        record = PeerRecord(
            peer_id=self.identity.peer_id,
            addresses=tuple(self.node.addresses),
            incarnation=self._incarnation,
            role="trainer",
            epoch=self.taking_part.epoch,
            position=self.taking_part.position,
            tokens_per_s=view.tokens_per_s,
            uplink_mbit_s=rates.uplink_mbit_s,
            downlink_mbit_s=rates.downlink_mbit_s,
            ready_in_s=view.ready_in_s,
            step_s=view.step_s,
            protocol=PROTOCOL,
        )
        await self.node.roster.publish(record, RECORD_TTL_S)

    async def _keep_connected(self) -> None:
        while True:
            await self.connect_all()
            await asyncio.sleep(CONNECT_EVERY_S)

    async def connect_all(self) -> None:
        """Look who is there, and make sure of connections."""
        with suppress(RosterError, TransportError, TimeoutError, OSError):
            await self.roster.look()
        records = await self.taking_part.roster_peers()
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

    def trainer(self) -> TrainerView:
        """How the trainer is, by its own word or by what the reducer sees of it."""
        if self.view is not None:
            return self.view()
        return self.taking_part.progress() or TrainerView()

    def paces_s(self) -> list[float]:
        """Seconds that a step takes the other trainers that say so; from any thread."""
        others = (r for r in self.roster.seen if r.peer_id != self.identity.peer_id)
        return [r.step_s for r in others if r.role == "trainer" and r.step_s > 0]

    def ready_in_s(self) -> float | None:
        """None while this peer has nothing to contribute, so that nobody waits for it."""
        if self._leaving or self.taking_part.progress() is None:
            return None
        if self.taking_part.reducer.hands_in:
            return 0.0  # the trainer itself may be in its next window already
        return self.trainer().ready_in_s

    def say(self, level: Level, text: str, *, key: Hashable | None = None) -> None:
        """Report an event here and through the coordinator; repeated warnings are throttled."""
        now_s = time.monotonic()
        told = text if level == "info" else self._repeats.told(text, now_s, key=key)
        if told is None:
            return
        if hasattr(self, "taking_part"):
            self.taking_part.reporter.note(level, told, self.client.now_s())
        self._tell(level, told)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Let something go on until the session ends."""
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
                self.say("error", f"{work.__qualname__} failed and starts again: {error!r}")
            await asyncio.sleep(RESTART_S)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("a task of this peer failed", exc_info=task.exception())

    async def compute(self, function: Callable[..., Any], /, *args: Any) -> Any:  # noqa: ANN401
        """Run something that blocks, beside the loop."""
        return await asyncio.get_running_loop().run_in_executor(self._work, function, *args)


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel, and wait for the end, but not for ever: there is a goodbye to say."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=GOODBYE_S)
