"""Leases of units: nothing is done twice in a pass, and all of it in the end."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.optim.log.entry import MAX_UNITS, Elector, MalformedRecord, Member, Part, Partial
from atoll.optim.log.units import (
    IDLE,
    MAX_LEASES,
    MAX_RANGES,
    Lease,
    Range,
    UnitsInvalid,
    UnitTable,
    begins_with,
    count_of,
    finished,
    progress,
    read_units,
    split,
    units_after,
)


def member(peer: str, units: int = 0, *, steps: int = 4) -> Member:
    return Member(
        peer_id=peer,
        incarnation="1",
        weight=1.0 if units else 0.0,
        clip=1.0,
        norm=1.0,
        tokens=units,
        steps=steps,
        loss=None,
        units=units,
    )


def part(*missing: int) -> Part:
    return Part(
        start_cell=0,
        stop_cell=2,
        owner=0,
        generation=0,
        wire_bytes=1,
        digest=bytes(32),
        partial=tuple(Partial(member=index, cells=0) for index in missing),
    )


def after(
    before: bytes,
    *members: Member,
    position: int = 0,
    missing: tuple[int, ...] = (),
    evicted: tuple[str, ...] = (),
    electors: tuple[str, ...] = (),
    total: int = 100,
) -> bytes:
    parts = (part(*missing),) if members else ()
    return units_after(
        before,
        position=position,
        members=members,
        parts=parts,
        electorate=[Elector(peer_id=peer, incarnation="1") for peer in electors],
        evicted=evicted,
        total=total,
    )


def held(stored: bytes, peer: str) -> list[Range]:
    return read_units(stored).held_by(peer)


def test_a_newcomer_gets_units_of_two_windows_and_then_what_it_has_done() -> None:
    table = after(b"", member("a"))
    assert held(table, "a") == [(0, 8)]
    table = after(table, member("a", 3), position=1)
    assert held(table, "a") == [(3, 11)]
    shown = progress(table, 100)
    assert (shown.number, shown.done, shown.held) == (1, 3, 8)


def test_a_contribution_that_is_left_out_keeps_its_units() -> None:
    table = after(b"", member("a"), member("b"))
    left_out = after(table, member("a", 2), member("b", 2), position=1, missing=(1,))
    assert held(left_out, "b") == held(table, "b")
    assert finished((member("a", 2), member("b", 2)), (part(1),), table).keys() == {"a"}


def test_units_of_a_dead_peer_are_handed_out_again() -> None:
    table = after(b"", member("a"), member("b"), total=12)
    lost = held(table, "b")
    for position in range(1, IDLE):
        table = after(
            table, member("a", min(1, count_of(held(table, "a")))), position=position, total=12
        )
        assert held(table, "b") == lost
    table = after(table, member("a"), position=IDLE, total=12)
    assert held(table, "b") == []
    assert lost[0] in held(table, "a")


def test_electors_begin_when_nobody_holds_units() -> None:
    table = after(b"", electors=("a", "b"))
    assert [held(table, peer) for peer in "ab"] == [[(0, 1)], [(1, 2)]]
    assert after(table, electors=("a", "b"), position=1) == table


def test_an_evicted_peer_holds_nothing() -> None:
    table = after(b"", member("a"), member("b"))
    table = after(table, position=1, evicted=("b",))
    assert held(table, "b") == []
    assert count_of(held(table, "a")) == 8


def test_a_pass_ends_when_all_is_done() -> None:
    table = after(b"", member("a"), total=5)
    table = after(table, member("a", 4), position=1, total=5)
    assert progress(table, 5).number == 1
    table = after(table, member("a", 1), position=2, total=5)
    shown = progress(table, 5)
    assert (shown.number, shown.done) == (2, 0)
    assert held(table, "a") == [(0, 5)]


@pytest.mark.parametrize(
    "liar",
    [
        member("a", 9),
        member("stranger", 1),
        member("a").model_copy(update={"weight": 1.0}),
        member("a", 2).model_copy(update={"weight": 0.0}),
    ],
)
def test_units_that_the_sender_does_not_hold_are_refused(liar: Member) -> None:
    table = after(b"", member("a"))
    with pytest.raises(UnitsInvalid, match="units that"):
        after(table, liar, position=1)


def test_a_run_without_has_no_table_and_takes_no_units() -> None:
    assert after(b"", member("a"), total=0) == b""
    with pytest.raises(UnitsInvalid, match=r"data\.once"):
        after(b"", member("a", 1), total=0)


def test_no_peer_takes_all_units_by_its_word() -> None:
    greedy = member("a", steps=10**6)
    table = after(b"", greedy, member("b"), member("c"), total=1000)
    assert count_of(held(table, "a")) == 2 * 4 * 4
    assert count_of(held(after(b"", member("a"), member("b"), total=6), "b")) == 3


@pytest.mark.parametrize(
    "table",
    [
        {"next": 4, "flat": (0, 5)},
        {"next": 9, "flat": (3, 3)},
        {"next": 9, "flat": (0, 4), "leases": (Lease(peer_id="a", since=0, flat=(3, 5)),)},
        {"next": 9, "flat": (0, 4, 6)},
        {"next": 9, "leases": (Lease(peer_id="b", since=0, flat=(3, 5)),) * 2},
    ],
)
def test_a_table_with_units_in_two_places_is_refused(table: dict[str, object]) -> None:
    valid = UnitTable(next=9).model_dump() | {
        key: [one.model_dump() for one in value] if key == "leases" else value  # type: ignore[attr-defined]
        for key, value in table.items()
    }
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in valid.items()}
    with pytest.raises((MalformedRecord, ValueError)):
        UnitTable(**fields)


def test_the_longest_table_fits_its_bound() -> None:
    flat = tuple(range(2**40, 2**40 + 2 * MAX_RANGES))
    leases = tuple(
        Lease.model_construct(peer_id=f"{index:052}", since=2**40, flat=flat)
        for index in range(MAX_LEASES)
    )
    table = UnitTable.model_construct(
        number=2**40, next=2**41, flat=flat * MAX_LEASES, leases=leases
    )
    assert len(table.encode()) <= MAX_UNITS


def test_ranges_begin_with_others_however_they_are_cut() -> None:
    assert begins_with([(0, 4), (4, 9)], [(0, 6)])
    assert not begins_with([(0, 4), (5, 9)], [(0, 6)])
    assert split([(5, 7), (0, 3)], 3) == ([(5, 7), (0, 1)], [(1, 3)])


@dataclass
class Worker:
    """A peer: what it has trained on since the last contribution that counted."""

    used: int = 0
    handed_in: int = 0
    alive: bool = True
    trained: list[int] = field(default_factory=list)


def units_of(ranges: list[Range]) -> list[int]:
    return [unit for start, stop in ranges for unit in range(start, stop)]


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32), total=st.integers(1, 40), delay=st.integers(0, 1))
def test_each_unit_is_done_once_a_pass_whoever_comes_and_goes(
    seed: int, total: int, delay: int
) -> None:
    draw = random.Random(seed)
    table, peers = b"", {"p0": Worker()}
    done: dict[int, list[int]] = {}
    for position in range(250):
        members, names = [], list[str]()
        for name, peer in peers.items():
            if not peer.alive or draw.random() < 0.1:
                continue
            lease = count_of(held(table, name))
            peer.used = min(peer.used, lease)
            if delay == 0 or peer.handed_in == 0:
                peer.used = min(lease, peer.used + draw.randint(1, 4))
                peer.handed_in = peer.used
            if peer.handed_in > lease:
                peer.handed_in = peer.used = 0
            claim = peer.handed_in
            if draw.random() < 0.05:  # a lie, which the leader refuses
                with pytest.raises(UnitsInvalid):
                    after(table, member(name, lease + 1), total=total)
            members.append(member(name, claim, steps=draw.randint(1, 5)))
            names.append(name)
        missing = tuple(i for i in range(len(members)) if draw.random() < 0.1)
        if len(missing) == len(members):
            missing = ()
        number = read_units(table).number
        if not any(one.units for one in members):
            members, names, missing = [], [], ()  # a NULL: no member has work
        parts = (part(*missing),) if members else ()
        for ranges in finished(members, parts, table).values():
            done.setdefault(number, []).extend(units_of(ranges))
        before = table
        living = tuple(name for name, peer in peers.items() if peer.alive)
        table = after(
            table,
            *members,
            position=position,
            missing=missing,
            electors=living,
            total=total,
        )
        for index, name in enumerate(names):
            peer, claim = peers[name], members[index].units
            if index not in missing:
                peer.used -= claim
            peer.handed_in = 0
            if delay:  # trains on while the contribution is under way
                peer.used = min(count_of(held(table, name)), peer.used + draw.randint(0, 3))
        for name, peer in peers.items():
            if not begins_with(held(table, name), held(before, name)) and name not in names:
                peer.used = peer.handed_in = 0
        if position < 150 and draw.random() < 0.1 and len(peers) < 12:
            peers[f"p{len(peers)}"] = Worker()
        alive = [peer for peer in peers.values() if peer.alive]
        if position < 150 and draw.random() < 0.1 and len(alive) > 1:
            draw.choice(alive).alive = False
    assert all(len(units) == len(set(units)) for units in done.values())
    last = read_units(table).number
    assert last > 1
    assert all(sorted(done[number]) == list(range(total)) for number in range(1, last))
