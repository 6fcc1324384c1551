"""The order of a peer's computations: what goes back comes before what goes on."""

from __future__ import annotations

from atoll.peer.pipeline.actions import JobKind
from atoll.peer.pipeline.messages import PassKey


class Jobs:
    """Computations that wait for the trainer's thread, and those that it has."""

    def __init__(self, ahead: int) -> None:
        """Give the trainer at most `ahead` jobs at a time."""
        self._ahead = ahead
        self._urgent: dict[PassKey, JobKind] = {}
        self._others: dict[PassKey, JobKind] = {}
        self._running: dict[PassKey, JobKind] = {}
        self._num_steps = 0

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
        return len(self._urgent) + len(self._others)

    def running(self, key: PassKey) -> JobKind | None:
        """Return the trainer's job of a pass."""
        return self._running.get(key)

    def add(self, key: PassKey, kind: JobKind) -> None:
        """Let a job wait for its turn."""
        (self._urgent if kind == "backward" else self._others)[key] = kind

    def take(self) -> tuple[PassKey, JobKind] | None:
        """Return the next job, which the trainer has from now on; None if none waits."""
        waiting = self._urgent or self._others
        if not waiting:
            return None
        key = next(iter(waiting))
        return key, self.start(key, waiting.pop(key))

    def start(self, key: PassKey, kind: JobKind) -> JobKind:
        """Give the trainer a job that did not wait."""
        self._running[key] = kind
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
        self._urgent.pop(key, None)
        self._others.pop(key, None)
