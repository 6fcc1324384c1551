"""Calls of a status client whose coordinator is away, silent, newer or another."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import ssl
from pathlib import Path
from typing import Any

import grpc
import pytest

from atoll.coordinator.rpc.channel import StatusClient
from atoll.coordinator.rpc.client_errors import (
    BadReply,
    CoordinatorUnreachable,
    WrongCertificate,
)
from atoll.coordinator.run.frames import compress
from atoll.coordinator.run.invite import Invite
from atoll.coordinator.run.keys import RunKeys

NOBODY = Invite(
    addresses=("127.0.0.1:9",), run_id=bytes(32), run_key=bytes(32), tls_sha256=bytes(32)
)


def test_a_call_fails_when_another_call_closes_its_connection(
    kit: Any,
) -> None:
    """A caller that waits for a status would take a cancellation for an order to stop."""

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            client = StatusClient(NOBODY)
            client._channel = grpc.aio.insecure_channel(f"127.0.0.1:{silent.getsockname()[1]}")
            waiting = asyncio.create_task(client.status())
            accepted, _ = await asyncio.to_thread(silent.accept)
            await client._give_up(client._channel)
            with accepted, pytest.raises(CoordinatorUnreachable, match="connection was closed"):
                await waiting

    kit.run(main())


def test_a_call_that_is_cancelled_is_cancelled(kit: Any) -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            client = StatusClient(NOBODY)
            client._channel = grpc.aio.insecure_channel(f"127.0.0.1:{silent.getsockname()[1]}")
            waiting = asyncio.create_task(client.status())
            accepted, _ = await asyncio.to_thread(silent.accept)
            waiting.cancel()
            with accepted, pytest.raises(asyncio.CancelledError):
                await waiting
            await client.close()

    kit.run(main())


def test_someone_in_between_with_another_certificate(kit: Any, tmp_path: Path) -> None:
    """The first handshake sees the right certificate, gRPC then meets another server."""

    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            invite = net.up.invite
            keys = RunKeys.generate()
            (tmp_path / "key").write_bytes(keys.tls_key)
            (tmp_path / "crt").write_bytes(keys.tls_certificate)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tmp_path / "crt", tmp_path / "key")
            seen: list[bytes] = []

            async def intercept(reader: Any, writer: Any) -> None:
                seen.append(await reader.read(100))
                writer.close()

            server = await asyncio.start_server(intercept, "127.0.0.1", 0, ssl=context)
            port = server.sockets[0].getsockname()[1]
            client = StatusClient(dataclasses.replace(invite, addresses=(f"127.0.0.1:{port}",)))
            with pytest.raises(WrongCertificate, match="expected the certificate"):
                await client.status()
            server.close()
            assert all(data == b"" for data in seen)

    kit.run(main())


def test_no_coordinator_at_the_address(kit: Any) -> None:
    async def main() -> None:
        invite = Invite(
            addresses=("127.0.0.1:1", "127.0.0.1:2"),
            run_id=b"r" * 32,
            run_key=b"k" * 32,
            tls_sha256=b"t" * 32,
        )
        with pytest.raises(CoordinatorUnreachable, match=r"127\.0\.0\.1:1"):
            await StatusClient(invite).status()

    kit.run(main())


def test_a_status_of_a_newer_version_is_named_so(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            client = net.client(0)

            class Newer:
                packed = compress(b'{"run_name": "x", "run_id": "", "moods": []}')

            async def call(name: str, request: object) -> Newer:
                return Newer()

            client._call = call
            with pytest.raises(BadReply, match="use the organiser's version"):
                await client.status()

    kit.run(main())
