"""The replay of churn: traces, the upper bound, and what every policy keeps to."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.peer.lab.churn_trace import (
    LATE_S,
    NOTICED_S,
    Churn,
    Ticked,
    Visit,
    Watched,
    most_to_least,
    of_the_whole,
    read_trace,
    synthetic,
    upper_bound,
    write_trace,
)
from atoll.peer.pipeline.placement import (
    SWITCH_S,
    Duty,
    PlacementView,
    PlaceRecord,
    StageNeeds,
    decide,
)

SHORT = Churn(hours=4.0, peers=12, lifetime_h=2.0, bursts_per_h=1.0)
STATE_BYTES = 500_000_000  # 40 s at 100 Mbit/s
STAGES = tuple(
    StageNeeds(cost=cost, state_bytes=STATE_BYTES, device_bytes=0) for cost in (1.0, 1.0, 1.3)
)


def visit(name, joins_s=0.0, leaves_s=7200.0, speed=1.0):
    return Visit(peer=name, joins_s=joins_s, leaves_s=leaves_s, speed=speed, download_mbit_s=100.0)


def never(visits, stages, seed):
    return Ticked(visits, stages, rule=most_to_least, period_s=math.inf, seed=seed)


def policies(visits, stages=STAGES, seed=0):
    return {
        "none": never(visits, stages, seed),
        "swarm": Ticked(visits, stages, rule=most_to_least, period_s=300.0, seed=seed),
        "whole": Watched(visits, stages, period_s=300.0, seed=seed, rule=of_the_whole),
        "ours": Watched(visits, stages, period_s=300.0, seed=seed),
    }


# Traces


def test_a_seed_gives_one_trace_and_another_seed_another():
    assert synthetic(SHORT, 1) == synthetic(SHORT, 1)
    assert synthetic(SHORT, 1) != synthetic(SHORT, 2)


def test_a_synthetic_trace_has_about_as_many_peers_as_it_should():
    churn = Churn(peers=100)
    visits = synthetic(churn, 0)
    for hour in range(0, 32, 4):
        here = sum(v.joins_s <= 3600 * hour < v.leaves_s for v in visits)
        assert 50 < here < 150
    assert all(1 <= v.speed <= churn.fastest and 50 <= v.download_mbit_s <= 400 for v in visits)


def test_bursts_end_many_peers_of_a_zone_at_once():
    def ends_of(churn):
        return sorted(v.leaves_s for v in synthetic(churn, 0) if v.leaves_s < 3600 * churn.hours)

    ends = ends_of(Churn(peers=100))
    assert max(len(list(same)) for _, same in itertools.groupby(ends)) > 5
    calm = ends_of(Churn(peers=100, bursts_per_h=0.0))
    assert len(set(calm)) == len(calm)


def test_a_trace_is_read_as_it_was_written(tmp_path):
    visits = synthetic(SHORT, 3)
    write_trace(visits, tmp_path / "trace.csv")
    assert read_trace(tmp_path / "trace.csv") == visits


@pytest.mark.parametrize(
    "line", ["ann,0,100,fast,100", "ann,0,100,1", "ann,100,0,1,100", "ann,0,9,0,1", "ann,0,9,1,inf"]
)
def test_a_line_that_is_no_visit_is_named(tmp_path, line):
    path = tmp_path / "trace.csv"
    path.write_text(f"peer,joins_s,leaves_s,speed,download_mbit_s\nbob,0,9,1,100\n{line}\n")
    with pytest.raises(ValueError, match=r"trace\.csv, line 3: expected"):
        read_trace(path)


# The bound


def best_rate(speeds, costs):
    """The best of all assignments."""
    return max(
        min(
            sum(speed for speed, at in zip(speeds, places, strict=True) if at == stage) / cost
            for stage, cost in enumerate(costs)
        )
        for places in itertools.product(range(len(costs)), repeat=len(speeds))
    )


@given(
    st.lists(st.floats(0.1, 10.0), max_size=6),
    st.lists(st.floats(0.5, 3.0), min_size=1, max_size=3),
)
def test_no_assignment_exceeds_the_bound(speeds, costs):
    assert best_rate(speeds, costs) <= upper_bound(speeds, costs) * (1 + 1e-12)


def test_the_bound_knows_that_a_peer_serves_one_stage():
    assert upper_bound([10.0, 1.0, 1.0], [1.0, 1.0]) == 2.0  # not 6
    assert upper_bound([1.0], [1.0, 1.0]) == 0.0
    assert upper_bound([1.0, 1.0, 1.0, 1.0], [1.0, 1.0]) == 2.0


def test_the_bound_knows_that_equal_peers_cannot_be_halved():
    assert upper_bound([1.0] * 5, [1.0, 1.0]) == pytest.approx(2.0)
    assert upper_bound([1.0] * 5, [1.0, 2.0]) == pytest.approx(1.5)


# SWARM's rule


def test_swarm_moves_the_slowest_from_most_to_least():
    peers = [
        PlaceRecord(
            peer_id=f"{stage}.{rate}",
            incarnation="1",
            stage=stage,
            samples_per_s=rate,
            download_mbit_s=100.0,
            device_bytes=0,
        )
        for stage, rate in ((0, 5.0), (0, 2.0), (0, 1.0), (1, 4.0), (2, 3.0))
    ]
    move = most_to_least(PlacementView(stages=STAGES, peers=tuple(peers)))
    assert (move.peer_id, move.source, move.target) == ("0.1.0", 0, 2)


# The replay


def test_a_replay_is_the_same_each_time():
    visits = synthetic(SHORT, 5)
    assert Watched(visits, STAGES, period_s=300.0, seed=1).run() == (
        Watched(visits, STAGES, period_s=300.0, seed=1).run()
    )


@pytest.mark.parametrize("seed", range(3))
def test_all_policies_meet_the_same_peers_and_the_same_optimum(seed):
    found = {name: replay.run() for name, replay in policies(synthetic(SHORT, seed)).items()}
    for outcome in found.values():
        assert 0 < outcome.share <= 1
        assert outcome.optimal_samples == pytest.approx(found["none"].optimal_samples)
        assert outcome.peer_s == pytest.approx(found["none"].peer_s)
    assert found["none"].moves == 0
    assert found["ours"].emptied == found["whole"].emptied == 0
    assert found["ours"].share > found["none"].share


def test_equal_peers_without_churn_reach_the_optimum_and_stay():
    even = tuple(StageNeeds(cost=1.0, state_bytes=STATE_BYTES, device_bytes=0) for _ in range(3))
    visits = [visit(f"peer{number}") for number in range(9)]
    for name in ("none", "ours"):
        outcome = policies(visits, even)[name].run()
        assert outcome.moves == 0
        assert outcome.share == pytest.approx(1.0)


def test_a_vacant_stage_stands_still_no_longer_than_it_takes_to_fill():
    # The third peer is as fast as two, has the third stage for itself, and leaves after an hour.
    even = tuple(StageNeeds(cost=1.0, state_bytes=STATE_BYTES, device_bytes=0) for _ in range(3))
    visits = [visit(f"peer{number}") for number in range(5)]
    visits[2] = visit("peer2", leaves_s=3600.0, speed=2.0)
    outcome = Watched(visits, even, period_s=300.0, seed=0).run()
    assert (outcome.moves, outcome.fills) == (1, 1)
    download_s = STATE_BYTES * 8e-6 / 100.0
    assert outcome.stopped_s == pytest.approx(NOTICED_S + SWITCH_S + download_s)
    assert never(visits, even, 0).run().stopped_s == pytest.approx(3600.0)


def test_a_newcomer_goes_to_the_lowest_stage_and_counts_after_its_download():
    even = tuple(StageNeeds(cost=1.0, state_bytes=STATE_BYTES, device_bytes=0) for _ in range(2))
    visits = [visit("a"), visit("b"), visit("c"), visit("d", joins_s=3600.0)]
    outcome = never(visits, even, 0).run()
    working_s = 7200.0 - (3600.0 + SWITCH_S + STATE_BYTES * 8e-6 / 100.0)
    assert outcome.samples == pytest.approx(7200.0 + working_s)


def test_newcomers_anywhere_leave_more_to_move():
    visits = synthetic(Churn(hours=8.0, peers=12, lifetime_h=1.0, fastest=1.0), 1)
    lowest = never(visits, STAGES, 0).run()
    anywhere = Ticked(
        visits,
        STAGES,
        rule=most_to_least,
        period_s=math.inf,
        seed=0,
        newcomers="anywhere",
    ).run()
    assert anywhere.optimal_samples == pytest.approx(lowest.optimal_samples)
    assert anywhere.share < lowest.share


def test_views_lag_behind_what_peers_announce():
    even = tuple(StageNeeds(cost=1.0, state_bytes=STATE_BYTES, device_bytes=0) for _ in range(2))
    visits = [visit("a"), visit("b"), visit("c", joins_s=100.0)]
    replay = Watched(visits, even, period_s=300.0, seed=0, end_s=100.0 + LATE_S / 2)
    replay.run()
    assert [p.peer_id for p in replay.view.peers] == ["a", "b"]
    replay = Watched(visits, even, period_s=300.0, seed=0, end_s=100.0 + 2 * LATE_S)
    replay.run()
    assert [(p.peer_id, p.duty) for p in replay.view.peers][2:] == [("c", Duty.MOVING)]


def test_a_rule_of_the_whole_run_is_a_part_of_the_production_rule():
    for seed in range(3):
        replay = Watched(synthetic(SHORT, seed), STAGES, period_s=60.0, seed=0, rule=of_the_whole)
        outcome = replay.run()
        move = of_the_whole(replay.view, frozenset())
        assert move in (None, decide(replay.view))
        assert outcome.at_once == 0
