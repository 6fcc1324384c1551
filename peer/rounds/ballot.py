"""The acceptor of single-decree Paxos, one decree a position (Lamport, "Paxos Made Simple", 2001).

The ballot of attempt ``a`` belongs to one leader, ``leader_order[a % electors]``, so the attempt
alone orders ballots.  Attempt 0 has a fixed leader and needs no promises.  The state dies with the
process: a restarted peer is another incarnation, and so another elector.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """What this elector voted for last."""

    attempt: int
    entry: bytes


class Acceptor:
    """One elector's memory of one position."""

    def __init__(self) -> None:
        """Nothing promised, nothing accepted."""
        self.promised = 0
        self.accepted: Accepted | None = None

    def prepare(self, attempt: int) -> bool:
        """Promise to refuse attempts below ``attempt``; False where more was promised already."""
        if attempt < self.promised:
            return False
        self.promised = attempt
        return True

    def accept(self, attempt: int, entry: bytes) -> bool:
        """Vote for ``entry``; False where a later attempt was promised, or it is another entry.

        An attempt has one leader and a leader proposes once, so a second entry at the same attempt
        comes from a faulty leader and is refused.
        """
        if attempt < self.promised:
            return False
        if self.accepted and self.accepted.attempt == attempt and self.accepted.entry != entry:
            return False
        self.promised = attempt
        self.accepted = Accepted(attempt=attempt, entry=entry)
        return True


def value_to_propose(promises: list[Accepted | None]) -> bytes | None:
    """The entry of the highest attempt among a quorum's promises; None leaves the choice free."""
    accepted = [promise for promise in promises if promise is not None]
    return max(accepted, key=lambda a: a.attempt).entry if accepted else None
