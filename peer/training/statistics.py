"""A trainer's public statistics, its saved counters and its measured pace."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import get_args

from atoll.coordinator.run.status import TimeUse

LOSS_DECAY = 0.95  # averages about the last 20 steps
WARM_STEPS = 2  # not measured: they fill caches, load kernels and compile
# A step or window longer than this many times the usual one is cut to it: the process or its
# machine was suspended, and other peers would expect this one to be late.
LONGER = 4.0
SMOOTHING = 0.5  # weight of earlier windows, because one busy minute of a machine is not its speed


class TrainerPhase(StrEnum):
    """The phase of a trainer; docs/protocol.md, part "Phases", lists them."""

    STARTING = "starting"
    TRAINING = "training"
    REDUCING = "reducing"
    VALIDATING = "validating"
    STOPPED = "stopped"
    FINISHED = "finished"


@dataclass(frozen=True, kw_only=True)
class TrainerStatistics:
    """State of a trainer at one moment."""

    phase: TrainerPhase = TrainerPhase.STARTING
    position: int = 0
    """Position of the log of this peer's synced parameters."""
    step: int = 0
    """Inner steps done in the open window."""
    inner_steps: int = 0
    """Inner steps per window."""
    schedule_step: int = 0
    """Step of the run that determines the learning rate."""
    steps: int = 0
    """Inner steps that this peer attempted, including skipped ones."""
    tokens: int = 0
    """Tokens that this peer trained on."""
    loss: float = math.nan
    """Mean training loss of about the last 20 steps, in nats per token."""
    valid_loss: float = math.nan
    """Last measured loss of the synced parameters on held-out text, in nats per token."""
    valid_position: int = -1
    """Position of the log at which `valid_loss` was measured; -1 before."""
    learning_rate: float = 0.0
    """Learning rate of the last step."""
    tokens_per_s: float = 0.0
    """Throughput over the last steps, including waits."""
    step_s: float = 0.0
    """Smoothed seconds per step, without waits."""
    pace_s: float = 0.0
    """Seconds per step over the last windows, with validation and saving but without waits."""
    ready_at_s: float = 0.0
    """When the open window is expected to end, by `time.monotonic`: between two steps it comes
    nearer, and leaders that ask in the last one would take a whole step for what is left."""
    spent: TimeSpent = field(default_factory=lambda: TimeSpent())
    """Seconds of this process since its first window, which waits for the run to begin."""
    windows: int = 0
    """Completed windows."""
    skipped_steps: int = 0
    """Steps skipped because the loss or gradient was not finite."""
    dropped_windows: int = 0
    """Windows not contributed because parameters were not finite or seemed corrupted."""
    params: int = 0
    """Number of trained parameters."""
    device: str = "cpu"
    """Name of the device."""
    precision: str = "float32"
    """Number format of the forward pass."""

    @property
    def valid_is_new(self) -> bool:
        """Return whether `valid_loss` is of the newest position, or of the one before it."""
        return self.valid_position >= max(0, self.position - 1)

    @property
    def utilisation(self) -> float:
        """Fraction of the time spent training since the first window; 1.0 before the second."""
        return self.spent.utilisation


@dataclass(frozen=True, kw_only=True)
class TimeSpent:
    """Seconds of a trainer by what it did; `total_s` has more: reading data, and the rest."""

    total_s: float = 0.0
    train_s: float = 0.0
    """Gradients and inner optimizer."""
    pause_s: float = 0.0
    """Pauses that the owner asks for (`--share`)."""
    outer_s: float = 0.0
    """Copies of parameters and arithmetic at the ends of windows."""
    wait_s: float = 0.0
    """Waiting for rounds, and taking their commits meanwhile."""
    validate_s: float = 0.0
    save_s: float = 0.0

    @property
    def utilisation(self) -> float:
        """Fraction spent training; 1.0 of nothing."""
        return min(1.0, self.train_s / self.total_s) if self.total_s else 1.0

    def shares(self) -> dict[TimeUse, float]:
        """Return the fraction of each, and of all that is not told apart as `other`."""
        if not self.total_s:
            return {}
        told: list[TimeUse] = [use for use in get_args(TimeUse) if use != "other"]
        shares: dict[TimeUse, float] = {
            use: float(getattr(self, f"{use}_s")) / self.total_s for use in told
        }
        shares["other"] = max(0.0, 1.0 - sum(shares.values()))
        return shares

    def minus(self, earlier: TimeSpent) -> TimeSpent:
        """Return what was spent since then."""
        return TimeSpent(
            **{
                each.name: max(0.0, getattr(self, each.name) - getattr(earlier, each.name))
                for each in fields(self)
            }
        )


@dataclass(kw_only=True)
class TimeInRun:
    """The time that was spent since the first window, which waits for the run to begin."""

    _before: TimeSpent | None = None

    def mark(self, windows: int, spent: TimeSpent) -> None:
        """Note the sums after a step, once it has waited."""
        if windows and self._before is None:
            self._before = spent

    def since(self, spent: TimeSpent) -> TimeSpent:
        """Return what was spent since then; nothing before work has begun again.

        The first round is decided when the second window has not begun: its share of time is none.
        """
        in_run = spent.minus(self._before) if self._before is not None else TimeSpent()
        return in_run if in_run.train_s else TimeSpent()


@dataclass(kw_only=True)
class TrainerCounters:
    """Counters of a trainer; all of them are saved."""

    position: int
    seen_position: int
    """Position of the log at which validation was last considered."""
    steps: int = 0
    tokens: int = 0
    since_commit: int = 0
    skips_in_a_row: int = 0
    dropped_in_a_row: int = 0
    skipped: int = 0
    dropped: int = 0
    loss_sum: float = 0.0
    """Sum of the losses, weighted by age."""
    loss_weight: float = 0.0
    """Sum of the weights."""

    def add_loss(self, loss: float) -> None:
        """Add the loss of one step."""
        self.loss_sum = LOSS_DECAY * self.loss_sum + (1 - LOSS_DECAY) * loss
        self.loss_weight = LOSS_DECAY * self.loss_weight + (1 - LOSS_DECAY)

    @property
    def loss(self) -> float:
        """Mean loss of about the last 20 steps; NaN before the first."""
        return self.loss_sum / self.loss_weight if self.loss_weight else math.nan


@dataclass(kw_only=True)
class StepPace:
    """Smoothed seconds per step over whole windows, with validation and saving but without waits.

    Windows by speed (`outer.windows = "deadline"`) are sized by this figure.
    """

    step_s: float = 0.0
    """0 until the first window was measured."""
    _began: tuple[float, int] | None = None
    _suspended_s: float = 0.0

    def leave_out(self, seconds: float) -> None:
        """Leave out a time for which the process, or its machine, was suspended.

        Counted, it would shorten the windows of the next minute to half: as many as it takes the
        mean to forget it, and the peer would wait for the others in each of them.
        """
        self._suspended_s += seconds

    def measure(self, busy_s: float, steps: int) -> None:
        """Measure from the start of one window to the start of the next.

        Args:
            busy_s: seconds on a clock that stands still while the peer waits.
            steps: inner steps done so far.
        """
        if steps < WARM_STEPS:
            return
        busy_s -= self._suspended_s
        if self._began is not None and steps > self._began[1]:
            latest_s = max(0.0, busy_s - self._began[0]) / (steps - self._began[1])
            before_s = self.step_s or latest_s
            latest_s = min(latest_s, LONGER * before_s)
            self.step_s = SMOOTHING * before_s + (1.0 - SMOOTHING) * latest_s
        self._began = (busy_s, steps)
