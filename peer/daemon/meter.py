"""How much of a link is in use: rates of the wire counters against the link's capacity.

The capacity is what the owner declared, else the highest rate seen so far. That is a lower bound,
but a better one would mean to fill a stranger's link for the sake of a number.
"""

from __future__ import annotations

from dataclasses import dataclass

QUIET_MBIT_S = 1.0  # a lower rate may be heartbeats alone, and shows nothing of the link
MIN_INTERVAL_S = 0.5  # shorter readings measure buffers instead of the link
BITS = 8e-6  # Mbit in a byte


@dataclass(frozen=True, kw_only=True)
class LinkUse:
    """One direction of a link."""

    capacity_mbit_s: float = 0.0
    use: float = 0.0
    """share of the capacity in use, 0 to 1"""


class Meter:
    """Measures one direction of a link."""

    def __init__(self, declared_mbit_s: float = 0.0) -> None:
        """Take the capacity that the owner declared; 0 if unknown."""
        self._declared_mbit_s = declared_mbit_s
        self._peak_mbit_s = 0.0
        self._bytes = 0
        self._at_s: float | None = None
        self._last = LinkUse(capacity_mbit_s=declared_mbit_s)

    def read(self, wire_bytes: int, now_s: float) -> LinkUse:
        """Take a reading of a growing counter; return the use since the last one."""
        if self._at_s is None:
            self._bytes, self._at_s = wire_bytes, now_s
        seconds = now_s - self._at_s
        if seconds >= MIN_INTERVAL_S:
            self._last = self._use((wire_bytes - self._bytes) * BITS / seconds)
            self._bytes, self._at_s = wire_bytes, now_s
        return self._last

    def _use(self, rate_mbit_s: float) -> LinkUse:
        if rate_mbit_s > QUIET_MBIT_S:
            self._peak_mbit_s = max(self._peak_mbit_s, rate_mbit_s)
        capacity = self._declared_mbit_s or self._peak_mbit_s
        use = min(1.0, rate_mbit_s / capacity) if capacity else 0.0
        return LinkUse(capacity_mbit_s=capacity, use=use)
