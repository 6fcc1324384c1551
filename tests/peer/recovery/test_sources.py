"""A peer asks a few others however many peers a run has."""

from dataclasses import replace

from atoll.peer.recovery.sources import ASKED_AT_ONCE, whom_to_ask
from support.records import record_of

RECORD = record_of("p", incarnation="a", position=5)


def roster(count, **changes):
    names = [f"peer{i}" for i in range(count)]
    return {name: replace(RECORD, peer_id=name, **changes) for name in names}


def test_few_peers_are_asked_all_at_once_and_never_oneself():
    asked = list(whom_to_ask(roster(ASKED_AT_ONCE), me="peer3", turn=0))
    assert len(asked) == 1
    assert set(asked[0]) == set(roster(ASKED_AT_ONCE)) - {"peer3"}


def test_many_peers_are_asked_some_at_a_time_the_furthest_among_the_first():
    records = roster(1000) | {"far": replace(RECORD, peer_id="far", position=9)}
    first, *rest = whom_to_ask(records, me="me", turn=1)
    assert len(first) == ASKED_AT_ONCE
    assert first[0] == "far"
    everyone = [name for some in (first, *rest) for name in some]
    assert sorted(everyone) == sorted(records)


def test_a_record_of_a_higher_epoch_is_further_than_any_position():
    records = roster(1000, position=900) | {"new": replace(RECORD, peer_id="new", epoch=1)}
    assert next(iter(whom_to_ask(records, me="me", turn=1)))[0] == "new"


def test_others_are_asked_at_each_turn_and_by_each_peer():
    records = roster(1000)
    lots = [
        frozenset(next(iter(whom_to_ask(records, me=me, turn=turn))))
        for me in ("me", "you")
        for turn in (1, 2)
    ]
    assert len(set(lots)) == 4
    assert max(len(a & b) for a in lots for b in lots if a is not b) < ASKED_AT_ONCE / 2
