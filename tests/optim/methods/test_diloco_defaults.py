import pytest

from atoll.optim import outer_defaults


def test_short_runs_take_what_was_measured_for_them():
    assert outer_defaults(12, 30, 4) == (0.8, 0.3)
    assert outer_defaults(1, 100, 1) == (0.8, 0.3)


@pytest.mark.parametrize(("peers", "lr"), [(1, 0.4), (2, 0.6), (4, 0.6), (5, 0.8), (64, 0.8)])
def test_long_and_endless_runs_take_the_published_values(peers, lr):
    assert outer_defaults(0, 30, peers) == (lr, 0.9)
    assert outer_defaults(50_000, 30, peers) == (lr, 0.9)


def test_momentum_grows_with_the_run():
    momenta = [outer_defaults(rounds, 30, 4)[1] for rounds in (50, 100, 200, 400, 800, 1_600)]
    assert momenta == sorted(momenta)
    assert (momenta[0], momenta[-1]) == (0.3, 0.9)


def test_windows_of_one_step_take_the_plain_average():
    assert outer_defaults(10_000, 1, 4) == (1.0, 0.0)


@pytest.mark.parametrize("wrong", [(-1, 30, 4), (12, 0, 4), (12, 30, 0)])
def test_impossible_runs_are_refused(wrong):
    with pytest.raises(ValueError, match="at least"):
        outer_defaults(*wrong)
