"""A run's windows and learning rate: which inner steps belong to which position of its log.

A run is a row of turns. In a turn each of its n fragments moves once, so position p lies in turn
p // n, and a turn has H inner steps: the window of every fragment. H is the same in all turns, or
follows one of two pure rules, which a run takes as outer.windows = "qsr" and "deadline":

    QSR         H grows with 1 / lr^2 (Quadratic Synchronization Rule, arXiv:2310.14423)
    deadline    each peer's own H, so that unequal peers arrive together

By QSR it grows in stairs as the learning rate (`Rate`) falls:

    turn   0  1  2  3  4  5  6 ...
    H     30 30 30 31 31 34 40

A `Timetable` follows from the run's spec alone, so a peer that joins late needs no history.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import median_low

# H stays within half to twice the median's, so a false claim of speed moves it no further; a peer
# beyond that should change how many batches it accumulates a step.
SLOWEST, FASTEST = 0.5, 2.0
# Of a window, by which one may end before the others' and stay as it is: their reports are seconds
# old, and the next window begins with theirs anyway.
IN_STEP = 0.05
# Of a peer's own pace, where all windows have equal steps: those of other paces end at other times.
ALIKE = (0.9, 1.1)


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Inner learning rate of a run: a linear warm-up, then half a cosine (arXiv:1608.03983)."""

    peak: float
    warmup_steps: int
    """Steps from a rate of zero up to the peak."""
    min_ratio: float
    """Rate at the last step, as a share of the peak."""

    def at(self, step: int, total_steps: int) -> float:
        """Rate of one inner step.

        Args:
            step: counted from 0 over the whole run, whoever does it.
            total_steps: of the run; 0 for a run without an end, whose rate stays at the peak.
        """
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if not total_steps:
            return self.peak
        span = max(1, total_steps - 1 - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / span)
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.peak * (self.min_ratio + (1.0 - self.min_ratio) * share)


@dataclass(frozen=True, kw_only=True)
class QSR:
    """H of the window that begins at a rate: max(shortest, floor((growth / lr)^2)).

    Departure: at most `longest`, because a rate that falls to a tenth asks for 100 times as much.
    """

    shortest: int
    """H while the rate is high."""
    longest: int
    growth: float
    """The paper's growth coefficient alpha: the rate at which H would be 1."""

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: when one is out of range.
        """
        if not 1 <= self.shortest <= self.longest or not 0 < self.growth < math.inf:
            raise ValueError(
                "expected 1 <= shortest <= longest and a growth above 0, "
                f"got {self.shortest}, {self.longest} and {self.growth}"
            )

    def inner_steps(self, lr: float) -> int:
        """H at an inner learning rate of at least 0."""
        if lr * math.sqrt(self.longest) <= self.growth:
            return self.longest
        return max(self.shortest, math.floor((self.growth / lr) ** 2))


def deadline(step_s: Sequence[float], *, inner_steps: int) -> list[int]:
    """H of each of several unequal peers, so that all end their windows together.

    The window lasts as long as `inner_steps` take at the median speed, to the nearest whole step,
    so that peers of about one speed take equally many. Nobody's H leaves half to twice that of the
    median peer: a slower peer ends later, a faster one waits, and both should change how many
    batches they accumulate a step.

    Args:
        step_s: seconds of an inner step, a peer each.
        inner_steps: H at the median speed.

    Raises:
        ValueError: when there is no peer, or a number is not above 0.
    """
    if not step_s or any(not 0 < seconds < math.inf for seconds in step_s):
        raise ValueError(f"expected finite step times above 0, got {list(step_s)}")
    if inner_steps < 1:
        raise ValueError(f"expected at least one inner step, got {inner_steps}")
    window_s = inner_steps * median_low(step_s)
    return [bounded(window_s / s, inner_steps=inner_steps) for s in step_s]


def bounded(steps: float, *, inner_steps: int) -> int:
    """Return the whole number of steps nearest to `steps` that a window may have by `deadline`."""
    shortest = max(1, math.ceil(SLOWEST * inner_steps))
    longest = math.floor(FASTEST * inner_steps)
    # Rounded last: a claim of 1e-320 s a step makes an infinite number of steps.
    return round(min(max(steps, shortest), longest))


@dataclass(frozen=True, kw_only=True)
class WindowEnd:
    """When another peer's window ends, as it has reported."""

    step_s: float
    """Its seconds per step."""
    in_s: float
    """Seconds from now; below 0 if the window should have ended since."""


def until_others_end(
    left_s: float,
    others: Sequence[WindowEnd],
    *,
    window_s: float,
    step_s: float,
    late_s: float,
    alike: tuple[float, float] = (SLOWEST, FASTEST),
    counts: bool = True,
) -> float:
    """Return how long a window should last from now on to end with most of the others'.

    A peer that joins, or that took a commit late, begins its window in the middle of theirs. After
    a whole window it would wait for them as long as it was late, or miss their round by as much as
    the one before, and so each time. So it ends this one with theirs or with their next, whichever
    is nearer, and from then on all are in step. A window that counts nothing anyway ends with
    theirs, however short it is.

    Args:
        left_s: seconds until this peer's window ends by itself.
        others: peers at the same position.
        window_s: seconds of a window, of this peer's as of the others'.
        step_s: this peer's seconds per step. A report is about as old, so no window is made longer
            by less.
        late_s: seconds by which it may end after the others', who wait for so long.
        alike: bounds of the median pace over that of a peer whose windows last as long. Others are
            left alone: by default those at a bound of `deadline`.
        counts: whether the window counts; False of the first one of a joiner.
    """
    median_s = median_low([step_s, *(other.step_s for other in others)])

    def keeps_up(seconds: float) -> bool:
        return alike[0] <= median_s / seconds <= alike[1]

    ends_s = [other.in_s for other in others if keeps_up(other.step_s)]
    if not ends_s or not keeps_up(step_s):
        return left_s
    if not counts:
        return step_s + median_low([(end_s - step_s) % window_s for end_s in ends_s])
    half_s = window_s / 2
    shift_s = median_low([(end_s - left_s + half_s) % window_s - half_s for end_s in ends_s])
    is_out = shift_s < -late_s or shift_s > max(IN_STEP * window_s, step_s)
    return left_s + shift_s if is_out else left_s


@dataclass(frozen=True, kw_only=True)
class Stair:
    """Turns of one H, up to the next stair."""

    turn: int
    """The first of them."""
    step: int
    """At which it begins."""
    inner_steps: int


@dataclass(frozen=True, kw_only=True)
class Timetable:
    """Steps and windows of a run by position."""

    stairs: tuple[Stair, ...]
    num_fragments: int = 1
    total_steps: int = 0
    """The learning rate's; the last window ends there or just before. 0: the run has no end."""

    def steps_until(self, position: int) -> int:
        """Inner steps of a run up to a position."""
        turn, moved = divmod(position, self.num_fragments)
        stair = self._stair(turn)
        steps = stair.step + (turn - stair.turn) * stair.inner_steps
        return steps + moved * stair.inner_steps // self.num_fragments

    def window(self, position: int) -> int:
        """H of the turn that a position lies in; after the end that of the last."""
        return self._stair(position // self.num_fragments).inner_steps

    def mean_window(self, rounds: int) -> int:
        """H on average over so many rounds; the first one's if there are none."""
        if not rounds:
            return self.window(0)
        return max(1, round(self.steps_until(rounds) * self.num_fragments / rounds))

    def turn_at(self, step: int) -> int:
        """The turn that a step lies in."""
        stair = self.stairs[bisect_right(self.stairs, step, key=lambda stair: stair.step) - 1]
        return stair.turn + (step - stair.step) // stair.inner_steps

    def _stair(self, turn: int) -> Stair:
        return self.stairs[bisect_right(self.stairs, turn, key=lambda stair: stair.turn) - 1]


def equal(inner_steps: int, *, rounds: int, num_fragments: int = 1) -> Timetable:
    """Windows of one length.

    Args:
        inner_steps: H.
        rounds: positions of the run's log, 0 for a run without an end.
        num_fragments: that take turns.
    """
    stairs = (Stair(turn=0, step=0, inner_steps=inner_steps),)
    endless = Timetable(stairs=stairs, num_fragments=num_fragments)
    total_steps = endless.steps_until(rounds)
    return Timetable(stairs=stairs, num_fragments=num_fragments, total_steps=total_steps)


def growing(rule: QSR, rate: Rate, *, total_steps: int, num_fragments: int = 1) -> Timetable:
    """Windows that grow over so many steps; as many rounds as that makes."""
    peak_step = rate.warmup_steps  # on the way up the paper takes H at the peak

    def length_at(step: int) -> int:
        return rule.inner_steps(rate.at(max(step, peak_step), total_steps))

    stairs = _climb(length_at, total_steps)
    return Timetable(stairs=stairs, num_fragments=num_fragments, total_steps=total_steps)


@cache
def growing_over(rule: QSR, rate: Rate, *, rounds: int, num_fragments: int = 1) -> Timetable:
    """Windows that grow over so many rounds.

    The rate falls over the run's steps, and how many these are follows from the rate. With more of
    them the rate is higher at each, so windows are shorter: the least number that the rounds do
    not go beyond is the one.

    Raises:
        ValueError: for a run without an end.
    """
    if rounds < 1:
        raise ValueError(f"expected a run with an end, got {rounds} rounds")

    # Of the total and the steps that its windows add up to, one rises and the other falls with the
    # total, so they cross once.
    def of(total_steps: int) -> Timetable:
        return growing(rule, rate, total_steps=total_steps, num_fragments=num_fragments)

    least, most = (rounds * h // num_fragments for h in (rule.shortest, rule.longest))
    total_steps = bisect_left(
        range(most + 1), True, lo=least, key=lambda steps: of(steps).steps_until(rounds) <= steps
    )
    timetable, last_turn = of(total_steps), (rounds - 1) // num_fragments
    stairs = tuple(stair for stair in timetable.stairs if stair.turn <= last_turn)
    return replace(timetable, stairs=stairs)


def _climb(length_at: Callable[[int], int], total_steps: int) -> tuple[Stair, ...]:
    """The stairs of a length that never falls."""
    steps: Sequence[int] = range(total_steps)
    stairs = [Stair(turn=0, step=0, inner_steps=length_at(0))]
    while True:
        last = stairs[-1]
        rises = bisect_left(steps, last.inner_steps + 1, lo=last.step, key=length_at)
        if rises >= total_steps:
            return tuple(stairs)
        turns = -(-(rises - last.step) // last.inner_steps)
        step = last.step + turns * last.inner_steps
        turn = last.turn + turns
        stairs.append(Stair(turn=turn, step=step, inner_steps=length_at(step)))
