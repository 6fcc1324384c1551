"""A peer's state directory: what it keeps of the stages of a pipeline."""

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


OTHER = {"run.json", "identity.key", "stage-13.safetensors", "stages.txt"}
SERVED = {"stage-1", "stage-1.safetensors", "stage-1.0.fit.safetensors"}


def test_only_the_files_of_the_runs_other_modules_are_deleted(tmp_path):
    delete_others(filled(tmp_path), MODULES, "stage-1")
    assert left(tmp_path) == SERVED | OTHER
    assert (tmp_path / "stage-1" / "log.sqlite").exists()


def test_a_process_killed_while_it_deletes_leaves_the_rest_to_the_next(tmp_path):
    paths = filled(tmp_path)
    (paths.log("stage-12") / "log.sqlite").unlink()
    paths.trainer("stage-11").unlink()
    delete_others(paths, MODULES, "stage-1")
    assert left(tmp_path) == SERVED | OTHER
