"""What a networked reducer keeps for the trainer's thread, whatever the kind of its run."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from atoll.coordinator.run.spec import RunSpec
from atoll.optim.methods import Method
from atoll.optim.reducer import Commit, Contribution, Settle
from atoll.optim.state.fragments import Fragment
from atoll.optim.state.layout import Layout, LayoutError
from atoll.optim.workers.timetable import Timetable
from atoll.peer.daemon.reporting import TrainerView

POLL_S = 0.2  # how soon a waiting trainer notices that it should stop
LOOP_S = 60.0  # for a question to the loop, which answers at once

T = TypeVar("T")


class TrainerSide(ABC):
    """The position, the clock of windows, and the two crossings between trainer and loop."""

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        spec: RunSpec,
        peer_id: str,
        close: Callable[[], None],
    ) -> None:
        """Nothing is known of a trainer yet."""
        self.spec = spec
        self.peer_id = peer_id
        self.stopping = threading.Event()
        self.encode_s = 0.0
        self._loop = loop
        self._close = close
        self._settle: Settle | None = None
        self._position = 0
        self._number = 0
        """of the last contribution"""
        self._tokens = 0
        """of all fragments' contributions; what was left out is in a later one, and counts once"""
        self._on_offer_tokens: dict[int, int] = {}
        self._left_out_tokens: dict[int, int] = {}
        """by fragment"""
        self._began_s: float | None = None
        self._waited_s = 0.0
        self._waits_since_s: float | None = None
        self._window_s = 0.0
        """what the last window took, waiting left out"""
        self._ended_s = 0.0
        """when it ended, likewise"""
        self._handed_in: set[int] = set()
        """numbers of contributions that the loop has not got yet"""
        self._loss: float | None = None
        """of the last window"""
        self._failure: Exception | None = None

    @property
    def hands_in(self) -> bool:
        """Whether a window has ended whose contribution is still on its way to the rounds."""
        return bool(self._handed_in)

    @property
    def position(self) -> int:
        """See `Reducer`."""
        return self._position

    @property
    def finished(self) -> bool:
        """Whether the run has all its rounds: what is trained from here on reaches nobody."""
        return self._is_over(self._position)

    @property
    @abstractmethod
    def method(self) -> Method:
        """The run's method, whose `worker` goes into a training loop."""

    @property
    @abstractmethod
    def fragments(self) -> Sequence[Fragment]:
        """See `Reducer`."""

    @property
    def timetable(self) -> Timetable:
        """Steps and windows of the run by position."""
        return self.spec.timetable(len(self.fragments))

    def progress(self) -> TrainerView | None:
        """What can be told of a trainer that does not tell itself; None before it has started."""
        if self._began_s is None:
            return None
        trained_s, tokens = self._trained_s(), self._tokens // len(self.fragments)
        since_s = max(time.monotonic() - self._began_s, 1e-9)
        return TrainerView(
            ready_in_s=max(0.0, self._window_s - (trained_s - self._ended_s)),
            inner_steps=self.timetable.window(self._position),
            tokens=tokens,
            tokens_per_s=tokens / since_s,
            loss=self._loss,
            utilisation=min(1.0, trained_s / since_s),
        )

    def fail(self, error: Exception) -> None:
        """Let the trainer end with an error, because this peer can take part in nothing more."""
        self._failure = error

    def close(self) -> None:
        """Leave the run: roster, connections, threads."""
        self.stopping.set()
        self._close()

    def _begin(self, expected: Layout, got: Layout, settle: Settle) -> None:
        if got != expected:
            raise LayoutError(
                f"expected the run's model of {expected.numel} parameters, got one of "
                f"{got.numel}; build it from the run's spec"
            )
        self._settle = settle

    def _start_clock(self) -> None:
        """The trainer begins its first window."""
        self._began_s = time.monotonic()

    def _trained_s(self) -> float:
        """Seconds since it began in which it did not wait: hidden rounds take none of a window."""
        now_s = time.monotonic()
        waits_s = now_s - (self._waits_since_s or now_s)
        return now_s - (self._began_s or now_s) - self._waited_s - waits_s

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self._waits_since_s = since_s = time.monotonic()
        try:
            yield
        finally:
            self._waits_since_s = None
            self._waited_s += time.monotonic() - since_s

    def _count(self, contribution: Contribution) -> None:
        """A window has ended; ``_arrived`` says when the loop has its contribution."""
        self._number += 1
        self._handed_in.add(self._number)
        trained_s = self._trained_s()
        self._window_s, self._ended_s = trained_s - self._ended_s, trained_s
        fragment, tokens = contribution.fragment, contribution.tokens
        self._tokens += max(0, tokens - self._left_out_tokens.pop(fragment, 0))
        self._on_offer_tokens[fragment] = tokens
        self._loss = contribution.loss if math.isfinite(contribution.loss) else None

    def _note_left_out(self, commit: Commit) -> None:
        """Work that no update took stays in the drift, where the method keeps it."""
        if commit.reset:
            self._on_offer_tokens.clear()
            self._left_out_tokens.clear()
        elif commit.settles:
            tokens = self._on_offer_tokens.pop(commit.fragment, 0)
            included = commit.included is not None and bool(commit.included.any())
            if not included and not self.method.every_step:
                self._left_out_tokens[commit.fragment] = tokens

    def _arrived(self, number: int) -> None:
        self._handed_in.discard(number)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _is_over(self, position: int) -> bool:
        return 0 < self.spec.run.rounds <= position

    def _is_at_end(self) -> bool:
        return self.stopping.is_set() or self._is_over(self._position)

    def _in_loop(self, function: Callable[[], T]) -> T:
        async def call() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(timeout=LOOP_S)

    def _deliver(self, commit: Commit) -> None:
        if self._settle is None:
            raise RuntimeError("expected start() first")
        self._note_left_out(commit)
        self._settle(commit)
