"""How far the trainer is: written in its thread, read in the loop.

A training loop that does not report on itself (`connect`) is timed here, by the windows that it
hands in. Rounds are planned by when each peer's next window is expected to end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from atoll.coordinator.run.spec import RunSpec
from atoll.optim.methods import Method
from atoll.optim.reducer import Commit, Contribution
from atoll.optim.workers.timetable import Timetable


@dataclass(frozen=True, kw_only=True)
class TrainerView:
    """What a peer reports about its trainer."""

    ready_in_s: float = 0.0
    step_s: float = 0.0
    step: int = 0
    inner_steps: int = 0
    tokens: int = 0
    tokens_per_s: float = 0.0
    loss: float | None = None
    valid_loss: float | None = None
    utilisation: float = 1.0
    device: str = ""


class TrainerProgress:
    """The trainer's position, its windows and their tokens."""

    def __init__(self, spec: RunSpec, method: Method, num_fragments: int) -> None:
        """Begin before the trainer has started."""
        self.spec = spec
        self.position = 0
        """of the log, or the round by gossip, that the trainer has taken"""
        self.number = 0
        """of the last contribution"""
        self.encode_s = 0.0
        """what encoding the last contribution took"""
        self.window_s = 0.0
        """how long the last window took, without waiting"""
        self.leaving = False
        """this peer offers nothing more"""
        self._keeps_left_out = not method.every_step  # else it sends gradients, and keeps none
        self._num_fragments = num_fragments
        self._watched: Callable[[], TrainerView] | None = None
        self._tokens = 0
        """of all fragments' contributions; work that was left out is offered again, counted once"""
        self._on_offer_tokens: dict[int, int] = {}
        self._left_out_tokens: dict[int, int] = {}
        """by fragment"""
        self._began_s: float | None = None
        self._waited_s = 0.0
        self._waits_since_s: float | None = None
        self._ended_s = 0.0
        """when it ended, likewise"""
        self._handed_in: set[int] = set()
        """numbers of contributions that have not reached the loop yet"""
        self._loss: float | None = None
        """of the last window"""

    @property
    def timetable(self) -> Timetable:
        """Steps and windows of the run by position."""
        return self.spec.timetable(self._num_fragments)

    def is_over(self, position: int) -> bool:
        """Return whether a position is the end of the run, or beyond it."""
        return 0 < self.spec.run.rounds <= position

    # in the trainer's thread

    def watch(self, view: Callable[[], TrainerView]) -> None:
        """Report what `view` returns instead of what is seen here; called in the loop."""
        self._watched = view

    def start(self) -> None:
        """Begin the first window."""
        self._began_s = time.monotonic()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Leave the block's time out of the window: rounds that are hidden take none of it."""
        self._waits_since_s = since_s = time.monotonic()
        try:
            yield
        finally:
            self._waits_since_s = None
            self._waited_s += time.monotonic() - since_s

    def count(self, contribution: Contribution) -> int:
        """End a window; return the number of its contribution, which `arrived` then takes."""
        self.number += 1
        self._handed_in.add(self.number)
        trained_s = self._trained_s()
        self.window_s, self._ended_s = trained_s - self._ended_s, trained_s
        fragment, tokens = contribution.fragment, contribution.tokens
        self._tokens += max(0, tokens - self._left_out_tokens.pop(fragment, 0))
        self._on_offer_tokens[fragment] = tokens
        self._loss = contribution.loss if math.isfinite(contribution.loss) else None
        return self.number

    def note(self, commit: Commit) -> None:
        """Take a commit: work that no update took stays in the drift, and is offered again."""
        if commit.reset:
            self._on_offer_tokens.clear()
            self._left_out_tokens.clear()
        elif commit.settles:
            tokens = self._on_offer_tokens.pop(commit.fragment, 0)
            included = commit.included is not None and bool(commit.included.any())
            if not included and self._keeps_left_out:
                self._left_out_tokens[commit.fragment] = tokens

    # in the loop

    def arrived(self, number: int) -> None:
        """Note that a contribution has reached the rounds."""
        self._handed_in.discard(number)

    @property
    def started(self) -> bool:
        """Return whether the trainer has; no run begins with a peer whose trainer has not."""
        return self._began_s is not None

    @property
    def hands_in(self) -> bool:
        """Whether a window has ended whose contribution is still on its way to the rounds."""
        return bool(self._handed_in)

    def ready_in_s(self) -> float | None:
        """Return when the next contribution is expected; None if nobody should wait for one."""
        if self.leaving or not self.started:
            return None
        if self.hands_in:
            return 0.0  # the trainer itself may be in its next window already
        return self.view().ready_in_s

    def view(self) -> TrainerView:
        """Return what the trainer reports, or what its windows show."""
        if self._watched is not None:
            return self._watched()
        return self.measured() or TrainerView()

    def measured(self) -> TrainerView | None:
        """Return what the windows show; None before the trainer has started."""
        if self._began_s is None:
            return None
        trained_s, tokens = self._trained_s(), self._tokens // self._num_fragments
        since_s = max(time.monotonic() - self._began_s, 1e-9)
        return TrainerView(
            ready_in_s=max(0.0, self.window_s - (trained_s - self._ended_s)),
            inner_steps=self.timetable.window(self.position),
            tokens=tokens,
            tokens_per_s=tokens / since_s,
            loss=self._loss,
            utilisation=min(1.0, trained_s / since_s),
        )

    def _trained_s(self) -> float:
        """Seconds since the start in which the trainer did not wait."""
        now_s = time.monotonic()
        waits_s = now_s - (self._waits_since_s or now_s)
        return now_s - (self._began_s or now_s) - self._waited_s - waits_s
