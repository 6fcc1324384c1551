"""A coordinator with one port, and a peer that trains with it."""

import asyncio
import socket

from atoll.coordinator.run.spec import RunSpec
from support.organiser import tiny_spec


def one_port() -> tuple[int, RunSpec]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    address = f"127.0.0.1:{port}"
    return port, tiny_spec(coordinator={"listen": address, "dht_listen": address})


def test_a_peer_trains_with_a_coordinator_that_has_one_port(organise, start):
    port, spec = one_port()
    organiser = organise(spec)
    invite = organiser.invite
    assert invite.addresses == (f"127.0.0.1:{port}",)
    assert invite.bootstrap and all(f"/tcp/{port}/p2p/" in each for each in invite.bootstrap)
    peer = start(invite)
    assert peer.join() is not None
    assert organiser.status().position == 3


def test_the_node_knows_the_true_sources_of_connections(organise, join):
    _, spec = one_port()
    organiser = organise(spec)
    joined = join(organiser.invite)
    node = organiser.up.coordinator._introduce.__self__._node

    async def seen() -> dict[str, list[str]]:
        return await node.daemon.all_remote_addresses()

    found = asyncio.run_coroutine_threadsafe(seen(), organiser._loop).result(30)
    peer = joined.peer._env.node
    (address,) = found[peer.peer_id]
    # libp2p dials from the port on which it listens.
    assert f"{address}/p2p/{peer.peer_id}" in peer.addresses
