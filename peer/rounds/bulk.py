"""Bulk data over a link with a cap: what is sent (`Throttle`) and what is asked for (`Inflow`).

Only asking can be bounded on the way in. A donor sends what it is asked for as fast as it can, and
libp2p and gRPC take megabytes before a reader that waits holds them up. So a request waits for its
bytes' time at the rate, as if they were sent. That alone is not enough: a body of a megabyte comes
at once, what a slow donor owes comes beside what a fast one gives, and rounds, records and answers
come unasked. So a request also waits until all that came within `SPAN_S`, as counted on the wire,
leaves room for it and for what is asked for and not yet here. After the last request of any span,
nothing comes but what has found room, and what comes unasked, for which some is left.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext

BITS = 8e-6  # Mbit in a byte
SPAN_S = 10.0  # in which no more comes than the rate allows
LOOK_S = 0.25  # between two looks for room
# Of the rate, for requests, whatever comes unasked: a peer whose rounds fill its cap has to catch
# up all the same. As on the way out.
LEAST_SHARE = 1 / 3
# At once: they share what a donor with the least cap gives, and it serves no more of them.
MAX_STREAMS = 2
# Of a span's bytes, for which a request that is longer waits: it never finds room for all of it.
MOST_SHARE = 0.5

Came = Callable[[int], None]
"""Takes the number of bytes that have come of what was asked for."""


class Throttle:
    """Lets bulk pass at no more than so many bytes a second, first come, first served."""

    def __init__(self) -> None:
        """Hold back nobody until `rate_mbit_s` is set."""
        self.rate_mbit_s = math.inf
        self._free_at_s = 0.0
        self._spare_bytes = 0
        """which have had their time"""

    @property
    def is_limited(self) -> bool:
        """Return whether there is a limit."""
        return math.isfinite(self.rate_mbit_s)

    async def take(self, num_bytes: int) -> None:
        """Wait until these bytes, and all before them, have had their time.

        Also the first of a burst waits for its own: several streams that begin at once would
        otherwise pass a megabyte each, which is seconds of a link with a low cap.
        """
        spare = min(num_bytes, self._spare_bytes)
        self._spare_bytes -= spare
        num_bytes -= spare
        now_s = asyncio.get_running_loop().time()
        self._free_at_s = max(self._free_at_s, now_s) + num_bytes * BITS / self.rate_mbit_s
        if self._free_at_s > now_s:
            await asyncio.sleep(self._free_at_s - now_s)

    def give_back(self, num_bytes: int) -> None:
        """Let others have the time of bytes that have waited for it, and did not pass."""
        self._spare_bytes += num_bytes


class Inflow:
    """Lets bulk be asked for at no more than so many bytes a second. Belongs to one event loop."""

    def __init__(self) -> None:
        """Hold back nobody until there is a limit."""
        self._pace = Throttle()
        self._counted: Callable[[], int] | None = None
        self._came = 0
        self._asked = 0
        """bytes that were asked for and have not come"""
        self._readings: deque[tuple[float, int, int]] = deque()
        """seconds, bytes so far, and those that were asked for: the last reading of before the
        span, and those within it"""
        self._turn = asyncio.Lock()
        self._streams = asyncio.Semaphore(MAX_STREAMS)

    @property
    def is_limited(self) -> bool:
        """Return whether there is a limit."""
        return self._pace.is_limited

    @property
    def rate_mbit_s(self) -> float:
        """Return the limit; infinite without one."""
        return self._pace.rate_mbit_s

    def limit(self, rate_mbit_s: float, counted: Callable[[], int] | None = None) -> None:
        """Set the limit.

        Args:
            rate_mbit_s: of all that comes.
            counted: returns all bytes that have come so far; by default those asked for here.
        """
        self._pace.rate_mbit_s, self._counted = rate_mbit_s, counted

    @asynccontextmanager
    async def asking(self, num_bytes: int) -> AsyncIterator[Came]:
        """Wait until so many bytes may be asked for; they count as asked for within the block."""
        if self.is_limited:
            self.look()
            await self._pace.take(num_bytes)
            async with self._turn:
                await self._find_room(num_bytes)
        left = num_bytes
        self._asked += left

        def came(arrived: int) -> None:
            nonlocal left
            owed = min(arrived, left)
            left -= owed
            self._asked -= owed
            self._came += arrived

        try:
            yield came
        finally:
            self._asked -= left
            if self.is_limited and left == num_bytes:
                self._pace.give_back(left)  # a donor that refuses costs none of the rate

    @asynccontextmanager
    async def stream(self) -> AsyncIterator[None]:
        """Wait until one of few may ask for one piece after the other, which all take the rate.

        Wait before a donor is chosen: who is done first changes meanwhile.

        More would not be faster. Each would be slower, so that the donor seems not worth waiting
        for, and what it has sent is lost.
        """
        async with self._streams if self.is_limited else nullcontext():
            yield

    def look(self) -> None:
        """Read what has come; call it now and then, so that it is known when it came."""
        if self.is_limited:
            self._read(asyncio.get_running_loop().time())

    async def _find_room(self, num_bytes: int) -> None:
        loop, rate = asyncio.get_running_loop(), self.rate_mbit_s / BITS
        most = SPAN_S * rate
        wanted = min(num_bytes, MOST_SHARE * most)
        until_s = loop.time() + num_bytes / (LEAST_SHARE * rate)
        while (now_s := loop.time()) < until_s:
            came, unasked = self._read(now_s)
            # And room for what comes unasked until there is room for as much again.
            if came + self._asked + wanted * most / max(most - unasked, 1.0) <= most:
                return
            await asyncio.sleep(LOOK_S)

    def _read(self, now_s: float) -> tuple[float, float]:
        """Return the bytes that came within the span, and those of them that came unasked."""
        total = self._came if self._counted is None else self._counted()
        readings, from_s = self._readings, now_s - SPAN_S
        readings.append((now_s, total, self._came))
        while len(readings) > 2 and readings[1][0] <= from_s:
            readings.popleft()
        first, following = readings[0], readings[min(1, len(readings) - 1)]
        # Evenly, between two looks.
        past = max(0.0, from_s - first[0]) / max(following[0] - first[0], LOOK_S)
        came, asked = (
            now - before - past * (then - before)
            for now, before, then in zip(readings[-1][1:], first[1:], following[1:], strict=True)
        )
        return came, max(0.0, came - asked)
