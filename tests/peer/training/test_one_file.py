"""One safetensors file of what a run has trained, written stage after stage."""

import pytest
import safetensors
import torch
from safetensors.torch import load_file

from atoll.coordinator.checkpoint_sets import find
from atoll.coordinator.checkpoints import CheckpointError
from atoll.coordinator.run.spec import RunSpec
from atoll.peer.training.one_file import DTYPES, ExportError, export_parameters, write_tensors
from support.stages import save_stages, staged_spec


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_parameters_are_in_one_file(tmp_path, stages, dtype):
    spec = staged_spec(stages)
    states = save_stages(tmp_path / "checkpoints", spec, 4)
    out = tmp_path / "new" / "all.safetensors"
    export_parameters(find(tmp_path / "checkpoints"), out, dtype=dtype)
    tensors = load_file(out)
    expected = {
        name: piece
        for state in states.values()
        for name, piece in zip(state.layout.names, state.layout.split(state.params_N), strict=True)
    }
    assert set(tensors) == set(expected)
    assert all(torch.equal(tensors[n], expected[n].to(DTYPES[dtype])) for n in expected)
    with safetensors.safe_open(out, framework="pt") as file:
        said = file.metadata()
    assert RunSpec.from_json(said.pop("spec").encode()) == spec
    assert said == {"format": "pt", "position": "4"}
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def test_a_damaged_stage_leaves_no_file(tmp_path):
    save_stages(tmp_path, staged_spec(), 4)
    path = tmp_path / "stage-3" / "reef-00000004.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match=r"stage-3.*damaged"):
        export_parameters(find(tmp_path), tmp_path / "out" / "all")
    assert list((tmp_path / "out").iterdir()) == []


def test_what_exists_is_not_replaced(tmp_path):
    save_stages(tmp_path, staged_spec(), 4)
    out = tmp_path / "thesis"
    out.write_text("mine")
    with pytest.raises(ExportError, match="exists and was not changed"):
        export_parameters(find(tmp_path), out)
    assert out.read_text() == "mine"


def test_tensors_of_any_strides_are_written(tmp_path):
    whole = torch.arange(12.0).view(3, 4)
    given = {"turned": whole.T, "part": whole[:, 1], "scalar": torch.tensor(2.0)}
    shapes = {name: each.shape for name, each in given.items()}
    write_tensors(tmp_path / "a", shapes, given.items(), dtype="float32", metadata={"format": "pt"})
    found = load_file(tmp_path / "a")
    assert all(torch.equal(found[name], each) for name, each in given.items())


@pytest.mark.parametrize("given", [[], [("b", torch.zeros(2))], [("a", torch.zeros(3))]])
def test_other_tensors_than_the_header_says_are_an_error(tmp_path, given):
    with pytest.raises(ValueError):
        write_tensors(tmp_path / "a", {"a": (2,)}, given, dtype="float32", metadata={})
