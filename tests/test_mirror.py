"""Tests mirror the product: `tests/optim/log/test_replica.py` tests `optim/log/replica.py`.

A folder of tests has the name of a package, or is `scripts`. A file in it is `test_MODULE.py` or
`test_MODULE_ASPECT.py`. Files in `tests` itself are about the repository as a whole, and those in
`tests/attacks` have the numbers of attacks, which docs/security.md lists. Those in `tests/cuda`
need a GPU, whatever they test.
"""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
ELSEWHERE = {"attacks", "cuda", "support"}

# Files that no single module accounts for, each list with its reason.
ACROSS = {
    "every codec, of whatever module": [
        "compression/test_codecs.py",
        "compression/test_properties.py",
        "compression/test_references.py",
        "compression/test_rows.py",
        "compression/test_unbiased.py",
        "compression/test_vectors.py",
    ],
    "every method": ["optim/methods/test_methods.py"],
    "whole rounds: leader, members, electors and all-reduce": [
        "peer/rounds/test_cancelling.py",
        "peer/rounds/test_counts.py",
        "peer/rounds/test_fault_table.py",
        "peer/rounds/test_keepers.py",
        "peer/rounds/test_layers_in_rounds.py",
        "peer/rounds/test_methods_in_rounds.py",
        "peer/rounds/test_seven_billion.py",
        "peer/rounds/test_strikes.py",
        "peer/rounds/test_swarm.py",
        "peer/rounds/consensus/test_leaving.py",
    ],
    "model checks of several machines together": [
        "peer/rounds/consensus/test_joint_check.py",
        "peer/rounds/consensus/test_liars_check.py",
        "peer/rounds/consensus/test_model_check.py",
    ],
    "the coordinator's side of one role: invites, epochs and status": [
        "coordinator/test_keepers.py",
    ],
    "`transformers` and `peft`, which take seconds to import": [
        "peer/training/hf/test_transformers.py"
    ],
    "the lab's commands from end to end": [
        "peer/lab/test_ending.py",
        "peer/lab/test_simulated_churn.py",
        "peer/lab/test_simulated_windows.py",
    ],
}
EXCUSED = {path for paths in ACROSS.values() for path in paths}


def mirrored():
    """Every test file that should have a counterpart."""
    for path in sorted(TESTS.rglob("test_*.py")):
        inside = path.relative_to(TESTS)
        if len(inside.parts) > 1 and inside.parts[0] not in ELSEWHERE:
            yield inside


def names_a_module(test, folder):
    """Whether a test's name is that of a module in the folder, or begins with one."""
    name = test.stem.removeprefix("test_")
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    return any(f"{name}_".startswith(f"{module}_") for module in modules)


def test_folders_of_tests_are_those_of_packages():
    folders = {inside.parent for inside in mirrored()} - {Path("scripts")}
    strangers = [folder for folder in folders if not (ROOT / folder / "__init__.py").exists()]
    assert strangers == []


def test_tests_have_the_names_of_modules():
    nameless = {
        inside.as_posix()
        for inside in mirrored()
        if not names_a_module(inside, ROOT / inside.parent)
    }
    assert nameless == EXCUSED


@pytest.mark.parametrize(
    ("test", "fits"),
    [("test_replica.py", True), ("test_replica_disk.py", True), ("test_replicas.py", False)],
)
def test_a_name_fits_a_whole_module_name(tmp_path, test, fits):
    (tmp_path / "replica.py").touch()
    (tmp_path / "__init__.py").touch()
    assert names_a_module(Path(test), tmp_path) is fits
