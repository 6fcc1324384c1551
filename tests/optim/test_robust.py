"""Liars among eight: sign flip times ten, gaussian, and ALIE, one and two of them."""

import pytest
import torch

from atoll.optim.robust import REDUCERS, centered_clip, median, rule_of, trimmed_mean

RULES = [trimmed_mean, median, centered_clip]
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


def test_every_name_has_its_rule():
    assert [rule_of(name) for name in REDUCERS] == [None, *RULES]
