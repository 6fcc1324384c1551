"""Settings that all methods of one simulation share: workers, text, schedule and churn.

Workers can miss rounds (`drop`), the last one can join late (`join_at`), and each can have its own
text (`split_data`). If speeds differ (`speeds`), a worker's window has as many steps as it can take
while the median worker takes `inner_steps`.

# T steps of the median worker
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from atoll.coordinator.run.sections import LONGEST
from atoll.optim import schedules
from atoll.optim.schedules import Rate, Timetable
from atoll.peer.errors import SetupError

RATE_SHARES = {"adamw": 1.0, "muon": 2.0, "lion": 0.1, "sgd": 1.0}
"""Inner learning rates relative to AdamW's. Lion's authors advise a tenth. Muon was best at twice
AdamW's rate; DeMo, which uses that of SGD, was best at the same rate (docs/methods.md)."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings that all methods of one simulation share."""

    workers: int = 4
    tokens: int = 1_000_000
    """Tokens of all workers together."""
    inner_steps: int = 30
    batch_size: int = 8
    """Sequences per worker and step."""
    seq_len: int = 128
    model: str = "nano"
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `ModelConfig` that differ from the preset."""
    source: str = "stdlib"
    lr: float = 1.5e-3
    """AdamW's peak learning rate; those of other optimizers are in `RATE_SHARES`."""
    warmup: float = 0.1
    """Fraction of the steps for warm-up."""
    min_lr_ratio: float = 0.1
    clip_norm: float = 1.0
    points: int = 8
    """Number of measurements on held-out text."""
    valid_batches: int = 16
    inner: str = ""
    """Inner optimizer of all methods with windows; empty for each method's own."""
    growth: float = 0.0
    """Growth coefficient of QSR windows, at AdamW's rate; 0 for windows of equal length."""
    max_inner_steps: int = 0
    """Longest window of QSR; 0 for ten times `inner_steps`."""
    drop: float = 0.0
    """Fraction of rounds that each worker misses; its work counts in a later one."""
    speeds: tuple[float, ...] = ()
    """Relative speeds, repeated to cover all workers; empty for equal ones."""
    split_data: bool = False
    """True if each worker trains only on its own part of the text."""
    join_at: float = 0.0
    """Fraction of the run after which the last worker joins; 0 for the start."""

    def __post_init__(self) -> None:
        for name in ("workers", "inner_steps", "batch_size", "seq_len", "points", "tokens"):
            if getattr(self, name) < 1:
                raise SetupError(f"expected at least 1 for {name}, got {getattr(self, name)}")
        self._check_churn()
        self._check_growth()
        if self.steps < 1:
            raise SetupError(
                f"expected at least {self.tokens_per_step} tokens, one step of all workers, "
                f"got {self.tokens}; increase --tokens"
            )

    def _check_churn(self) -> None:
        for name in ("drop", "join_at"):
            share = getattr(self, name)
            if not 0 <= share < 1:
                raise SetupError(f"expected {name} from 0 to below 1, got {share:g}")
        if any(not 0 < speed < math.inf for speed in self.speeds):
            raise SetupError(f"expected speeds above 0, got {self.speeds}")
        if self.inner and self.inner not in RATE_SHARES:
            raise SetupError(f"expected one of {', '.join(RATE_SHARES)}, got {self.inner!r}")
        if self.join_at > 0 and self.workers < 2:
            raise SetupError("--join-at requires at least 2 workers")

    def _check_growth(self) -> None:
        if self.growth < 0:
            raise SetupError(f"expected a growth of at least 0, got {self.growth:g}")
        if not self.growth and self.max_inner_steps:
            raise SetupError("--max-inner-steps requires --growth")
        if not self.growth:
            return
        if self.speeds:
            raise SetupError("--growth and --speeds cannot be combined")
        if self.longest <= self.inner_steps:
            raise SetupError(
                f"expected a longest window above {self.inner_steps} steps, got {self.longest}"
            )
        least = self.min_lr_ratio * self.lr * math.sqrt(self.inner_steps + 1)
        if self.growth < least:
            raise SetupError(
                f"windows would not grow: expected a growth of at least {least:.3g}, "
                f"got {self.growth:.3g}"
            )

    @property
    def longest(self) -> int:
        """Steps of the longest QSR window."""
        return self.max_inner_steps or LONGEST * self.inner_steps

    def rate(self, share: float = 1.0) -> Rate:
        """Return the learning-rate schedule at a multiple of AdamW's rate."""
        return Rate(
            peak=self.lr * share,
            warmup_steps=int(self.warmup * self.steps),
            min_ratio=self.min_lr_ratio,
        )

    @cached_property
    def timetable(self) -> Timetable:
        """Windows of the run, by position."""
        if not self.growth:
            return schedules.equal(self.inner_steps, rounds=self.steps // self.inner_steps)
        rule = schedules.QSR(shortest=self.inner_steps, longest=self.longest, growth=self.growth)
        return schedules.growing(rule, self.rate(), total_steps=self.steps)

    @property
    def windows(self) -> tuple[int, ...]:
        """H of each worker, by its speed, so that all windows end together."""
        if not self.speeds:
            return (self.inner_steps,) * self.workers
        step_s = [1.0 / self.speeds[i % len(self.speeds)] for i in range(self.workers)]
        return tuple(schedules.deadline(step_s, inner_steps=self.inner_steps))

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all workers per step, on average over a window."""
        return sum(self.windows) * self.batch_size * self.seq_len // self.inner_steps

    @property
    def steps(self) -> int:
        """T, inner steps of the median worker."""
        per_window = sum(self.windows) * self.batch_size * self.seq_len
        return self.tokens * self.inner_steps // per_window

    @property
    def join_step(self) -> int:
        """Step at which the last worker joins, at the end of a window."""
        windows, wanted = self.timetable, self.join_at * self.steps
        turn = windows.turn_at(int(wanted))
        ends = (windows.steps_until(turn), windows.steps_until(turn + 1))
        return min(ends, key=lambda step: abs(step - wanted))

    @property
    def churn(self) -> str:
        """Description of how workers differ from equal, constant ones; empty if they do not."""
        parts = [
            (self.drop > 0, f"each misses {100 * self.drop:g}% of the rounds"),
            (self.join_at > 0, f"the last joins after {self.join_step} steps"),
            (bool(self.speeds), f"windows of {', '.join(map(str, self.windows))} steps"),
            (self.growth > 0, f"windows grow from {_first_and_last(self)} steps"),
            (self.split_data, "each has its own text"),
        ]
        return "; ".join(text for holds, text in parts if holds)


def _first_and_last(settings: Settings) -> str:
    windows = settings.timetable
    last = windows.window(windows.turn_at(settings.steps - 1))
    return f"{windows.window(0)} to {last}"
