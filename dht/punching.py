"""Direct connections between two peers behind NATs, through holes that they make for each other.

A and B have talked through a relay, which told each where it sees the other come from.

1. A dials B's address. B's router drops that, but A's router now lets in what comes from there.
2. A asks B, through the relay, to dial A's address. That passes A's router if both routers give a
   port of the inside the same port outside whomever it talks to, as most do.
3. If not, A dials once more: B's router has seen B dial A.

libp2p's own hole punching (DCUtR) needs its relays, and four observers on as many addresses before
a peer believes its own; within 45 s it made no hole in any of our tests. Here no TCP connection is
opened from both sides at once, so neither has to change its part in libp2p's handshake.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from atoll.dht.addresses import is_public
from atoll.dht.libp2p import LibP2PTransport
from atoll.dht.refusals import RefusalCode
from atoll.dht.tasks import Tasks
from atoll.dht.transport import Refused, TransportError

logger = logging.getLogger(__name__)

METHOD = "punch"
OPEN_S = 1.0  # to send the first SYN; nothing answers, and p2pd counts in seconds
DIAL_S = 3.0  # through a hole: three round trips of a bad link
BACKOFF_S = 6.0  # libp2p dials an address again 5 s after it failed
RETRY_S = 600.0  # routers seldom change, and most attempts that succeed do so at the first try


class Punching:
    """The holes of one node."""

    def __init__(self, transport: LibP2PTransport) -> None:
        """Answer the requests of others from now on."""
        self.on_hole: Callable[[str], None] = lambda peer: None
        """called with the PeerID of a peer that we asked and that is connected now"""
        self._transport = transport
        self._tasks = Tasks()
        self._next_s: dict[str, float] = {}
        self._dialing: set[str] = set()
        transport.serve(METHOD, self._serve)

    async def close(self) -> None:
        """End all attempts."""
        await self._tasks.close()

    def look(self) -> None:
        """Begin an attempt with each relayed peer that is due; the lower PeerID of two asks."""
        now_s = asyncio.get_running_loop().time()
        relayed = self._transport.relayed
        self._next_s = {peer: at_s for peer, at_s in self._next_s.items() if peer in relayed}
        for peer in relayed:
            is_due = now_s >= self._next_s.get(peer, 0.0)
            if is_due and self._transport.peer_id < peer and self._address(peer):
                self._next_s[peer] = now_s + RETRY_S
                self._tasks.spawn(self._punch(peer))

    def _address(self, peer: str) -> str:
        """Return where a relay sees the peer; empty if we should not dial that."""
        address = self._transport.seen_at(peer)
        return address if address and is_public(address) else ""

    async def _punch(self, peer: str) -> None:
        await self._dial(peer, OPEN_S)
        with suppress(TransportError, TimeoutError):
            await self._transport.call(peer, METHOD, b"", timeout_s=2 * DIAL_S + OPEN_S)
        if not await self._transport.is_connected(peer):
            await asyncio.sleep(BACKOFF_S)
            await self._dial(peer, DIAL_S)
        if await self._transport.is_connected(peer):
            self.on_hole(peer)

    async def _serve(self, remote: str, body: bytes) -> bytes:
        if body or remote in self._dialing:
            raise Refused(RefusalCode.BAD_MESSAGE, "expected one empty request at a time")
        await self._dial(remote, DIAL_S)
        return b""

    async def _dial(self, peer: str, timeout_s: float) -> None:
        address = self._address(peer)
        if not address or peer in self._dialing:
            return
        self._dialing.add(peer)
        try:
            await self._transport.dial_once(peer, [address], timeout_s=timeout_s)
        except (TransportError, TimeoutError) as error:
            logger.debug("no hole to %s yet: %s", peer, error)
        finally:
            self._dialing.discard(peer)
