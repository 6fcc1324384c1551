"""When a peer of a pipeline moves, by what it and the others announce."""

import math
from dataclasses import replace

import pytest

from atoll.dht.roster import StagePlace
from atoll.optim.log.entry import Elector
from atoll.peer.daemon.options import StageMove
from atoll.peer.daemon.placing import Placing
from atoll.peer.pipeline.placement import (
    CONFIRM_S,
    PEER_COOLDOWN_S,
    STAGE_COOLDOWN_S,
    StageNeeds,
)
from support.records import record_of

MODULES = ("stage-1", "stage-2")
NEEDS = (StageNeeds(cost=1.0, state_bytes=1000, device_bytes=1000),) * 2
ME = Elector(peer_id="ann", incarnation="1")
MOVED = StageMove(module="stage-2", came_from="stage-1")


def placing(me=ME, module="stage-1", **options):
    return Placing(MODULES, me, module, **{"rebalance_s": 60.0} | options)


def record(peer, module, incarnation="1", *, role="trainer", **place):
    values = {"tokens_per_s": 100.0, "download_mbit_s": 100.0, "device_bytes": 10**9} | place
    return record_of(
        peer, incarnation=incarnation, role=role, module=module, place=StagePlace(**values)
    )


def announced(one, now_s, *, is_serving=True):
    """What a peer announces of which nothing was measured."""
    return one.place(
        is_serving=is_serving,
        tokens_per_s=0.0,
        download_mbit_s=0.0,
        device_bytes=0,
        now_s=now_s,
    )


CROWDED = [record(peer, "stage-1") for peer in ("ann", "ben", "cas")] + [record("dan", "stage-2")]


def moves(records, now_s):
    """Who moves where at a time, of all peers that look at the same records."""
    found = {}
    for each in records:
        one = placing(Elector(peer_id=each.peer_id, incarnation="1"), each.module)
        for later_s in (0.0, CONFIRM_S + 1):
            target = one.look(NEEDS, records, now_s + later_s)
            if target is not None:
                found[each.peer_id] = target
    return found


def test_one_of_a_crowded_stage_moves_once_two_looks_agree():
    assert list(moves(CROWDED, 1000.0).values()) == ["stage-2"]
    one = next(iter(moves(CROWDED, 1000.0)))
    mover = placing(Elector(peer_id=one, incarnation="1"))
    assert mover.look(NEEDS, CROWDED, 0.0) is None
    assert mover.look(NEEDS, CROWDED, CONFIRM_S / 2) is None
    assert mover.look(NEEDS, CROWDED, CONFIRM_S + 1) == "stage-2"
    assert not mover.fills_vacant


def test_a_vacant_stage_is_filled_at_once():
    alone = [record("ann", "stage-1"), record("ben", "stage-1")]
    both = [placing(Elector(peer_id=each.peer_id, incarnation="1")) for each in alone]
    found = [each for each in both if each.look(NEEDS, alone, 0.0)]
    assert len(found) == 1
    assert [each.fills_vacant for each in both] == [each in found for each in both]


def test_nobody_leaves_a_stage_without_a_peer():
    alone = [record("ann", "stage-1")]
    assert placing().look(NEEDS, alone, 0.0) is None
    assert placing().look(NEEDS, alone, 1000.0) is None


def test_with_no_rebalancing_only_vacant_stages_move_anybody():
    for each in CROWDED:
        one = placing(Elector(peer_id=each.peer_id, incarnation="1"), each.module, rebalance_s=0)
        for now_s in (0.0, 100.0, 1e6):
            assert one.look(NEEDS, CROWDED, now_s) is None


def test_records_that_nobody_honest_signs_count_for_nobody():
    absurd = record("eve", "stage-2", tokens_per_s=1e14)
    others = [
        record("kim", "stage-9"),
        record("lea", ""),
        record("mia", "stage-2", role="keeper"),
    ]
    assert moves(CROWDED, 0.0) == moves([*CROWDED, absurd, *others], 0.0)


def test_a_mover_announces_where_it_goes_and_from_where():
    two = [record("ann", "stage-1"), record("ben", "stage-1")]
    mover = next(
        one
        for one in (placing(Elector(peer_id=p, incarnation="1")) for p in ("ann", "ben"))
        if one.look(NEEDS, two, 0.0)
    )
    module, place = mover.place(
        is_serving=True, tokens_per_s=5.0, download_mbit_s=7.0, device_bytes=9, now_s=1.0
    )
    assert module == "stage-2"
    assert (place.duty, place.came_from, place.is_rested) == ("moving", "stage-1", False)
    assert (place.tokens_per_s, place.download_mbit_s, place.device_bytes) == (5.0, 7.0, 9)


@pytest.mark.parametrize(
    ("since_s", "came_from", "is_rested"),
    [
        (0.0, "stage-1", False),
        (STAGE_COOLDOWN_S + 1, "", False),
        (PEER_COOLDOWN_S + 1, "", True),
    ],
)
def test_a_move_is_forgotten_a_while_after_its_end(since_s, came_from, is_rested):
    arrived = placing(module="stage-2", moved=MOVED)
    for now_s in (1000.0, 1000.0 + since_s):
        module, place = announced(arrived, now_s)
    assert module == "stage-2"
    assert (place.duty, place.came_from, place.is_rested) == ("serving", came_from, is_rested)


def test_a_mover_counts_as_one_until_it_serves():
    """However long its download takes: else a second peer would follow it."""
    mover = placing(module="stage-2", moved=MOVED)
    for now_s in (0.0, STAGE_COOLDOWN_S + 1, PEER_COOLDOWN_S + 1):
        _, place = announced(mover, now_s, is_serving=False)
        assert (place.duty, place.came_from, place.is_rested) == ("moving", "stage-1", False)
    crowd = [record(peer, "stage-1") for peer in ("ben", "cas", "dan", "eli")]
    on_its_way = replace(record("ann", "stage-2"), place=place)
    assert moves([*crowd, record("fay", "stage-2")], 0.0)
    assert not moves([*crowd, on_its_way], 0.0)


def test_a_peer_that_never_moved_is_rested():
    _, place = announced(placing(), 0.0)
    assert place == StagePlace()
    assert math.isfinite(place.tokens_per_s)


def test_a_peer_whose_move_failed_is_not_named_for_that_stage_again():
    """All decide by what it announces, so the others name another one at once."""
    back = placing(moved=StageMove(module="stage-1", came_from="stage-2", has_failed=True))
    place = {
        "is_serving": True,
        "tokens_per_s": 100.0,
        "download_mbit_s": 100.0,
        "device_bytes": 10**9,
    }
    _, failed = back.place(**place, needs=NEEDS, now_s=0.0)
    assert failed.device_bytes < NEEDS[1].device_bytes
    ben = record("ben", "stage-1")
    ann = replace(record("ann", "stage-1"), place=replace(failed, came_from=""))
    assert list(moves([ann, ben], 0.0)) == ["ben"]
    assert moves([record("ann", "stage-1"), ben], 0.0) == moves(
        [ben, record("ann", "stage-1")], 0.0
    )
    _, later = back.place(**place, needs=NEEDS, now_s=PEER_COOLDOWN_S)
    assert later.device_bytes == 10**9
