"""Liars among eight: sign flip times ten, gaussian, and ALIE, one and two of them."""

import pytest
import torch

from atoll.optim.reduction.robust import (
    CLIP_STEPS,
    FLAG_EPS,
    FLAG_STEPS,
    REDUCERS,
    centered_clip,
    flag_aggregator,
    flag_shares,
    median,
    rule_of,
    trimmed_mean,
)

RULES = [trimmed_mean, median, centered_clip, flag_aggregator]
PEERS, NUMEL = 8, 4096
ALIE_Z = 1.0  # hides within one standard deviation of the honest (arXiv:1902.06156)


def honest(count):
    """A common gradient of norm 1 a coordinate, and noise half as large."""
    generator = torch.Generator().manual_seed(count)
    common_N = torch.randn(NUMEL, generator=generator)
    return common_N + 0.5 * torch.randn(count, NUMEL, generator=generator)


def sign_flip(rows_MN, liars):
    return (-10 * rows_MN.mean(dim=0)).expand(liars, -1)


def gaussian(rows_MN, liars):
    return 10 * torch.randn(liars, NUMEL, generator=torch.Generator().manual_seed(1))


def alie(rows_MN, liars):
    return (rows_MN.mean(dim=0) - ALIE_Z * rows_MN.std(dim=0)).expand(liars, -1)


def error(rule, rows_MN, honest_MN):
    target_N = honest_MN.mean(dim=0)
    return float((rule(rows_MN) - target_N).norm() / target_N.norm())


def mean(rows_MN):
    return rows_MN.mean(dim=0)


@pytest.mark.parametrize("liars", [1, 2])
@pytest.mark.parametrize("attack", [sign_flip, gaussian])
@pytest.mark.parametrize("rule", RULES)
def test_loud_liars_break_the_mean_and_no_rule(rule, attack, liars):
    honest_MN = honest(PEERS - liars)
    rows_MN = torch.cat([honest_MN, attack(honest_MN, liars)])
    assert error(mean, rows_MN, honest_MN) > 1.0
    assert error(rule, rows_MN, honest_MN) < 0.4


@pytest.mark.parametrize("liars", [1, 2])
@pytest.mark.parametrize("rule", [mean, *RULES])
def test_quiet_liars_move_no_rule_beyond_the_noise_of_one_peer(rule, liars):
    honest_MN = honest(PEERS - liars)
    rows_MN = torch.cat([honest_MN, alie(honest_MN, liars)])
    assert error(rule, rows_MN, honest_MN) < 0.3


@pytest.mark.parametrize("rule", RULES)
def test_without_liars_a_rule_is_near_the_mean(rule):
    rows_MN = honest(PEERS)
    assert error(rule, rows_MN, rows_MN) < 0.15


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("count", [1, 2])
def test_with_one_or_two_rows_there_is_nothing_to_reject(rule, count):
    rows_MN = honest(count)
    assert torch.allclose(rule(rows_MN), rows_MN.mean(dim=0), atol=1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_equal_rows_are_their_own_result(rule):
    row_N = honest(1)[0]
    assert torch.allclose(rule(row_N.expand(5, -1)), row_N, atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_rows_of_zeros_give_zeros(rule):
    assert torch.equal(rule(torch.zeros(5, 7)), torch.zeros(7))


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_gives_the_same_bits_again(rule):
    rows_MN = honest(PEERS)
    assert torch.equal(rule(rows_MN), rule(rows_MN.clone()))


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # two axes hold everything: the sum is (2, 1), and two of three go 2 / sqrt(5) that way
        ([[1, 0], [1, 0], [0, 1]], [4 / 5, 2 / 5]),
        # the third row counts as a unit, whatever its length
        ([[1, 0], [1, 0], [0, 50]], [4 / 5, 2 / 5]),
        # products of 0.8 have the eigenvalues 1.8 and 0.2: the axes are the sum of two rows and
        # the third row, and what the two differ in is seen by neither
        ([[1, 0, 0], [0.8, 0.6, 0], [0, 0, 1]], [1.8**2 / 4.6, 1.8 * 0.6 / 4.6, 1.8 / 4.6]),
        # a row of the opposite sign shares the line of the others and keeps their length
        ([[2, 0], [2, 0], [2, 0], [-20, 0]], [2.0, 0.0]),
    ],
)
def test_the_flag_aggregator_by_hand(rows, expected):
    result_N = flag_aggregator(torch.tensor(rows, dtype=torch.float32))
    assert torch.allclose(result_N, torch.tensor(expected), atol=1e-6)


def flag_median(unit_MN, steps=FLAG_STEPS):
    """The paper's subspace by singular vectors of the scaled rows, and its sum of sines."""
    axes = unit_MN.shape[0] // 2 + 1
    scale_M, best = torch.ones(unit_MN.shape[0], dtype=unit_MN.dtype), None
    for _ in range(steps + 1):
        y_NK = torch.linalg.svd((scale_M[:, None] * unit_MN).T, full_matrices=False)[0][:, :axes]
        sines_M = (1 - (unit_MN @ y_NK).square().sum(dim=1)).clamp_min(0)
        if best is not None and sines_M.sqrt().sum() >= best[1]:
            break
        best = (y_NK, sines_M.sqrt().sum())
        scale_M = (sines_M + FLAG_EPS) ** -0.25
    return best


@pytest.mark.parametrize("count", [3, 5, 8])
def test_the_flag_aggregator_agrees_with_singular_vectors(count):
    rows_MN = honest(count).double()
    rows_MN[0] *= -3
    unit_MN = rows_MN / rows_MN.norm(dim=1, keepdim=True)
    y_NK, _ = flag_median(unit_MN)
    expected_N = y_NK @ (y_NK.T @ unit_MN.sum(dim=0))
    assert torch.allclose(flag_shares(unit_MN @ unit_MN.T) @ unit_MN, expected_N, atol=1e-8)


def test_reweighting_brings_the_flag_subspace_nearer_to_the_rows():
    unit_MN = honest(PEERS).double()
    unit_MN /= unit_MN.norm(dim=1, keepdim=True)
    assert flag_median(unit_MN)[1] < flag_median(unit_MN, steps=0)[1]


def test_a_row_of_zeros_takes_nothing_from_the_flag_aggregators_length():
    rows_MN = torch.cat([honest(1).expand(4, -1), torch.zeros(1, NUMEL)])
    assert torch.allclose(flag_aggregator(rows_MN), rows_MN[0], atol=1e-5)


def test_every_name_has_its_rule():
    assert [rule_of(name) for name in REDUCERS] == [None, *RULES]


def test_centered_clipping_moves_by_the_papers_rule():
    """x += mean((g - x) min(1, tau / |g - x|)); who is near is not pushed to the distance tau."""
    rows = [0.0, 0.9, 1.0, 1.2, 10.0]
    center = 1.0
    for _ in range(CLIP_STEPS):
        away = [row - center for row in rows]
        tau = sorted(map(abs, away))[2]
        center += sum(d * min(1.0, tau / max(abs(d), 1e-30)) for d in away) / len(rows)
    assert abs(center - 1.0) > 0.01
    got = centered_clip(torch.tensor(rows)[:, None])
    assert float(got) == pytest.approx(center, rel=1e-4)
