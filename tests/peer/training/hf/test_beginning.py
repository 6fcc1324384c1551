"""A run that begins with weights: its spec, its first state, and who may read the folder."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from atoll.coordinator.run.spec import RunSpec
from atoll.coordinator.run.spec_problems import SpecError
from atoll.optim.inprocess.rounds import InProcessGroup
from atoll.optim.state.layout import Layout
from atoll.peer.errors import ModelError
from atoll.peer.lab.plan import bare_model
from atoll.peer.training import digests
from atoll.peer.training.digests import with_digests
from atoll.peer.training.hf import llama
from atoll.peer.training.hf.beginning import load_, with_shape
from atoll.peer.training.hf.folder import WeightFolder, weights_digest
from atoll.peer.training.models import Decoder
from atoll.peer.training.opening import build_model, expect_params, first_state
from atoll.peer.training.permission import Allowed, options_for, with_own_files
from atoll.peer.training.trainer import Trainer, TrainerOptions
from support.weights import SHAPE, spec_of, write_folder


def flat(model):
    return Layout.of(model).flatten(model)


# --- the built-in model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [{}, {"tied": True, "num_kv_heads": 0}])
def test_weights_come_back_as_they_were(tmp_path, dtype, changes):
    shape = dataclasses.replace(SHAPE, **changes)
    original = write_folder(tmp_path / "base", shape, dtype=dtype)
    with WeightFolder(tmp_path / "base") as folder:
        assert llama.overrides_of(folder.config) == dataclasses.asdict(shape)
        read = Decoder(shape)
        load_(read, folder)
    assert torch.equal(flat(read), flat(original))


def test_query_and_key_rows_are_reordered_by_heads():
    rows = torch.arange(8.0)[:, None]  # two heads of four rows
    assert llama.neighbours(rows, 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert torch.equal(llama.halves(llama.neighbours(rows, 2), 2), rows)
    assert torch.equal(llama.neighbours(rows, 0), rows)


def test_a_config_of_an_older_transformers_is_read():
    config = llama.config_of(SHAPE)
    del config["rope_parameters"]
    assert llama.overrides_of(config | {"rope_scaling": None})["rope_theta"] == 5_000.0
    mistral = config | {"model_type": "mistral", "sliding_window": None}
    assert llama.overrides_of(mistral)["dim"] == SHAPE.dim


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model_type": "qwen2"}, "model_type 'qwen2', expected one of 'llama', 'mistral'"),
        ({"attention_bias": True}, "attention_bias = True, expected False"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"sliding_window": 4096}, "sliding_window = 4096, expected None"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu', expected 'silu'"),
        ({"head_dim": 16}, "head_dim = 16, expected hidden_size / heads = 8"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope_type = 'llama3'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "rope_type = 'linear'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"rope_parameters": [1]}, "expected an object"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": 0}, "hidden_size = 0, expected a positive integer"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers = '2'"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps = -1.0, expected a positive number"),
    ],
)
def test_a_model_that_the_decoder_cannot_hold_is_refused(change, told):
    with pytest.raises(ModelError) as refused:
        llama.overrides_of(llama.config_of(SHAPE) | change)
    assert told in str(refused.value)
    assert "train the class of `transformers` as a custom model" in str(refused.value)


def test_weights_of_another_model_are_refused(folder):
    tensors = load_file(folder / "model.safetensors")
    more = tensors | {"model.layers.2.mlp.up_proj.weight": torch.ones(1)}
    save_file(more, folder / "model.safetensors")
    with WeightFolder(folder) as open_, pytest.raises(ModelError, match=r"layers.2.*no place"):
        load_(Decoder(SHAPE), open_)
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    with WeightFolder(folder) as open_, pytest.raises(ModelError, match=r"lack 'model.norm.wei"):
        load_(Decoder(SHAPE), open_)


# --- a run


def test_a_run_begins_with_the_weights_of_the_folder(folder):
    original = write_folder(folder)
    spec = spec_of(folder)
    state = first_state(spec, Allowed.everything_in(spec))
    assert torch.equal(state.params_N, flat(original))
    model = build_model(spec, 256)  # without the folder: the run gives the parameters
    assert Layout.of(model) == state.layout
    assert not torch.equal(flat(model), state.params_N)
    expect_params(spec, 256, state.layout.numel)
    trainer = Trainer(
        spec,
        InProcessGroup(1, lr=0.7, momentum=0.5).member(0),
        TrainerOptions(device="cpu"),
        model=build_model(spec, 256, Allowed.everything_in(spec), is_first=True),
    )
    loss = trainer.evaluate(batches=2)
    trainer.run()
    assert trainer.finished and trainer.evaluate(batches=2) < loss


def test_the_first_start_fills_in_digest_and_shape(folder, tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("some text of the organiser " * 20)
    data = {"source": str(tmp_path / "text.txt"), "seq_len": 16}
    spec = RunSpec.from_dict({"model": {"init": str(folder)}, "data": data})
    filled = with_digests(spec, None)
    assert filled.model.init_sha256 == weights_digest(folder)
    assert filled.model.overrides == dataclasses.asdict(SHAPE)
    assert RunSpec.from_json(filled.canonical()) == filled
    assert bare_model(spec).config == SHAPE
    stated = RunSpec.from_dict(
        {"model": {"init": str(folder), "init_sha256": "ab" * 32}, "data": data}
    )
    monkeypatch.setattr(digests, "weights_digest", lambda init, say: "cd" * 32)
    with pytest.raises(ModelError, match=r"model.init_sha256 states another"):
        with_digests(stated, None)
    (folder / "model.safetensors").unlink()
    assert with_digests(spec, filled) == filled  # a restart reads nothing


def test_other_weights_than_the_runs_are_refused(folder, tmp_path):
    spec = spec_of(folder)
    model = spec.model.model_copy(update={"init_sha256": weights_digest(folder)})
    spec = spec.model_copy(update={"model": model})
    write_folder(tmp_path / "mine", seed=1)
    own = with_own_files(spec, data=None, tokenizer=None, init=str(tmp_path / "mine"))
    with pytest.raises(ModelError, match=r"mine' are not the run's: expected the SHA-256"):
        first_state(own, Allowed(files=frozenset({str(tmp_path / "mine")})))


def test_a_folder_is_read_only_if_the_owner_names_it(folder):
    spec = spec_of(folder)
    with pytest.raises(ModelError, match=r"has not named; name your copy with --init PATH"):
        first_state(spec, Allowed())
    Allowed().expect(spec)  # the first state can be fetched
    assert options_for(spec) == []
    adapted = spec_of(folder, model={"init": str(folder), "lora": {"rank": 2}})
    with pytest.raises(ModelError, match="--init PATH"):
        Allowed().expect(adapted)
    assert options_for(adapted) == ["--init PATH"]
    with pytest.raises(ModelError, match=r"begins with fresh parameters.*omit --init"):
        with_own_files(spec_of(), data=None, tokenizer=None, init=str(folder))


def test_overrides_that_contradict_the_folder_are_refused(folder):
    with pytest.raises(ModelError, match=r"sets dim=64, but config.json .* states 32; omit it"):
        spec_of(folder, model={"init": str(folder), "overrides": {"dim": 64}})
    shorter = spec_of(folder, model={"init": str(folder), "overrides": {"max_seq_len": 16}})
    assert build_model(shorter, 256).config.max_seq_len == 16
    assert with_shape(spec_of()) == spec_of()


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ({"init_sha256": "ab" * 32}, "is of the weights in model.init"),
        ({"lora": {"rank": 2}}, "adapts weights that exist"),
        ({"init": "x", "lora": {"rank": 0}}, "greater than or equal to 1"),
        ({"init": "x", "lora": {"targets": ["qkv", "qkv"]}}, "distinct names"),
        ({"init": "x", "lora": {"targets": [".*"]}}, "distinct names"),
        ({"init": "x", "lora": {"targets": []}}, "at least 1"),
        ({"init": "x", "lora": {"alpha": 0}}, "greater than 0"),
    ],
)
def test_sections_that_do_not_fit_are_refused(model, told):
    with pytest.raises(SpecError) as refused:
        RunSpec.from_dict({"model": model})
    assert told in str(refused.value)


def test_an_older_run_keeps_its_id():
    assert not {"init", "init_sha256", "lora"} & set(RunSpec().model_dump(mode="json")["model"])


# --- other models


class Custom(nn.Module):
    base_model_prefix = "inside"

    def __init__(self):
        super().__init__()
        self.inside = nn.ModuleDict({"embed": nn.Embedding(5, 3)})
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.inside.embed.weight
        self.register_buffer("table", torch.zeros(2))


@pytest.mark.parametrize("name", ["inside.embed.weight", "embed.weight", "head.weight"])
def test_tensors_go_to_the_parameters_of_their_names(tmp_path, name):
    values = torch.arange(15.0).view(5, 3)
    save_file(
        {name: values, "table": torch.ones(2), "layer.rotary_emb.inv_freq": torch.ones(1)},
        tmp_path / "model.safetensors",
    )
    model = Custom()
    with WeightFolder(tmp_path) as folder:
        load_(model, folder)
    assert torch.equal(model.head.weight, values) and model.table.tolist() == [1, 1]


def test_a_tensor_without_a_parameter_is_refused(tmp_path):
    tensors = {"embed.weight": torch.ones(5, 3), "table": torch.ones(2), "more": torch.ones(1)}
    save_file(tensors, tmp_path / "model.safetensors")
    with WeightFolder(tmp_path) as folder, pytest.raises(ModelError, match=r"'more'.*no place"):
        load_(Custom(), folder)


def test_config_json_is_what_transformers_reads():
    fields = json.loads(json.dumps(llama.config_of(SHAPE)))
    assert fields["architectures"] == ["LlamaForCausalLM"]
    assert fields["num_key_value_heads"] == 2 and fields["tie_word_embeddings"] is False
