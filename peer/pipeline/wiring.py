"""Which peer of the next stage gets a microbatch: the one that would be done with it first.

A peer's delay is what it has of this peer's and has not returned, with the new microbatch, times
its measured seconds a row. The least delay is selected; ties are broken at random. So all peers
have work for as long, each as much as its throughput is worth, and none runs out of it while others
have a queue.

Measured are the seconds from the hand-over, or from the same peer's last receipt if that is later,
to the receipt, which is the return's arrival on this peer's own clock. For a peer that always has
work, that is the reciprocal of its throughput whatever the latency; for one that mostly waits for
work it is the latency. Such a one counts as slower than it is until it has a queue, which it gets
as soon as the others' are longer. Their mean over time is exponential with bias correction. A
time-out, and a pass that a peer gives up, count as slow: at least as twice the estimate.

What goes wrong is told apart:

    busy         a short pause, never a ban
    lost         a ban of a second that doubles with each failure in a row, with jitter; passes
                 that fail together count as one
    unreachable  the same from 4 s on; also for a peer that speaks another protocol, or serves
                 frames of another shape
    timed out    counts as slow
    elsewhere    the peer has left the stage: forgotten until it is announced again
    our own      nothing: an error of this peer's own bans nobody

A receipt, or a new incarnation of the peer, ends a ban and the count of failures. Until its first
receipt, and its first one after a ban, a peer is on trial: it gets a few microbatches, not a queue.

Departures from SWARM (arXiv:2301.11913) and Agora, which charge each peer's virtual run time at the
hand-over and select the least: charges do not know what came back. Two equal peers had 1.90 and
1.55 microbatches a second so, on links that could carry 2.37 each (docs/benchmarks/pipeline.md). A
time-out counts as slow here, and no error bans until a record expires. Petals (arXiv:2312.08361)
finds shortest paths by pings and doubles bans from 15 s; Agora bans for 60 s or 3,600 s by kind,
without doubling. The least delay is found by looking at all peers of the stage: there are tens.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Collection
from dataclasses import dataclass, field

EMA_WEIGHT = 0.1  # of the newest measurement, as in SWARM: the last ten or so count
DEFAULT_ROW_S = 1e-3  # of peers of which nothing is known: it cancels as long as all are alike
MIN_ROW_S, MAX_ROW_S = 1e-7, 10.0  # of any estimate: rates stay finite
CREDULITY = 4.0  # a peer's announced rate counts up to this many times the median, or down
TRIAL_FACTOR = 4.0  # of the delay of a peer on trial: a quarter of the others' queue
SLOW_FACTOR = 2.0  # a time-out costs at least this many estimates: ten of them halve a share
FIRST_BAN_S = 1.0  # after a connection broke: most are made again at once
UNREACHABLE_FROM = 2  # doublings at which the ban of an unreachable peer begins: 4 s, a restart
MAX_BAN_S = 300.0  # a peer that comes back without a new incarnation is tried within minutes
MIN_PAUSE_S, MAX_PAUSE_S = 0.02, 5.0  # of a busy peer, whatever it asks for
JITTER = (0.5, 1.5)  # of pauses and bans: peers that failed together are not tried together


@dataclass(kw_only=True)
class Backoff:
    """Pauses that double with each failure in a row."""

    first_s: float
    max_s: float
    failures: int = 0
    until_s: float = float("-inf")

    def fail(self, now_s: float, rng: random.Random) -> None:
        """Note a failure; those during a pause have the cause of the one that began it."""
        if now_s < self.until_s:
            return
        length_s = min(self.first_s * 2.0 ** min(self.failures, 30), self.max_s)
        self.failures += 1
        self.until_s = now_s + length_s * rng.uniform(*JITTER)

    def end(self) -> None:
        """Note a success."""
        self.failures, self.until_s = 0, float("-inf")


@dataclass(kw_only=True)
class Pace:
    """Seconds a row, as an exponential mean with bias correction over the announced one."""

    announced_row_s: float
    mean: float = 0.0
    num_measured: int = 0

    def add(self, row_s: float) -> None:
        """Add a measurement."""
        self.mean += EMA_WEIGHT * (max(row_s, MIN_ROW_S) - self.mean)
        self.num_measured += 1

    @property
    def row_s(self) -> float:
        """Return the estimate."""
        if not self.num_measured:
            return self.announced_row_s
        return self.mean / (1 - (1 - EMA_WEIGHT) ** self.num_measured)


@dataclass(kw_only=True)
class _Neighbour:
    incarnation: str
    pace: Pace
    open_rows: dict[int, int] = field(default_factory=dict)
    """of the reservations that are not settled, by number"""
    ban: Backoff = field(default_factory=lambda: Backoff(first_s=FIRST_BAN_S, max_s=MAX_BAN_S))
    paused_until_s: float = float("-inf")
    last_receipt_s: float = float("-inf")

    @property
    def free_at_s(self) -> float:
        return max(self.paused_until_s, self.ban.until_s)

    def delay_s(self, rows: int) -> float:
        """Return when it would be done with so many more rows."""
        is_on_trial = not self.pace.num_measured or self.ban.failures > 0
        factor = TRIAL_FACTOR if is_on_trial else 1.0
        return factor * (sum(self.open_rows.values()) + rows) * self.pace.row_s


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """A microbatch that a peer is to get, until it is settled."""

    number: int
    peer: str
    incarnation: str
    rows: int
    at_s: float


class Wiring:
    """The peers of the next stage."""

    def __init__(self, rng: random.Random) -> None:
        """Begin without peers; `rng` breaks ties and spreads pauses."""
        self._rng = rng
        self._peers: dict[str, _Neighbour] = {}
        self._numbers = itertools.count()

    @property
    def peers(self) -> frozenset[str]:
        """Return the peers of the stage, banned ones included."""
        return frozenset(self._peers)

    def rows_per_s(self) -> dict[str, float]:
        """Return the estimated throughput of each peer."""
        return {peer: 1 / one.pace.row_s for peer, one in self._peers.items()}

    def banned(self, now_s: float) -> frozenset[str]:
        """Return the peers that are banned."""
        return frozenset(peer for peer, one in self._peers.items() if one.ban.until_s > now_s)

    def appeared(self, peer: str, *, incarnation: str, rows_per_s: float | None = None) -> bool:
        """Take a peer that serves the stage; return whether its process is one not seen before.

        Args:
            peer: PeerID.
            incarnation: of its process; another one than before ends a ban.
            rows_per_s: throughput that it announces, believed within bounds until it is measured.
        """
        known = self._peers.get(peer)
        if known is not None and known.incarnation == incarnation:
            return False
        self._peers.pop(peer, None)
        self._peers[peer] = _Neighbour(
            incarnation=incarnation,
            pace=Pace(announced_row_s=self._believed_row_s(rows_per_s)),
        )
        return True

    def left(self, peer: str) -> None:
        """Forget a peer that does not serve the stage any more."""
        self._peers.pop(peer, None)

    def reserve(
        self, *, rows: int, now_s: float, without: Collection[str] = ()
    ) -> Reservation | None:
        """Select a peer for a microbatch; None if none is free."""
        free = [
            (one.delay_s(rows), self._rng.random(), peer)
            for peer, one in self._peers.items()
            if one.free_at_s <= now_s and peer not in without
        ]
        if not free:
            return None
        _, _, peer = min(free)
        number, chosen = next(self._numbers), self._peers[peer]
        chosen.open_rows[number] = rows
        return Reservation(
            number=number, peer=peer, incarnation=chosen.incarnation, rows=rows, at_s=now_s
        )

    def settle(self, reservation: Reservation) -> None:
        """Note that a microbatch is not with its peer any more, or that nobody waits for it there.

        A reservation may be settled more than once.
        """
        one = self._of(reservation)
        if one is not None:
            one.open_rows.pop(reservation.number, None)

    def next_free_s(self, now_s: float, without: Collection[str] = ()) -> float | None:
        """Return when the next of these peers is free; None if there are none."""
        free = [one.free_at_s for peer, one in self._peers.items() if peer not in without]
        return max(now_s, min(free)) if free else None

    def receipt(self, reservation: Reservation, now_s: float) -> None:
        """Note that the return of a microbatch has arrived."""
        one = self._of(reservation)
        if one is None:
            return
        one.open_rows.pop(reservation.number, None)
        began_s = max(reservation.at_s, one.last_receipt_s)
        one.last_receipt_s = now_s
        one.ban.end()
        self._measure(one, reservation, now_s - began_s)

    def was_slow(self, reservation: Reservation, now_s: float) -> None:
        """Note a time-out, or a pass that the peer gave up."""
        one = self._of(reservation)
        if one is not None:
            least_s = SLOW_FACTOR * reservation.rows * one.pace.row_s
            self._measure(one, reservation, max(least_s, now_s - reservation.at_s))

    def was_busy(self, reservation: Reservation, retry_s: float, now_s: float) -> None:
        """Note that the peer takes nothing for a short while."""
        one = self._of(reservation)
        if one is not None:
            pause_s = min(max(retry_s, MIN_PAUSE_S), MAX_PAUSE_S) * self._rng.uniform(*JITTER)
            one.paused_until_s = now_s + pause_s

    def was_lost(self, reservation: Reservation, now_s: float) -> None:
        """Note that the connection to the peer broke."""
        one = self._of(reservation)
        if one is not None:
            one.ban.fail(now_s, self._rng)

    def was_unreachable(self, reservation: Reservation, now_s: float) -> None:
        """Note that the peer cannot be reached, or takes no pass of this run."""
        one = self._of(reservation)
        if one is not None:
            one.ban.failures = max(one.ban.failures, UNREACHABLE_FROM)
            one.ban.fail(now_s, self._rng)

    def _of(self, reservation: Reservation) -> _Neighbour | None:
        """Return the peer, unless its process is another one by now."""
        one = self._peers.get(reservation.peer)
        return one if one is not None and one.incarnation == reservation.incarnation else None

    def _measure(self, one: _Neighbour, reservation: Reservation, took_s: float) -> None:
        one.pace.add(took_s / reservation.rows)

    def _believed_row_s(self, rows_per_s: float | None) -> float:
        known = [one.pace.row_s for one in self._peers.values()]
        usual = statistics.median(known) if known else DEFAULT_ROW_S
        if rows_per_s is None or not 0 < rows_per_s < math.inf:
            return usual
        least, most = (usual / CREDULITY, usual * CREDULITY) if known else (MIN_ROW_S, MAX_ROW_S)
        return min(max(1 / rows_per_s, least), most)
