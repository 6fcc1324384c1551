"""How fast a peer trains, over whole windows: what windows by speed are cut by."""

from dataclasses import dataclass

WARM_STEPS = 2  # caches, kernels and compilation; nobody trains at their speed for long
LONGER = 4.0  # times the usual; of a longer step or window the process or its machine slept
SMOOTHING = 0.5  # share of the windows before: one busy minute of a machine is not its speed


@dataclass(kw_only=True)
class Pace:
    """Seconds of a step with all that a window brings with it (validation, saving) but waits."""

    step_s: float = 0.0
    """0 until a window was measured."""
    _began: tuple[float, int] | None = None

    def look(self, busy_s: float, steps: int) -> None:
        """Measure from one window's beginning to the next.

        Args:
            busy_s: on a clock that stands still while the peer waits.
            steps: inner steps done so far.
        """
        if steps < WARM_STEPS:
            return
        if self._began is not None and steps > self._began[1]:
            latest_s = max(0.0, busy_s - self._began[0]) / (steps - self._began[1])
            before_s = self.step_s or latest_s
            latest_s = min(latest_s, LONGER * before_s)
            self.step_s = SMOOTHING * before_s + (1.0 - SMOOTHING) * latest_s
        self._began = (busy_s, steps)
