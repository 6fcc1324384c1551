"""Orders in a swarm, and a fault at one message of the positions that decide them."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.coordinator.run.keys import RunKeys
from atoll.optim.log.entry import Entry
from atoll.optim.log.orders import (
    Change,
    EvictPeer,
    Order,
    PauseRun,
    ReadmitPeer,
    ResumeRun,
    RotateKey,
    read_order,
    sign_order,
)
from atoll.peer.rounds.consensus.ballots import leader_of
from support.strikes import (
    FLIGHTS,
    FLYING,
    STEP_S,
    Strike,
    expect_equal_end,
    expect_no_work_lost,
    expect_sums,
)
from support.swarm import ORGANISER, RUN_ID, SMALL, Swarm, SwarmPeer, order_of, reached, run_swarm

NEW_KEYS = RunKeys.generate()
"""of the organiser's next key"""


def entries(peer: SwarmPeer) -> list[Entry]:
    """The log of a peer."""
    records = peer.replica.store.headers(0, peer.replica.position)
    return [Entry.decode(record.entry) for record in records]


def take(peers: Iterable[SwarmPeer], *signed: bytes) -> None:
    """Let the coordinator's answers to heartbeats bring orders to some peers."""
    for peer in peers:
        for each in signed:
            peer.rounds.ordering.take(each)


def give(peers: Iterable[SwarmPeer], number: int, change: Change) -> None:
    """Give an order of the run's key to some peers."""
    take(peers, order_of(number, change))


def is_decided(peers: Sequence[SwarmPeer], number: int) -> Callable[[], bool]:
    """Whether an order is in the logs of all."""
    return lambda: all(peer.replica.settings.number >= number for peer in peers)


def id_of(peer: SwarmPeer) -> str:
    return peer.identity.peer_id


def leader_at(swarm: Swarm, position: int) -> SwarmPeer:
    """Who leads the first term of a position."""
    elector = leader_of(swarm.peers[0].replica.electorate, position, 0)
    return next(p for p in swarm.peers if p.ctx.me == elector)


def expect_without(peers: Sequence[SwarmPeer], out: SwarmPeer, since: int) -> None:
    """Expect that an evicted peer is in nothing that was decided since a position."""
    for entry in entries(peers[0])[since:]:
        assert id_of(out) not in {member.peer_id for member in entry.members}
        assert id_of(out) not in {elector.peer_id for elector in entry.electorate}


# faults

LIMIT_S = {"kill": 4.0, "freeze": 8.0, "cut": 8.0}
"""until orders are decided after a fault: one or two leaders that do not answer, or have failed"""
LONGER_THAN_AN_ORDER = 400


def signed_in_a_row(changes: Iterable[Change]) -> list[bytes]:
    """Sign orders from the first one on, each by the key that is in force for it."""
    signed, sign = [], ORGANISER.sign
    for number, change in enumerate(changes, 1):
        signed.append(sign_order(Order(run_id=RUN_ID, number=number, change=change), sign))
        if isinstance(change, RotateKey):
            sign = NEW_KEYS.sign
    return signed


Changes = Callable[[Swarm], tuple[list[Change], list[Change]]]
"""Orders that are decided first, and those whose messages are struck, of a swarm that runs."""


@dataclass(frozen=True, kw_only=True)
class StruckOrders:
    """Orders that are given to a swarm, and where."""

    changes: Changes
    peers: int = 3
    in_round: bool = False
    """given while a group reduces; else in a pause"""
    in_flight: bool = False
    """given while groups of several positions reduce"""
    sums: bool = True
    """updates are means of what the log says is in them, to the bit of fp32"""


def strike_orders(
    folder: Path, orders: StruckOrders, message: int, kind: str, end: int
) -> float | None:
    """Strike at a message of the positions that decide some orders.

    Returns:
        Seconds until they were decided; None if they took fewer messages.

    Raises:
        AssertionError: something does not hold.
    """

    async def scenario(swarm: Swarm) -> float | None:
        return await _Struck(swarm, orders, Strike(swarm, kind, message, end)).run()

    several = {"method": f"streaming(count={FLIGHTS})", "layout": FLYING}
    took_s = run_swarm(folder, scenario, **(several if orders.in_flight else {"layout": SMALL}))
    shutil.rmtree(folder)
    return took_s


class _Struck:
    """One swarm of `strike_orders`."""

    def __init__(self, swarm: Swarm, orders: StruckOrders, strike: Strike) -> None:
        self.swarm, self.orders, self.strike = swarm, orders, strike
        self.row: list[bytes] = []
        self.out: list[SwarmPeer] = []
        """peers that are evicted at the end"""

    async def run(self) -> float | None:
        swarm, strike = self.swarm, self.strike
        pace = {"window_s": STEP_S, "tau": FLIGHTS} if self.orders.in_flight else {}
        peers = await swarm.start(self.orders.peers, **pace)
        await swarm.until(lambda: reached(peers, FLIGHTS if pace else 2))
        last = await self._give()
        inside = [peer for peer in peers if peer not in self.out]
        await swarm.until(lambda: strike.at_s is not None or is_decided(inside, last)())
        if strike.at_s is None:
            strike.disarm()
            return None
        alive = [peer for peer in peers if peer not in strike.killed]
        others = [peer for peer in peers if peer not in strike.victims] or alive
        await swarm.until(lambda: any(p.replica.settings.number >= last for p in others))
        took_s = swarm.now() - strike.at_s
        limit_s = LIMIT_S[strike.kind]
        assert took_s <= limit_s, f"decided {took_s:.1f} s after it, expected {limit_s} s"
        strike.undo()
        take(alive, *self.row[last:])
        await self._expect_equal_end(alive)
        return took_s

    async def _give(self) -> int:
        """Give the orders, those to strike at last; return the number of the last one of these."""
        swarm, peers = self.swarm, self.swarm.peers
        is_live = self.orders.in_round or self.orders.in_flight
        pause = [] if is_live else [PauseRun()]
        take(peers, *signed_in_a_row(pause))
        await swarm.until(is_decided(peers, len(pause)))
        before, struck = self.orders.changes(swarm)
        changes = [*pause, *before, *struck, *(ResumeRun() for _ in pause)]
        self.row = signed_in_a_row(changes)
        first, last = len(pause) + len(before), len(changes) - len(pause)
        take(peers, *self.row[:first])
        await swarm.until(is_decided(peers, first))
        out: set[str] = set()
        for change in changes:
            if isinstance(change, EvictPeer):
                out.add(change.peer_id)
            elif isinstance(change, ReadmitPeer):
                out.discard(change.peer_id)
        self.out = [peer for peer in peers if id_of(peer) in out]
        # The coordinator gives no orders to those that it has put out.
        known_to = [peer for peer in peers if peer not in self.out]
        if is_live:
            await self._until_a_group_reduces()
        take(known_to, *self.row[first:last])
        self.strike.arm()
        return last

    async def _until_a_group_reduces(self) -> None:
        reduces = asyncio.Event()

        def note(peer: SwarmPeer, phase: str, position: int) -> None:
            if phase == "reduce":
                reduces.set()

        self.swarm.on_phase = note
        await reduces.wait()

    async def _expect_equal_end(self, alive: list[SwarmPeer]) -> None:
        swarm, most = self.swarm, max(peer.replica.position for peer in alive)
        inside = [peer for peer in alive if peer not in self.out]
        await swarm.until(lambda: reached(inside, most + 3))
        if self.orders.in_flight:
            await expect_equal_end(swarm, inside)
        await asyncio.sleep(1.0)
        assert swarm.same_bits(inside)
        log = entries(inside[0])
        numbers = [read_order(entry.order).number for entry in log if entry.order]
        assert numbers == list(range(1, len(self.row) + 1)), "each order once, in a row"
        for peer in self.out:
            expect_without(inside, peer, _last_order(log, EvictPeer))
        for peer in self._readmitted(alive):
            await swarm.until(lambda peer=peer: _is_member(inside[0], peer, most))
        for peer in alive:
            expect_no_work_lost(peer)
            assert not peer.ctx.conduct._records, "an order makes nobody break a rule"
        if self.orders.sums:
            expect_sums(swarm, inside[0])

    def _readmitted(self, alive: list[SwarmPeer]) -> list[SwarmPeer]:
        changes = [read_order(signed).change for signed in self.row]
        names = {each.peer_id for each in changes if isinstance(each, ReadmitPeer)}
        return [peer for peer in alive if id_of(peer) in names]


def _last_order(log: Sequence[Entry], kind: type) -> int:
    """The position of the last order of a kind."""
    found = [e.position for e in log if e.order and isinstance(read_order(e.order).change, kind)]
    return found[-1]


def _is_member(witness: SwarmPeer, peer: SwarmPeer, since: int) -> bool:
    log = entries(witness)[since:]
    return any(id_of(peer) in {member.peer_id for member in entry.members} for entry in log)
