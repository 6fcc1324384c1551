"""What all methods of one simulation share: workers, text, schedule, and how unequal workers are.

Some rounds go on without a worker (`drop`), the last one joins late (`join_at`), each has text of
its own (`split_data`), and speeds differ (`speeds`): a window then has as many steps as a worker
can do while the median one does `inner_steps`.

# T steps of the median worker
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from atoll.coordinator.run.sections import LONGEST
from atoll.optim.workers import schedules, timetable
from atoll.optim.workers.schedules import Rate
from atoll.optim.workers.timetable import Timetable
from atoll.peer.errors import SetupError

RATE_SHARES = {"adamw": 1.0, "muon": 2.0, "lion": 0.1, "sgd": 1.0}
"""Inner rates as shares of AdamW's: Lion's authors advise a tenth. Muon's best was twice AdamW's,
DeMo's, which takes that of SGD, the same (docs/methods.md)."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all methods of one simulation share."""

    workers: int = 4
    tokens: int = 1_000_000
    """Of all workers together."""
    inner_steps: int = 30
    batch_size: int = 8
    """Sequences of a worker and step."""
    seq_len: int = 128
    model: str = "nano"
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the model's configuration."""
    source: str = "stdlib"
    lr: float = 1.5e-3
    """AdamW's peak rate; other inner optimizers take a share of it."""
    warmup: float = 0.1
    """Share of the steps."""
    min_lr_ratio: float = 0.1
    clip_norm: float = 1.0
    points: int = 8
    """Measurements on held-out text."""
    valid_batches: int = 16
    inner: str = ""
    """Optimizer of methods with windows, in place of the one that each takes."""
    growth: float = 0.0
    """Growth coefficient of windows by QSR, at AdamW's rate; 0: windows of one length."""
    max_inner_steps: int = 0
    """Longest window of QSR; 0: ten times `inner_steps`."""
    drop: float = 0.0
    """Share of the rounds that go on without a worker; its work counts in a later one."""
    speeds: tuple[float, ...] = ()
    """Relative speeds of the workers, repeated as often as needed; none: all alike."""
    split_data: bool = False
    """Whether each worker has its own part of the text, which nobody else sees."""
    join_at: float = 0.0
    """Share of the run after which the last worker joins; 0: all begin together."""

    def __post_init__(self) -> None:
        """Check that there is something to train.

        Raises:
            SetupError: when a number is out of range.
        """
        for name in ("workers", "inner_steps", "batch_size", "seq_len", "points", "tokens"):
            if getattr(self, name) < 1:
                raise SetupError(f"expected at least 1 for {name}, got {getattr(self, name)}")
        self._check_churn()
        self._check_growth()
        if self.steps < 1:
            raise SetupError(
                f"expected tokens for one step of all workers, {self.tokens_per_step}, "
                f"got {self.tokens}"
            )

    def _check_churn(self) -> None:
        if not 0 <= self.drop < 1 or not 0 <= self.join_at < 1:
            raise SetupError("expected shares from 0 to below 1 for missed rounds and joining")
        if any(not 0 < speed < math.inf for speed in self.speeds):
            raise SetupError(f"expected speeds above 0, got {self.speeds}")
        if self.inner and self.inner not in RATE_SHARES:
            raise SetupError(f"expected one of {', '.join(RATE_SHARES)}, got {self.inner!r}")
        if self.join_at > 0 and self.workers < 2:
            raise SetupError("expected a worker that the last one can join, got one in all")

    def _check_growth(self) -> None:
        if self.growth < 0:
            raise SetupError(f"expected a growth of at least 0, got {self.growth:g}")
        if not self.growth and self.max_inner_steps:
            raise SetupError("expected no longest window without --growth")
        if not self.growth:
            return
        if self.speeds:
            raise SetupError("expected windows that follow speeds or grow, got both")
        if self.longest <= self.inner_steps:
            raise SetupError(
                f"expected a longest window above {self.inner_steps} steps, got {self.longest}"
            )
        least = self.min_lr_ratio * self.lr * math.sqrt(self.inner_steps + 1)
        if self.growth < least:
            raise SetupError(f"windows would not grow: expected a growth of at least {least:.3g}")

    @property
    def longest(self) -> int:
        """Steps of the longest window of QSR."""
        return self.max_inner_steps or LONGEST * self.inner_steps

    def rate(self, share: float = 1.0) -> Rate:
        """The schedule of an inner optimizer that takes a share of AdamW's rate."""
        return Rate(
            peak=self.lr * share,
            warmup_steps=int(self.warmup * self.steps),
            min_ratio=self.min_lr_ratio,
        )

    @cached_property
    def timetable(self) -> Timetable:
        """Windows of the run by position."""
        if not self.growth:
            return timetable.equal(self.inner_steps, rounds=self.steps // self.inner_steps)
        rule = schedules.QSR(shortest=self.inner_steps, longest=self.longest, growth=self.growth)
        return timetable.growing(rule, self.rate(), total_steps=self.steps)

    @property
    def windows(self) -> tuple[int, ...]:
        """H of each worker: by its speed, so that all end their windows together."""
        if not self.speeds:
            return (self.inner_steps,) * self.workers
        step_s = [1.0 / self.speeds[i % len(self.speeds)] for i in range(self.workers)]
        return tuple(schedules.deadline(step_s, inner_steps=self.inner_steps))

    @property
    def tokens_per_step(self) -> int:
        """Of all workers together, on average over a window."""
        return sum(self.windows) * self.batch_size * self.seq_len // self.inner_steps

    @property
    def steps(self) -> int:
        """T, inner steps of the median worker."""
        per_window = sum(self.windows) * self.batch_size * self.seq_len
        return self.tokens * self.inner_steps // per_window

    @property
    def join_step(self) -> int:
        """Steps after which the last worker joins: at the end of a window."""
        windows, wanted = self.timetable, self.join_at * self.steps
        turn = windows.turn_at(int(wanted))
        ends = (windows.steps_until(turn), windows.steps_until(turn + 1))
        return min(ends, key=lambda step: abs(step - wanted))

    @property
    def churn(self) -> str:
        """What disturbs the workers, for people; empty where nothing does."""
        told = [
            (self.drop > 0, f"each misses {100 * self.drop:g}% of the rounds"),
            (self.join_at > 0, f"the last joins after {self.join_step} steps"),
            (bool(self.speeds), f"windows of {', '.join(map(str, self.windows))} steps"),
            (self.growth > 0, f"windows grow from {_first_and_last(self)} steps"),
            (self.split_data, "each has its own text"),
        ]
        return "; ".join(text for holds, text in told if holds)


def _first_and_last(settings: Settings) -> str:
    windows = settings.timetable
    last = windows.window(windows.turn_at(settings.steps - 1))
    return f"{windows.window(0)} to {last}"
