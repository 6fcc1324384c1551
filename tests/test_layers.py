"""Imports point one way: peer -> coordinator -> optim, dht -> compression."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BELOW = {
    "compression": set(),
    "optim": {"compression"},
    "dht": {"compression"},
    "coordinator": {"compression", "optim", "dht"},
    "peer": {"compression", "optim", "dht", "coordinator"},
}


def imports(source):
    """Every dotted name that a module imports, wherever in it; `from a import b` gives a.b."""
    for node in ast.walk(ast.parse(source)):
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
