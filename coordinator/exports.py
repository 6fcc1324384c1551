"""Public names of a package that load their modules when they are first used (PEP 562).

A command pays only for what it uses: `Invite` needs no torch, and its package exports `RunSpec`,
which does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def exports(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package.

    Args:
        package: its `__name__`.
        modules: by public name, the module of the package that defines it.
    """

    def get(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return get
