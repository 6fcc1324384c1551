"""Lend a state to a joiner of a gossip run, or fetch one, also for the coordinator.

No certificate exists for a state in a gossip run, because each peer has its own. A joiner trusts
the peer that it asks, which the run admitted, as it would in a meeting. Digests only ensure that
the state arrives as it was sent.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from contextlib import suppress
from typing import Protocol

from atoll.compression import planes
from atoll.coordinator.gossip import Model
from atoll.coordinator.run.text import clean
from atoll.dht.refusals import RefusalCode
from atoll.dht.roster import PeerRecord, Roster, RosterError
from atoll.dht.transport import PeerUnreachable, Refused, Stream, Transport, TransportError
from atoll.optim.log.entry import LogError
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import (
    LEAF_BYTES,
    Assembly,
    OuterState,
    StateError,
    merkle_root,
)
from atoll.peer.gossip.context import GossipContext
from atoll.peer.gossip.messages import GossipHead
from atoll.peer.rounds.bulk import Came, Inflow
from atoll.peer.rounds.conduct import guarded_stream
from atoll.peer.rounds.messages import LeafRequest, SnapshotMeta
from atoll.peer.rounds.slots import Slots

LENT = 2  # states kept for joiners, of 8 bytes per parameter each
LEND_S = 60.0  # since the last request for a leaf
MAX_STREAMS = 4  # of leaves at once; more would starve this peer's own meetings
MAX_OF_ONE = 2  # of them: a joiner reads one after the other
LEAVES_A_REQUEST = 8  # 8 MiB: 0.7 s at 100 Mbit/s, so a lost donor costs little
DIGEST_BYTES = 32

CONNECT_S = 10.0  # longer than the 5 s for which libp2p does not redial after a failure
PATIENCE_S = 10.0  # of the coordinator, for a leaf of 1 MiB
ASKED = 8  # peers, those with the highest rounds in the roster first

_log = logging.getLogger(__name__)


class Holder(Protocol):
    """Owner of the state to lend."""

    @property
    def state(self) -> OuterState:
        """Current state."""
        ...


class Lender:
    """Serves the current state of a peer to joiners."""

    def __init__(self, ctx: GossipContext, holder: Holder) -> None:
        self._ctx = ctx
        self._holder = holder
        self._lent: OrderedDict[int, tuple[OuterState, float]] = OrderedDict()
        self._slots = Slots(MAX_STREAMS, MAX_OF_ONE)

    def serve(self) -> None:
        """Register the call and the stream for snapshots."""
        transport = self._ctx.transport
        transport.serve("gossip-snapshot", self._serve_snapshot)
        handler = guarded_stream(self._serve_leaves, self._ctx.fault)
        transport.serve_stream("gossip-leaves", handler)

    async def _serve_snapshot(self, remote: str, body: bytes) -> bytes:
        state = self._holder.state
        digests = await self._ctx.compute(state.leaves)
        self._keep(state)
        return SnapshotMeta(position=state.position, leaves=b"".join(digests)).encode()

    async def _serve_leaves(self, remote: str, stream: Stream) -> None:
        message = await stream.recv(timeout_s=self._ctx.settings.stall_s)
        request = LeafRequest.decode(message or b"")
        state = self._find(request)
        async with self._slots.turn(remote) as turn:
            for index in range(request.start, request.stop):
                await turn.cede()
                self._keep(state)
                leaf: bytes = await self._ctx.compute(planes.pack, state.read_leaf(index))
                await self._ctx.link.outflow.take(len(leaf))
                # A joiner on a slow link takes longer for a leaf of 1 MiB than a stall.
                await stream.send(leaf, timeout_s=4 * self._ctx.settings.stall_s)

    def _keep(self, state: OuterState) -> None:
        now = self._ctx.now()
        self._lent[state.position] = (state, now + LEND_S)
        self._lent.move_to_end(state.position)
        late = [p for p, (_, until) in self._lent.items() if until < now]
        for position in [*late, *list(self._lent)[: -LENT or None]]:
            self._lent.pop(position, None)

    def _find(self, request: LeafRequest) -> OuterState:
        state, _ = self._lent.get(request.position, (None, 0.0))
        if state is None or not request.start < request.stop <= state.num_leaves:
            raise Refused(
                RefusalCode.NOT_HERE,
                f"the state after round {request.position} is not lent; request a new snapshot",
            )
        return state


async def fetch_state(
    transport: Transport,
    peer: str,
    layout: Layout,
    memory_numel: int,
    *,
    patience_s: float,
    inflow: Inflow | None = None,
) -> OuterState:
    """Fetch a peer's current state.

    Args:
        transport: transport of this peer.
        peer: PeerID of the donor.
        layout: layout of the run's model.
        memory_numel: values that the outer step keeps in addition to the parameters.
        patience_s: time limit for each leaf.
        inflow: of a link that may have a cap.

    Raises:
        TransportError: the donor cannot be reached or no longer lends the state.
        LogError: the donor sends an invalid record.
        StateError: the leaves are not a state of this layout.
    """
    reply = await transport.call(peer, "gossip-snapshot", b"", timeout_s=patience_s)
    meta = SnapshotMeta.decode(reply)
    raw = meta.leaves
    digests = [raw[i : i + DIGEST_BYTES] for i in range(0, len(raw), DIGEST_BYTES)]
    assembly = Assembly(
        layout=layout,
        position=meta.position,
        leaf_digests=digests,
        root=merkle_root(digests),
        memory_numel=memory_numel,
    )
    inflow = inflow or Inflow()
    step = 1 if inflow.is_limited else LEAVES_A_REQUEST
    for start in range(0, len(digests), step):
        stop = min(start + step, len(digests))
        request = LeafRequest(position=meta.position, start=start, stop=stop)
        async with inflow.asking((stop - start) * LEAF_BYTES) as came:
            await _fetch_leaves(transport, peer, request, assembly, patience_s, came)
    return assembly.finish()


async def _fetch_leaves(
    transport: Transport,
    peer: str,
    request: LeafRequest,
    assembly: Assembly,
    patience_s: float,
    came: Came,
) -> None:
    async with await transport.open(peer, "gossip-leaves", timeout_s=patience_s) as stream:
        await stream.send(request.encode(), timeout_s=patience_s)
        for index in range(request.start, request.stop):
            leaf = await stream.recv(timeout_s=patience_s)
            if leaf is None:
                raise PeerUnreachable("the stream ended before all leaves arrived", peer=peer)
            came(len(leaf))
            assembly.add(index, leaf)


class ModelFetcher:
    """Asks one peer after another for its model, as the coordinator keeps one."""

    def __init__(
        self, *, transport: Transport, roster: Roster, layout: Layout, memory_numel: int
    ) -> None:
        """Fetch with the coordinator's node.

        Args:
            transport: transport of the coordinator.
            roster: roster of the run.
            layout: layout of the run's model.
            memory_numel: values that the outer step keeps in addition to the parameters.
        """
        self._transport = transport
        self._roster = roster
        self._layout = layout
        self._memory_numel = memory_numel

    async def __call__(self, at_least: int) -> Model | None:
        """Return a model of at least this round; None if no peer has one."""
        try:
            records = (await self._roster.peers()).values()
        except (RosterError, TransportError, TimeoutError, OSError) as error:
            _log.info("cannot read the roster: %s", clean(error))
            return None
        trainers = [record for record in records if record.role == "trainer"]
        furthest = sorted(trainers, key=lambda record: (-record.position, record.peer_id))
        for record in furthest[:ASKED]:
            with suppress(TransportError, LogError, StateError, TimeoutError, ValueError):
                model = await self._from(record, at_least)
                if model is not None:
                    return model
        return None

    async def _from(self, record: PeerRecord, at_least: int) -> Model | None:
        peer = record.peer_id
        await self._transport.connect(peer, record.addresses, timeout_s=CONNECT_S)
        reply = await self._transport.call(peer, "gossip-head", b"", timeout_s=PATIENCE_S)
        if GossipHead.decode(reply).round < at_least:
            return None
        state = await fetch_state(
            self._transport, peer, self._layout, self._memory_numel, patience_s=PATIENCE_S
        )
        return Model(state=state, peer_id=peer)
