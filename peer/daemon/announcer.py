"""Events for people: on this machine, and through the coordinator for everyone who watches.

Warnings that repeat while a round or a wait lasts are throttled: the 1st, 2nd, 4th, 8th of a key
are reported.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

from atoll.coordinator.run.levels import Level
from atoll.peer.daemon.outbox import Outbox

KEPT = 256  # keys remembered; a round has some tens of them
QUIET_S = 60.0  # after which an event is news again; waits pause for at most a quarter of it


class Announcer:
    """Shows events on this machine and keeps them for the coordinator; safe in any thread."""

    def __init__(
        self, on_event: Callable[[Level, str], None], outbox: Outbox, now_s: Callable[[], float]
    ) -> None:
        """Stamp events with `now_s`, the run's clock."""
        self._on_event = on_event
        self._outbox = outbox
        self._now_s = now_s
        self._repeats = Repeats()
        self._lock = threading.Lock()  # the loop and the trainer both report

    def say(self, level: Level, text: str, *, key: Hashable | None = None) -> None:
        """Report an event, here and to the coordinator; see `OnEvent`."""
        told = self._throttled(level, text, key)
        if told is not None:
            self._outbox.note(level, told, self._now_s())
            self._on_event(level, told)

    def show(self, level: Level, text: str, *, key: Hashable | None = None) -> None:
        """Report an event here only."""
        told = self._throttled(level, text, key)
        if told is not None:
            self._on_event(level, told)

    def _throttled(self, level: Level, text: str, key: Hashable | None) -> str | None:
        if level == "info":
            return text
        with self._lock:
            return self._repeats.told(text, time.monotonic(), key=key)


class Repeats:
    """Counts events by key."""

    def __init__(self) -> None:
        self._said: OrderedDict[Hashable, tuple[int, float]] = OrderedDict()
        """how often and when last, the latest at the end"""

    def told(self, text: str, now_s: float, *, key: Hashable | None = None) -> str | None:
        """Return the text to report, with its count if it repeats; None to leave it out.

        Args:
            text: of the event.
            now_s: on any steady clock.
            key: equal for events that repeat one another; by default the text.
        """
        key = text if key is None else key
        times, last_s = self._said.pop(key, (0, now_s))
        times = 1 if now_s - last_s > QUIET_S else times + 1
        self._said[key] = times, now_s
        if len(self._said) > KEPT:
            self._said.popitem(last=False)
        if times & (times - 1):  # not a power of two
            return None
        return text if times == 1 else f"{text} (reported {times} times)"
