import re

import example_stages
import pytest
import torch

from atoll.optim.state.layout import Layout
from atoll.peer.errors import ModelError
from atoll.peer.training import models, stages

SMALL = {"dim": 32, "num_layers": 2, "num_heads": 4, "ffn_dim": 48}


def small(**overrides):
    return stages.slices("nano", overrides=SMALL | overrides, vocab_size=64, seq_len=16)


def custom_slices(name, **overrides):
    return stages.slices(
        custom=name, overrides=overrides, vocab_size=64, seq_len=16, allowed={name}
    )


def tokens(batch=2, length=16, vocab=64):
    return torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(1))


# --- the cut


@pytest.mark.parametrize("count", [0, -1, 5])
def test_a_number_of_stages_that_does_not_fit_is_refused(count):
    message = rf"expected 1 to 4 stages, as many as the model has slices .* got {count}; change"
    with pytest.raises(ModelError, match=message):
        small().cut(count)


# --- slices of the built-in decoder


def test_slices_of_a_decoder_are_embedding_blocks_and_head():
    found = small()
    assert len(found) == 4
    names = found.layout(range(4)).names
    assert names[0] == "slices.0.embedding.weight"
    assert names[1:7] == (
        "slices.1.attention_norm.weight",
        "slices.1.attention.qkv.weight",
        "slices.1.attention.out.weight",
        "slices.1.ffn_norm.weight",
        "slices.1.ffn.gate_up.weight",
        "slices.1.ffn.out.weight",
    )
    assert names[-2:] == ("slices.3.norm.weight", "slices.3.head.weight")
    assert found.shape == stages.Shape(vocab_size=64, seq_len=16, width=32)


@pytest.mark.parametrize("name", ["nano", "1b"])
def test_slices_have_the_parameters_of_the_untied_decoder(name):
    found = stages.slices(name, vocab_size=256, seq_len=128)
    config = models.preset(name, {"tied": False}, vocab_size=256, seq_len=128)
    assert sum(found.num_params) == config.num_params
    assert found.num_params[0] == 256 * config.dim
    assert found.flops_per_token[0] == 0  # rows of a table are looked up
    assert found.flops_per_token[-1] == 2 * (256 * config.dim + config.dim)
    stage = range(1, 3)
    assert found.layout(stage).numel == sum(found.num_params[1:3])


def test_slices_in_one_piece_are_the_untied_decoder():
    whole = small().build(range(4), seed=3)
    decoder = models.build(
        "nano", overrides=SMALL | {"tied": False}, vocab_size=64, seq_len=16, seed=0
    )
    layout = Layout.of(decoder)  # of other names, in the same order
    assert layout.shapes == Layout.of(whole).shapes
    layout.load_(decoder, Layout.of(whole).flatten(whole))
    loss = models.loss_of(whole, tokens(), tokens())
    assert torch.equal(loss, models.loss_of(decoder, tokens(), tokens()))
    assert torch.equal(models.logits_of(whole, tokens()), decoder(tokens()))


def test_residual_outputs_begin_narrower_as_in_the_decoder():
    block = dict(small().build(range(1, 2), seed=0).named_parameters())
    assert block["slices.1.attention.qkv.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert block["slices.1.ffn.out.weight"].std().item() == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_first_values_and_names_do_not_depend_on_the_cut(count):
    found = small()
    whole = found.build(range(4), seed=7).state_dict()
    gathered = {}
    for run in found.cut(count):
        gathered |= found.build(run, seed=7).state_dict()
    assert list(gathered) == list(whole)
    assert all(torch.equal(gathered[name], value) for name, value in whole.items())


def test_first_values_follow_from_seed_and_slice():
    torch.manual_seed(5)
    state = small().build(range(4), seed=7).state_dict()
    after = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(3))  # the caller's random state is untouched
    qkv = "slices.{}.attention.qkv.weight".format
    assert not torch.equal(state[qkv(1)], state[qkv(2)])
    assert not torch.equal(state[qkv(1)], small().build(range(4), seed=8).state_dict()[qkv(1)])


def test_layouts_of_stages_follow_from_the_shapes_alone():
    found = small()
    for run in found.cut(3):
        assert found.layout(run) == Layout.of(found.build(run, seed=0))


@pytest.mark.parametrize("wrong", [range(0), range(2, 5), range(0, 4, 2), range(3, 1, -1)])
def test_slices_of_a_stage_are_consecutive(wrong):
    with pytest.raises(ValueError, match="expected consecutive slices of 4"):
        small().build(wrong, seed=0)


def test_stages_say_what_they_are():
    found = small()
    assert found.build(range(0, 1), seed=0).title == "stage of slice 0"
    middle = found.build(range(1, 3), seed=0)
    assert middle.title == "stage of slices 1 to 2"
    assert not middle.is_first and not middle.is_last


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"tied": True}, "a model in stages cannot be tied"),
        ({"num_layers": 10**12}, "must have 2 to 512 slices to be cut into stages, got"),
        ({"layers": 3}, "unknown model override 'layers'"),
        ({"dim": 2**40}, "cannot be built: RuntimeError"),
    ],
)
def test_a_decoder_that_cannot_be_cut_is_refused(overrides, message):
    with pytest.raises(ModelError, match=re.escape(message)):
        small(**overrides).cut(2)


# --- slices of a user's own model

CUSTOM = """
from functools import cache, partial
import torch
from torch import nn
from atoll.peer.training.models import model

BUILT = []

class Layer(nn.Module):
    def __init__(self, width=8, out=None):
        super().__init__()
        self.linear = nn.Linear(width, out or width)
        BUILT.append(self.linear.weight.device.type)
    def forward(self, x_BTD):
        return self.linear(x_BTD)

class Vectors(nn.Embedding):
    def __init__(self):
        super().__init__(64, 8)
    def forward(self, tokens_BT):
        return super().forward(tokens_BT)[..., None]

class Sum(Layer):
    def forward(self, x_BTD):
        return super().forward(x_BTD).sum(1)

class Loss(Layer):
    def forward(self, x_BTD, targets_BT=None):
        logits_BTV = super().forward(x_BTD)
        if targets_BT is None:
            return logits_BTV
        return nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())

class Losses(Layer):
    def forward(self, x_BTD, targets_BT):
        return super().forward(x_BTD).mean(-1)

class Kernel(Layer):
    def forward(self, x_BTD):
        raise RuntimeError("runs on a GPU only")

class Draws(Layer):
    def __init__(self):
        super().__init__()
        self.scale = self.linear.weight.mean().item()

first = partial(nn.Embedding, 64, 8)
last = partial(Layer, 8, 64)
shared = Layer()
held = cache(Layer)

@model(slices=True)
def good(*, vocab_size, seq_len, depth=2):
    return [partial(nn.Embedding, vocab_size, 8), *[Layer] * depth, partial(Layer, 8, vocab_size)]
@model(slices=True)
def loss(*, vocab_size, seq_len): return [first, partial(Loss, 8, 64)]
@model(slices=True)
def kernel(*, vocab_size, seq_len): return (first, Kernel, last)
@model(slices=True)
def one(*, vocab_size, seq_len): return [first]
@model(slices=True)
def many(*, vocab_size, seq_len): return [first] * 513
@model(slices=True)
def sequential(*, vocab_size, seq_len): return nn.Sequential(first(), last())
@model(slices=True)
def modules(*, vocab_size, seq_len): return [first, Layer(), last]
@model(slices=True)
def numbers(*, vocab_size, seq_len): return [first, 3]
@model(slices=True)
def nothing(*, vocab_size, seq_len): return [first, lambda: None, last]
@model(slices=True)
def raises(*, vocab_size, seq_len): return [first, partial(Layer, "8"), last]
@model(slices=True)
def draws(*, vocab_size, seq_len): return [first, Draws, last]
@model(slices=True)
def bare(*, vocab_size, seq_len): return [first, nn.ReLU, last]
@model(slices=True)
def prebuilt(*, vocab_size, seq_len): return [first, lambda: shared, last]
@model(slices=True)
def cached(*, vocab_size, seq_len): return [first, lambda: held(), last]
@model(slices=True)
def no_table(*, vocab_size, seq_len): return [partial(Layer, 5), last]
@model(slices=True)
def vectors(*, vocab_size, seq_len): return [Vectors, last]
@model(slices=True)
def wider(*, vocab_size, seq_len): return [first, partial(Layer, 8, 16), last]
@model(slices=True)
def flat(*, vocab_size, seq_len): return [first, Layer, Sum]
@model(slices=True)
def losses(*, vocab_size, seq_len): return [first, Layer, Losses]
@model
def whole(*, vocab_size, seq_len): return nn.Sequential(first(), last())
"""


@pytest.fixture
def custom(tmp_path, own_modules):
    (tmp_path / "my_slices.py").write_text(CUSTOM)

    def find(function, **overrides):
        return custom_slices(f"my_slices:{function}", **overrides)

    return find


def test_a_stage_builds_its_own_slices_alone(custom):
    found = custom("good", depth=3)
    import my_slices

    my_slices.BUILT.clear()
    stage = found.build(range(2, 4), seed=0)
    assert my_slices.BUILT == ["meta"] * 4 + ["cpu"] * 2  # without values, once; then these
    assert [name for name, _ in stage.named_parameters()] == [
        "slices.2.linear.weight",
        "slices.2.linear.bias",
        "slices.3.linear.weight",
        "slices.3.linear.bias",
    ]
    assert sum(param.numel() for param in stage.parameters()) == sum(found.num_params[2:4])
    found.build(range(0, 1), seed=0)
    assert my_slices.BUILT == ["meta"] * 4 + ["cpu"] * 2


@pytest.mark.parametrize("function", ["good", "loss", "kernel"])
def test_a_custom_model_is_cut_and_seeded(custom, function):
    found = custom(function)
    first, last = found.cut(2)
    assert found.cut([["slices.0.*"], ["slices.[!0].*"]]) == (range(1), range(1, len(found)))
    state = found.build(first, seed=1).state_dict() | found.build(last, seed=1).state_dict()
    again = found.build(range(len(found)), seed=1).state_dict()
    assert list(state) == list(again)
    assert all(torch.equal(state[name], value) for name, value in again.items())
    assert found.shape.width == 8


@pytest.mark.parametrize("function", ["good", "loss"])
def test_a_custom_model_in_one_piece_is_a_model(custom, function):
    whole = custom(function).build(range(len(custom(function))), seed=1)
    loss = models.loss_of(whole, tokens(), tokens())
    logits_BTV = models.logits_of(whole, tokens())
    assert torch.equal(loss, models.cross_entropy(logits_BTV, tokens()))


def test_overrides_reach_the_slices(custom):
    assert len(custom("good", depth=5)) == 7


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("absent", "has no function 'absent'"),
        ("whole", "cannot be cut into stages: its function returns the whole model"),
        ("one", "must have 2 to 512 slices to be cut into stages, got 1"),
        ("many", "must have 2 to 512 slices to be cut into stages, got 513"),
        ("sequential", "must return a list with a function for each slice, got Sequential"),
        ("modules", "slice 1 of model 'my_slices:modules' must be a function that builds it"),
        ("numbers", "must be a function that builds it, got int"),
        ("nothing", "slice 1 of model 'my_slices:nothing' must be a torch.nn.Module, got NoneType"),
        ("raises", "slice 1 of model 'my_slices:raises' cannot be built: TypeError"),
        ("draws", "cannot be built: RuntimeError"),
        ("bare", "must have trainable parameters, all floating-point; make a layer without any"),
        ("prebuilt", "slice 1 of model 'my_slices:prebuilt' has parameters before a peer needs it"),
        ("cached", "its function must build a new module at each call"),
        ("vectors", "must return floats of shape (2, 8, width), got shape (2, 8, 8, 1)"),
        ("no_table", "failed on tokens of shape (2, 8) without values"),
        ("wider", "must return floats of shape (2, 8, 8), got shape (2, 8, 16)"),
        ("flat", "must return floats of shape (2, 8, vocabulary), got shape (2, 8)"),
        ("losses", "must return a scalar, got shape (2, 8)"),
    ],
)
def test_a_custom_model_that_breaks_the_contract_is_refused(custom, function, message):
    with pytest.raises(ModelError, match=re.escape(message)):
        custom(function).build(range(1, 2), seed=0)


def test_slices_that_the_owner_has_not_allowed_are_not_imported():
    with pytest.raises(ModelError, match="pass --allow-model absent_module:build"):
        stages.slices(custom="absent_module:build", vocab_size=64, seq_len=16)


def test_a_run_without_stages_refuses_slices(custom):
    custom("good")
    with pytest.raises(ModelError, match=r"gives slices.*set stages in \[topology\]"):
        models.build(
            custom="my_slices:good",
            vocab_size=64,
            seq_len=16,
            seed=0,
            allowed={"my_slices:good"},
        )


def test_slices_of_the_example_can_be_cut():
    found = custom_slices("example_stages:build", depth=3)
    assert len(found) == 5
    assert [len(run) for run in found.cut(3)] == [2, 1, 2]
    assert example_stages.build(vocab_size=64, seq_len=16)[0]().weight.shape == (64, 64)
