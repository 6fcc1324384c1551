"""How a trainer is, as others read it, and what it counts for that."""

import math
from dataclasses import dataclass

LOSS_DECAY = 0.95  # the mean of about the last 20 steps


@dataclass(frozen=True, kw_only=True)
class TrainerStatistics:
    """How a trainer is."""

    phase: str = "starting"
    """``starting``, ``training``, ``reducing``, ``validating``, ``stopped`` or ``finished``."""
    position: int = 0
    """Position of the log that this peer's synced parameters stand at."""
    step: int = 0
    """Inner steps done in the open window."""
    inner_steps: int = 0
    """Inner steps of a window."""
    schedule_step: int = 0
    """Step of the run that the learning rate follows."""
    steps: int = 0
    """Inner steps that this peer tried, skipped ones included."""
    tokens: int = 0
    """Tokens that this peer trained on."""
    loss: float = math.nan
    """Mean training loss of about the last 20 steps."""
    valid_loss: float = math.nan
    """Loss of the synced parameters on held-out text, when it was last measured."""
    valid_position: int = -1
    """Position at which it was measured."""
    learning_rate: float = 0.0
    """Rate of the last step."""
    tokens_per_s: float = 0.0
    """Over the last steps, waits included."""
    step_s: float = 0.0
    """Seconds that one step takes, waits left out."""
    pace_s: float = 0.0
    """Seconds that a step took over the last windows, with everything but waits in it."""
    ready_in_s: float = 0.0
    """Seconds until the open window is done, at this speed."""
    compute_s: float = 0.0
    """Seconds spent on training."""
    wait_s: float = 0.0
    """Seconds spent on rounds."""
    windows: int = 0
    """Windows ended."""
    skipped_steps: int = 0
    """Steps not taken, for a loss or gradient that was not finite."""
    dropped_windows: int = 0
    """Windows that were not sent, for parameters that were not finite or seemed spoiled."""
    params: int = 0
    """Trained parameters of the model."""
    device: str = "cpu"
    """Where it trains."""
    precision: str = "float32"
    """Number format of the forward pass."""

    @property
    def utilisation(self) -> float:
        """Share of the time that went into training, 1.0 before the first wait."""
        total_s = self.compute_s + self.wait_s
        return self.compute_s / total_s if total_s else 1.0


@dataclass(kw_only=True)
class Progress:
    """What the trainer counts itself; all of it is saved."""

    position: int
    seen_position: int
    """Position at which validation was last considered."""
    steps: int = 0
    tokens: int = 0
    since_commit: int = 0
    skips_in_a_row: int = 0
    dropped_in_a_row: int = 0
    skipped: int = 0
    dropped: int = 0
    loss_sum: float = 0.0
    """Sum of the losses, each weighted by its age."""
    loss_weight: float = 0.0
    """Sum of these weights."""

    def add_loss(self, loss: float) -> None:
        """Take the loss of one step."""
        self.loss_sum = LOSS_DECAY * self.loss_sum + (1 - LOSS_DECAY) * loss
        self.loss_weight = LOSS_DECAY * self.loss_weight + (1 - LOSS_DECAY)

    @property
    def loss(self) -> float:
        """Mean of the last steps, NaN before the first."""
        return self.loss_sum / self.loss_weight if self.loss_weight else math.nan
