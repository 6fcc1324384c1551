"""A Prometheus endpoint with the run's status as gauges."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from atoll.coordinator.run.addresses import split_address
from atoll.coordinator.run.status import RunStatus

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
    "utilisation": "Fraction of the time spent training.",
    "last_seen_s": "Seconds since the last heartbeat.",
}


class Metrics:
    """Gauges of one run."""

    def __init__(self, registry: CollectorRegistry) -> None:
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
        self._peer = {
            name: Gauge(f"atoll_peer_{name}", text, ["peer_id"], registry=registry)
            for name, text in _PEER.items()
        }
        self._time = Gauge(
            "atoll_peer_time_share",
            "Fraction of the time by use.",
            ["peer_id", "use"],
            registry=registry,
        )

    @classmethod
    @contextlib.contextmanager
    def served(cls, listen: str | None) -> Iterator[Metrics | None]:
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
        for name, gauge in self._peer.items():
            gauge.clear()  # forgets the peers that are no longer listed
            for peer in status.peers:
                gauge.labels(peer.peer_id).set(getattr(peer, name))
        self._time.clear()
        for peer in status.peers:
            for use, share in peer.time_shares.items():
                self._time.labels(peer.peer_id, use).set(share)
