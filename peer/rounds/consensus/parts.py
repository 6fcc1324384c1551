"""The parts of a leader's group: which are done, which are lost, and who makes them up.

A part is *done* when its owner has named its digest. The entry can be proposed then, while the
bytes are still on their way to the voters: whoever votes holds them. A part is *lost* when nothing
brings its bytes any more; it is reduced again under a new owner (docs/protocol.md, part 4, steps 5
to 7).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from atoll.optim.log.entry import Part, Partial
from atoll.optim.reduction.cells import Cells
from atoll.peer.rounds.consensus.round_events import Fetch, FetchEnded, LeaderView, RepairPart
from atoll.peer.rounds.messages import Group, PartDone, PartPlan, Repair
from atoll.peer.rounds.policies import OWNERS_SHARE, new_owner

IsLive = Callable[[str], bool]
"""Returns True as long as a member's session lasts."""


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
    order: Repair | None = None
    """the last one by which it is reduced again"""


class Parts:
    """The parts of one group."""

    def __init__(self, group: Group, cells: Cells, *, now: float) -> None:
        """All with their first owners; `cells` are those of the position's fragment."""
        self._group = group
        self._cells = cells
        due = now + OWNERS_SHARE * group.deadline_s
        self._parts = [PartState(plan=plan, owner=plan.owner, due=due) for plan in group.parts]
        self._untrue: set[int] = set()
        """owners that named a part whose bytes no peer has"""

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def done(self) -> dict[int, PartDone]:
        """The owners' words on finished parts, by part."""
        return {i: part.done for i, part in enumerate(self._parts) if part.done}

    @property
    def digests(self) -> dict[int, bytes]:
        """The digests that owners have named, by part."""
        return {i: done.digest for i, done in self.done.items()}

    @property
    def orders(self) -> tuple[Repair, ...]:
        """The orders by which parts are reduced again."""
        return tuple(part.order for part in self._parts if part.order is not None)

    def note(self, remote: str, done: PartDone) -> None:
        """Take an owner's word on a part; that of another member counts for nothing."""
        if done.part >= len(self._parts):
            return
        part = self._parts[done.part]
        owner = self._group.members[part.owner].peer_id
        if owner == remote and done.generation == part.generation and self._is_sound(part, done):
            part.done = done

    def fetched(self, event: FetchEnded) -> None:
        """Note the end of a fetch; one of an earlier generation changes nothing."""
        part = self._parts[event.part]
        if part.done is not None and part.done.digest == event.digest:
            part.fetch_ended = True

    def look_after(self, view: LeaderView, is_live: IsLive) -> list[Fetch | RepairPart]:
        """Begin what brings back parts that are lost."""
        actions: list[Fetch | RepairPart] = []
        for index in range(len(self._parts)):
            if self._is_lost(index, view, is_live):
                actions += self._repair(index, view, is_live)
            else:
                actions += self._fetch(index, view, is_live)
        return actions

    def fetch_missing(self, view: LeaderView, is_live: IsLive) -> list[Fetch]:
        """Fetch parts that are done and do not come by themselves."""
        return [each for i in range(len(self._parts)) for each in self._fetch(i, view, is_live)]

    def held(self, view: LeaderView) -> bool:
        """Return whether all parts are done and here."""
        return all(self._is_held(index, view) for index in range(len(self._parts)))

    def settled(self, view: LeaderView, is_live: IsLive) -> bool:
        """Return whether all parts are done, and here or on their way."""
        return all(
            part.done is not None and (index in view.held or self._comes(index, view, is_live))
            for index, part in enumerate(self._parts)
        )

    def lost(self, view: LeaderView, is_live: IsLive) -> bool:
        """Return whether a part is neither here nor anywhere."""
        return any(self._is_lost(index, view, is_live) for index in range(len(self._parts)))

    def logged(self) -> tuple[Part, ...]:
        """Return the parts as an entry names them; all must be done."""
        return tuple(_logged(part, part.done) for part in self._parts if part.done)

    def _is_sound(self, part: PartState, done: PartDone) -> bool:
        """Check that an owner's word can be logged: its length, and members by their prefixes."""
        start, stop = part.plan.start_cell, part.plan.stop_cell
        members = len(self._group.members)
        named = [p.member for p in done.partial]
        return (
            done.wire_bytes <= self._cells.max_body_bytes(members, start, stop)
            and named == sorted(set(named))
            and all(m < members for m in named)
            and all(p.cells < stop - start for p in done.partial)
        )

    def _is_held(self, index: int, view: LeaderView) -> bool:
        return self._parts[index].done is not None and index in view.held

    def _comes(self, index: int, view: LeaderView, is_live: IsLive) -> bool:
        """Return whether the leader's own exchange still brings it."""
        part = self._parts[index]
        is_kept = part.done is not None and part.owner in self._untrue
        return index in view.coming and self._owner_lives(part, view.now, is_live) and not is_kept

    def _is_lost(self, index: int, view: LeaderView, is_live: IsLive) -> bool:
        part = self._parts[index]
        if self._is_held(index, view) or self._comes(index, view, is_live):
            return False
        if part.done is None:
            return not self._owner_lives(part, view.now, is_live)
        return part.fetch_ended

    def _fetch(self, index: int, view: LeaderView, is_live: IsLive) -> list[Fetch]:
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

    def _repair(self, index: int, view: LeaderView, is_live: IsLive) -> list[RepairPart]:
        """The live member that owns the fewest cells; the old owner if no other is left."""
        part, alive = self._parts[index], self._alive(is_live)
        before = self._group.members[part.owner].peer_id
        overdue = before if part.done is None and is_live(before) else ""
        if part.done is not None:
            self._untrue.add(part.owner)
        load: dict[int, int] = {}
        for state in self._parts:
            cells = state.plan.stop_cell - state.plan.start_cell
            load[state.owner] = load.get(state.owner, 0) + cells
        owner = new_owner({part.owner, *self._untrue}, alive, load)
        if owner is None:
            owner = new_owner((), alive, load)
        if owner is None:
            return []
        part.owner, part.done = owner, None
        part.is_fetched = part.fetch_ended = False
        part.due = view.now + OWNERS_SHARE * self._group.deadline_s
        part.generation += 1
        order = Repair(part=index, generation=part.generation, owner=owner, senders=tuple(alive))
        part.order = order
        name = self._group.members[owner].peer_id
        return [RepairPart(order=order, owner=name, overdue=overdue)]


def _logged(part: PartState, done: PartDone) -> Part:
    return Part(
        start_cell=part.plan.start_cell,
        stop_cell=part.plan.stop_cell,
        owner=part.owner,
        generation=part.generation,
        wire_bytes=done.wire_bytes,
        digest=done.digest,
        partial=tuple(Partial(member=p.member, cells=p.cells) for p in done.partial),
    )
