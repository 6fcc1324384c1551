import math

import pytest

from atoll.optim.reduction.contribution import (
    WorkRefused,
    cap_shares,
    cap_weights,
    clip_factors,
    drift_ratio,
    work_weight,
)


def test_weight_is_tokens_per_step():
    assert work_weight(3_000, 30) == 100.0
    assert work_weight(3_000, 30, "tokens") == 3_000.0
    assert work_weight(0, 30) == work_weight(0, 0) == 0.0


def test_weight_is_an_fp32_number():
    assert work_weight(1, 3) == 0.3333333432674408


@pytest.mark.parametrize(
    ("tokens", "steps"), [(-1, 3), (5, -1), (5, 0), (1 << 41, 5), (5, 1 << 25), (1 << 80, 1)]
)
def test_absurd_work_is_refused(tokens, steps):
    with pytest.raises(WorkRefused):
        work_weight(tokens, steps)


def test_one_claim_is_capped_at_four_medians():
    assert cap_weights([100.0, 100.0, 1e9, 90.0]) == [100.0, 100.0, 400.0, 90.0]


def test_with_two_peers_the_lower_weight_bounds_the_other():
    assert cap_weights([10.0, 1e9]) == [10.0, 40.0]


def test_weights_of_zero_stay_and_do_not_lower_the_cap():
    assert cap_weights([0.0, 0.0, 0.0, 10.0, 12.0]) == [0.0, 0.0, 0.0, 10.0, 12.0]
    assert cap_weights([0.0, 0.0]) == [0.0, 0.0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_weight_or_norm_that_is_no_amount_is_refused(value):
    with pytest.raises(WorkRefused, match="weight"):
        cap_weights([1.0, value])
    with pytest.raises(WorkRefused, match="norm"):
        clip_factors([1.0, value], [1, 1])


def test_norms_of_honest_peers_are_left_alone():
    assert clip_factors([1.0, 1.5, 0.7], [30, 30, 30]) == [1.0, 1.0, 1.0]


def test_norm_above_two_medians_is_clipped_to_them():
    assert clip_factors([1.0, 8.0, 1.0], [30, 30, 30]) == [1.0, 0.25, 1.0]
    assert clip_factors([1.0, 8.0], [30, 30]) == [1.0, 0.25]


def test_norms_are_compared_a_step():
    assert clip_factors([1.0, 4.0, 1.0], [30, 120, 30]) == [1.0, 1.0, 1.0]


def test_a_claim_of_many_steps_buys_no_norm_beyond_four_medians_of_them():
    assert clip_factors([1.0, 64.0, 1.0], [30, 1 << 24, 30]) == [1.0, 0.125, 1.0]
    assert clip_factors([1.0, 64.0], [30, 1 << 24]) == [1.0, 0.125]
    assert clip_factors([1.0, 0.0, 0.0, 4.0], [30, 1, 1, 120]) == [1.0] * 4  # who joins counts not


def test_norm_of_zero_counts_for_nothing():
    assert clip_factors([0.0, 0.0, 1.0], [0, 5, 5]) == [1.0, 1.0, 1.0]
    assert clip_factors([0.0], [0]) == [1.0]
    with pytest.raises(WorkRefused, match="steps"):
        clip_factors([1.0], [0])


def test_drift_is_measured_against_the_median_of_what_counted():
    assert drift_ratio(6.0, [1.0, 2.0, 500.0]) == 3.0
    assert drift_ratio(6.0, [0.0, 3.0, 2.0, 0.0]) == 3.0  # the lower one of the two


def test_drift_is_unknown_where_nothing_counted():
    assert drift_ratio(6.0, []) == drift_ratio(6.0, [0.0]) == 0.0


@pytest.mark.parametrize("norms", [(math.inf, [1.0]), (1.0, [math.nan]), (1.0, [-1.0])])
def test_drift_of_a_norm_that_is_none_is_refused(norms):
    with pytest.raises(WorkRefused):
        drift_ratio(*norms)


def test_legal_greed():
    """Nobody gains by the largest legal weight, norm and number of steps all at once."""
    weights = cap_weights([1.0, 1.0, 1.0, 9.0])
    norms, steps = [1.0, 1.0, 1.0, 99.0], [30, 30, 30, 999]
    clips = clip_factors(norms, steps)
    greedy = weights[3] * clips[3] * norms[3]
    assert greedy > 30, "each bound by itself lets this through"
    clips = cap_shares(weights, clips, norms)
    shares = [w * c * n for w, c, n in zip(weights, clips, norms, strict=True)]
    assert shares == pytest.approx([1.0, 1.0, 1.0, 4.0])
    assert clips[:3] == [1.0, 1.0, 1.0]


def test_a_contribution_of_four_windows_is_sent_whole():
    assert cap_shares([1.0] * 4, [1.0] * 4, [1.0, 1.0, 1.0, 4.0]) == [1.0] * 4
    assert cap_shares([0.0, 0.0], [1.0, 1.0], [0.0, 0.0]) == [1.0, 1.0]
