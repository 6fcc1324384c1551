"""What is said again and again while a round or a wait goes on: the 1st, 2nd, 4th, 8th time."""

import re
from collections import OrderedDict

KEPT = 256  # sayings remembered; a round has some tens of them
QUIET_S = 60.0  # after which a saying is news again; waits pause for at most a quarter of it

_COUNTERS = re.compile(r"\b(?:term|attempt) \d+|\d+\.\d+ s\b")


class Repeats:
    """Counts what is said, terms, attempts and seconds left out."""

    def __init__(self) -> None:
        """Nothing was said."""
        self._said: OrderedDict[str, tuple[int, float]] = OrderedDict()
        """how often and when last, the latest at the end"""

    def told(self, text: str, now_s: float) -> str | None:
        """The text to say, with its count where it repeats; None where it was said often."""
        key = _COUNTERS.sub("", text)
        times, last_s = self._said.pop(key, (0, now_s))
        times = 1 if now_s - last_s > QUIET_S else times + 1
        self._said[key] = times, now_s
        if len(self._said) > KEPT:
            self._said.popitem(last=False)
        if times & (times - 1):
            return None
        return text if times == 1 else f"{text} (said {times} times)"
