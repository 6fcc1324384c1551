"""Shifts: a peer that trains only while its owner's rules allow it.

Between two shifts the peer has left the run: nothing of it is on the device, no connection is open,
and no round waits for it. It joins again as after any absence, from its state directory.

    Rule        says whether this is a time to train
    Shifts      looks at the rules now and then, and ends or begins a shift
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from atoll.coordinator.run.notice import Notice
from atoll.peer import notices

LOOK_S = 5.0  # how late a shift begins or ends; a look costs next to nothing


class Rule(Protocol):
    """A condition of the owner for training."""

    def why_not(self, *, is_training: bool) -> str:
        """Return why this is no time to train; empty if it is.

        Args:
            is_training: whether this peer has a shift now.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Shifts:
    """The rules of an owner, and what tells of them."""

    rules: Sequence[Rule]
    tell: Callable[[Notice], None]

    def await_next(self, stopped: threading.Event) -> bool:
        """Wait until all rules allow to train; return False if `stopped` is set before."""
        told = ""
        while not stopped.is_set():
            why = self.why_not(is_training=False)
            if not why:
                return True
            if why != told:
                self.tell(notices.resting(reason=why))
                told = why
            stopped.wait(LOOK_S)
        return False

    @contextmanager
    def watching(self, end: Callable[[], None]) -> Iterator[threading.Event]:
        """Call `end` as soon as a rule forbids to train, while the block runs.

        Yields:
            An event that is set if a rule has ended the shift.
        """
        closed, left = threading.Event(), threading.Event()
        if not self.rules:
            yield closed
            return

        def watch() -> None:
            while not left.wait(LOOK_S):
                if why := self.why_not(is_training=True):
                    closed.set()
                    self.tell(notices.pausing(reason=why))
                    end()
                    return

        watcher = threading.Thread(target=watch, name="atoll-shifts", daemon=True)
        watcher.start()
        try:
            yield closed
        finally:
            left.set()
            watcher.join()

    def why_not(self, *, is_training: bool) -> str:
        """Return the first reason not to train; empty if there is none."""
        reasons = (rule.why_not(is_training=is_training) for rule in self.rules)
        return next(filter(None, reasons), "")
