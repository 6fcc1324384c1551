"""Against the real libraries: `transformers` and `peft` compute what the decoder computes.

Importing them takes seconds, so all tests that need them are here.
"""

import dataclasses
import json

import numpy as np
import pytest
import torch

from atoll.coordinator.checkpoint_sets import find
from atoll.coordinator.checkpoints import save_checkpoint
from atoll.optim.inprocess.rounds import InProcessGroup
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import OuterState
from atoll.peer.cli import main as cli
from atoll.peer.errors import ModelError
from atoll.peer.lab.plan import bare_model
from atoll.peer.training.data.load import ByteTokenizer, LocalCorpus
from atoll.peer.training.hf.beginning import load_
from atoll.peer.training.hf.export import export, export_stages
from atoll.peer.training.hf.folder import WeightFolder
from atoll.peer.training.models import logits_of
from atoll.peer.training.one_file import ExportError
from atoll.peer.training.opening import build_model, expect_params, first_state
from atoll.peer.training.permission import Allowed
from atoll.peer.training.trained import load_checkpoint
from atoll.peer.training.trainer import Trainer, TrainerOptions
from support.stages import save_stages, staged_spec
from support.weights import SHAPE, checkpoint_of, spec_of, write_folder

CUSTOM = """
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config

from atoll.peer.training.models import model

LLAMA_LIKE = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1,
)


def of(config):
    return AutoModelForCausalLM.from_config(config)


@model
def gpt2(*, vocab_size, seq_len):
    return of(GPT2Config(vocab_size=vocab_size, n_positions=seq_len, n_embd=16, n_layer=2, n_head=2,
                         bos_token_id=0, eos_token_id=0))


@model
def qwen2(*, vocab_size, seq_len):
    return of(Qwen2Config(vocab_size=vocab_size, max_position_embeddings=seq_len, **LLAMA_LIKE))


@model
def llama(*, vocab_size, seq_len):
    return of(LlamaConfig(vocab_size=vocab_size, max_position_embeddings=seq_len, **LLAMA_LIKE))


@model
def own(*, vocab_size, seq_len):
    return nn.Sequential(nn.Embedding(vocab_size, 8), nn.Linear(8, vocab_size))
"""
TARGETS = {"gpt2": ["c_attn"], "qwen2": ["q_proj", "v_proj"], "llama": ["q_proj", "down_proj"]}
# peft 0.21 still asks for what transformers 5.24 has renamed
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

ADAPTERS = {"rank": 2, "alpha": 8, "targets": ["qkv", "out", "gate_up"]}


@pytest.fixture(scope="module", autouse=True)
def quiet():
    """No bars of progress, and nothing is asked of the network."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        import transformers

        transformers.utils.logging.disable_progress_bar()
        yield transformers


@pytest.fixture
def custom(tmp_path, monkeypatch):
    """The name of a function of a module of custom models."""
    (tmp_path / "hub_models.py").write_text(CUSTOM)
    monkeypatch.syspath_prepend(tmp_path)
    return "hub_models:{}".format


def tokens():
    return torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))


def corpus():
    text = np.frombuffer(b"the closed ring of a low coral island. " * 40, dtype=np.uint8)
    return LocalCorpus(train_N=text[:1000], valid_N=text[1000:], tokenizer=ByteTokenizer())


def trained(spec, *, rounds=2):
    """Train a run in this process; return its last state and its trainer."""
    allowed = Allowed.everything_in(spec)
    group = InProcessGroup(1, lr=0.7, momentum=0.5)
    trainer = Trainer(
        spec,
        group.member(0),
        TrainerOptions(device="cpu", allowed=allowed),
        corpus=corpus(),
        model=build_model(spec, 256, allowed, is_first=True),
    )
    before = trainer.evaluate(batches=1)
    for _ in range(rounds * spec.outer.inner_steps):
        trainer.step()
    assert trainer.statistics().position == rounds
    assert trainer.evaluate(batches=1) < before
    state = group.state_of(0)
    assert torch.equal(state.params_N, trainer.worker.synced_N)
    return state, trainer


def reopened(folder):
    """The model in a folder, as `transformers` loads it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    with torch.no_grad():
        return model, model(tokens()).logits


@torch.no_grad()
def logits(trained_):
    return logits_of(trained_.model.eval(), tokens())


def close(a, b):
    return torch.allclose(a, b, rtol=0, atol=2e-5) and a.abs().max() > 0.05


# --- models of transformers in a run


@pytest.mark.parametrize("name", TARGETS)
def test_a_model_of_transformers_trains_and_comes_back(name, custom, tmp_path):
    model = {"custom": custom(name)}
    state, _ = trained(spec_of(model=model))
    loaded = load_checkpoint(checkpoint_of(spec_of(model=model), state), allow_model=custom(name))
    expected = logits(loaded)
    export(loaded, tmp_path / "out")
    opened, found = reopened(tmp_path / "out")
    assert close(found, expected)

    # Its folder is what another run begins with, and adapts.
    base = str(tmp_path / "out")
    begun = first_state(
        again := spec_of(base, model=model | {"init": base}), Allowed.everything_in(again)
    )
    assert torch.equal(begun.params_N, Layout.of(opened).flatten(opened))
    lora = {"rank": 2, "targets": TARGETS[name]}
    adapted = spec_of(model=model | {"init": base, "lora": lora})
    state, trainer = trained(adapted)
    assert all("lora_" in each for each in state.layout.names)
    checkpoint = checkpoint_of(adapted, state)
    tuned = load_checkpoint(checkpoint, allow_model=custom(name), init=base)
    expected = logits(tuned)
    assert not close(expected, found)
    with torch.no_grad():
        assert close(logits_of(trainer.learner.model.eval(), tokens()), expected)
    export(tuned, tmp_path / "adapter", adapter=True)
    assert close(with_adapter(base, tmp_path / "adapter"), expected)
    export(tuned, tmp_path / "merged")
    assert close(reopened(tmp_path / "merged")[1], expected)


def test_a_custom_model_of_another_kind_is_not_exported(custom, tmp_path):
    spec = spec_of(model={"custom": custom("own")})
    loaded = load_checkpoint(checkpoint_of(spec), allow_model=custom("own"))
    with pytest.raises(ExportError, match="Sequential is no model of `transformers`"):
        export(loaded, tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))
    with pytest.raises(ModelError, match="--allow-model"):
        load_checkpoint(checkpoint_of(spec))


def test_frozen_parameters_come_from_the_owners_folder(custom, tmp_path):
    model = {"custom": custom("llama")}
    export(
        load_checkpoint(checkpoint_of(spec_of(model=model)), allow_model=custom("llama")),
        tmp_path / "base",
    )
    frozen = CUSTOM + (
        "\n\n@model\ndef frozen(*, vocab_size, seq_len):\n"
        "    whole = llama(vocab_size=vocab_size, seq_len=seq_len)\n"
        "    whole.model.embed_tokens.requires_grad_(False)\n"
        "    return whole\n"
    )
    (tmp_path / "frozen_models.py").write_text(frozen)
    base = str(tmp_path / "base")
    spec = spec_of(model={"custom": "frozen_models:frozen", "init": base})
    allowed = Allowed.everything_in(spec)
    model = build_model(spec, 256, allowed)
    theirs, _ = reopened(base)
    assert "model.embed_tokens.weight" not in Layout.of(model).names
    assert torch.equal(model.model.embed_tokens.weight, theirs.model.embed_tokens.weight)
    with pytest.raises(ModelError, match="--init PATH"):
        build_model(spec, 256, Allowed(models=allowed.models))


# --- the built-in model


@pytest.mark.parametrize("changes", [{}, {"tied": True, "num_kv_heads": 0}, {"num_kv_heads": 1}])
def test_the_decoder_computes_what_llama_computes(tmp_path, changes):
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = dataclasses.replace(SHAPE, **changes)
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.dim,
        intermediate_size=shape.ffn_dim,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.max_seq_len,
        rms_norm_eps=shape.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=shape.tied,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(config)
    for name, param in theirs.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(param, 0.5, 1.5)
    theirs.save_pretrained(tmp_path / "base")
    spec = spec_of(tmp_path / "base")
    with torch.no_grad():
        ours = build_model(spec, 256, Allowed.everything_in(spec), is_first=True)(tokens())
        assert close(ours, theirs(tokens()).logits)
    export(load_checkpoint(checkpoint_of(spec)), tmp_path / "out")
    opened, found = reopened(tmp_path / "out")
    assert type(opened) is LlamaForCausalLM and opened.config.tie_word_embeddings == shape.tied
    assert close(found, ours)


def test_a_preset_is_exported_with_a_tokenizer_of_bytes(tmp_path):
    from transformers import AutoTokenizer

    spec = spec_of(model={"overrides": {"dim": 32, "num_heads": 2, "ffn_dim": 48}})
    path = tmp_path / "checkpoint.safetensors"
    save_checkpoint(path, checkpoint_of(spec))
    out = tmp_path / "out"
    assert cli.main(["export", str(path), "--format", "hf", "--out", str(out)]) == 0
    opened, found = reopened(out)
    assert close(found, logits(load_checkpoint(path)))
    assert opened.config.max_position_embeddings == 16
    tokenizer = AutoTokenizer.from_pretrained(out)
    text = "def f(x):\n    return 'Grüße, 日本'\t# \x7f"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.eos_token_id == 0 == opened.config.eos_token_id
    before = (out / "config.json").read_text()
    assert cli.main(["export", str(path), "--out", str(out)]) == 2  # nothing is replaced
    assert (out / "config.json").read_text() == before


def test_the_stages_of_a_pipeline_become_one_llama(tmp_path):
    from transformers import LlamaForCausalLM

    save_stages(tmp_path / "checkpoints", staged_spec(), 4)
    export_stages(find(tmp_path / "checkpoints"), tmp_path / "out")
    opened, found = reopened(tmp_path / "out")
    assert type(opened) is LlamaForCausalLM and not opened.config.tie_word_embeddings
    assert close(found, logits(load_checkpoint(tmp_path / "checkpoints")))


def test_half_the_bytes_with_bfloat16(folder, tmp_path):
    loaded = load_checkpoint(checkpoint_of(spec_of(folder)), init=str(folder))
    expected = logits(loaded)
    export(loaded, tmp_path / "out", dtype="bfloat16")
    opened, found = reopened(tmp_path / "out")
    assert opened.dtype == torch.bfloat16 == found.dtype
    assert torch.allclose(found.float(), expected, atol=0.05)
    half = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert half < 0.6 * (folder / "model.safetensors").stat().st_size


def test_an_unfinished_export_leaves_nothing(folder, tmp_path, monkeypatch):
    loaded = load_checkpoint(checkpoint_of(spec_of(folder)), init=str(folder))
    monkeypatch.setattr("atoll.peer.training.hf.export.files_of", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export(loaded, tmp_path / "out")
    assert [each.name for each in tmp_path.iterdir()] == ["base"]
    with pytest.raises(ExportError, match="trained no adapters"):
        export(loaded, tmp_path / "out", adapter=True)


# --- adapters


def with_adapter(base, adapter):
    """The logits of a base with an adapter, as `peft` loads them."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(reopened(base)[0], adapter).eval()
    with torch.no_grad():
        return model(tokens()).logits


def adapted_spec(folder, **lora):
    return spec_of(folder, model={"init": str(folder), "lora": ADAPTERS | lora})


def test_only_adapters_are_trained_and_travel(folder):
    spec = adapted_spec(folder)
    begun = first_state(spec, Allowed.everything_in(spec))
    assert all(".lora_" in name for name in begun.layout.names)
    assert begun.layout.numel < 0.1 * sum(p.numel() for p in write_folder(folder).parameters())
    expect_params(spec, 256, begun.layout.numel)
    with pytest.raises(ModelError, match="as was claimed"):
        expect_params(spec, 256, begun.layout.numel + 1)
    assert Layout.of(bare_model(spec)) == begun.layout
    base = write_folder(folder)
    state, trainer = trained(spec)
    model = trainer.learner.model
    assert not torch.equal(state.params_N, begun.params_N)
    assert torch.equal(model.embedding.weight, base.embedding.weight)
    under = model.blocks[1].attention.qkv.base_layer.weight
    assert torch.equal(under, base.blocks[1].attention.qkv.weight)
    assert {p.requires_grad for p in model.parameters()} == {True, False}


def test_the_saved_state_of_adapters_is_small_and_resumes_exactly(folder, tmp_path):
    spec = adapted_spec(folder)

    def new():
        allowed = Allowed.everything_in(spec)
        return Trainer(
            spec,
            InProcessGroup(1, lr=0.7, momentum=0.5).member(0),
            TrainerOptions(device="cpu", allowed=allowed),
            corpus=corpus(),
            model=build_model(spec, 256, allowed),
        )

    one, two = new(), new()
    for _ in range(3):
        one.step()
    one.save(tmp_path / "trainer")
    weights = (folder / "model.safetensors").stat().st_size
    assert (tmp_path / "trainer").stat().st_size < 0.5 * weights  # with moments and residual
    two.load(tmp_path / "trainer")
    one.step(), two.step()
    parameters = (each.learner.model.state_dict() for each in (one, two))
    assert all(map(torch.equal, *(state.values() for state in parameters)))


def test_peers_draw_the_same_adapters_and_begin_as_the_base(folder):
    spec = adapted_spec(folder)
    before = torch.get_rng_state()
    one, two = (first_state(spec, Allowed.everything_in(spec)) for _ in range(2))
    assert one.root() == two.root()
    assert torch.equal(torch.get_rng_state(), before)
    model = build_model(spec, 256, Allowed.everything_in(spec))
    with torch.no_grad():
        assert torch.equal(model(tokens()), write_folder(folder)(tokens()))


@pytest.mark.parametrize("targets", [["qkv"], ["attention.out", "gate_up"], ["out"]])
def test_adapters_are_merged_or_kept_with_the_same_logits(folder, tmp_path, targets):
    spec = adapted_spec(folder, targets=targets)
    state = first_state(spec, Allowed.everything_in(spec))
    noise_N = 0.1 * torch.randn(state.layout.numel, generator=torch.Generator().manual_seed(1))
    checkpoint = checkpoint_of(spec, OuterState.genesis(state.layout, state.params_N + noise_N))
    loaded = load_checkpoint(checkpoint, init=str(folder))
    expected = logits(loaded)
    assert not close(expected, write_folder(folder)(tokens()))
    export(loaded, tmp_path / "adapter", adapter=True)
    assert close(with_adapter(folder, tmp_path / "adapter"), expected)
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(folder.resolve())
    export(loaded, tmp_path / "out")
    assert close(reopened(tmp_path / "out")[1], expected)
    with pytest.raises(ModelError, match="--init PATH"):
        load_checkpoint(checkpoint)


def test_a_target_without_a_layer_is_refused(folder, custom):
    for target in ("q_proj", "head", "norm"):
        spec = adapted_spec(folder, targets=[target])
        with pytest.raises(ModelError, match=f"no layer '{target}' for an adapter; expected qkv"):
            build_model(spec, 256, Allowed.everything_in(spec))
    lora = {"targets": ["qkv"]}
    spec = spec_of(model={"custom": custom("own"), "lora": lora})
    with pytest.raises(ModelError, match=r"no layer is named 'qkv'; the names end in 1"):
        build_model(spec, 256, Allowed.everything_in(spec))


def test_weights_of_gpt2_fit_without_the_prefix_of_its_base(custom, tmp_path):
    """As on the hub: the names of GPT-2's weights there lack `transformer.`."""
    spec = spec_of(model={"custom": custom("gpt2")})
    model = build_model(spec, 256, Allowed.everything_in(spec))
    from safetensors.torch import save_file

    tensors = {
        name.removeprefix("transformer."): 2 * each.detach()
        for name, each in model.named_parameters()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    expected = 2 * Layout.of(model).flatten(model)
    with WeightFolder(tmp_path) as folder:
        load_(model, folder)
    assert torch.equal(Layout.of(model).flatten(model), expected)
