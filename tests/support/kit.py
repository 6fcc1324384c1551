"""A coordinator, a swarm that certifies what it is given, and clients: for the tests here."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from atoll.coordinator.checkpoints import load_checkpoint
from atoll.coordinator.coordinator import Coordinator
from atoll.coordinator.heads import AskHead, PeerHead
from atoll.coordinator.kept_log import KeptLog
from atoll.coordinator.rpc.client import CoordinatorClient
from atoll.coordinator.run.spec import RunSpec
from atoll.coordinator.run.status import PeerStatus
from atoll.coordinator.service.server import Running, running
from atoll.dht import Identity
from atoll.optim.log.entry import (
    Certificate,
    Elector,
    Entry,
    Member,
    Part,
    StateRoot,
    Vote,
    fp32,
    sha256,
    vote_payload,
)
from atoll.optim.log.module import WHOLE
from atoll.optim.log.replay import Replay
from atoll.optim.log.store import StoreHead
from atoll.optim.reduction.cells import body_of
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import OuterState

__all__ = ["load_checkpoint"]

torch.set_num_threads(1)

LAYOUT = Layout(names=("embed", "head"), shapes=((1000, 100), (40_000,)))  # three cells, two leaves
SPEC = RunSpec.from_dict(
    {
        "run": {"name": "test", "rounds": 6},
        "round": {"min_peers": 2, "snapshot_every": 2},
        "coordinator": {"listen": "127.0.0.1:0", "dht_listen": "127.0.0.1:0"},
    }
)
REPLAY = Replay(SPEC.method(), LAYOUT)


def genesis(module: str = WHOLE) -> OuterState:
    params_N = torch.linspace(-1, 1, LAYOUT.numel)
    return OuterState.genesis(LAYOUT, params_N)


@dataclass
class Swarm:
    """Peers that certify whatever they are given."""

    identities: list[Identity] = field(
        default_factory=lambda: sorted(
            (Identity.ephemeral() for _ in range(3)), key=lambda i: i.peer_id
        )
    )
    replay: Replay = REPLAY

    def electors(self) -> tuple[Elector, ...]:
        return tuple(Elector(peer_id=i.peer_id, incarnation="1") for i in self.identities)

    def status(self, index: int, **changes: Any) -> PeerStatus:
        values = {"peer_id": self.identities[index].peer_id, "incarnation": "1", "state": "ready"}
        return PeerStatus(**{**values, **changes})

    def entry(self, run_id: bytes, head: StoreHead, **changes: Any) -> tuple[Entry, bytes]:
        generator = torch.Generator().manual_seed(head.position)
        frames = self.replay.cells_at(head.position).encode(
            torch.randn(self.replay.layout.numel, generator=generator)
        )
        body = body_of(frames)
        part = Part(
            start_cell=0,
            stop_cell=len(frames),
            owner=0,
            generation=0,
            wire_bytes=len(body),
            digest=sha256(body),
        )
        values: dict[str, Any] = {
            "run_id": run_id,
            "epoch": head.epoch,
            "position": head.position,
            "kind": "update",
            "previous_chain": head.chain,
            "fragment": 0,
            "lr": fp32(0.7),
            "momentum": fp32(0.5),
            "members": tuple(
                Member(
                    peer_id=e.peer_id,
                    incarnation="1",
                    weight=1.0,
                    tokens=100,
                    steps=5,
                    loss=2.5,
                    clip=1.0,
                    norm=1.0,
                )
                for e in self.electors()
            ),
            "parts": (part,),
            "electorate": self.electors(),
        }
        return Entry(**{**values, **changes}), body

    def null(self, run_id: bytes, head: StoreHead) -> Entry:
        return self.entry(run_id, head, kind="null", members=(), parts=())[0]

    def certify(self, entry: Entry, voters: Sequence[int] = (0, 1)) -> Certificate:
        payload = vote_payload(entry, 0)
        votes = (Vote(elector=i, signature=self.identities[i].sign(payload)) for i in voters)
        return Certificate(attempt=0, votes=tuple(votes))


@dataclass
class Net:
    """A coordinator that is up, and clients of its invite."""

    up: Running
    swarm: Swarm
    stack: contextlib.AsyncExitStack
    clients: list[CoordinatorClient] = field(default_factory=list)
    """Those of `started`."""

    def client(self, index: int = 0, **changes: Any) -> CoordinatorClient:
        client = CoordinatorClient(self.up.invite, self.swarm.identities[index], **changes)
        self.stack.push_async_callback(client.close)
        return client

    @property
    def run_id(self) -> bytes:
        return self.up.coordinator.run_id

    async def started(self) -> list[CoordinatorClient]:
        """Join all, and wait until the first epoch is open."""
        self.clients = clients = [self.client(i) for i in range(len(self.swarm.identities))]
        epochs = self.up.coordinator.log._epochs
        # A tick of the server's own would open the epoch before the last of them is there.
        heads, epochs.heads = epochs.heads, None
        for index, client in enumerate(clients):
            await client.join()
            await client.heartbeat(self.swarm.status(index))
        epochs.heads = heads
        await self.up.coordinator.tick()
        return clients

    async def publish(self, client: CoordinatorClient, entry: Entry, body: bytes) -> bool:
        published = await client.publish(
            epoch=entry.epoch,
            position=entry.position,
            entry=entry.encode(),
            certificate=self.swarm.certify(entry).encode(),
            body=body,
        )
        return published.accepted


def answering(
    coordinator: Coordinator, swarm: Swarm | None = None, log: KeptLog | None = None
) -> AskHead:
    """Return a call that peers answer, each with what its last heartbeat said.

    Args:
        coordinator: the one that calls.
        swarm: its peers answer; None: everyone answers.
        log: that they follow; by default the run's only one.
    """
    log = log or coordinator.log

    async def ask(peer_id: str) -> PeerHead | None:
        known = coordinator.presence.peers.get(peer_id)
        ours = {identity.peer_id for identity in swarm.identities} if swarm else {peer_id}
        if known is None or peer_id not in ours:
            return None
        return PeerHead(
            peer_id=peer_id,
            incarnation=known.status.incarnation,
            epoch=known.status.epoch,
            position=known.status.position,
            chain=log.head().chain,
            epoch_record=log.replica.epoch_record,
        )

    return ask


@contextlib.asynccontextmanager
async def net(
    state_dir: Path, swarm: Swarm | None = None, spec: RunSpec = SPEC, **options: Any
) -> AsyncIterator[Net]:
    async with contextlib.AsyncExitStack() as stack:
        up = await stack.enter_async_context(running(spec, genesis, state_dir, **options))
        swarm = swarm or Swarm()
        for log in up.coordinator.logs.values():
            log.ask_head_with(answering(up.coordinator, swarm, log))
        yield Net(up=up, swarm=swarm, stack=stack)


def root_at(position: int, state: OuterState) -> StateRoot:
    return StateRoot(position=position, root=state.root())


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run to the end, with a deadline: thousands of peers take 15 s of an idle processor."""
    asyncio.run(asyncio.wait_for(main, 90))
