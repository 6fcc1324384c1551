"""Versions of Atoll as peers and coordinators state them: which of two is the newer one."""

from __future__ import annotations

import re

MAX_RELEASE_CHARS = 32
_NUMBERS = re.compile(r"\d{1,9}(?:\.\d{1,9}){0,3}")


def is_newer(theirs: str, ours: str) -> bool:
    """Return whether `theirs` is a later version than `ours`; False for what is no version.

    Only the leading numbers count: "0.2.0rc1" is as new as "0.2.0".
    """
    return _numbers(theirs) > _numbers(ours) != ()


def _numbers(release: str) -> tuple[int, ...]:
    found = _NUMBERS.match(release[:MAX_RELEASE_CHARS])
    if found is None:
        return ()
    numbers = list(map(int, found[0].split(".")))
    while numbers and not numbers[-1]:  # 0.2 is 0.2.0
        numbers.pop()
    return tuple(numbers)
