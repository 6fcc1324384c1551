"""Looks at simulated processes from outside: at stored logs, tasks, and what memory holds.

check_logs      once, at the end: what machines have stored is what was decided
check_tasks     likewise: no task is left over
check_memory    ever more rarely: each container of each process is within its bound

A bound of memory follows from the peers and units of a run, not from how long it has lasted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from atoll.coordinator.rounds import AHEAD, KEPT_OPEN
from atoll.coordinator.run.status import EVENTS, HISTORY
from atoll.dht.testing.memory import MemoryNetwork, MemoryStream, MemoryTransport
from atoll.optim.log.entry import Entry
from atoll.optim.log.live_replica import LiveReplica
from atoll.optim.methods.windows import MOST_NEWEST
from atoll.peer.daemon.reporting import KEPT_KEYS, MAX_KEPT
from atoll.peer.gossip.invitations import KEPT_IDS as INVITED_IDS
from atoll.peer.gossip.peer import KEPT_IDS as COMMITTED_IDS
from atoll.peer.lab.hunt.audits import Audit, WorkAudit
from atoll.peer.lab.hunt.disks import Disk
from atoll.peer.lab.hunt.holdings import ProcessHoldings, held_by
from atoll.peer.lab.hunt.machines import Machine
from atoll.peer.lab.hunt.nodes import MemoryDht
from atoll.peer.lab.hunt.trainers import LoopTurns, Training

World = Any
"""A `world.World`, whose module imports this one."""

MOST_TASKS = 120  # of a machine, a second after everything has healed and gone on
MEMORY_RULE = "memory is bounded"
ITEMS, ITEMS_A_PEER = 64, 16  # of a container that keeps something of each peer, or of each unit
MOST_ITEMS = {
    "EventLog._events": EVENTS,
    "Invitee._invited": INVITED_IDS,
    "Outbox.events": MAX_KEPT,
    "Outbox.evidence": MAX_KEPT,
    "Outbox.traces": MAX_KEPT,
    "Outcomes._committed": COMMITTED_IDS,
    "Repeats._said": KEPT_KEYS,
    "ReportedRounds._newest": HISTORY,
    "RoundHistory._newest": HISTORY,
    "RoundHistory._open": KEPT_OPEN + AHEAD,
    # samples of the link, ten a second while a reduction lasts, whose deadline is minutes away
    "Link._stretches[]": 6000,
    "LossMean.newest": MOST_NEWEST,
}
"""The bounds of attributes that keep the newest of something."""
LOCALS = 4096  # items of what a suspended function holds, which goes when it returns
OWN_BYTES, VECTORS_A_PEER = 1 << 20, 16

SIMULATION = (Machine, MemoryNetwork, MemoryDht, Audit, WorkAudit, Disk, LoopTurns, Training)
"""Classes whose objects are no part of a process."""


def check_logs(world: World) -> None:
    """Compare what each machine has stored with what was decided, and repeat the whole log."""
    for machine in world.machines():
        replica = world.replica(machine)
        if replica is None or machine.tainted:
            continue
        for record in replica.store.headers(0, 1 << 30):
            world.audit.decided(machine, Entry.decode(record.entry))
        world.audit.orders.held(machine.name, replica.settings, replica.head.chain)
    kept = world.replica(world.coordinator)
    if kept is not None and not world.coordinator.tainted:
        _repeat(world, kept)


def _repeat(world: World, kept: LiveReplica) -> None:
    """Apply the coordinator's log once more, from the first state, and look for each order."""
    records = kept.store.headers(0, 1 << 30)
    entries = [Entry.decode(record.entry) for record in records]
    lost = world.organiser.lost({entry.order for entry in entries} - {b""})
    if lost and not world.is_over():
        world.audit.fail("what is acknowledged stays", f"orders {lost} are in no log")
    if not all(record.has_body for record in records):
        return  # the coordinator was away until peers had dropped some
    state = world.genesis()
    for entry in entries[: kept.state.position]:  # the store may be one ahead of the state
        body = memoryview(kept.store.body(entry.position))
        state = kept.core.replay.next_state(state, entry, body)
    if state.root() != kept.state.root():
        world.audit.fail("a replay gives the same bits", f"at {kept.position}")


def check_tasks(world: World) -> None:
    """Hold tasks within their bound."""
    most = MOST_TASKS * len(world.machines())
    retired = sum(task is not None and not task.done() for task, _ in world.retired)
    now = len(asyncio.all_tasks()) - retired
    if now > most:
        world.audit.fail("tasks are bounded", f"expected at most {most}, got {now}")


def check_memory(world: World) -> None:
    """Hold each container of each process, its bytes and its tasks within their bounds."""
    for machine in world.machines():
        if machine.is_up:
            for what, most, now in _beyond(world, holdings_of(machine)):
                text = f"{machine.name}: expected at most {most} {what}, got {now}"
                world.audit.fail(MEMORY_RULE, text)


def _beyond(world: World, found: ProcessHoldings) -> Iterator[tuple[str, int, int]]:
    """Yield what is held beyond its bound, the bound, and how much it is."""
    for label, items in found.largest.items():
        most = most_items(label, world)
        if items > most:
            yield f"items in {label}", most, items
    if found.num_bytes > most_bytes(world):
        yield "bytes of vectors and messages", most_bytes(world), found.num_bytes
    if found.num_tasks > MOST_TASKS:
        yield "tasks", MOST_TASKS, found.num_tasks


def most_items(label: str, world: World) -> int:
    """Return how many items the containers of an attribute may hold in a run."""
    if "()" in label:
        return LOCALS
    usual: int = ITEMS + ITEMS_A_PEER * len(world.machines()) + world.plan.units
    return MOST_ITEMS.get(label, usual)


def most_bytes(world: World) -> int:
    """Return how many bytes a process may hold in a run."""
    vector_bytes: int = 4 * world.layout.numel
    return OWN_BYTES + VECTORS_A_PEER * vector_bytes * len(world.machines())


def holdings_of(machine: Machine) -> ProcessHoldings:
    """Return what a machine's process holds."""
    own = machine.transports

    def is_foreign(value: object) -> bool:
        if isinstance(value, MemoryStream):
            return value._transport not in own
        if isinstance(value, MemoryTransport):
            return value not in own
        return isinstance(value, SIMULATION) or type(value) is type(machine.world)

    roots: Sequence[tuple[str, Any]] = [*machine.roots(), ("transport", own)]
    return held_by(roots, is_foreign)
