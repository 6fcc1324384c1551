"""Shared by the client and the server of the gRPC service: methods, limits, deadlines, versions.

The messages are in service.proto; `python -m grpc_tools.protoc -I LINKS --python_out=LINKS
--pyi_out=LINKS atoll/coordinator/rpc/service.proto` regenerates service_pb2, with LINKS a folder in
which `atoll/coordinator` is a link to this one. The method table below replaces the generated
service classes, which would tie the package to one release of grpcio.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

# Set before grpc is imported: it would warn on stderr at every fork of a process that uses it
# (p2pd is started that way) and about every client whose TLS handshake fails.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from atoll.coordinator.rpc import service_pb2 as pb

PROTOCOL: Final = 4  # raised with a change that the other side cannot read
SERVICE: Final = "atoll.coordinator.v1.Coordinator"

MAX_MESSAGE_BYTES: Final = 4 << 20  # to the coordinator; gRPC refuses more before parsing
MAX_RECORD_BYTES: Final = 2 << 20  # an entry of 10,000 members
MAX_REPLY_BYTES: Final = 32 << 20  # a layout of 100,000 names, or leaf digests of a 1 TiB state
CHUNK_BYTES: Final = 1 << 20  # of a body, which may be larger than any message
MAX_ENTRIES: Final = 4096  # of one Fetch; 12 rounds are usual
MAX_REPORTS: Final = 32  # events or traces of one heartbeat

CALL_TIMEOUT_S: Final = 10.0  # for a call with small messages, connecting included
PROGRESS_TIMEOUT_S: Final = 15.0  # for one message of a stream: 1 MiB at 0.6 Mbit/s
PROBE_TIMEOUT_S: Final = 3.0  # for a dial-back: a router that drops it gives no answer
PROBE_NONCE_BYTES: Final = 16  # 128 bits, which nobody guesses
NONCE_TTL_S: Final = 60.0  # for a peer to sign a challenge
HEARTBEAT_S: Final = 1.0  # about the age of what the dashboard shows
MAX_HEARTBEAT_S: Final = 60.0  # a peer that is asked for fewer reports sends them at this pace
ALIVE_S: Final = 10.0  # a peer that is silent for longer, and for three heartbeats, is gone

# A connection that a router has forgotten is noticed within half a minute by both sides; without
# pings a call on it would wait for its own deadline, and the server would keep its socket.
_PING_EVERY_MS, _PONG_WITHIN_MS = 20_000, 10_000

CHANNEL_OPTIONS: Final[Sequence[tuple[str, Any]]] = (
    ("grpc.max_receive_message_length", MAX_REPLY_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # gRPC would obey https_proxy even for a coordinator on this machine or in its network, and a
    # proxy carries nothing to the run's second port: see `proxies`.
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5000),
    ("grpc.keepalive_time_ms", _PING_EVERY_MS),
    ("grpc.keepalive_timeout_ms", _PONG_WITHIN_MS),
)
SERVER_OPTIONS: Final[Sequence[tuple[str, Any]]] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_REPLY_BYTES),
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.max_concurrent_streams", 64),
    ("grpc.so_reuseport", 0),  # a second coordinator on the port must fail to bind
    ("grpc.keepalive_time_ms", _PING_EVERY_MS),
    ("grpc.keepalive_timeout_ms", _PONG_WITHIN_MS),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # An idle socket costs a file descriptor, of which a process has 1,024 by default. A handshake
    # takes four round trips; gRPC's own limit is 120 s.
    ("grpc.server_handshake_timeout_ms", _PONG_WITHIN_MS),
    # Twice the longest pause between heartbeats. A channel that was closed connects again.
    ("grpc.max_connection_idle_ms", 120_000),
)


@dataclass(frozen=True, kw_only=True)
class ServiceMethod:
    """One method of the service."""

    name: str
    request: Any
    """Message class of the request."""
    reply: Any
    streams_in: bool = False
    streams_out: bool = False

    @property
    def path(self) -> str:
        """The method's path in gRPC."""
        return f"/{SERVICE}/{self.name}"


METHODS: Final = (
    ServiceMethod(name="Challenge", request=pb.ChallengeRequest, reply=pb.ChallengeReply),
    ServiceMethod(name="Join", request=pb.JoinRequest, reply=pb.JoinReply),
    ServiceMethod(name="Probe", request=pb.ProbeRequest, reply=pb.ProbeReply),
    ServiceMethod(name="Heartbeat", request=pb.HeartbeatRequest, reply=pb.HeartbeatReply),
    ServiceMethod(
        name="Publish",
        request=pb.PublishRequest,
        reply=pb.PublishReply,
        streams_in=True,
        streams_out=True,
    ),
    ServiceMethod(name="Fetch", request=pb.FetchRequest, reply=pb.FetchReply, streams_out=True),
    ServiceMethod(name="Status", request=pb.StatusRequest, reply=pb.StatusReply),
    ServiceMethod(name="Order", request=pb.OrderRequest, reply=pb.OrderReply),
    ServiceMethod(name="Invites", request=pb.InvitesRequest, reply=pb.InvitesReply),
)


def join_payload(run_id: bytes, nonce: bytes) -> bytes:
    """Return the bytes that a peer's identity key signs to join."""
    return b"atoll join 1" + run_id + nonce
