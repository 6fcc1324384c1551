"""A run of simulated machines, from a plan to its verdict.

    verdict = run(plan, folder)
    verdict.broken              the rule that was broken, or None

Faults happen at their times, then everything heals, and the run has to go on: within `RESUMES_S`
the log is two positions further and every trainer is there. `Audit` watches all of the time.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import queue
import random
import shutil
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.coordinator import admission_control
from atoll.coordinator.coordinator import Coordinator
from atoll.coordinator.copies import keeping as copies_keeping
from atoll.coordinator.copies import owners, restoring, writing
from atoll.coordinator.copies.sealing import RecoveryKey
from atoll.coordinator.notices import LOG_LOST
from atoll.coordinator.rpc import channel
from atoll.coordinator.run import admission, eviction
from atoll.coordinator.run.admission import CLOCK_SLACK_S, Admission
from atoll.coordinator.run.invite import Invite
from atoll.coordinator.run.keys import RunKeys
from atoll.coordinator.run.levels import Level
from atoll.coordinator.run.relocation import Whereabouts
from atoll.coordinator.run.spec import RunSpec
from atoll.coordinator.service import server
from atoll.coordinator.service import service as service_module
from atoll.coordinator.service.service import Service
from atoll.dht import clock, identity
from atoll.dht.addresses import peer_of
from atoll.dht.identity import Identity
from atoll.dht.testing.memory import MemoryNetwork, MemoryTransport
from atoll.dht.transport import Check, TransportError
from atoll.optim.log import entry as log_entry
from atoll.optim.log.entry import sha256
from atoll.optim.log.live_replica import LiveReplica
from atoll.optim.log.orders import ReadmitPeer, ResumeRun, RunSettings
from atoll.optim.log.replica import DISK_ERRORS
from atoll.optim.log.store_errors import StoreCorrupt
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import OuterState
from atoll.peer.daemon import (
    decisions,
    gossip_run,
    keeping,
    log_run,
    reducer,
    reporting,
    touch,
)
from atoll.peer.daemon import peer as peer_module
from atoll.peer.daemon.gossip_run import GossipRun
from atoll.peer.daemon.reach import bootstrap
from atoll.peer.errors import PeerEvicted
from atoll.peer.gossip import engine, invitations
from atoll.peer.lab.hunt import wires
from atoll.peer.lab.hunt.audits import Audit, RuleBroken
from atoll.peer.lab.hunt.checks import check_logs, check_memory, check_tasks
from atoll.peer.lab.hunt.copies import HuntTarget
from atoll.peer.lab.hunt.disks import Disk
from atoll.peer.lab.hunt.edges import (
    BEGAN_S,
    Edges,
    HuntLoop,
    InlineExecutor,
    KnownSignatures,
    NoCounter,
    here,
    living,
    replaced,
)
from atoll.peer.lab.hunt.faults import Faults
from atoll.peer.lab.hunt.machines import CoordinatorMachine, Habits, Machine, PeerMachine
from atoll.peer.lab.hunt.nodes import MemoryDht, MemoryNode, NodeTransport
from atoll.peer.lab.hunt.organiser import Organiser, orders_of
from atoll.peer.lab.hunt.plans import RunPlan
from atoll.peer.lab.hunt.trainers import TOKENS, TurnQueue
from atoll.peer.lab.hunt.watched import (
    WatchedBallots,
    WatchedGossipPeer,
    WatchedInvitee,
    WatchedMeeting,
    WatchedReplica,
    process_of,
)

RESUMES_S = 900.0  # an epoch opens 60 s after a stall, later after each that brought nothing
RESTS_S = 90.0  # that a run stays paused after everything has healed
ORGANISER_S = 300.0  # after which the organiser reads what the coordinator asks for
LOOK_S = 1.0  # between two looks at what must hold
COUNTS_S, COUNTS_LESS = 20.0, 1.5  # when what processes hold is counted: ever more rarely
ENDING_TRIES = 40  # to end what is left of processes that were killed, a virtual second each
NUMEL = 1500
BLOCKS = 3
VERIFYING = (admission, eviction, identity, log_entry)  # modules that verify signatures
VERSIONED = (admission_control, peer_module, service_module, touch)  # that read Atoll's version


@dataclass(frozen=True, kw_only=True)
class RunVerdict:
    """The outcome of a plan."""

    plan: RunPlan
    broken: RuleBroken | None
    story: tuple[str, ...]
    """The events, a line each."""
    virtual_s: float
    positions: int
    epochs: int
    resumed_s: float
    """From healing to the first progress of all."""
    faults: Counter[str] = field(default_factory=Counter)


class World:
    """The machines of a run and the network between them."""

    def __init__(self, plan: RunPlan, folder: Path, loop: HuntLoop) -> None:
        self.plan = plan
        self.folder = folder
        self.story: list[str] = []
        self.faults = Faults(self)
        self.retired: list[tuple[asyncio.Task[None] | None, Disk]] = []
        self.dht: dict[str, MemoryDht] = {}
        self.nodes: dict[str, MemoryNode] = {}
        self.invite: Invite | None = None
        self.chance = random.Random(f"world {plan.seed}")
        self.now = loop.time
        self._loop = loop
        self._undo: list[tuple[float, Callable[[], None]]] = []
        self.clock_errors_s = 0.0
        self.gone: set[str] = set()
        self._counts_at_s = COUNTS_S
        self.mesh = self._network("mesh", NodeTransport)
        self.wire = self._network("wire", MemoryTransport)
        is_cut = "count=" in plan.method
        names = tuple(f"blocks.{i}.w" for i in range(BLOCKS)) if is_cut else ("w",)
        shape = (NUMEL // len(names),)
        self.layout = Layout(names=names, shapes=(shape,) * len(names))
        self.spec = _spec_of(plan)
        self._genesis = self.spec.method().genesis(
            self.layout, torch.linspace(-1.0, 1.0, self.layout.numel)
        )
        method = self.spec.method()
        self.audit = Audit(_keys(plan.seed).run_public_key, method, self._genesis, units=plan.units)
        self.coordinator = self._new_coordinator(1, _identity(plan, 0))
        self.former: list[CoordinatorMachine] = []
        """coordinators that ran on when another one was restored in their place"""
        self.keeper_token = b""
        self._followed: dict[str, CoordinatorMachine] = {}
        """the coordinator that each machine has reached last, by its name"""
        self.organiser = Organiser(self, _keys(plan.seed), _identity(plan, -1), plan.faults)
        self.peers: list[PeerMachine] = []
        for _ in range(plan.keepers):
            self.add_peer(is_keeper=True)
        for _ in range(plan.trainers):
            self.add_peer()

    # For machines

    def say(self, text: str) -> None:
        """Add a line to the story."""
        self.story.append(f"{self.now():9.2f} {text}")

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start the task of a machine."""
        return asyncio.get_running_loop().create_task(work)

    def genesis(self) -> OuterState:
        """Return the run's first state."""
        return self._genesis

    def retire(self, task: asyncio.Task[None] | None, disk: Disk) -> None:
        """Keep what is left of a process that died until it has ended."""
        self.retired.append((task, disk))

    def restart_later(self, machine: Machine, seconds: float) -> None:
        """Start a machine's process again after a while."""
        self.later(seconds, lambda: self._restart(machine))

    def unexpected(self, machine: Machine, error: BaseException) -> None:
        """Take a failure that no process should have."""
        if isinstance(error, StoreCorrupt) and machine.tainted:
            return
        self.audit.fail("nothing fails unexpectedly", f"{machine.name}: {error!r}", cause=error)

    def heard(self, machine: Machine, level: Level, text: str) -> None:
        """Take what a peer tells its owner."""
        if level != "info":
            self.say(f"{machine.name} {level}: {text[:200]}")
        if "failed and restarts" in text and "full" not in text and not machine.tainted:
            self.audit.fail("nothing fails unexpectedly", f"{machine.name}: {text}")
        if "signed two" in text:
            self.audit.fail("nobody honest is accused", f"{machine.name}: {text}")

    def audited(self, machine: Machine, check: Check) -> Check:
        """Return a check of admissions that is checked itself."""

        def audited_check(remote: str, credential: bytes, /, use: str = "") -> float | None:
            until_s = check(remote, credential, use)
            admission = Admission.open(credential, _keys(self.plan.seed).run_public_key)
            late_s = self._true_clock_s() - admission.expires_s - self.clock_errors_s
            if late_s > CLOCK_SLACK_S + 1 or admission.peer_id != remote:
                self.audit.fail(
                    "admissions end",
                    f"{machine.name} has let {remote[-4:]} in {late_s:.0f} s after its admission",
                )
            return until_s

        return audited_check

    # Life

    async def live(self) -> None:
        """Start everything, let the plan happen, heal, and see the run go on."""
        looking = self.spawn(self._write_back())
        self.coordinator.start()
        if self.is_logged:
            self.organiser.start()
        for peer in self.peers:
            peer.start()
        for fault in self.plan.faults:
            await self._until(fault.at_s)
            self.faults.happen(fault)
        await self._until(self.plan.lasts_s)
        self._heal()
        if self.organiser.signed or not self.organiser.is_idle:
            await self._settle_orders()
        await self._resume()
        looking.cancel()

    async def end(self) -> None:
        """End what is left of every machine."""
        for machine in [*self.machines(), self.organiser]:
            machine.is_wanted = False
            machine.crash(lost_power=False, files={})
        for _ in range(ENDING_TRIES):  # what a killed process waits for never comes
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            if tasks:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks, timeout=1.0)
        for _, disk in self.retired:
            disk.close()
        if self.coordinator.copies is not None:
            self.coordinator.copies.close()

    async def _until(self, at_s: float) -> None:
        while self.now() < at_s:
            self._do_due()
            self._look()
            await asyncio.sleep(min(LOOK_S, at_s - self.now()))

    def _do_due(self) -> None:
        due = [each for each in self._undo if each[0] <= self.now()]
        self._undo = [each for each in self._undo if each[0] > self.now()]
        for _, undo in due:
            undo()
        if due:
            self._count_later()

    def _count_later(self) -> None:
        """Count what processes hold a moment from now.

        All that a link has held back arrives at once when it heals, calls too whose callers have
        long given up: tasks that have not begun, and have nothing to wait for.
        """
        self._counts_at_s = max(self._counts_at_s, self.now() + LOOK_S)

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something after a while, or when everything heals."""
        self._undo.append((self.now() + seconds, action))

    async def _write_back(self) -> None:
        while True:
            await asyncio.sleep(30.0)
            for machine in self.machines():
                machine.disk.write_back()

    def _look(self) -> None:
        for network in (self.mesh, self.wire):
            for error in network.errors:
                if not isinstance(error, (*DISK_ERRORS, StoreCorrupt, TransportError)):
                    text = f"a handler raised {error!r}"
                    self.audit.fail("nothing fails unexpectedly", text, cause=error)
            network.errors.clear()
        for machine in self.machines():
            replica = self.replica(machine)
            if replica is not None and replica.opened is not None and not machine.tainted:
                self.audit.opened(machine, replica.opened.epoch, replica.epoch_record)
        for peer in self.peers:
            if peer.peer is not None and isinstance(peer.peer.run, GossipRun):
                self.audit.mass.look(process_of(peer), peer.peer.run.gossip.mass)
            peer.renew_invite()
        if self.now() >= self._counts_at_s:
            self._counts_at_s = max(self.now() + COUNTS_S, COUNTS_LESS * self.now())
            check_memory(self)
        if self.audit.broken is not None:
            raise self.audit.broken

    # Orders

    async def _settle_orders(self) -> None:
        """Let a paused run rest, resume it, and see all orders decided."""
        healed_s = self.now()
        if any(settings.is_paused for settings in self._settings().values()):
            self.say("--- the run rests")
            await self._until(healed_s + RESTS_S)
        while not self.organiser.is_idle or self._undo_orders() or not self._has_all_orders():
            if self.now() - healed_s > RESTS_S + RESUMES_S:
                self._say_events()
                self.audit.fail("orders are decided", self._standing())
            self._accept_loss_later(healed_s)
            await self._until(self.now() + LOOK_S)

    def _undo_orders(self) -> bool:
        """Let the run go on with everybody; return whether that needs orders."""
        up = self.coordinator.running
        if up is None or self.is_over():
            return False
        settings = up.coordinator.orders().settings  # once all that were given are decided
        for peer_id in settings.evicted:
            self.organiser.want(ReadmitPeer(peer_id=peer_id))
        if settings.is_paused or settings.last_round is not None:
            self.organiser.want(ResumeRun())
        return not self.organiser.is_idle

    def _settings(self) -> dict[str, RunSettings]:
        """Return what orders have changed at the end of each log that is open, by machine."""
        replicas = {machine.name: self.replica(machine) for machine in self.machines()}
        return {name: each.settings for name, each in replicas.items() if each is not None}

    def _has_all_orders(self) -> bool:
        if self.is_over():
            return True
        kept, up = self.replica(self.coordinator), self.coordinator.running
        if not self.organiser.is_idle or kept is None or up is None:
            return False
        if up.coordinator.log.orders():  # under a key that one of them names, they look void
            return False
        return not self.organiser.lost(orders_of([kept]))

    def is_over(self) -> bool:
        """Return whether an order has ended the run."""
        replica = self.replica(self.coordinator) if self.is_logged else None
        return replica is not None and replica.settings.is_over(replica.position)

    # Machines

    def machines(self) -> list[Machine]:
        """Return all of them, the coordinator's first."""
        return [self.coordinator, *self.peers, *self.former]

    def restore_elsewhere(self) -> CoordinatorMachine:
        """Start a new coordinator from the newest copy; return the one before, which runs on."""
        former = self.coordinator
        key = RecoveryKey.of(former.disk.folder)  # the organiser has kept it
        number = 2 + len(self.former)
        self.coordinator = self._new_coordinator(number, _identity(self.plan, -number))
        self.coordinator.restore(key, is_damaged=former.tainted)
        self.former.append(former)
        self.coordinator.start()
        return former

    def _new_coordinator(self, number: int, identity: Identity) -> CoordinatorMachine:
        copies = HuntTarget(self.folder.name) if self.plan.copies else None
        return CoordinatorMachine(self, number, identity, copies)

    def replica(self, machine: Machine) -> LiveReplica | None:
        """Return the log of a machine's process, if it has one."""
        if isinstance(machine, CoordinatorMachine):
            up = machine.running
            return up.coordinator.log.replica if up is not None else None
        peer = machine.peer if isinstance(machine, PeerMachine) else None
        return getattr(peer.run, "replica", None) if peer is not None else None

    # Healing

    def _heal(self) -> None:
        self.say("--- everything heals")
        for _, undo in self._undo:
            undo()
        self._undo = []
        self.faults.forget_commits()
        for machine in self.machines():
            machine.disk.crash_in, machine.disk.is_full = None, False
            self.thaw(machine)
            machine.slow_down(0.0)
            if machine.identity.peer_id in self.gone:
                machine.is_wanted = False
                machine.crash(lost_power=False)
            elif machine not in self.former:  # those end when they see the copies of another one
                machine.start()
        self.mesh.heal()
        self.wire.heal()
        self._count_later()

    async def _resume(self) -> None:
        healed_s = self.now()
        goal = self.positions()[-1] + 2 if self.positions() else 2
        while not self._has_resumed(goal):
            self._do_due()
            self._look()
            self._accept_loss_later(healed_s)
            if self.now() - healed_s > RESUMES_S:
                self._say_events()
                self.audit.fail("a healed run goes on", self._standing())
            await asyncio.sleep(LOOK_S)
        self.resumed_s = self.now() - healed_s
        self.say(f"--- resumed after {self.resumed_s:.0f} s: {self._standing()}")
        await asyncio.sleep(LOOK_S)
        self._look()
        self.check_logs()
        check_tasks(self)
        check_memory(self)
        self._look()

    resumed_s = 0.0

    def check_logs(self) -> None:
        """Compare what is stored everywhere with what was decided."""
        check_logs(self)

    def _accept_loss_later(self, healed_s: float) -> None:
        """Do what the organiser does if a disk has lost what no peer has either."""
        coordinator = self.coordinator
        up = coordinator.running
        if self.now() - healed_s < ORGANISER_S:
            return
        may_lack = coordinator.tainted or coordinator.was_replaced
        if up is None or not may_lack or coordinator.accepts_loss:
            return
        if any(event.code == LOG_LOST for event in up.coordinator.status().events):
            coordinator.accepts_loss = True
            coordinator.crash(lost_power=False)
            coordinator.start()

    def _say_events(self) -> None:
        """Add what the coordinator has reported to the story."""
        up = self.coordinator.running
        for event in up.coordinator.status().events if up is not None else ():
            at_s = event.at - BEGAN_S
            self.story.append(f"{at_s:9.2f} coordinator {event.level}: {event.text[:200]}")

    def _wanted(self) -> list[PeerMachine]:
        up = self.coordinator.running
        return [
            peer
            for peer in self.peers
            if peer.is_wanted
            and peer.identity.peer_id not in self.gone
            # Of a run that is over, nobody is readmitted.
            and not (up and up.coordinator.admission.is_evicted(peer.identity.peer_id))
        ]

    def positions(self) -> list[int]:
        """Return where the peers are, the last one first."""
        return sorted(peer.peer.position for peer in self._wanted() if peer.peer is not None)

    def _has_resumed(self, goal: int) -> bool:
        wanted = self._wanted()
        up = self.coordinator.running
        if self.is_over():
            last = self._settings()[self.coordinator.name].last_round
            return all(last == _ended_at(peer) for peer in wanted)
        if up is None or any(peer.peer is None for peer in wanted):
            return False
        if self.former and not self._follows_one(wanted):
            return False
        positions = self.positions()
        kept = up.coordinator.log.head().position if self.is_logged else positions[0]
        return positions[0] >= goal and (not self.is_logged or kept >= goal)

    def _follows_one(self, peers: Sequence[PeerMachine]) -> bool:
        """Return whether one coordinator is left, and peers are in touch with that one."""
        followed = {self._followed.get(peer.name) for peer in peers}
        return followed == {self.coordinator} and not any(each.is_up for each in self.former)

    @property
    def is_logged(self) -> bool:
        """Return whether the run has a log."""
        return self.spec.method().reduction != "pairs"

    def _standing(self) -> str:
        places = [
            f"{p.name} {(p.peer.run.epoch, p.peer.position) if p.peer else 'is not in the run'}"
            for p in self._wanted()
        ]
        up = self.coordinator.running
        head = up.coordinator.log.head() if up is not None else None
        return f"{', '.join(places)}; coordinator {(head.epoch, head.position) if head else None}"

    # Inside

    def add_peer(self, *, is_keeper: bool = False) -> PeerMachine:
        """Add a machine, which is not started."""
        number = len(self.peers) + 1
        pace = self.plan.step_s * (1 + 0.2 * (number % 3))
        habits = Habits(is_keeper=is_keeper, step_s=pace)
        peer = PeerMachine(self, number, habits, _identity(self.plan, number))
        self.peers.append(peer)
        return peer

    def _restart(self, machine: Machine) -> None:
        if machine.identity.peer_id not in self.gone:
            machine.start()

    def thaw(self, machine: Machine) -> None:
        """Let a frozen machine go on."""
        for network, name in self.names(machine):
            network.thaw(name)

    def names(self, machine: Machine) -> list[tuple[MemoryNetwork, str]]:
        """Return a machine's networks, and its name in each."""
        return [(self.mesh, machine.identity.peer_id), (self.wire, machine.wire_name)]

    def _true_clock_s(self) -> float:
        return BEGAN_S + self.now()

    def _network(self, name: str, kind: type[MemoryTransport]) -> MemoryNetwork:
        return MemoryNetwork(
            random.Random(f"{name} {self.plan.seed}"),
            latency_s=self.plan.latency_s,
            jitter_s=self.plan.jitter_s,
            kind=kind,
        )

    # What replaces the system

    async def listen(
        self, stack: AsyncExitStack, coordinator: Coordinator, state_dir: Path, service: Service
    ) -> tuple[str, Any]:
        """Serve gRPC in memory instead of at a port."""
        machine = here()
        wires.serve(machine.own_wire, service)
        return machine.address, SimpleNamespace(p2p_port=None, multiaddr=str, caller=str)

    async def channel(self, target: str, sha256: bytes, *, timeout_s: float) -> wires.MemoryChannel:
        """Connect to a coordinator in memory instead of by TLS."""
        machine = here()
        coordinators = [self.coordinator, *self.former]
        callee = next(each for each in coordinators if each.address == target)

        def replied(reply: Any) -> None:  # noqa: ANN401
            head = getattr(reply, "head", None)
            if living() is machine and head is not None and len(head.chain) == 32:
                self.audit.acknowledged(callee, head.epoch, head.position)

        wire, name = machine.own_wire, callee.wire_name
        opened = await wires.MemoryChannel.open(wire, name, replied, timeout_s=timeout_s)
        self._followed[machine.name] = callee
        return opened

    async def look_up(
        self, whereabouts: Whereabouts, addresses: Sequence[str], run_id: str
    ) -> bool:
        """Ask nodes where the coordinator is, in memory instead of by libp2p."""
        asked = [self.nodes.get(peer_of(address)) for address in addresses]
        found = [each for each in asked if each is not None and each.is_reached]
        return any([whereabouts.take(node.notices.show()) for node in found if node.notices.show()])

    def places(self, edges: Edges) -> list[tuple[Any, str, Any]]:
        """Return what is replaced besides clocks, chance and disks."""
        queues = SimpleNamespace(SimpleQueue=TurnQueue, Empty=queue.Empty)
        signatures = KnownSignatures()
        identities = SimpleNamespace(load_or_create=lambda path: here().identity)
        return [
            (peer_module, "Node", MemoryNode),
            (bootstrap, "Node", MemoryNode),
            (peer_module, "Identity", identities),
            (bootstrap, "Identity", identities),
            (bootstrap, "choose_port", lambda host, wanted, remembered: 1),
            (bootstrap, "both_families", lambda host, port: [host]),
            (peer_module, "look_up", self.look_up),
            (peer_module, "background_threads", lambda *_, **__: InlineExecutor()),
            (reducer, "background_threads", lambda *_, **__: InlineExecutor()),
            (decisions, "queue", queues),
            (gossip_run, "queue", queues),
            (reporting, "WireCounter", NoCounter),
            (reporting, "version", lambda name: "0"),
            # It reads the package's files each time, as often as each heartbeat.
            *((module, "version", cache(version)) for module in VERSIONED),
            (log_run, "LiveReplica", WatchedReplica),
            (server, "LiveReplica", WatchedReplica),
            (server, "_listen", self.listen),
            (channel, "pinned_channel", self.channel),
            (copies_keeping, "_in_thread", lambda work: self._loop.run_in_executor(None, work)),
            *((module, "secrets", edges) for module in (owners, restoring, writing)),
            (clock, "now_s", edges.run_clock_s),
            (clock, "follow", edges.follow),
            *((module, "Ed25519PublicKey", signatures) for module in VERIFYING),
            (peer_module, "new_incarnation", edges.incarnation),
            (keeping, "new_incarnation", edges.incarnation),
            (keeping, "Ballots", WatchedBallots),
            (engine, "GossipPeer", WatchedGossipPeer),
            (engine, "Invitee", WatchedInvitee),
            (invitations, "Meeting", WatchedMeeting),
            (RunKeys, "generate", classmethod(lambda cls: _keys(self.plan.seed))),
        ]


def _ended_at(peer: PeerMachine) -> int:
    return peer.peer.position if peer.peer is not None else peer.ended_at


@cache
def prepare() -> None:
    """Do what each run of a process would do on its way: children of the process inherit it.

    The first optimizer imports torch's compiler, 800 modules in most of a second; two of them draw
    numbers, which must not be the seed's.
    """
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    _tls()


def run(plan: RunPlan, folder: Path, kind: type[World] = World) -> RunVerdict:
    """Run a plan to its end; `kind` is the class of the world, for other machines in it."""
    prepare()
    loop = HuntLoop()
    loop.longest_job_s = plan.longest_job_s
    torch.manual_seed(plan.seed)
    world = kind(plan, folder, loop)
    edges = Edges(loop, plan.seed)
    failures = _Failures(world)
    broken: RuleBroken | None = None
    atoll = logging.getLogger("atoll")
    was_collecting = gc.isenabled()
    gc.disable()  # when it runs is no matter of the seed, and it ends generators
    gc.freeze()  # what was there before is not looked through at the end
    try:
        with (
            replaced(edges, world.places(edges)),
            asyncio.Runner(loop_factory=lambda: loop) as runner,
        ):
            runner.get_loop().set_exception_handler(failures.from_loop)
            atoll.addHandler(failures)
            try:
                runner.run(world.live())
            except RuleBroken as error:
                broken = error
            finally:
                atoll.removeHandler(failures)
                virtual_s = loop.time()
                runner.run(world.end())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if was_collecting:
            gc.enable()
            gc.collect()
        gc.unfreeze()
    _, position = world.audit.furthest
    return RunVerdict(
        plan=plan,
        broken=broken,
        story=tuple(world.story),
        virtual_s=virtual_s,
        positions=position + 1,
        epochs=world.audit.num_epochs,
        resumed_s=world.resumed_s,
        faults=world.faults.counts,
    )


class _Failures(logging.Handler):
    """Takes what processes log as errors, and what asyncio reports."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        """Take a log record."""
        error = record.exc_info[1] if record.exc_info else None
        self._take(error, record.getMessage())

    def from_loop(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Take a failure that nobody awaits."""
        self._take(context.get("exception"), str(context["message"]))

    def _take(self, error: BaseException | None, text: str) -> None:
        machine = living()
        if machine is None or error is None:
            return
        if isinstance(error, (*DISK_ERRORS, TransportError, PeerEvicted)):
            return
        self._world.say(f"{machine.name}: {text}: {error!r}")
        self._world.unexpected(machine, error)


def _spec_of(plan: RunPlan) -> RunSpec:
    return RunSpec.from_dict(
        {
            "run": {"name": "hunt", "rounds": 0},
            "outer": {"method": plan.method, "inner_steps": 4},
            "compression": {"codec": plan.codec},
            # A round is as long as the coordinator takes it for.
            "data": {"seq_len": TOKENS} | _once(plan),
            "inner": {"batch_size": 1},
            "round": {
                "min_peers": min(2, plan.trainers),
                "electors": "keepers" if plan.keepers else "members",
                "snapshot_every": plan.snapshot_every,
                "log_mb": 1,
            },
            "coordinator": {
                "admission_hours": plan.admission_hours,
                "checkpoint_every": 0,
                "listen": "127.0.0.1:7700",
                "dht_listen": "127.0.0.1:7701",
            },
        }
    )


def _once(plan: RunPlan) -> dict[str, Any]:
    return {"once": True, "same_text": True, "units": plan.units} if plan.units else {}


def _identity(plan: RunPlan, number: int) -> Identity:
    """Return the key of a machine, the same in each run of a plan."""
    seed = sha256(f"identity {plan.seed} {number}".encode())
    return Identity(Ed25519PrivateKey.from_private_bytes(seed), None)


@cache
def _keys(seed: int) -> RunKeys:
    """Return the keys of a seed's run; nothing here uses TLS."""
    tls_key, tls_certificate = _tls()
    return RunKeys(
        run_key=sha256(b"run key %d" % seed),
        tls_key=tls_key,
        tls_certificate=tls_certificate,
        token=sha256(b"token %d" % seed)[:16],
        session_secret=sha256(b"session %d" % seed),
    )


@cache
def _tls() -> tuple[bytes, bytes]:
    from atoll.coordinator.run.keys import _self_signed

    return _self_signed()
