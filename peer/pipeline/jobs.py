"""The order of a peer's computations: what goes on and what goes back take turns.

That is 1F1B of pipelines (PipeDream, arXiv:1806.03377), without a fixed schedule: if one kind is
missing, the other one goes on. With returns first, a peer of the first stage that has some waiting
begins nothing before all are done, and then fills its window at once: in a trace at 25 Mbit/s and
50 ms its microbatches in work swung between 2 and 32, and trainers behind it waited meanwhile.
"""

from __future__ import annotations

from atoll.peer.pipeline.actions import JobKind
from atoll.peer.pipeline.messages import PassKey


class Jobs:
    """Computations that wait for the trainer's thread, and those that it has."""

    def __init__(self, ahead: int) -> None:
        """Give the trainer at most `ahead` jobs at a time."""
        self._ahead = ahead
        self._backward: dict[PassKey, JobKind] = {}
        self._others: dict[PassKey, JobKind] = {}
        self._running: dict[PassKey, JobKind] = {}
        self._num_steps = 0
        self._went_back = False
        """whether the last job that was started was a backward pass"""

    @property
    def prefers_new(self) -> bool:
        """Return whether it is the turn of what goes on, a new microbatch included."""
        return self._went_back

    @property
    def has_room(self) -> bool:
        """Return whether the trainer may get another job."""
        return self.num_running < self._ahead

    @property
    def num_running(self) -> int:
        """Return how many jobs the trainer has, steps included."""
        return len(self._running) + self._num_steps

    @property
    def num_waiting(self) -> int:
        """Return how many jobs wait for the trainer."""
        return len(self._backward) + len(self._others)

    def running(self, key: PassKey) -> JobKind | None:
        """Return the trainer's job of a pass."""
        return self._running.get(key)

    def add(self, key: PassKey, kind: JobKind) -> None:
        """Let a job wait for its turn."""
        (self._backward if kind == "backward" else self._others)[key] = kind

    def take(self) -> tuple[PassKey, JobKind] | None:
        """Return the next job, which the trainer has from now on; None if none waits."""
        first, then = self._backward, self._others
        if self.prefers_new:
            first, then = then, first
        waiting = first or then
        if not waiting:
            return None
        key = next(iter(waiting))
        return key, self.start(key, waiting.pop(key))

    def start(self, key: PassKey, kind: JobKind) -> JobKind:
        """Give the trainer a job that did not wait."""
        self._running[key] = kind
        self._went_back = kind == "backward"
        return kind

    def start_step(self) -> None:
        """Give the trainer an inner step."""
        self._num_steps += 1

    def end_step(self) -> None:
        """Note the end of an inner step."""
        self._num_steps -= 1

    def end(self, key: PassKey) -> JobKind | None:
        """Note the end of a pass's job; return which it was."""
        return self._running.pop(key, None)

    def drop(self, key: PassKey) -> None:
        """Forget a job that still waits."""
        self._backward.pop(key, None)
        self._others.pop(key, None)
