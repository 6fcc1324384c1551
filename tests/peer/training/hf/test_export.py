"""A pipeline as a folder of Hugging Face, without `transformers`; test_transformers.py opens it."""

import json

import pytest
import torch
from safetensors.torch import load_file

from atoll.coordinator.checkpoint_sets import find
from atoll.coordinator.checkpoints import CheckpointError
from atoll.peer.training.hf import llama
from atoll.peer.training.hf.export import export, export_stages
from atoll.peer.training.hf.folder import WeightFolder
from atoll.peer.training.models import Decoder, logits_of, preset
from atoll.peer.training.one_file import ExportError
from atoll.peer.training.trained import load_checkpoint
from support.stages import save_stages, staged_spec

TOKENS_BT = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))


def test_the_slices_become_the_decoder_of_the_preset(tmp_path):
    spec = staged_spec(
        model={
            "overrides": {
                "dim": 16,
                "num_layers": 3,
                "num_heads": 4,
                "num_kv_heads": 2,
                "ffn_dim": 24,
            }
        }
    )
    save_stages(tmp_path / "checkpoints", spec, 4)
    export_stages(find(tmp_path / "checkpoints"), tmp_path / "out")
    trained = load_checkpoint(tmp_path / "checkpoints")
    config = preset("nano", spec.model.overrides | {"tied": False}, vocab_size=256, seq_len=16)
    decoder = Decoder(config)
    with WeightFolder(tmp_path / "out") as folder:
        llama.load_(decoder, folder)
    with torch.no_grad():
        expected = logits_of(trained.model, TOKENS_BT)
        assert torch.allclose(decoder(TOKENS_BT), expected, atol=1e-6)
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert fields["tie_word_embeddings"] is False and fields["num_hidden_layers"] == 3
    assert (tmp_path / "out" / "tokenizer.json").exists()

    export(trained, tmp_path / "again")  # from the model in memory
    streamed = load_file(tmp_path / "out" / "model.safetensors")
    held = load_file(tmp_path / "again" / "model.safetensors")
    assert set(streamed) == set(held)
    assert all(torch.equal(streamed[name], held[name]) for name in held)


def test_a_damaged_stage_leaves_no_folder(tmp_path):
    save_stages(tmp_path / "checkpoints", staged_spec(), 4)
    path = tmp_path / "checkpoints" / "stage-2" / "reef-00000004.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"stage-2.*damaged"):
        export_stages(find(tmp_path / "checkpoints"), tmp_path / "out")
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoints"]


def test_slices_of_a_custom_model_have_no_such_form(tmp_path, monkeypatch):
    (tmp_path / "cut_models.py").write_text(
        "from functools import partial\nfrom torch import nn\n"
        "from atoll.peer.training.models import model\n\n\n"
        "@model(slices=True)\ndef build(*, vocab_size, seq_len):\n"
        "    first = partial(nn.Embedding, vocab_size, 8)\n"
        "    return [first, partial(nn.Linear, 8, 8), partial(nn.Linear, 8, vocab_size)]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    spec = staged_spec(model={"custom": "cut_models:build", "overrides": {}})
    save_stages(tmp_path / "checkpoints", spec, 4)
    with pytest.raises(ExportError, match=r"are no model of `transformers`.* --format safetensors"):
        export_stages(find(tmp_path / "checkpoints"), tmp_path / "out")
    with pytest.raises(ExportError, match="are no model of `transformers`"):
        export(
            load_checkpoint(tmp_path / "checkpoints", allow_model="cut_models:build"),
            tmp_path / "out",
        )
    assert not list(tmp_path.glob("*out*"))
