"""Hands what the loop has decided to the trainer's thread.

    Decisions   the queue, in the order of the log
    Reset       an order to the trainer to stand somewhere else

Each decision holds parameters, 4 bytes for each of the model's, so as few are kept as the trainer
needs: none before it has begun, and of consecutive entries without its work the newest.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace

from atoll.optim.reducer import AS_PLANNED, Course
from atoll.optim.state.outer_state import OuterState
from atoll.peer.rounds.engine import Settled


@dataclass(frozen=True, kw_only=True)
class Reset:
    """The replica leapt to another state: drop the work that belongs to the one before."""

    state: OuterState
    why: str
    course: Course = AS_PLANNED
    """The course of training from there on."""


class Decisions:
    """Decisions of the loop that the trainer has not taken yet, in the order of the log."""

    def __init__(self) -> None:
        """Start empty, without a trainer."""
        self.failure: Exception | None = None
        """Reason why this peer can take part in nothing more, such as a full disk."""
        self._waiting: deque[Settled | Reset] = deque()
        self._changing = threading.Lock()
        self._came: queue.SimpleQueue[None] = queue.SimpleQueue()
        """One for each that waits."""
        self._has_taker = False

    def subscribe(self) -> None:
        """Begin anew for a trainer that takes the state of this moment; called in the loop."""
        self.take_all()
        self._has_taker = True

    def put(self, decided: Settled | Reset) -> None:
        """Hand something to the trainer, if there is one; called in the loop."""
        if not self._has_taker:
            return
        with self._changing:
            if isinstance(decided, Settled):
                self._lead_on_to(decided)
            self._waiting.append(decided)
        self._came.put(None)

    def _lead_on_to(self, newest: Settled) -> None:
        """Let entries without this peer's work, one after another, lead to the newest parameters.

        Each moves the trainer by a difference, so the sum is the same. An entry that settles its
        work does so by the parameters right after it.
        """
        fragment, state = newest.applied.entry.fragment, newest.applied.state
        for index in reversed(range(len(self._waiting))):
            older = self._waiting[index]
            if isinstance(older, Reset) or _takes_work(newest):
                return
            if older.applied.entry.fragment != fragment:
                continue
            if _takes_work(older):
                return
            applied = replace(older.applied, state=state, update_F=None)
            self._waiting[index] = replace(older, applied=applied)

    def fail(self, error: Exception) -> None:
        """End the trainer with an error; called in the loop."""
        self.failure = error

    def expect_none_failed(self) -> None:
        """Raise the failure, if there is one."""
        if self.failure is not None:
            raise self.failure

    def next(self, timeout_s: float) -> Settled | Reset | None:
        """Wait for the next decision; None if there is none in time."""
        with suppress(queue.Empty):
            self._came.get(timeout=timeout_s)
            return self._first()
        return None

    def take_all(self) -> list[Settled | Reset]:
        """Take what is there, without waiting."""
        taken = []
        while not self._came.empty():
            self._came.get()
            taken.append(self._first())
        return taken

    def _first(self) -> Settled | Reset:
        with self._changing:
            return self._waiting.popleft()


def _takes_work(decided: Settled) -> bool:
    """Return whether an entry settles a contribution of this peer, or names it."""
    return decided.settles is not None or decided.included is not None
