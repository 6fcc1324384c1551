"""Staying in touch with the coordinator, for ever: join, heartbeats, and again after each failure.

The coordinator's absence stops nobody: the link keeps what it could not deliver (bounded, oldest
dropped), waits longer after each failure up to half a minute, with jitter so that a thousand peers
do not come back in the same second, and never gives up. Only before the first heartbeat, when a
person is there to read it, does an answer that will stay the same end it: another certificate,
another run or version, a token that is not accepted.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from atoll.coordinator.client import Beat, CoordinatorClient, Joined
from atoll.coordinator.client_errors import (
    CoordinatorError,
    CoordinatorRefused,
    NotWelcome,
    WrongCertificate,
    WrongRunOrVersion,
)
from atoll.coordinator.rpc import MAX_REPORTS
from atoll.coordinator.status import Event, PeerStatus, RoundTrace

BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
MAX_KEPT = 1024  # events or traces kept while the coordinator is away


@dataclass(frozen=True, kw_only=True)
class LinkStatistics:
    """How a link is."""

    connected: bool
    beats: int
    failures: int
    """In a row."""
    undelivered: int
    last_error: str


class Link:
    """One peer's line to the coordinator."""

    def __init__(
        self,
        client: CoordinatorClient,
        *,
        status: Callable[[], PeerStatus],
        on_beat: Callable[[Beat], Awaitable[None]],
        on_join: Callable[[Joined], Awaitable[None]] | None = None,
        rng: random.Random | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`status` is asked for each heartbeat; `on_beat` gets each answer.

        `on_join` gets what a new session brings, after a restart of either side too.
        """
        self._client = client
        self._status = status
        self._on_beat = on_beat
        self._on_join = on_join
        self._rng = rng or random.Random()
        self._sleep = sleep
        self._events: deque[Event] = deque(maxlen=MAX_KEPT)
        self._traces: deque[RoundTrace] = deque(maxlen=MAX_KEPT)
        self._hurry = asyncio.Event()
        self._beats = 0
        self._failures = 0
        self._last_error = ""

    def event(self, event: Event) -> None:
        """Report something with the next heartbeat."""
        self._events.append(event)

    def trace(self, trace: RoundTrace) -> None:
        """Report a round, soon."""
        self._traces.append(trace)
        self._hurry.set()

    def nudge(self) -> None:
        """Send the next heartbeat now: something changed."""
        self._hurry.set()

    def statistics(self) -> LinkStatistics:
        """How the link is."""
        return LinkStatistics(
            connected=self._beats > 0 and self._failures == 0,
            beats=self._beats,
            failures=self._failures,
            undelivered=len(self._events) + len(self._traces),
            last_error=self._last_error,
        )

    async def run(self) -> None:
        """Stay in touch until cancelled.

        Raises:
            WrongCertificate, WrongRunOrVersion, NotWelcome: before the first heartbeat.
        """
        while True:
            try:
                pause_s = await self.beat()
            except CoordinatorError as error:
                if not self._beats and _needs_a_person(error):
                    raise
                pause_s = self._failed(error)
            await self._wait(pause_s)

    async def beat(self) -> float:
        """Join if need be, and send one heartbeat; returns the seconds until the next."""
        if not self._client.joined:
            await self._join()
        events = list(self._events)[:MAX_REPORTS]
        traces = list(self._traces)[:MAX_REPORTS]
        try:
            beat = await self._client.heartbeat(self._status(), events=events, traces=traces)
        except NotWelcome:
            await self._join()
            return 0.0
        _drop(self._events, events)
        _drop(self._traces, traces)
        self._beats += 1
        self._failures = 0
        await self._on_beat(beat)
        return 0.0 if self._traces else beat.heartbeat_s

    async def leave(self, status: PeerStatus) -> None:
        """Say goodbye, if the coordinator listens; never raises a CoordinatorError."""
        with contextlib.suppress(CoordinatorError):
            events = list(self._events)[-MAX_REPORTS:]
            traces = list(self._traces)[-MAX_REPORTS:]
            await self._client.heartbeat(status, events=events, traces=traces, leaving=True)

    async def _join(self) -> None:
        joined = await self._client.join()
        if self._on_join is not None:
            await self._on_join(joined)

    def _failed(self, error: CoordinatorError) -> float:
        if isinstance(error, CoordinatorRefused) and error.code == "invalid_argument":
            self._events.clear()  # something in them is not to its liking; the rest goes on
            self._traces.clear()
        self._last_error = str(error)
        self._failures += 1
        return backoff_s(self._failures, self._rng)

    async def _wait(self, pause_s: float) -> None:
        self._hurry.clear()
        if self._failures:
            await self._sleep(pause_s)
            return
        pause = asyncio.ensure_future(self._sleep(pause_s))
        hurry = asyncio.ensure_future(self._hurry.wait())
        try:
            await asyncio.wait({pause, hurry}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            pause.cancel()
            hurry.cancel()


def _needs_a_person(error: CoordinatorError) -> bool:
    if isinstance(error, NotWelcome):
        return error.code == "permission_denied"
    return isinstance(error, WrongCertificate | WrongRunOrVersion)


def backoff_s(failures: int, rng: random.Random) -> float:
    """How long to wait after this many failures in a row."""
    longest_s = min(MAX_BACKOFF_S, BACKOFF_S * 2.0 ** min(failures - 1, 10))
    return longest_s * (0.5 + 0.5 * rng.random())


def _drop(queue: deque[Event] | deque[RoundTrace], sent: list[Event] | list[RoundTrace]) -> None:
    for item in sent:
        if queue and queue[0] is item:
            queue.popleft()
