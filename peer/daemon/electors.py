"""Whether anything can be decided at all, as far as the roster tells."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from atoll.coordinator.members import STALL_S
from atoll.optim.log.entry import Elector, is_quorum


class QuorumWatch:
    """Finds out that the electors of a position are gone, and says what is waited for, once."""

    def __init__(self) -> None:
        """Nothing is missing yet."""
        self._missing_at: int | None = None
        self._told_at: int | None = None

    def look(
        self,
        position: int,
        electorate: Sequence[Elector],
        here: Collection[Elector],
        *,
        in_touch: bool,
    ) -> str | None:
        """What to tell a person, if a quorum was missing at this look and the one before.

        Args:
            position: that the electorate decides.
            electorate: empty where this peer does not know it.
            here: those of the roster, and oneself.
            in_touch: with the coordinator.
        """
        present = [i for i, elector in enumerate(electorate) if elector in here]
        if not electorate or is_quorum(present, len(electorate)):
            self._missing_at = None
            return None
        before, self._missing_at = self._missing_at, position
        if before != position or self._told_at == position:
            return None  # a roster is some seconds behind
        self._told_at = position
        return _waiting(position, len(present), len(electorate), in_touch=in_touch)


def _waiting(position: int, present: int, electors: int, *, in_touch: bool) -> str:
    how_long = (
        f"which the coordinator opens after {STALL_S:.0f} s without a round (or three rounds' "
        "time, if longer)"
        if in_touch
        else "for which the coordinator must come back"
    )
    return (
        f"round {position + 1} has no quorum: {present} of its {electors} electors are here, and a "
        f"peer that was started again is none of them; training on until a new epoch, {how_long}"
    )
