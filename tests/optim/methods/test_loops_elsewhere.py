"""Loops as other libraries write them: compiled modules, parts of a model, optimizers in a box."""

import warnings

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from atoll.optim import DiLoCo, InProcessGroup
from atoll.optim.state.layout import Layout
from support.toys import batch, flat, sgd

STEPS = 5


def net():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))


def trained(wrap, forward):
    """Return a model after some windows, given what a worker gets of it and what a loop calls."""
    model = net()
    seen = wrap(model)
    group = InProcessGroup(1, inner_steps=2, lr=0.7, momentum=0.9)
    worker = DiLoCo(seen, sgd(model), group.member(0), inner_steps=2)
    call = forward(model, seen)
    for seed in range(STEPS):
        worker.zero_grad()
        loss = call(batch(seed)).square().mean()
        loss.backward()
        worker.step(tokens=8, loss=loss)
    assert worker.statistics().windows == 2
    return flat(model)


def compiled(model):
    torch.compiler.reset()
    return torch.compile(model, backend="aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("given", ["the module", "what compiles it"])
def test_a_compiled_module_trains_to_the_bits_of_a_plain_one(given):
    plain = trained(lambda model: model, lambda model, seen: model)
    if given == "the module":
        found = trained(lambda model: model, lambda model, seen: compiled(model))
    else:
        found = trained(compiled, lambda model, seen: seen)
    assert torch.equal(found, plain)


def test_a_module_that_compiles_itself_keeps_its_layout():
    model = net()
    model.compile(backend="aot_eager")
    assert Layout.of(model) == Layout.of(compiled(net())) == Layout.of(net())


class Optimizers(Optimizer):
    """An optimizer a model part behind one interface, as torchtitan has them."""

    def __init__(self, model_parts):
        self.optimizers = [torch.optim.AdamW(part.parameters(), lr=0.02) for part in model_parts]
        params = [param for part in model_parts for param in part.parameters()]
        super().__init__(params, {"lr": 0.02})

    def step(self, closure=None):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none=True):
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)


class Schedulers:
    """One a part, stepped together."""

    def __init__(self, optimizers):
        self.schedulers = [
            LambdaLR(each, lambda step: 1.0 / (1 + step)) for each in optimizers.optimizers
        ]

    def step(self):
        for scheduler in self.schedulers:
            scheduler.step()


def train_step(model_parts, seed):
    x = batch(seed)
    for part in model_parts:
        x = part(x)
    loss = x.square().mean()
    loss.backward()
    params = [param for part in model_parts for param in part.parameters()]
    torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
    return loss


@pytest.mark.parametrize("method", ["diloco", "ddp"])
def test_a_loop_over_parts_of_a_model_and_a_box_of_optimizers(method):
    torch.manual_seed(0)
    model_parts = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 1)]
    optimizers = Optimizers(model_parts)
    schedulers = Schedulers(optimizers)
    outer = {"lr": 1.0, "momentum": 0.0, "inner_steps": 2} if method == "diloco" else {}
    group = InProcessGroup(1, method, **{"inner_steps": 1} | outer)
    worker = group.method.worker(
        nn.ModuleList(model_parts),
        optimizers.optimizers,  # each has a schedule of its own; the box does not know its rate
        group.member(0),
        inner_steps=2,
    )
    assert set(worker.layout.names) == {"0.0.weight", "0.0.bias", "1.weight", "1.bias"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses = []
        for _ in range(12):
            optimizers.zero_grad()
            losses.append(train_step(model_parts, seed=1).detach())
            worker.step(tokens=8, loss=losses[-1])
            if method == "diloco":
                schedulers.step()
            else:  # the run's outer step is AdamW: its rate is the schedule's
                for each in schedulers.schedulers:
                    each.optimizer.param_groups[0]["lr"] *= 0.9
    assert losses[-1] < 0.8 * losses[0]
    assert worker.statistics().windows == (6 if method == "diloco" else 12)
    expected = 0.02 / 13 if method == "diloco" else 0.02 * 0.9**12
    assert worker.param_groups[0]["lr"] == pytest.approx(expected)


def test_a_box_that_is_given_whole_is_stepped_whole():
    torch.manual_seed(0)
    model_parts = [nn.Linear(6, 6), nn.Linear(6, 1)]
    optimizers = Optimizers(model_parts)
    group = InProcessGroup(1, inner_steps=2)
    worker = DiLoCo(nn.ModuleList(model_parts), optimizers, group.member(0), inner_steps=2)
    before = flat(worker.model)
    train_step(model_parts, seed=1)
    worker.step(tokens=8)
    assert (flat(worker.model) != before).all()
