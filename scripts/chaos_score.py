"""What a run under chaos kept: tokens of the living, memory, chains."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

Span = tuple[float, float]

# In which a process still grows: it loads and recovers, and its heap spreads until what it frees
# fits what it takes: docs/benchmarks/chaos.md.
EARLY_S = 300.0
LEAST_LIFE_S = 120.0  # after that, of a process whose memory says something
FIFTH = 0.2


@dataclass(frozen=True, kw_only=True)
class Life:
    """One process of a peer. Times are seconds since 1970."""

    host: int
    trains_s: float
    """when it said that it trains"""
    ended_s: float
    """when it was killed or told to leave, or the run ended"""
    frozen: tuple[Span, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The resident memory of a process and its children over time."""

    name: str
    samples: tuple[tuple[float, int], ...]
    """(seconds since 1970, bytes)"""

    @property
    def growth(self) -> float | None:
        """Return by which share it grew from its first fifth to its last; None if it lived briefly.

        Medians of these fifths: what is taken for one round and given back is no growth.
        """
        began_s = self.samples[0][0] + EARLY_S if self.samples else 0.0
        later = [size for at_s, size in self.samples if at_s >= began_s]
        if not later or self.samples[-1][0] - began_s < LEAST_LIFE_S:
            return None
        fifth = max(1, int(FIFTH * len(later)))
        return median(later[-fifth:]) / median(later[:fifth]) - 1


def living_s(lives: Sequence[Life], within: Span) -> float:
    """Return the seconds for which peers could train, summed over the peers.

    A peer lives from when it says that it trains until it is killed or told to leave, without the
    time for which its processes are stopped. With its link cut it lives: it can train.
    """
    return sum(
        _overlap((life.trains_s, life.ended_s), within)
        - sum(_overlap(_cut(each, life), within) for each in life.frozen)
        for life in lives
    )


def _cut(span: Span, life: Life) -> Span:
    return max(span[0], life.trains_s), min(span[1], life.ended_s)


def _overlap(one: Span, other: Span) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


def tokens_between(points: Sequence[tuple[float, int]], within: Span) -> float:
    """Return the tokens counted within a time, by straight lines between rounds.

    Args:
        points: (seconds since 1970, tokens so far) after each round, in order.
        within: two times between the first and the last of them.
    """
    return _tokens_at(points, within[1]) - _tokens_at(points, within[0])


def _tokens_at(points: Sequence[tuple[float, int]], at_s: float) -> float:
    before = max((point for point in points if point[0] <= at_s), default=points[0])
    after = min((point for point in points if point[0] >= at_s), default=points[-1])
    if after[0] <= before[0]:
        return float(before[1])
    share = (at_s - before[0]) / (after[0] - before[0])
    return before[1] + share * (after[1] - before[1])
