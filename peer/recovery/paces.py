"""Paces compare how well donors give.

Where one entry after the other is missing, each is one piece of one donor, and those after it wait:
a donor that needs half a minute for what another one gives in two seconds holds up all of them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

MAX_PACES = 4096  # donors, as many as a run may have; those met longest ago are forgotten
# The share of the time that goes to trying slower donors, which may be fast by now.
TRIES = 1 / 16
LEAST_S = 1e-3  # of a piece: what differs below is chance
LEAST_BYTES = 1 << 18  # of a piece: less than what a young stream of libp2p takes in a round trip


@dataclass(kw_only=True)
class _Giving:
    byte_s: float | None = None
    """smoothed seconds for a byte, from the question on; None if it has given nothing"""
    failures: float = 0.0
    """of late"""


class Paces:
    """Remembers what donors gave of late."""

    def __init__(self) -> None:
        """Know nobody."""
        self._givings: dict[str, _Giving] = {}

    def gave(self, donor: str, wire_bytes: int, took_s: float) -> None:
        """Take into account a piece that came and is what it should be."""
        latest_s = _byte_s(wire_bytes, took_s)
        giving = self._met(donor)
        self._draw_nearer(latest_s, but=giving)
        giving.byte_s = latest_s if giving.byte_s is None else (giving.byte_s + latest_s) / 2
        giving.failures /= 2

    def failed(self, donor: str, wire_bytes: int, took_s: float) -> None:
        """Take into account a piece that did not come, or was none.

        That makes nobody faster, and whoever fails counts as no faster than the others: a liar
        would be asked first each time for the sake of one quick piece.
        """
        giving = self._met(donor)
        giving.failures += 1.0
        others = [each.byte_s for each in self._givings.values() if each is not giving]
        known = [byte_s for byte_s in others if byte_s is not None]
        if giving.byte_s is not None:
            least_s = max(_byte_s(wire_bytes, took_s), min(known, default=0.0))
            giving.byte_s = max(giving.byte_s, least_s)

    def _draw_nearer(self, latest_s: float, *, but: _Giving) -> None:
        """Let those that seem slower than a piece of now seem a little less slow.

        One of k times the pace is so tried once in 16 (k - 1) pieces, less often where there are
        several, until it shows what it is now.
        """
        others = [each for each in self._givings.values() if each is not but]
        slower = [each for each in others if (each.byte_s or 0.0) > latest_s]
        for each in slower:
            assert each.byte_s is not None
            nearer_s = each.byte_s - TRIES / len(slower) * latest_s
            each.byte_s = max(nearer_s, (1.0 - TRIES) * latest_s)

    def forgive(self) -> None:
        """Halve what failed before, as whoever was away may be back. For each try to catch up."""
        for giving in self._givings.values():
            giving.failures /= 2

    def failures(self, donor: str) -> float:
        """Return the failures of a donor; less than one if they are long ago."""
        return self._givings[donor].failures if donor in self._givings else 0.0

    def of(self, donors: Collection[str]) -> dict[str, float]:
        """Return the seconds for a byte of each; who has given nothing counts as the fastest."""
        met = {donor: self._givings[donor].byte_s for donor in donors if donor in self._givings}
        known = {donor: byte_s for donor, byte_s in met.items() if byte_s is not None}
        fastest = min(known.values(), default=1.0)
        return {donor: known.get(donor, fastest) for donor in donors}

    def _met(self, donor: str) -> _Giving:
        giving = self._givings.pop(donor, None) or _Giving()
        self._givings[donor] = giving  # as the last to be forgotten
        if len(self._givings) > MAX_PACES:
            del self._givings[next(iter(self._givings))]
        return giving


def _byte_s(wire_bytes: int, took_s: float) -> float:
    """Return the seconds for a byte; of a small piece, which is a round trip, not as many."""
    return max(took_s, LEAST_S) / max(wire_bytes, LEAST_BYTES)
