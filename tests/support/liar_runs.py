"""A run with a liar at random, and what has to hold in it whatever the liar does."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from atoll.dht.tasks import end
from atoll.optim.log.entry import Trust
from support.liars import Liar
from support.swarm import SETTINGS, SMALL, Swarm, SwarmPeer, run_swarm

HONEST = 3
TURNS = 6  # positions with a liar: it leads one of them or more
WINDOW_S = 5.0
PATIENCE_S = 4 * SETTINGS.grace_s + 14 * SETTINGS.stall_s
"""of a member with one leader, the same as in `test_p3_silent_leader.py`"""
BOUND_S = 2 * PATIENCE_S + 2 * WINDOW_S
"""for a position: the liar's term, the one after it, and a window before each"""
MAX_TASKS = 2000  # of all peers together; an undisturbed run has 50 to 100


@dataclass(kw_only=True)
class LiarRun:
    """What one seed did."""

    seed: int
    trust: Trust
    lies: int = 0
    seconds: float = 0.0
    """of the virtual clock"""
    positions: int = 0
    longest_s: float = 0.0
    """between two decided positions"""
    most_tasks: int = 0
    out_after_s: float | None = None
    """until every honest peer barred the liar for good; None: not all did"""
    faults: list[str] = field(default_factory=list)
    """properties that did not hold"""


def run_liar(folder: Path, seed: int, trust: Trust) -> LiarRun:
    """Run a swarm of four peers, or four keepers, of which the last lies."""
    told = LiarRun(seed=seed, trust=trust)

    async def scenario(swarm: Swarm) -> None:
        await _lie(swarm, told)

    electors = "keepers" if trust == "byzantine" else "members"
    try:
        run_swarm(folder, scenario, layout=SMALL, codec="int8", trust=trust, electors=electors)
    except Exception as error:
        told.faults.append(f"{type(error).__name__}: {error}")
    return told


async def _lie(swarm: Swarm, told: LiarRun) -> None:
    if told.trust == "byzantine":
        voters = [swarm.add(role="keeper") for _ in range(HONEST + 1)]
        peers = [*voters, *(swarm.add(window_s=WINDOW_S) for _ in range(2))]
    else:
        voters = peers = [swarm.add(window_s=WINDOW_S) for _ in range(HONEST + 1)]
    honest = [peer for peer in peers if peer is not voters[-1]]
    liar = Liar(voters[-1], honest, told.seed)
    _watch_conduct(honest, told)
    await swarm.begin(peers)
    await swarm.until(lambda: _least(honest) >= 2)
    began_s, began_at = swarm.now(), _least(honest)
    tasks = liar.begin()
    at, since_s = began_at, began_s
    name = liar.peer.identity.peer_id
    while at < began_at + TURNS and swarm.now() - since_s <= BOUND_S:
        await asyncio.sleep(0.25)
        now_s = swarm.now()
        told.most_tasks = max(told.most_tasks, len(asyncio.all_tasks()))
        if told.out_after_s is None and all(p.ctx.conduct.is_out(name) for p in honest):
            told.out_after_s = now_s - began_s
        told.longest_s = max(told.longest_s, now_s - since_s)
        if _least(honest) > at:
            at, since_s = _least(honest), now_s
    await end(*tasks, expected=(Exception,))
    for task in tasks:
        if not task.cancelled():
            told.faults.append(f"the liar failed: {task.exception()!r}")
    told.lies, told.seconds, told.positions = liar.lies, swarm.now() - began_s, at - began_at
    _judge(honest, told)


def _least(peers: list[SwarmPeer]) -> int:
    return min(peer.replica.position if peer.replica.ready else 0 for peer in peers)


def _watch_conduct(honest: list[SwarmPeer], told: LiarRun) -> None:
    """Note the faults that honest peers find in each other."""
    names = {peer.identity.peer_id for peer in honest}
    for peer in honest:
        conduct = peer.ctx.conduct
        fault, bar = conduct.fault, conduct.bar_for_good

        def noting(other, why, now, *, fault=fault):
            barred = fault(other, why, now)
            if barred is not None and other in names:
                told.faults.append(f"an honest peer was barred by another one: {why}")
            return barred

        def barring(other, why, *, bar=bar):
            bar(other, why)
            if other in names:
                told.faults.append(f"an honest peer was barred for good by another one: {why}")

        conduct.fault, conduct.bar_for_good = noting, barring


def _judge(honest: list[SwarmPeer], told: LiarRun) -> None:
    if told.positions < TURNS:
        told.faults.append(f"no position within {BOUND_S:.0f} s, after {told.positions}")
    for position in range(_least(honest)):
        kept = [peer.replica.store.get(position) for peer in honest]
        if len({one.entry for one in kept if one is not None}) > 1:
            told.faults.append(f"position {position} has several entries")
            break
    if told.most_tasks > MAX_TASKS:
        told.faults.append(f"{told.most_tasks} tasks at once")
    for peer in honest:
        for task in peer.tasks:
            if task.done():
                told.faults.append(f"a task of an honest peer ended: {task}")
