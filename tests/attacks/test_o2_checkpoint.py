"""O2: a checkpoint names code, or a file, of its writer's choice in its metadata."""

import pytest
import torch

from atoll.coordinator.checkpoints import Checkpoint, save_checkpoint
from atoll.coordinator.run.spec import RunSpec
from atoll.optim.state.layout import Layout
from atoll.peer.cli import main as cli
from atoll.peer.errors import DataError, ModelError
from atoll.peer.training.sampling import sample
from support.weights import SHAPE, write_folder

HUBCONF = """
from pathlib import Path
Path("hubconf was run").touch()
def build(**anything): raise RuntimeError("too late")
"""


def write(path, **sections):
    spec = RunSpec.from_dict(sections)
    layout = Layout(names=("w",), shapes=((8,),))
    state = spec.method().genesis(layout, torch.zeros(8))
    save_checkpoint(
        path,
        Checkpoint(spec=spec, run_id=b"r" * 32, epoch=0, position=0, chain=b"c" * 32, state=state),
    )
    return path


@pytest.fixture
def evil(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hubconf.py").write_text(HUBCONF)
    overrides = {"repo_or_dir": ".", "model": "build", "source": "local", "trust_repo": True}
    model = {"custom": "torch.hub:load", "overrides": overrides}
    return write(tmp_path / "nice-model.safetensors", model=model)


@pytest.mark.parametrize(
    "command",
    [
        ("sample", "--prompt", "def ", "--device", "cpu"),
        ("export", "--format", "hf", "--out", "exported"),
        ("eval", "--data", "hubconf.py", "--device", "cpu"),
    ],
    ids=lambda command: command[0],
)
def test_no_command_runs_code_that_a_checkpoint_names(evil, capsys, command):
    name, *options = command
    assert cli.main([name, str(evil), *options]) == 2
    assert "pass --allow-model torch.hub:load" in capsys.readouterr().err
    assert not (evil.parent / "hubconf was run").exists()


@pytest.mark.parametrize("allowed", [(), ("torch.hub:load",)])
def test_the_library_runs_no_code_that_a_checkpoint_names(evil, allowed):
    with pytest.raises(ModelError):
        sample(evil, "def ", device="cpu", allow_models=allowed)
    assert not (evil.parent / "hubconf was run").exists()


def test_sample_reads_no_tokenizer_that_a_checkpoint_names(tmp_path, capsys):
    path = write(tmp_path / "a.safetensors", data={"tokenizer": "/etc/hostname"})
    with pytest.raises(DataError, match="name your copy with --tokenizer PATH"):
        sample(path, "def ", device="cpu")
    assert cli.main(["sample", str(path), "--device", "cpu"]) == 2
    assert "--tokenizer PATH" in capsys.readouterr().err


def test_a_checkpoint_of_another_size_builds_no_model(tmp_path):
    path = write(tmp_path / "a.safetensors", model={"overrides": {"num_layers": 10**9}})
    with pytest.raises(ModelError, match="expected a model of 8 parameters, as was claimed"):
        sample(path, "def ", device="cpu")


def adapters(path, **overrides):
    """A checkpoint of eight trained values, above weights of a size of its writer's choice."""
    lora = {"rank": 1, "targets": ["attention.out"]}
    model = {"init": "/etc", "lora": lora, "overrides": {"dim": 4, "num_heads": 1, **overrides}}
    return write(path, model=model)


def test_no_weights_that_a_checkpoint_names_are_read(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("atoll.peer.training.hf.folder._files_of", lambda path: 1 / 0)
    path = adapters(tmp_path / "a.safetensors", num_layers=1, vocab_size=10**12)
    for command in (["sample"], ["eval"], ["export", "--out", str(tmp_path / "out")]):
        assert cli.main([command[0], str(path), *command[1:]]) == 2
        assert "name your copy with --init PATH" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [{"vocab_size": 10**12}, {"max_seq_len": 10**12}])
def test_a_size_beneath_adapters_that_is_not_the_owners_is_refused(tmp_path, capsys, wrong):
    shape = {"dim": 4, "num_layers": 1, "num_heads": 1}
    write_folder(tmp_path / "base", type(SHAPE)(**shape, ffn_dim=8, vocab_size=256))
    path = adapters(tmp_path / "a.safetensors", num_layers=1, **wrong)
    assert cli.main(["sample", str(path), "--init", str(tmp_path / "base")]) == 2
    assert "but config.json in" in capsys.readouterr().err
