"""Slots of bulk reads: a few for all peers together, and never all of them for one.

A joiner reads six streams at once, from one donor if there is only one, so a peer may have that
many slots. It loses those beyond its share, between two messages, while a peer that has less than
its share waits. Its streams continue where they stopped once there is a slot again.

One slot is kept for peers that had none in the last minute: eight peers that read slowly, and
within the floor of rates, would hold all of them for as long as they like. If such a peer finds
that slot taken, a peer that has had one for a minute cedes it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

MAX_SLOTS = 8  # more would starve this peer's own rounds
MAX_OF_ONE = 6  # `Bodies` of a joiner whose only donor this is; two are left for the next peer
SHARE = 2  # that a peer gets while others have more: a header or a leaf beside a body
KEPT_S = 60.0  # without a slot, after which a peer may have the last one; with one, until it cedes


@dataclass(eq=False)
class _Waiting:
    peer: str
    granted: asyncio.Future[None]


class Slots:
    """The slots of one donor."""

    def __init__(self, count: int = MAX_SLOTS, most_of_one: int = MAX_OF_ONE) -> None:
        """All are free."""
        self._count = count
        self._most_of_one = most_of_one
        self.held = Counter[str]()
        """by peer"""
        self._waiting: list[_Waiting] = []
        self._had_at: dict[str, float] = {}
        """when peers gave their last slots back, in the last minute"""

    @asynccontextmanager
    async def turn(self, peer: str) -> AsyncIterator[Turn]:
        """Wait for a slot, and have it as long as this lasts."""
        await self._take(peer, at=len(self._waiting))
        turn = Turn(self, peer)
        try:
            yield turn
        finally:
            if turn.has_slot:
                self._give(peer)

    async def _take(self, peer: str, *, at: int) -> None:
        waiting = _Waiting(peer, asyncio.get_running_loop().create_future())
        self._waiting.insert(at, waiting)
        self._grant()
        # Time alone may make it one that had no slot for a minute.
        again = asyncio.get_running_loop().call_later(KEPT_S, self._grant)
        try:
            await waiting.granted
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            else:
                self._give(peer)
            raise
        finally:
            again.cancel()

    def _give(self, peer: str) -> None:
        self.held[peer] -= 1
        if not self.held[peer]:
            del self.held[peer]
        now_s = _now_s()
        self._had_at = {p: at for p, at in self._had_at.items() if at > now_s - KEPT_S}
        self._had_at[peer] = now_s
        self._grant()

    def _grant(self) -> None:
        """Give free slots to the peers that have fewest, and among these to the longest waiting."""
        while self.held.total() < self._count:
            ready = [w for w in self._waiting if self._may_have(w)]
            if not ready:
                return
            first = min(ready, key=lambda waiting: self.held[waiting.peer])
            self._waiting.remove(first)
            self.held[first.peer] += 1
            first.granted.set_result(None)

    def _may_have(self, waiting: _Waiting) -> bool:
        if self.held.total() == self._count - 1 and not self._is_fresh(waiting.peer):
            return False
        return self.held[waiting.peer] < self._most_of_one and not waiting.granted.done()

    def _is_fresh(self, peer: str) -> bool:
        """Return whether a peer has no slot, and had none in the last minute."""
        return not self.held[peer] and self._had_at.get(peer, -KEPT_S) <= _now_s() - KEPT_S

    def _is_due(self, waiting: _Waiting, peer: str, since_s: float) -> bool:
        """Return whether a waiting stream is to have a slot of `peer`, which it has had since."""
        if waiting.peer == peer:
            return False
        has = self.held[waiting.peer]
        is_long = _now_s() >= since_s + KEPT_S and self._is_fresh(waiting.peer)
        return is_long or (has < SHARE and has + 1 < self.held[peer])


class Turn:
    """A stream's hold on a slot."""

    def __init__(self, slots: Slots, peer: str) -> None:
        """With a slot."""
        self._slots = slots
        self._peer = peer
        self._since_s = _now_s()
        self.has_slot = True

    async def cede(self) -> None:
        """Leave the slot to a peer that is due, and wait for another one; call between messages."""
        slots, peer = self._slots, self._peer
        if any(slots._is_due(waiting, peer, self._since_s) for waiting in slots._waiting):
            self.has_slot = False
            slots._give(peer)
            await slots._take(peer, at=0)  # before streams of this peer that have not begun
            self.has_slot, self._since_s = True, _now_s()


def _now_s() -> float:
    return asyncio.get_running_loop().time()
