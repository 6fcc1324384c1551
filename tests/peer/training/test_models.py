import re

import pytest
import torch
from torch import nn

from atoll.optim.state.layout import Layout
from atoll.peer.errors import ModelError, SetupError
from atoll.peer.training import models

SMALL = {"dim": 32, "num_layers": 2, "num_heads": 4, "ffn_dim": 48}


def small(seed=0, **overrides):
    return models.build("nano", overrides=SMALL | overrides, vocab_size=64, seq_len=16, seed=seed)


def tokens(batch=2, length=16, vocab=64):
    return torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(1))


def test_nano_is_about_a_million_parameters():
    model = models.build("nano", vocab_size=256, seq_len=128, seed=0)
    assert Layout.of(model).numel == 934_848
    assert Layout.of(model).numel == 934_848  # the tied matrix counts once


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("micro", 3.3),
        ("mini", 10.7),
        ("30m", 30.8),
        ("150m", 154.4),
        ("350m", 346.3),
        ("1b", 973.7),
    ],
)
def test_presets_have_the_size_of_their_name(name, millions):
    with torch.device("meta"):
        model = models.Decoder(models.PRESETS[name])
    assert Layout.of(model).numel / 1e6 == pytest.approx(millions, rel=0.01)


def test_weights_follow_from_the_seed_alone():
    torch.manual_seed(5)
    first = small(seed=7)
    after = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(3))  # the caller's random state is untouched
    again, other = small(seed=7), small(seed=8)
    layout = Layout.of(first)
    assert torch.equal(layout.flatten(first), layout.flatten(again))
    assert not torch.equal(layout.flatten(first), layout.flatten(other))


def test_first_loss_is_that_of_a_uniform_guess():
    model = small()
    loss = models.loss_of(model, tokens(), (tokens() + 1) % 64)
    assert loss.item() == pytest.approx(torch.tensor(64.0).log().item(), rel=0.02)


@pytest.mark.parametrize("kv_heads", [0, 1, 2])
def test_no_position_sees_a_later_one(kv_heads):
    model = small(num_kv_heads=kv_heads)
    before = tokens()
    after = before.clone()
    after[:, 9] = (after[:, 9] + 1) % 64
    difference = (model(before) - model(after)).abs().amax(dim=(0, 2))
    assert torch.all(difference[:9] == 0)
    assert torch.all(difference[9:] > 0)


def test_rope_scores_depend_on_the_distance_alone():
    rope = models.Rope(models.ModelConfig(dim=8, num_layers=1, num_heads=1, ffn_dim=8))
    one = torch.randn(8).expand(1, 32, 1, 8)
    rotated = rope(one)[0, :, 0]
    scores = rotated @ rotated.T
    for distance in (1, 5):
        diagonal = scores.diagonal(distance)
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal), atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rope_agrees_with_its_reference(dtype):
    config = models.ModelConfig(dim=16, num_layers=1, num_heads=2, ffn_dim=8, max_seq_len=12)
    rope, x_BTHE = models.Rope(config), torch.randn(3, 9, 2, 8, dtype=dtype)
    angle_TE = torch.arange(9.0)[:, None] * 10_000.0 ** (-torch.arange(4.0) / 4)
    turn = torch.stack((angle_TE.cos(), angle_TE.sin()), dim=-1)[:, None]
    expected = models.rotate(x_BTHE.unflatten(-1, (-1, 2)), turn).flatten(-2)
    assert rope(x_BTHE).dtype == dtype
    assert torch.allclose(rope(x_BTHE), expected.to(dtype), atol=1e-5)


def test_rope_tables_are_not_part_of_the_state():
    assert not [name for name in small().state_dict() if "rope" in name]


def test_untied_head_is_a_parameter_of_its_own():
    extra = Layout.of(small(tied=False)).numel - Layout.of(small()).numel
    assert extra == 64 * 32


def test_loss_of_equals_the_loss_of_the_logits():
    model = small()
    direct = models.loss_of(model, tokens(), tokens())
    from_logits = models.cross_entropy(models.logits_of(model, tokens()), tokens())
    assert torch.equal(direct, from_logits)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"layers": 3}, "unknown model override 'layers'; the fields are dim, num_layers"),
        ({"num_layers": 2.5}, "num_layers must be int, got 2.5"),
        ({"tied": 1}, "tied must be bool, got 1"),
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"num_heads": 5}, "dim must be an even multiple of num_heads"),
        ({"num_kv_heads": 3}, "num_kv_heads must divide num_heads=4"),
        ({"vocab_size": 10}, "must hold 64 tokens"),
        ({"max_seq_len": 4}, "16 positions"),
    ],
)
def test_wrong_overrides_are_refused(overrides, message):
    with pytest.raises(ModelError, match=re.escape(message)):
        small(**overrides)


def test_an_unknown_preset_names_the_known_ones():
    with pytest.raises(
        SetupError, match="unknown model preset 'huge'; the presets are nano, micro"
    ):
        models.build("huge", vocab_size=256, seq_len=128, seed=0)


# --- a user's own model

CUSTOM = """
import torch
from torch import nn
from atoll.peer.training.models import model

class Logits(nn.Module):
    def __init__(self, vocab_size, width):
        super().__init__()
        self.table = nn.Embedding(vocab_size, width)
        self.out = nn.Linear(width, vocab_size)

    def forward(self, tokens_BT):
        return self.out(self.table(tokens_BT))

class Loss(Logits):
    def forward(self, tokens_BT, targets_BT=None):
        logits = super().forward(tokens_BT)
        if targets_BT is None:
            return logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets_BT.flatten())

class Flat(Logits):
    def forward(self, tokens_BT):
        return super().forward(tokens_BT).flatten(0, 1)

class Vector(Logits):
    def forward(self, tokens_BT, targets_BT):
        return super().forward(tokens_BT).mean(-1)

class Output:
    def __init__(self, logits):
        self.loss, self.logits = None, logits

class Hub(Logits):
    # Called as a causal language model of transformers is.
    def forward(self, input_ids=None, attention_mask=None, past_key_values=None, labels=None):
        assert attention_mask is None and labels is None
        return Output(super().forward(input_ids))

class Frozen(Logits):
    def __init__(self, *args):
        super().__init__(*args)
        self.requires_grad_(False)

@model
def logits(*, vocab_size, seq_len, width=8): return Logits(vocab_size, width)
@model
def loss(*, vocab_size, seq_len, width=8): return Loss(vocab_size, width)
@model
def flat(*, vocab_size, seq_len): return Flat(vocab_size, 8)
@model
def vector(*, vocab_size, seq_len): return Vector(vocab_size, 8)
@model
def frozen(*, vocab_size, seq_len): return Frozen(vocab_size, 8)
@model
def too_small(*, vocab_size, seq_len): return Logits(4, 8)
@model
def nothing(*, vocab_size, seq_len): return None
@model
def hub(*, vocab_size, seq_len): return Hub(vocab_size, 8)
@model(tokens=False)
def images(channels=3): return nn.Conv2d(channels, 4, 3)
@model
def pixels(*, vocab_size, seq_len): return nn.Conv2d(3, 4, 3)
@model(tokens=False)
def constant(): return nn.Identity()
class Kernel(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.table = nn.Embedding(vocab_size, 8)
    def forward(self, tokens_BT):
        raise RuntimeError("FlashAttention only supports CUDA")
@model
def kernel(*, vocab_size, seq_len): return Kernel(vocab_size)
@model
def raises(*, vocab_size, seq_len): raise RuntimeError("no weights here")
number = 3
"""


@pytest.fixture
def custom(tmp_path, own_modules):
    (tmp_path / "my_models.py").write_text(CUSTOM)

    def build(name, own_loop=False, **overrides):
        return models.build(
            custom=name,
            overrides=overrides,
            vocab_size=64,
            seq_len=16,
            seed=3,
            allowed={name},
            own_loop=own_loop,
        )

    return build


@pytest.mark.parametrize("function", ["logits", "loss", "hub"])
def test_a_custom_model_trains_with_either_face(custom, function):
    model = custom(f"my_models:{function}")
    assert model.table.weight.shape == (64, 8)
    loss = models.loss_of(model, tokens(), tokens())
    loss.backward()
    assert torch.isfinite(loss)
    assert models.logits_of(model, tokens()).shape == (2, 16, 64)


def test_overrides_reach_a_custom_model(custom):
    assert custom("my_models:logits", width=12).table.weight.shape == (64, 12)


def test_a_model_without_tokens_is_built_for_loops_of_their_own(custom):
    assert custom("my_models:images", own_loop=True, channels=1).weight.shape == (4, 1, 3, 3)
    with pytest.raises(ModelError, match=r"takes no tokens.*join with `connect`"):
        custom("my_models:images")


def test_a_model_without_tokens_needs_parameters(custom):
    with pytest.raises(ModelError, match="must have trainable parameters"):
        custom("my_models:constant", own_loop=True)


def run_on_cpu(model):
    models.expect_runs("my_models:f", model, torch.device("cpu"), vocab_size=64, seq_len=16)


def test_a_model_that_fails_on_tokens_names_the_mark(custom):
    model = custom("my_models:pixels", own_loop=True)  # its own loop may give it pixels
    with pytest.raises(ModelError, match=r"mark its function with @model\(tokens=False\)"):
        run_on_cpu(model)


def test_a_model_that_runs_is_left_without_gradients(custom):
    model = custom("my_models:logits")
    run_on_cpu(model)
    assert all(param.grad is None for param in model.parameters())


def test_building_a_model_runs_none_of_its_kernels(custom):
    model = custom("my_models:kernel")
    with pytest.raises(ModelError, match=r"failed on tokens of shape .*FlashAttention only"):
        run_on_cpu(model)


def test_a_result_of_another_shape_is_found_without_values(custom):
    with pytest.raises(ModelError, match="must return a scalar, got shape"):
        custom("my_models:vector")


def test_targets_may_be_called_labels():
    class Model(nn.Module):
        def forward(self, tokens_BT, labels=None):
            return tokens_BT

    assert models.takes_targets(Model())


def test_a_custom_model_is_seeded(custom):
    first, again = custom("my_models:logits"), custom("my_models:logits")
    assert torch.equal(first.table.weight, again.table.weight)
    assert first.table.weight.grad is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_models", 'is named "module:function", got'),
        ("absent_module:f", "cannot import 'absent_module'"),
        ("my_models:absent", "has no function 'absent'"),
        ("my_models:number", "has no function 'number'"),
        ("my_models:nothing", "must return a torch.nn.Module, got NoneType"),
        ("my_models:raises", "RuntimeError: no weights here"),
        ("my_models:flat", "must return logits of shape (2, 8, vocabulary), or an object"),
        ("my_models:vector", "must return a scalar, got shape (2, 8); wrap the model in a module"),
        ("my_models:frozen", "must have trainable parameters"),
        ("my_models:too_small", "failed on tokens of shape (2, 8)"),
    ],
)
def test_a_custom_model_that_breaks_the_contract_is_refused(custom, name, message):
    with pytest.raises(ModelError, match=re.escape(message)):
        run_on_cpu(custom(name))


def test_custom_overrides_that_the_function_lacks_are_named(custom):
    with pytest.raises(ModelError, match="unexpected keyword argument 'depth'"):
        custom("my_models:logits", depth=3)


def test_takes_targets_ignores_keyword_only_parameters():
    class Model(nn.Module):
        def forward(self, tokens_BT, *, cache=None):
            return tokens_BT

    assert not models.takes_targets(Model())


@pytest.mark.parametrize("name", ["nano", "micro", "mini", "1b"])
@pytest.mark.parametrize("changes", [{}, {"tied": False}, {"num_kv_heads": 1, "num_layers": 3}])
def test_the_number_of_parameters_is_known_without_the_model(name, changes):
    config = models.preset(name, changes, vocab_size=300, seq_len=16)
    with torch.device("meta"):
        model = models.Decoder(config)
    assert config.num_params == sum(param.numel() for param in model.parameters())


# --- less memory


def gradients(model, change=lambda model: None, batch=None):
    change(model)
    tokens_BT = tokens() if batch is None else batch
    loss = models.loss_of(model, tokens_BT[:, :-1], tokens_BT[:, 1:])
    loss.backward()
    return [loss.detach(), *(param.grad for param in model.parameters())]


def expect_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("logits", [64, 64 * 7, 1])
def test_a_loss_in_parts_has_the_gradient_of_the_whole(monkeypatch, logits, tied):
    expected = gradients(small(tied=tied))
    monkeypatch.setattr(models, "LOGITS", logits)
    expect_close(gradients(small(tied=tied)), expected)


def test_a_loss_in_parts_never_holds_all_logits(monkeypatch):
    def sizes_in(model):
        sizes = []

        def keep(value):
            sizes.append(value.numel())
            return value

        model.head.register_forward_hook(lambda module, args, out: sizes.append(out.numel()))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
            gradients(model)
        return sizes

    whole = tokens()[:, 1:].numel() * 64
    assert whole in sizes_in(small())
    monkeypatch.setattr(models, "LOGITS", 5 * 64)
    assert whole not in sizes_in(small())


def test_a_custom_models_logits_are_widened_in_parts(monkeypatch, custom):
    expected = gradients(custom("my_models:logits"))
    monkeypatch.setattr(models, "LOGITS", 3 * 64)
    expect_close(gradients(custom("my_models:logits")), expected)


def test_a_loss_in_parts_needs_no_gradient(monkeypatch):
    model = small()
    with torch.no_grad():
        expected = models.loss_of(model, tokens(), tokens())
        monkeypatch.setattr(models, "LOGITS", 64)
        torch.testing.assert_close(models.loss_of(model, tokens(), tokens()), expected)


def test_recomputed_activations_give_the_same_bits():
    kept, again = small(num_layers=3), small(num_layers=3)
    calls = []
    again.blocks[1].register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    expected = gradients(kept)
    found = gradients(again, models.recompute_activations)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert len(calls) == 2
    assert models.can_recompute(again)


def test_models_of_transformers_recompute_by_their_own_switch(custom):
    given = []

    class Causal(nn.Module):
        def gradient_checkpointing_enable(self, **options):
            given.append(options)

    assert models.can_recompute(Causal())
    models.recompute_activations(Causal())
    assert given == [{"gradient_checkpointing_kwargs": {"use_reentrant": False}}]
    plain = custom("my_models:logits")
    assert not models.can_recompute(plain)
    models.recompute_activations(plain)  # it stays as it is


# --- documents that share a sequence

END = 63


def sequences_of(*documents):
    """One sequence of documents, each with its end."""
    return torch.tensor([[token for each in documents for token in (*each, END)]])


@pytest.mark.parametrize("kv_heads", [0, 1])
def test_a_document_does_not_see_the_one_before(kv_heads):
    model = small(num_kv_heads=kv_heads)
    models.separate_documents(model, END)
    first, second = sequences_of((1, 2, 3), (9, 8, 7)), sequences_of((4, 5, 6), (9, 8, 7))
    with torch.no_grad():
        one, other = model(first), model(second)
        alone = model(sequences_of((), (9, 8, 7)))
    torch.testing.assert_close(one[:, 3:], other[:, 3:])  # the end of the first begins the second
    torch.testing.assert_close(one[:, 3:], alone, rtol=1e-4, atol=1e-6)  # RoPE is relative
    assert not torch.allclose(one[:, :3], other[:, :3])
    assert not torch.allclose(one[:, 4], model(first[:, 4:])[:, 0])  # it sees that end


def test_documents_share_a_sequence_as_if_each_had_its_own():
    model, documents = small(), ((1, 2, 3), (9, 8, 7), (5,))
    models.separate_documents(model, END)
    batch = sequences_of((), *documents)
    shared = models.loss_of(model, batch[:, :-1], batch[:, 1:])
    alone = [sequences_of((), each) for each in documents]
    sums = [models.loss_of(model, b[:, :-1], b[:, 1:]) * (b.numel() - 1) for b in alone]
    torch.testing.assert_close(shared, sum(sums) / (batch.numel() - 1))


def test_documents_can_be_told_apart_only_by_built_in_models_with_an_end(custom):
    with pytest.raises(ModelError, match="is for the built-in models"):
        models.separate_documents(custom("my_models:logits"), END)
    with pytest.raises(ModelError, match="needs a tokenizer that ends documents"):
        models.separate_documents(small(), None)
