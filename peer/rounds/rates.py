"""Rates of a link: what its readings say, and what to try next. Pure.

RateEstimate   after rounds, which are busy for seconds and then over
FlowEstimate   of what flows without an end
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from atoll.peer.rounds.bulk import BITS

GAIN = 1.02  # over what was measured: an estimate that is too low corrects itself
SEARCH_GAIN = 1.25  # well above the scatter of readings, about 8% for rounds of a second
SEARCH_EVERY = 15  # rounds: a search on a link that is no faster fills its queue
FOUND_SHARE = 0.95  # of what a search offered; a link that is no faster gives 0.8 of it
SLOWER_SHARE = 0.75  # of the estimate, twice in a row: the link became slower, not the machine busy
WINDOW_S = 0.3  # a shorter rate says more about buffers than about the link
READ_BYTES = 1 << 19  # fewer messages say more about where a reading cuts them than about the link
KEPT_ROUNDS = 8  # of which the median counts: confirmations queue behind what the others send
FLOW_S = 4.0  # of a reading: long enough that bursts of confirmations make a few percent
FLOW_SHARE = 0.95  # of what was found: full queues drop packets, and each connection slows down
# Of so many readings the second highest counts. Where receivers' links hold passes up, readings lie
# below what the uplink carries, a third of it at times, and a pace that follows them is what then
# holds the passes up. Not the highest: a busy machine takes confirmations in bursts.
KEPT_READINGS, LEAST_READINGS = 8, 2
BUSY_SHARE = 0.9  # of a reading's samples: less shows what there was to send
# One reading in so many probes for more, since a pace shows no more than itself: its queue grows by
# a quarter of a second at most.
PROBE_EVERY, PROBE_GAIN = 4, 0.06
CARRIED_SHARE = 0.97  # of what a probe offered; a link that is no faster gives 0.94 of it
# While one probe after the other is carried, as the link became faster; they are shorter.
PROBE_GROWTH, MAX_PROBE_GAIN = 2.0, 1.0


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A reading of the counters during a round."""

    at_s: float
    delivered: int
    """bytes that others have acknowledged"""
    received: int
    busy: bool
    """whether bulk data waited for the link since the reading before"""


def peak_mbit_s(points: Sequence[tuple[float, int]], window_s: float = WINDOW_S) -> float:
    """Return a counter's highest rate over little more than `window_s`; 0 if nothing lasts as long.

    Args:
        points: (seconds, bytes so far), in order.
        window_s: shortest stretch that counts.
    """
    peak, start = 0.0, 0
    for at_s, num_bytes in points:
        while start + 1 < len(points) and at_s - points[start + 1][0] >= window_s:
            start += 1
        began_s, before = points[start]
        if at_s - began_s >= window_s:
            peak = max(peak, (num_bytes - before) * BITS / (at_s - began_s))
    return peak


def saturated_mbit_s(
    stretches: Sequence[Sequence[Sample]], window_s: float = WINDOW_S
) -> float | None:
    """Return the rate in the later two thirds of the longest time for which the link was busy.

    The first third may be TCP's slow start. A mean and not a peak: confirmations come in bursts,
    of which a peak makes a rate that the link does not have. And from one confirmation to another:
    a pace that lets few messages go would else be read too low, and lower with every round. 0
    if the link was not busy for `window_s`, None if too little was confirmed.
    """
    runs = [run for samples in stretches for run in busy_runs(samples)]
    run = max(runs, key=span_s, default=[])
    if span_s(run) < window_s:
        return 0.0
    grown = [now for before, now in pairwise(run) if now.delivered > before.delivered]
    if not grown:
        return None
    from_s = min((2 * run[0].at_s + run[-1].at_s) / 3, run[-1].at_s - window_s)
    first = [grown[0], *(sample for sample in grown if sample.at_s <= from_s)][-1]
    if grown[-1].delivered - first.delivered < READ_BYTES:
        return None
    return (grown[-1].delivered - first.delivered) * BITS / (grown[-1].at_s - first.at_s)


def _mean_mbit_s(samples: Sequence[Sample]) -> float:
    return (samples[-1].delivered - samples[0].delivered) * BITS / span_s(samples)


def busy_runs(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Return the times for which a stretch was busy."""
    return [list(run) for busy, run in groupby(samples, lambda sample: sample.busy) if busy]


def span_s(samples: Sequence[Sample]) -> float:
    """Return the seconds from the first to the last."""
    return samples[-1].at_s - samples[0].at_s if samples else 0.0


def was_held(stretches: Sequence[Sequence[Sample]], window_s: float = WINDOW_S) -> bool:
    """Return whether more waited to leave most of the time, and never long enough for a reading."""
    runs = [run for samples in stretches for run in busy_runs(samples)]
    num_samples = sum(map(len, stretches))
    is_short = max(map(span_s, runs), default=0.0) < window_s
    return is_short and num_samples > 1 and 2 * sum(map(len, runs)) >= num_samples


@dataclass(frozen=True, kw_only=True)
class RateEstimate:
    """The measurements of one direction of a link, and the plan for the next one."""

    mbit_s: float | None = None
    """None if nothing is known"""
    gain: float = math.inf
    """over the estimate, in the next round; infinite: as fast as it goes"""
    recent: tuple[float, ...] = ()
    """saturated rates of the last rounds"""
    searched: int = 0
    """rounds since one searched for more"""

    @property
    def pace_mbit_s(self) -> float | None:
        """Return how fast to send; None for as fast as it goes."""
        if self.mbit_s is None or math.isinf(self.gain):
            return None
        return self.mbit_s * self.gain

    def without_pace(self) -> RateEstimate:
        """Return the estimate after a short round that the pace held.

        No such round can correct the pace. Without one, its bytes wait no longer in TCP's queue
        than they did for their turns.
        """
        return replace(self, gain=math.inf, recent=())

    def after(self, saturated_mbit_s: float | None) -> RateEstimate:
        """Return the estimate after a round in which the busy link showed this rate, 0 for none.

        None: the round was busy and showed no rate. If it was the pace that kept it busy, the pace
        is forgotten, which no round of this size would ever correct.
        """
        rate, pace = saturated_mbit_s, self.pace_mbit_s
        if rate is None:
            return self if pace is None else RateEstimate()
        if not rate:
            return self
        if pace is None:  # low, because TCP had to find the rate: the next round searches at once
            return RateEstimate(mbit_s=rate, gain=SEARCH_GAIN)
        if self.gain == SEARCH_GAIN and rate >= FOUND_SHARE * pace:
            return RateEstimate(mbit_s=rate)
        recent = (*self.recent, rate)[-KEPT_ROUNDS:]
        if all(each < SLOWER_SHARE * (self.mbit_s or 0.0) for each in recent[-2:]):
            recent = recent[-2:]
        searched = 0 if self.gain == SEARCH_GAIN else self.searched + 1
        gain = SEARCH_GAIN if searched >= SEARCH_EVERY else GAIN
        likely = statistics.median_high(recent)
        return RateEstimate(mbit_s=likely, gain=gain, recent=recent, searched=searched)


@dataclass(frozen=True, kw_only=True)
class FlowEstimate:
    """The newest measurements of an uplink that is busy most of the time."""

    readings: tuple[float, ...] = ()
    """Mbit/s, the newest last"""
    since_probe: int = 0
    """readings"""
    carried: int = 0
    """probes in a row that the link carried"""

    @property
    def reading_s(self) -> float:
        """Return how long the next reading lasts."""
        return FLOW_S / 2 if self.carried else FLOW_S

    @property
    def mbit_s(self) -> float | None:
        """Return what the link carries; None if too little is known."""
        return sorted(self.readings)[-2] if len(self.readings) >= LEAST_READINGS else None

    @property
    def pace_mbit_s(self) -> float | None:
        """Return how fast to send; None for as fast as it goes."""
        if self.mbit_s is None:
            return None
        gain = min(PROBE_GAIN * PROBE_GROWTH**self.carried, MAX_PROBE_GAIN)
        return self.mbit_s * (1 + gain if self._is_probe else FLOW_SHARE)

    @property
    def _is_probe(self) -> bool:
        return self.carried > 0 or self.since_probe == PROBE_EVERY - 1

    def after(self, samples: Sequence[Sample]) -> FlowEstimate:
        """Return the estimate after a reading; one of an idle link counts only if it shows more."""
        rate, pace = _mean_mbit_s(samples), self.pace_mbit_s
        busy_share = sum(sample.busy for sample in samples) / len(samples)
        if busy_share < BUSY_SHARE and rate <= (self.mbit_s or math.inf):
            return self
        readings = (*self.readings, rate)[-KEPT_READINGS:]
        if pace is None:
            return FlowEstimate(readings=readings)
        if not self._is_probe:
            return replace(self, readings=readings, since_probe=self.since_probe + 1)
        is_carried = rate >= CARRIED_SHARE * pace
        if not is_carried and not self.carried:
            return FlowEstimate(readings=readings)
        # Not more than it offered, whatever a burst shows. The first probe of a run that is too
        # much shows what the link carries.
        found = max(min(rate, pace), self.mbit_s or 0.0)
        return FlowEstimate(
            readings=(found,) * LEAST_READINGS, carried=self.carried + 1 if is_carried else 0
        )
