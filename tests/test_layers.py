"""Imports point one way: peer -> coordinator -> optim, dht -> compression.

Inside these layers the rooms have one order too: `ROOMS`.
"""

import ast
import functools
from collections import defaultdict
from pathlib import Path

import pytest

from support.sources import parsed

ROOT = Path(__file__).parents[1]
BELOW = {
    "compression": set(),
    "optim": {"compression"},
    "dht": {"compression"},
    "coordinator": {"compression", "optim", "dht"},
    "peer": {"compression", "optim", "dht", "coordinator"},
}

# Packages, or single modules, each of which imports only from those before it and from itself. A
# module belongs to the longest name that fits. The package of a room imports nothing for itself
# that its modules may not.
ROOMS = (
    "compression.threads",
    "compression.scratch",
    "compression.checksum",
    "compression.staging",
    "compression.base",
    "compression.registry",
    "compression.kernels",
    "compression",
    "optim.state",
    "optim.reduction",
    "optim.reducer",
    "optim.methods",
    "optim.quantized",
    "optim.inner",
    "optim.schedules",
    "optim.log",
    "optim.inprocess",
    "optim.ranks",
    "optim",
    "dht",
    "dht.testing",
    "coordinator.exports",
    "coordinator.run",
    "coordinator.rpc",
    "coordinator",
    "coordinator.report",
    "coordinator.service",
    "coordinator.copies",
    "coordinator.dashboard",
    "peer.paths",
    "peer.errors",
    "peer.extras",
    "peer",
    "peer.pipeline",
    "peer.training",
    "peer.inference",
    "peer.rounds",
    "peer.rounds.allreduce",
    "peer.rounds.consensus",
    "peer.rounds.engine",
    "peer.recovery",
    "peer.gossip",
    "peer.daemon",
    "peer.lab",
    "peer.cli",
)


def room(name):
    """The room of a module `atoll.a.b.c`, or of a name in it."""
    inside = name.removeprefix("atoll.")
    fitting = [room for room in ROOMS if f"{inside}.".startswith(f"{room}.")]
    return max(fitting, key=len)


@functools.cache
def imports(source):
    """Every dotted name that a module imports, wherever in it; `from a import b` gives a.b."""
    return tuple(imported(source))


def imported(source):
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = "." * node.level + (node.module or "")
            yield from (f"{start}.{alias.name}" for alias in node.names)


def imports_of(layer):
    for path in sorted((ROOT / layer).rglob("*.py")):
        for name in imports(path.read_text(encoding="utf-8")):
            yield path.relative_to(ROOT).as_posix(), name


@pytest.mark.parametrize("layer", BELOW)
def test_a_layer_imports_only_what_is_below_it(layer):
    allowed = BELOW[layer] | {layer}
    wrong = [
        (path, name)
        for path, name in imports_of(layer)
        if name.startswith("atoll") and name.split(".")[1] not in allowed
    ]
    assert wrong == []


@pytest.mark.parametrize("layer", BELOW)
def test_a_layer_is_imported_under_the_name_that_is_installed(layer):
    bare = set(BELOW) - {"compression"}  # Python 3.14 has a standard package of this name
    wrong = [
        (path, name)
        for path, name in imports_of(layer)
        if name.startswith(".") or name.split(".")[0] in bare
    ]
    assert wrong == []


@pytest.mark.parametrize("layer", sorted(set(BELOW) - {"dht"}))
def test_hivemind_is_imported_by_dht_alone(layer):
    assert [(path, name) for path, name in imports_of(layer) if name.startswith("hivemind")] == []


def test_the_reader_of_imports_sees_every_form():
    source = (
        "import atoll.peer.a\n"
        "def f():\n    from atoll.peer import b\n"
        "from . import c\nfrom ..d import e\n"
    )
    assert set(imports(source)) == {"atoll.peer.a", "atoll.peer.b", "..c", "..d.e"}


def modules():
    """Every module of the product by its dotted name, with its source."""
    for layer in BELOW:
        for path in sorted((ROOT / layer).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(("atoll", *parts)).removesuffix(".__init__")
            yield name, path.read_text(encoding="utf-8")


def test_rooms_import_only_from_rooms_before_them():
    order = {name: place for place, name in enumerate(ROOMS)}
    wrong = [
        (module, name)
        for module, source in modules()
        for name in imports(source)
        if name.startswith("atoll.") and order[room(name)] > order[room(module)]
    ]
    assert wrong == []


def test_every_room_has_modules():
    assert {room(name) for name, _ in modules()} == set(ROOMS)


def test_a_class_name_has_one_meaning():
    places = defaultdict(list)
    for module, source in modules():
        for node in ast.walk(parsed(source)):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(module)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
