"""What stays bounded however many peers a run has: electors, and whom a peer asks."""

from dataclasses import replace

from atoll.dht.roster import PeerRecord
from atoll.optim.log.entry import (
    MAX_ELECTORS,
    Elector,
    Member,
    choose_electors,
)
from atoll.peer.recovery.sources import ASKED_AT_ONCE, whom_to_ask


def electors(count, incarnation="a"):
    return [Elector(peer_id=f"peer{i}", incarnation=incarnation) for i in range(count)]


def members(count):
    return tuple(
        Member(
            peer_id=e.peer_id,
            incarnation=e.incarnation,
            weight=1.0,
            clip=1.0,
            norm=1.0,
            tokens=1,
            steps=1,
            loss=None,
        )
        for e in electors(count)
    )


def test_sixty_four_electors_are_chosen_as_they_come():
    given = electors(MAX_ELECTORS)
    assert choose_electors(given) == tuple(given)


def test_of_a_thousand_candidates_64_are_chosen_in_the_entrys_order():
    given = electors(1000)
    chosen = choose_electors(given)
    assert len(chosen) == MAX_ELECTORS
    assert list(chosen) == [e for e in given if e in set(chosen)]
    assert set(choose_electors(given[::-1])) == set(chosen)


def test_electors_stay_members_and_one_that_leaves_is_replaced():
    given = electors(1000)
    before = set(choose_electors(given))
    gone = next(iter(before))
    after = set(choose_electors([e for e in given if e != gone]))
    assert len(after) == MAX_ELECTORS
    assert before - after == {gone}


def test_a_restarted_peer_draws_anew():
    before = {e.peer_id for e in choose_electors(electors(1000))}
    after = {e.peer_id for e in choose_electors(electors(1000, incarnation="b"))}
    assert len(before & after) < MAX_ELECTORS / 2


RECORD = PeerRecord(
    peer_id="p",
    addresses=(),
    incarnation="a",
    role="trainer",
    epoch=0,
    position=5,
    tokens_per_s=0.0,
    uplink_mbit_s=0.0,
    downlink_mbit_s=0.0,
    ready_in_s=0.0,
    protocol=1,
)


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
