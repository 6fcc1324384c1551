"""Peers in one process, on the network in memory and a clock that jumps."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor

from atoll.compression import parse
from atoll.coordinator.run.levels import Level
from atoll.dht.identity import Identity, verify
from atoll.dht.tasks import end
from atoll.dht.testing import MemoryBoard
from atoll.dht.testing.memory import MemoryNetwork, run_virtual
from atoll.dht.testing.virtualtime import inline
from atoll.optim import methods
from atoll.optim.log.electorate import Electors
from atoll.optim.log.entry import (
    Elector,
    Epoch,
    SignedEpoch,
    Trust,
    epoch_payload,
    genesis_chain,
    sha256,
)
from atoll.optim.log.live_replica import LiveReplica, Recovered, RecoveryError
from atoll.optim.log.module import Module
from atoll.optim.log.orders import Change, Order, RunSettings, read_settings, sign_order
from atoll.optim.log.replay import Replay, with_codec
from atoll.optim.log.replica import Replica
from atoll.optim.log.store import LogStore
from atoll.optim.reduction.contribution import Offer, work_weight
from atoll.optim.reduction.robust import Rule
from atoll.optim.state import vectors
from atoll.optim.state.layout import CELL, Layout
from atoll.optim.state.outer_state import OuterState
from atoll.peer.recovery.recovery import Recovery
from atoll.peer.recovery.sources import RosterSources
from atoll.peer.rounds.conduct import Conduct
from atoll.peer.rounds.consensus.ballots import Ballots
from atoll.peer.rounds.consensus.member import OfferedWindow
from atoll.peer.rounds.context import Context, RoundSettings
from atoll.peer.rounds.engine import Rounds, Settled
from atoll.peer.rounds.messages import PROTOCOL, READY, Ready, Report, report_payload, tagged
from support.records import record_of

T = TypeVar("T")

RUN_ID = b"r" * 32
LAYOUT = Layout(names=("w",), shapes=((3 * CELL + 1_000,),))
SMALL = Layout(names=("w",), shapes=((2 * CELL + 1_000,),))  # one cell a peer for three peers
SETTINGS = RoundSettings(stall_s=1.5, grace_s=3.0)
ORGANISER = Identity.ephemeral()


def genesis(replay: Replay) -> OuterState:
    layout = replay.layout
    return replay.method.genesis(layout, torch.linspace(-1.0, 1.0, layout.numel))


def feedback_with(codec: str) -> float:
    return 0.0 if parse(codec).mode == "unbiased" else 1.0


def identity_of(number: int) -> Identity:
    """The same key in every run, so that the same peers lead."""
    return Identity(Ed25519PrivateKey.from_private_bytes(sha256(b"%d" % number)), None)


def signed_epoch(
    number: int, position: int, chain: bytes, electorate: list[Elector], first_term: int = 0
) -> bytes:
    epoch = Epoch(
        run_id=RUN_ID,
        epoch=number,
        base_position=position,
        base_chain=chain,
        electorate=tuple(electorate),
        first_term=first_term,
    ).encode()
    return SignedEpoch(epoch=epoch, signature=ORGANISER.sign(epoch_payload(epoch))).encode()


def verify_run(data: bytes, signature: bytes) -> bool:
    return verify(ORGANISER.peer_id, data, signature)


@dataclass(kw_only=True)
class Open:
    """A contribution that is not decided yet."""

    number: int
    offer: Offer
    delta_F: Tensor  # noqa: N815
    age: int = 0
    """steps since it was handed in"""


@dataclass(eq=False)
class SwarmPeer:
    """One peer, whose steps add noise from a seed to its drift, which is what it contributes.

    A step ends the window of one fragment.  With ``tau`` steps of delay training goes on while
    contributions travel; without, each is waited for.
    """

    swarm: Swarm
    identity: Identity
    incarnation: str
    window_s: float = 5.0
    """of a step"""
    tau: int = 0
    settled: list[Settled] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    levels: list[Level] = field(default_factory=list)
    recovered: Recovered | None = None
    windows: int = 0
    handed_in: list[Offer] = field(default_factory=list)
    """of each window, from the first"""
    resets: int = 0
    fresh: set[int] = field(default_factory=set)
    """fragments of which the next contribution has weight 0"""
    tamper: Callable[[Offer], Offer] = lambda offer: offer
    declared_mbit_s: float = 100.0
    link_mbit_s: float = 0.0
    """0: unlimited"""
    offers: dict[int, Tensor] = field(default_factory=dict)
    """what was on offer when a position was decided"""
    latest: dict[int, Tensor] = field(default_factory=dict)
    """what was offered last of each fragment"""
    under_way: dict[int, Open] = field(default_factory=dict)
    """by fragment"""
    role: Literal["trainer", "keeper"] = "trainer"
    allocate: vectors.Allocate = vectors.empty
    addresses: tuple[str, ...] = ()
    """announced in the roster; those at relays show a peer that nobody dials"""
    ballots: Ballots | None = None
    """what an elector remembers over a restart; None: nothing"""
    seen: int = 0
    """positions that it ever applied: it may go back and through them again"""
    codec: str | None = None
    """that orders have set, as far as the trainer has heard"""

    def __post_init__(self) -> None:
        numel = self.swarm.layout.numel
        self.drift_N, self.work_N, self.counted_N = (torch.zeros(numel) for _ in range(3))
        self.rng = torch.Generator().manual_seed(int(self.incarnation[:8], 16))
        store = LogStore(
            self.swarm.folder / f"{self.identity.peer_id}-{self.incarnation}",
            run_id=RUN_ID,
            genesis_chain=self.swarm.chain,
            body_budget_bytes=self.swarm.body_budget_bytes,
            keep_snapshots=3,
        )
        rate = self.link_mbit_s * 1e6 / 8
        self.transport = self.swarm.network.transport(
            self.identity.peer_id, uplink_bytes_s=rate, downlink_bytes_s=rate
        )
        self.roster = self.swarm.board.roster(self.identity.peer_id)
        module = replace(self.swarm.module)  # each has rules of its own: orders change their codec
        core = Replica(
            module,
            store,
            verify=verify,
            verify_run=verify_run,
            allocate=self.allocate,
            clock=self.swarm.now,
        )
        self.replica = LiveReplica(core, compute=inline)
        self.ctx = Context(
            me=Elector(peer_id=self.identity.peer_id, incarnation=self.incarnation),
            sign=self.identity.sign,
            verify=verify,
            transport=self.transport,
            roster=self.roster,
            replica=self.replica,
            replay=module.replay,
            scalars=lambda position: (0.5, 0.5),
            settings=self.swarm.settings,
            compute=inline,
            rule=self.swarm.rule,
            on_event=self.note,
            ready_in_s=self._ready_in_s,
            conduct=Conduct(evicted_in_log=lambda: self.replica.settings.evicted),
        )
        self.ready_at = 0.0
        replay = self.swarm.replay
        self.feedbacks = [replay.residual(f) for f in range(len(replay.fragments))]
        self.steps = [0] * len(replay.fragments)
        self.decided = asyncio.Event()
        self.rounds = Rounds(
            self.ctx,
            catch_up=self.catch_up,
            on_settled=self._on_settled,
            on_phase=lambda phase, position, left=None: self.swarm.on_phase(self, phase, position),
            on_led=lambda entry, certificate, body: None,
            uplink_mbit_s=self.declared_mbit_s,
            ballots=self.ballots,
        )
        self.recovery = Recovery(
            self.replica,
            RosterSources(self.ctx),
            genesis=self.genesis,
            stall_s=SETTINGS.stall_s,
            on_event=self.ctx.on_event,
            on_progress=lambda what, at: None,
        )
        self.tasks: list[asyncio.Task[None]] = []

    def _ready_in_s(self) -> float | None:
        return max(0.0, self.ready_at - self.swarm.now()) if self.role == "trainer" else None

    async def genesis(self) -> OuterState:
        return genesis(self.swarm.replay)

    async def catch_up(self) -> None:
        before = self.replica.position if self.replica.ready else None
        try:
            recovered = await self.recovery.run()
        except RecoveryError as error:
            self.note("warning", str(error))
            return
        self.recovered = recovered or self.recovered
        jumped = recovered is not None and recovered.snapshot_position is not None
        if before is not None and (jumped or self.replica.position < before):
            self._reset()

    def _reset(self) -> None:
        """What the session and the trainer do where the replica was put somewhere else."""
        self.resets += 1
        self.rounds.withdraw()
        self.work_N -= self.drift_N
        self.drift_N.zero_()
        for feedback in self.feedbacks:
            feedback.reset()
        self.under_way.clear()
        self._follow(self.replica.settings)
        self._begin_windows(fresh=True)
        self.decided.set()

    def _follow(self, settings: RunSettings) -> None:
        """Encode in the codec that orders have set."""
        if settings.codec != self.codec:
            self.codec = settings.codec
            chosen = with_codec(self.swarm.replay.method, self.codec).codec
            for feedback in self.feedbacks:
                feedback.use_codec(chosen)
            self.under_way.clear()
            self.decided.set()

    async def start(self, record: bytes | None = None) -> None:
        self.rounds.serve()
        await self.roster.publish(
            record_of(
                self.identity.peer_id,
                addresses=self.addresses,
                incarnation=self.incarnation,
                role=self.role,
                uplink_mbit_s=100.0,
                downlink_mbit_s=100.0,
            ),
            ttl_s=3600.0,
        )
        if record is not None:
            await self.replica.install(await self.genesis())
            await self.replica.adopt(record)
        else:
            await self.catch_up()
        self.tasks = [asyncio.create_task(self.rounds.run())]
        if self.role == "trainer":
            self.tasks.append(asyncio.create_task(self._train()))

    def train(self) -> Tensor:
        """One window; the pseudo-gradient is all that is not counted yet."""
        work_N = torch.randn(self.swarm.layout.numel, generator=self.rng) * 0.01
        self.work_N += work_N
        self.drift_N += work_N
        return self.drift_N.clone()

    def _begin_windows(self, *, fresh: bool) -> None:
        """Empty windows at the offsets of their turns, as in ``atoll.optim.methods.worker``."""
        count, position = len(self.steps), self.replica.position if self.replica.ready else 0
        self.fresh = set(range(count)) if fresh else set()
        self.steps = [count - 1 - (index - position - 1) % count for index in range(count)]

    async def _train(self) -> None:
        self._begin_windows(fresh=self.recovered is not None)
        while True:
            self.ready_at = self.swarm.now() + self.window_s
            await asyncio.sleep(self.window_s)
            drift_N = self.train()
            for open_ in self.under_way.values():
                open_.age += 1
            for fragment in self._ended():
                self._hand_in(fragment, drift_N)
            while any(open_.age >= self.tau for open_ in self.under_way.values()):
                self.decided.clear()
                await self.decided.wait()

    def _ended(self) -> list[int]:
        """Fragments to hand in: whose turn it is or, with a delay, whose window has ended."""
        if not self.tau:
            return [self.swarm.replay.fragment_at(self.replica.position)]
        self.steps = [steps + 1 for steps in self.steps]
        count = len(self.steps)
        return [f for f in range(count) if self.steps[f] >= count and f not in self.under_way]

    def _hand_in(self, fragment: int, drift_N: Tensor) -> None:
        self.steps[fragment] = 0
        delta_F = self.swarm.replay.fragments[fragment].take(drift_N)
        rule = self.swarm.replay.method.weights
        weight = 0.0 if fragment in self.fresh else work_weight(1280, 10, rule)
        self.fresh.discard(fragment)
        offer = self.tamper(self.feedbacks[fragment].offer(delta_F, weight))
        self.windows += 1
        self.handed_in.append(offer)
        self.under_way[fragment] = Open(number=self.windows, offer=offer, delta_F=delta_F)
        here, count = self.replica.position, len(self.steps)
        turn = here + (fragment - self.swarm.replay.fragment_at(here)) % count
        self.latest[fragment] = delta_F
        if turn >= self.seen and (weight or turn not in self.offers):
            self.offers[turn] = delta_F  # one that weighs nothing is in no mean
        if self.codec == self.replica.settings.codec:  # else it is given up with the next entry
            self.rounds.offer(
                OfferedWindow(
                    number=self.windows,
                    fragment=fragment,
                    offer=offer,
                    tokens=1280,
                    steps=10,
                    loss=2.0,
                    codec=self.codec,
                )
            )

    def _on_settled(self, settled: Settled) -> None:
        self.settled.append(settled)
        entry = settled.applied.entry
        self.seen = max(self.seen, entry.position + 1)
        open_ = self.under_way.get(entry.fragment)
        if open_ is not None and settled.settles == open_.number:
            del self.under_way[entry.fragment]
            self.offers.setdefault(entry.position, open_.delta_F)
            if settled.included is not None:
                self._count(entry.fragment, open_, torch.tensor(settled.included))
            self.decided.set()
        for part, lost_N in settled.credits:
            self.feedbacks[entry.fragment].owner_credit(part, lost_N)
        self._follow(read_settings(entry.settings))

    def _count(self, index: int, open_: Open, included: Tensor) -> None:
        update_F = self.settled[-1].applied.update_F
        self.feedbacks[index].settle(
            open_.offer, included, weight=open_.offer.weight, update_F=update_F
        )
        fragment, counted_F = self.swarm.replay.fragments[index], torch.zeros_like(open_.delta_F)
        for cell, counted in zip(fragment.slices, included, strict=True):
            if counted:
                counted_F[cell] = open_.delta_F[cell]
        counted_N = torch.zeros_like(self.drift_N)
        fragment.put_(counted_N, counted_F)
        self.drift_N -= counted_N
        self.counted_N += counted_N

    def note(self, level: Level, text: str, *, key: Hashable | None = None) -> None:
        """Keep an event; `levels` has the level of each."""
        self.events.append(f"{level}: {text}")
        self.levels.append(level)

    async def stop(self) -> None:
        await end(*self.tasks)
        await self.rounds.close()
        await self.replica.close()

    def kill(self) -> None:
        """SIGKILL: nothing of the peer goes on, nothing is said."""
        self.swarm.network.kill(self.identity.peer_id)
        for task in self.tasks:
            task.cancel()


class Swarm:
    """Several peers and the organiser's key."""

    def __init__(
        self,
        folder: Path,
        *,
        body_budget_bytes: int | None = None,
        method: str = "diloco",
        codec: str | None = "int8",
        layout: Layout = LAYOUT,
        rule: Rule | None = None,
        electors: Electors = "members",
        trust: Trust = "crash",
    ) -> None:
        """The codec None is the method's own."""
        self.folder = folder
        self.settings = replace(SETTINGS, electors=electors)
        options = {} if codec is None else {"codec": codec, "feedback": feedback_with(codec)}
        self.layout, self.rule = layout, rule
        parsed = methods.parse(method, **options)
        self.module = Module(
            run_id=RUN_ID, method=parsed, layout=layout, snapshot_every=2, trust=trust
        )
        self.replay = self.module.replay
        self.body_budget_bytes = body_budget_bytes
        self.network = MemoryNetwork(random.Random(7), latency_s=0.025)
        self.board = MemoryBoard()
        self.chain = genesis_chain(RUN_ID, genesis(self.replay).root())
        self.peers: list[SwarmPeer] = []
        self.on_phase: Callable[[SwarmPeer, str, int], None] = lambda peer, phase, position: None

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def take_failure(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A task in the background failed: an error, as if a handler had raised it."""
        if (failure := context.get("exception")) is not None:
            self.network.errors.append(failure)

    def add(self, identity: Identity | None = None, **options: Any) -> SwarmPeer:
        identity = identity or identity_of(len(self.peers))
        # as it is in a run: no two alike, and hard to deflate
        drawn = sha256(str(len(self.peers)).encode()).hex()[:32]
        incarnation = options.pop("incarnation", drawn)
        peer = SwarmPeer(swarm=self, identity=identity, incarnation=incarnation, **options)
        self.peers.append(peer)
        return peer

    async def start(self, count: int, **options: Any) -> list[SwarmPeer]:
        return await self.begin([self.add(**options) for _ in range(count)])

    async def begin(self, peers: list[SwarmPeer]) -> list[SwarmPeer]:
        keepers = self.settings.electors == "keepers"
        electors = [p.ctx.me for p in peers if p.role == ("keeper" if keepers else "trainer")]
        record = signed_epoch(1, 0, self.chain, electors)
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
        await bury()


def run_swarm(folder: Path, scenario: Callable[[Swarm], Awaitable[T]], **options: Any) -> T:
    """What a scenario returns of a fresh swarm; no handler may have raised but a refusal."""

    async def main() -> T:
        swarm = Swarm(folder, **({"codec": "fp32"} | options))
        asyncio.get_running_loop().set_exception_handler(swarm.take_failure)
        try:
            result = await scenario(swarm)
            assert swarm.network.errors == []
            return result
        finally:
            await swarm.stop()

    return run_virtual(main())


def ready_of(identity: Identity, peer: SwarmPeer, **changes: Any) -> bytes:
    """A report to `peer`'s next position that somebody signed, as the first message of a stream."""
    replica = peer.replica
    said = {
        "epoch": replica.epoch,
        "position": replica.position,
        "incarnation": "f" * 32,
        "weight": 0.0,
        "tokens": 0,
        "steps": 0,
        "loss": None,
        "norm": 0.0,
        "uplink_mbit_s": 100.0,
    }
    report = Report(**{key: changes.pop(key, value) for key, value in said.items()})
    fields = {
        "protocol": PROTOCOL,
        "term": 0,
        "stands_at": replica.position,
        "chain": replica.chain,
        "signature": identity.sign(report_payload(replica.run_id, report)),
    }
    return tagged(READY, Ready(report=report, **(fields | changes)))


def claim(monkeypatch: pytest.MonkeyPatch, peer: SwarmPeer, **changes: Any) -> None:
    """Let a peer name another place in the log than its own."""
    head = peer.rounds.head
    monkeypatch.setattr(peer.rounds, "head", lambda known: head(known).model_copy(update=changes))


def reached(peers: Iterable[SwarmPeer], position: int) -> bool:
    """Whether all stand at a position, or beyond it."""
    return all(peer.replica.position >= position for peer in peers)


async def bury() -> None:
    """End what killed peers left: their operations never return, whatever is awaited in them."""
    for _ in range(200):
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if not left:
            return
        for task in left:
            task.cancel()
        await asyncio.sleep(0)


def order_of(number: int, change: Change, **changes: Any) -> bytes:
    """An order of the organiser's."""
    return sign_order(
        Order(**{"run_id": RUN_ID, "number": number, "change": change} | changes), ORGANISER.sign
    )
