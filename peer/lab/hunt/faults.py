"""Lets faults happen in a simulated run, with a method for each kind of `plans.FaultKind`."""

from __future__ import annotations

import random
import sqlite3
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from atoll.coordinator import invites
from atoll.dht.testing.memory import MemoryLink
from atoll.optim.log.orders import EvictPeer, ReadmitPeer, ResumeRun
from atoll.peer.lab.hunt.copies import has_copy
from atoll.peer.lab.hunt.edges import BEGAN_S
from atoll.peer.lab.hunt.machines import Machine, PeerMachine
from atoll.peer.lab.hunt.organiser import drawn_change, orders_of
from atoll.peer.lab.hunt.plans import PlannedFault

World = Any
"""A `world.World`, whose module imports this one."""

MOST_PEERS = 6
MOST_FORMER = 2  # coordinators that run on beside the one that was restored last
LOSE_PARTNER = 0.6  # of faults at commits; the others end the process that has committed
UNREACHED = 0.7  # of them, that peers reach no more; the others have lost their copies alone
MOST_TAKEN = 6  # objects of a copy before the target fails; one has about as many
FORGOTTEN = 0.3  # of pauses and stops: the organiser thinks of them when everything has healed


class Faults:
    """The faults of a world. Those that last are undone at their time, by `World.later`."""

    def __init__(self, world: World) -> None:
        """Strike a world."""
        self.counts: Counter[str] = Counter()
        """The number of faults that happened, by kind."""
        self._world = world
        self._ousted: list[str] = []
        self._at_commits: list[PlannedFault] = []
        """Faults that wait for the next exchange that is committed."""

    def happen(self, fault: PlannedFault) -> None:
        """Let a fault happen."""
        self.counts[fault.kind] += 1
        self._world.say(f"--- {fault.kind} {fault.who} {fault.other} for {fault.lasts_s:g} s")
        getattr(self, f"_{fault.kind}")(fault)

    # Machines

    def _some(self, fault: PlannedFault) -> Machine:
        machines: list[Machine] = self._world.machines()
        return machines[fault.who % len(machines)]

    def _trainer(self, fault: PlannedFault) -> PeerMachine:
        peers: list[PeerMachine] = self._world.peers
        trainers = [peer for peer in peers if not peer.habits.is_keeper]
        return trainers[fault.who % len(trainers)]

    def _pair(self, fault: PlannedFault) -> tuple[Machine, Machine]:
        machines = self._world.machines()
        first = fault.who % len(machines)
        return machines[first], machines[
            (first + 1 + fault.other % (len(machines) - 1)) % len(machines)
        ]

    def _kill(self, fault: PlannedFault) -> None:
        self._down(self._some(fault), fault, lost_power=False)

    def _power(self, fault: PlannedFault) -> None:
        self._down(self._some(fault), fault, lost_power=True)

    def _down(self, machine: Machine, fault: PlannedFault, *, lost_power: bool) -> None:
        machine.crash(lost_power=lost_power)
        self._world.restart_later(machine, fault.lasts_s)

    def _crash(self, fault: PlannedFault) -> None:
        machine = self._some(fault)
        if machine.is_up:
            machine.disk.crash_in = 1 + int(40 * fault.amount)

    def _wipe(self, fault: PlannedFault) -> None:
        machine = self._trainer(fault)
        machine.crash(lost_power=False)
        machine.wipe()
        self._world.restart_later(machine, fault.lasts_s)

    def _freeze(self, fault: PlannedFault) -> None:
        machine = self._some(fault)
        for network, name in self._world.names(machine):
            network.freeze(name)
        self._world.later(fault.lasts_s, lambda: self._world.thaw(machine))

    def _cut(self, fault: PlannedFault) -> None:
        self._cut_off([self._pair(fault)], fault.lasts_s)

    def _part(self, fault: PlannedFault) -> None:
        machines = self._world.machines()
        random.Random(fault.other).shuffle(machines)
        at = 1 + fault.who % (len(machines) - 1)
        pairs = [(a, b) for a in machines[:at] for b in machines[at:]]
        self._cut_off(pairs, fault.lasts_s)

    def _cut_off(self, pairs: list[tuple[Machine, Machine]], lasts_s: float) -> None:
        for a, b in pairs:
            self._world.mesh.cut(a.identity.peer_id, b.identity.peer_id)
            self._world.wire.cut(a.wire_name, b.wire_name)

        def heal() -> None:
            for a, b in pairs:
                self._world.mesh.heal(a.identity.peer_id, b.identity.peer_id)
                self._world.wire.heal(a.wire_name, b.wire_name)

        self._world.later(lasts_s, heal)

    def _reset(self, fault: PlannedFault) -> None:
        a, b = self._pair(fault)
        self._world.mesh.reset(a.identity.peer_id, b.identity.peer_id)
        self._world.wire.reset(a.wire_name, b.wire_name)

    def _slow(self, fault: PlannedFault) -> None:
        machine = self._some(fault)
        machine.slow_down(2e3 * 100**fault.amount)
        self._world.later(fault.lasts_s, lambda: machine.slow_down(0.0))

    def _loss(self, fault: PlannedFault) -> None:
        a, b = self._pair(fault)
        link = MemoryLink(latency_s=self._world.plan.latency_s, drop=0.1 * fault.amount)
        ends = a.identity.peer_id, b.identity.peer_id
        self._world.mesh.set_link(*ends, link)
        usual = MemoryLink(latency_s=self._world.plan.latency_s, jitter_s=self._world.plan.jitter_s)
        self._world.later(fault.lasts_s, lambda: self._world.mesh.set_link(*ends, usual))

    def _full(self, fault: PlannedFault) -> None:
        machine = self._some(fault)
        disk = machine.disk
        disk.is_full = True

        def make_room() -> None:
            disk.is_full = False

        self._world.later(fault.lasts_s, make_room)

    def _rot(self, fault: PlannedFault) -> None:
        machine = self._some(fault)
        folder = machine.disk.folder / "log"
        if machine.is_up and (folder / "log.sqlite").exists():
            machine.tainted = True
            if fault.who // len(self._world.machines()) % 3:
                _rot_body(folder / "log.sqlite", fault)
            else:
                _rot_snapshot(folder, fault)

    def _clock(self, fault: PlannedFault) -> None:
        machine, jump_s = self._some(fault), (fault.amount - 0.5) * 240
        machine.clock_error_s += jump_s
        self._world.clock_errors_s += abs(jump_s)

    def _away(self, fault: PlannedFault) -> None:
        self._down(self._world.coordinator, fault, lost_power=fault.amount < 0.5)

    def _lone(self, fault: PlannedFault) -> None:
        kept = self._trainer(fault)
        for peer in self._world.peers:
            if peer is not kept and not peer.habits.is_keeper:
                self._down(peer, fault, lost_power=fault.amount < 0.3)

    def _leave(self, fault: PlannedFault) -> None:
        machine = self._trainer(fault)
        if machine.training is not None:
            machine.training.stop()

    def _join(self, fault: PlannedFault) -> None:
        if len(self._world.peers) < MOST_PEERS:
            self._world.add_peer().start()

    def _evict(self, fault: PlannedFault) -> None:
        trainers = [peer for peer in self._world.peers if not peer.habits.is_keeper]
        machine = self._trainer(fault)
        if self._world.coordinator.is_up and len(trainers) - len(self._world.gone) > 2:
            coordinator, peer_id = self._world.coordinator, machine.identity.peer_id
            folder, at_s = coordinator.disk.folder, BEGAN_S + self._world.now()

            def evict() -> None:
                invites.evict(folder, peer_id, at_s=at_s, reason="hunt")

            with suppress(OSError):
                coordinator.do(evict)
                self._world.gone.add(peer_id)

    # Commits

    def _commit(self, fault: PlannedFault) -> None:
        self._at_commits.append(fault)

    def forget_commits(self) -> None:
        """Let no more commits be struck."""
        self._at_commits.clear()

    def committed(self, machine: Machine, partner: str) -> None:
        """Strike a peer that has committed an exchange, before it can tell its partner."""
        if not self._at_commits:
            return
        fault, world = self._at_commits.pop(0), self._world
        world.say(f"--- {machine.name} has committed an exchange with {partner[-6:]}")
        if fault.amount >= LOSE_PARTNER:
            self._down(machine, fault, lost_power=fault.amount > (1 + LOSE_PARTNER) / 2)
            return
        other = next(each for each in world.peers if each.identity.peer_id == partner)
        world.mesh.reset(machine.identity.peer_id, partner)
        if fault.amount < LOSE_PARTNER / 2:
            self._cut_off([(machine, other)], fault.lasts_s)

    # Copies

    def _lost(self, fault: PlannedFault) -> None:
        coordinator = self._world.coordinator
        if coordinator.copies is None or not has_copy(coordinator.copies):
            return
        self._forget_undecided()
        self._world.audit.restored(coordinator)
        self._copy_again()  # who restores has a way to the copies
        coordinator.replace()
        self._world.restart_later(coordinator, fault.lasts_s)

    def _twin(self, fault: PlannedFault) -> None:
        """Restore the coordinator elsewhere, while it runs on: it is out of reach, or seemed so."""
        world, copies = self._world, self._world.coordinator.copies
        if len(world.former) == MOST_FORMER or not world.coordinator.is_up:
            return
        if copies is None or not has_copy(copies):
            return
        self._forget_undecided()
        self._copy_again()
        former = world.restore_elsewhere()
        copies.is_cut = True
        if fault.amount < UNREACHED:
            others = [machine for machine in world.machines() if machine is not former]
            self._cut_off([(former, other) for other in others], fault.lasts_s)

        def rejoin() -> None:
            copies.is_cut = False

        world.later(fault.lasts_s, rejoin)

    def _forget_undecided(self) -> None:
        """Let the organiser give up the orders that no peer holds."""
        replicas = [self._world.replica(peer) for peer in self._world.peers]
        self._world.organiser.forget(orders_of([each for each in replicas if each is not None]))

    def _uncopied(self, fault: PlannedFault) -> None:
        copies = self._world.coordinator.copies
        if copies is not None:
            copies.takes = fault.other % MOST_TAKEN
            self._world.later(fault.lasts_s, self._copy_again)

    def _copy_again(self) -> None:
        if self._world.coordinator.copies is not None:
            self._world.coordinator.copies.takes = None

    # Orders

    def _pause(self, fault: PlannedFault) -> None:
        self._order(fault)
        if fault.amount > FORGOTTEN:
            self._world.later(fault.lasts_s, lambda: self._world.organiser.want(ResumeRun()))

    def _stop(self, fault: PlannedFault) -> None:
        self._pause(fault)

    def _oust(self, fault: PlannedFault) -> None:
        peer_id = self._peer(fault).identity.peer_id
        self._world.organiser.want(EvictPeer(peer_id=peer_id, reason="hunt"))
        self._ousted.append(peer_id)
        if fault.amount > FORGOTTEN:
            self._world.later(fault.lasts_s, self._readmit)

    def _readmit(self) -> None:
        """Readmit the peer that was evicted first."""
        if self._ousted:
            self._world.organiser.want(ReadmitPeer(peer_id=self._ousted.pop(0)))

    def _set(self, fault: PlannedFault) -> None:
        self._order(fault)

    def _order(self, fault: PlannedFault) -> None:
        position = max([0, *self._world.positions()])
        self._world.organiser.want(drawn_change(fault, position))

    def _forge(self, fault: PlannedFault) -> None:
        self._world.organiser.forge(drawn_change(fault, 0), self._peer(fault))

    def _repeat(self, fault: PlannedFault) -> None:
        self._world.organiser.repeat(self._peer(fault), random.Random(fault.other))

    def _rival(self, fault: PlannedFault) -> None:
        self._world.organiser.rival(drawn_change(fault, 0), self._peer(fault))

    def _peer(self, fault: PlannedFault) -> PeerMachine:
        peers: list[PeerMachine] = self._world.peers
        return peers[fault.who % len(peers)]


def _rot_snapshot(folder: Path, fault: PlannedFault) -> None:
    """Change a byte of a stored snapshot; what has opened the file reads it too."""
    paths = sorted(folder.glob("snapshot-*.bin"))
    if paths:
        path = paths[fault.other % len(paths)]
        data = bytearray(path.read_bytes())
        data[int(fault.amount * len(data))] ^= 0x5A
        with path.open("r+b") as file:
            file.write(data)


def _rot_body(log: Path, fault: PlannedFault) -> None:
    """Change a byte of a stored update, by another connection to the database."""
    db = sqlite3.Connection(str(log), timeout=1.0)
    try:
        rows = db.execute("SELECT position, part, data FROM bodies ORDER BY 1, 2").fetchall()
        if rows:
            position, part, data = rows[fault.other % len(rows)]
            at = int(fault.amount * len(data))
            data = data[:at] + bytes([data[at] ^ 0x5A]) + data[at + 1 :]
            db.execute(
                "UPDATE bodies SET data = ? WHERE position = ? AND part = ?", (data, position, part)
            )
            db.commit()
    finally:
        db.close()
