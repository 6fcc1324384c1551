"""Windows of a peer get their length by the run's rule, and each is brought in step once."""

import math
from collections.abc import Callable, Sequence

from atoll.coordinator.run.spec import RunSpec
from atoll.optim import schedules
from atoll.optim.methods.base import Method
from atoll.optim.methods.worker import Worker
from atoll.optim.reducer import Course
from atoll.peer.training.ranks import OneRank
from atoll.peer.training.statistics import TrainerStatistics

# Shares of a window between which it is compared with the others', once. By the first, the others'
# records, renewed each 5 s, tell of the windows that began with this one (if those last 50 s or
# more). After the second too few steps are left: a peer may start again near its window's end.
SHIFTED_FROM, SHIFTED_TO = 0.1, 0.5
LATE_GRACES = 0.5  # for which others may wait for this peer: the end that they tell is no promise


class Windows:
    """Sizes a worker's windows; all ranks of a peer ask together, and agree."""

    def __init__(
        self,
        spec: RunSpec,
        worker: Worker,
        method: Method,
        *,
        ranks: OneRank,
        statistics: Callable[[], TrainerStatistics],
        paces_s: Callable[[], Sequence[float]],
        window_ends: Callable[[], Sequence[schedules.WindowEnd]],
        joins: Callable[[], bool],
    ) -> None:
        """Size the windows of a worker of a run.

        Args:
            spec: of the run.
            worker: its windows are resized.
            method: of the run; hides rounds behind steps.
            ranks: of this peer; the others follow the first.
            statistics: returns those of this peer's trainer, with its pace.
            paces_s: returns the seconds per step that other peers report.
            window_ends: returns when the windows of other peers at this position end.
            joins: returns whether the open window counts nothing, as the first after joining.
        """
        self._spec, self._worker, self._method = spec, worker, method
        self._ranks, self._statistics = ranks, statistics
        self._others_paces_s, self._window_ends, self._joins = paces_s, window_ends, joins
        self._by_speed = spec.outer.windows == "deadline"
        self._is_in_step = False
        """whether this window was compared with the others'"""
        self._common_steps = 0
        """H of the open window by the run's plan and orders"""

    def size(self, planned: int, course: Course) -> None:
        """Set the number of steps of the open window by the run's rule, and bring it in step.

        Args:
            planned: its steps by the run's timetable.
            course: the orders for it.
        """
        common = course.window(planned)
        starts = self._worker.step_in_window == 0
        if starts:
            self._is_in_step = False
        if starts or (common != self._common_steps and not self._by_speed):
            self._begin(common)
        elif self._may_shift() and self._knows_pace():
            self._is_in_step = True
            self._resize(self._ranks.agreed(self._in_step(common)), common)

    def _begin(self, common: int) -> None:
        self._common_steps = common
        if not self._by_speed:
            self._resize(common, common)
        elif self._knows_pace():
            self._resize(self._ranks.agreed(self._own_steps(common)), common)

    def _resize(self, steps: int, common: int) -> None:
        """Let this window have so many steps, of which a peer of the common pace has `common`."""
        if self._by_speed:
            self._worker.resize(steps)
        else:
            delay = min(self._method.hidden_steps(common), steps)
            self._worker.resize(steps, delay=delay)

    def _knows_pace(self) -> bool:
        """Return whether the first rank has measured its pace. All ranks ask."""
        return bool(self._ranks.agreed(self._statistics().pace_s > 0))

    def _own_steps(self, common: int) -> int:
        """Return the steps of a whole window of this peer."""
        if not self._by_speed:
            return common
        own, *_ = schedules.deadline(self._paces_s(), inner_steps=common)
        return own

    def _may_shift(self) -> bool:
        """Return whether this window may still be compared with the others'."""
        # Windows of several fragments end in turn, so that a peer out of step waits for little.
        if self._is_in_step or len(self._worker.fragments) > 1:
            return False
        done = self._worker.step_in_window / self._worker.inner_steps
        return SHIFTED_FROM <= done <= SHIFTED_TO

    def _paces_s(self) -> list[float]:
        # The other ranks of this peer, whose figures nobody uses, may have no pace yet.
        return [self._statistics().pace_s or 1.0, *self._others_paces_s()]

    def _in_step(self, common: int) -> int:
        """Return how many steps this window should have to end with the others'."""
        own, counts = self._own_steps(common), not self._joins()
        step_s = self._statistics().step_s or 1.0  # in which others report their ends
        window_s = own * step_s
        # `resize` keeps the share of the window that is done, so the whole scales by what is left.
        left = own * self._worker.steps_left / self._worker.inner_steps
        left_s = left * step_s
        until_s = schedules.until_others_end(
            left_s,
            self._window_ends(),
            window_s=window_s,
            step_s=self._paces_s()[0],
            late_s=LATE_GRACES * self._spec.round.grace_s,
            alike=(schedules.SLOWEST, schedules.FASTEST) if self._by_speed else schedules.ALIKE,
            counts=counts,
        )
        if until_s == left_s:
            return own
        # A step too few costs a wait of less than a step, one too many perhaps the round.
        steps = own * math.floor(until_s / step_s) / left
        return schedules.bounded(steps, inner_steps=common) if counts else max(1, round(steps))
