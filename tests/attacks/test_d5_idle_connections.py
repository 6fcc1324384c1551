"""D5: idle connections hold the file descriptors of the coordinator."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

from atoll.coordinator.rpc.messages import SERVER_OPTIONS
from atoll.coordinator.run.addresses import split_address
from atoll.coordinator.service import front, server
from support import kit


def test_a_connection_without_a_handshake_is_closed(tmp_path: Path) -> None:
    """With a tenth of the limits; the options are some of the gRPC that is installed.

    Silent connections do not come past the front. Those that begin like TLS are closed by gRPC.
    """
    assert front.FIRST_BYTE_S == 10.0
    assert dict(SERVER_OPTIONS)["grpc.server_handshake_timeout_ms"] == 10_000
    assert dict(SERVER_OPTIONS)["grpc.max_connection_idle_ms"] == 120_000
    quick = {**dict(SERVER_OPTIONS), "grpc.server_handshake_timeout_ms": 1_000}

    async def main() -> None:
        quick_handshakes = patch.object(server, "SERVER_OPTIONS", list(quick.items()))
        with quick_handshakes, patch.object(front, "FIRST_BYTE_S", 1.0):
            async with kit.net(tmp_path / "run") as net:
                host, port = split_address(net.up.address)
                pairs = [await asyncio.open_connection(host, port) for _ in range(20)]
                for _, writer in pairs[::2]:
                    writer.write(bytes([front.TLS]))
                async with asyncio.timeout(5):
                    for reader, writer in pairs:
                        with suppress(ConnectionError):  # aborted, or closed
                            while await reader.read(4096):
                                pass  # its settings, if any
                        writer.close()
                await net.client(0).join()

    kit.run(main())
