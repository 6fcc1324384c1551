import math
import re

import example_stages
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from atoll.peer.errors import DeviceError, ModelError
from atoll.peer.training import models, stage_compute, stages
from atoll.peer.training.devices import Device
from atoll.peer.training.stage_compute import StageCompute, expect_runs

SMALL = {"dim": 32, "num_layers": 2, "num_heads": 4, "ffn_dim": 48}
CPU = Device(device=torch.device("cpu"), precision="float32")


def decoder(**overrides):
    return stages.slices("nano", overrides=SMALL | overrides, vocab_size=64, seq_len=16)


def computes(found, count, device=CPU):
    return [StageCompute(found.build(run, seed=3), device) for run in found.cut(count)]


def batch(seed=1, sequences=2, length=16, vocab=64):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab, (sequences, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def own_model(*middle, out=64):
    """An embedding, slices in the middle, and a linear layer for logits."""
    builders = [lambda: nn.Embedding(64, 8), *middle, lambda: nn.Linear(8, out)]
    return stages.Slices(title="my model", builders=builders, vocab_size=64, seq_len=16)


def there_and_back(pipeline, tokens_BT, targets_BT, seed=0):
    """Send a microbatch through the stages of a list; return its loss."""
    *earlier, last = pipeline
    inputs = [tokens_BT]
    for compute in earlier:
        inputs.append(compute.forward(inputs[-1], seed=seed))
    half = last.loss_and_gradient(inputs.pop(), targets_BT, seed=seed)
    loss = half.loss
    last.add(half.weights())
    for compute in reversed(earlier):
        half = compute.backward(inputs.pop(), half.input_gradient_BTD, seed=seed)
        compute.add(half.weights())
    return loss


def gradients(pipeline):
    """Finish the step of all stages; return the gradient of each parameter of the model."""
    found = {}
    for compute in pipeline:
        compute.finish()
        found |= {name: param.grad for name, param in compute.model.named_parameters()}
    return found


def expect_gradients(found, whole):
    expected = {name: param.grad for name, param in whole.named_parameters()}
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-8, msg=name)


def example():
    return stages.Slices(
        title="the example",
        builders=example_stages.build(vocab_size=64, seq_len=16, width=16, depth=2),
        vocab_size=64,
        seq_len=16,
    )


@pytest.fixture(params=["torch", "fallback"])
def halves(request, monkeypatch):
    """Split the backward pass in torch's way, then in the way of a torch without it."""
    if request.param == "fallback":
        monkeypatch.setattr(stage_compute, "_torch_halves", lambda: None)
    else:
        assert stage_compute._torch_halves() is not None
    return request.param


# --- against autograd of the model in one piece


@pytest.mark.parametrize("model", [decoder, example])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_gradients_are_those_of_the_whole_model(model, count, halves):
    found = model()
    whole = found.build(range(4), seed=3)
    loss = models.loss_of(whole, *batch())
    loss.backward()
    pipeline = computes(found, count)
    assert there_and_back(pipeline, *batch()) == pytest.approx(loss.item(), rel=1e-6)
    expect_gradients(gradients(pipeline), whole)


@pytest.mark.parametrize("count", [2, 3])
def test_the_gradient_of_an_input_has_the_bits_of_autograd(count, halves):
    """That of the split backward pass, which the stage before waits for."""
    found, (tokens_BT, targets_BT) = decoder(), batch()
    compute = computes(found, count)[1]
    x_BTD = torch.linspace(-1, 1, tokens_BT.numel() * 32).view(*tokens_BT.shape, 32)
    plain = found.build(found.cut(count)[1], seed=3).train()
    leaf_BTD = x_BTD.clone().requires_grad_()
    gradient_BTD = x_BTD.flip(1)
    if compute.model.is_last:
        half = compute.loss_and_gradient(x_BTD, targets_BT)
        plain(leaf_BTD, targets_BT).backward()
    else:
        half = compute.backward(x_BTD, gradient_BTD)
        plain(leaf_BTD, None).backward(gradient_BTD)
    assert torch.equal(half.input_gradient_BTD, leaf_BTD.grad)
    expected = [param.grad for param in plain.parameters()]
    assert all(map(torch.equal, half.weights().values, expected))


def test_microbatches_count_by_their_tokens(halves):
    parts = [batch(1, sequences=3), batch(2, sequences=1), batch(3, sequences=2, length=8)]
    found = decoder()
    whole = found.build(range(4), seed=3)
    tokens = [part[0].numel() for part in parts]
    for part, number in zip(parts, tokens, strict=True):
        (models.loss_of(whole, *part) * number / sum(tokens)).backward()
    pipeline = computes(found, 2)
    for part in parts:
        there_and_back(pipeline, *part)
    assert [compute.tokens for compute in pipeline] == [sum(tokens)] * 2
    expect_gradients(gradients(pipeline), whole)


def test_equal_microbatches_are_averaged():
    pipeline, once = computes(decoder(), 2), computes(decoder(), 2)
    for _ in range(4):
        there_and_back(pipeline, *batch())
    there_and_back(once, *batch())
    expected = gradients(once)
    assert all(torch.equal(value, expected[name]) for name, value in gradients(pipeline).items())


def test_a_loss_in_parts_has_the_gradients_of_the_whole(monkeypatch, halves):
    pipeline = computes(decoder(), 2)
    there_and_back(pipeline, *batch())
    expected = gradients(pipeline)
    monkeypatch.setattr(models, "LOGITS", 5 * 64)
    again = computes(decoder(), 2)
    there_and_back(again, *batch())
    for name, value in gradients(again).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-7)


class Twice(nn.Module):
    """A slice that uses its only matrix twice, the second time on what the first gave."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x_BTD):
        return x_BTD + self.linear(self.linear(x_BTD).tanh())


class View(nn.Module):
    """A slice whose output is a view."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x_BTD):
        return self.linear(x_BTD.transpose(1, 2)).transpose(1, 2)


class Frozen(nn.Module):
    """A slice with a frozen parameter, and one that takes no part."""

    def __init__(self):
        super().__init__()
        self.linear, self.unused = nn.Linear(8, 8), nn.Linear(2, 2)
        self.linear.weight.requires_grad_(False)

    def forward(self, x_BTD):
        return self.linear(x_BTD).sin()


@pytest.mark.parametrize("middle", [Twice, View, Frozen])
def test_slices_of_any_kind_get_the_gradients_of_autograd(middle, halves):
    found = own_model(middle)
    whole = found.build(range(3), seed=3)
    models.loss_of(whole, *batch()).backward()
    pipeline = computes(found, 3)
    there_and_back(pipeline, *batch())
    expected = {name: param.grad for name, param in whole.named_parameters()}
    for name, value in gradients(pipeline).items():
        torch.testing.assert_close(value, expected[name], msg=name)


# --- one half after the other


class Products(TorchDispatchMode):
    """Counts the operations of products of two matrices."""

    flops = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.mm.default:
            (rows, inner), columns = args[0].shape, args[1].shape[1]
            self.flops += 2 * rows * inner * columns
        return function(*args, **(kwargs or {}))


def test_the_weights_cost_nothing_before_the_inputs_are_done():
    found = decoder()
    compute = StageCompute(found.build(range(1, 3), seed=0), CPU)
    x_BTD, gradient_BTD = torch.randn(2, 16, 32), torch.randn(2, 16, 32)
    forward, inputs, weights = Products(), Products(), Products()
    with forward:
        compute.forward(x_BTD)
    with inputs:
        half = compute.backward(x_BTD, gradient_BTD)
    with weights:
        half.weights()
    tokens, norms = 32, 2 * 2 * 32  # parameters of the norms, which are in no product
    assert forward.flops == tokens * (sum(found.flops_per_token[1:3]) - 2 * norms)
    assert inputs.flops == 2 * forward.flops  # the forward pass again, and one product for each
    assert weights.flops == forward.flops


def test_the_parameters_have_no_gradient_before_the_step(halves):
    first, last = computes(decoder(), 2)
    x_BTD = first.forward(batch()[0])
    half = last.loss_and_gradient(x_BTD, batch()[1])
    assert half.input_gradient_BTD.shape == x_BTD.shape
    assert half.input_gradient_BTD.dtype == torch.float32
    params = list(last.model.parameters())
    assert all(param.grad is None for param in params)
    held = half.weights()
    assert all(param.grad is None for param in params)
    last.add(held)
    last.finish()
    kept = [param.grad.clone() for param in params]
    # Another microbatch may come between the end of the sum and the step of the optimizer.
    last.add(last.loss_and_gradient(x_BTD, batch(2)[1]).weights())
    assert all(torch.equal(param.grad, value) for param, value in zip(params, kept, strict=True))


def test_a_gradient_that_is_dropped_leaves_no_trace(halves):
    pipeline, other = computes(decoder(), 2), computes(decoder(), 2)
    x_BTD = pipeline[0].forward(batch(5)[0])
    pipeline[1].loss_and_gradient(x_BTD, batch(5)[1])
    pipeline[1].loss_and_gradient(x_BTD, batch(5)[1]).weights()
    for each in (pipeline, other):
        there_and_back(each, *batch())
    expected = gradients(other)
    assert all(torch.equal(value, expected[name]) for name, value in gradients(pipeline).items())


def test_a_forward_pass_keeps_no_graph():
    first, middle, _ = computes(decoder(), 3)
    x_BTD = first.forward(batch()[0])
    assert not x_BTD.requires_grad and not middle.forward(x_BTD).requires_grad


def test_the_first_stage_has_no_gradient_of_its_inputs():
    first, _ = computes(decoder(), 2)
    half = first.backward(batch()[0], torch.ones(2, 16, 32))
    assert half.input_gradient_BTD is None
    assert half.loss is None and half.tokens == 32
    assert all(value is not None for value in half.weights().values)


def test_an_output_without_the_inputs_is_named(halves):
    class Constant(nn.Linear):
        def forward(self, x_BTD):
            return self.bias.expand_as(x_BTD)

    _, middle, _ = computes(own_model(lambda: Constant(8, 8)), 3)
    with pytest.raises(ModelError, match="does not depend on its inputs"):
        middle.backward(torch.ones(1, 4, 8), torch.ones(1, 4, 8))


# --- the step


def test_a_stage_clips_by_its_own_norm():
    pipeline = computes(decoder(), 2)
    there_and_back(pipeline, *batch())
    norms = [compute.finish(clip_norm=0.01).norm for compute in pipeline]
    for compute, norm in zip(pipeline, norms, strict=True):
        clipped = torch.stack([param.grad.norm() for param in compute.model.parameters()]).norm()
        assert norm > 0.1 and clipped.item() == pytest.approx(0.01, rel=1e-3)


def test_a_step_counts_what_was_added_and_begins_anew():
    first, last = computes(decoder(), 2)
    for _ in range(3):
        there_and_back([first, last], *batch())
    found = last.finish()
    assert (found.microbatches, found.tokens, found.is_finite) == (3, 96, True)
    assert last.tokens == last.microbatches == 0
    with pytest.raises(ValueError, match="at least one microbatch before a step, got none"):
        last.finish()
    first.clear()
    with pytest.raises(ValueError, match="at least one microbatch"):
        first.finish()


def test_a_gradient_that_is_not_finite_is_reported():
    _, last = computes(decoder(), 2)
    x_BTD = torch.full((1, 4, 32), math.nan)
    last.add(last.loss_and_gradient(x_BTD, batch(1, 1, 4)[1]).weights())
    assert not last.finish(clip_norm=1.0).is_finite


# --- random draws, evaluation, precision


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x_BTD):
        return self.dropout(self.linear(x_BTD))


def test_dropout_is_the_same_in_both_passes():
    _, middle, _ = computes(own_model(Dropping), 3)
    x_BTD = torch.ones(1, 4, 8)
    output_BTD = middle.forward(x_BTD, seed=11)
    assert torch.equal(middle.forward(x_BTD, seed=11), output_BTD)
    assert not torch.equal(middle.forward(x_BTD, seed=12), output_BTD)
    half = middle.backward(x_BTD, torch.ones(1, 4, 8), seed=11)
    bias_D = half.weights().values[1]
    assert torch.equal(bias_D, 2.0 * (output_BTD != 0).sum((0, 1)))  # what was kept counts twice


def test_evaluation_drops_nothing():
    first, middle, last = computes(own_model(Dropping), 3)
    tokens_BT, targets_BT = batch()
    middle.forward(first.forward(tokens_BT))
    x_BTD = middle.evaluate(first.evaluate(tokens_BT))
    assert torch.equal(x_BTD, middle.evaluate(first.evaluate(tokens_BT)))
    logits_BTV, loss = last.evaluate(x_BTD), last.evaluate(x_BTD, targets_BT)
    assert logits_BTV.shape == (2, 16, 64)
    assert torch.equal(loss, models.cross_entropy(logits_BTV, targets_BT))
    assert not loss.requires_grad
    middle.forward(first.forward(tokens_BT))
    assert middle.model.training


def test_bfloat16_is_for_the_products_alone():
    device = Device(device=torch.device("cpu"), precision="bfloat16")
    found = decoder()
    whole = found.build(range(4), seed=3)
    with device.autocast():
        loss = models.loss_of(whole, *batch())
    loss.backward()
    pipeline = computes(found, 3, device)
    assert pipeline[0].forward(batch()[0]).dtype == torch.float32
    assert there_and_back(pipeline, *batch()) == pytest.approx(loss.item(), rel=1e-3)
    for name, value in gradients(pipeline).items():
        expected = dict(whole.named_parameters())[name].grad
        assert value.dtype == torch.float32
        assert (value - expected).norm() <= 0.02 * expected.norm()


def test_float16_is_replaced_with_a_warning(caplog):
    device = Device(device=torch.device("cpu"), precision="float16")
    compute = StageCompute(decoder().build(range(0, 2), seed=0), device)
    assert compute.device.precision == "float32"
    assert "a stage cannot compute in float16; on cpu it uses float32" in caplog.text


# --- what a stage refuses


@pytest.mark.parametrize(
    ("stage", "inputs", "message"),
    [
        (0, torch.zeros(2, 16), "expected int64 tokens of shape (B, T), got torch.float32"),
        (0, torch.zeros(2, dtype=torch.int64), "expected int64 tokens of shape (B, T)"),
        (0, torch.zeros(0, 4, dtype=torch.int64), "expected int64 tokens of shape (B, T)"),
        (0, torch.full((2, 16), 64), "expected tokens from 0 to 63, got 64 to 64"),
        (0, torch.full((2, 16), -1), "expected tokens from 0 to 63, got -1 to -1"),
        (0, torch.zeros(1, 17, dtype=torch.int64), "expected at most 16 positions, got 17"),
        (1, torch.zeros(2, 16, 31), "an input of floating-point values of shape (B, T, 32)"),
        (1, torch.zeros(2, 16), "of shape (B, T, 32), got torch.float32 of shape (2, 16)"),
        (1, torch.zeros(0, 16, 32), "of shape (B, T, 32), got"),
        (1, torch.zeros(2, 16, 32, dtype=torch.int64), "got torch.int64"),
        (1, torch.zeros(1, 17, 32), "expected at most 16 positions, got 17"),
        (2, torch.zeros(2, 16, 32), "the stage of slice 3 is the last one; call loss_and_gradient"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(stage, inputs, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        computes(decoder(), 3)[stage].forward(inputs)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (torch.full((2, 16), 64), "expected tokens from 0 to 63, got 64 to 64"),
        (torch.full((2, 16), -100), "expected tokens from 0 to 63, got -100"),
        (torch.zeros(2, 15, dtype=torch.int64), "a target for each of (2, 16) positions"),
        (torch.zeros(2, 16), "expected int64 tokens"),
    ],
)
def test_targets_that_do_not_fit_are_refused(targets, message):
    _, last = computes(decoder(), 2)
    with pytest.raises(ValueError, match=re.escape(message)):
        last.loss_and_gradient(torch.zeros(2, 16, 32), targets)


def test_a_gradient_of_another_shape_is_refused():
    first, _ = computes(decoder(), 2)
    for shape in ((2, 15, 32), (2, 16, 31), (32, 32)):
        with pytest.raises(ValueError, match="expected a gradient of floating-point values"):
            first.backward(batch()[0], torch.zeros(shape))


def test_only_the_last_stage_takes_targets():
    first, _ = computes(decoder(), 2)
    with pytest.raises(ValueError, match="stage of slices 0 to 1 is not the last one"):
        first.loss_and_gradient(*batch())


# --- a stage tries itself


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_stage_that_runs_is_left_as_it_was(count):
    for compute in computes(decoder(), count):
        expect_runs("preset 'nano'", compute, sequences=2)
        assert compute.microbatches == 0
        assert all(param.grad is None for param in compute.model.parameters())


class OnAnother(nn.Linear):
    """Fails on the device meta, so that only its peer finds out what else is wrong."""

    def forward(self, x_BTD):
        if x_BTD.is_meta:
            raise RuntimeError("runs on a GPU only")
        return super().forward(x_BTD)


@pytest.mark.parametrize(
    ("middle", "message"),
    [
        (lambda: OnAnother(8, 9), "my model: the stage of slice 1 failed on inputs of shape"),
        (lambda: OnAnother(7, 8), "my model: the stage of slice 1 failed on inputs of shape"),
    ],
)
def test_a_slice_that_fails_on_the_device_is_named(middle, message):
    _, compute, _ = computes(own_model(middle), 3)
    with pytest.raises(ModelError, match=message):
        expect_runs("my model", compute, sequences=2)


def test_too_little_memory_is_the_devices_fault(monkeypatch):
    first, _ = computes(decoder(), 2)

    def full(*_):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(first.model, "forward", full)
    with pytest.raises(DeviceError, match="does not fit on cpu with microbatches of 4 x 16 tokens"):
        expect_runs("preset 'nano'", first, sequences=4)
