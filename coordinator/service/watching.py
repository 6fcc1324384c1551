"""Report which ports of a running coordinator were reached from outside (`ports.Ports`)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from atoll.coordinator import notices
from atoll.coordinator.coordinator import Coordinator
from atoll.coordinator.ports import LOOK_S, Ports
from atoll.dht.transport import TransportError

log = logging.getLogger(__name__)

Connections = Callable[[], Awaitable[Mapping[str, Sequence[str]]]]
"""Returns the addresses of the peers connected directly, by PeerID."""


class PortsWatch:
    """Passes to `ports` what joiners do, and its findings to the run's events."""

    def __init__(
        self, coordinator: Coordinator, steady: Callable[[], float] = time.monotonic
    ) -> None:
        """`ports` is set once both ports are known."""
        self.ports: Ports | None = None
        self._run = coordinator
        self._steady = steady

    def joined(self, peer_id: str, host: str) -> None:
        """Note that a peer joined from an IP address."""
        if self.ports is not None:
            self._report(self.ports.joined(peer_id, host), self.ports)

    def probed(self, peer_id: str, *, is_reached: bool) -> None:
        """Note that a joiner was dialed back."""
        if self.ports is not None:
            self.ports.probed(peer_id, is_reached=is_reached, now_s=self._steady())

    async def keep_looking(self, connections: Connections) -> None:
        """Look at the connections while joiners are watched."""
        while True:
            await asyncio.sleep(LOOK_S)
            # p2pd may restart meanwhile; the next look asks the new one.
            try:
                await self.look(connections)
            except (TransportError, TimeoutError, OSError) as error:
                log.debug("cannot list the connections: %s", error)

    async def look(self, connections: Connections) -> None:
        """Look at the connections once."""
        ports = self.ports
        if ports is None or not ports.is_watching:
            return
        connected = await connections()
        now_s = self._steady()
        alive = {known.status.peer_id for known in self._run.presence.alive(now_s)}
        self._report(ports.look(alive, connected, now_s), ports)

    def _report(self, line: str, ports: Ports) -> None:
        found = {"grpc": ports.grpc.found, "p2p": ports.p2p.found}
        if line and ports.is_wrong:
            self._run.report("warning", notices.ports_closed(line, **found))
        elif line:
            self._run.report("info", notices.ports_found(line, **found))
