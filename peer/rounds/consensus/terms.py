"""The terms that one elector has led, or given up, at a position: however many, in little memory.

Without a quorum a position goes through a term in some seconds, for as long as that lasts: over a
weekend, 20,000 of them. An elector leads every n-th of n electors' terms, so those that it has led
are mostly one range. Gaps stay: somebody may make it lead a term that is far ahead, and the terms
before that one are still to come.
"""

from __future__ import annotations

import math

MOST_RANGES = 64  # no honest peer causes as many gaps at one position


class OwnTerms:
    """A set of terms with one leader, as ranges.

    With more than `MOST_RANGES` of them, the terms between the two highest ones count as in it.
    """

    def __init__(self, electors: int) -> None:
        """Begin empty; terms of one leader are so many apart."""
        self._step = max(1, electors)
        self._ranges: list[range] = []
        """ascending by their starts"""

    def __contains__(self, term: int) -> bool:
        """Return whether the term is in the set."""
        return any(term in each for each in self._ranges)

    def add(self, term: int) -> None:
        """Put a term into the set."""
        if term in self:
            return
        new, found = range(term, term + 1, self._step), list[range]()
        for each in sorted([*self._ranges, new], key=lambda one: one.start):
            if found and self._are_one(found[-1], each):
                each = range(found.pop().start, each[-1] + 1, self._step)
            found.append(each)
        if len(found) > MOST_RANGES:
            last, before = found.pop(), found.pop()
            # In line with both, should the electorate have changed in between.
            step = math.gcd(before.step, last.step, last.start - before.start)
            found.append(range(before.start, max(before[-1], last[-1]) + 1, step))
        self._ranges = found

    def _are_one(self, before: range, after: range) -> bool:
        is_next = after.start - before[-1] == self._step
        return is_next and before.step == after.step == self._step
