"""How well donors give, one beside another.

Where one entry after the other is missing, each is one piece of one donor, and those after it wait:
a donor that needs half a minute for what another one gives in two seconds holds up all of them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

MAX_PACES = 4096  # donors, as many as a run may have; those met longest ago are forgotten
FADES = 1 / 16  # of what is known of the others, with each piece of one: they may be fast by now
LEAST_S = 1e-3  # of a piece: what differs below is chance


@dataclass(kw_only=True)
class _Giving:
    byte_s: float | None = None
    """smoothed seconds for a byte, from the question on; None if it has given nothing"""
    failures: float = 0.0
    """of late"""


class Paces:
    """What donors gave of late."""

    def __init__(self) -> None:
        """Know nobody."""
        self._paces: dict[str, _Giving] = {}

    def gave(self, donor: str, wire_bytes: int, took_s: float) -> None:
        """Take into account a piece that came and is what it should be."""
        latest_s = max(took_s, LEAST_S) / wire_bytes
        for other in self._paces.values():
            if other.byte_s is not None:
                other.byte_s += FADES * (latest_s - other.byte_s)
        pace = self._met(donor)
        pace.byte_s = latest_s if pace.byte_s is None else (pace.byte_s + latest_s) / 2
        pace.failures /= 2

    def failed(self, donor: str, wire_bytes: int, took_s: float) -> None:
        """Take into account a piece that did not come, or was none; it makes nobody faster."""
        pace = self._met(donor)
        pace.failures += 1.0
        if pace.byte_s is not None:
            pace.byte_s = max(pace.byte_s, took_s / wire_bytes)

    def forgive(self) -> None:
        """Halve what failed before, as whoever was away may be back. For each try to catch up."""
        for pace in self._paces.values():
            pace.failures /= 2

    def failures(self, donor: str) -> float:
        """Return the failures of a donor; less than one if they are long ago."""
        return self._paces[donor].failures if donor in self._paces else 0.0

    def of(self, donors: Collection[str]) -> dict[str, float]:
        """Return the seconds for a byte of each; who has given nothing counts as the fastest."""
        met = {donor: self._paces[donor].byte_s for donor in donors if donor in self._paces}
        known = {donor: byte_s for donor, byte_s in met.items() if byte_s is not None}
        fastest = min(known.values(), default=1.0)
        return {donor: known.get(donor, fastest) for donor in donors}

    def _met(self, donor: str) -> _Giving:
        pace = self._paces.pop(donor, None) or _Giving()
        self._paces[donor] = pace  # as the last to be forgotten
        if len(self._paces) > MAX_PACES:
            del self._paces[next(iter(self._paces))]
        return pace
