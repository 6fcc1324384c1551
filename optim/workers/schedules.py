"""Two pure rules of a window's length: by the learning rate, and by each peer's speed.

    QSR         H grows with 1 / lr^2 (Quadratic Synchronization Rule, arXiv:2310.14423)
    deadline    each peer's own H, so that unequal peers arrive together

`Rate` is the schedule that QSR follows, and `atoll.optim.workers.timetable` says which H a
position of a
run's log has. A run takes them as outer.windows = "qsr" and "deadline".
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

SLOWEST, FASTEST = 0.5, 2.0  # H within half to twice the median; beyond it change accumulation


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

    The window lasts as long as `inner_steps` take at the median speed. Nobody's H leaves half to
    twice that of the median peer: a slower peer ends later, a faster one waits, and both should
    change how many batches they accumulate a step.

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
    shortest = max(1, math.ceil(SLOWEST * inner_steps))
    longest = math.floor(FASTEST * inner_steps)
    return [min(max(math.floor(window_s / s + 1e-9), shortest), longest) for s in step_s]
