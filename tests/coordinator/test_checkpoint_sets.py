"""The files of a pipeline's stages: which belong together, and what is refused."""

import os
import shutil
import weakref

import pytest
import torch

from atoll.coordinator import checkpoint_sets
from atoll.coordinator.checkpoint_sets import find
from atoll.coordinator.checkpoints import CheckpointError, load_checkpoint
from support.stages import save_moment, save_stage, save_stages, staged_spec, trained_states

FILE = "reef-00000004.safetensors"


@pytest.fixture
def spec():
    return staged_spec()


def modules(found):
    return [header.path.parent.name for header in found.headers]


def test_any_stage_stands_for_all(tmp_path, spec, monkeypatch):
    states = save_stages(tmp_path, spec, 2, 4)
    for module in spec.modules:
        found = find(tmp_path / module / FILE)
        assert (found.spec, found.position) == (spec, 4)
        assert modules(found) == list(spec.modules) and found.is_pipeline
    monkeypatch.chdir(tmp_path / "stage-2")
    assert find(FILE).position == find(f"../stage-1/{FILE}").position == 4
    for header, state in zip(found.headers, states.values(), strict=True):
        assert found.read(header).state.root() == state.root()


def test_a_folder_means_the_newest_position_of_all_stages(tmp_path, spec):
    save_stages(tmp_path, spec, 2, 10, 4)
    save_stage(tmp_path, spec, "stage-2", trained_states(spec, 12)["stage-2"])
    assert find(tmp_path).position == find(tmp_path / "stage-3").position == 10
    assert find(tmp_path / "stage-1" / FILE).position == 4


def test_stages_of_one_moment_are_at_positions_of_their_own(tmp_path, spec):
    earlier = save_moment(tmp_path, spec, (31, 43, 60))
    later = save_moment(tmp_path, spec, (31, 44, 68))  # the first stage was held up
    found = find(tmp_path)
    assert (found.positions, found.position) == ((31, 44, 68), 68)
    for header, state in zip(found.headers, later.values(), strict=True):
        assert found.read(header).state.root() == state.root()
    # Any file stands for its moment; one of two moments for the later one.
    assert find(tmp_path / "stage-2" / "reef-00000043.safetensors").positions == (31, 43, 60)
    assert find(tmp_path / "stage-1" / "reef-00000031.safetensors").positions == (31, 44, 68)
    params = find(tmp_path / "stage-3" / "reef-00000060.safetensors").params()
    whole_N = torch.cat([piece.flatten() for _, piece in params])
    assert torch.equal(whole_N, torch.cat([state.params_N for state in earlier.values()]))
    (tmp_path / "stage-2" / "reef-00000044.safetensors").unlink()
    assert find(tmp_path).positions == (31, 43, 60)
    with pytest.raises(CheckpointError, match=r"that after rounds 31, 43 and 60, reef-00000060"):
        find(tmp_path / "stage-3" / "reef-00000068.safetensors")


@pytest.mark.parametrize(
    ("moment", "told"),
    [
        ({"stage-1": 4, "stage-2": 4}, "of stage-1, stage-2 alone, as a follower of these"),
        ({"stage-1": 4, "stage-2": "4", "stage-3": 4}, "damaged: expected positions from 0 on"),
        ({"stage-1": 4, "stage-2": -4, "stage-3": 4}, "damaged: expected positions from 0 on"),
        ({"stage-1": 5, "stage-2": 4, "stage-3": 4}, "after round 5, as .* says, got .* round 4"),
    ],
)
def test_a_moment_that_cannot_be_is_refused(tmp_path, spec, moment, told):
    state = trained_states(spec)["stage-1"]
    save_stages(tmp_path, spec, 4)
    path = save_stage(tmp_path, spec, "stage-1", state, moment=moment)
    with pytest.raises(CheckpointError, match=told):
        find(path)


def test_of_two_runs_in_a_folder_the_one_written_last_is_meant(tmp_path, spec):
    save_stages(tmp_path, spec, 9)
    other = staged_spec(run={"name": "atoll"})
    for module, state in trained_states(other, 2).items():
        path = save_stage(tmp_path, other, module, state)
        os.utime(path, ns=(1 << 61, 1 << 61))
    assert (find(tmp_path).spec.run.name, find(tmp_path).position) == ("atoll", 2)


def test_a_dense_run_has_a_set_of_one(tmp_path):
    dense = staged_spec(stages=1)
    save_stages(tmp_path, dense, 2, 4)
    found = find(tmp_path)
    assert [header.path.name for header in found.headers] == [FILE] and not found.is_pipeline
    assert find(tmp_path / "reef-00000002.safetensors").position == 2


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="expected a checkpoint"):
        find(tmp_path)


def test_a_stage_that_lacks_the_position_is_named(tmp_path, spec):
    save_stages(tmp_path, spec, 2, 4)
    (tmp_path / "stage-2" / FILE).unlink()
    with pytest.raises(CheckpointError, match=f"stage-2 has no {FILE}, which belongs to it") as e:
        find(tmp_path / "stage-3" / FILE)
    assert "stages is that after round 2, reef-00000002.safetensors of stage-3" in str(e.value)
    shutil.rmtree(tmp_path / "stage-1")
    told = r"stage-1 has no .* and stage-2 has no .*, which belong.* wait for the next"
    with pytest.raises(CheckpointError, match=told):
        find(tmp_path / "stage-3" / FILE)
    with pytest.raises(CheckpointError, match=r"stage-1 .*wait for the next checkpoint of all"):
        find(tmp_path)


def test_a_file_away_from_its_stage_is_refused(tmp_path, spec):
    save_stages(tmp_path, spec, 4)
    moved = shutil.copy(tmp_path / "stage-2" / FILE, tmp_path / "mine.safetensors")
    with pytest.raises(
        CheckpointError, match="one of 3 stages; expected it in a folder stage-1 to"
    ):
        find(moved)


@pytest.mark.parametrize(
    ("seed", "position", "told"),
    [
        (9, 4, "got one of run reef with spec [0-9a-f]{64}, after round 4"),
        (
            3,
            5,
            "after round 4, as .* says, got one of run reef with spec [0-9a-f]{64}, after round 5",
        ),
    ],
)
@pytest.mark.parametrize("stage", ["stage-1", "stage-2"])
def test_files_of_two_runs_or_rounds_are_not_mixed(tmp_path, spec, stage, seed, position, told):
    save_stages(tmp_path, spec, 4)
    (tmp_path / stage / FILE).unlink()
    other = staged_spec(run={"seed": seed})
    path = save_stage(tmp_path, other, stage, trained_states(other, position)[stage], file=FILE)
    with pytest.raises(CheckpointError, match=told) as refusal:
        find(tmp_path / "stage-3" / FILE)
    assert str(refusal.value).startswith(f"{path}: expected a checkpoint of run reef")


def test_where_the_run_was_organised_may_change(tmp_path, spec):
    save_stages(tmp_path, spec, 4)
    (tmp_path / "stage-2" / FILE).unlink()
    moved = staged_spec(coordinator={"checkpoint_every": 7})
    save_stage(tmp_path, moved, "stage-2", trained_states(moved, 4)["stage-2"])
    assert find(tmp_path).position == 4


@pytest.mark.parametrize(("source", "target"), [(1, 2), (3, 2), (2, 1), (2, 3)])
def test_a_stage_in_the_place_of_another_is_refused(tmp_path, spec, source, target):
    save_stages(tmp_path, spec, 4)
    path = tmp_path / f"stage-{target}" / FILE
    shutil.copy(tmp_path / f"stage-{source}" / FILE, path)
    with pytest.raises(CheckpointError, match="expected the slices of the model from") as refusal:
        find(tmp_path)
    assert "put the file of this stage there" in str(refusal.value)


def test_a_damaged_file_is_named(tmp_path, spec):
    save_stages(tmp_path, spec, 4)
    path = tmp_path / "stage-2" / FILE
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    found = find(tmp_path / "stage-1" / FILE)  # the header is whole
    with pytest.raises(CheckpointError, match=r"stage-2.*damaged: expected the state root"):
        list(found.params())
    path.write_bytes(raw[: len(raw) // 2])
    with pytest.raises(CheckpointError, match=r"stage-2.*not an intact safetensors file"):
        find(tmp_path / "stage-1" / FILE)


def test_a_file_that_is_replaced_meanwhile_is_not_mixed_in(tmp_path, spec):
    save_stages(tmp_path, spec, 4)
    found = find(tmp_path)
    path = tmp_path / "stage-2" / FILE
    path.unlink()
    save_stage(tmp_path, spec, "stage-2", trained_states(spec, 5)["stage-2"], file=FILE)
    with pytest.raises(CheckpointError, match=r"stage-2.*replaced meanwhile"):
        list(found.params())


def test_one_file_is_in_memory_at_a_time(tmp_path, spec, monkeypatch):
    states = save_stages(tmp_path, spec, 4)
    vectors = []

    def load(path):
        assert not any(kept() is not None for kept in vectors)
        loaded = load_checkpoint(path)
        vectors.append(weakref.ref(loaded.params_N))
        return loaded

    monkeypatch.setattr(checkpoint_sets, "load_checkpoint", load)
    pieces = find(tmp_path).params()
    name, piece = next(pieces)
    assert torch.equal(piece.flatten(), states["stage-1"].params_N[: piece.numel()])
    for name, piece in pieces:  # noqa: B007 - what a caller keeps from each turn
        pass
    assert len(vectors) == 3 and name == "slices.3.head.weight"
