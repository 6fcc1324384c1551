"""Mistakes of loops around a worker that no error would show: they are named, or work."""

import copy
import logging

import pytest
import torch
from torch import nn

from atoll.optim import DiLoCo, GossipGroup, InProcessGroup, LayoutError
from atoll.optim.methods import MethodError
from support.toys import backward, flat, net, sgd

OUTER = {"lr": 1.0, "momentum": 0.0}


def alone(method="diloco", *, model=None, inner=None, inner_steps=2, **options):
    """A worker that meets nobody."""
    model = net() if model is None else model
    options = OUTER | options if method == "diloco" else options
    group = InProcessGroup(1, method, inner_steps=inner_steps, **options)
    inner = sgd(model) if inner is None else inner(model)
    return group.method.worker(model, inner, group.member(0), inner_steps=inner_steps)


def learn(worker, seed=1):
    return backward(worker.model, seed)


# gradient scalers


def scaled(worker, scaler, seed, spoil=False):
    learn(worker, seed)
    for param in worker.model.parameters():
        param.grad.mul_(float("inf") if spoil else scaler.get_scale())
    scaler.scale(torch.zeros(()))  # as the backward pass does, which makes the scale


def test_a_gradient_scaler_steps_the_worker_as_without_one():
    plain, worker = alone(), alone()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))
    for seed in range(4):
        learn(plain, seed)
        plain.step(tokens=3)
        scaled(worker, scaler, seed)
        if seed % 2:
            scaler.unscale_(worker)  # as before clipping
        scaler.step(worker, tokens=3)
        scaler.update()
    assert worker.statistics().steps == 4
    assert torch.allclose(flat(worker.model), flat(plain.model), atol=1e-7)


@pytest.mark.parametrize("method", ["diloco", "ddp"])
def test_a_step_that_a_scaler_skips_counts_with_no_tokens(method):
    worker, scaler = alone(method), torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))
    before = flat(worker.model)
    scaled(worker, scaler, 1, spoil=True)
    scaler.step(worker, tokens=3)
    scaler.update()
    assert torch.equal(flat(worker.model), before)
    assert (worker.statistics().steps, worker.statistics().tokens) == (1, 0)
    assert scaler.get_scale() == 512.0


def test_a_worker_drops_gradients_as_its_optimizer_does():
    worker = alone()
    learn(worker)
    worker.zero_grad()
    assert all(param.grad is None for param in worker.model.parameters())
    assert worker.param_groups is worker.inner.param_groups


# steps beside the worker's


def test_a_loop_that_steps_the_optimizer_too_is_told():
    worker = alone()
    learn(worker)
    worker.inner.step()
    with pytest.raises(RuntimeError, match=r"step\(\) 1 time.* remove that call, or call advance"):
        worker.step(tokens=3)


def test_a_loop_may_step_the_optimizer_itself():
    worker = alone()
    for seed in range(4):
        learn(worker, seed)
        worker.inner.step()
        worker.advance(tokens=3)
    learn(worker)
    worker.step(tokens=3)
    assert worker.statistics().windows == 2


def test_a_step_of_the_optimizer_is_refused_where_gradients_are_sent():
    worker = alone("ddp", inner_steps=1)
    learn(worker)
    worker.inner.step()
    with pytest.raises(RuntimeError, match="sends gradients"):
        worker.advance(tokens=3)


@pytest.mark.parametrize("tokens", [0, -1])
def test_a_step_on_nothing_is_refused(tokens):
    worker = alone()
    learn(worker)
    before = flat(worker.model)
    with pytest.raises(ValueError, match=f"at least 1 token.* got {tokens}.*advance"):
        worker.step(tokens=tokens)
    assert torch.equal(flat(worker.model), before)
    with pytest.raises(ValueError, match="no negative number"):
        worker.advance(tokens=-1)


# optimizers


def two(model):
    half = list(model.parameters())
    return [torch.optim.SGD(half[:2], lr=1e-2), torch.optim.AdamW(half[2:], lr=1e-2)]


def test_a_list_of_optimizers_steps_all_of_them():
    listed, by_hand = alone(inner=two), alone()
    by_hand.inner = None  # never used
    parts = two(by_hand.model)
    for seed in range(4):
        learn(listed, seed)
        listed.step(tokens=3)
        learn(by_hand, seed)
        for part in parts:
            part.step()
        by_hand.advance(tokens=3)
    assert torch.equal(flat(listed.model), flat(by_hand.model))
    assert [group["lr"] for group in listed.param_groups] == [1e-2, 1e-2]


def test_a_rate_that_is_set_reaches_each_optimizer_of_a_list():
    worker = alone(inner=two)
    for group in worker.param_groups:
        group["lr"] = 0.5
    assert [part.param_groups[0]["lr"] for part in worker.inner.optimizers] == [0.5, 0.5]


def test_a_list_of_optimizers_is_saved_and_resumed():
    worker, again = alone(inner=two), alone(inner=two)
    for seed in range(3):
        learn(worker, seed)
        worker.step(tokens=3)
    again.load_state_dict(copy.deepcopy(worker.state_dict()))
    for each in (worker, again):
        for group in each.param_groups:
            group["lr"] = 0.5
        learn(each, 9)
        each.step(tokens=3)
    assert again.inner.optimizers[1].param_groups[0]["lr"] == 0.5
    assert again.inner.param_groups[1]["lr"] == 0.5
    assert torch.equal(flat(worker.model), flat(again.model))


def test_an_optimizer_of_a_list_that_steps_too_is_noticed():
    worker = alone(inner=two)
    learn(worker)
    worker.inner.optimizers[1].step()
    with pytest.raises(RuntimeError, match="1 time"):
        worker.step(tokens=3)


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (lambda model: [], "at least one optimizer"),
        (lambda model: [sgd(model), sgd(model)], "one in two of them"),
        (lambda model: torch.optim.LBFGS(model.parameters()), "LBFGS"),
        (lambda model: [torch.optim.LBFGS(model.parameters())], "LBFGS"),
    ],
)
def test_optimizers_that_cannot_work_are_refused(inner, message):
    with pytest.raises(ValueError, match=message):
        alone(inner=inner)


# methods


def test_a_window_shorter_than_tau_names_tau():
    with pytest.raises(MethodError, match=r"at least tau=5 inner steps, got 4; take tau=4"):
        alone("streaming(count=2)", inner_steps=4)


@pytest.mark.parametrize("method", ["streaming(tau=1)", "ddp", "eager", "demo"])
def test_a_worker_of_another_method_is_refused(method):
    model, group = net(), InProcessGroup(1, method)
    with pytest.raises(ValueError, match=r"expected a worker of the run's method, \w+.*method.wor"):
        DiLoCo(model, sgd(model), group.member(0), inner_steps=2)


@pytest.mark.parametrize("method", ["muloco", "sparseloco", "diloco(tau=1)"])
def test_diloco_is_the_worker_of_several_methods(method):
    model, group = net(), InProcessGroup(1, method)
    DiLoCo(model, sgd(model), group.member(0), inner_steps=2)


def test_a_worker_fits_a_method_by_gossip():
    model, group = net(), GossipGroup(2)
    group.method.worker(model, sgd(model), group.member(0), inner_steps=2)


# models


def wrapped(model):
    inside = nn.Module()
    inside.module = model
    return inside


def test_a_wrapper_of_the_model_is_named():
    model, group = net(), InProcessGroup(2)
    DiLoCo(model, sgd(model), group.member(0), inner_steps=2)
    other = wrapped(net())
    with pytest.raises(RuntimeError, match=r"DistributedDataParallel.*`model\.module`"):
        DiLoCo(other, sgd(other), group.member(1), inner_steps=2)


def test_a_state_of_another_model_names_the_first_parameter():
    worker, other = alone(), alone(model=net(width=7))
    with pytest.raises(LayoutError, match=r"first\.weight \[7, 7\] instead of first\.weight \[6"):
        worker.load_state_dict(other.state_dict())


# buffers


class Normed(nn.Module):
    def __init__(self, trains=True):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=trains)
        self.register_buffer("mask", torch.full((4,), -torch.inf))
        self.register_buffer("unknown", torch.full((4,), torch.nan))
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, x):
        return self.norm(self.linear(x)).square().sum()


def steps(worker, count):
    for _ in range(count):
        worker.model(torch.randn(8, 4)).backward()
        worker.step(tokens=8)


def test_buffers_that_training_changes_are_reported_once(caplog):
    worker = alone(model=Normed())
    with caplog.at_level(logging.WARNING):
        steps(worker, 6)
    (record,) = caplog.records
    assert "norm.running_mean, norm.running_var, which are not" in record.getMessage()


def test_buffers_that_stay_are_not_reported(caplog):
    worker = alone(model=Normed(trains=False))
    with caplog.at_level(logging.WARNING):
        steps(worker, 6)
    assert caplog.records == []


def test_buffers_of_a_saved_state_are_no_news(caplog):
    worker, again = alone(model=Normed(), inner_steps=9), alone(model=Normed(), inner_steps=9)
    steps(worker, 3)
    again.load_state_dict(worker.state_dict())
    again.model.eval()
    with caplog.at_level(logging.WARNING):
        steps(again, 9)
    assert caplog.records == []
