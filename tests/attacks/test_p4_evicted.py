"""P4: whoever signed two entries is put out of the run by the coordinator, on proof alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from atoll.coordinator.rpc.client_errors import NotWelcome
from atoll.dht.identity import Identity
from atoll.optim.log.entry import vote_payload
from atoll.optim.log.evidence import Evidence
from support import kit


def lie_of(identity: Identity, net: kit.Net) -> Evidence:
    """Return two votes of one key for different entries at the coordinator's head."""
    head = net.up.coordinator.log.head()
    pair = [net.swarm.entry(net.run_id, head, lr=lr)[0] for lr in (0.5, 0.25)]
    signed = [(entry.digest, identity.sign(vote_payload(entry, 0))) for entry in pair]
    return Evidence.of("vote", identity.peer_id, pair[0], 0, signed)


async def hand_in(net: kit.Net, index: int, record: bytes) -> None:
    await net.clients[index].heartbeat(net.swarm.status(index), evidence=record)
    await net.up.coordinator.tick()


def evicted(net: kit.Net) -> set[str]:
    return {e.peer_id for e in net.up.coordinator.admission._desk._evicted.values()}


def test_a_liar_is_evicted_and_stays_out_over_restarts(tmp_path: Path) -> None:
    async def main() -> None:
        swarm = kit.Swarm()
        liar = swarm.identities[0]
        async with kit.net(tmp_path, swarm) as net:
            await net.started()
            await hand_in(net, 1, lie_of(liar, net).encode())
            assert evicted(net) == {liar.peer_id}
            with pytest.raises(NotWelcome, match="signed two votes in round 1"):
                await net.clients[0].heartbeat(swarm.status(0))
            await net.clients[2].heartbeat(swarm.status(2))
            assert net.clients[2].is_evicted(liar.peer_id)
            events = net.up.coordinator.status().events
            assert any("evicted" in e.text and "signed two votes" in e.text for e in events)
            await hand_in(net, 2, lie_of(liar, net).encode())  # known: nothing happens
            assert sum("evicted" in e.text for e in net.up.coordinator.status().events) == 1
        async with kit.net(tmp_path, swarm) as net:
            assert evicted(net) == {liar.peer_id}

    kit.run(main())


def test_what_proves_nothing_evicts_nobody_and_names_its_sender(tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path) as net:
            await net.started()
            victim, sender = (i.peer_id for i in net.swarm.identities[:2])
            stranger = lie_of(Identity.ephemeral(), net)
            forged = stranger.model_copy(update={"peer_id": victim})
            for record in (forged.encode(), b"rubbish", bytes(5000)):
                await hand_in(net, 1, record)
            assert evicted(net) == set()
            said = [e for e in net.up.coordinator.status().events if "proves nothing" in e.text]
            assert {e.source for e in said} == {sender}
            # True, but of a key that was never here: there is no end of these.
            await hand_in(net, 1, stranger.encode())
            assert evicted(net) == set()

    kit.run(main())


def test_no_epoch_names_an_evicted_liar(tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path) as net:
            await net.started()
            coordinator, liar = net.up.coordinator, net.swarm.identities[0]
            await hand_in(net, 1, lie_of(liar, net).encode())
            for index in (1, 2):
                await net.clients[index].heartbeat(net.swarm.status(index))
            await coordinator.log._epochs.open(
                coordinator.presence.alive(coordinator._steady()), 0.0
            )
            await asyncio.sleep(0)
            names = {e.peer_id for e in coordinator.log.replica.opened.electorate}
            assert names == {i.peer_id for i in net.swarm.identities[1:]}

    kit.run(main())
