"""D5: idle connections hold the file descriptors of the coordinator."""

from __future__ import annotations

import asyncio
from pathlib import Path
from unittest.mock import patch

from atoll.coordinator.rpc.messages import SERVER_OPTIONS
from atoll.coordinator.run.addresses import split_address
from atoll.coordinator.service import server
from support import kit


def test_a_connection_without_a_handshake_is_closed(tmp_path: Path) -> None:
    """With a tenth of the limit; the option is one of the gRPC that is installed."""
    assert dict(SERVER_OPTIONS)["grpc.server_handshake_timeout_ms"] == 10_000
    assert dict(SERVER_OPTIONS)["grpc.max_connection_idle_ms"] == 120_000
    quick = {**dict(SERVER_OPTIONS), "grpc.server_handshake_timeout_ms": 1_000}

    async def main() -> None:
        with patch.object(server, "SERVER_OPTIONS", list(quick.items())):
            async with kit.net(tmp_path / "run") as net:
                host, port = split_address(net.up.address)
                pairs = [await asyncio.open_connection(host, port) for _ in range(20)]
                async with asyncio.timeout(5):
                    for reader, writer in pairs:
                        while await reader.read(4096):
                            pass  # its settings, if any
                        writer.close()
                await net.client(0).join()

    kit.run(main())
