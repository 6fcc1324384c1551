"""The model of a checkpoint: of a pipeline it is put together from the files of its stages."""

import pytest
import torch

from atoll.coordinator.checkpoint_sets import find
from atoll.coordinator.checkpoints import CheckpointError
from atoll.optim import inner
from atoll.optim.state.layout import Layout
from atoll.peer.errors import ModelError
from atoll.peer.training import models
from atoll.peer.training.bits import held_out, measure
from atoll.peer.training.devices import Device
from atoll.peer.training.local_pipeline import LocalPipeline
from atoll.peer.training.opening import build_stage, slices_of
from atoll.peer.training.permission import Allowed
from atoll.peer.training.sampling import SamplingOptions, sample
from atoll.peer.training.stage_compute import StageCompute
from atoll.peer.training.stages import StageModel
from atoll.peer.training.trained import load_checkpoint
from support.stages import save_stage, save_stages, staged_spec, trained_states

CPU = Device.choose("cpu")
FILE = "reef-00000004.safetensors"
CUSTOM = """
from functools import partial
from torch import nn
from atoll.peer.training.models import model


@model(slices=True)
def build(*, vocab_size, seq_len):
    inner = [partial(nn.Linear, 8, 8)] * 2
    return [partial(nn.Embedding, vocab_size, 8), *inner, partial(nn.Linear, 8, vocab_size)]
"""


def stages_of(spec, states):
    """The stages as peers hold them."""
    stages = []
    for module, state in states.items():
        stages.append(build_stage(spec, module, 256, Allowed()))
        state.layout.load_(stages[-1], state.params_N)
    return [StageCompute(each, CPU) for each in stages]


def tokens(batch=2, seed=0):
    return torch.randint(256, (batch, 17), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_pipeline_gives_the_model_in_one_piece(tmp_path, stages):
    spec = staged_spec(stages)
    states = save_stages(tmp_path, spec, 4)
    trained = load_checkpoint(tmp_path / spec.modules[-1] / FILE)
    assert (trained.position, trained.spec) == (4, spec)
    assert isinstance(trained.model, StageModel)
    assert trained.model.is_first and trained.model.is_last and len(trained.model.slices) == 4
    expected_N = torch.cat([state.params_N for state in states.values()])
    assert torch.equal(Layout.of(trained.model).flatten(trained.model), expected_N)
    batch = tokens()
    loss = models.loss_of(trained.model, batch[:, :-1], batch[:, 1:])
    assert loss.item() == pytest.approx(
        LocalPipeline(stages_of(spec, states), []).evaluate([batch]), rel=1e-6
    )
    assert models.logits_of(trained.model, batch[:, :-1]).shape == (2, 16, 256)


def test_what_a_pipeline_has_learned_is_measured(tmp_path):
    spec = staged_spec()
    states = trained_states(spec)
    computes = stages_of(spec, states)
    optimizers = [inner.build("adamw", each.model, lr=1e-2, fused=True) for each in computes]
    pipeline = LocalPipeline(computes, optimizers)
    text_BT = torch.frombuffer(bytearray(b"coral reef atoll " * 2), dtype=torch.uint8)[None, :17]
    for _ in range(40):
        pipeline.step([text_BT.long()])
    for (module, state), compute in zip(states.items(), computes, strict=True):
        state.params_N.copy_(state.layout.flatten(compute.model))
        save_stage(tmp_path, spec, module, state)
    trained = load_checkpoint(tmp_path)
    found = measure(trained.model, trained.tokenizer, [text_BT.long()], device=CPU)
    assert found.loss == pytest.approx(pipeline.evaluate([text_BT.long()]), rel=1e-5)
    assert found.loss < 0.5
    options = SamplingOptions(max_tokens=9, temperature=0)
    assert "".join(sample(tmp_path, "coral re", options, device="cpu")) == "ef atoll "


def test_the_text_that_a_pipeline_holds_out_is_the_runs(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the closed ring of a low coral island; " * 100)
    spec = staged_spec(data={"source": str(path)})
    save_stages(tmp_path, spec, 4)
    trained = load_checkpoint(tmp_path)
    assert held_out(trained, data=str(path), tokenizer=None, tokens=64).batches[0].shape == (2, 17)


def test_a_checkpoint_of_one_stage_is_no_model(tmp_path):
    save_stages(tmp_path, staged_spec(), 4)
    found = find(tmp_path)
    with pytest.raises(ModelError, match="of one stage is not a model; give the path"):
        load_checkpoint(found.read(found.headers[1]))


def test_slices_of_your_own_are_built_if_you_allow_them(tmp_path, monkeypatch):
    (tmp_path / "own_slices.py").write_text(CUSTOM)
    monkeypatch.syspath_prepend(tmp_path)
    spec = staged_spec(model={"custom": "own_slices:build", "overrides": {}})
    states = save_stages(tmp_path, spec, 4)
    with pytest.raises(ModelError, match="--allow-model"):
        load_checkpoint(tmp_path)
    model = load_checkpoint(tmp_path, allow_model="own_slices:build").model
    expected_N = torch.cat([state.params_N for state in states.values()])
    assert torch.equal(Layout.of(model).flatten(model), expected_N)


def test_parameters_of_another_model_are_refused_before_it_is_built(tmp_path, monkeypatch):
    spec = staged_spec()
    states = trained_states(spec)
    claimed = staged_spec(model={"overrides": {"dim": 4096, "num_layers": 2, "num_heads": 2}})
    for module, state in states.items():
        save_stage(tmp_path, claimed, module, state)
    monkeypatch.setattr("atoll.peer.training.stages.Slices.build", lambda *a, **k: 1 / 0)
    with pytest.raises(
        ModelError, match=r"stage-1.*expected the [\d,]+ parameters of stage-1, got"
    ):
        load_checkpoint(tmp_path)


def test_a_stage_that_is_cut_elsewhere_is_refused(tmp_path):
    spec = staged_spec(stages=2)
    known = slices_of(spec, 256, Allowed())
    assert len(known.cut(2)[0]) > 1
    for module, indices in (("stage-1", range(1)), ("stage-2", range(1, 4))):
        state = trained_states(spec)[module]
        layout = known.layout(indices)
        moved = type(state).blank(layout, 4)
        save_stage(tmp_path, spec, module, moved)
    with pytest.raises(ModelError, match="that are not those"):
        load_checkpoint(tmp_path)


def test_a_damaged_stage_is_named(tmp_path):
    save_stages(tmp_path, staged_spec(), 4)
    path = tmp_path / "stage-2" / FILE
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"stage-2.*damaged"):
        load_checkpoint(tmp_path)
