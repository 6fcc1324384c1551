"""Rates of a link: what its readings say."""

import random
from dataclasses import replace

import pytest

from atoll.peer.rounds.pacing import SAMPLE_S
from atoll.peer.rounds.rates import (
    FLOW_S,
    FLOW_SHARE,
    GAIN,
    KEPT_READINGS,
    PROBE_EVERY,
    SEARCH_EVERY,
    SEARCH_GAIN,
    FlowEstimate,
    RateEstimate,
    Sample,
    peak_mbit_s,
    saturated_mbit_s,
)
from support.pacing import samples, steady

MESSAGE = 65_536  # bytes of cells that leave at once
TEN = FlowEstimate(readings=(10.0,) * KEPT_READINGS)


def test_the_peak_is_over_a_whole_window():
    burst = [(0.0, 0), (0.05, 10_000_000), (0.4, 10_000_000)]
    assert peak_mbit_s(burst, 0.4) == pytest.approx(200.0)
    assert peak_mbit_s([(0.0, 0), (0.1, 10**9)], 0.3) == 0.0


def test_only_stretches_in_which_the_link_was_busy_count():
    idle = samples(100, 100, 100, 100, busy=False)
    assert saturated_mbit_s([idle]) == 0.0
    assert saturated_mbit_s([samples(100, 100, 100, 100)]) == pytest.approx(100.0)
    broken = samples(100, 100, 100, 100)
    broken[2] = Sample(at_s=0.2, delivered=0, received=0, busy=False)
    assert saturated_mbit_s([broken]) == 0.0


def simulate(capacity_mbit_s, rounds, estimate=None):
    """Rounds on a link that carries what the pace gives it, up to its capacity."""
    estimate = estimate or RateEstimate()
    for _ in range(rounds):
        estimate = estimate.after(min(estimate.pace_mbit_s or capacity_mbit_s, capacity_mbit_s))
    return estimate


def test_the_first_round_measures_and_the_pace_stays_just_above():
    estimate = simulate(100.0, 20)
    assert estimate.mbit_s == pytest.approx(100.0)
    assert estimate.pace_mbit_s == pytest.approx(100.0 * GAIN)


def test_a_link_that_became_ten_times_faster_is_found():
    assert simulate(1000.0, 16, simulate(100.0, 5)).mbit_s == pytest.approx(1000.0)


def test_a_link_that_became_slower_is_found():
    assert simulate(20.0, 6, simulate(100.0, 5)).mbit_s == pytest.approx(20.0)


def test_one_round_on_a_busy_machine_changes_little():
    estimate = simulate(100.0, 5).after(60.0)
    assert estimate.mbit_s == pytest.approx(100.0)


def test_a_round_that_sent_little_says_nothing():
    estimate = simulate(100.0, 5)
    assert estimate.after(0.0) == estimate
    assert RateEstimate().after(0.0).pace_mbit_s is None


def test_few_bytes_show_no_rate():
    assert saturated_mbit_s([samples(1, 1, 1, 1, 1)]) is None
    assert RateEstimate().after(None) == RateEstimate()


def round_of(messages, mbit_s):
    """Readings of a fast link over which the pace lets so many messages go."""
    each_s = MESSAGE * 8e-6 / mbit_s
    ends_s = each_s * (messages - 1)
    return [
        Sample(
            at_s=number * SAMPLE_S,
            delivered=MESSAGE * min(messages, 1 + int(number * SAMPLE_S / each_s)),
            received=0,
            busy=number * SAMPLE_S < ends_s,
        )
        for number in range(int(ends_s / SAMPLE_S) + 3)
    ]


@pytest.mark.parametrize("messages", [2, 3, 6, 17, 24, 25, 31, 61])
def test_a_pace_that_is_far_too_low_does_not_confirm_itself(messages):
    """A starved machine has shown a slow link: the pace makes rounds long enough to be read."""
    estimate = RateEstimate().after(0.3)
    for _ in range(3):
        if estimate.pace_mbit_s is None:
            return
        estimate = estimate.after(saturated_mbit_s([round_of(messages, estimate.pace_mbit_s)]))
    raise AssertionError(f"still paced at {estimate.pace_mbit_s} Mbit/s")


@pytest.mark.parametrize("messages", range(9, 41))
def test_a_pace_that_is_too_low_does_not_sink(messages):
    """Few messages leave, the last after the last reading: each round would take some off."""
    estimate = RateEstimate(mbit_s=3.0, gain=GAIN)
    for _ in range(SEARCH_EVERY - 1):
        estimate = estimate.after(saturated_mbit_s([round_of(messages, estimate.pace_mbit_s)]))
        if estimate.pace_mbit_s is None:
            return
        assert estimate.pace_mbit_s > 0.8 * 3.0


def test_the_start_of_a_transfer_does_not_count():
    assert saturated_mbit_s([samples(10, 20, 40, *[100] * 7)]) == pytest.approx(100.0)


def test_bursts_of_confirmations_make_no_faster_link():
    assert saturated_mbit_s([samples(*[0, 200] * 10)]) == pytest.approx(100.0, rel=0.1)


def test_the_first_measured_round_is_searched_from():
    cold = RateEstimate().after(80.0)
    assert cold.pace_mbit_s == pytest.approx(80.0 * SEARCH_GAIN)
    assert cold.after(90.0).pace_mbit_s == pytest.approx(90.0 * GAIN)


def test_a_search_comes_now_and_then_and_finds_nothing_where_nothing_is():
    estimate, paces = simulate(100.0, 3), []
    for _ in range(2 * SEARCH_EVERY + 2):
        paces.append(estimate.pace_mbit_s)
        estimate = simulate(100.0, 1, estimate)
    assert sum(pace > 110.0 for pace in paces) == 2
    assert estimate.mbit_s == pytest.approx(100.0)


def test_readings_that_scatter_leave_the_pace_at_the_link():
    scatter, paces = random.Random(1), []
    estimate = simulate(100.0, 10)
    for _ in range(500):
        paces.append(estimate.pace_mbit_s or 100.0)
        estimate = estimate.after(min(paces[-1], 100.0) * scatter.gauss(1.0, 0.08))
    inner = sorted(paces)[50:-50]
    assert inner[0] > 93.0
    assert inner[-1] < 112.0


def found_after(capacity_mbit_s, seconds, found):
    """The estimate after some time on a link that is always busy."""
    until_s = 0.0
    while until_s < seconds:
        until_s += found.reading_s
        found = found.after(steady(min(found.pace_mbit_s, capacity_mbit_s), found.reading_s))
    return found


def test_an_estimate_of_what_flows_finds_a_faster_link():
    assert found_after(25.0, 30.0, TEN).mbit_s > 0.9 * 25.0
    assert found_after(25.0, 120.0, TEN).pace_mbit_s == pytest.approx(FLOW_SHARE * 25.0, rel=0.01)


def test_a_probe_shows_no_more_than_it_offered():
    found = replace(TEN, since_probe=PROBE_EVERY - 1)
    assert found.after(steady(14.0)).mbit_s == found.pace_mbit_s > 10.0


def test_an_estimate_of_what_flows_follows_a_link_that_became_slower():
    found = found_after(4.0, KEPT_READINGS * FLOW_S, TEN)
    assert found.pace_mbit_s == pytest.approx(FLOW_SHARE * 4.0)


def test_receivers_that_hold_passes_up_for_a_while_make_no_low_pace():
    found = replace(TEN, since_probe=PROBE_EVERY - 1)
    for _ in range(KEPT_READINGS - 2):
        found = found.after(steady(3.0))
    assert found.mbit_s == 10.0


def test_one_burst_of_confirmations_makes_no_pace():
    assert FlowEstimate(readings=(9.0, 14.0, 9.1)).pace_mbit_s == FLOW_SHARE * 9.1


@pytest.mark.parametrize("found", [TEN, FlowEstimate(), FlowEstimate(readings=(10.0,))])
def test_a_reading_of_an_idle_link_changes_no_estimate(found):
    assert found.after(steady(2.0, busy_share=0.5)) == found


def test_a_reading_above_the_estimate_counts_however_idle_the_link_was():
    assert TEN.after(steady(12.0, busy_share=0.5)).readings[-1] == pytest.approx(12.0)
