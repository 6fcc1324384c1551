"""Sets of terms with one leader: exact, and small however long there is no quorum."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

from atoll.optim.log.entry import Elector
from atoll.peer.lab.hunt.holdings import held_by
from atoll.peer.rounds.consensus.ballots import TERM, Leads, Place, leader_of
from atoll.peer.rounds.consensus.member import Flight, Pending
from atoll.peer.rounds.consensus.terms import MOST_RANGES, OwnTerms
from atoll.peer.rounds.consensus.turns import Turns

ELECTORS = tuple(Elector(peer_id=name, incarnation="1") for name in "abc")
WEEKEND = range(0, 20_000)


def held(value: object) -> int:
    """The items of the largest container that an object holds."""
    return max(held_by([("value", value)]).largest.values())


def test_own_terms_are_a_set_of_terms():
    chance, terms, plain = random.Random(3), OwnTerms(3), set()
    for _ in range(60):
        term = 2 + 3 * chance.randrange(200)
        terms.add(term)
        plain.add(term)
    assert [t for t in range(700) if t in terms] == sorted(plain)


def test_a_weekend_of_terms_is_one_range():
    terms = OwnTerms(3)
    for term in WEEKEND[1::3]:
        terms.add(term)
    assert len(terms._ranges) == 1
    assert [t in terms for t in (0, 1, 2, 3, 4, 19_999, 20_002)] == [
        *(False, True, False, False, True),
        *(True, False),
    ]


def test_gaps_are_many_only_far_ahead():
    """A liar may call for each second term; those between the highest count as led then."""
    terms, called = OwnTerms(3), range(1, 6 * 1000, 6)
    for term in called:
        terms.add(term)
    assert len(terms._ranges) == MOST_RANGES
    assert all(term in terms for term in called)
    near = called[: MOST_RANGES - 1]
    assert not any(term + 3 in terms for term in near)
    assert called[-2] + 3 in terms and called[-2] + 1 not in terms


def test_terms_of_another_electorate_stay_in_the_set():
    terms = OwnTerms(4)
    for term in (*range(1, 700, 8), 704, 719):
        terms.add(term)
    assert all(term in terms for term in (*range(1, 700, 8), 704, 719))


def test_what_a_leader_has_led_is_small_without_a_quorum():
    leads, place = Leads(leader_of(ELECTORS, 0, 1)), Place(0, 0)
    for term in WEEKEND[1::3]:
        leads.begin(place, term * TERM, ELECTORS)
    assert held(leads) <= 64


def test_what_an_acceptor_gave_up_is_small_and_passed_over_at_once():
    turns = Turns(ELECTORS, 0, first_term=0, now=0.0)
    for term in WEEKEND[::3]:
        turns.give_up(term, 1.0)
    assert held(turns) <= 64 and turns.open_term == 1
    turns.open(15_000, 2.0)
    assert turns.open_term == 15_001


def test_what_a_contribution_reports_is_small_without_a_quorum():
    """Of each leader the newest session counts: no earlier term of its own is decided after it."""

    async def opened(*_: Any, **__: Any) -> None:
        await asyncio.sleep(0)

    window: Any = None
    ctx: Any = SimpleNamespace(
        settings=SimpleNamespace(stall_s=1.0),
        me=SimpleNamespace(peer_id="d"),
        transport=SimpleNamespace(open=opened),
        now=lambda: 5.0,
    )
    pending = Pending(window=window, since=0.0)
    flight = Flight(ctx, SimpleNamespace(), Place(0, 0), pending)  # type: ignore[arg-type]

    async def main() -> None:
        for term in range(300):
            leader = leader_of(ELECTORS, 0, term).peer_id
            await flight._open_line(leader, term)
            pending.end_sessions()

    asyncio.run(main())
    assert held(pending) <= len(ELECTORS)
    newest = pending.reported_in(298)
    assert newest is not None and newest.has_ended
    assert newest.leader == leader_of(ELECTORS, 0, 298).peer_id
    assert pending.reported_in(3) is None
