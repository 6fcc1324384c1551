"""The hours of the day in which a peer trains, by the clock on the wall.

    22-8           from ten in the evening until eight in the morning
    9-12,14:30-18  several spans
    22-22          the whole day

A span that ends before it begins passes midnight. Each look asks what the wall clock shows, so a
change to or from daylight saving time needs no rule: where the hour from two to three is skipped,
a span that begins within it begins at three; where it comes twice, so does what lies within it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

DAY_MIN = 24 * 60
MAX_SPANS = 24
_TIME = re.compile(r"(\d{1,2})(?::(\d{2}))?")


@dataclass(frozen=True)
class DaySpan:
    """A time of the day, every day."""

    begin_min: int
    """minutes after midnight, below `DAY_MIN`"""
    end_min: int
    """minutes after midnight, below `DAY_MIN`; the first one outside"""

    def holds(self, minute: int) -> bool:
        """Return whether a minute of the day lies in it."""
        length = (self.end_min - self.begin_min) % DAY_MIN or DAY_MIN
        return (minute - self.begin_min) % DAY_MIN < length


@dataclass(frozen=True)
class Hours:
    """The times of the day in which a peer trains."""

    spans: tuple[DaySpan, ...]
    text: str = ""
    """as the owner wrote them"""

    @classmethod
    def read(cls, text: str) -> Hours:
        """Read what an owner wrote. Raises ValueError with what was expected."""
        parts = text.split(",")
        if len(parts) > MAX_SPANS:
            raise ValueError(f"expected at most {MAX_SPANS} spans of hours, got {len(parts)}")
        return cls(tuple(map(_span, parts)), text)

    def holds(self, local: datetime) -> bool:
        """Return whether a peer trains when the clock on the wall shows this."""
        minute = local.hour * 60 + local.minute
        return any(span.holds(minute) for span in self.spans)

    def next_begin(self, local: datetime) -> str:
        """Return the time of day, HH:MM, of the next beginning of a span."""
        minute = local.hour * 60 + local.minute
        begins = [span.begin_min for span in self.spans]
        first = min(begins, key=lambda begin: (begin - minute - 1) % DAY_MIN)
        return f"{first // 60:02d}:{first % 60:02d}"


@dataclass(frozen=True)
class HoursRule:
    """A `Rule` by the clock of this machine."""

    hours: Hours
    local_now: Callable[[], datetime] = datetime.now

    def why_not(self, *, is_training: bool) -> str:
        """Return why this is no time to train; empty if it is."""
        local = self.local_now()
        if self.hours.holds(local):
            return ""
        return f"outside --hours {self.hours.text}; joins at {self.hours.next_begin(local)}"


def _span(text: str) -> DaySpan:
    begin, dash, end = text.strip().partition("-")
    times = [_minute(begin), _minute(end)]
    if not dash or None in times:
        raise ValueError(f"expected hours such as 22-8 or 9:30-12,14-18, got {text[:40]!r}")
    begin_min, end_min = times
    assert begin_min is not None and end_min is not None
    return DaySpan(begin_min % DAY_MIN, end_min % DAY_MIN)


def _minute(text: str) -> int | None:
    """Return minutes after midnight, of 0:00 to 24:00; None if it is no time."""
    found = _TIME.fullmatch(text.strip())
    if found is None:
        return None
    minutes = int(found[1]) * 60 + int(found[2] or 0)
    return minutes if minutes <= DAY_MIN and int(found[2] or 0) < 60 else None
