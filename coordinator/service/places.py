"""Places for calls: those that wait or stream at once, bounded for each holder and for all.

    async with places.held(address, timeout_s=5.0):
        ...                            TimeoutError: it took too long, or its place was needed

Nobody is refused for being late. A holder at its limit loses its own oldest place, and at the limit
of all, whoever holds most loses its oldest one. So strangers that hold places for as long as they
may take none from those that use theirs for a moment, not even from behind the same router.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class CallPlaces:
    """Places by holder, each with a deadline."""

    def __init__(self, *, of_one: int, total: int) -> None:
        """Bound the places of one holder, and of all together."""
        self._of_one = of_one
        self._total = total
        self._held: dict[str, dict[asyncio.Timeout, None]] = {}  # each holder's oldest first
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @contextlib.asynccontextmanager
    async def held(self, holder: str, timeout_s: float | None = None) -> AsyncIterator[None]:
        """Hold a place. Raises TimeoutError in the block when its time is over."""
        self._make_room(holder)
        async with asyncio.timeout(timeout_s) as place:
            self._held.setdefault(holder, {})[place] = None
            self._count += 1
            try:
                yield
            finally:
                self._release(holder, place)

    def _make_room(self, holder: str) -> None:
        if len(self._held.get(holder, ())) >= self._of_one:
            self._end_oldest(holder)
        elif self._count >= self._total:
            self._end_oldest(max(self._held, key=lambda each: len(self._held[each])))

    def _end_oldest(self, holder: str) -> None:
        place = next(iter(self._held[holder]))
        self._release(holder, place)
        if not place.expired():
            place.reschedule(asyncio.get_running_loop().time())

    def _release(self, holder: str, place: asyncio.Timeout) -> None:
        places = self._held.get(holder, {})
        if place in places:
            del places[place]
            self._count -= 1
        if not places:
            self._held.pop(holder, None)
