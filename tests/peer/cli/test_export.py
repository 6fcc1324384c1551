"""`atoll export`: a pipeline's stages in one folder or file, and options that are refused."""

import json

from safetensors.torch import load_file

from support.commands import refused
from support.stages import save_stages, staged_spec


def test_the_stages_of_a_pipeline_are_put_together(atoll, tmp_path):
    states = save_stages(tmp_path / "checkpoints", staged_spec(), 2, 4)
    done = atoll("export", "checkpoints", "--out", "model", "--dtype", "bfloat16")
    assert (done.code, done.err) == (0, "model: model after round 4\n")
    fields = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (fields["model_type"], fields["dtype"]) == ("llama", "bfloat16")
    stage = "checkpoints/stage-2/reef-00000002.safetensors"
    done = atoll("export", stage, "--format", "safetensors", "--out", "all")
    assert (done.code, done.err) == (0, "all: model after round 2\n")
    names = [name for state in states.values() for name in state.layout.names]
    assert sorted(load_file(tmp_path / "all")) == sorted(names)
    assert "exists and was not changed" in refused(atoll("export", stage, "--out", "all"))


def test_adapters_are_of_runs_that_train_some(atoll, tmp_path):
    save_stages(tmp_path, staged_spec(), 4)
    assert "--adapter is for a run with" in refused(atoll("export", ".", "--adapter", "--out", "a"))


def test_a_missing_stage_is_named(atoll, tmp_path):
    save_stages(tmp_path, staged_spec(), 2, 4)
    (tmp_path / "stage-3" / "reef-00000004.safetensors").unlink()
    told = refused(atoll("export", "stage-1/reef-00000004.safetensors", "--out", "a"))
    assert "stage-3 has no reef-00000004.safetensors" in told and "after round 2" in told


def test_a_repository_is_checked_before_anything_is_computed(atoll, tmp_path):
    save_stages(tmp_path / "checkpoints", staged_spec(), 4)
    told = refused(atoll("export", "checkpoints", "--out", "model", "--push", "nowhere"))
    assert "expected OWNER/NAME" in told
    assert "--push, or omit it" in refused(atoll("export", "checkpoints", "--out", "m", "--public"))
    assert not (tmp_path / "model").exists()
