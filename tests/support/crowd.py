"""Peers by gossip in one process, on the network in memory and a clock that jumps."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor

from atoll.dht.identity import Identity
from atoll.dht.tasks import end
from atoll.dht.testing import MemoryBoard
from atoll.dht.testing.memory import MemoryNetwork, run_virtual
from atoll.dht.testing.virtualtime import inline
from atoll.optim import methods
from atoll.optim.log.entry import Elector, sha256
from atoll.optim.methods.noloco import PairedMethod
from atoll.optim.reduction.contribution import work_weight
from atoll.optim.state.layout import CELL, Layout
from atoll.optim.state.outer_state import OuterState
from atoll.peer.gossip.context import GossipContext
from atoll.peer.gossip.engine import Gossip, GossipSettled
from atoll.peer.gossip.meeting import GossipWindow
from atoll.peer.rounds.context import RoundSettings
from support.records import record_of
from support.swarm import bury

RUN_ID = b"g" * 32
LAYOUT = Layout(names=("a", "b"), shapes=((CELL + 2_000,), (3_000,)))
SETTINGS = RoundSettings(stall_s=1.5, grace_s=3.0)
TOKENS, STEPS = 1280, 10


def identity_of(number: int) -> Identity:
    """The same key in every run, so that the same peers meet."""
    return Identity(Ed25519PrivateKey.from_private_bytes(sha256(b"%d" % number)), None)


@dataclass(eq=False)
class CrowdPeer:
    """One peer, whose windows add noise from a seed to what it has learned."""

    crowd: Crowd
    number: int
    state: OuterState
    mass: float
    incarnation: str
    window_s: float = 5.0
    link_mbit_s: float = 0.0
    """0: unlimited"""
    settled: list[GossipSettled] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    phases: list[tuple[str, int]] = field(default_factory=list)
    tamper: Callable[[GossipWindow], GossipWindow] = lambda window: window
    windows: int = 0

    def __post_init__(self) -> None:
        crowd = self.crowd
        self.peer_id = identity_of(self.number).peer_id
        rate = self.link_mbit_s * 1e6 / 8
        self.transport = crowd.network.transport(
            self.peer_id, uplink_bytes_s=rate, downlink_bytes_s=rate
        )
        self.roster = crowd.board.roster(self.peer_id)
        self.rng = torch.Generator().manual_seed(self.number)
        self.drift_N = torch.zeros(LAYOUT.numel)
        self.trained_N, self.counted_N = (torch.zeros(LAYOUT.numel) for _ in range(2))
        self.ready_at = 0.0
        self.ctx = GossipContext(
            me=Elector(peer_id=self.peer_id, incarnation=self.incarnation),
            run_id=RUN_ID,
            transport=self.transport,
            roster=self.roster,
            method=crowd.method,
            layout=LAYOUT,
            settings=SETTINGS,
            compute=inline,
            on_event=lambda level, text, key=None: self.events.append(f"{level}: {text}"),
            last_round=crowd.last_round,
            ready_in_s=lambda: max(0.0, self.ready_at - crowd.now()),
        )
        self.gossip = Gossip(
            self.ctx,
            self.state,
            mass=self.mass,
            on_settled=self._on_settled,
            on_phase=self._on_phase,
        )
        self.decided = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []

    @property
    def position(self) -> int:
        return self.gossip.position

    @property
    def met(self) -> list[GossipSettled]:
        return [settled for settled in self.settled if settled.members == 2 and settled.included]

    async def start(self) -> None:
        self.gossip.serve()
        self.gossip.begin()
        await self._publish()
        self.tasks = [
            asyncio.create_task(work)
            for work in (self.gossip.run(), self._keep_record(), self._train())
        ]

    async def _publish(self) -> None:
        record = record_of(
            self.peer_id,
            incarnation=self.incarnation,
            position=self.position,
            uplink_mbit_s=100.0,
            downlink_mbit_s=100.0,
        )
        await self.roster.publish(record, ttl_s=20.0)

    async def _keep_record(self) -> None:
        while True:
            await self._publish()
            await asyncio.sleep(5.0)

    async def _train(self) -> None:
        """Windows one after another; what is not counted stays in the drift."""
        while True:
            self.ready_at = self.crowd.now() + self.window_s
            await asyncio.sleep(self.window_s)
            work_N = torch.randn(LAYOUT.numel, generator=self.rng) * self.crowd.work
            self.drift_N += work_N
            self.trained_N += work_N
            self.decided.clear()
            self.windows += 1
            self.offered_N = self.drift_N.clone()
            window = GossipWindow(
                number=self.windows,
                delta_N=self.offered_N,
                weight=work_weight(TOKENS, STEPS, self.crowd.method.weights),
                tokens=TOKENS,
                steps=STEPS,
                loss=2.0,
                inner_lr=1e-3,
            )
            self.gossip.offer(self.tamper(window))
            await self.decided.wait()

    def _on_settled(self, settled: GossipSettled) -> None:
        self.settled.append(settled)
        if settled.included:
            self.drift_N -= self.offered_N
            self.counted_N += self.offered_N
        self.decided.set()

    def _on_phase(self, phase: str, position: int) -> None:
        self.phases.append((phase, position))
        self.crowd.on_phase(self, phase, position)

    async def stop(self) -> None:
        await end(*self.tasks)
        await self.gossip.close()
        await self.transport.close()

    def kill(self) -> None:
        """SIGKILL: nothing of the peer goes on, nothing is said."""
        self.crowd.network.kill(self.peer_id)
        for task in self.tasks:
            task.cancel()


class Crowd:
    """Several peers of one run."""

    def __init__(
        self, spec: str = "noloco", *, work: float = 0.01, last_round: int = 0, **options: object
    ) -> None:
        """``work`` is the size of what a window learns; 0 leaves the averaging alone."""
        method = methods.parse(spec, **options)
        assert isinstance(method, PairedMethod)
        self.method, self.work, self.last_round = method, work, last_round
        self.network = MemoryNetwork(random.Random(7), latency_s=0.025)
        self.board = MemoryBoard()
        self.peers: list[CrowdPeer] = []
        self.starts = 0
        self.on_phase: Callable[[CrowdPeer, str, int], None] = lambda peer, phase, position: None

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def first_state(self, number: int) -> OuterState:
        """Everybody's own: what peers of one run that were apart for long may hold."""
        noise = torch.Generator().manual_seed(1000 + number)
        return OuterState.genesis(LAYOUT, torch.randn(LAYOUT.numel, generator=noise))

    def add(
        self,
        number: int | None = None,
        *,
        state: OuterState | None = None,
        mass: float = 1.0,
        **options: Any,
    ) -> CrowdPeer:
        number = len(self.peers) if number is None else number
        self.starts += 1
        peer = CrowdPeer(
            crowd=self,
            number=number,
            state=state or self.first_state(number),
            mass=mass,
            incarnation=f"{self.starts:032x}",
            **options,
        )
        self.peers.append(peer)
        return peer

    async def start(self, count: int, **options: Any) -> list[CrowdPeer]:
        peers = [self.add(**options) for _ in range(count)]
        for peer in peers:
            await peer.start()
        return peers

    async def until(self, condition: Callable[[], bool], timeout_s: float = 600.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.05)

    async def rounds(
        self, count: int, peers: list[CrowdPeer] | None = None, *, timeout_s: float = 600.0
    ) -> None:
        """Until everybody has taken so many more rounds."""
        peers = peers or self.peers
        goals = [(peer, len(peer.settled) + count) for peer in peers]
        await self.until(lambda: all(len(peer.settled) >= goal for peer, goal in goals), timeout_s)

    async def stop(self) -> None:
        for peer in self.peers:
            if peer.transport.alive:
                self.network.thaw(peer.peer_id)
                await peer.stop()
        await bury()


def in_crowd(use: Callable[[Crowd], Any], **options: Any) -> None:
    """Run ``use(crowd)`` on a clock that jumps; no handler may have failed."""

    async def main() -> None:
        crowd = Crowd(**options)
        try:
            await use(crowd)
            assert crowd.network.errors == []
        finally:
            await crowd.stop()

    run_virtual(main())


def kept(peers: list[CrowdPeer]) -> tuple[float, Tensor]:
    """Sum of w, and of w (x + mu / (1 - mu) m), in float64."""
    total_N = torch.zeros(LAYOUT.numel, dtype=torch.float64)
    for peer in peers:
        state, mu = peer.gossip.state, peer.ctx.method.momentum
        total_N += peer.gossip.mass * (
            state.params_N.double() + mu / (1 - mu) * state.momentum_N.double()
        )
    return sum(peer.gossip.mass for peer in peers), total_N


def spread(peers: list[CrowdPeer]) -> float:
    """Mean distance of the peers' weights to their mean."""
    params = torch.stack([peer.gossip.state.params_N for peer in peers])
    return float((params - params.mean(0)).norm(dim=1).mean())
