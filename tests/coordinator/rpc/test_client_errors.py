"""A failed call as one short message."""

from __future__ import annotations

import grpc
import pytest

from atoll.coordinator.rpc.client_errors import (
    from_grpc,
)


@pytest.mark.parametrize(
    ("code", "details", "told"),
    [
        (
            grpc.StatusCode.UNAVAILABLE,
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:7700: Failed "
            "to connect to remote host: Connection refused",
            "host:7700: connection refused",
        ),
        (grpc.StatusCode.UNAVAILABLE, "Socket closed", "host:7700: socket closed"),
        (grpc.StatusCode.UNAVAILABLE, "odd:", "host:7700: odd:"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", "host:7700: no answer in time"),
    ],
)
def test_the_reason_of_a_failed_call_is_short(
    code: grpc.StatusCode, details: str, told: str
) -> None:
    metadata = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(code, metadata, metadata, details=details)
    assert str(from_grpc(error, "host:7700")) == told
