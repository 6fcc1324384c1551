"""A peer's state directory: what it keeps of the stages of a pipeline."""

import pytest

from atoll.peer.daemon.state_directory import delete_others
from atoll.peer.paths import PeerPaths

MODULES = tuple(f"stage-{number}" for number in range(1, 13))


def filled(folder):
    """A directory with three stages, the run's other files, and something of its owner."""
    paths = PeerPaths(root=folder)
    for module in ("stage-1", "stage-11", "stage-12"):
        paths.log(module).mkdir()
        (paths.log(module) / "log.sqlite").touch()
        paths.trainer(module).touch()
        paths.trainer(module).with_name(f"{module}.0.fit.safetensors").touch()
    for path in (paths.run, paths.identity, folder / "stage-13.safetensors", folder / "stages.txt"):
        path.touch()
    return paths


def left(folder):
    return {path.name for path in folder.iterdir()}


def of(module):
    return {module, f"{module}.safetensors", f"{module}.0.fit.safetensors"}


OTHER = {"run.json", "identity.key", "stage-13.safetensors", "stages.txt"}


@pytest.mark.parametrize("module", ["stage-1", "stage-12"])
def test_only_the_files_of_the_runs_other_modules_are_deleted(tmp_path, module):
    delete_others(filled(tmp_path), MODULES, module)
    assert left(tmp_path) == of(module) | OTHER
    assert (tmp_path / module / "log.sqlite").exists()


def test_a_process_killed_while_it_deletes_leaves_the_rest_to_the_next(tmp_path):
    paths = filled(tmp_path)
    (paths.log("stage-12") / "log.sqlite").unlink()
    paths.trainer("stage-11").unlink()
    delete_others(paths, MODULES, "stage-1")
    assert left(tmp_path) == of("stage-1") | OTHER
