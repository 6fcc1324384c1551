"""Reduced parts in hand: of the positions in flight, and of the one that was decided last.

The last one's bytes stay for those whom its commit has not reached yet; older ones are in the log.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from atoll.optim.state.updates import Update


class Arriving(Protocol):
    """A reduction under way."""

    async def arrival(self, start_cell: int, stop_cell: int) -> bool:
        """Return once a part is complete here, or nothing of it came for a while.

        Returns:
            Whether it may still come.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class HeldPart:
    """A part's bytes, and its values where they were decoded as they came."""

    body: bytes
    decoded: Update | None


class Holdings:
    """Parts by position and digest: equal bytes at two positions need not decode alike."""

    def __init__(self) -> None:
        """Nothing in hand."""
        self._parts: dict[int, dict[bytes, HeldPart]] = {}
        self.arriving: dict[int, Arriving] = {}
        """what may still bring parts of a position"""

    def put(self, position: int, digest: bytes, body: bytes, decoded: Update | None = None) -> None:
        """Keep a part until the position after its own is decided."""
        at = self._parts.setdefault(position, {})
        if decoded is not None or digest not in at:
            at[digest] = HeldPart(body=body, decoded=decoded)

    def body(self, digest: bytes) -> bytes | None:
        """The bytes of a part of any position."""
        for at in self._parts.values():
            if digest in at:
                return at[digest].body
        return None

    def decoded(self, position: int, digest: bytes) -> Update | None:
        """The values of a part, where they were decoded as they came."""
        held = self._parts.get(position, {}).get(digest)
        return held.decoded if held is not None else None

    def decided_up_to(self, position: int) -> None:
        """Keep what lies from ``position`` on, and the bytes of the entry before it."""
        for decided in [p for p in self._parts if p < position - 1]:
            del self._parts[decided]
        last = self._parts.get(position - 1, {})
        for digest, held in last.items():
            last[digest] = HeldPart(body=held.body, decoded=None)

    def clear(self) -> None:
        """Drop everything: its epoch is over."""
        self._parts.clear()
