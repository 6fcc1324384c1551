"""The front of gRPC: what it counts, and how libp2p shares its port."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from atoll.coordinator.run.spec import RunSpec
from atoll.coordinator.service import front as fronts
from atoll.coordinator.service.front import Front
from atoll.coordinator.service.server import InUse


class Echo(asyncio.Protocol):
    """Sends its name and everything that it gets."""

    def __init__(self, name: bytes) -> None:
        self.name = name

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        port = transport.get_extra_info("peername")[1]
        transport.write(b"%s %d\n" % (self.name, port))

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)

    def pause_writing(self) -> None:
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        self.transport.resume_reading()


async def started() -> tuple[Front, int, list[asyncio.Server]]:
    loop = asyncio.get_running_loop()
    inside = [
        await loop.create_server(lambda n=name: Echo(n), "127.0.0.1", 0) for name in (b"G", b"P")
    ]
    ports = [server.sockets[0].getsockname()[1] for server in inside]
    front = Front(*ports)
    await front.listen(["127.0.0.1"], 0)
    return front, front.port, inside


def run(test: Any) -> None:
    async def main() -> None:
        front, port, inside = await started()
        try:
            await asyncio.wait_for(test(front, port), 20)
        finally:
            await front.close()
            for server in inside:
                server.close()
            await asyncio.sleep(0.05)  # in which the listeners inside lose their connections

    asyncio.run(main())


@pytest.mark.parametrize(("first", "name"), [(b"\x16\x03", b"G"), (b"\x13/multi", b"P")])
def test_the_first_byte_chooses_and_the_true_source_is_known(first: bytes, name: bytes) -> None:
    async def test(front: Front, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        own = writer.get_extra_info("sockname")[1]
        writer.write(first)
        kind, source = (await reader.readline()).split()
        assert kind == name and await reader.readexactly(len(first)) == first
        assert front.caller(f"ipv4:127.0.0.1:{source.decode()}") == f"ipv4:127.0.0.1:{own}"
        inner = f"/ip4/127.0.0.1/tcp/{source.decode()}"
        assert front.multiaddr(inner) == f"/ip4/127.0.0.1/tcp/{own}"
        body = bytes(5_000_000)
        writer.write(body)
        assert await reader.readexactly(len(body)) == body
        writer.close()
        while front._links or front._sources:
            await asyncio.sleep(0.01)
        assert not front._of_one and not front._silent

    run(test)


def test_anything_else_is_closed() -> None:
    async def test(front: Front, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\n")
        with pytest.raises(OSError):
            assert not await reader.read()
            raise ConnectionError
        writer.close()

    run(test)


def test_silent_strangers_are_closed_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fronts, "FIRST_BYTE_S", 0.2)
    monkeypatch.setattr(fronts, "MAX_SILENT", 3)

    async def test(front: Front, port: int) -> None:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(6)]
        await asyncio.sleep(0.05)
        assert len(front._silent) == 3
        while front._links:
            await asyncio.sleep(0.02)
        for _, writer in held:
            writer.close()

    run(test)


def test_one_source_cannot_take_all_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fronts, "MAX_OF_ONE", 2)

    async def test(front: Front, port: int) -> None:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        for _, writer in held:
            writer.write(b"\x13")
        await asyncio.sleep(0.1)
        assert len(front._links) == 2
        for _, writer in held:
            writer.close()

    run(test)


async def refused_of(port: int, count: int) -> int:
    """Open connections that begin like TLS; return how many are closed at once."""
    held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
    for _, writer in held:
        writer.write(bytes([fronts.TLS]))
    await asyncio.sleep(0.2)
    closed = 0
    for reader, writer in held:
        closed += reader.at_eof() or reader.exception() is not None
        writer.close()
    return closed


def test_connections_take_no_more_than_half_of_the_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fronts, "open_files", lambda: 18)

    async def test(front: Front, port: int) -> None:
        assert await refused_of(port, 5) == 2

    run(test)


def test_a_coordinator_counts_its_connections_on_a_port_of_its_own_too(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fronts, "MAX_OF_ONE", 3)

    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            port = int(net.up.address.rpartition(":")[2])
            assert await refused_of(port, 5) == 2

    kit.run(main())


def test_a_reader_that_stalls_stops_the_sender() -> None:
    async def test(front: Front, port: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as stalled:
            stalled.setblocking(False)
            loop, sent = asyncio.get_running_loop(), 0
            try:
                async with asyncio.timeout(0.5):
                    while True:
                        await loop.sock_sendall(stalled, b"\x13" * 65536)
                        sent += 65536
            except TimeoutError:
                pass
            assert sent < 64 << 20
            assert all(
                side.transport.get_write_buffer_size() < 1 << 20
                for link in front._links
                for side in (link, link.other)
                if side is not None and side.transport is not None
            )

    run(test)


@pytest.mark.parametrize(
    "name", ["ipv4:127.0.0.1:9", "ipv4:1.2.3.4:9", "unix:", "ipv6:[::1]:9", ""]
)
def test_other_callers_keep_their_names(name: str) -> None:
    async def main() -> None:
        front = Front(1, 2)
        assert front.caller(name) == name and front.multiaddr(name) == name
        await front.close()

    asyncio.run(main())


def test_a_taken_port_is_refused_with_the_remedy(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            fields = kit.SPEC.model_dump()
            fields["coordinator"] |= {"listen": address, "dht_listen": address}
            with pytest.raises(InUse, match="--listen"):
                async with kit.net(tmp_path / "run", spec=RunSpec.from_dict(fields)):
                    pass

    kit.run(main())
