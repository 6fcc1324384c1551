"""The parts of a group as its leader sees them: their progress, owners and repairs.

A part is *done* when its owner has named its digest. The entry can be proposed then, while the
bytes are still on their way to the voters: whoever votes holds them. A part is *lost* when nothing
brings its bytes any more; it is reduced again under a new owner.

Nothing here waits or sends: see `round.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from atoll.optim.log.entry import Part, Partial
from atoll.optim.reduction.cells import Cells
from atoll.peer.rounds.messages import Group, PartDone, PartPlan, Repair
from atoll.peer.rounds.policies import new_owner

OWNERS_SHARE = 0.75  # of the deadline: more than senders have, less than the round has

IsLive = Callable[[str], bool]
"""Whether a member's session lasts."""


class InHand(Protocol):
    """A leader's view of its parts; `round.View` is one."""

    @property
    def now(self) -> float:
        """The time."""
        ...

    @property
    def held(self) -> frozenset[int]:
        """Parts whose named bytes are in hand."""
        ...

    @property
    def coming(self) -> frozenset[int]:
        """Parts that the leader's own exchange may still bring."""
        ...


@dataclass(frozen=True, kw_only=True)
class Fetch:
    """Get a part that is done and does not come by itself, from any of these members."""

    part: int
    done: PartDone
    members: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class FetchEnded:
    """A fetch has ended, with the bytes in hand or without."""

    part: int
    digest: bytes


@dataclass(frozen=True, kw_only=True)
class RepairPart:
    """Order all members to reduce a part again under a new owner."""

    order: Repair
    owner: str


@dataclass(kw_only=True)
class PartState:
    """The progress of one part."""

    plan: PartPlan
    owner: int
    due: float
    """when an owner that lives but has not finished loses the part; on the leader's clock"""
    generation: int = 0
    done: PartDone | None = None
    is_fetched: bool = False
    """whether a fetch has begun"""
    fetch_ended: bool = False


class Parts:
    """The parts of one group."""

    def __init__(self, group: Group, cells: Cells, *, now: float) -> None:
        """All with their first owners; `cells` are those of the position's fragment."""
        self._group = group
        self._cells = cells
        due = now + OWNERS_SHARE * group.deadline_s
        self._parts = [PartState(plan=plan, owner=plan.owner, due=due) for plan in group.parts]

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def digests(self) -> dict[int, bytes]:
        """The digests that owners have named, by part."""
        return {i: part.done.digest for i, part in enumerate(self._parts) if part.done}

    def note(self, remote: str, done: PartDone) -> None:
        """Take an owner's word on a part; that of another member counts for nothing."""
        if done.part >= len(self._parts):
            return
        part = self._parts[done.part]
        owner = self._group.members[part.owner].peer_id
        if owner == remote and done.generation == part.generation and self._is_sound(part, done):
            part.done = done

    def fetched(self, event: FetchEnded) -> None:
        """A fetch has ended; one of an earlier generation changes nothing."""
        part = self._parts[event.part]
        if part.done is not None and part.done.digest == event.digest:
            part.fetch_ended = True

    def look_after(self, view: InHand, is_live: IsLive) -> list[Fetch | RepairPart]:
        """Begin what brings back parts that are lost."""
        actions: list[Fetch | RepairPart] = []
        for index in range(len(self._parts)):
            if self._is_lost(index, view, is_live):
                actions += self._repair(index, view, is_live)
            else:
                actions += self._fetch(index, view, is_live)
        return actions

    def fetch_missing(self, view: InHand, is_live: IsLive) -> list[Fetch]:
        """Fetch parts that are done and do not come by themselves."""
        return [each for i in range(len(self._parts)) for each in self._fetch(i, view, is_live)]

    def settled(self, view: InHand, is_live: IsLive) -> bool:
        """Return whether all parts are done, and here or on their way."""
        return all(
            part.done is not None and (index in view.held or self._comes(index, view, is_live))
            for index, part in enumerate(self._parts)
        )

    def lost(self, view: InHand, is_live: IsLive) -> bool:
        """Return whether a part is neither here nor anywhere."""
        return any(self._is_lost(index, view, is_live) for index in range(len(self._parts)))

    def logged(self, gone: Sequence[int]) -> tuple[Part, ...]:
        """The parts as an entry names them; of the members in `gone` nothing is counted.

        All must be done.
        """
        return tuple(_logged(part, part.done, gone) for part in self._parts if part.done)

    def _is_sound(self, part: PartState, done: PartDone) -> bool:
        """Whether an owner's word can be logged: its length, and members by their prefixes."""
        start, stop = part.plan.start_cell, part.plan.stop_cell
        members = len(self._group.members)
        named = [p.member for p in done.partial]
        return (
            done.wire_bytes <= self._cells.max_body_bytes(members, start, stop)
            and named == sorted(set(named))
            and all(m < members for m in named)
            and all(p.cells < stop - start for p in done.partial)
        )

    def _is_held(self, index: int, view: InHand) -> bool:
        return self._parts[index].done is not None and index in view.held

    def _comes(self, index: int, view: InHand, is_live: IsLive) -> bool:
        """Return whether the leader's own exchange still brings it."""
        return index in view.coming and self._owner_lives(self._parts[index], view.now, is_live)

    def _is_lost(self, index: int, view: InHand, is_live: IsLive) -> bool:
        part = self._parts[index]
        if self._is_held(index, view) or self._comes(index, view, is_live):
            return False
        if part.done is None:
            return not self._owner_lives(part, view.now, is_live)
        return part.fetch_ended

    def _fetch(self, index: int, view: InHand, is_live: IsLive) -> list[Fetch]:
        part = self._parts[index]
        if part.done is None or part.is_fetched:
            return []
        if self._is_held(index, view) or self._comes(index, view, is_live):
            return []
        part.is_fetched = True
        members = tuple(self._group.members[i].peer_id for i in self._alive(is_live))
        return [Fetch(part=index, done=part.done, members=members)]

    def _owner_lives(self, part: PartState, now: float, is_live: IsLive) -> bool:
        """Return whether its owner may still finish a part: it is there, and not overdue."""
        owner = self._group.members[part.owner].peer_id
        return is_live(owner) and (part.done is not None or now < part.due)

    def _alive(self, is_live: IsLive) -> list[int]:
        return [i for i, m in enumerate(self._group.members) if is_live(m.peer_id)]

    def _repair(self, index: int, view: InHand, is_live: IsLive) -> list[RepairPart]:
        """The live member that owns the fewest cells; the old owner if nobody else is left."""
        part, alive = self._parts[index], self._alive(is_live)
        load: dict[int, int] = {}
        for state in self._parts:
            cells = state.plan.stop_cell - state.plan.start_cell
            load[state.owner] = load.get(state.owner, 0) + cells
        owner = new_owner((part.owner,), alive, load)
        if owner is None:
            owner = new_owner((), alive, load)
        if owner is None:
            return []
        part.owner, part.done = owner, None
        part.is_fetched = part.fetch_ended = False
        part.due = view.now + OWNERS_SHARE * self._group.deadline_s
        part.generation += 1
        order = Repair(part=index, generation=part.generation, owner=owner, senders=tuple(alive))
        return [RepairPart(order=order, owner=self._group.members[owner].peer_id)]


def _logged(part: PartState, done: PartDone, gone: Sequence[int]) -> Part:
    cells = {member: 0 for member in gone} | {p.member: p.cells for p in done.partial}
    return Part(
        start_cell=part.plan.start_cell,
        stop_cell=part.plan.stop_cell,
        owner=part.owner,
        generation=part.generation,
        wire_bytes=done.wire_bytes,
        digest=done.digest,
        partial=tuple(Partial(member=m, cells=c) for m, c in sorted(cells.items())),
    )
