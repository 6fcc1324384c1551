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
from atoll.peer.daemon.beside import starting
from support.forks import NetworkFork

# Modules and thousands of tests are made before the first test runs, and all of them stay:
# a collection passes over them in vain each time.
gc.disable()
hypothesis.settings.register_profile("atoll", deadline=None)  # a busy machine is no fault
hypothesis.settings.load_profile("atoll")
torch.set_num_threads(1)
# All peers of a swarm are in one process and verify the same signatures: each once is enough.
# Before another module imports the function.
identity.verify = functools.lru_cache(1 << 14)(identity.verify)
# Its tests share one run, and wait for most of their 2.5 minutes: no worker may take the last of
# them over and begin a run of its own when the others have ended.
FIRST = "test_processes.py"
REAL_START = starting.start_process
starting.start_process = NetworkFork
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it


def pytest_addoption(parser):
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="also variants of the others, and tests that take minutes each",
    )


def pytest_collection_modifyitems(config, items):
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
    items[:] = dealt(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)))


def dealt(items, num_workers):
    """Order tests so that each worker of several gets its share: an equal part of the list.

    Tests with processes wait for much of their time, and the longest come late in the alphabet: the
    last worker began them when the others had ended. So half of the workers begin with them, whole
    files each, while the other half keeps the cores busy.
    """
    if num_workers == 1:
        return items
    files = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    num_slow = {path: sum(map(is_slow, tests)) for path, tests in files.items()}
    hands = [[] for _ in range(num_workers)]
    for path in sorted(files, key=lambda path: path.name != FIRST):
        if num_slow[path]:
            hand = min(hands[: num_workers // 2], key=lambda hand: sum(map(num_slow.get, hand)))
            hand.append(path)
    quick = iter([item for item in items if not num_slow[item.path]])
    left, order = len(items), []
    for number, hand in enumerate(hands):
        share = [item for path in hand for item in files[path]]
        wanted = left // (num_workers - number)  # as xdist counts
        share += itertools.islice(quick, max(0, wanted - len(share)))
        left -= len(share)
        order += share
    return [*order, *quick]


def is_slow(item):
    return item.get_closest_marker("slow") is not None


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
def interpreters(monkeypatch):
    """Peers of this process start their network sides as outside of tests."""
    monkeypatch.setattr(starting, "start_process", REAL_START)


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
