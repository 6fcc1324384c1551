"""Faults of other peers, and bans for those that repeat them.

Every peer judges by what it saw itself: as an owner the cells, as a leader the reports.
Accusations are not passed on, so no peer can have another one barred. The one exception proves
itself: two signatures that contradict each other (`evidence.py`) bar their signer for good. So does
the run's key: a peer that the organiser evicts is asked nothing and followed nowhere. Being
slow, dying or being cut off is no fault: it is dealt with in its round. A peer that holds its
stream open time and again and sends far less than it has declared has a record of its own
(`Context.lags`): owners expect no cells of it for a while, and nothing else changes.

Bytes that are no valid message are a fault. `guarded_call` and `guarded_stream` answer them with a
named refusal, whichever handler they meet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import StrEnum

from atoll.compression import CodecError
from atoll.dht.refusals import RefusalCode
from atoll.dht.transport import CallHandler, Refused, Stream, StreamHandler
from atoll.optim.log.entry import LogError
from atoll.optim.reduction.cells import UpdateError
from atoll.optim.reduction.contribution import WorkRefused

MAX_FAULTS = 3  # one may be a flipped bit, two a bad hour; the third is a habit
MEMORY_S = 600.0  # faults further apart than this do not add up
FIRST_BAR_S = 60.0  # a few rounds
MAX_BAR_S = 3600.0  # bars double up to this: a machine that was mended is back within the hour
MAX_PEERS = 4096  # as many as a group may have; the longest silent are forgotten first


class Fault(StrEnum):
    """A rule that a peer broke. The value is for people: it never travels as a code."""

    BAD_CELL = "bad-cell"
    BAD_MESSAGE = "bad-message"
    BAD_PROPOSAL = "bad-proposal"
    BAD_REPORT = "bad-report"
    BAD_SUM = "bad-sum"
    BAD_VOTE = "bad-vote"
    BAD_WEIGHT = "bad-weight"
    EQUIVOCATION = "equivocation"
    EVICTED = "evicted by the organiser"
    NO_PROGRESS = "no-progress"


@dataclass(frozen=True, kw_only=True)
class Barred:
    """A peer that is left out."""

    left_s: float
    why: Fault

    def __str__(self) -> str:
        """For the peer itself."""
        if self.left_s == float("inf"):
            return f"banned permanently: {self.why}"
        return f"banned for another {self.left_s:.0f} s after repeated faults: {self.why}"


@dataclass(kw_only=True)
class FaultCount:
    """The record of one peer's faults."""

    faults: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_FAULTS))
    """when the last ones were"""
    bars: int = 0
    until: float = float("-inf")
    why: Fault = Fault.BAD_MESSAGE
    """of the last bar"""


class Conduct:
    """A score for every peer that broke a rule. Times are seconds on one clock."""

    def __init__(
        self,
        is_evicted: Callable[[str], bool] = lambda peer_id: False,
        evicted_in_log: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """Nobody has.

        Args:
            is_evicted: returns whether the coordinator's list has put a PeerID out.
            evicted_in_log: returns the PeerIDs that orders in the log have put out.
        """
        self._records: dict[str, FaultCount] = {}
        self._out: dict[str, Fault] = {}
        self._is_evicted = is_evicted
        self._evicted_in_log = evicted_in_log

    def bar_for_good(self, peer: str, why: Fault) -> None:
        """Leave a peer out as long as this process lives."""
        self._out[peer] = why

    def is_out(self, peer: str) -> bool:
        """Return whether a peer is barred permanently."""
        return not self.may_read(peer) or peer in self._evicted_in_log()

    def may_read(self, peer: str) -> bool:
        """Return whether a peer may read the log, where one that is evicted meets the order."""
        return peer not in self._out and not self._is_evicted(peer)

    def fault(self, peer: str, why: Fault, now: float) -> Barred | None:
        """Note a fault; the bar that it earns, if it is one too many."""
        record = self._records.pop(peer, None) or FaultCount()
        self._records[peer] = record
        if len(self._records) > MAX_PEERS:
            del self._records[next(iter(self._records))]
        record.faults.append(now)
        if len(record.faults) < MAX_FAULTS or now - record.faults[0] > MEMORY_S:
            return None
        record.faults.clear()
        record.until = now + min(FIRST_BAR_S * 2.0 ** min(record.bars, 10), MAX_BAR_S)
        record.bars += 1
        record.why = why
        return self.barred(peer, now)

    def barred(self, peer: str, now: float) -> Barred | None:
        """The bar under which a peer is, if any."""
        if self.is_out(peer):
            return Barred(left_s=float("inf"), why=self._out.get(peer, Fault.EVICTED))
        record = self._records.get(peer)
        if record is None or now >= record.until:
            return None
        return Barred(left_s=record.until - now, why=record.why)


BAD_INPUT = (LogError, UpdateError, CodecError, WorkRefused)


OnFault = Callable[[str, Fault], None]
"""(peer, fault): called for every message that breaks the rules."""


Door = Callable[[str], None]
"""(peer): raises Refused if it is not let in."""


def open_door(peer: str) -> None:
    """Let everyone in."""


def guarded_call(handler: CallHandler, on_fault: OnFault, door: Door = open_door) -> CallHandler:
    """`handler`, answering bad input with `Refused`."""

    async def handle(remote: str, body: bytes) -> bytes:
        door(remote)
        try:
            return await handler(remote, body)
        except BAD_INPUT as error:
            on_fault(remote, Fault.BAD_MESSAGE)
            raise Refused(RefusalCode.BAD_MESSAGE, str(error)) from error

    return handle


def guarded_stream(
    handler: StreamHandler, on_fault: OnFault, door: Door = open_door
) -> StreamHandler:
    """`handler`, ending a stream of bad input with `Refused`."""

    async def handle(remote: str, stream: Stream) -> None:
        door(remote)
        try:
            await handler(remote, stream)
        except BAD_INPUT as error:
            on_fault(remote, Fault.BAD_MESSAGE)
            raise Refused(RefusalCode.BAD_MESSAGE, str(error)) from error

    return handle
