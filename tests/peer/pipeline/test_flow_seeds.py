"""Whole pipelines of hops in virtual time, with kills, cuts, losses and repetitions."""

import itertools
import random
from collections import Counter

import pytest

from support.pipelines import JOB_S, TICK_S, Pipeline, Weather

SLACK_S = 2 * TICK_S + 4 * max(JOB_S.values())  # gradients in computation still count


def weather_of(seed):
    rng = random.Random(seed)
    return Weather(
        lost=rng.choice([0.0, 0.02, 0.1]),
        repeated=rng.choice([0.0, 0.2]),
        kills=rng.choice([0, 1, 3]),
        restarts=rng.random() < 0.6,
        cuts=rng.choice([0, 2, 6]),
        silent_cuts=rng.random() < 0.5,
        slow=rng.choice([1.0, 4.0]),
    )


def pipeline_of(seed):
    rng = random.Random(seed ^ 0xA70)
    peers = tuple(rng.randint(1, 3) for _ in range(rng.choice([3, 3, 4])))
    return Pipeline(
        seed,
        peers=peers,
        weather=weather_of(seed),
        staleness=rng.choice([0, 0, 1, 2]),
        step_microbatches=rng.randint(1, 5),
        exact=rng.random() < 0.3,
        max_in_flight=rng.choice([4, 16]),
    )


def check(pipeline):
    """What holds in any weather; the pipeline itself checks counts and versions as it runs."""
    began, ends = pipeline.began(), pipeline.ends()
    assert set(began) == set(ends), "an origin never heard of a microbatch's end"
    for name, (_, at_s) in ends.items():
        assert at_s - began[name] <= pipeline.rules.lifetime_s + SLACK_S, "it waited too long"
    for process in pipeline.live.values():
        left = process.hop.statistics()
        assert (left.in_flight, left.queued_jobs, left.remembered, left.held_bytes) == (0,) * 4
        assert not process.held and process.hop.due_s == float("inf")
        assert process.hop.statistics().counted == len(process.added)
        assert sum(process.step_sizes) <= len(process.added)
    if pipeline.rules.exact:
        assert max(pipeline.counted().values(), default=0) <= 1, "counted at two peers of a stage"


@pytest.mark.parametrize("seed", range(25))
def test_invariants_hold_in_any_weather(seed):
    check(pipeline_of(seed).run())


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(25, 325))
def test_invariants_hold_in_any_weather_at_length(seed):
    check(pipeline_of(seed).run())


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("exact", [False, True])
def test_in_fair_weather_everything_counts_once_at_each_stage(staleness, exact):
    pipeline = Pipeline(1, peers=(2, 3, 2), staleness=staleness, exact=exact).run()
    check(pipeline)
    names = set(pipeline.began())
    assert len(names) > 50
    assert pipeline.counted() == dict.fromkeys(itertools.product(range(3), names), 1)
    for process in pipeline.live.values():
        said = process.hop.statistics()
        assert said.omitted == {} and said.resends == 0
        assert not any(said.double_counts.values())


def test_without_staleness_each_step_has_exactly_its_microbatches():
    pipeline = Pipeline(2, peers=(1, 1, 1), step_microbatches=4).run()
    for process in pipeline.live.values():
        assert set(process.step_sizes) == {4}
    names = sorted(pipeline.began())
    for process in pipeline.live.values():  # all stages put the same ones into the same step
        order = list(process.added)
        steps = [sorted(order[i : i + 4]) for i in range(0, len(order), 4)]
        assert steps == [names[i : i + 4] for i in range(0, len(names), 4)]


@pytest.mark.parametrize("seed", range(5))
def test_a_dead_hop_is_replaced_and_nothing_is_omitted(seed):
    weather = Weather(kills=1, restarts=False, spared=frozenset({"a0", "a1", "c0", "c1", "b0"}))
    pipeline = Pipeline(seed, peers=(2, 2, 2), weather=weather).run()
    check(pipeline)
    assert "b1" not in pipeline.live
    assert all(end.omission is None for end, _ in pipeline.ends().values())
    last = {name for name, (_, at_s) in pipeline.ends().items() if at_s > pipeline.run_s}
    assert last  # it runs to the end


def test_a_stage_whose_only_peer_restarts_goes_on():
    weather = Weather(kills=1, spared=frozenset({"a0", "b0"}))
    pipeline = Pipeline(3, peers=(1, 1, 1), weather=weather).run()
    check(pipeline)
    counts = Counter(end.omission for end, _ in pipeline.ends().values())
    assert counts[None] > 20 and pipeline.live["c0"].added


def test_double_counts_are_measured():
    weather = Weather(lost=0.1)
    pipeline = Pipeline(4, peers=(2, 2, 2), weather=weather, staleness=1, run_s=30.0).run()
    check(pipeline)
    real = sum(count - 1 for count in pipeline.counted().values())
    told = sum(
        sum(process.hop.statistics().double_counts.values()) for process in pipeline.live.values()
    )
    assert real > 5 and real / 2 <= told <= real


def test_shares_follow_the_speed_of_peers():
    weather = Weather(slow=4.0, spared=frozenset())
    pipeline = Pipeline(5, peers=(2, 3, 1), weather=weather, staleness=1, run_s=20.0)
    pipeline.pace |= dict.fromkeys(pipeline.pace, 0.5) | {"b0": 4.0}
    for process in pipeline.processes:
        process.pace = pipeline.pace[process.name]
    pipeline.run()
    counted = {name: len(process.added) for name, process in pipeline.live.items()}
    assert counted["b0"] < counted["b1"] / 2 and counted["b0"] < counted["b2"] / 2
    assert counted["b0"] > 0
