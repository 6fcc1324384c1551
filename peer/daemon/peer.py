"""A peer's network side: everything that runs in its event loop.

    joins the coordinator by the invite, or resumes an earlier membership without it;
    starts the DHT node; takes part in the run's rounds (`RunKind`: by log, or by gossip);
    keeps its record in the roster, its connections and its heartbeats; leaves cleanly.

A peer that is cut off from the coordinator trains on; one that is cut off from everybody keeps
trying.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import (
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    closing,
    contextmanager,
    suppress,
)
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Literal, Protocol

import torch

from atoll.coordinator.rpc.client import CoordinatorClient, FetchedSnapshot, Joined
from atoll.coordinator.rpc.client_errors import CoordinatorError, Evicted, NotWelcome
from atoll.coordinator.run.invite import Invite
from atoll.coordinator.run.notice import Report
from atoll.coordinator.run.phases import OnPhase
from atoll.coordinator.run.spec import RunSpec
from atoll.coordinator.service.metrics import PeerMetrics
from atoll.dht.addresses import is_public, usable
from atoll.dht.identity import Identity
from atoll.dht.node import Node
from atoll.dht.roster import PeerRecord
from atoll.dht.tasks import KeptTasks
from atoll.dht.upnp import Forwarding
from atoll.optim.log.entry import Elector
from atoll.optim.log.live_replica import Compute
from atoll.optim.schedules import WindowEnd
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import Assembly, OuterState
from atoll.peer import notices
from atoll.peer.daemon.background import background_threads
from atoll.peer.daemon.keeping import KeptBallots, new_incarnation
from atoll.peer.daemon.loop_thread import LoopThread
from atoll.peer.daemon.membership import Enrolment, FetchTokenizer, Membership, StateDirectory
from atoll.peer.daemon.options import PeerOptions
from atoll.peer.daemon.reach.company import Company, asking
from atoll.peer.daemon.reach.lookup import look_up
from atoll.peer.daemon.reach.moves import Moves
from atoll.peer.daemon.reach.neighbours import Neighbours, PortInUse, expect_free
from atoll.peer.daemon.reach.reachability import Reach, Reachability, probe
from atoll.peer.daemon.reach.relocations import Following
from atoll.peer.daemon.reducer import RunReducer, TrainerProgress
from atoll.peer.daemon.reporting import Announcer, Heartbeats, Outbox, Reporter
from atoll.peer.daemon.sent_tokenizer import keep_tokenizer
from atoll.peer.daemon.state_directory import StateDirectoryInUse, is_being_left
from atoll.peer.paths import PeerPaths
from atoll.peer.rounds.context import OnEvent

PeerRole = Literal["trainer", "follower", "keeper"]

RECORD_EVERY_S = 5.0  # three misses fit in the 20 s that a record lives
CONNECT_EVERY_S = 2.0  # also the age of the roster that rounds read (`WatchedRoster`)
METRICS_S = 1.0  # a heartbeat gathers a status as often, at the most
LEFT_S = 60.0  # a network process without a trainer ends within 50 s
NOTED_S = 3.0  # in which a network process notes that its trainer was killed, on a busy machine
LEFT_POLL_S = 0.2
GOODBYE_S = 5.0  # for each step of leaving; what does not answer by then is left behind


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Parts that `LogRun` and `GossipRun` share; `Peer` opens and closes all of them."""

    options: PeerOptions
    me: Elector
    """This peer in this process."""
    identity: Identity
    paths: PeerPaths
    files: ExitStack
    """Files that close after the node, which may still answer from them."""
    client: CoordinatorClient
    enrolment: Enrolment
    node: Node
    neighbours: Neighbours
    company: Company
    moves: Moves
    following: Following
    outbox: Outbox
    tasks: KeptTasks
    report: OnEvent
    on_phase: OnPhase
    compute: Compute
    ballots: KeptBallots | None = None
    """of a keeper; None for a trainer"""
    make_first: MakeFirst | None = None
    """builds the run's first state; None if only the coordinator has it"""

    @property
    def run_id(self) -> bytes:
        return self.options.invite.run_id

    @property
    def spec(self) -> RunSpec:
        return self.enrolment.membership.spec

    @property
    def module(self) -> str:
        """The module whose log this peer follows; empty in a dense run."""
        return self.enrolment.membership.module

    @property
    def layout(self) -> Layout:
        """The layout of the module's parameters."""
        return self.enrolment.membership.layout

    @property
    def is_keeper(self) -> bool:
        """Return whether this peer leads and votes instead of training."""
        return self.ballots is not None

    @property
    def role(self) -> PeerRole:
        """What this peer is in the run."""
        return role_of(self.enrolment.membership)

    @property
    def trains(self) -> bool:
        """Return whether this peer has a trainer: a keeper and a follower have none."""
        return self.role == "trainer"

    async def join_again(self) -> Joined:
        """Join a coordinator that has forgotten this peer, or that was away at the start.

        Raises:
            CoordinatorError: it is away, or refuses this peer.
        """
        joined = await self.client.join()
        self.node.transport.admission = joined.admission
        self.enrolment.renew(joined, self.client)
        return joined

    async def fetch_state(
        self,
        memory_numel: int,
        position: int | None = None,
        *,
        memory_dtype: torch.dtype = torch.float32,
    ) -> OuterState:
        """Fetch a state from the coordinator.

        Args:
            memory_numel: values that the outer step keeps beside the parameters.
            position: None for the newest; 0 for the first, which is verified against what joining
                gave. Any other is as good as the coordinator's word.
            memory_dtype: format of these values.

        Raises:
            CoordinatorError: it is not there.
            StateError: what it sends is not that state.
        """
        info = await self._fetch_snapshot(position)
        if position is None:
            position = info.position
        assembly = Assembly(
            layout=self.layout,
            position=position,
            leaf_digests=info.leaf_digests,
            root=info.root if position else self.enrolment.membership.genesis_root,
            memory_numel=memory_numel,
            memory_dtype=memory_dtype,
        )
        async for index, leaf in self.client.fetch_leaves(position):
            await self.compute(assembly.add, index, leaf)
        state: OuterState = await self.compute(assembly.finish)
        return state

    async def _fetch_snapshot(self, position: int | None) -> FetchedSnapshot:
        """Join again if the session ended: a peer may wait for its first state for hours."""
        try:
            return await self.client.fetch_snapshot(position)
        except Evicted:
            raise
        except NotWelcome:
            await self.join_again()
            return await self.client.fetch_snapshot(position)


class RunKind(Protocol):
    """A peer's part in its run, by the kind of the run's method: with a log, or by gossip."""

    progress: TrainerProgress
    heartbeats: Heartbeats
    reporter: Reporter

    @property
    def epoch(self) -> int:
        """The epoch that this peer is in."""
        ...

    @property
    def position(self) -> int:
        """Entries applied; by gossip, the round."""
        ...

    def reducer(self, thread: LoopThread[Peer]) -> RunReducer:
        """Return the trainer's side, which then owns the thread."""
        ...

    async def run(self) -> None:
        """Take part in rounds until cancelled."""
        ...

    async def roster_peers(self) -> dict[str, PeerRecord]:
        """Return the peers in the run, as far as they were seen."""
        ...

    def expect_working(self) -> None:
        """Raise the failure, such as a full disk, after which this peer takes part in nothing."""
        ...

    async def publish(self) -> None:
        """Put this peer's record into the roster; called every few seconds."""
        ...

    def look(self) -> None:
        """Report what people should know of the swarm; called every few seconds."""
        ...

    def stored_all(self) -> bool:
        """Return whether the coordinator has all that this peer has to give it."""
        ...

    def storing(self) -> bool:
        """Return whether some of it is on its way."""
        ...

    async def hand_over(self) -> None:
        """Let the coordinator have what it lacks, before the rounds end."""
        ...

    async def leave(self) -> None:
        """Take part no longer."""
        ...


def role_of(membership: Membership) -> PeerRole:
    """Return the role of a peer by its admission."""
    return "trainer" if membership.role == "coordinator" else membership.role


MakeFirst = Callable[[RunSpec, str], OuterState]
"""Builds the first state of a run's module from its spec; takes seconds. Raises SetupError."""
StartRun = Callable[[Environment, Joined | None], Awaitable[RunKind]]
"""Returns a `RunKind` that holds a state."""

Admit = Callable[[Membership, FetchTokenizer], Awaitable[None]]
"""Raises unless the owner of this machine wants to take part in the run."""


class Peer:
    """One peer of one run, from `open` until its block ends."""

    def __init__(self, env: Environment, run: RunKind) -> None:
        """Use `open`."""
        self.run = run
        self._env = env

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        options: PeerOptions,
        start_run: Callable[[RunSpec], StartRun],
        *,
        admit: Admit,
        make_first: MakeFirst | None = None,
        on_event: Report,
        on_phase: OnPhase,
    ) -> AsyncIterator[Peer]:
        """Join and recover, hold rounds while the block runs, then leave.

        Args:
            options: what the peer's owner decides.
            start_run: what starts the kind of run that a spec asks for.
            admit: returns if the owner wants this run; raises before anything of it is used.
            make_first: builds the run's first state; without, it is fetched.
            on_event: takes what a person may want to read; called in the loop and the trainer.
            on_phase: takes the part of a round that this peer is in, and its position; in the loop.

        Raises:
            StateDirectoryError: the state directory is not usable.
            CoordinatorError: the coordinator refuses this peer.
            PortInUse: the peer cannot listen where it should.
        """
        async with AsyncExitStack() as stack:
            metrics = stack.enter_context(_served(options.metrics_listen))
            env, joined = await _environment(stack, options, admit, on_event, on_phase)
            if env.trains:
                env = replace(env, make_first=make_first)
            env.tasks.keep(env.following.keep)  # first: the run may wait for the coordinator
            peer = cls(env, await start_run(env.spec)(env, joined))
            env.tasks.keep(peer.run.run)
            env.tasks.keep(peer.run.heartbeats.keep)
            env.tasks.keep(peer._keep_record)
            env.tasks.keep(peer._keep_connected)
            env.tasks.keep(peer._keep_company)
            env.tasks.keep(env.moves.keep)
            if metrics is not None:
                env.tasks.keep(partial(_keep_metrics, metrics, peer.run.reporter))
            yield peer
            await peer._leave()

    @property
    def peer_id(self) -> str:
        """This peer's PeerID."""
        return self._env.me.peer_id

    @property
    def is_keeper(self) -> bool:
        """Return whether this peer leads and votes instead of training."""
        return self._env.is_keeper

    @property
    def spec(self) -> RunSpec:
        """The run's spec."""
        return self._env.spec

    @property
    def module(self) -> str:
        """The module whose log this peer follows; empty in a dense run."""
        return self._env.module

    @property
    def position(self) -> int:
        """Entries applied; by gossip, the round."""
        return self.run.position

    @property
    def paths(self) -> PeerPaths:
        """The files of this peer."""
        return self._env.paths

    def paces_s(self) -> list[float]:
        """Return the seconds a step takes each other trainer that reports them; in any thread."""
        return self._env.neighbours.paces_s()

    def window_ends(self) -> list[WindowEnd]:
        """Return when the windows of other trainers at this position end; in any thread."""
        return self._env.neighbours.window_ends(self.position)

    def validates(self, position: int) -> bool:
        """Return whether it is this peer's turn to validate a position; in any thread."""
        return self._env.neighbours.validates(position)

    async def fetch_tokenizer(self) -> Path:
        """Return where the tokenizer is that travels with the run; fetch it if it is not here.

        Raises:
            DataError: it did not arrive, or cannot be parsed.
        """
        client, kept = self._env.client, self._env.paths.tokenizer
        remedy = (
            "try again while the coordinator is up, or name a copy: build_model(tokenizer=PATH)"
        )
        await keep_tokenizer(self.spec, client.fetch_tokenizer, kept, remedy=remedy)
        return kept

    async def _keep_record(self) -> None:
        while True:
            await self.run.publish()
            self.run.look()
            await asyncio.sleep(RECORD_EVERY_S)

    async def _keep_connected(self) -> None:
        while True:
            await self._env.neighbours.connect(self.run.roster_peers)
            await asyncio.sleep(CONNECT_EVERY_S)

    async def _keep_company(self) -> None:
        while True:
            if not self.run.progress.is_over(self.position):
                me, seen = self._env.me.peer_id, self._env.neighbours.roster.seen
                trainers = [r.peer_id for r in seen if r.role == "trainer" and r.peer_id != me]
                await self._env.company.look(trainers)
            await self._env.company.pause()

    async def _leave(self) -> None:
        """Leave the rounds and the coordinator; closing the node leaves roster and DHT."""
        self.run.progress.leaving = True  # first, so that no group waits for this peer any more
        await self.run.hand_over()
        # The heartbeats end first: one after the goodbye would take this peer in again.
        await self._env.tasks.close(GOODBYE_S)
        with suppress(CoordinatorError, TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                await self.run.heartbeats.leave()
        with suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                await self.run.leave()


def _needs_others(spec: RunSpec) -> bool:
    """Return whether a lone trainer waits for others; a stage may have one peer."""
    return spec.round.min_peers > 1 and spec.topology.num_stages == 1


async def _own_directory(paths: PeerPaths, invite: Invite, show: Report) -> StateDirectory:
    """Lock the state directory; wait for a network process that leaves it.

    Raises:
        StateDirectoryError: it is in use, or of another run.
    """
    refused_s, left_s = time.monotonic() + NOTED_S, math.inf
    while True:
        try:
            return StateDirectory(paths, invite.run_id)
        except StateDirectoryInUse:
            is_left, now_s = is_being_left(paths), time.monotonic()
            if now_s > (left_s if is_left else refused_s):
                raise
            if is_left and left_s == math.inf:
                show("info", notices.killed_before())
                left_s = now_s + LEFT_S
            await asyncio.sleep(LEFT_POLL_S)


@contextmanager
def _served(listen: str | None) -> Iterator[PeerMetrics | None]:
    """Serve this peer's own metrics, if its owner wants that. Raises PortInUse."""
    with ExitStack() as stack:
        try:
            metrics = stack.enter_context(PeerMetrics.served(listen))
        except OSError as error:
            raise PortInUse(f"--metrics-listen {listen}: {error.strerror}") from None
        yield metrics


async def _keep_metrics(metrics: PeerMetrics, reporter: Reporter) -> None:
    """Show the status that each heartbeat gathers, whether or not it arrives."""
    while True:
        if reporter.newest is not None:
            metrics.set_peers([reporter.newest])
        await asyncio.sleep(METRICS_S)


async def _environment(
    stack: AsyncExitStack,
    options: PeerOptions,
    admit: Admit,
    on_event: Report,
    on_phase: OnPhase,
) -> tuple[Environment, Joined | None]:
    """Join and start the node; `stack` closes all of it, the last first."""
    invite = options.invite
    paths = PeerPaths(root=options.state_dir, logs=options.logs)
    directory = stack.enter_context(closing(await _own_directory(paths, invite, on_event)))
    directory.expect_role(follows=options.role == "follower")
    identity = Identity.load_or_create(paths.identity)
    listen = usable(options.listen)
    expect_free(listen, remedy="name another with --listen, or port 0 for any")
    client = CoordinatorClient(
        invite,
        identity,
        role=options.role,
        was_keeper=directory.is_keepers(),
        version=version("atoll"),
        module=options.moved.module if options.moved else options.module or directory.module(),
    )
    outbox = Outbox()
    announcer = Announcer(on_event, outbox, client.now_s)
    # For what would block the loop: decode, accumulate, apply, hash, SQLite.
    threads = background_threads(2, "atoll-work", short_calls=True)
    stack.callback(threads.shutdown, wait=False, cancel_futures=True)
    # These tasks close last, although they end first: one that hangs keeps nothing else open.
    tasks = await stack.enter_async_context(
        KeptTasks(lambda why: announcer.report("error", notices.task_restarted(reason=why)))
    )
    files = stack.enter_context(ExitStack())
    stack.push_async_callback(client.close)

    async def find_place(nodes: Sequence[str]) -> bool:
        return await look_up(client.whereabouts, nodes, invite.run_id.hex())

    enrolment, joined = await Enrolment.open(client, directory, invite, announcer.show, find_place)
    await admit(enrolment.membership, client.fetch_tokenizer)
    is_keeper = enrolment.membership.role == "keeper"
    ballots = KeptBallots.open(paths.ballots) if is_keeper else None
    # The votes of a trainer are not synced to disk, so after a restart it must be another elector.
    incarnation = ballots.incarnation if ballots is not None else new_incarnation()
    me = Elector(peer_id=identity.peer_id, incarnation=incarnation)
    # What the owner announces is the owner's word: nobody is asked.
    reach, forwarding = Reach(), Forwarding()
    stack.push_async_callback(forwarding.close)
    if not options.announce:
        reach, listen = await probe(client, listen, paths.reach, forwarding)
    bootstrap = enrolment.own_bootstrap
    node = await Node.start(
        paths.identity,
        run_id=invite.run_id.hex(),
        listen_maddrs=listen,
        announce_maddrs=options.announce,
        bootstrap=enrolment.membership.bootstrap,
        admission=enrolment.membership.admission,
        # By the coordinator's clock, which dates admissions; hivemind refuses a node that is off
        # by more than 3 s.
        check=client.admissions,
        clock_offset_s=client.clock_offset_s,
    )
    stack.push_async_callback(node.close)
    stack.push_async_callback(tasks.close, GOODBYE_S)
    reachability = Reachability(
        node,
        reach,
        bootstrap,
        relay_mbit_s=options.relay_mbit_s,
        report=partial(announcer.show, "info"),
    )
    tasks.keep(forwarding.keep)
    if not options.announce:
        found = notices.reach_found(str(reachability), reach=reachability.kind)
        announcer.show("info", found)
    elif any(map(is_public, bootstrap)) and not any(map(is_public, options.announce)):
        announcer.show("warning", notices.private_announced())
    node.punching.on_hole = lambda peer: announcer.report("info", notices.hole_punched(peer=peer))
    neighbours = Neighbours(
        node,
        me,
        options.rates,
        reachability,
        role=role_of(enrolment.membership),
        module=enrolment.membership.module,
        keep_addresses=enrolment.keep_addresses,
    )
    env = Environment(
        options=options,
        me=me,
        identity=identity,
        paths=paths,
        files=files,
        client=client,
        enrolment=enrolment,
        node=node,
        neighbours=neighbours,
        company=Company(
            ask=asking(node.transport),
            needs_others=role_of(enrolment.membership) == "trainer"
            and _needs_others(enrolment.membership.spec),
            show=announcer.show,
        ),
        moves=Moves(
            client,
            node,
            reachability,
            forwarding,
            is_asked=not options.announce,
            report=announcer.show,
        ),
        following=Following(
            client,
            node,
            enrolment,
            reachability,
            neighbours.roster.peers,
            report=announcer.report,
            find_place=find_place,
        ),
        outbox=outbox,
        tasks=tasks,
        report=announcer.report,
        on_phase=on_phase,
        compute=partial(asyncio.get_running_loop().run_in_executor, threads),
        ballots=ballots,
    )
    return env, joined
