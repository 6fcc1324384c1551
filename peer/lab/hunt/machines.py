"""One computer of a simulated run: its clock, disk and links, and the process that runs on it.

    Machine             starts a process, ends it in every way, and starts it again on what is left
    CoordinatorMachine  `atoll.coordinator.service.server.running`
    PeerMachine         `atoll.peer.daemon.peer.Peer`, with a training loop unless it is a keeper

Each start has a folder of its own, with what the last one left on the disk; so what is still
running of a process that was killed changes nothing any more.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from atoll.coordinator.copies.beside import copying
from atoll.coordinator.copies.sealing import RecoveryKey
from atoll.coordinator.copies.target import Superseded
from atoll.coordinator.invites import InviteDesk, issue
from atoll.coordinator.rpc.client_errors import Evicted
from atoll.coordinator.run.files import known_peers
from atoll.coordinator.run.invite import Invite
from atoll.coordinator.run.levels import Level
from atoll.coordinator.run.spec import RunSpec
from atoll.coordinator.service.server import Running, StartNode, running
from atoll.dht.identity import Identity
from atoll.dht.tasks import beside
from atoll.dht.testing.memory import MemoryTransport
from atoll.dht.transport import Check
from atoll.optim.log.replica import DISK_ERRORS
from atoll.optim.log.store_errors import StoreError
from atoll.peer.daemon.gossip_run import GossipRun
from atoll.peer.daemon.log_run import LogRun
from atoll.peer.daemon.options import PeerOptions
from atoll.peer.daemon.peer import Peer, StartRun
from atoll.peer.daemon.reach.bootstrap import BootstrapNode
from atoll.peer.errors import PeerEvicted
from atoll.peer.lab.hunt import disks
from atoll.peer.lab.hunt.copies import HuntTarget, expect_current, restore_newest
from atoll.peer.lab.hunt.disks import Disk, Files
from atoll.peer.lab.hunt.edges import MACHINE, START, living
from atoll.peer.lab.hunt.nodes import NodeTransport
from atoll.peer.lab.hunt.trainers import Training
from atoll.peer.paths import PeerPaths

T = TypeVar("T")
World = Any
"""A `world.World`, whose module imports this one."""

POLL_S = 0.5  # between two looks whether a keeper's process has failed
RENEWS_S = 120.0  # after which an owner whose peer cannot join asks for another invite
RESTART_S = 3.0  # after which a process that has ended is started again, as a service manager does


class Machine(ABC):
    """A machine of a world. `name` is for people, `address` for the network."""

    def __init__(self, world: World, name: str, identity: Identity) -> None:
        self.world = world
        self.name = name
        self.identity = identity
        self.clock_error_s = 0.0
        """its clock minus the true one"""
        self.clock_offset_s = 0.0
        """the run's clock minus its own, as its DHT node knows it"""
        self.chance = random.Random(f"{world.plan.seed} {name}")
        self.is_up = False
        self.is_wanted = False
        """whether its process is to be started again when it ends"""
        self.num_starts = 0
        self.uplink_bytes_s = 0.0
        self.disk = self._new_disk()
        self.tainted = False
        """whether its disk has ever shown other bytes than were written"""
        self._task: asyncio.Task[None] | None = None
        self.transports: list[MemoryTransport] = []
        """of its present process"""

    @property
    @abstractmethod
    def wire_name(self) -> str:
        """Its name in gRPC's network."""

    @abstractmethod
    def _main(self) -> Coroutine[Any, Any, None]:
        """Do what the process does, from its start to its end."""

    @abstractmethod
    def roots(self) -> Sequence[tuple[str, object]]:
        """Return the objects from which all that its process holds is found, with their names."""

    # Life

    def start(self) -> None:
        """Start the process on what is on the disk."""
        if self.is_up:
            return
        self.is_up = self.is_wanted = True
        self.num_starts += 1
        self.world.say(f"{self.name} starts")

        self._task = self.do(lambda: self.world.spawn(self._run()))

    def do(self, work: Callable[[], T]) -> T:
        """Do something on this machine, in its present process."""

        def on_machine() -> T:
            MACHINE.set(self)
            START.set(self.num_starts)
            return work()

        return copy_context().run(on_machine)

    def crash(self, *, lost_power: bool, files: Files | None = None) -> None:
        """End the process as SIGKILL does, or a loss of power."""
        if not self.is_up:
            return
        self.world.say(f"{self.name} {'loses power' if lost_power else 'is killed'}")
        left = self.disk.image(lost_power=lost_power) if files is None else files
        self.is_up = False
        for transport in self.transports:
            transport.network.kill(transport.peer_id)
        self.transports = []
        if self._task is not None:
            self._task.cancel()
        old, self.disk = self.disk, self._new_disk()
        disks.write(self.disk.folder, left)
        self.disk.write_back()
        self.world.retire(self._task, old)
        self._after_crash()

    @abstractmethod
    def _after_crash(self) -> None:
        """Note what has ended with the process."""

    def wipe(self) -> None:
        """Lose everything on the disk; the process is down."""
        shutil.rmtree(self.disk.folder, ignore_errors=True)
        self.disk = self._new_disk()

    def _new_disk(self) -> Disk:
        folder = self.world.folder / f"{self.name}-{self.num_starts}-{len(self.world.retired)}"
        folder.mkdir(parents=True, exist_ok=True)
        disk = Disk(folder, random.Random(f"{self.world.plan.seed} {folder.name}"), self.world.now)
        disk.on_crash = lambda: self._crash_in_the_middle(disk)
        return disk

    def _crash_in_the_middle(self, disk: Disk) -> None:
        """End the machine at an event of its disk: nothing of what follows reaches anybody."""
        if disk is self.disk:
            self.crash(lost_power=True, files=disk.image(lost_power=True))
            self.world.restart_later(self, RESTART_S)

    async def _run(self) -> None:
        disk = self.disk
        try:
            await self._main()
            why = "has ended"
        except (*DISK_ERRORS, StoreError) as error:
            why = f"ends: {error}"
            if isinstance(error, StoreError) and not isinstance(self, CoordinatorMachine):
                shutil.rmtree(disk.folder / "log", ignore_errors=True)  # as the message says
        except asyncio.CancelledError:
            return
        except (PeerEvicted, Evicted) as error:
            why = f"ends: {error}"
        except Superseded as error:
            why, self.is_wanted = f"ends: {error}", False  # its owner reads that two would go on
        except Exception as error:
            if disk is self.disk:
                self.world.unexpected(self, error)
            return
        if disk is self.disk:
            self.world.say(f"{self.name} {why}")
            self.crash(lost_power=False)
            if self.is_wanted:
                self.world.restart_later(self, RESTART_S)

    # Network

    def join_mesh(self, admission: bytes, check: Check) -> NodeTransport:
        """Return the transport of its DHT node."""
        self._expect_living()
        mesh = self.world.mesh
        transport = mesh.transport(
            self.identity.peer_id,
            admission=admission,
            check=self.world.audited(self, check),
            uplink_bytes_s=self.uplink_bytes_s,
        )
        self.transports.append(transport)
        return cast(NodeTransport, transport)

    def join_wire(self) -> MemoryTransport:
        """Return the transport of its gRPC."""
        self._expect_living()
        transport: MemoryTransport = self.world.wire.transport(self.wire_name)
        self.transports.append(transport)
        return transport

    def _expect_living(self) -> None:
        """Go no further in a process that was killed in this very moment, at a write of its own."""
        if living() is not self:
            raise asyncio.CancelledError

    def slow_down(self, uplink_bytes_s: float) -> None:
        """Limit its uplink; 0 is unlimited."""
        self.uplink_bytes_s = uplink_bytes_s
        for transport in self.transports:
            transport.uplink_bytes_s = uplink_bytes_s

    @property
    def own_wire(self) -> MemoryTransport:
        """The transport of its gRPC, made at its first use."""
        for transport in self.transports:
            if transport.network is self.world.wire:
                return transport
        return self.join_wire()


class CoordinatorMachine(Machine):
    """The coordinator's."""

    running: Running | None = None
    accepts_loss = False
    """whether the organiser has given up what a damaged disk has lost"""
    was_replaced = False
    """whether it began with a copy, which lacks what came after it"""
    names_nobody = False
    """whether that copy has no addresses of peers, so that none hears where it is now"""

    def __init__(
        self, world: World, number: int, identity: Identity, copies: HuntTarget | None
    ) -> None:
        """Make the first machine, or a later one that takes its place; it keeps `copies`."""
        self.copies = copies
        self.address = f"10.0.0.{number}:7700"
        super().__init__(world, f"coordinator{number}" if number > 1 else "coordinator", identity)

    @property
    def wire_name(self) -> str:
        return self.name

    def _after_crash(self) -> None:
        self.running = None

    def roots(self) -> Sequence[tuple[str, object]]:
        return [("running", self.running)]

    async def _main(self) -> None:
        world, spec = self.world, self.world.spec
        if self.copies is not None:
            expect_current(self.copies, self.disk.folder)
        admission_s = spec.coordinator.admission_hours * 3600
        start_node = cast(
            StartNode, lambda request: BootstrapNode.start(request, admission_s=admission_s)
        )
        async with running(
            spec,
            lambda module: world.genesis(),
            self.disk.folder,
            start_node=start_node,
            accept_loss=self.accepts_loss,
        ) as up:
            self.running = up
            head = up.coordinator.log.head()
            if not self.tainted:
                world.audit.reopened(self, head.epoch, head.position)
            world.invite = self._told(up.invite)
            if not self._knows_keepers():
                _, world.keeper_token = issue(self.disk.folder, kind="keeper")
            async with copying(up, self.copies) as copies:
                await (asyncio.Event().wait() if copies is None else copies.run())

    def _knows_keepers(self) -> bool:
        """Return whether the invite for keepers is known: a copy may be older."""
        if self is not self.world.coordinator:
            return True
        return InviteDesk(self.disk.folder, b"").kind_of(self.world.keeper_token) == "keeper"

    def _told(self, invite: Invite) -> Invite:
        """Return the invite that newcomers get: of the coordinator that was restored last."""
        current = self.world.invite
        return invite if current is None or self is self.world.coordinator else current

    def replace(self) -> None:
        """Lose the machine, and begin with the newest copy on another, which is not started."""
        key = RecoveryKey.of(self.disk.folder)  # the organiser has kept it
        self.crash(lost_power=False)
        self.wipe()
        self.restore(key, is_damaged=self.tainted)

    def restore(self, key: RecoveryKey, *, is_damaged: bool) -> None:
        """Fill an empty disk with the newest copy; see `copies.restore_newest`."""
        assert self.copies is not None
        restore_newest(self.copies, key, self.disk.folder, is_damaged=is_damaged)
        self.disk.write_back()
        self.tainted, self.was_replaced = is_damaged, True
        self.names_nobody = not known_peers(self.disk.folder)


@dataclass(frozen=True, kw_only=True)
class Habits:
    """What a peer's owner decides."""

    is_keeper: bool = False
    step_s: float = 1.0


class PeerMachine(Machine):
    """A trainer's or a keeper's."""

    def __init__(self, world: World, number: int, habits: Habits, identity: Identity) -> None:
        self.habits = habits
        self.number = number
        self.peer: Peer | None = None
        self.training: Training | None = None
        self._given: Invite | None = None
        """the invite with which it began; a later one may have other addresses"""
        self._waits_since_s = 0.0
        """when it last began to join with an invite"""
        self.ended_at = -1
        """the position at which its trainer last ended, which its disk holds"""
        super().__init__(world, f"{'keeper' if habits.is_keeper else 'peer'}{number}", identity)

    @property
    def wire_name(self) -> str:
        return self.identity.peer_id

    def _after_crash(self) -> None:
        self.peer = self.training = None

    def roots(self) -> Sequence[tuple[str, object]]:
        worker = self.training.worker if self.training is not None else None
        return [("peer", self.peer), ("worker", worker)]

    async def _main(self) -> None:
        options = PeerOptions(
            invite=await self._invite(),
            state_dir=self.disk.folder,
            name=self.name,
            listen=(),
            announce=("/ip4/10.0.0.1/tcp/1",),
        )
        async with Peer.open(
            options,
            _kind_of,
            admit=_admit,
            on_event=self._on_event,
            on_phase=lambda phase, position, left=None: None,
        ) as peer:
            self.peer = peer
            async with beside(_watch(peer)):
                if self.habits.is_keeper:
                    await asyncio.Event().wait()
                seed = self.number * 1000 + self.num_starts
                self.training = Training(peer, self.habits.step_s, seed)
                await self.training.run()
                self.ended_at = peer.position

    def wipe(self) -> None:
        """Lose everything on the disk; the process is down."""
        super().wipe()
        self.ended_at = -1
        self._given = None

    async def _invite(self) -> Invite:
        while (newest := self.world.invite) is None:
            await asyncio.sleep(1.0)
        if self.habits.is_keeper:
            newest = replace(newest, token=self.world.keeper_token)
        self._given = given = self._given or newest
        self._waits_since_s = self.world.now()
        return given

    def renew_invite(self) -> None:
        """Get the newest invite, if the one in use has led nowhere: it names old addresses alone.

        A peer that has joined once knows other peers, which know where the coordinator is, unless
        that began with a copy that names none of them.
        """
        given, world = self._given, self.world
        if not self.is_up or given is None or world.invite is None:
            return
        if world.now() < self._waits_since_s + RENEWS_S:
            return
        has_joined = self.peer is not None or PeerPaths(root=self.disk.folder).run.exists()
        is_lost = world.coordinator.names_nobody or not has_joined
        is_old = is_lost and replace(given, token=world.invite.token) != world.invite
        if is_old or (self.habits.is_keeper and given.token != world.keeper_token):
            self.world.say(f"{self.name} gets another invite")
            self.crash(lost_power=False)
            self._given = None
            self.world.restart_later(self, RESTART_S)

    def _on_event(self, level: Level, text: str) -> None:
        if living() is self:
            self.world.heard(self, level, text)


async def _watch(peer: Peer) -> None:
    while True:
        peer.run.expect_working()
        await asyncio.sleep(POLL_S)


async def _admit(membership: object, fetch: object) -> None:
    """The owner agrees."""


def _kind_of(spec: RunSpec) -> StartRun:
    return GossipRun.start if spec.method().reduction == "pairs" else LogRun.start
