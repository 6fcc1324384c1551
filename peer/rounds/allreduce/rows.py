"""Who passes on whose codes where a group is large: rows, and the relay of each row for each part.

Each member sends its codes of a part to one of its row, the relay, who sends their sum to the
part's owner.  Everything follows from the group, so nothing is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

from atoll.peer.rounds.messages import PartPlan
from atoll.peer.rounds.policies import num_rows

GO_ROUND = 2  # cells a member, with which each fast link owns one


@dataclass(frozen=True)
class Rows:
    """`relay` says whom a member sends a part to."""

    of: tuple[int, ...]
    """the row of each member"""
    members: tuple[tuple[int, ...], ...]
    """of each row"""
    relays: tuple[tuple[int, ...], ...]
    """of each part, one a row; its owner for the owner's row"""

    def relay(self, part: int, member: int) -> int:
        """To whom a member sends its codes of a part; to itself where it relays or owns it."""
        return self.relays[part][self.of[member]]

    def passed(self, owner: int) -> dict[int, tuple[int, ...]]:
        """The rows whose sums an owner takes, with their members."""
        return {row: members for row, members in enumerate(self.members) if row != self.of[owner]}


def rows_of(members: int, parts: Sequence[PartPlan]) -> Rows:
    """The rows of a group, and who relays what."""
    count = num_rows(members)
    rows = tuple(tuple(range(row, members, count)) for row in range(count))
    of = tuple(member % count for member in range(members))
    owned = [0] * members
    for plan in parts:
        owned[plan.owner] += plan.stop_cell - plan.start_cell
    by_row = [_relays(row, parts, owned) for row in rows]
    relays = tuple(zip(*by_row, strict=True))
    return Rows(of=of, members=rows, relays=relays)


def _relays(row: Sequence[int], parts: Sequence[PartPlan], owned: Sequence[int]) -> list[int]:
    """One of a row for each part: in proportion to the cells that its members own.

    A link that is slow owns few cells or none, so it relays few or none.  Where the cells do not go
    round, who owns none may have a fast link: then all relay alike.
    """
    rate = {member: owned[member] for member in row}
    if sum(owned) < GO_ROUND * len(owned) or not any(rate.values()):
        rate = dict.fromkeys(row, 1)
    size = sum(owned) / len(parts)
    loads = [((owned[member] + size) / rate[member], member) for member in row if rate[member]]
    heapify(loads)
    relays = []
    for plan in parts:
        relay = plan.owner
        if relay not in rate:
            load, relay = loads[0]
            cells = plan.stop_cell - plan.start_cell
            heapreplace(loads, (load + cells / rate[relay], relay))
        relays.append(relay)
    return relays
