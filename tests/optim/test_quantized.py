import sys
import warnings

import pytest
import torch
from torch import nn

from atoll.optim import inner, quantized
from atoll.optim.inprocess.rounds import InProcessGroup
from atoll.optim.methods.base import MethodError
from atoll.optim.methods.diloco import DiLoCo


@pytest.fixture
def torchao():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("torchao.optim")


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 1))


def steps(model, optimizer, count, *, first=0, step=None):
    for seed in range(first, first + count):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed))
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        (step or optimizer.step)()
    return float(loss.detach())


def of(in_8_bits):
    model = model_of()
    return model, inner.build("adamw", model, lr=3e-3, quantized=in_8_bits)


def values(model):
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def test_a_missing_package_is_said_with_its_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(MethodError, match="pip install torchao"):
        of(True)


def test_only_adamw_has_8_bits():
    with pytest.raises(MethodError, match="only adamw keeps its moments in 8 bits, got 'muon'"):
        inner.build("muon", model_of(), lr=1e-3, quantized=True)


def test_8_bits_learn_as_32_do_in_a_third_of_the_memory(torchao):
    (exact, one), (coarse, other) = of(False), of(True)
    assert steps(coarse, other, 100) == pytest.approx(steps(exact, one, 100), rel=0.2)

    def held(value):
        parts = value.values() if isinstance(value, dict) else [value]
        return sum(t.numel() * t.element_size() for t in parts if isinstance(t, torch.Tensor))

    def moments(optimizer):
        states = optimizer.state_dict()["state"].values()
        return sum(held(value) for state in states for value in state.values())

    assert moments(other) < moments(one) / 3  # small tensors and tables are in float32


def test_a_rate_is_a_number(torchao):
    _, optimizer = of(True)
    assert all(type(group["lr"]) is float for group in optimizer.param_groups)
    model, optimizer = of(True)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = values(model)
    steps(model, optimizer, 2)
    assert torch.equal(values(model), before)
    assert all(group["lr"] == 0.0 for group in optimizer.param_groups)


def test_8_bits_resume_to_the_bit_from_plain_values(torchao):
    whole, optimizer = of(True)
    steps(whole, optimizer, 6)
    first, half = of(True)
    steps(first, half, 3)
    state = half.state_dict()
    second, rest = of(True)
    second.load_state_dict(first.state_dict())
    rest.load_state_dict(state)
    steps(second, rest, 3, first=3)
    assert torch.equal(values(second), values(whole))
    for of_param in state["state"].values():
        for value in of_param.values():
            parts = value.values() if isinstance(value, dict) else [value]
            assert all(type(part) in (torch.Tensor, bool, str) for part in parts)


def test_a_worker_trains_with_it(torchao):
    model, optimizer = of(True)
    worker = DiLoCo(model, optimizer, InProcessGroup(1).member(0), inner_steps=2)
    steps(model, optimizer, 4, step=lambda: worker.step(tokens=32))
    assert worker.statistics().windows == 2


def test_a_step_in_pieces_has_the_bits_of_one_of_whole_tensors(torchao, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(quantized, "AT_ONCE", 1024)  # the last piece of 64 x 132 is shorter
    shapes = (64, 132), (3, 1501), (7,)  # 8 bits, fp32 of more than one piece, fp32
    torch.manual_seed(0)
    one = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    other = [nn.Parameter(param.detach().clone()) for param in one]
    ours = quantized.adamw_8bit([{"params": one, "weight_decay": 0.1}], lr=1e-2, betas=(0.9, 0.95))
    theirs = torchao.AdamW8bit(other, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(3):
        for param, same in zip(one, other, strict=True):
            param.grad = torch.randn_like(param)
            same.grad = param.grad.clone()
        ours.step()
        with torch.compiler.set_stance("force_eager"):
            theirs.step()
    assert all(map(torch.equal, one, other))
    for param, same in zip(one, other, strict=True):
        for name in ("step", "exp_avg", "exp_avg_sq"):
            mine, library = ours.state[param][name], theirs.state[same][name]
            assert torch.equal(
                mine.dequantize() if hasattr(mine, "codes") else mine,
                library.dequantize() if hasattr(library, "codes") else library,
            )


def test_a_step_moves_no_more_values_at_once_than_a_piece(torchao, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(quantized, "AT_ONCE", 1024)
    made = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and not hasattr(result, "codes"):
                if result.untyped_storage().data_ptr() not in held:
                    made.append(result.untyped_storage().nbytes())
            return result

    param = nn.Parameter(torch.randn(64, 128))
    param.grad = torch.randn_like(param)
    optimizer = quantized.adamw_8bit([{"params": [param]}], lr=1e-2, betas=(0.9, 0.95))
    optimizer.step()
    moments = [optimizer.state[param][name] for name in ("exp_avg", "exp_avg_sq")]
    kept = [param, param.grad, *(t for m in moments for t in (m.codes, m.scale, m.qmap))]
    held = {tensor.untyped_storage().data_ptr() for tensor in kept}
    with Sizes():
        optimizer.step()
    assert 4 * 1024 <= max(made) <= 8 * 1024  # codes are looked up as int64


def test_a_step_takes_no_closure(torchao):
    with pytest.raises(ValueError, match="expected no closure"):
        of(True)[1].step(lambda: 0.0)
