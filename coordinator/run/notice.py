"""Events as programs read them: a stable code, the facts as fields, and the sentence made of them.

The tables of events are `atoll.coordinator.notices` and `atoll.peer.notices`: one function an
event, whose keyword arguments are its fields and which returns the sentence for people.

    @event("peer.gone")
    def peer_gone(*, silent_s: float) -> str:
        return f"no report for {silent_s:g} s; counts as gone"

    report("warning", peer_gone(silent_s=10.0))

A positional argument is wording that says the fields' facts in another way; it is no field. A
`Notice` is its sentence, so whatever shows texts shows it. docs/events.md lists all codes.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, Self

from atoll.coordinator.run.levels import Level

P = ParamSpec("P")

MAX_TEXT = 1000  # characters of a sentence
MAX_FIELDS = 16
MAX_CHARS = 1000  # of all fields of one event: an event log holds hundreds of strangers' events
MAX_VALUE_CHARS = 300  # of one text, as of a reason
MAX_ITEMS = 16  # of a list, as of peers

Value = bool | int | float | str | list[str]

CANNOT_REACH = (
    "cannot reach each other, so work of one may not count with the other; open or forward a TCP "
    "port at one of them, and name it there with --listen and --announce"
)
"""The fact and the remedy, after the names of two peers."""

CODES: dict[str, Callable[..., str]] = {}
"""By code: the function that makes the sentence, whose keyword arguments are the fields."""


class Notice(str):
    """A sentence for people, with the code and the fields that programs read."""

    code: str
    fields: dict[str, Value]

    def __new__(cls, text: str, code: str = "", fields: Mapping[str, object] | None = None) -> Self:
        """Make one; what an event cannot hold of the fields is cut off, or left out.

        Args:
            text: the sentence.
            code: of `CODES`; empty for a text without one.
            fields: the facts. None stands for one that does not apply, and is left out.
        """
        notice = super().__new__(cls, text)
        notice.code = code
        notice.fields = _fitting(fields or {})
        return notice

    @staticmethod
    def of(text: str) -> Notice:
        """Return what was reported as a notice: a text without a code must not end a peer."""
        return text if isinstance(text, Notice) else Notice(text)

    def within(self, module: str) -> Notice:
        """Return it as an event of one module of the run; unchanged if the module has no name."""
        if not module:
            return self
        return Notice(f"{module}: {self}", self.code, {"module": module, **self.fields})

    def repeated(self, times: int) -> Notice:
        """Return it with the number of times that it was reported."""
        if times == 1:
            return self
        text = f"{self} (reported {times} times)"
        return Notice(text, self.code, {"times": times, **self.fields})


Report = Callable[[Level, Notice], None]
"""Takes an event."""


def event(code: str) -> Callable[[Callable[P, str]], Callable[P, Notice]]:
    """Register the function that makes an event's sentence; called, it returns the `Notice`."""

    def decorate(sentence: Callable[P, str]) -> Callable[P, Notice]:
        assert code not in CODES, code
        CODES[code] = sentence

        @functools.wraps(sentence)
        def notice(*args: P.args, **kwargs: P.kwargs) -> Notice:
            return Notice(sentence(*args, **kwargs), code, kwargs)

        return notice

    return decorate


def told_fields(notice: str) -> dict[str, object]:
    """Return what a program reads of an event, beside its time and level."""
    told = Notice.of(notice)
    return {"code": told.code, "fields": told.fields, "text": str(told)}


def fields_of(code: str) -> list[str]:
    """Return the names of an event's fields."""
    parameters = inspect.signature(CODES[code]).parameters.values()
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]


def size_of(fields: Mapping[str, object]) -> int:
    """Return the characters of an event's fields, of which it may have `MAX_CHARS`."""
    return sum(len(name) + _size(value) for name, value in fields.items())


def _size(value: object) -> int:
    return sum(map(_size, value)) if isinstance(value, list) else len(str(value))


def _fitting(fields: Mapping[str, object]) -> dict[str, Value]:
    left, fit = MAX_CHARS, dict[str, Value]()
    for name, given in fields.items():
        value = _plain(given)
        chars = len(name) + _size(value)
        if value is not None and chars <= left and len(fit) < MAX_FIELDS:
            fit[name] = value
            left -= chars
    return fit


def _plain(value: object) -> Value | None:
    """Return a value as JSON has it; None if it is none, or no finite number."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return max(-(2**63), min(2**63 - 1, int(value)))
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [str(item)[:MAX_VALUE_CHARS] for item in value[:MAX_ITEMS]]
    return str(value)[:MAX_VALUE_CHARS]
