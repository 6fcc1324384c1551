"""The run's status for everybody who watches, made once for all of them.

A status of a large run takes tens of milliseconds to make, and hundreds of watchers ask each
second. So one is handed out for as long as making it may take a tenth of the time: a small run's
for a few milliseconds, a large one's for up to a second.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from atoll.coordinator.run.frames import compress
from atoll.coordinator.run.status import RunStatus

MAKING_SHARE = 0.1  # of one core, at most
MAX_AGE_S = 1.0  # what is shown is hardly newer: peers report once a second


@dataclass(frozen=True)
class _Page:
    """A packed status."""

    packed: bytes
    until_s: float


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
        self._making = asyncio.Lock()

    async def page(self, module: str) -> bytes:
        """Return the packed status, maybe that of a moment ago.

        Raises:
            Refusal: the run has no such module.
        """
        async with self._making:  # who waits for one that is being made takes it
            kept = self._pages.get(module)
            if kept is not None and self._clock() < kept.until_s:
                return kept.packed
            began_s = self._clock()
            packed = await asyncio.to_thread(pack, self._make(module))
            took_s = self._clock() - began_s
            until_s = self._clock() + min(took_s / MAKING_SHARE, MAX_AGE_S)
            self._pages[module] = _Page(packed, until_s)
            return packed
