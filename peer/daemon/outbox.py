"""Events and accounts of rounds that wait for the next heartbeat."""

from __future__ import annotations

from collections import deque

from atoll.coordinator.run.levels import Level
from atoll.coordinator.run.status import Event, RoundReport

MAX_KEPT = 128  # of each, while the coordinator is away
MAX_SENT = 32  # of each in one heartbeat
MAX_TEXT = 1000


class Outbox:
    """Bounded: while the coordinator is away, the oldest are dropped."""

    def __init__(self) -> None:
        """Start empty."""
        self.events: deque[Event] = deque(maxlen=MAX_KEPT)
        self.traces: deque[RoundReport] = deque(maxlen=MAX_KEPT)

    def note(self, level: Level, text: str, at_s: float) -> None:
        """Keep an event for the coordinator."""
        self.events.append(Event(at=max(0.0, at_s), level=level, text=text[:MAX_TEXT]))

    def take(self) -> tuple[list[Event], list[RoundReport]]:
        """Remove and return what one heartbeat carries."""
        events = [self.events.popleft() for _ in range(min(MAX_SENT, len(self.events)))]
        traces = [self.traces.popleft() for _ in range(min(MAX_SENT, len(self.traces)))]
        return events, traces

    def put_back(self, events: list[Event], traces: list[RoundReport]) -> None:
        """Return what a failed heartbeat had taken, in its order."""
        self.events.extendleft(reversed(events))
        self.traces.extendleft(reversed(traces))
