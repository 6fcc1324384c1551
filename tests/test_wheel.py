"""A wheel holds every file, and works in a new environment away from the repository."""

import json
import shutil
import subprocess
import sys
import sysconfig
import time
import zipfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

ON_CUDA = "atoll.compression.kernels.triton_kernels"  # Triton comes with torch for CUDA
ROOT = Path(__file__).parents[1]
FOLDERS = ("compression", "coordinator", "dht", "optim", "peer")
SHIPPED = {".json", ".py", ".pyi", ".proto", ".tcss", ".typed"}


def run(*command, **options):
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=90, **options
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy: a build leaves files beside its source, which later ones would pick up."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source]
    run(*pip, *build)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """A new environment with the wheel; torch and the like come from the running one."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel)
    site = json.loads(
        run(python, "-c", "import json, sysconfig; print(json.dumps(sysconfig.get_paths()))")
    )
    # A folder on the path by way of a .pth file has its own .pth files ignored, so the
    # editable install of the running environment stays out of sight.
    lent = Path(site["purelib"]) / "lent.pth"
    lent.write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
    return folder


def modules():
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(("atoll", *parts)).removesuffix(".__init__")


def test_the_wheel_has_every_file_and_nothing_else(wheel):
    on_disk = {
        f"atoll/{path.relative_to(ROOT).as_posix()}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.suffix in SHIPPED
    }
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert packed == on_disk


def test_the_wheel_brings_its_licence(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (licence,) = [name for name in archive.namelist() if name.endswith("/LICENSE")]
        assert "Apache License" in archive.read(licence).decode()


def test_every_module_is_imported_from_the_wheel(environment, tmp_path):
    names = set(modules()) - (set() if find_spec("triton") else {ON_CUDA})
    script = tmp_path / "import_all.py"
    script.write_text(
        "import importlib, sys, warnings\n"
        "importlib.import_module('atoll.dht.bindings')\n"
        "assert 'scipy.linalg' not in sys.modules, 'SciPy, which only slows the start'\n"
        "from hivemind.averaging.load_balancing import load_balance_peers\n"
        "assert load_balance_peers(100, [1.0, 1.0]) == (50, 50), 'hivemind lacks SciPy'\n"
        f"for name in {sorted(names)!r}:\n"
        "    module = importlib.import_module(name)\n"
        f"    assert module.__file__.startswith({str(environment)!r}), module.__file__\n"
        "print('all')\n",
        encoding="utf-8",
    )
    assert run(environment / "bin" / "python", script, cwd=tmp_path) == "all\n"


def test_the_console_script_works_in_another_folder(environment, tmp_path):
    atoll = environment / "bin" / "atoll"
    assert run(atoll, "--version", cwd=tmp_path) == f"atoll {version('atoll')}\n"
    run(atoll, "init", "mine.toml", cwd=tmp_path)
    assert "[outer]" in (tmp_path / "mine.toml").read_text(encoding="utf-8")


BARE = """
import sys
for name in ("datasets", "matplotlib", "pyarrow", "textual", "tokenizers"):
    sys.modules[name] = None  # as if no extra were installed
from atoll.peer.cli.main import main
sys.exit(main(sys.argv[1:]))
"""

RUN = """
[run]
name = "bare"
rounds = 2
[model]
overrides = { dim = 16, num_layers = 1, num_heads = 2, ffn_dim = 32 }
[data]
source = "texts"
seq_len = 32
[inner]
batch_size = 2
warmup_steps = 2
[outer]
inner_steps = 2
[round]
min_peers = 1
[coordinator]
listen = "127.0.0.1:0"
dht_listen = "127.0.0.1:0"
"""


def wait_for(path, process, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not path.exists() or not path.read_text():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline, f"expected {path} within {timeout_s:.0f} s"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_peer_trains_without_any_extra(environment, tmp_path):
    (tmp_path / "RUN.toml").write_text(RUN, encoding="utf-8")
    texts = tmp_path / "texts"
    texts.mkdir()
    for name in ("ast", "heapq", "inspect", "random"):
        shutil.copy(Path(sysconfig.get_path("stdlib")) / f"{name}.py", texts / f"{name}.txt")
    bare = [str(environment / "bin" / "python"), "-c", BARE]
    invite = tmp_path / "invite"
    arguments = ["coordinator", "RUN.toml", "--state-dir", "run", "--invite-file", str(invite)]
    with subprocess.Popen(
        [*bare, *arguments], cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as coordinator:
        try:
            wait_for(invite, coordinator)
            words = ["peer", invite, "--state-dir", "peer", "--data", "texts", "--yes"]
            run(*bare, *words, cwd=tmp_path)
            told = json.loads(run(*bare, "status", invite, "--json", cwd=tmp_path))
            assert told["position"] == 2
            shown = subprocess.run(
                [*bare, "dashboard", str(invite), "--screenshot", "a.svg"],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=60,
            )
        finally:
            coordinator.terminate()
    assert shown.returncode == 2
    assert "pip install textual" in shown.stderr
