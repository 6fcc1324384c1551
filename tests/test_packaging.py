"""pyproject.toml agrees with what is on disk, and the scripts are sound."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
FOLDERS = sorted(SETUPTOOLS["package-dir"].values())
SHELL_SCRIPTS = ["setup", "test", "demo", "bench", "typecheck", "../.ci/run"]


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def declared():
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"].values()
    lines = project["dependencies"] + [line for extra in extras for line in extra]
    return {normal(re.match(r"[\w.-]+", line)[0]) for line in lines}


# A dependency of torch for CUDA, which needs its own version of it; absent elsewhere.
WITH_TORCH = {"triton"}


def third_party_imports(folder):
    known = sys.stdlib_module_names | {"atoll"} | WITH_TORCH
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            yield from (top for name in names if (top := name.split(".")[0]) not in known)


def test_every_package_is_listed():
    on_disk = {
        "atoll." + ".".join(init.parent.relative_to(ROOT).parts)
        for folder in FOLDERS
        for init in (ROOT / folder).rglob("__init__.py")
    }
    assert on_disk == set(SETUPTOOLS["packages"])


def test_every_module_is_in_a_package():
    lost = [
        path.relative_to(ROOT).as_posix()
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if not (path.parent / "__init__.py").exists()
    ]
    assert lost == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_what_is_imported_is_a_declared_dependency(folder):
    owners = importlib.metadata.packages_distributions()
    missing = {
        name
        for name in third_party_imports(folder)
        if not {normal(owner) for owner in owners.get(name, [name])} & declared()
    }
    assert missing == set()


def test_protobuf_is_not_older_than_the_compiler_of_the_generated_code():
    made_with = {
        re.search(r"# Protobuf Python Version: ([\d.]+)", path.read_text(encoding="utf-8"))[1]
        for path in ROOT.glob("coordinator/rpc/*_pb2.py")
    }
    assert made_with
    wanted = {f"protobuf>={version}" for version in made_with}
    assert wanted <= set(PYPROJECT["project"]["dependencies"])


@pytest.mark.parametrize("folder", FOLDERS)
def test_packages_say_that_they_are_typed(folder):
    assert (ROOT / folder / "py.typed").exists()


def test_standard_library_survives_the_repository_root():
    # Python 3.14 has a package named compression; so does this folder.
    run = subprocess.run([sys.executable, "-c", "import gzip, bz2, lzma"], cwd=ROOT, timeout=60)
    assert run.returncode == 0


def test_no_module_of_compression_hides_one_of_the_standard_library():
    names = {path.stem for path in (ROOT / "compression").iterdir()}
    assert names.isdisjoint({"zlib", "gzip", "bz2", "lzma", "zstd"})


@pytest.mark.parametrize("name", SHELL_SCRIPTS)
def test_shell_scripts_are_strict_executable_and_parse(name):
    script = ROOT / "scripts" / name
    assert os.access(script, os.X_OK)
    assert "\nset -euo pipefail\n" in script.read_text(encoding="utf-8")
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=10)


def test_bench_lists_its_benchmarks_from_any_folder(tmp_path):
    bench = [str(ROOT / "scripts" / "bench")]
    run = subprocess.run(bench, cwd=tmp_path, capture_output=True, text=True, timeout=10)
    there = {path.stem.removeprefix("bench_") for path in (ROOT / "scripts").glob("bench_*.py")}
    assert run.returncode == 0
    assert there <= set(run.stdout.split())


def test_bench_refuses_an_unknown_name(tmp_path):
    bench = [str(ROOT / "scripts" / "bench"), "no-such-thing"]
    run = subprocess.run(bench, cwd=tmp_path, capture_output=True, text=True, timeout=10)
    assert run.returncode == 2
    assert "no benchmark 'no-such-thing'" in run.stderr


def test_setup_clears_no_environment_that_is_another_places(tmp_path):
    """A linked .venv, as in a second clone, is that of where the link leads."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "setup", tmp_path / "scripts" / "setup")
    for name in ("pyproject.toml", "constraints.txt", "constraints-cuda.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    theirs = tmp_path / "theirs"
    (theirs / "bin").mkdir(parents=True)
    (theirs / "bin" / "pip").write_text("of another place")
    (tmp_path / ".venv").symlink_to(theirs)
    found = subprocess.run(
        [str(tmp_path / "scripts" / "setup")], capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 1
    assert f".venv is a link to {theirs}, which setup would clear; remove the link" in found.stderr
    assert (theirs / "bin" / "pip").read_text() == "of another place"


def test_names_of_tests_fit_a_line():
    named = re.compile(r"def (test_\w{66,})")  # with `test_`: more than 70 characters
    long = [
        name for path in (ROOT / "tests").rglob("*.py") for name in named.findall(path.read_text())
    ]
    assert long == []


def test_no_page_holds_a_conflict():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    assert [page.name for page in pages if "\n<<<<<<< " in page.read_text(encoding="utf-8")] == []
