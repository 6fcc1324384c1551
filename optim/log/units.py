"""Exactly-once data: which peer holds which units of the run's rows, as the log derives it.

The rows of a run with `data.once` are cut into numbered units, one for each inner step. Every pass
over them has an order of its own (`peer/training/data/units.py`), and this table counts along it:

    number    the pass, from 1
    next      units below it were handed out in this pass
    returned  units that were handed out and came back: ranges, sorted
    leases    units that a peer holds, in the order in which it trains on them: ranges
              what is below `next` and neither returned nor leased is done

Each entry carries the table after it, so a joiner has it with the newest entry, and the chain and
the votes cover it. All replicas compute it from the table before and the entry (`units_after`):

    1. A member whose contribution is in the update has done the first units of its lease, as many
       as its signed report says.
    2. A lease of which nothing was done for `IDLE` positions comes back, as does that of an
       evicted peer.
    3. When all units are done, the next pass begins.
    4. Members get units up to what they do in `AHEAD` windows: returned ones first. Those that
       hold the fewest come first, then by PeerID. When nobody holds any, and there are no members,
       each elector gets one: a contribution without units weighs nothing, and an update needs some
       that do.

A peer trains on the units of its lease in order, so one number names those in a contribution, and
no report can name a unit of another peer. A contribution that was left out keeps its units: its
work is in the next one.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from atoll.optim.log.entry import (
    MAX_UNITS,
    Count,
    Elector,
    Entry,
    MalformedRecord,
    Member,
    Part,
    PeerId,
    Record,
)
from atoll.optim.log.orders import read_settings

IDLE = 8  # twice the windows after which a peer that lags drops its own open work
AHEAD = 2  # windows: one under way, whose outcome is open, and the one that trains meanwhile
LONGEST = 4  # times the median of the members' steps: a peer cannot claim all units by its pace
MAX_RANGES = 8  # of a lease
MAX_LEASES = 1024  # further members wait; a table has at most 512 KiB then

Range = tuple[int, int]
"""Units `[start, stop)` in the order of the pass."""


class UnitsInvalid(MalformedRecord):
    """A report names more units than its sender holds, or a table does not follow."""


def _pairs(flat: Sequence[int]) -> list[Range]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def _flat(ranges: Iterable[Range]) -> tuple[int, ...]:
    return tuple(bound for pair in ranges for bound in pair)


def count_of(ranges: Iterable[Range]) -> int:
    """Return the number of units in ranges."""
    return sum(stop - start for start, stop in ranges)


def split(ranges: Sequence[Range], count: int) -> tuple[list[Range], list[Range]]:
    """Return the first units of ranges, at most `count`, and the rest."""
    first, rest = list[Range](), list[Range]()
    for start, stop in ranges:
        middle = start + min(count, stop - start)
        count -= middle - start
        first += [(start, middle)] if middle > start else []
        rest += [(middle, stop)] if stop > middle else []
    return first, rest


def begins_with(longer: Sequence[Range], shorter: Sequence[Range]) -> bool:
    """Return whether ranges begin with the units of others, in the same order."""
    first, _ = split(longer, count_of(shorter))
    return _joined(first, is_sorted=True) == _joined(shorter, is_sorted=True)


def _joined(ranges: Iterable[Range], *, is_sorted: bool = False) -> list[Range]:
    """Merge ranges that follow each other; sort them first unless their order has to stay."""
    joined: list[Range] = []
    for start, stop in ranges if is_sorted else sorted(ranges):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


class Lease(Record):
    """The units that a peer holds."""

    peer_id: PeerId
    since: Count
    """position at which it last did some of them, or got the first"""
    flat: Annotated[tuple[Count, ...], Field(min_length=2, max_length=2 * MAX_RANGES)]

    @property
    def ranges(self) -> list[Range]:
        """The units, in the order in which the peer trains on them."""
        return _pairs(self.flat)


class UnitTable(Record):
    """The units of the present pass, and the peers that hold them; the module states the rule."""

    max_bytes: ClassVar[int] = MAX_UNITS

    number: Annotated[Count, Field(ge=1)] = 1
    next: Count = 0
    flat: Annotated[tuple[Count, ...], Field(max_length=2 * MAX_RANGES * MAX_LEASES)] = ()
    leases: Annotated[tuple[Lease, ...], Field(max_length=MAX_LEASES)] = ()

    @model_validator(mode="after")
    def _check(self) -> UnitTable:
        held = [pair for lease in self.leases for pair in _pairs(lease.flat)]
        last = 0
        for start, stop in sorted([*_pairs(self.flat), *held]):
            if not last <= start < stop <= self.next:
                raise ValueError("ranges of units are apart, not empty, and were handed out")
            last = stop
        names = [lease.peer_id for lease in self.leases]
        if names != sorted(set(names)) or _pairs(self.flat) != sorted(_pairs(self.flat)):
            raise ValueError("leases and returned units are sorted, and name each peer once")
        return self

    @property
    def returned(self) -> list[Range]:
        """Units that came back, sorted."""
        return _pairs(self.flat)

    def held_by(self, peer_id: str) -> list[Range]:
        """Return the units that a peer holds, in the order in which it trains on them."""
        return next((one.ranges for one in self.leases if one.peer_id == peer_id), [])


@dataclass(frozen=True, kw_only=True)
class PassProgress:
    """Progress through the run's rows."""

    number: int
    """The pass, from 1."""
    done: int
    held: int
    total: int


def read_units(stored: bytes) -> UnitTable:
    """Return the table that an entry or an epoch record carries; that of the start if it is empty.

    Raises:
        MalformedRecord: it is no table.
    """
    return UnitTable.decode(stored) if stored else UnitTable()


def progress(stored: bytes, total: int) -> PassProgress:
    """Return the progress that a table shows."""
    table = read_units(stored)
    held = sum(count_of(lease.ranges) for lease in table.leases)
    done = table.next - count_of(table.returned) - held
    return PassProgress(number=table.number, done=done, held=held, total=total)


def finished(
    members: Sequence[Member], parts: Sequence[Part], before: bytes
) -> dict[str, list[Range]]:
    """Return the units that an update takes as done, by peer.

    Args:
        members: of the entry; none if it is no update.
        parts: the entry's.
        before: the table before the entry, as it is stored.

    Raises:
        UnitsInvalid: a member names more than it holds, or counts without any.
    """
    table, done = read_units(before), dict[str, list[Range]]()
    for index, member in enumerate(members):
        held = table.held_by(member.peer_id)
        expect_held(member.peer_id, member.units, count_of(held), counts=member.weight > 0)
        if member.units and _is_included(index, parts):
            done[member.peer_id], _ = split(held, member.units)
    return done


def expect_held(peer_id: str, units: int, held: int, *, counts: bool) -> None:
    """Check the units that a contribution names.

    Raises:
        UnitsInvalid: they are more than its sender holds, or it counts without any.
    """
    if units > held or counts != (units > 0):
        raise UnitsInvalid(
            f"expected {'1' if counts else '0'} to {held if counts else 0} units that {peer_id} "
            f"holds, got {units}"
        )


def _is_included(member: int, parts: Sequence[Part]) -> bool:
    missing = (any(p.member == member and p.cells == 0 for p in part.partial) for part in parts)
    return not all(missing)


def units_after(
    before: bytes,
    *,
    position: int,
    members: Sequence[Member],
    parts: Sequence[Part],
    electorate: Sequence[Elector],
    evicted: Collection[str],
    total: int,
) -> bytes:
    """Return the table that an entry has to carry; empty in runs without `data.once`.

    Args:
        before: the table before the entry, as it is stored.
        position: the entry's.
        members: the entry's.
        parts: the entry's.
        electorate: the entry's.
        evicted: PeerIDs that orders up to the entry have put out.
        total: units of a pass; 0 for a run without.

    Raises:
        UnitsInvalid: a member names more units than it holds, or any in a run without.
    """
    if total == 0:
        if any(member.units for member in members):
            raise UnitsInvalid("expected no units in a run without data.once")
        return b""
    table = read_units(before)
    done = finished(members, parts, before)
    returned, leases = table.returned, dict[str, tuple[int, list[Range]]]()
    for lease in table.leases:
        did = count_of(done.get(lease.peer_id, ()))
        _, left = split(lease.ranges, did)
        since = position if did else lease.since
        if position - since >= IDLE or lease.peer_id in evicted:
            returned = returned + left
        elif left:
            leases[lease.peer_id] = since, left
    number, frontier, returned = table.number, table.next, _joined(returned)
    if frontier == total and not returned and not leases:
        number, frontier = number + 1, 0
    goals = _goals([m for m in members if m.peer_id not in evicted], total)
    if not members and not leases:
        goals = {e.peer_id: 1 for e in electorate if e.peer_id not in evicted}
    held = {peer: count_of(leases[peer][1]) if peer in leases else 0 for peer in goals}
    for peer in sorted(goals, key=lambda peer: (held[peer], peer)):
        since, own = leases.get(peer, (position, []))
        if not own and len(leases) == MAX_LEASES:
            continue
        own, returned, frontier = _granted(own, goals[peer], returned, frontier, total)
        if own:
            leases[peer] = since, own
    return UnitTable(
        number=number,
        next=frontier,
        flat=_flat(returned),
        leases=tuple(
            Lease(peer_id=peer, since=since, flat=_flat(own))
            for peer, (since, own) in sorted(leases.items())
        ),
    ).encode()


def _goals(members: Sequence[Member], total: int) -> dict[str, int]:
    """Return the units that each member may hold: at least one, at most its share of a pass."""
    if not members:
        return {}
    usual = statistics.median_high([member.steps for member in members])
    share = -(-total // len(members))
    return {m.peer_id: max(1, min(AHEAD * min(m.steps, LONGEST * usual), share)) for m in members}


def _granted(
    own: list[Range], goal: int, returned: list[Range], frontier: int, total: int
) -> tuple[list[Range], list[Range], int]:
    """Return a lease with free units added, and the free ones that are left."""
    while (wanted := goal - count_of(own)) > 0 and (returned or frontier < total):
        if returned:
            some, rest = split(returned[:1], wanted)
        else:
            some, rest = [(frontier, min(total, frontier + wanted))], []
        longer = _joined([*own, *some], is_sorted=True)
        if len(longer) > MAX_RANGES:
            break
        own = longer
        if returned:
            returned = rest + returned[1:]
        else:
            frontier = some[0][1]
    return own, returned, frontier


def check_units(entry: Entry, before: bytes | None, total: int) -> None:
    """Check that an entry carries the table that follows from the one before it.

    Args:
        entry: the entry.
        before: the table before it, as it is stored; None if it is not known: then nothing is
            checked here, and the entry's certificate vouches for it.
        total: units of a pass; 0 for a run without.

    Raises:
        UnitsInvalid: it carries another.
    """
    if total and before is None:
        return
    due = units_after(
        before or b"",
        position=entry.position,
        members=entry.members,
        parts=entry.parts,
        electorate=entry.electorate,
        evicted=read_settings(entry.settings).evicted if total else (),
        total=total,
    )
    if entry.units != due:
        raise UnitsInvalid(f"entry {entry.position}: expected the units that follow")
