"""How fast donors give, one beside another.

Where one entry after the other is missing, each is one piece of one donor, and those after it wait:
a donor that needs half a minute for what another one gives in two seconds holds up all of them.
"""

from __future__ import annotations

from collections.abc import Collection

MAX_PACES = 4096  # donors, as many as a run may have; those that gave longest ago are forgotten
FORGOTTEN = 1 / 16  # of what a donor differs by from one that gives a piece: it may be fast by now
LEAST_S = 1e-3  # of a piece: what differs below is chance


class Paces:
    """Smoothed seconds that a byte of each donor takes, from the question on."""

    def __init__(self) -> None:
        """Know nobody."""
        self._byte_s: dict[str, float] = {}

    def note(self, donor: str, wire_bytes: int, took_s: float) -> None:
        """Take into account a piece that came; the others are remembered a little less."""
        latest_s = max(took_s, LEAST_S) / wire_bytes
        for other, byte_s in self._byte_s.items():
            self._byte_s[other] = byte_s + FORGOTTEN * (latest_s - byte_s)
        self._put(donor, (self._byte_s.get(donor, latest_s) + latest_s) / 2)

    def note_failure(self, donor: str, wire_bytes: int, took_s: float) -> None:
        """Take into account a piece that did not come: it would have taken longer than this."""
        self._put(donor, max(self._byte_s.get(donor, 0.0), max(took_s, LEAST_S) / wire_bytes))

    def of(self, donors: Collection[str]) -> dict[str, float]:
        """Return the pace of each; one that has given nothing yet counts as the fastest."""
        known = {donor: self._byte_s[donor] for donor in donors if donor in self._byte_s}
        fastest = min(known.values(), default=1.0)
        return {donor: known.get(donor, fastest) for donor in donors}

    def _put(self, donor: str, byte_s: float) -> None:
        self._byte_s.pop(donor, None)  # so that it is the last to be forgotten
        self._byte_s[donor] = byte_s
        if len(self._byte_s) > MAX_PACES:
            del self._byte_s[next(iter(self._byte_s))]
