"""Bounds on the memory that arriving messages occupy, for each peer and for all together.

What a stream holds here are frames of which only a part has come, and messages that nobody has
read yet. A single stream is bounded by its windows; a peer may open hundreds of them, and whoever
has invites for several keys as many times more. So memory is counted by peer too:

- from half of a bound on, a stream with an unread message reads no more until it is taken, which
  costs an honest peer speed and nothing else;
- beyond a bound, the stream that asks for more ends. Of the bound for all, only a peer that holds
  more than its equal share loses a stream.
"""

from __future__ import annotations

from collections import Counter

from atoll.dht.transport import FrameError

# A peer in several rounds and recoveries has some 20 streams here, of 1 MiB each at worst.
PEER_BYTES = 32 << 20
# Six peers at their bound, or hundreds that send parts at once and are read.
ALL_BYTES = 192 << 20


class ArrivalMemory:
    """Counts the bytes of arrivals by peer."""

    def __init__(self, *, peer_bytes: int = PEER_BYTES, all_bytes: int = ALL_BYTES) -> None:
        self._peer_bytes, self._all_bytes = peer_bytes, all_bytes
        self._held: Counter[str] = Counter()
        self._total = 0

    def claim(self, peer: str, num_bytes: int) -> None:
        """Count more bytes of a peer. Raises FrameError if they are too many; none count then."""
        held = self._held[peer] + num_bytes
        if held > self._peer_bytes:
            raise FrameError(f"{held} bytes of {peer} are waiting, at most {self._peer_bytes} may")
        total = self._total + num_bytes
        if total > self._all_bytes and held > self._all_bytes // max(1, len(self._held)):
            raise FrameError(
                f"{total} bytes of all peers are waiting, at most {self._all_bytes} may; {peer} "
                f"holds {held} of them, more than its share"
            )
        self._held[peer], self._total = held, total

    def release(self, peer: str, num_bytes: int) -> None:
        """Stop counting bytes of a peer."""
        self._total -= num_bytes
        self._held[peer] -= num_bytes
        if self._held[peer] <= 0:
            del self._held[peer]

    def is_tight(self, peer: str) -> bool:
        """Return whether streams of a peer should read only what nothing unread precedes."""
        return self._held[peer] > self._peer_bytes // 2 or self._total > self._all_bytes // 2

    @property
    def total_bytes(self) -> int:
        """Bytes of all peers."""
        return self._total
