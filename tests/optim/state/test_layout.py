import json
import sys
import types

import pytest
import torch
from torch import nn

from atoll.optim.state.layout import CELL, Layout, LayoutError


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.norm.bias.requires_grad_(False)
        self.register_buffer("mask", torch.ones(3))


def test_tied_parameters_count_once_and_frozen_ones_not_at_all():
    layout = Layout.of(Tied())
    assert layout.names == ("embed.weight", "norm.weight")
    assert layout.shapes == ((7, 4), (4,))
    assert layout.numel == 32


def test_flatten_and_load_are_inverse():
    model, other = Tied(), Tied()
    layout = Layout.of(model)
    params_N = layout.flatten(model)
    layout.load_(other, params_N)
    assert torch.equal(layout.flatten(other), params_N)
    assert torch.equal(other.head.weight, model.embed.weight)
    params_N.zero_()
    assert model.norm.weight.sum() == 4


@pytest.mark.parametrize("name", ["torch.distributed.tensor", "torch.distributed.fsdp"])
def test_a_model_is_read_while_a_thread_imports_what_cuts_models(monkeypatch, name):
    """A peer imports it ahead, and builds the first state of its run meanwhile."""
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    model = Tied()
    layout = Layout.of(model)
    layout.load_(model, layout.flatten(model))


def test_load_keeps_the_dtype_of_the_module():
    model = nn.Linear(3, 2).to(torch.bfloat16)
    layout = Layout.of(model)
    assert layout.flatten(model).dtype == torch.float32
    layout.load_(model, torch.ones(layout.numel))
    assert model.weight.dtype == torch.bfloat16


def test_gradients_may_be_sparse_and_parameters_in_any_order_of_memory():
    model = nn.ModuleDict({"table": nn.Embedding(5, 3, sparse=True), "out": nn.Linear(3, 2)})
    weight = torch.empty(3, 2).t()
    assert not weight.is_contiguous()
    model["out"].weight = nn.Parameter(weight.copy_(torch.arange(6.0).view(2, 3)))
    layout = Layout.of(model)
    model["out"](model["table"](torch.tensor([1, 1, 4]))).sum().backward()
    grad_N, params_N = layout.gradient(model), layout.flatten(model)
    table, weight, bias = layout.split(grad_N)
    assert table.abs().sum(1).bool().tolist() == [False, True, False, False, True]
    assert torch.equal(weight, model["out"].weight.grad)
    assert torch.equal(bias, torch.full((2,), 3.0))
    assert torch.equal(layout.split(params_N)[1], torch.arange(6.0).view(2, 3))
    layout.load_(model, params_N + 1.0)
    assert torch.equal(layout.flatten(model), params_N + 1.0)


def test_names_of_a_compiled_module_are_those_of_the_plain_one():
    model = nn.Linear(3, 2)
    wrapped = nn.Module()
    wrapped._orig_mod = model
    assert Layout.of(wrapped) == Layout.of(model)


def test_cells_cover_the_vector_on_an_absolute_grid():
    layout = Layout(names=("w",), shapes=((CELL * 2 + 5,),))
    assert layout.num_cells == 3
    assert layout.cell(1) == slice(CELL, 2 * CELL)
    assert layout.cell(2) == slice(2 * CELL, 2 * CELL + 5)
    for index in (-1, 3):
        with pytest.raises(IndexError):
            layout.cell(index)
    exact = Layout(names=("w",), shapes=((CELL,),))
    assert exact.num_cells == 1


def test_json_round_trip_and_digest():
    layout = Layout.of(Tied())
    assert Layout.from_json(layout.to_json()) == layout
    assert Layout.from_json(layout.to_json().encode()).digest() == layout.digest()
    assert Layout(names=("w",), shapes=((32,),)).digest() != layout.digest()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 100_000,
        '{"names":["a"],"shapes":[[2]],"more":1}',
        '{"names":"a","shapes":[[2]]}',
        '{"names":[1],"shapes":[[2]]}',
        '{"names":["a"],"shapes":[2]}',
        '{"names":["a"],"shapes":[["2"]]}',
        '{"names":["a"],"shapes":[[true]]}',
        '{"names":["a"],"shapes":[[0]]}',
        '{"names":["a"],"shapes":[[-4]]}',
        '{"names":["a"],"shapes":[[1.5]]}',
        '{"names":["a","a"],"shapes":[[1],[1]]}',
        '{"names":["a"],"shapes":[[1],[1]]}',
        '{"names":[],"shapes":[]}',
        '{"names":["a"],"shapes":[[1000000,1000000,1000000]]}',
        b"\xff\xfe",
    ],
)
def test_hostile_json_is_refused(text):
    with pytest.raises(LayoutError):
        Layout.from_json(text)


def test_json_longer_than_the_limit_is_refused_before_parsing():
    with pytest.raises(LayoutError, match="at most"):
        Layout.from_json(json.dumps({"names": ["a" * (1 << 24)], "shapes": [[1]]}))


def test_another_model_is_refused_by_name():
    layout = Layout.of(nn.Linear(3, 2))
    with pytest.raises(LayoutError, match=r"weight \[2, 4\] instead of weight \[2, 3\]"):
        layout.load_(nn.Linear(4, 2), torch.zeros(layout.numel))
    with pytest.raises(LayoutError, match=r"bias \[2\] is missing"):
        layout.flatten(nn.Linear(3, 2, bias=False))
    with pytest.raises(LayoutError, match="9"):
        layout.load_(nn.Linear(3, 2), torch.zeros(9))


def test_a_model_without_trainable_parameters_is_refused():
    with pytest.raises(LayoutError):
        Layout.of(nn.Identity())


def wrapped(prefix):
    """The layout of a model behind a wrapper."""
    plain = Layout.of(Tied())
    return Layout(names=tuple(prefix + name for name in plain.names), shapes=plain.shapes)


@pytest.mark.parametrize(
    ("prefix", "remedy"),
    [
        ("module.", "give the module inside, `model.module`"),
        ("_fsdp_wrapped_module.", "fully_shard"),
    ],
)
def test_a_difference_by_a_wrapper_names_the_wrapper(prefix, remedy):
    found = Layout.of(Tied()).difference(wrapped(prefix))
    assert found.startswith(f"{prefix}embed.weight instead of embed.weight; ")
    assert remedy in found


def test_a_difference_names_the_first_parameter():
    plain = Layout.of(Tied())
    renamed = Layout(names=("embed.weight", "scale"), shapes=plain.shapes)
    assert plain.difference(renamed) == "scale [4] instead of norm.weight [4]"
    shorter = Layout(names=plain.names[:1], shapes=plain.shapes[:1])
    assert plain.difference(shorter) == "norm.weight [4] is missing"
    assert shorter.difference(plain) == "norm.weight [4] comes in addition"
