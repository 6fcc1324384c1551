"""The run's status for everybody who watches, made once for all of them.

A status of a large run takes tens of milliseconds to make, and hundreds of watchers ask each
second. Who waits while one is made that was begun after the question gets that one. If making them
has taken a tenth of the time lately, the last one is handed out again for up to a second.

Each status says how often to look (`look_every_s`), by its size and the number of watchers.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from atoll.coordinator.policies import LOOK_S, look_every_s
from atoll.coordinator.run.frames import compress
from atoll.coordinator.run.status import RunStatus

MAKING_SHARE = 0.1  # of one core
BURST_S = 1.0  # of time whose share may be used at once: a few watchers always get a new one
MAX_WATCHERS = 4096  # that are counted
MAX_AGE_S = 1.0  # what is shown is hardly newer: peers report once a second


@dataclass(frozen=True)
class _Page:
    """A packed status."""

    packed: bytes
    began_s: float


def pack(status: RunStatus) -> bytes:
    """Return a status as `StatusReply.packed` has it."""
    return compress(status.to_json())


class StatusPages:
    """The newest status of each module, packed. Belongs to one event loop."""

    def __init__(
        self,
        make: Callable[[str], RunStatus],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`make` returns the status with the rounds of a module, or raises Refusal."""
        self._make = make
        self._clock = clock
        self._pages: dict[str, _Page] = {}
        """by module; `make` refuses names that the run does not have"""
        self._paid_until_s = 0.0
        """to when the time that making has taken is within its share"""
        self._making = asyncio.Lock()
        self._looks_s = deque[float](maxlen=MAX_WATCHERS)
        """when somebody looked, within the last `_every_s`: about once each"""
        self._every_s = LOOK_S

    async def page(self, module: str) -> bytes:
        """Return the packed status, maybe that of a moment ago.

        Raises:
            Refusal: the run has no such module.
        """
        asked_s = self._clock()
        self._looks_s.append(asked_s)
        async with self._making:
            kept, now_s = self._pages.get(module), self._clock()
            oldest_s = now_s - MAX_AGE_S if self._paid_until_s > now_s + BURST_S else asked_s
            if kept is not None and kept.began_s >= oldest_s:
                return kept.packed
            status = replace(self._make(module), look_every_s=self._every_s)
            packed = await asyncio.to_thread(pack, status)
            self._every_s = look_every_s(len(packed), self._watchers(now_s))
            self._pages[module] = _Page(packed, now_s)
            took_s = self._clock() - now_s
            self._paid_until_s = max(self._paid_until_s, now_s) + took_s / MAKING_SHARE
            return packed

    def _watchers(self, now_s: float) -> int:
        while self._looks_s and self._looks_s[0] < now_s - self._every_s:
            self._looks_s.popleft()
        return len(self._looks_s)
