"""The coordinator's TCP port: it counts connections, and gRPC may share it with libp2p.

gRPC itself accepts whoever completes a TLS handshake. So it listens on loopback only, and the front
copies connections to it in both directions. Its caller then is 127.0.0.1 with the port from which
we dialed; `caller` and `multiaddr` turn that into the true source: limits by source, dial-backs and
the addresses at which relays see peers depend on it.

Strangers can hold no more than `MAX_CONNECTIONS`, no source more than `MAX_OF_ONE`, and no silent
one for longer than `FIRST_BYTE_S`. A copy reads only what the other side takes.

If libp2p shares the port, the first byte of a connection tells the two apart: a TLS client begins
with a handshake record, 0x16, and a libp2p dialer with the length of "/multistream/1.0.0", 0x13.
Either waits for no byte from us.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections import Counter
from collections.abc import Sequence
from typing import cast

from atoll.coordinator.policies import source_of
from atoll.dht.p2pd import open_files
from atoll.dht.tasks import Tasks

log = logging.getLogger(__name__)

TLS, MULTISTREAM = 0x16, 0x13
MAX_CONNECTIONS = 4096  # a peer has two or three
FILES = 3  # of a connection: both of its ends here, and that of gRPC
SPARE_FILES = 2  # one in so many descriptors may be of a connection
MAX_OF_ONE = 512  # from one address: a lab behind one router
MAX_SILENT = 512  # that have not sent their first byte
FIRST_BYTE_S = 10.0  # dialers send it at once
DIAL_S = 5.0  # to a port of this machine, which answers at once unless it is overloaded
BACKLOG = 512  # as many as may be silent
_LOOPBACK = "127.0.0.1"
_MULTIADDR = re.compile(r"/ip4/127\.0\.0\.1/tcp/(\d+)(/.*)?")


class Front:
    """Listens on one port and passes connections to gRPC, and to p2pd if that shares the port."""

    def __init__(self, grpc_port: int, p2p_port: int | None = None) -> None:
        """Pass connections to these ports of loopback."""
        self.p2p_port = p2p_port
        self._targets = {TLS: grpc_port}
        if p2p_port is not None:
            self._targets[MULTISTREAM] = p2p_port
        self._sources: dict[int, tuple[str, int]] = {}
        """True sources by the port from which we dialed."""
        self._of_one: Counter[str] = Counter()
        self._servers: list[asyncio.Server] = []
        self._links: set[_Splice] = set()
        self._silent: set[_Splice] = set()
        self._tasks = Tasks()

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._servers[0].sockets[0].getsockname()[1])

    async def listen(self, hosts: Sequence[str], port: int) -> None:
        """Accept connections; port 0 is any free one.

        Raises:
            OSError: one of the addresses is taken, or not this machine's.
        """
        loop = asyncio.get_running_loop()
        for host in hosts:
            server = await loop.create_server(lambda: _Outside(self), host, port, backlog=BACKLOG)
            self._servers.append(server)

    async def close(self) -> None:
        """Close all connections."""
        for server in self._servers:
            server.close()
        await self._tasks.close()
        for link in list(self._links):
            link.abort()
            if link.other is not None:
                link.other.abort()
        await asyncio.sleep(0)  # in which their sockets close

    def caller(self, peer: str) -> str:
        """Return gRPC's name of a caller with its true source."""
        kind, _, rest = peer.partition(":")
        host, _, port = rest.rpartition(":")
        found = self._sources.get(int(port)) if port.isdigit() and host == _LOOPBACK else None
        if kind != "ipv4" or found is None:
            return peer
        return _caller(found)

    def multiaddr(self, address: str) -> str:
        """Return the multiaddr of a connection with its true source."""
        match = _MULTIADDR.fullmatch(address)
        found = self._sources.get(int(match[1])) if match else None
        if match is None or found is None:
            return address
        version = 6 if ":" in found[0] else 4
        return f"/ip{version}/{found[0]}/tcp/{found[1]}{match[2] or ''}"

    def enter(self, link: _Splice) -> bool:
        """Count a connection; return False if there is no room for it."""
        most = min(MAX_CONNECTIONS, open_files() // (FILES * SPARE_FILES))
        is_full = len(self._links) >= most or len(self._silent) >= MAX_SILENT
        if is_full or self._of_one[link.source] >= MAX_OF_ONE:
            return False
        self._of_one[link.source] += 1
        self._links.add(link)
        self._silent.add(link)
        return True

    def leave(self, link: _Splice) -> None:
        """Count a connection no longer."""
        if link not in self._links:
            return
        self._links.discard(link)
        self._silent.discard(link)
        self._of_one[link.source] -= 1
        if not self._of_one[link.source]:
            del self._of_one[link.source]

    def spoke(self, link: _Splice, first: bytes) -> None:
        """Pass a connection on by its first byte."""
        self._silent.discard(link)
        port = self._targets.get(first[0])
        if port is None:
            link.abort()
        else:
            self._tasks.spawn(self._dial(link, first, port))

    async def _dial(self, link: _Splice, first: bytes, port: int) -> None:
        inside = _Inside(self._sources, link)
        try:
            async with asyncio.timeout(DIAL_S):
                loop = asyncio.get_running_loop()
                await loop.create_connection(lambda: inside, _LOOPBACK, port)
        except (OSError, TimeoutError) as error:
            log.debug("cannot connect to the inner listener: %s", error)
            link.abort()
            return
        if link.transport is None or link.transport.is_closing():
            inside.abort()
            return
        inside.send(first)
        link.other = inside
        link.transport.resume_reading()


class _Splice(asyncio.Protocol):
    """One side of a connection; what it receives goes to the other side."""

    def __init__(self, other: _Splice | None = None) -> None:
        self.other = other
        self.transport: asyncio.Transport | None = None
        self.source = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        # A host that vanished would hold its place; TCP finds it out in a while.
        self.transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1
        )

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.send(data)

    def send(self, data: bytes) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.resume_reading()

    def eof_received(self) -> bool:
        """Close both: gRPC and libp2p end connections whole."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()  # sends what it was given before

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


class _Outside(_Splice):
    """The side of the stranger."""

    def __init__(self, front: Front) -> None:
        super().__init__()
        self._front = front
        self._is_due: asyncio.TimerHandle | None = None
        self._has_spoken = False
        self.address = ("", 0)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        host, port = transport.get_extra_info("peername")[:2]
        self.address = (host.partition("%")[0], port)
        self.source = source_of(_caller(self.address))
        if not self._front.enter(self):
            self.abort()
            return
        self._is_due = asyncio.get_running_loop().call_later(FIRST_BYTE_S, self.abort)

    def data_received(self, data: bytes) -> None:
        if self._has_spoken:
            super().data_received(data)
            return
        self._has_spoken = True
        if self._is_due is not None:
            self._is_due.cancel()
        if self.transport is not None:
            self.transport.pause_reading()  # until the listener inside is connected
        self._front.spoke(self, data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._is_due is not None:
            self._is_due.cancel()
        self._front.leave(self)
        super().connection_lost(exc)


class _Inside(_Splice):
    """The side of gRPC or p2pd."""

    def __init__(self, sources: dict[int, tuple[str, int]], link: _Splice) -> None:
        super().__init__(link)
        self._sources = sources
        self._port = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._port = transport.get_extra_info("sockname")[1]
        assert isinstance(self.other, _Outside)
        self._sources[self._port] = self.other.address

    def connection_lost(self, exc: Exception | None) -> None:
        self._sources.pop(self._port, None)
        super().connection_lost(exc)


def _caller(address: tuple[str, int]) -> str:
    host, port = address
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
