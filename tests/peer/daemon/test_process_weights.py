"""Peers of a run that begins with weights: with a copy of them, and without."""

import dataclasses

import pytest

from atoll.optim.state.layout import Layout
from atoll.peer.daemon.consent import request_of
from atoll.peer.errors import ModelError
from atoll.peer.training import opening
from atoll.peer.training.hf.folder import weights_digest
from support.weights import SHAPE, spec_of, write_folder


def run_of(kit, folder, **model):
    spec = spec_of(folder, model={"init": str(folder)} | model)
    tiny = kit.tiny_spec(round={"min_peers": 1})
    model = spec.model.model_copy(update={"init_sha256": weights_digest(folder)})
    return tiny.model_copy(update={"model": model})


@pytest.fixture
def base(tmp_path):
    write_folder(tmp_path / "base")
    return tmp_path / "base"


def test_peers_begin_with_the_weights_that_the_run_names(organise, kit, start, base, monkeypatch):
    organiser = organise(run_of(kit, base))
    built = []
    honest = opening.first_state
    monkeypatch.setattr(
        "atoll.peer.daemon.process.first_state",
        lambda *args, **options: built.append(honest(*args, **options)) or built[-1],
    )
    copy = base.rename(base.with_name("copy"))  # of another owner, under another name
    assert start(organiser.invite, "with", init=str(copy)).join() is True
    root = organiser.up.coordinator.log.replica.store.load_snapshot(0).root()
    assert [state.root() for state in built] == [root]


@pytest.mark.exhaustive
def test_a_peer_without_the_weights_fetches_the_first_state(organise, kit, start, base):
    organiser = organise(run_of(kit, base))
    daemon = start(organiser.invite)
    assert daemon.join() is True
    (peer,) = organiser.status().peers
    assert peer.state_digest == organiser.up.coordinator.log.replica.state.root().hex()


def test_the_owner_is_told_of_the_weights(kit, base):
    layout = Layout(names=("a",), shapes=((10**6,),))
    plain = request_of(run_of(kit, base), layout).lines
    model = next(line for line in plain if line.startswith("model: "))
    assert f"Llama family, built in; begins with the weights {base} (SHA-256 " in model
    folder = base.with_name("wide")  # 7.7M values beneath, 4 bytes each
    write_folder(folder, dataclasses.replace(SHAPE, num_layers=1, ffn_dim=80_000))
    adapted = request_of(run_of(kit, folder, lora={"rank": 2}), layout).lines
    assert any("only adapters of rank 2 are trained, on your copy" in line for line in adapted)
    told = [next(each for each in lines if "memory: " in each) for lines in (plain, adapted)]
    assert told[0].startswith("memory: about 780 MB")
    assert told[1].startswith("memory: about 811 MB")


def test_a_peer_without_the_weights_beneath_adapters_is_refused(organise, kit, start, base):
    pytest.importorskip("peft")
    organiser = organise(run_of(kit, base, lora={"rank": 2}))
    with pytest.raises(ModelError, match="name your copy with --init PATH"):
        start(organiser.invite).join()
    other = base.with_name("other")
    write_folder(other, seed=1)
    with pytest.raises(ModelError, match="are not the run's: expected the SHA-256"):
        start(organiser.invite, "other", init=str(other)).join()
