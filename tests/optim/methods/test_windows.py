"""A window that no round ends keeps the mean of its losses, and not the losses."""

import math

import pytest
import torch

from atoll.optim.methods.windows import MOST_NEWEST, LossMean, Window


@pytest.mark.parametrize("num", [1, MOST_NEWEST - 1, MOST_NEWEST, 5 * MOST_NEWEST + 3])
def test_the_mean_is_that_of_all_losses_however_many(num: int) -> None:
    window = Window()
    values = [1.0 / (step + 1) for step in range(num)]
    for step, value in enumerate(values):
        window.count(8, torch.tensor(value, dtype=torch.float64) if step % 2 else value)
        assert len(window.losses.newest) < MOST_NEWEST
    assert window.losses.mean() == pytest.approx(sum(values) / num, rel=1e-12)


def test_a_window_without_losses_has_no_mean() -> None:
    window = Window()
    window.count(8, None)
    assert math.isnan(window.losses.mean())
    window.count(8, 2.0)
    window.restart(0)
    assert math.isnan(window.losses.mean())


def test_a_saved_window_goes_on_with_its_losses() -> None:
    window, again = Window(), Window()
    for step in range(MOST_NEWEST + 2):
        window.count(8, float(step))
    again.load_state_dict(window.state_dict())
    assert again.losses == window.losses
    for each in (window, again):
        each.count(8, torch.tensor(3.0))
    assert again.losses.mean() == window.losses.mean()


def test_what_an_earlier_version_saved_is_all_its_losses() -> None:
    losses = LossMean.of_state({"losses": [float(step) for step in range(3 * MOST_NEWEST)]})
    assert losses.newest == []
    assert losses.mean() == (3 * MOST_NEWEST - 1) / 2
