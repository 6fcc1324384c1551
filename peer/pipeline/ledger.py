"""The passes that a peer knows, so that a microbatch counts once however often it is sent.

Every message about a pass may come twice, late, or from another peer than the first. The ledger
says what a pass is at this peer::

    NEW         not seen before; it is in flight from now on
    IN_FLIGHT   in work: whoever asks again is added to those who get the return
    CACHED      done: whoever asks again gets the return that is kept
    SPENT       its time is over or it was given up: the bytes are freed, the name is remembered
    FULL        there is no room for it now

Memory is reserved when a pass enters and is bounded by number and by bytes. Nobody holds more than
half of either: neither the peers that one sender brings passes from, nor one origin. What was in
flight or cached at its deadline becomes spent, and is forgotten a while later: a copy that
travelled slowly must not count a second time.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass
from enum import Enum, auto
from math import inf

from atoll.peer.pipeline.messages import PassKey, Payload

SHARE = 0.5  # of all room, for one origin and for one sender: a flood leaves the others half


class PassState(Enum):
    """The state of a pass at this peer."""

    NEW = auto()
    IN_FLIGHT = auto()
    CACHED = auto()
    SPENT = auto()
    FULL = auto()


@dataclass(frozen=True, kw_only=True)
class Returned:
    """The answer to the peers that sent a pass."""

    payload: Payload
    """The gradient of the input; nothing after an evaluation."""

    path: tuple[str, ...]
    """PeerIDs that counted the microbatch, from the last stage to this peer."""

    loss: float
    """Nats a token."""


@dataclass(kw_only=True, slots=True)
class _Remembered:
    state: PassState
    holders: tuple[str, str]
    num_bytes: int
    deadline_s: float
    result: Returned | None = None


@dataclass(frozen=True, kw_only=True)
class Swept:
    """The passes that time has ended."""

    expired: list[PassKey]
    """Spent from now on; they were in flight or cached."""

    forgotten: list[PassKey]
    """Not remembered any more."""


class PassLedger:
    """Passes by key, with their returns."""

    def __init__(self, *, max_passes: int, max_bytes: int, linger_s: float) -> None:
        """Begin empty; spent passes are remembered for `linger_s` after their deadline."""
        self._max_passes, self._max_bytes, self._linger_s = max_passes, max_bytes, linger_s
        self._records: dict[PassKey, _Remembered] = {}
        self._timers: list[tuple[float, PassKey]] = []
        self._passes_of: Counter[str] = Counter()
        self._bytes_of: Counter[str] = Counter()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    @property
    def num_bytes(self) -> int:
        """Return the bytes that are reserved or cached."""
        return self._num_bytes

    @property
    def due_s(self) -> float:
        """Return when `sweep` has something to do, or earlier."""
        return self._timers[0][0] if self._timers else inf

    def look(self, key: PassKey) -> PassState:
        """Return what a pass is here; NEW if it is unknown."""
        record = self._records.get(key)
        return PassState.NEW if record is None else record.state

    def enter(self, key: PassKey, *, sender: str, num_bytes: int, deadline_s: float) -> PassState:
        """Take a pass if it is new and there is room; return what it was.

        Args:
            key: of the pass.
            sender: PeerID of the peer that brings it.
            num_bytes: the most that will be kept of it.
            deadline_s: when it is late, on the caller's clock.
        """
        known = self.look(key)
        if known is not PassState.NEW:
            return known
        holders = (f"origin {key.microbatch.origin}", f"sender {sender}")
        if not self._has_room(holders, num_bytes):
            return PassState.FULL
        self._records[key] = _Remembered(
            state=PassState.IN_FLIGHT, holders=holders, num_bytes=0, deadline_s=deadline_s
        )
        self._passes_of.update(holders)
        self._hold(self._records[key], num_bytes)
        heapq.heappush(self._timers, (deadline_s, key))
        return PassState.NEW

    def cache(self, key: PassKey, result: Returned) -> None:
        """Keep the return of a pass in flight, instead of what was reserved for it.

        The return of a pass whose time is over is not kept.
        """
        record = self._records.get(key)
        if record is None or record.state is not PassState.IN_FLIGHT:
            return
        record.state, record.result = PassState.CACHED, result
        self._hold(record, result.payload.num_bytes)

    def result(self, key: PassKey) -> Returned | None:
        """Return what is cached of a pass."""
        record = self._records.get(key)
        return None if record is None else record.result

    def spend(self, key: PassKey) -> None:
        """Free what is kept of a pass; it is remembered as usual."""
        record = self._records.get(key)
        if record is not None:
            self._spend(record)

    def forget(self, key: PassKey) -> None:
        """Drop a pass of which nothing was computed: if it is sent again, it is new."""
        record = self._records.pop(key, None)
        if record is None:
            return
        self._spend(record)
        self._passes_of.subtract(record.holders)
        for holder in record.holders:
            if not self._passes_of[holder]:
                del self._passes_of[holder], self._bytes_of[holder]

    def sweep(self, now_s: float) -> Swept:
        """End what is late, and forget what was spent long ago."""
        expired, forgotten = [], []
        while self._timers and self._timers[0][0] <= now_s:
            at_s, key = heapq.heappop(self._timers)
            record = self._records.get(key)
            if record is None or at_s < record.deadline_s:
                continue  # of a pass that was forgotten, and perhaps entered again later
            if record.state is not PassState.SPENT:
                expired.append(key)
                self._spend(record)
            if now_s >= record.deadline_s + self._linger_s:
                forgotten.append(key)
                self.forget(key)
                continue
            heapq.heappush(self._timers, (record.deadline_s + self._linger_s, key))
        return Swept(expired=expired, forgotten=forgotten)

    def _has_room(self, holders: tuple[str, str], num_bytes: int) -> bool:
        if len(self) >= self._max_passes or self._num_bytes + num_bytes > self._max_bytes:
            return False
        return all(
            self._passes_of[holder] < SHARE * self._max_passes
            and self._bytes_of[holder] + num_bytes <= SHARE * self._max_bytes
            for holder in holders
        )

    def _hold(self, record: _Remembered, num_bytes: int) -> None:
        more = num_bytes - record.num_bytes
        record.num_bytes = num_bytes
        self._num_bytes += more
        for holder in record.holders:
            self._bytes_of[holder] += more

    def _spend(self, record: _Remembered) -> None:
        record.state, record.result = PassState.SPENT, None
        self._hold(record, 0)
