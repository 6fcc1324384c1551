"""Fetch a peer's model for the coordinator of a gossip run."""

from __future__ import annotations

import logging
from contextlib import suppress

from atoll.coordinator.gossip import Model
from atoll.coordinator.report.text import clean
from atoll.dht.roster import PeerRecord, Roster, RosterError
from atoll.dht.transport import Transport, TransportError
from atoll.optim.log.entry import LogError
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import StateError
from atoll.peer.gossip.messages import GossipHead
from atoll.peer.gossip.snapshots import fetch_state

CONNECT_S = 10.0  # longer than the 5 s for which libp2p does not redial after a failure
PATIENCE_S = 10.0  # for a leaf of 1 MiB
ASKED = 8  # peers, those with the highest rounds in the roster first

_log = logging.getLogger(__name__)


class ModelFetcher:
    """Asks one peer after another for its model."""

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
