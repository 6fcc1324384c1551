"""Each package exports its public names, and loads a module no earlier than it is needed."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import atoll.optim

ROOT = Path(__file__).parents[1]
# `peer` is a folder of rooms; codecs use kernels by module, and users use codecs.
WITHOUT = {"atoll.peer", "atoll.compression.kernels"}
HEAVY = ("torch", "hivemind", "textual", "matplotlib")


def packages():
    for layer in ("compression", "optim", "dht", "coordinator", "peer"):
        for path in sorted((ROOT / layer).rglob("__init__.py")):
            yield ".".join(("atoll", *path.parent.relative_to(ROOT).parts))


@pytest.mark.parametrize("name", sorted(set(packages()) - WITHOUT))
def test_a_package_has_the_names_that_it_exports(name):
    package = import_module(name)
    assert len(set(package.__all__)) == len(package.__all__) > 0
    assert [each for each in package.__all__ if not hasattr(package, each)] == []


def test_another_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"'atoll\.coordinator\.run' has no attribute 'Spec'"):
        import_module("atoll.coordinator.run").Spec  # noqa: B018


def test_packages_of_peers_load_nothing_heavy_by_themselves():
    cheap = [name for name in packages() if name.startswith(("atoll.coordinator", "atoll.peer"))]
    cheap = [n for n in cheap if n not in ("atoll.peer.gossip", "atoll.peer.recovery")]
    program = (
        f"import sys, importlib\nfor name in {cheap!r}: importlib.import_module(name)\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "[]"


def test_optim_exports_all_that_it_imports():
    public = {
        name
        for name, value in vars(atoll.optim).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("atoll.")
    }
    assert sorted(public | {"CELL"}) == sorted(atoll.optim.__all__)


def test_exports_of_optim_are_sorted_and_documented():
    names = atoll.optim.__all__
    assert names == sorted(names, key=lambda name: (not name.isupper(), name.islower(), name))
    assert all(getattr(atoll.optim, name).__doc__ for name in names if name != "CELL")
