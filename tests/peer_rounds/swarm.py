"""Peers in one process, on the network in memory and a clock that jumps."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from atoll.compression import parse
from atoll.dht.identity import Identity, verify
from atoll.dht.memory import MemoryNetwork
from atoll.dht.roster import MemoryBoard, PeerRecord
from atoll.optim.feedback import Feedback
from atoll.optim.layout import Layout
from atoll.optim.log import Elector, Epoch, SignedEpoch, epoch_payload, genesis_chain
from atoll.optim.state import OuterState
from atoll.optim.store import LogStore
from atoll.peer.recovery import Recovered, Recovery
from atoll.peer.replica import Replica
from atoll.peer.rounds.context import Context, RoundSettings, inline
from atoll.peer.rounds.engine import OfferedWindow, Rounds, Settled

RUN_ID = b"r" * 32
NUMEL = 3 * 65_536 + 1_000
LAYOUT = Layout(names=("w",), shapes=((NUMEL,),))
CODEC = parse("int8")
SETTINGS = RoundSettings(stall_s=1.5, grace_s=3.0)
ORGANISER = Identity.ephemeral()


def genesis() -> OuterState:
    return OuterState.genesis(LAYOUT, torch.linspace(-1.0, 1.0, NUMEL))


async def _genesis() -> OuterState:
    return genesis()


def signed_epoch(number: int, position: int, chain: bytes, electorate: list[Elector]) -> bytes:
    epoch = Epoch(
        run_id=RUN_ID,
        epoch=number,
        base_position=position,
        base_chain=chain,
        electorate=tuple(electorate),
    ).encode()
    return SignedEpoch(epoch=epoch, signature=ORGANISER.sign(epoch_payload(epoch))).encode()


def verify_run(data: bytes, signature: bytes) -> bool:
    return verify(ORGANISER.peer_id, data, signature)


@dataclass(eq=False)
class SwarmPeer:
    """One peer, with a trainer that draws its pseudo-gradients from a seed."""

    swarm: Swarm
    identity: Identity
    incarnation: str
    window_s: float = 5.0
    settled: list[Settled] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    recovered: Recovered | None = None
    windows: int = 0

    def __post_init__(self) -> None:
        self.rng = torch.Generator().manual_seed(int(self.incarnation, 16))
        store = LogStore(
            self.swarm.folder / f"{self.identity.peer_id}-{self.incarnation}",
            run_id=RUN_ID,
            genesis_chain=self.swarm.chain,
            body_budget_bytes=self.swarm.body_budget_bytes,
            keep_snapshots=3,
        )
        self.transport = self.swarm.network.transport(self.identity.peer_id)
        self.roster = self.swarm.board.roster(self.identity.peer_id)
        self.replica = Replica(
            run_id=RUN_ID,
            layout=LAYOUT,
            codec=CODEC,
            store=store,
            verify=verify,
            verify_run=verify_run,
            snapshot_every=2,
            compute=inline,
        )
        self.ctx = Context(
            me=Elector(peer_id=self.identity.peer_id, incarnation=self.incarnation),
            sign=self.identity.sign,
            verify=verify,
            transport=self.transport,
            roster=self.roster,
            replica=self.replica,
            codec=CODEC,
            layout=LAYOUT,
            scalars=lambda position: (0.5, 0.5),
            settings=SETTINGS,
            compute=inline,
            on_event=lambda level, text: self.events.append(f"{level}: {text}"),
            ready_in_s=lambda: max(0.0, self.ready_at - self.swarm.now()),
        )
        self.ready_at = 0.0
        self.feedback = Feedback(NUMEL, CODEC)
        self.offer = None
        self.decided = asyncio.Event()
        self.rounds = Rounds(
            self.ctx,
            catch_up=self.catch_up,
            on_settled=self._on_settled,
            on_phase=lambda phase, position: self.swarm.on_phase(self, phase, position),
            on_led=lambda entry, certificate, body: None,
            uplink_mbit_s=lambda: 100.0,
        )
        self.recovery = Recovery(
            self.ctx, run_id=RUN_ID, genesis=_genesis, on_progress=lambda what, at: None
        )
        self.tasks: list[asyncio.Task[None]] = []

    async def catch_up(self) -> None:
        self.recovered = await self.recovery.run() or self.recovered

    async def start(self, record: bytes | None = None) -> None:
        self.rounds.serve()
        await self.roster.publish(
            PeerRecord(
                peer_id=self.identity.peer_id,
                addresses=(),
                incarnation=self.incarnation,
                role="trainer",
                epoch=0,
                position=0,
                tokens_per_s=0.0,
                uplink_mbit_s=100.0,
                downlink_mbit_s=100.0,
                ready_in_s=0.0,
                protocol=1,
            ),
            ttl_s=3600.0,
        )
        if record is not None:
            await self.replica.install(genesis(), self.swarm.chain, ())
            await self.replica.adopt(record)
        else:
            await self.catch_up()
        self.tasks = [
            asyncio.create_task(self.rounds.run()),
            asyncio.create_task(self._train()),
        ]

    def delta(self) -> Tensor:
        return torch.randn(NUMEL, generator=self.rng) * 0.01

    async def _train(self) -> None:
        fresh = self.recovered is not None
        while True:
            self.ready_at = self.swarm.now() + self.window_s
            await asyncio.sleep(self.window_s)
            offer = self.feedback.offer(self.delta(), 0.0 if fresh else 128.0)
            self.decided.clear()
            self.offer = offer
            fresh = False
            self.windows += 1
            self.rounds.offer(
                OfferedWindow(number=self.windows, offer=offer, tokens=1280, steps=10, loss=2.0)
            )
            await self.decided.wait()

    def _on_settled(self, settled: Settled) -> None:
        self.settled.append(settled)
        if settled.settles is not None and settled.included is not None and self.offer is not None:
            mask = torch.tensor(settled.included)
            self.feedback.settle(self.offer, mask, weight=self.offer.weight)
        for part, lost_N in settled.credits:
            self.feedback.owner_credit(part, lost_N)
        if settled.settles is not None:
            self.decided.set()

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.rounds.close()
        self.replica.store.close()

    def kill(self) -> None:
        """SIGKILL: nothing of the peer goes on, nothing is said."""
        self.swarm.network.kill(self.identity.peer_id)
        for task in self.tasks:
            task.cancel()


class Swarm:
    """Several peers and the organiser's key."""

    def __init__(self, folder: Path, *, body_budget_bytes: int | None = None) -> None:
        self.folder = folder
        self.body_budget_bytes = body_budget_bytes
        self.network = MemoryNetwork(random.Random(7), latency_s=0.025)
        self.board = MemoryBoard()
        self.chain = genesis_chain(RUN_ID, genesis().root())
        self.peers: list[SwarmPeer] = []
        self.on_phase: Callable[[SwarmPeer, str, int], None] = lambda peer, phase, position: None

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def add(self, identity: Identity | None = None) -> SwarmPeer:
        identity = identity or Identity.ephemeral()
        incarnation = f"{len(self.peers):032x}"
        peer = SwarmPeer(swarm=self, identity=identity, incarnation=incarnation)
        self.peers.append(peer)
        return peer

    async def start(self, count: int) -> list[SwarmPeer]:
        peers = [self.add() for _ in range(count)]
        record = signed_epoch(1, 0, self.chain, [peer.ctx.me for peer in peers])
        for peer in peers:
            await peer.start(record)
        return peers

    def same_bits(self, peers: list[SwarmPeer]) -> bool:
        states = [peer.replica.state for peer in peers]
        return len({s.root() for s in states}) == len({p.replica.chain for p in peers}) == 1

    async def until(self, condition: Callable[[], bool], timeout_s: float = 600.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.05)

    async def stop(self) -> None:
        for peer in self.peers:
            if peer.transport.alive:
                self.network.thaw(peer.identity.peer_id)
                await peer.stop()
        await _bury()


async def _bury() -> None:
    """End what killed peers left: their operations never return, whatever is awaited in them."""
    for _ in range(200):
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if not left:
            return
        for task in left:
            task.cancel()
        await asyncio.sleep(0)
