"""Prometheus endpoints: a run's status as gauges, at its coordinator, and a peer's own.

A peer's gauges have the same names and labels at both, so one board shows either.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Self

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from atoll.coordinator.run.addresses import split_address
from atoll.coordinator.run.status import PeerStatus, RunStatus

_RUN = {
    "position": "Entries in the coordinator's log.",
    "epoch": "Current epoch.",
    "tokens_total": "Tokens in all rounds.",
    "tokens_per_s": "Tokens per second of all peers together.",
    "utilisation": "Mean fraction of the time that peers spend training.",
    "loss": "Training loss of the last round, in nats per token.",
    "valid_loss": "Validation loss, in nats per token.",
}
_COPIES = {
    "position": "Entries in the newest copy of the run.",
    "age_s": "Seconds since a copy of the run was found current.",
    "failing": "1 while the target of copies fails, else 0.",
}
_PEER = {
    "tokens_per_s": "Tokens per second.",
    "position": "Entries applied.",
    "wire_bytes_sent": "Bytes sent, as counted on the wire.",
    "wire_bytes_received": "Bytes received, as counted on the wire.",
    "relayed_bytes": "Bytes sent and received through relays.",
    "utilisation": "Fraction of the time spent training.",
    "uplink_use": "Fraction of the uplink's capacity in use.",
    "downlink_use": "Fraction of the downlink's capacity in use.",
    "rounds_seen": "Rounds decided since this process began to train.",
    "rounds_counted": "Rounds of these that took its work, at least in part.",
    "tokens_counted": "Tokens of the work that they took.",
    "last_seen_s": "Seconds since the last heartbeat.",
}
_MEASURED = {
    "loss": "Training loss, in nats per token.",
    "valid_loss": "Validation loss, in nats per token.",
}


class Served:
    """Gauges behind an HTTP address."""

    def __init__(self, registry: CollectorRegistry) -> None:
        raise NotImplementedError

    @classmethod
    @contextlib.contextmanager
    def served(cls, listen: str | None) -> Iterator[Self | None]:
        """Serve HTTP at 'host:port' inside the block; do nothing without an address.

        Raises:
            OSError: the address is in use or not ours; the error names it.
        """
        if listen is None:
            yield None
            return
        host, port = split_address(listen)
        registry = CollectorRegistry()
        metrics = cls(registry)
        try:
            server, thread = start_http_server(port, host, registry)
        except OSError as error:
            reason = f"{error.strerror}; choose another address for the metrics"
            raise OSError(error.errno, reason, listen) from error
        try:
            yield metrics
        finally:
            server.shutdown()
            server.server_close()
            thread.join(5)


class PeerMetrics(Served):
    """Gauges of peers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._peer = {
            name: Gauge(f"atoll_peer_{name}", text, ["peer_id"], registry=registry)
            for name, text in (_PEER | _MEASURED).items()
        }
        self._time = Gauge(
            "atoll_peer_time_share",
            "Fraction of the time by use.",
            ["peer_id", "use"],
            registry=registry,
        )
        self._reach = Gauge(
            "atoll_peer_reach",
            "1 for the way in which others reach it: direct, upnp, hole or relayed.",
            ["peer_id", "reach"],
            registry=registry,
        )

    def set_peers(self, peers: Iterable[PeerStatus]) -> None:
        """Set the gauges to these statuses, and forget other peers."""
        for gauge in (*self._peer.values(), self._time, self._reach):
            gauge.clear()
        for peer in peers:
            for name, gauge in self._peer.items():
                value = getattr(peer, name)
                if value is not None:
                    gauge.labels(peer.peer_id).set(value)
            for use, share in peer.time_shares.items():
                self._time.labels(peer.peer_id, use).set(share)
            if peer.reach:
                self._reach.labels(peer.peer_id, peer.reach).set(1)


class Metrics(PeerMetrics):
    """Gauges of one run."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self._run = {
            name: Gauge(f"atoll_run_{name}", text, registry=registry) for name, text in _RUN.items()
        }
        self._copies = {
            name: Gauge(f"atoll_copies_{name}", text, registry=registry)
            for name, text in _COPIES.items()
        }
        for gauge in self._copies.values():
            gauge.set(float("nan"))  # none are kept, as far as is known
        self._alive = Gauge("atoll_run_peers", "Peers online.", registry=registry)
        self._state = Gauge(
            "atoll_run_state",
            "1 for the run's state: waiting, training, paused, stalled or finished.",
            ["state"],
            registry=registry,
        )

    def update(self, status: RunStatus) -> None:
        """Set the gauges to this status."""
        for name, gauge in self._run.items():
            value = getattr(status, name)
            gauge.set(float("nan") if value is None else value)
        if (copies := status.copies) is not None:
            age_s = float("nan") if copies.at is None else status.now - copies.at
            for name, value in (
                ("position", copies.position),
                ("age_s", age_s),
                ("failing", bool(copies.failing)),
            ):
                self._copies[name].set(value)
        self._alive.set(sum(peer.state not in ("left", "gone") for peer in status.peers))
        self._state.clear()
        self._state.labels(status.state).set(1)
        self.set_peers(status.peers)
