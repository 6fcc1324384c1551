"""When a group closes, who reduces what."""

import itertools
import math
from dataclasses import replace

import pytest

from atoll.optim.log.entry import Elector
from atoll.optim.state.layout import CELL
from atoll.peer.rounds.policies import (
    Close,
    Rendezvous,
    agreed_silent,
    close_decision,
    may_own,
    new_owner,
    owners_shares,
    positions_ahead,
    round_deadline_s,
    split_cells,
)


def view(**changes):
    fields = {
        "ready": {"a", "b", "c"},
        "expected": {"a": 0.0, "b": 0.0, "c": 0.0},
        "awaited": {"a", "b", "c", "d"},
        "opened_at": 80.0,
        "last_s": 5.0,
        "first_ready_at": 100.0,
        "quorum_ready_at": 101.0,
        "grace_s": 3.0,
        "alone_s": 9.0,
    }
    return Rendezvous(**(fields | changes))


def test_a_group_closes_at_once_when_all_are_there():
    assert close_decision(view(), 101.0) is Close.CLOSE


def test_nobody_ready_closes_nothing():
    assert close_decision(view(ready=set(), expected={}), 200.0) is Close.WAIT


def test_a_peer_that_comes_within_the_grace_is_waited_for():
    late = view(expected={"a": 0.0, "d": 103.5})
    assert close_decision(late, 103.9) is Close.WAIT
    assert close_decision(late, 104.0) is Close.CLOSE


def test_a_peer_that_says_it_comes_later_is_not_waited_for():
    assert close_decision(view(expected={"a": 0.0, "d": 110.0}), 101.1) is Close.CLOSE


def test_without_a_quorum_a_group_waits_longer_but_not_for_ever():
    few = view(expected={"a": 0.0, "d": 500.0}, quorum_ready_at=None)
    assert close_decision(few, 108.9) is Close.WAIT
    assert close_decision(few, 109.0) is Close.CLOSE


def test_without_a_quorum_electors_get_as_long_as_the_window():
    few = view(expected={"a": 0.0, "d": 129.0}, quorum_ready_at=None)
    assert close_decision(few, 128.9) is Close.WAIT
    assert close_decision(few, 129.0) is Close.CLOSE
    longer = view(expected={"a": 0.0, "d": 129.1}, quorum_ready_at=None)
    assert close_decision(longer, 109.0) is Close.CLOSE


def test_without_a_quorum_a_group_waits_for_its_turn():
    early = view(ready={"e"}, expected={"e": 0.0, "a": 500.0}, quorum_ready_at=None)
    assert close_decision(replace(early, opened_at=math.inf), 1e6) is Close.WAIT
    since = replace(early, opened_at=150.0)  # ready long before
    assert close_decision(since, 158.9) is Close.WAIT
    assert close_decision(since, 159.0) is Close.CLOSE


def test_without_a_quorum_electors_get_as_long_as_the_last_position():
    early = view(
        ready={"e"},
        expected={"e": 0.0, "a": 169.0},
        opened_at=150.0,
        last_s=10.0,
        quorum_ready_at=None,
    )
    assert close_decision(early, 168.9) is Close.WAIT
    assert close_decision(early, 169.0) is Close.CLOSE
    assert close_decision(replace(early, last_s=9.9), 159.0) is Close.CLOSE


def test_without_a_quorum_who_is_no_elector_promises_nothing():
    few = view(expected={"a": 0.0, "e": 110.0}, quorum_ready_at=None)
    assert close_decision(few, 109.0) is Close.CLOSE


def test_a_group_of_one_waits_for_a_trainer_that_is_in_its_window():
    # Opened at 80, ready at 100: three graces, and as long as its own window.
    lone = view(ready={"a"}, expected={"a": 0.0, "e": 128.0}, quorum_ready_at=100.0)
    assert close_decision(lone, 128.9) is Close.WAIT
    assert close_decision(lone, 129.0) is Close.CLOSE
    assert close_decision(replace(lone, ready={"a", "e"}), 101.0) is Close.CLOSE
    slower = replace(lone, last_s=40.0)  # the position before took longer
    assert close_decision(slower, 148.9) is Close.WAIT
    assert close_decision(slower, 149.0) is Close.CLOSE


def test_a_group_of_one_does_not_wait_for_one_five_times_slower():
    lone = view(ready={"a"}, expected={"a": 0.0, "e": 100.0 + 9.0 + 4 * 20.0}, last_s=1000.0)
    assert close_decision(lone, 188.9) is Close.WAIT
    assert close_decision(lone, 189.0) is Close.CLOSE
    slow = replace(lone, expected={"a": 0.0, "e": 189.1})
    assert close_decision(slow, 104.1) is Close.CLOSE


def owned(plans):
    """Cells of each owner."""
    cells = {}
    for plan in plans:
        cells[plan.owner] = cells.get(plan.owner, 0) + plan.stop_cell - plan.start_cell
    return cells


@pytest.mark.parametrize(
    ("cells", "rates", "expected"),
    [
        (16, [100.0] * 4, {0: 4, 1: 4, 2: 4, 3: 4}),
        (10, [100.0, 100.0, 100.0], {0: 3, 1: 3, 2: 4}),
        (10, [300.0, 100.0, 100.0], {0: 10}),
        (100, [100.0, 20.0, 100.0, 20.0], {0: 50, 2: 50}),
        (100, [100.0, 90.0, 80.0, 70.0], {0: 39, 1: 28, 2: 20, 3: 13}),
        (2, [100.0] * 4, {0: 1, 2: 1}),
        (1, [1.0], {0: 1}),
        (100, [1000.0, 1.0], {0: 100}),
        (5, [0.0, 0.0], {0: 3, 1: 2}),
        (7, [math.inf, 1.0, 0.0], {0: 4, 1: 3}),
    ],
)
def test_cells_are_split_by_the_links(cells, rates, expected):
    plans = split_cells([CELL] * cells, rates)
    assert owned(plans) == expected
    assert plans[0].start_cell == 0
    assert plans[-1].stop_cell == cells
    assert all(a.stop_cell == b.start_cell for a, b in itertools.pairwise(plans))


def transfer_time(shares, rates):
    """Until the last link has carried its codes and results, of a vector of 1."""
    load = [1 + (len(rates) - 2) * share for share in shares]
    return max(each / rate for each, rate in zip(load, rates, strict=True))


def every_split(parts, total):
    if parts == 1:
        return [(total,)]
    return [(n, *rest) for n in range(total + 1) for rest in every_split(parts - 1, total - n)]


@pytest.mark.parametrize(
    "rates",
    [
        [100.0] * 4,
        [100.0, 20.0, 100.0, 20.0],
        [5.0, 4.0, 3.0, 2.0],
        [9.0, 3.0, 1.0],
        [8.0, 7.0, 7.0],
    ],
)
def test_no_other_split_is_done_earlier(rates):
    shares = owners_shares(rates)
    steps = 60
    tried = min(
        transfer_time([n / steps for n in split], rates) for split in every_split(len(rates), steps)
    )
    assert sum(shares) == pytest.approx(1.0)
    assert transfer_time(shares, rates) <= tried + 1e-9


def test_a_pair_has_several_streams_unless_there_are_many_pairs():
    streams = {
        peers: len(split_cells([CELL] * 1000, [100.0] * peers)) // peers
        for peers in (1, 2, 3, 4, 8, 13, 64)
    }
    assert streams == {1: 12, 2: 12, 3: 6, 4: 4, 8: 2, 13: 1, 64: 1}
    assert len(split_cells([CELL] * 15, [100.0, 100.0])) == 2  # but none of a few cells


def test_cells_of_unequal_length_are_split_by_their_bytes():
    sizes = [10, 10, 1000, 10, 10, 500, 500, 10]
    plans = split_cells(sizes, [100.0] * 2)
    assert owned(plans) == {0: 4, 1: 4}
    assert [sum(sizes[p.start_cell : p.stop_cell]) for p in plans] == [1030, 1020]


def test_a_cell_that_is_most_of_all_has_one_owner():
    assert owned(split_cells([1, 10_000, 1], [100.0] * 3)) == {0: 1, 1: 1, 2: 1}


def test_a_lost_part_goes_to_the_survivor_with_the_least_to_do():
    assert new_owner((0,), [1, 2, 3], {1: 8, 2: 4, 3: 4}) == 2
    assert new_owner((0,), [0], {}) is None

    assert new_owner((0,), [1, 2, 3], {0: 4, 2: 8}) == 2  # 1 and 3 own nothing, for a reason


def test_members_that_all_can_dial_own_the_parts():
    none = [False] * 3
    assert may_own([True, False, True], [100, 100, 100], none) == [True, False, True]
    assert may_own([True, True, True], [100, 100, 1], none) == [True] * 3  # shares follow the rates
    assert may_own([True, False, False], [20, 100, 100], none) == [True] * 3  # too slow to own all
    assert may_own([False, False], [100, 100], none[:2]) == [True] * 2


def test_members_that_did_not_finish_own_no_parts_if_others_can():
    fast = [100.0] * 3
    assert may_own([True] * 3, fast, [False, True, False]) == [True, False, True]
    assert may_own([True] * 3, fast, [True] * 3) == [True] * 3
    assert may_own([True, False, True], fast, [True, False, True]) == [True, False, True]


def test_only_owners_have_shares():
    assert owners_shares([100.0] * 4, [True, False, True, False]) == pytest.approx([0.5, 0, 0.5, 0])
    assert owners_shares([100.0] * 4, [False, True, False, False]) == pytest.approx([0, 1, 0, 0])
    plans = split_cells([1 << 16] * 64, [100.0] * 4, [True, False, True, False])
    assert {plan.owner for plan in plans} == {0, 2}
    assert plans[-1].stop_cell == 64


def test_the_deadline_follows_the_slowest_link():
    slow, fast = round_deadline_s(10_000_000, 10.0, 1.5), round_deadline_s(10_000_000, 100.0, 1.5)
    assert slow == pytest.approx(8 * 8.0 + 15.0)
    assert fast == pytest.approx(8 * 0.8 + 15.0)


def test_a_reduction_behind_others_has_the_time_of_all():
    alone, third = (round_deadline_s(10_000_000, 10.0, 1.5, before=n) for n in (0, 2))
    assert third == pytest.approx(3 * alone)


@pytest.mark.parametrize(("fragments", "ahead"), [(1, 0), (2, 1), (4, 3), (24, 3)])
def test_each_position_ahead_moves_another_fragment_and_they_are_few(fragments, ahead):
    assert positions_ahead(fragments) == ahead


def test_one_that_comes_late_does_not_end_the_wait_for_the_others():
    both = view(expected={"a": 0.0, "d": 103.5, "e": 500.0})
    assert close_decision(both, 103.0) is Close.WAIT
    assert close_decision(both, 104.0) is Close.CLOSE


def test_a_complete_group_closes_at_once_even_without_a_quorum():
    assert close_decision(view(quorum_ready_at=None), 100.0) is Close.CLOSE


ALL_BUT_C_AND_D = dict.fromkeys("abefg", ())


@pytest.mark.parametrize(
    ("electors", "heard", "trust", "dropped"),
    [
        (4, {"a": (), "b": ()}, "crash", "cd"),
        (4, {"b": ()}, "crash", ""),  # half, without the first
        (4, {"a": (), "b": ("d",)}, "crash", "c"),
        (4, {"a": (), "b": ("c", "d")}, "crash", ""),
        (4, {"a": (), "b": (), "e": ()}, "byzantine", ""),  # of which one is no elector
        (4, {}, "crash", ""),
        (7, ALL_BUT_C_AND_D, "crash", "cd"),
        (7, ALL_BUT_C_AND_D | {"b": ("c", "d")}, "crash", "cd"),  # one liar keeps nobody
        (7, ALL_BUT_C_AND_D | {"b": ("c",), "e": ("c",)}, "crash", "d"),
        (7, ALL_BUT_C_AND_D | {"b": ("c",), "e": ("d",)}, "crash", ""),
        (7, ALL_BUT_C_AND_D, "byzantine", "cd"),
        (7, ALL_BUT_C_AND_D | {"b": ("d",)}, "byzantine", "c"),
    ],
)
def test_those_that_a_quorum_does_not_hear_may_be_dropped(electors, heard, trust, dropped):
    electorate = [Elector(peer_id=peer, incarnation="1") for peer in "abcdefg"[:electors]]
    assert agreed_silent(electorate, {"c", "d"}, heard, trust) == {*dropped}


def test_who_is_not_silent_to_most_is_kept_though_a_few_hear_others():
    """Quorums are silent about c and about d, but none about both: e, whom nobody hears, goes."""
    electorate = [Elector(peer_id=peer, incarnation="1") for peer in "abcdefgh"]
    heard = dict.fromkeys("abfgh", ()) | {"f": ("c",), "g": ("d",)}
    assert agreed_silent(electorate, {"c", "d", "e"}, heard, "crash") == {"e"}
