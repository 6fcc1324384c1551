"""Throttle repeated events: the 1st, 2nd, 4th, 8th of a key are reported."""

from collections import OrderedDict
from collections.abc import Hashable

KEPT = 256  # keys remembered; a round has some tens of them
QUIET_S = 60.0  # after which an event is news again; waits pause for at most a quarter of it


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
        if times & (times - 1):
            return None
        return text if times == 1 else f"{text} (reported {times} times)"
