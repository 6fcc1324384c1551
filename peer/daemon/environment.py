"""What a peer has once it has joined, whatever the kind of its run."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from atoll.coordinator.rpc.client import CoordinatorClient, Joined
from atoll.coordinator.run.phases import OnPhase
from atoll.coordinator.run.spec import RunSpec
from atoll.dht.identity import Identity
from atoll.dht.node import Node
from atoll.optim.log.entry import Elector
from atoll.optim.log.live import Compute
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import Assembly, OuterState
from atoll.peer.daemon.enrolment import Enrolment
from atoll.peer.daemon.neighbours import Neighbours
from atoll.peer.daemon.options import PeerOptions
from atoll.peer.daemon.outbox import Outbox
from atoll.peer.daemon.peer_tasks import PeerTasks
from atoll.peer.paths import PeerPaths
from atoll.peer.rounds.context import OnEvent


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What `LogRun` and `GossipRun` share; `Peer` opens and closes all of it."""

    options: PeerOptions
    me: Elector
    """this peer in this process"""
    identity: Identity
    paths: PeerPaths
    files: ExitStack
    """closed after the node, which may still answer from them"""
    client: CoordinatorClient
    enrolment: Enrolment
    node: Node
    neighbours: Neighbours
    outbox: Outbox
    tasks: PeerTasks
    say: OnEvent
    on_phase: OnPhase
    compute: Compute

    @property
    def run_id(self) -> bytes:
        """The run's."""
        return self.options.invite.run_id

    @property
    def spec(self) -> RunSpec:
        """The run's."""
        return self.enrolment.membership.spec

    @property
    def layout(self) -> Layout:
        """The layout of the run's model."""
        return self.enrolment.membership.layout

    async def join_again(self) -> Joined:
        """Join a coordinator that has forgotten this peer, or that was away at the start.

        Raises:
            CoordinatorError: it is away, or refuses this peer.
        """
        joined = await self.client.join()
        self.node.transport.admission = joined.admission
        self.enrolment.renew(joined)
        return joined

    async def fetch_state(self, memory_numel: int, position: int | None = None) -> OuterState:
        """Fetch a state from the coordinator.

        Args:
            memory_numel: values that the outer step keeps beside the parameters.
            position: None for the newest; 0 for the first, which is verified against what joining
                gave. Any other is as good as the coordinator's word.

        Raises:
            CoordinatorError: it is not there.
            StateError: what it sends is not that state.
        """
        info = await self.client.fetch_snapshot(position)
        if position is None:
            position = info.position
        assembly = Assembly(
            layout=self.layout,
            position=position,
            leaf_digests=info.leaf_digests,
            root=info.root if position else self.enrolment.membership.genesis_root,
            memory_numel=memory_numel,
        )
        async for index, leaf in self.client.fetch_leaves(position):
            await self.compute(assembly.add, index, leaf)
        state: OuterState = await self.compute(assembly.finish)
        return state
