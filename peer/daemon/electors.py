"""Whether a round can be decided at all, as far as the roster shows."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from atoll.coordinator.policies import STALL_S
from atoll.optim.log.entry import Elector, is_quorum


class QuorumWatch:
    """Notices that the electors of a position are gone, and says so once."""

    def __init__(self) -> None:
        """Begin without anybody missing."""
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
        """Return a warning if a quorum was missing at this look and at the one before.

        Args:
            position: the one that the electorate decides.
            electorate: empty if this peer does not know it.
            here: the electors in the roster, and this peer.
            in_touch: whether this peer is, with the coordinator.
        """
        present = [i for i, elector in enumerate(electorate) if elector in here]
        if not electorate or is_quorum(present, len(electorate)):
            self._missing_at = None
            return None
        before, self._missing_at = self._missing_at, position
        if before != position or self._told_at == position:
            return None  # one look is not enough: a roster is some seconds behind
        self._told_at = position
        until = (
            f"the coordinator opens a new epoch, after {STALL_S:.0f} s without a round (or the "
            "time of three rounds, if that is longer)"
            if in_touch
            else "a new epoch opens, for which the coordinator must come back"
        )
        return (
            f"no quorum for round {position + 1}: {len(present)} of {len(electorate)} electors "
            f"online (a restarted peer does not count); training continues locally until {until}"
        )
