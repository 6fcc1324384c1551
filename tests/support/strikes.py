"""One fault at one message of a round, and what must hold after it, whichever message it was."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from atoll.optim.log.entry import Entry
from atoll.optim.state.layout import CELL, Layout
from support.swarm import SMALL, Swarm, SwarmPeer, run_swarm

COMMIT_S = {"kill": 1.0, "freeze": 3.0, "cut": 3.0}  # at a round trip of 50 ms
KINDS = [("kill", 0), ("kill", 1), ("freeze", 0), ("freeze", 1), ("cut", 0)]
"""at a message: its sender or its receiver is killed or frozen, or the two are cut off"""
OUTAGE_S = 12.0  # how long a freeze or a cut lasts: two or three rounds


@dataclass
class Strike:
    """Kill, freeze or cut at the n-th message from the start of a round."""

    swarm: Swarm
    kind: str
    """kill, freeze: of the message's sender (``end`` 0) or receiver (1); cut: between the two"""
    message: int
    end: int = 0
    at_s: float | None = None
    position: int = 0
    victims: list[SwarmPeer] = field(default_factory=list)

    def arm(self) -> None:
        """Count messages from here."""
        self.position = max(p.replica.position for p in self.swarm.peers)
        self.before, self.first = self.swarm.network.on_message, self.swarm.network.num_messages
        self.swarm.network.on_message = self.on_message

    def disarm(self) -> None:
        """Nothing is struck any more: who stops frozen would wait for ever."""
        self.swarm.network.on_message = self.before

    def on_message(self, src: str, dst: str, method: str, n: int) -> None:
        if self.before is not None:
            self.before(src, dst, method, n)
        if n < self.first + self.message or self.at_s is not None:
            return
        self.at_s = self.swarm.now()
        pair = [p for name in (src, dst) for p in self.swarm.peers if p.identity.peer_id == name]
        if self.kind == "cut":
            self.swarm.network.cut(src, dst)
            self.victims = pair
        else:
            self.victims = [pair[self.end]]
            self._strike(self.victims[0])

    def _strike(self, victim: SwarmPeer) -> None:
        if self.kind == "kill":
            victim.kill()
        else:
            self.swarm.network.freeze(victim.identity.peer_id)

    def undo(self) -> None:
        """The frozen go on, the cut is healed; the dead stay dead."""
        for victim in self.victims:
            self.swarm.network.thaw(victim.identity.peer_id)
        self.swarm.network.heal()

    @property
    def killed(self) -> list[SwarmPeer]:
        return self.victims if self.kind == "kill" else []


Expect = Callable[[Swarm, SwarmPeer], None]
"""What must hold of everything in a peer's log."""


async def check_strike(swarm: Swarm, strike: Strike, expect: Expect) -> float | None:
    """Run on after a strike; seconds until the position was decided, None if nothing was struck.

    Raises:
        AssertionError: something does not hold.
    """
    strike.arm()
    await swarm.until(lambda: strike.at_s is not None or passed(swarm.peers, strike.position))
    if strike.at_s is None:
        strike.disarm()
        return None
    took_s = await decided_after(swarm, strike)
    limit_s = COMMIT_S[strike.kind]
    assert took_s <= limit_s + 1e-9, f"decided {took_s:.2f} s after it, expected {limit_s} s"
    await asyncio.sleep(OUTAGE_S)
    strike.undo()
    alive = [p for p in swarm.peers if p not in strike.killed]
    most = max(p.replica.position for p in alive)
    await swarm.until(lambda: passed(alive, most + 2))
    await swarm.until(lambda: settled_down(alive))
    assert swarm.same_bits(alive)
    assert swarm.network.errors == [], swarm.network.errors
    for peer in alive:
        assert peer.resets == 0
        expect_no_work_lost(peer)
    expect(swarm, alive[0])
    return took_s


async def decided_after(swarm: Swarm, strike: Strike) -> float:
    """Seconds until a majority of those who were not struck hold the position's entry."""
    others = [p for p in swarm.peers if p not in strike.victims]
    if strike.kind == "cut":
        await swarm.until(lambda: most_passed(swarm.peers, strike.position))
    else:
        await swarm.until(lambda: passed(others, strike.position))
    return swarm.now() - (strike.at_s or 0.0)


def passed(peers: list[SwarmPeer], position: int) -> bool:
    return all(p.replica.position > position for p in peers)


async def donor_and_reader(swarm: Swarm) -> tuple[SwarmPeer, SwarmPeer]:
    """Run three peers for some rounds; return one whose log is on disk, and another."""
    peers = await swarm.start(3, window_s=1.0)
    await swarm.until(lambda: passed(peers, 4))
    donor, reader, _ = peers
    await donor.replica.saved()
    return donor, reader


def most_passed(peers: list[SwarmPeer], position: int) -> bool:
    return 2 * sum(p.replica.position > position for p in peers) > len(peers)


def settled_down(peers: list[SwarmPeer]) -> bool:
    """Everyone trains, at the same position."""
    phases = {p.rounds.statistics().phase for p in peers}
    return phases <= {"train", "idle"} and len({p.replica.position for p in peers}) == 1


def expect_no_work_lost(peer: SwarmPeer) -> None:
    """All that it ever learned is in the log, once, or still in its drift."""
    assert torch.allclose(peer.work_N, peer.counted_N + peer.drift_N, atol=1e-5)


def expect_sums(swarm: Swarm, witness: SwarmPeer) -> None:
    """What was applied is the weighted mean of what the log says is in it, cell by cell."""
    store = witness.replica.store
    for record in store.headers(0, witness.replica.position):
        entry = Entry.decode(record.entry)
        if entry.kind != "update":
            continue
        expect_mean(swarm, entry, swarm.replay.decode(entry, store.body(entry.position)))


def expect_mean(swarm: Swarm, entry: Entry, update_N: torch.Tensor) -> None:
    fragment = swarm.replay.fragments[entry.fragment]
    nothing_F = torch.zeros(fragment.numel)
    offers = {
        p.ctx.me: p.offers.get(entry.position, p.latest.get(entry.fragment, nothing_F))
        for p in swarm.peers
    }
    for index, cell in enumerate(fragment.slices):
        sum_N, weight = torch.zeros(cell.stop - cell.start), 0.0
        for member in entry.members:
            included = entry.included_cells(member.peer_id, member.incarnation)
            if member.weight and included is not None and included[index]:
                sum_N += offers[member.elector][cell] * (member.weight * member.clip)
                weight += member.weight
        mean_N = sum_N / weight if weight else sum_N
        assert torch.allclose(update_N[cell], mean_N, atol=1e-6), f"position {entry.position}"


def run_strike(
    folder: Path,
    peers: int,
    make: Callable[[Swarm], Strike],
    *,
    expect: Expect = expect_sums,
    **options: Any,
) -> float | None:
    """A fresh swarm, a strike in its second round; ``options`` of the swarm."""

    async def scenario(swarm: Swarm) -> float | None:
        await swarm.start(peers)
        return await check_strike(swarm, make(swarm), expect)

    took_s = run_swarm(folder, scenario, **({"layout": SMALL} | options))
    shutil.rmtree(folder)  # some 80 MB: sweeps would fill a disk
    return took_s


# with several positions in flight

FLIGHTS = 3
FLYING = Layout(
    names=tuple(f"blocks.{i}.w" for i in range(FLIGHTS)), shapes=((2 * CELL + 1_000,),) * FLIGHTS
)
"""one fragment a position in flight"""
STEP_S = 0.12  # shorter than a reduction at a round trip of 50 ms, so that some are always early
# A cut lasts on: one that hits the commit of a position hits the next one too, from its beginning.
STRUCK_S = COMMIT_S | {"cut": 6.0}
NEXT_S = STRUCK_S | {"freeze": 4.0, "cut": 8.5}
"""The frozen may lead this one too, and is asked once more; the cut off wait for each other in this
one from its beginning, and hear of its end from the third. A leader that is cut off from an elector
drops it, and gets no vote of those that reach it: the next leader decides."""
SHORT_OUTAGE_S = 4.0
QUIET_S = 30.0  # enough for all that is under way to be decided, and for who is behind to catch up


async def check_strike_in_flight(swarm: Swarm, strike: Strike) -> float:
    """As ``check_strike``; seconds until the two positions in flight at the strike were decided."""
    await swarm.until(lambda: passed(swarm.peers, FLIGHTS))
    strike.arm()
    await swarm.until(lambda: strike.at_s is not None)
    strike.position = max(p.replica.position for p in swarm.peers)
    assert max(p.rounds.statistics().in_flight for p in swarm.peers) > 0
    limit_s = STRUCK_S[strike.kind] + STEP_S
    took_s = await decided_after(swarm, strike)
    assert took_s <= limit_s, f"decided {took_s:.2f} s after it, expected {limit_s} s"
    strike.position += 1
    took_s = await decided_after(swarm, strike)
    limit_s = NEXT_S[strike.kind] + STEP_S
    assert took_s <= limit_s, f"the next decided {took_s:.2f} s after it, expected {limit_s} s"
    await asyncio.sleep(SHORT_OUTAGE_S)
    strike.undo()
    alive = [p for p in swarm.peers if p not in strike.killed]
    most = max(p.replica.position for p in alive)
    await swarm.until(lambda: passed(alive, most + FLIGHTS))
    await expect_equal_end(swarm, alive)
    return took_s


async def expect_equal_end(swarm: Swarm, alive: list[SwarmPeer]) -> None:
    """Once nobody hands in any more all stand at one place, nothing lost or counted twice."""
    for peer in alive:
        peer.window_s = 10 * QUIET_S
    await asyncio.sleep(QUIET_S)
    assert len({p.replica.position for p in alive}) == 1
    assert swarm.same_bits(alive)
    assert swarm.network.errors == [], swarm.network.errors
    for peer in alive:
        expect_no_work_lost(peer)
    expect_sums(swarm, next(p for p in alive if p.resets == 0 and p.recovered is None))


def run_strike_in_flight(folder: Path, make: Callable[[Swarm], Strike]) -> float:
    """A fresh swarm of three peers, a strike while several positions are in flight."""

    async def scenario(swarm: Swarm) -> float:
        await swarm.start(3, window_s=STEP_S, tau=FLIGHTS)
        return await check_strike_in_flight(swarm, make(swarm))

    took_s = run_swarm(folder, scenario, method=f"streaming(count={FLIGHTS})", layout=FLYING)
    shutil.rmtree(folder)
    return took_s
