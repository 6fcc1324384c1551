"""Models whose parameters have fewer bits than the common state."""

import pytest
import torch

from atoll.optim.state.layout import Layout
from support.toys import Team, batch, flat, forward, net, sgd

SETTINGS = {"momentum": 0.0, "codec": "fp32", "clip_at": 0.0}
SPECS = (
    "diloco",
    "diloco(tau=2)",
    "diloco(count=2, tau=1)",
    "streaming(count=2, tau=1, alpha=0)",
    "co2",
    "eager(peers=2)",
    "noloco",
)


def small():
    return net().bfloat16()


def sent_by(worker) -> list:
    """What a worker hands in from now on."""
    sent, submit = [], worker.reducer.submit
    worker.reducer.submit = lambda given: (sent.append(given.delta_N.clone()), submit(given))
    return sent


def train(team: Team, steps: range, *, idle: tuple[int, ...] = ()) -> None:
    for step in steps:
        for index, worker in enumerate(team.workers):
            x = batch(100 * step + index).bfloat16()
            worker.model.zero_grad()
            (forward(worker.model, x) - x.sum(1, keepdim=True)).square().mean().backward()
            for group in worker.inner.param_groups:
                group["lr"] = 0.0 if index in idle else 0.05
            worker.step(tokens=8)


@pytest.mark.parametrize("spec", SPECS)
def test_what_rounding_takes_of_the_common_state_is_not_sent(spec):
    """Else each round would pull the state to what bf16 can hold."""
    team = Team(2, spec, 4, make=small, inner=sgd, **SETTINGS)
    train(team, range(16))
    held = team.workers[0].synced_N.bfloat16().float()
    assert not torch.equal(held, team.workers[0].synced_N)
    train(team, range(16, 24), idle=(0, 1))
    sent = [sent_by(worker) for worker in team.workers]
    train(team, range(24, 36), idle=(0, 1))
    assert all(len(deltas) >= 3 for deltas in sent)
    assert not any(bool(delta.any()) for deltas in sent for delta in deltas)


def test_a_peer_that_is_left_out_sends_no_rounding_either():
    team = Team(2, "diloco", 2, make=small, inner=sgd, misses=lambda p, i: i == 1, **SETTINGS)
    sent = sent_by(team.workers[1])
    train(team, range(12), idle=(1,))
    assert team.workers[1].statistics().left_out == 6
    assert not torch.equal(team.local(1), flat(small()))
    assert not any(bool(delta.any()) for delta in sent)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_held_values_are_those_that_a_module_has_after_loading(dtype):
    model = net().to(dtype)
    model["head"].float()
    layout = Layout.of(model)
    values_N = torch.randn(layout.numel, generator=torch.Generator().manual_seed(1))
    layout.load_(model, values_N)
    held_N = layout.held(model, values_N)
    assert torch.equal(held_N, layout.flatten(model))
    assert not torch.equal(held_N, values_N)
    assert torch.equal(held_N[-layout.sizes[-2] :], values_N[-layout.sizes[-2] :])
    assert layout.held(net(), values_N) is values_N
