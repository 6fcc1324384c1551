"""D5: calls that never send their message, or never read, keep everybody from the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc
import pytest

from atoll.coordinator.rpc import service_pb2 as pb
from atoll.coordinator.rpc.channel import stub
from atoll.coordinator.rpc.client import CoordinatorClient
from atoll.coordinator.rpc.messages import SERVICE
from atoll.coordinator.rpc.tls import pinned_channel
from atoll.coordinator.service import service
from atoll.coordinator.service.places import CallPlaces
from atoll.coordinator.service.service import Service
from atoll.dht.identity import Identity
from support import kit
from support.strangers import begin_calls

CONNECTIONS, CALLS = 9, 60  # of one stranger; gRPC's limit was 512 calls of all


def open_calls(calls: list[Any]) -> int:
    return sum(not call.done() for call in calls)


def test_calls_without_a_message_hold_up_nobody(tmp_path: Path) -> None:
    async def main() -> None:
        with patch.object(service, "FIRST_MESSAGE_S", 2.0):
            async with kit.net(tmp_path / "run") as net:
                clients = await net.started()
                calls = await begin_calls(net.stack, net.up.invite, CONNECTIONS, CALLS)
                async with asyncio.timeout(10):
                    while open_calls(calls) > service.UNBEGUN_OF_ONE:
                        await asyncio.sleep(0)
                for index, client in enumerate(clients):
                    await client.heartbeat(net.swarm.status(index))
                newcomer = CoordinatorClient(net.up.invite, Identity.ephemeral())
                net.stack.push_async_callback(newcomer.close)
                await newcomer.join()
                assert (await newcomer.status()).state == "training"
                async with asyncio.timeout(10):
                    codes = {await call.code() for call in calls}  # the last ones by their deadline
                assert codes == {grpc.StatusCode.RESOURCE_EXHAUSTED}

    kit.run(main())


async def endless(
    _: Service, store: object, request: pb.SnapshotRequest
) -> AsyncIterator[pb.FetchReply]:
    """Stream as slowly as a reader can make it."""
    await asyncio.Event().wait()
    yield pb.FetchReply()


def test_fetches_that_nobody_reads_cost_their_peer_alone(tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            greedy, honest, _ = await net.started()
            invite = net.up.invite
            channel = await pinned_channel(invite.addresses[0], invite.tls_sha256, timeout_s=5)
            net.stack.push_async_callback(channel.close)
            request = pb.FetchRequest(auth=greedy._auth(), snapshot=pb.SnapshotRequest())
            calls = [stub(channel, "Fetch")(request) for _ in range(3 * service.FETCHES_OF_ONE)]
            async with asyncio.timeout(10):
                while open_calls(calls) > service.FETCHES_OF_ONE:
                    await asyncio.sleep(0)
            leaves = [index async for index, _ in honest.fetch_leaves(0)]
            assert leaves == [0, 1]
            assert open_calls(calls) == service.FETCHES_OF_ONE
            for call in calls:
                call.cancel()

    with patch.object(Service, "_snapshot", endless):
        kit.run(main())


def test_a_stranger_without_a_session_fetches_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            await net.started()
            invite = net.up.invite
            channel = await pinned_channel(invite.addresses[0], invite.tls_sha256, timeout_s=5)
            net.stack.push_async_callback(channel.close)
            name = net.swarm.identities[0].peer_id
            auth = pb.Auth(peer_id=name, session=bytes(40))
            call = stub(channel, "Fetch")(pb.FetchRequest(auth=auth, leaves=pb.LeafRange()))
            assert await call.code() == grpc.StatusCode.UNAUTHENTICATED
            call = channel.stream_unary(f"/{SERVICE}/Heartbeat")()
            await call.done_writing()
            assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT

    kit.run(main())


async def hold(places: CallPlaces, holder: str, ended: list[str], timeout_s: float = 60.0) -> None:
    with contextlib.suppress(TimeoutError):
        async with places.held(holder, timeout_s):
            await asyncio.Event().wait()
    ended.append(holder)


def test_whoever_holds_most_makes_room() -> None:
    async def main() -> None:
        places, ended = CallPlaces(of_one=3, total=5), list[str]()
        async with asyncio.TaskGroup() as holders:
            tasks = []

            async def enter(*names: str) -> None:
                for name in names:
                    tasks.append(holders.create_task(hold(places, name, ended)))
                    for _ in range(4):
                        await asyncio.sleep(0)

            await enter("b", "a", "a", "a", "a")  # its own oldest
            assert ended == ["a"] and tasks[1].done() and len(places) == 4
            await enter("c", "d")  # the oldest of whoever has most
            assert ended == ["a", "a"] and tasks[2].done() and len(places) == 5
            for task in tasks:
                task.cancel()
        assert len(places) == 0 and not places._held

    kit.run(main())


def test_a_place_has_a_deadline_of_its_own() -> None:
    async def main() -> None:
        places = CallPlaces(of_one=3, total=5)
        with pytest.raises(TimeoutError):
            async with places.held("a", 0.0):
                await asyncio.Event().wait()
        assert len(places) == 0

    kit.run(main())
