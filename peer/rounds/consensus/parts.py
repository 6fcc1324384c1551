"""The parts of a group as its leader sees them: where each stands, who owns it, what is repaired.

A part is *done* when its owner has named its digest.  The entry can be proposed then, while the
bytes are still on their way to those who vote: whoever votes holds them.  A part is *lost* when
nothing brings its bytes any more; it is reduced again under a new owner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from atoll.dht.identity import short
from atoll.dht.tasks import end
from atoll.dht.transport import TransportError
from atoll.optim.log.entry import Part, Partial
from atoll.optim.reduction.cells import Cells
from atoll.peer.rounds.context import Context
from atoll.peer.rounds.fetching import fetch_part
from atoll.peer.rounds.messages import Group, PartDone, PartPlan, Repair
from atoll.peer.rounds.policies import new_owner

OWNERS_SHARE = 0.75  # of the deadline: more than senders have, less than the round has


class Arrivals(Protocol):
    """The leader's own exchange, where it is a member of the group."""

    def busy(self, part: int) -> bool:
        """Whether the bytes of a part may still come by themselves."""
        ...


@dataclass(kw_only=True)
class PartState:
    """Where a part stands."""

    plan: PartPlan
    owner: int
    due: float
    """when an owner that lives but has not finished loses the part; on the context's clock"""
    generation: int = 0
    done: PartDone | None = None
    fetching: asyncio.Task[None] | None = None


class Parts:
    """The parts of one group."""

    def __init__(
        self,
        ctx: Context,
        group: Group,
        cells: Cells,
        *,
        is_live: Callable[[str], bool],
        order: Callable[[Repair], Awaitable[None]],
        changed: asyncio.Event,
    ) -> None:
        """All with their first owners.

        Args:
            ctx: the leader's.
            group: closed.
            cells: of the position's fragment.
            is_live: whether a member's session lasts.
            order: tells the members of a repair.
            changed: set when a fetch ended.
        """
        self._ctx = ctx
        self._group = group
        self._cells = cells
        self._is_live = is_live
        self._order = order
        self._changed = changed
        self.exchange: Arrivals | None = None
        due = self._next_due()
        self._parts = [PartState(plan=plan, owner=plan.owner, due=due) for plan in group.parts]

    def note(self, remote: str, done: PartDone) -> None:
        """Take an owner's word on a part; that of somebody else counts for nothing."""
        if done.part >= len(self._parts):
            return
        part = self._parts[done.part]
        owner = self._group.members[part.owner].peer_id
        if owner == remote and done.generation == part.generation and self._is_sound(part, done):
            part.done = done

    async def settle(self) -> bool:
        """Begin what brings lost parts back; whether all parts are done and here or coming."""
        for index, part in enumerate(self._parts):
            if self._look_after(index, part):
                await self._repair(index, part)
        return all(self._is_here_or_coming(index, part) for index, part in enumerate(self._parts))

    def lost(self) -> bool:
        """Fetch what does not come by itself; whether a part is neither here nor anywhere."""
        return any([self._look_after(index, part) for index, part in enumerate(self._parts)])

    def logged(self, gone: Sequence[int]) -> tuple[Part, ...]:
        """The parts as an entry names them; of the members in ``gone`` nothing is counted.

        All must be done.
        """
        return tuple(_logged(part, part.done, gone) for part in self._parts if part.done)

    async def close(self) -> None:
        """End what is under way, and let go of the exchange.

        A leadership is a cycle of references: what it holds stays until the collector comes by,
        which may be many rounds later, and an exchange has some bytes for each value.
        """
        self.exchange = None
        await end(*(part.fetching for part in self._parts if part.fetching))

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

    def _is_held(self, part: PartState) -> bool:
        return part.done is not None and self._ctx.parts.body(part.done.digest) is not None

    def _is_coming(self, index: int, part: PartState) -> bool:
        """Whether the leader's own exchange still brings it."""
        arriving = self.exchange is not None and self.exchange.busy(index)
        return arriving and self._owner_lives(part)

    def _is_here_or_coming(self, index: int, part: PartState) -> bool:
        return part.done is not None and (self._is_held(part) or self._is_coming(index, part))

    def _look_after(self, index: int, part: PartState) -> bool:
        """Fetch a part that is done and does not come by itself; whether it is lost."""
        if self._is_held(part) or self._is_coming(index, part):
            return False
        if part.done is None:
            return not self._owner_lives(part)
        if part.fetching is None:
            part.fetching = asyncio.create_task(self._fetch(part.done))
        return part.fetching.done()

    def _owner_lives(self, part: PartState) -> bool:
        """Whether its owner may still finish a part: it is there, and not overdue."""
        owner = self._group.members[part.owner].peer_id
        return self._is_live(owner) and (part.done is not None or self._ctx.now() < part.due)

    def _next_due(self) -> float:
        return self._ctx.now() + OWNERS_SHARE * self._group.deadline_s

    def _alive(self) -> list[int]:
        return [i for i, m in enumerate(self._group.members) if self._is_live(m.peer_id)]

    async def _fetch(self, done: PartDone) -> None:
        members = [self._group.members[index].peer_id for index in self._alive()]
        with suppress(TransportError):
            body = await fetch_part(self._ctx, members, done.digest, done.wire_bytes)
            self._ctx.parts.put(self._group.position, done.digest, body)
        self._changed.set()

    async def _repair(self, index: int, part: PartState) -> None:
        alive = self._alive()
        load: dict[int, int] = {}
        for state in self._parts:
            cells = state.plan.stop_cell - state.plan.start_cell
            load[state.owner] = load.get(state.owner, 0) + cells
        owner = new_owner((part.owner,), alive, load)
        if owner is None:
            owner = new_owner((), alive, load)
        if owner is None:
            return
        part.owner, part.done, part.fetching = owner, None, None
        part.due = self._next_due()
        part.generation += 1
        name = short(self._group.members[owner].peer_id)
        text = f"round {self._group.position + 1}: part {index} goes to {name}"
        self._ctx.on_event("warning", text)
        await self._order(
            Repair(part=index, generation=part.generation, owner=owner, senders=tuple(alive))
        )


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
