"""Limits on codes that wait at an owner for their group.

It is not known yet whether their sender will be a member, and keys are free in an open run. So an
owner keeps one stream for each peer, position and part, the newest, and counts the bytes that wait.
What goes beyond is refused as ``not-upfront``: an honest sender sends it again once its group is
closed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from atoll.dht.refusals import RefusalCode
from atoll.dht.transport import Refused
from atoll.peer.rounds import notices
from atoll.peer.rounds.context import DECISION_UNDER_WAY, Context
from atoll.peer.rounds.policies import positions_ahead

# All senders' codes together, in vectors. Even shares of the parts bring an owner less than one
# vector, however many senders there are; four leave room for an owner of four even shares.
MAX_VECTORS = 4
MIN_BYTES = 16 << 20  # of one sender: a bound on less than this would save nothing
MESSAGE_BYTES = 64  # what a message takes beside its bytes, so that empty ones count too


def furthest_upfront(ctx: Context) -> int:
    """Return the last position of which a peer that may lead this one by an entry sends codes."""
    ahead = positions_ahead(len(ctx.replay.fragments))
    return ctx.replica.position + ahead + DECISION_UNDER_WAY


def not_upfront(position: int) -> Refused:
    """Return the refusal of codes that do not fit the group."""
    return Refused(
        RefusalCode.NOT_UPFRONT,
        f"round {position + 1} has other parts or owners; send again when its group is closed",
    )


class EagerCodes:
    """The codes that wait at this peer."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._slots: dict[tuple[str, int, int], EagerSlot] = {}
        self._waiting = Counter[str]()
        self.waiting = 0
        """bytes that wait, of all senders"""
        self.refused = 0
        """streams, since the start"""
        positions = positions_ahead(len(ctx.replay.fragments)) + 1 + DECISION_UNDER_WAY
        fragments = [ctx.replay.cells_at(index) for index in range(len(ctx.replay.fragments))]
        vector = positions * max(cells.max_body_bytes(1) for cells in fragments)
        self.most_of_one = max(MIN_BYTES, vector)
        """bytes of one sender: no more than it has to send"""
        self.most = MAX_VECTORS * self.most_of_one
        """bytes of all"""

    @contextmanager
    def slot(self, remote: str, position: int, part: int) -> Iterator[EagerSlot]:
        """Keep a stream's codes, as long as this lasts, instead of an older stream's."""
        key = remote, position, part
        slot, older = EagerSlot(self, remote, position), self._slots.get(key)
        self._slots[key] = slot
        if older is not None and older.drop():  # of a connection that broke, if its peer is honest
            self.refuse(remote, f"sent part {part} of round {position + 1} a second time")
        try:
            yield slot
        finally:
            slot.seat()
            if self._slots.get(key) is slot:
                del self._slots[key]

    def refuse(self, remote: str, why: str) -> None:
        """Count a stream that is refused, and report it."""
        self.refused += 1
        self._ctx.on_event(
            "warning",
            notices.eager_refused(peer=remote, reason=why, refused=self.refused),
            key=("eager", remote),
        )

    def add(self, remote: str, num_bytes: int) -> bool:
        """Return whether these bytes may wait, and count them if so."""
        fits = self._waiting[remote] + num_bytes <= self.most_of_one
        if not fits or self.waiting + num_bytes > self.most:
            return False
        self._waiting[remote] += num_bytes
        self.waiting += num_bytes
        return True

    def subtract(self, remote: str, num_bytes: int) -> None:
        """Count bytes no longer."""
        self._waiting[remote] -= num_bytes
        self.waiting -= num_bytes
        if not self._waiting[remote]:
            del self._waiting[remote]


class EagerSlot:
    """The place of one stream."""

    def __init__(self, codes: EagerCodes, remote: str, position: int) -> None:
        self._codes = codes
        self._remote = remote
        self._position = position
        self._waiting = 0
        self._seated = False
        self.dropped = asyncio.Event()
        """set when a newer stream takes its place"""

    def drop(self) -> bool:
        """Let go of the codes, unless a group has them; return whether they are let go."""
        if not self._seated:
            self.dropped.set()
        return not self._seated

    def take(self, num_bytes: int) -> None:
        """Count a message that waits from now on.

        Raises:
            Refused: too much waits already.
        """
        counted = num_bytes + MESSAGE_BYTES
        if self._seated:
            return
        if not self._codes.add(self._remote, counted):
            self._codes.refuse(self._remote, "sent more than may wait for a group here")
            raise not_upfront(self._position)
        self._waiting += counted

    def seat(self) -> None:
        """Count no more: the group is closed, and its members' codes are bounded by its parts."""
        if not self._seated:
            self._seated = True
            self._codes.subtract(self._remote, self._waiting)
