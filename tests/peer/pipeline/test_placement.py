"""Placement as everybody computes it: who moves, when, and who never does."""

import dataclasses
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.peer.pipeline.placement import (
    CONFIRM_S,
    GAIN,
    LOOK_S,
    PATIENCE_LOOKS,
    SWITCH_S,
    Confirmed,
    Duty,
    PlacementView,
    PlaceRecord,
    StageNeeds,
    decide,
    departing,
    levels,
    move_s,
    next_look_s,
)

GB = 10**9
RATES = st.one_of(st.none(), st.floats(0.1, 100.0))


def needs(cost=1.0, state_bytes=GB, device_bytes=8 * GB):
    return StageNeeds(cost=cost, state_bytes=state_bytes, device_bytes=device_bytes)


def peer(name, stage, rate=1.0, **changes):
    values = {
        "peer_id": name,
        "incarnation": "1",
        "stage": stage,
        "samples_per_s": rate,
        "download_mbit_s": 100.0,
        "device_bytes": 16 * GB,
    }
    return PlaceRecord(**values | changes)


def view_of(*by_stage, costs=None, **changes):
    """A view from the rates of the peers of each stage; names tell stage and number."""
    stages = tuple(needs(cost) for cost in costs or [1.0] * len(by_stage))
    peers = tuple(
        peer(f"{stage}.{number}", stage, rate, **changes)
        for stage, rates in enumerate(by_stage)
        for number, rate in enumerate(rates)
    )
    return PlacementView(stages=stages, peers=peers)


def changed(view, name, **changes):
    """The view with another record of one peer."""
    peers = tuple(dataclasses.replace(p, **changes) if p.peer_id == name else p for p in view.peers)
    return PlacementView(stages=view.stages, peers=peers)


def after(view, move, *, is_settled=True):
    """The view once the mover serves its new stage; settled: all cooldowns are over."""
    mover = next(p for p in view.peers if p.peer_id == move.peer_id)
    moved = dataclasses.replace(departing(mover, move, view.stages), duty=Duty.SERVING)
    if is_settled:
        moved = dataclasses.replace(moved, came_from=None, is_rested=True)
    return PlacementView(
        stages=view.stages, peers=(*(p for p in view.peers if p is not mover), moved)
    )


@st.composite
def views(draw):
    """Any view: vacant stages, slow links, small devices, peers that come, go and rest."""
    num_stages = draw(st.integers(1, 4))
    stage = st.integers(0, num_stages - 1)
    stages = tuple(
        needs(draw(st.floats(0.5, 2.0)), device_bytes=draw(st.sampled_from((4, 8))) * GB)
        for _ in range(num_stages)
    )
    peers = tuple(
        peer(
            f"peer{number}",
            draw(stage),
            draw(RATES),
            duty=draw(st.sampled_from((Duty.SERVING, Duty.SERVING, *Duty))),
            download_mbit_s=draw(st.sampled_from((0.0, 1.0, 50.0, 500.0))),
            device_bytes=draw(st.sampled_from((4, 8, 16))) * GB,
            came_from=draw(st.one_of(st.none(), st.none(), stage)),
            is_rested=draw(st.booleans()),
        )
        for number in range(draw(st.integers(0, 12)))
    )
    return PlacementView(stages=stages, peers=peers)


def serving(view, stage):
    return [p.peer_id for p in view.peers if p.stage == stage and p.duty is Duty.SERVING]


# Properties of every decision


@given(views(), st.randoms(use_true_random=False))
def test_the_order_of_the_records_is_of_no_account(view, rng):
    peers = list(view.peers)
    rng.shuffle(peers)
    other = PlacementView(stages=view.stages, peers=tuple(peers))
    one, two = decide(view), decide(other)
    assert one == two
    assert one is None or one.gain == two.gain


@given(views())
def test_a_mover_serves_fits_and_leaves_somebody_behind(view):
    move = decide(view)
    if move is None:
        return
    mover = next(p for p in view.peers if p.peer_id == move.peer_id)
    assert (mover.stage, mover.duty) == (move.source, Duty.SERVING)
    assert move.target != move.source
    assert mover.device_bytes >= view.stages[move.target].device_bytes
    assert len(serving(view, move.source)) > 1


@given(views())
def test_the_lower_of_two_stages_rises_and_no_third_changes(view):
    move = decide(view)
    if move is None or move.fills:
        return
    before, then = levels(view), levels(after(view, move))
    pair = {move.source, move.target}
    assert before[move.target] == min(before)
    assert min(then[s] for s in pair) > min(before[s] for s in pair)
    assert all(then[s] == before[s] for s in range(len(before)) if s not in pair)
    (mover,) = (peer for peer in view.peers if peer.peer_id == move.peer_id)
    costs = [stage.cost for stage in view.stages]
    own = mover.samples_per_s * costs[move.source] / costs[move.target]
    assert move.gain > GAIN * own


@given(views())
def test_who_moved_is_not_moved_back_on_the_same_view(view):
    move = decide(view)
    if move is None or move.fills:
        return
    again = decide(after(view, move))
    back = (move.target, move.source)
    assert again is None or (again.source, again.target) != back or again.peer_id != move.peer_id


@given(views())
def test_nobody_follows_while_a_mover_is_on_its_way(view):
    if decide(view) is None or view.mover is None:
        return
    assert decide(view).fills


@given(views())
def test_without_churn_moves_come_to_an_end(view):
    seen, bound = set(), 20 * (len(view.peers) + 1)
    settled = tuple(dataclasses.replace(p, came_from=None, is_rested=True) for p in view.peers)
    view = PlacementView(stages=view.stages, peers=settled)
    for _ in range(bound):
        place = tuple((p.peer_id, p.stage) for p in view.peers)
        assert place not in seen
        seen.add(place)
        move = decide(view)
        if move is None:
            return
        view = after(view, move)
    pytest.fail("the moves do not end")


# Balancing


def test_a_peer_in_excess_goes_to_the_lowest_stage():
    move = decide(view_of([1, 1, 1, 1], [1, 1], [1, 1, 1]))
    assert (move.source, move.target, move.fills) == (0, 1, False)


def test_stages_in_balance_keep_their_peers():
    assert decide(view_of([1, 1], [1, 1], [1, 1])) is None
    assert decide(view_of([1, 1, 1], [1, 1], [1, 1])) is None  # no whole peer is in excess


def test_all_of_several_lowest_stages_are_served_in_turn():
    view, targets = view_of([1] * 6, [1] * 3, [1] * 3, [1] * 4), []
    while move := decide(view):
        targets.append(move.target)
        view = after(view, move)
    assert targets == [1, 2]
    assert levels(view) == (4, 4, 4, 4)


def test_the_mover_whose_move_balances_best_is_named():
    move = decide(view_of([8, 2, 4], [4], [20]))  # 4 makes 10 and 8, 8 makes 6, 2 makes 6
    assert (move.peer_id, move.target) == ("0.2", 1)


def test_throughput_is_scaled_by_the_stages_costs():
    view = view_of([4, 4, 4], [2], costs=(1.0, 4.0))
    move = decide(view)
    assert (move.source, move.target) == (0, 1)
    assert levels(after(view, move)) == (8, 3)


def test_of_equal_peers_a_hash_names_one_and_others_in_other_incarnations():
    named = set()
    for incarnation in range(40):
        view = view_of([1, 1, 1, 1], [1, 1], incarnation=str(incarnation))
        named.add(decide(view).peer_id)
    assert named == {"0.0", "0.1", "0.2", "0.3"}


def test_a_last_digit_does_not_change_who_is_named():
    rng = random.Random(0)
    rates = ([1.0] * 6, [1.0] * 3)
    named = {
        decide(
            view_of(*[[rate * rng.uniform(0.99, 1.01) for rate in each] for each in rates])
        ).peer_id
        for _ in range(50)
    }
    assert len(named) == 1


def test_a_download_that_costs_more_than_it_gains_is_not_worth_it():
    view = view_of([1, 1, 1, 1], [1, 1])
    assert decide(view) is not None
    assert decide(view_of([1, 1, 1, 1], [1, 1], download_mbit_s=1.0)) is None
    assert decide(view_of([1, 1, 1, 1], [1, 1], download_mbit_s=0.0)) is None


def test_the_peer_with_the_faster_link_is_preferred():
    view = view_of([1, 1, 1, 1], [1, 1], download_mbit_s=4.0)
    move = decide(changed(view, "0.3", download_mbit_s=400.0))
    assert move.peer_id == "0.3"


def test_a_move_takes_the_download_and_the_switch():
    one = peer("ann", 0, download_mbit_s=80.0)
    assert move_s(one, needs(state_bytes=GB)) == SWITCH_S + 100.0
    assert move_s(dataclasses.replace(one, download_mbit_s=0.0), needs()) == math.inf


def test_newcomers_and_peers_that_leave_are_not_named():
    view = view_of([1, 1, 1, 1], [1, 1])
    assert decide(view_of([None] * 4, [1, 1])) is None
    for changes in ({"duty": Duty.LEAVING}, {"duty": Duty.MOVING}, {"is_rested": False}):
        assert (
            decide(changed(view, "0.0", **changes)) is None
            or decide(changed(view, "0.0", **changes)).peer_id != "0.0"
        )


def test_who_is_on_its_way_counts_where_it_goes():
    view = view_of([1, 1, 1, 1], [1, 1])
    coming = peer("new", 1, None, duty=Duty.MOVING)
    assert decide(PlacementView(stages=view.stages, peers=(*view.peers, coming))) is None


def test_a_newcomer_counts_as_the_median_of_the_others():
    assert levels(view_of([4, 4, 1], [None])) == (9, 4)
    assert levels(view_of([None, None], [None])) == (2, 1)


# Cooldown


def test_a_mover_that_has_just_arrived_rests_and_its_stages_with_it():
    view = view_of([1] * 6, [1] * 2, [1] * 3)
    move = decide(view)
    arrived = after(view, move, is_settled=False)
    assert decide(arrived) is None or decide(arrived).source != move.target
    # Its stage has lost its other peers: it gets new ones, but not the one that rests.
    lone = tuple(p for p in arrived.peers if p.stage != 1 or p.peer_id == move.peer_id)
    assert decide(PlacementView(stages=view.stages, peers=lone)).target == 1


def test_a_stage_that_gave_gets_nobody_back_while_it_rests():
    view = changed(view_of([1], [1, 1, 1, 1]), "1.0", came_from=0, is_rested=False)
    assert decide(view) is None
    move = decide(changed(view, "1.0", came_from=None))
    assert (move.source, move.target) == (1, 0)
    assert move.peer_id != "1.0"


# Vacant stages


def test_a_vacant_stage_is_filled_although_a_mover_is_on_its_way():
    view = view_of([1, 1], [1, 1], [])
    view = changed(view, "0.0", duty=Duty.MOVING, stage=1, came_from=0)
    move = decide(view)
    assert (move.source, move.target, move.fills) == (1, 2, True)


def test_a_vacant_stage_overrides_cooldowns():
    move = decide(view_of([1, 1], [], came_from=1, is_rested=False))
    assert (move.source, move.target, move.fills) == (0, 1, True)


def test_the_run_computes_most_with_the_one_that_fills():
    assert decide(view_of([1, 4, 3], [], [9])).peer_id in {"0.1", "0.2"}  # 4 and 4, never 1
    slow = changed(view_of([1, 4, 4], [], [9]), "0.1", download_mbit_s=1.0)
    assert decide(slow).peer_id == "0.2"


def test_a_stage_to_which_somebody_is_on_the_way_is_not_vacant():
    view = view_of([1, 1, 1], [1, 1, 1], [])
    filled = changed(view, "0.0", duty=Duty.MOVING, stage=2, came_from=0)
    assert decide(filled) is None
    assert decide(changed(filled, "0.0", duty=Duty.LEAVING)).fills


def test_two_vacant_stages_are_filled_one_after_the_other():
    view = view_of([1, 1, 1], [], [])
    first = decide(view)
    assert first.target == 1
    on_its_way = changed(view, first.peer_id, duty=Duty.MOVING, stage=1, came_from=0)
    assert decide(on_its_way).target == 2


def test_nobody_fills_a_stage_by_emptying_its_own():
    assert decide(view_of([1], [1], [])) is None
    joining = peer("new", 0, None, duty=Duty.MOVING)
    view = view_of([1], [1], [])
    assert decide(PlacementView(stages=view.stages, peers=(*view.peers, joining))) is None


def test_a_device_that_is_too_small_does_not_fill():
    view = view_of([1, 1], [])
    assert decide(changed(view, "0.0", device_bytes=GB)).peer_id == "0.1"
    assert decide(view_of([1, 1], [], device_bytes=GB)) is None


# Confirmation


def a_move(**changes):
    return dataclasses.replace(decide(view_of([1, 1, 1, 1], [1, 1])), **changes)


def test_a_move_counts_at_the_second_look_that_agrees():
    confirmed, move = Confirmed(), a_move()
    assert confirmed.look(move, 100.0) is None
    assert confirmed.look(move, 100.0 + CONFIRM_S - 1) is None
    assert confirmed.look(a_move(gain=0.5), 100.0 + CONFIRM_S) == move


def test_another_decision_in_between_begins_anew():
    confirmed, move = Confirmed(), a_move()
    for other in (None, a_move(peer_id="else"), a_move(incarnation="2")):
        assert confirmed.look(move, 0.0) is None
        assert confirmed.look(other, 10.0) is None
        assert confirmed.look(move, CONFIRM_S) is None


def test_a_vacant_stage_needs_no_confirmation():
    move = a_move(fills=True)
    assert Confirmed().look(move, 0.0) == move


def test_a_named_peer_that_stays_is_passed_over():
    view = view_of([1, 1, 1, 1], [1, 1])
    confirmed, move = Confirmed(), decide(view)
    until_s = PATIENCE_LOOKS * LOOK_S + CONFIRM_S
    assert confirmed.look(move, 0.0) is None
    assert confirmed.look(move, until_s - 1) == move
    assert not confirmed.passed_over
    assert confirmed.look(move, until_s) is None
    assert confirmed.passed_over == {(move.peer_id, "1")}
    assert decide(view, confirmed.passed_over).peer_id != move.peer_id


def test_a_peer_looks_again_soon_while_anybody_is_to_move():
    view = view_of([1, 1, 1, 1], [1, 1])
    assert next_look_s(view, None) == LOOK_S
    assert next_look_s(view, decide(view)) == CONFIRM_S
    moving = changed(view, "0.0", duty=Duty.MOVING, stage=1, came_from=0)
    assert next_look_s(moving, None) == CONFIRM_S


# Records


@pytest.mark.parametrize("rate", [math.nan, math.inf, -1.0, 1e300])
def test_an_absurd_rate_is_refused(rate):
    with pytest.raises(ValueError, match="expected a rate up to 1e\\+12 from ann"):
        peer("ann", 0, rate)
    with pytest.raises(ValueError, match="expected a rate"):
        peer("ann", 0, download_mbit_s=rate)


def test_a_record_of_a_stage_that_does_not_exist_counts_nowhere():
    view = view_of([1], [1])
    more = PlacementView(stages=view.stages, peers=(*view.peers, peer("ann", 7), peer("bob", -1)))
    assert more == view


@pytest.mark.parametrize("cost", [0.0, -1.0, math.nan, math.inf])
def test_a_stage_costs_something(cost):
    with pytest.raises(ValueError, match="expected a positive cost"):
        needs(cost)
