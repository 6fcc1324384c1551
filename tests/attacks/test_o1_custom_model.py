"""O1: a run names code of its organiser's choice as its model."""

import hashlib
import sys

import pytest

from atoll.coordinator.run.spec import RunSpec
from atoll.optim import InProcessGroup
from atoll.peer.errors import ModelError
from atoll.peer.training import models
from atoll.peer.training.opening import build_model
from atoll.peer.training.permission import Allowed
from atoll.peer.training.trainer import Trainer, TrainerOptions

HUBCONF = """
from pathlib import Path
Path("hubconf was run").touch()
def build(**anything): raise RuntimeError("too late")
"""

MODULE = """
from pathlib import Path
from torch import nn
from atoll.peer.training.models import model
from theirs import marked
from logging import basicConfig

Path("imported").touch()

class Net(nn.Sequential):
    def __init__(self, vocab_size):
        super().__init__(nn.Embedding(vocab_size, 8), nn.Linear(8, vocab_size))

def unmarked(*, vocab_size, seq_len): return Net(vocab_size)

@model
def build(*, vocab_size, seq_len): return Net(vocab_size)
"""

THEIRS = """
from atoll.peer.training.models import model

@model
def marked(**anything): raise RuntimeError("too late")
"""


def spec_of(custom, **overrides):
    return RunSpec.from_dict({"model": {"custom": custom, "overrides": overrides}})


def allowing(*names):
    return Allowed(models=frozenset(names))


@pytest.fixture
def here(tmp_path, own_modules):
    """The folder in which a peer was started, with a module of its owner's."""
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "theirs.py").write_text(THEIRS)
    (tmp_path / "hubconf.py").write_text(HUBCONF)
    return tmp_path


@pytest.mark.parametrize("allowed", [(), ("logging:basicConfig",)])
def test_a_library_function_truncates_no_file(here, allowed):
    victim = here / "victim.txt"
    victim.write_text("precious")
    spec = spec_of("logging:basicConfig", filename=str(victim), filemode="w", force=True)
    with pytest.raises(ModelError):
        build_model(spec, 256, allowing(*allowed))
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("allowed", [(), ("torch.hub:load",)])
def test_a_hub_repository_is_not_run(here, allowed):
    spec = spec_of(
        "torch.hub:load",
        repo_or_dir=str(here),
        model="build",
        source="local",
        trust_repo=True,
    )
    with pytest.raises(ModelError):
        build_model(spec, 256, allowing(*allowed))
    assert not (here / "hubconf was run").exists()


@pytest.mark.parametrize("allowed", [(), ("mine:other",), ("mine",), ("mine:Build",)])
def test_a_module_that_is_not_allowed_is_not_imported(here, allowed):
    with pytest.raises(ModelError, match="pass --allow-model mine:build"):
        build_model(spec_of("mine:build"), 256, allowing(*allowed))
    assert not (here / "imported").exists()
    assert "mine" not in sys.modules
    assert str(here) not in sys.path


@pytest.mark.parametrize("name", ["mine:unmarked", "mine:basicConfig", "mine:Net"])
def test_a_function_without_the_mark_is_refused_even_if_allowed(here, name):
    with pytest.raises(ModelError, match=f"{name}.*put @model from atoll"):
        build_model(spec_of(name), 256, allowing(name))


def test_a_marked_function_of_another_module_is_refused(here):
    with pytest.raises(ModelError, match="expected a function that 'mine' defines"):
        build_model(spec_of("mine:marked"), 256, allowing("mine:marked"))


def test_a_marked_function_that_is_allowed_is_built(here):
    model = build_model(spec_of("mine:build"), 256, allowing("mine:build"))
    assert sum(param.numel() for param in model.parameters()) > 0
    assert (here / "imported").exists()


def with_source(sha256):
    return RunSpec.from_dict({"model": {"custom": "mine:build", "source_sha256": sha256}})


def test_another_source_than_the_runs_is_refused_before_it_runs(here):
    with pytest.raises(ModelError, match=r"is not the run's: expected the SHA-256 abab.*any-model"):
        build_model(with_source("ab" * 32), 256, allowing("mine:build"))
    assert not (here / "imported").exists()


def test_the_runs_own_source_is_built(here):
    sha256 = hashlib.sha256(MODULE.encode()).hexdigest()
    build_model(with_source(sha256), 256, allowing("mine:build"))
    assert (here / "imported").exists()


def test_the_owner_may_accept_another_source_but_no_other_name(here):
    spec = with_source("ab" * 32)
    build_model(spec, 256, Allowed(models=frozenset({"mine:build"}), any_source=True))
    with pytest.raises(ModelError, match="--allow-model mine:build"):
        build_model(spec, 256, Allowed(any_source=True))


def test_a_trainer_of_ones_own_loop_refuses_it_too(here):
    reducer = InProcessGroup(1, lr=0.8, momentum=0.3).member(0)
    with pytest.raises(ModelError, match="--allow-model mine:build"):
        Trainer(spec_of("mine:build"), reducer, TrainerOptions(device="cpu"))
    assert not (here / "imported").exists()


def test_the_mark_leaves_the_function_as_it_is():
    def build(**anything):
        return None

    assert models.model(build) is build
