"""A roster that answers at once with what the last look at it gave.

A look into the DHT takes as long as the slowest node that is asked: three seconds while one of them
is dead, as after a peer or the coordinator was killed.  A round must not wait for that, and has no
need to: whom it expects it asks itself.
"""

from __future__ import annotations

from atoll.dht.roster import PeerRecord, Roster


class WatchedRoster:
    """An ``atoll.dht.roster.Roster``; whoever owns it looks every few seconds."""

    def __init__(self, roster: Roster) -> None:
        """``roster`` is the one in the DHT."""
        self._roster = roster
        self._last: dict[str, PeerRecord] | None = None

    async def publish(self, record: PeerRecord, ttl_s: float) -> None:
        """Store our record."""
        await self._roster.publish(record, ttl_s)

    async def peers(self) -> dict[str, PeerRecord]:
        """Who was in the run at the last look; looks where nobody has."""
        return self._last if self._last is not None else await self.look()

    @property
    def seen(self) -> list[PeerRecord]:
        """Who was in the run at the last look; nobody before the first."""
        return list((self._last or {}).values())

    async def look(self) -> dict[str, PeerRecord]:
        """Who is in the run now.

        Raises:
            RosterError, TransportError, TimeoutError: the DHT did not answer.
        """
        self._last = await self._roster.peers()
        return self._last

    async def leave(self) -> None:
        """Say that we are gone."""
        await self._roster.leave()
