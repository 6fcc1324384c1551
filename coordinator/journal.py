"""What happens in a run, told to people."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from atoll.coordinator.history import History
from atoll.coordinator.run.levels import Level
from atoll.coordinator.run.status import EVENTS, Event

LATE_S = 24 * 3600.0  # an event that claims to be older comes from a clock that is wrong
REPEAT_S = 600.0  # what stays wrong is said again after this


class Journal:
    """The newest events; all of them are in the history."""

    def __init__(self, history: History, clock: Callable[[], float]) -> None:
        """Go on with what the history has; `clock` tells the time."""
        self._history = history
        self._clock = clock
        self._events: deque[Event] = deque(history.events(EVENTS), maxlen=EVENTS)

    def newest(self) -> list[Event]:
        """Oldest first."""
        return list(self._events)

    def tell(self, level: Level, text: str) -> None:
        """Note what the coordinator has to say."""
        self.say(level, "coordinator", text)

    def tell_once(self, level: Level, text: str) -> None:
        """Note what the coordinator has to say, unless it said so a short time ago."""
        since_s = self._clock() - REPEAT_S
        if not any(event.text == text and event.at > since_s for event in self._events):
            self.tell(level, text)

    def say(self, level: Level, source: str, text: str, *, at_s: float | None = None) -> None:
        """Note what happened to somebody.

        Args:
            level: of the event.
            source: PeerID, or "coordinator".
            text: for people.
            at_s: when it happened, by the run's clock as its source knows it; now, if left out.
        """
        now_s = self._clock()
        at_s = now_s if at_s is None or not now_s - LATE_S <= at_s <= now_s else at_s
        event = Event(at=at_s, level=level, source=source[:128], text=text[:1000])
        self._events.append(event)
        self._history.add_event(event)
