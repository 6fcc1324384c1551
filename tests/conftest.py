"""What all tests share: one thread for arithmetic, and state that stays in the test's folder."""

import functools
import gc
import itertools
import os
import signal
import sys

# Before torch is imported, and for every process that a test starts.
os.environ["OMP_NUM_THREADS"] = "1"

import hypothesis
import pytest
import torch

from atoll.dht import identity

# Modules and thousands of tests are made before the first test runs, and all of them stay:
# a collection passes over them in vain each time.
gc.disable()
hypothesis.settings.register_profile("atoll", deadline=None)  # a busy machine is no fault
hypothesis.settings.load_profile("atoll")
torch.set_num_threads(1)
# All peers of a swarm are in one process and verify the same signatures: each once is enough.
# Before another module imports the function.
identity.verify = functools.lru_cache(1 << 14)(identity.verify)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it


def pytest_addoption(parser):
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="also variants of the others, and tests that take minutes each",
    )


def pytest_collection_modifyitems(config, items):
    # Its tests share one run, and wait for most of their 2.5 minutes: they begin first, so that no
    # worker takes the last of them over and begins a run of its own when the others have ended.
    items.sort(key=lambda item: item.path.name != "test_processes.py")
    left_out = []
    if not config.getoption("--exhaustive"):
        left_out += [item for item in items if item.get_closest_marker("exhaustive")]
    if not torch.cuda.is_available():
        for_gpus = [item for item in items if item.get_closest_marker("cuda")]
        if "cuda" in config.getoption("markexpr"):  # asked for: say why they do not run
            for item in for_gpus:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        else:
            left_out += for_gpus
    if left_out:
        names = {item.nodeid for item in left_out}
        items[:] = [item for item in items if item.nodeid not in names]
        config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish(session):
    gc.freeze()  # without a collection, which takes longer than what it would find is worth
    gc.enable()


HOMES = itertools.count()


@pytest.fixture(autouse=True)
def state_home(tmp_path_factory, monkeypatch):
    """Give the test a state home of its own; nothing of it reaches the user's.

    It is not created: most of thousands of tests need no folder.
    """
    home = tmp_path_factory.getbasetemp() / "state-homes" / str(next(HOMES))
    monkeypatch.setenv("XDG_STATE_HOME", str(home))
    return home / "atoll"


@pytest.fixture
def own_modules(tmp_path, monkeypatch):
    """Work in the test's folder; forget the modules that it imports from there.

    The next test's `my_models` is another file.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    here = (f"{tmp_path}{os.sep}", f"{tmp_path.resolve()}{os.sep}")
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(here):
            del sys.modules[name]
