"""Pacing: the rate at which a peer sends in a round, and the order.

Without pacing, TCP fills the queue in front of the uplink until it overflows: bytes are sent twice,
and votes wait behind cells. So bulk messages of a round leave one after the other at the uplink's
rate: those of the older position first, own codes before reduced cells (results can only be
complete once codes have come), and then receivers in turn, each peer beginning with its successor.

The rate is what the owner declared, else what transfers showed (`rates.py`): how fast others
acknowledged bytes in the later part of the longest time in which more waited to leave, the median
of some rounds. Now and then a round searches for more than that (the idea of BBR, ACM Queue 14(5),
2016, with a round for its round trips). A peer that knows nothing yet is not paced; the first round
then measures. Nor is one whose rounds are too short for a reading: nothing would find a pace that
is too low. Codes that leave up front and the rest of their round are one reading, with a pause.

An owner may cap the link (`Link.cap`). Then no pace exceeds a part of the cap, and the rest is for
other bulk (`Throttle`): what joiners read here, and entries for the coordinator. A part of its own
lets neither starve the other. What is asked of others (`Inflow`) has what rounds leave of the cap
on the way in.

No more than `QUEUE_S` of a round's bytes may queue beyond what is under way for a round trip,
however wrong the rate. Round trips are those of questions that peers answer at once, the least of
each peer.
If next to nothing is confirmed for as long as a queue and a round trip last, the rest is lost.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from atoll.dht.tasks import Tasks
from atoll.dht.transport import Transport
from atoll.peer.rounds.bulk import BITS, Inflow, Throttle
from atoll.peer.rounds.rates import (
    FlowEstimate,
    RateEstimate,
    Sample,
    peak_mbit_s,
    saturated_mbit_s,
    span_s,
    was_held,
)
from atoll.peer.rounds.slots import MAX_SLOTS

UNKNOWN_MBIT_S = 100.0  # what a link is taken for of which nothing is known
DECLARED_SHARE = 0.94  # of a declared rate: headers and encryption at packets of 1500 bytes
BURST_S = 0.03  # what a busy machine may catch up; at 100% of the link such a queue never drains
SAMPLE_S = 0.1  # between readings of what the link carried
QUEUE_S = 0.25  # of bytes at most that wait on the way: signs of life travel behind them
ROUND_TRIP_S = 0.05  # what one is taken for before a peer has answered
MAX_ROUND_TRIP_S = 1.0  # longer ones say more of a busy machine than of a link
MAX_PEERS = 64  # of which round trips are kept: those who were asked last
KEPT_ROUND_TRIPS = 8  # of a peer, of which the least counts: routes change
# Of bytes that may be unconfirmed on any link: one message of the fastest size on libp2p streams
# (256 KiB), so that a low estimate can still rise.
MIN_IN_FLIGHT_BYTES = 1 << 18
# Passes of a pipeline flow without an end, so their rate is read all the time. Less of them may be
# on the way: a pass is a chain of hops, and each hop waits for the queue of its link.
FLOW_QUEUE_S, MIN_FLOW_IN_FLIGHT_BYTES = 0.15, 3 << 16
LOST_SHARE = 0.02  # of what is unconfirmed, a reading: what was sent to the dead never is
# Of what is unconfirmed, in a round trip and the time of a queue. If less comes, the rest is lost:
# 256 KiB on a link of 1 Mbit/s are confirmed twice as fast.
LIVE_SHARE = 1 / 16
# Of a cap, for bulk that is no part of a round: of the least cap, 5 Mbit/s, two readers and the
# coordinator get 1 MiB each within their patience.
SPARE_SHARE = 1 / 3
LEAST_READERS, READER_MBIT_S = 2, 0.6  # a reader gives up on a donor below 64 kB/s


Order = tuple[int, ...]
"""A message's rank; the smaller tuple goes first."""


@dataclass(order=True)
class _QueuedSend:
    order: Order
    number: int
    num_bytes: int = field(compare=False)
    granted: asyncio.Future[None] = field(compare=False)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of what may be unconfirmed beside what is under way for a round trip."""

    least_bytes: int = MIN_IN_FLIGHT_BYTES
    queue_s: float = QUEUE_S


FLOW_LIMITS = Limits(least_bytes=MIN_FLOW_IN_FLIGHT_BYTES, queue_s=FLOW_QUEUE_S)


class Pacer:
    """Grants turns to send, at most so many bytes a second. Belongs to one event loop."""

    def __init__(self) -> None:
        """Not paced until `rate_mbit_s` is set."""
        self.rate_mbit_s: float | None = None
        self.limits = Limits()
        self._turns: list[_QueuedSend] = []
        self._numbers = count()
        self._free_at_s = 0.0
        self._granted = False
        self._in_flight = 0.0
        self._is_read = True
        self._limit = float(self.limits.least_bytes)
        self._silent_s = 0.0
        self._confirmed = 0
        """bytes in this time"""
        self.round_trip_s: float | None = None
        """to the furthest peer; None if nobody has answered yet"""
        self._timer: asyncio.TimerHandle | None = None

    def restart(self) -> None:
        """Begin a round: bytes that were not confirmed before it do not count."""
        self._in_flight = 0.0

    def expect_confirmations(self, are_read: bool) -> None:
        """Limit what is unconfirmed only while `confirm` is called.

        An owner's last results leave after its own round has ended. Once nobody read what was
        confirmed, they waited until the next round began.
        """
        self._is_read = are_read
        self._grant()

    def confirm(self, num_bytes: int, seconds: float) -> bool:
        """Note that so many bytes were delivered in the last `seconds`.

        Return whether those that are still unconfirmed are lost, and count no more.
        """
        self._in_flight = max(0.0, self._in_flight - num_bytes) * (1 - LOST_SHARE)
        bytes_s = max((self.rate_mbit_s or 0.0) / BITS, num_bytes / max(seconds, 1e-3))
        way_s = ROUND_TRIP_S if self.round_trip_s is None else self.round_trip_s
        self._limit = max(self.limits.least_bytes, (way_s + self.limits.queue_s) * bytes_s)
        is_lost = self._is_lost(num_bytes, seconds)
        if is_lost:
            self._in_flight = 0.0
        self._grant()
        return is_lost

    def _is_lost(self, num_bytes: int, seconds: float) -> bool:
        # The bytes on a stream that is reset, or to a machine that died, are never confirmed. Left
        # to their decay alone, a few MB of them kept all others waiting for up to 19 s.
        self._silent_s += seconds
        self._confirmed += num_bytes
        is_alive = self._confirmed >= LIVE_SHARE * self._in_flight
        way_s = MAX_ROUND_TRIP_S if self.round_trip_s is None else self.round_trip_s
        is_lost = not is_alive and self._silent_s > way_s + self.limits.queue_s
        if is_alive or is_lost:
            self._silent_s, self._confirmed = 0.0, 0
        return is_lost

    def was_busy(self, confirmed: int = 0) -> bool:
        """Return whether a message waits for a turn or, without a pace, bytes wait on the way.

        Without a pace, a peer that sends as others' codes arrive has a turn now and then, and the
        link is idle in between: its bytes are confirmed as soon as they leave.

        Args:
            confirmed: bytes since the last call of `confirm`.
        """
        granted, self._granted = self._granted, False
        waits = self._in_flight - confirmed >= self.limits.least_bytes / 2
        return bool(self._turns) or (granted and waits and self.rate_mbit_s is None)

    def turn(self, num_bytes: int, order: Order) -> asyncio.Future[None]:
        """Return a future that is done when so many bytes may be sent; cancel it to give it up."""
        granted = asyncio.get_running_loop().create_future()
        heapq.heappush(self._turns, _QueuedSend(order, next(self._numbers), num_bytes, granted))
        self._grant()
        return granted

    def _grant(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        while self._turns and self._free_at_s <= now_s and self._may_fly:
            turn = heapq.heappop(self._turns)
            if not turn.granted.done():
                turn.granted.set_result(None)
                self._granted = True
                self._in_flight += turn.num_bytes
                self._free_at_s = self._next_s(now_s, turn.num_bytes)
        if self._turns and self._timer is None and self._free_at_s > now_s:
            self._timer = loop.call_at(self._free_at_s, self._wake)

    @property
    def _may_fly(self) -> bool:
        return not self._is_read or self._in_flight < self._limit

    def _wake(self) -> None:
        self._timer = None
        self._grant()

    def _next_s(self, now_s: float, num_bytes: int) -> float:
        if self.rate_mbit_s is None:
            return now_s
        return max(self._free_at_s, now_s - BURST_S) + num_bytes * BITS / self.rate_mbit_s


class LinkReading:
    """One reduction's look at the link."""

    def __init__(self, link: Link) -> None:
        """Made by `Link.watch`."""
        self._link = link
        self.disturbed = False
        """whether a member died, stalled or was left out: then readings say nothing of the link"""

    def pause(self) -> None:
        """Stop reading while nothing is sent; readings so far count with the rest of the round."""
        self._link.unwatch(self, learns=False)

    def close(self) -> None:
        """End the reduction."""
        self._link.unwatch(self)


class Link:
    """This peer's access link: what is known of it, and the pacer of what goes up.

    It is read while any reduction goes on, once however many do: their bytes share it.
    """

    def __init__(self) -> None:
        self.pacer = Pacer()
        self.inflow = Inflow()
        """for what is asked of others: states, updates, parts"""
        self.outflow = Throttle()
        """for bulk beside rounds and passes: what is read here, and entries for the coordinator"""
        self._most_mbit_s = math.inf
        self._round_trips: dict[str, deque[float]] = {}
        self._watches: set[LinkReading] = set()
        self._stretches: list[list[Sample]] = []
        """what was read since something was learned last, without its pauses"""
        self._last: Sample | None = None
        """the newest reading"""
        self._is_attended = False
        self._flow = FlowEstimate()
        self._flowing: list[Sample] = []
        """the present reading of what flows without an end"""
        self._tasks = Tasks()
        self._reading: asyncio.Task[None] | None = None
        self._declared_mbit_s = 0.0
        self._up = RateEstimate()
        self._down_mbit_s = 0.0

    def declare(self, uplink_mbit_s: float) -> None:
        """Take the rate that the owner declared; 0 if there is none."""
        self._declared_mbit_s = uplink_mbit_s
        self._set_pace()

    def cap(self, most_mbit_s: float, received: Callable[[], int] | None = None) -> None:
        """Use no more of the link than the owner allows, each way.

        Args:
            most_mbit_s: 0 for all of it.
            received: returns all bytes that this peer has received (`Inflow.limit`).
        """
        self._most_mbit_s = most_mbit_s or math.inf
        most = DECLARED_SHARE * self._most_mbit_s
        self.inflow.limit(most, received)
        self.outflow.rate_mbit_s = SPARE_SHARE * most
        self._set_pace()

    @property
    def max_readers(self) -> int:
        """Return how many streams of bulk may be read here at once: each has to make progress."""
        return int(max(LEAST_READERS, min(MAX_SLOTS, self.outflow.rate_mbit_s / READER_MBIT_S)))

    @property
    def _most_of_rounds(self) -> float:
        return (1 - SPARE_SHARE) * self._most_mbit_s

    @property
    def uplink_mbit_s(self) -> float:
        """Return the declared rate, else the measured one, else a guess; at most the cap."""
        known = self._declared_mbit_s or self._up.mbit_s or UNKNOWN_MBIT_S
        return min(known, self._most_of_rounds)

    @property
    def downlink_mbit_s(self) -> float:
        """Return the highest rate seen, and no less than the uplink's.

        Rounds seldom fill a downlink, so that is a lower bound; few links are slower down than up.
        """
        return min(max(self._down_mbit_s, self.uplink_mbit_s), self._most_mbit_s)

    def note_round_trip(self, peer: str, seconds: float) -> None:
        """Note how long a peer took to answer; the furthest one's round trip counts."""
        kept = self._round_trips.pop(peer, deque(maxlen=KEPT_ROUND_TRIPS))
        kept.append(min(seconds, MAX_ROUND_TRIP_S))
        self._round_trips[peer] = kept
        while len(self._round_trips) > MAX_PEERS:
            del self._round_trips[next(iter(self._round_trips))]
        self.pacer.round_trip_s = max(min(trips) for trips in self._round_trips.values())

    def watch(self, transport: Transport) -> LinkReading:
        """Begin to read for a reduction, or for codes that leave before it."""
        if not self._watches:
            if not self._stretches and not self._is_attended:
                self.pacer.restart()
                self._last = None
            self._stretches.append([])
            self._begin_reading(transport)
        watch = LinkReading(self)
        self._watches.add(watch)
        return watch

    def unwatch(self, watch: LinkReading, *, learns: bool = True) -> None:
        """End a reduction, or pause it.

        At its end, learn from the readings since the last end if no member was lost.
        """
        if watch not in self._watches:
            return
        if learns:
            stretches, self._stretches = self._stretches, [self._stretches[-1][-1:]]
            if not any(each.disturbed for each in self._watches):
                self.learn(stretches)
        self._watches.remove(watch)
        if not self._watches:
            self._stretches = [] if learns else self._stretches
            self._end_reading()

    async def attend(self, transport: Transport) -> None:
        """Read and pace what leaves between reductions as well, until cancelled.

        Passes of a pipeline leave all the time. Where their receivers' links hold them up, less is
        read than the uplink carries; that lowers no pace before it has lasted for half a minute.
        """
        self._is_attended, self.pacer.limits = True, FLOW_LIMITS
        self._flow, self._flowing = FlowEstimate(), []
        self._begin_reading(transport)
        try:
            await asyncio.Event().wait()
        finally:
            self._is_attended, self.pacer.limits = False, Limits()
            self._set_pace()
            self._end_reading()

    def _begin_reading(self, transport: Transport) -> None:
        if self._reading is None:
            self.pacer.expect_confirmations(True)
            self._reading = self._tasks.spawn(self._read(transport))

    def _end_reading(self) -> None:
        if self._reading is not None and not self._watches and not self._is_attended:
            self._reading.cancel()
            self._reading = None
            self.pacer.expect_confirmations(False)

    async def _read(self, transport: Transport) -> None:
        while True:
            counted, now_s = transport.statistics(), asyncio.get_running_loop().time()
            last = self._last
            confirmed = counted.wire_bytes_delivered - last.delivered if last else 0
            self._last = Sample(
                at_s=now_s,
                delivered=counted.wire_bytes_delivered,
                received=counted.wire_bytes_received,
                busy=self.pacer.was_busy(confirmed),
            )
            is_lost = last is not None and self.pacer.confirm(confirmed, now_s - last.at_s)
            if self._watches:
                if is_lost:
                    self._stretches.append([])  # the wait for it says nothing of the link
                self._stretches[-1].append(self._last)
            if self._is_attended:
                self._follow(self._last)
            await asyncio.sleep(SAMPLE_S)

    def _follow(self, sample: Sample) -> None:
        """Take a sample of what flows without an end."""
        self._flowing.append(sample)
        if span_s(self._flowing) >= self._flow.reading_s:
            self._flow = self._flow.after(self._flowing)
            self._flowing = [sample]
            self._set_pace()

    def learn(self, stretches: Sequence[Sequence[Sample]]) -> None:
        """Take in the readings of a round."""
        held = was_held(stretches)
        self._up = self._up.without_pace() if held else self._up.after(saturated_mbit_s(stretches))
        received = [[(sample.at_s, sample.received) for sample in each] for each in stretches]
        self._down_mbit_s = max(self._down_mbit_s, *map(peak_mbit_s, received))
        self._set_pace()

    def _set_pace(self) -> None:
        declared = self._declared_mbit_s
        measured = self._flow if self._is_attended else self._up
        pace = DECLARED_SHARE * declared if declared else measured.pace_mbit_s
        most = DECLARED_SHARE * self._most_of_rounds
        self.pacer.rate_mbit_s = pace if math.isinf(most) else min(pace or most, most)
