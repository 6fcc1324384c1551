"""What happens in a run, told to people."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from atoll.coordinator.history import History
from atoll.coordinator.status import EVENTS, Event, Level


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

    def say(self, level: Level, source: str, text: str) -> None:
        """Note what happened to somebody, now."""
        event = Event(at=self._clock(), level=level, source=source[:128], text=text[:1000])
        self._events.append(event)
        self._history.add_event(event)
