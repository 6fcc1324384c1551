"""The model of a run, as a training loop of one's own builds it."""

import types

import pytest

from atoll.coordinator.run.spec import RunSpec
from atoll.peer.daemon.beside import trainer_side
from atoll.peer.errors import DataError, ModelError, SetupError
from atoll.peer.training import opening


def test_the_model_of_a_run_is_built_from_its_spec(seats):
    sizes = {"dim": 16, "num_layers": 1, "num_heads": 2, "ffn_dim": 32}
    spec = RunSpec.from_dict({"model": {"overrides": sizes}})
    model = seats(spec=spec).reducer.build_model()
    assert model.embedding.weight.shape == (256, 16)


def test_code_and_files_that_a_spec_names_need_the_caller(seats):
    custom = RunSpec.from_dict({"model": {"custom": "absent_module:build"}})
    with pytest.raises(ModelError, match="absent_module:build"):
        seats(spec=custom).reducer.build_model()
    with pytest.raises(ModelError, match="cannot import 'absent_module'"):
        seats(spec=custom).reducer.build_model(allow_model="absent_module:build")
    tokens = RunSpec.from_dict({"data": {"tokenizer": "/absent/tokenizer.json"}})
    with pytest.raises(DataError, match=r"build_model\(tokenizer=PATH\)"):
        seats(spec=tokens).reducer.build_model()
    with pytest.raises(SetupError, match=r"mine\.json"):  # allowed: the one that is here is opened
        seats(spec=tokens).reducer.build_model(tokenizer="mine.json")


def test_a_tokenizer_that_travels_with_the_run_is_fetched(seats, tmp_path, monkeypatch):
    kept = tmp_path / "tokenizer.json"
    sizes = {"dim": 16, "num_layers": 1, "num_heads": 2, "ffn_dim": 32}
    sent = {"tokenizer": "/theirs/t.json", "tokenizer_sha256": "0" * 64, "tokenizer_bytes": 5}
    each = seats(spec=RunSpec.from_dict({"model": {"overrides": sizes}, "data": sent}))

    async def fetch():
        return kept

    def opened(spec, allowed):
        allowed.expect_tokenizer(spec)
        assert spec.data.tokenizer == str(kept)
        return types.SimpleNamespace(vocab_size=300)

    each.bench.thread.value = types.SimpleNamespace(fetch_tokenizer=fetch)
    monkeypatch.setattr(opening, "open_tokenizer", opened)
    monkeypatch.setattr(trainer_side, "extra", lambda module, what: None)
    assert each.reducer.build_model().embedding.weight.shape == (300, 16)


def test_a_model_of_another_source_is_built_only_if_the_caller_says(seats, tmp_path, monkeypatch):
    (tmp_path / "own_source.py").write_text(
        "from torch import nn\nfrom atoll.peer.training.models import model\n"
        "@model(tokens=False)\ndef build(): return nn.Linear(2, 1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    name = "own_source:build"
    spec = RunSpec.from_dict({"model": {"custom": name, "source_sha256": "0" * 64}})
    with pytest.raises(ModelError, match="not the run's: expected the SHA-256 000000000000"):
        seats(spec=spec).reducer.build_model(allow_model=name)
    assert seats(spec=spec).reducer.build_model(allow_model=name, any_source=True).in_features == 2
