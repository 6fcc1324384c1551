"""Counts what a process holds in memory, from its objects: items of containers, bytes, and tasks.

`held_by` walks from some roots over attributes, items, closures and suspended coroutines. It stops
at what is not the process's own: classes, modules, the simulation, the network and its other ends.
A container has the label of the attribute that holds it, `Class.attribute`; one in another one has
the label of that one and `[]`.

A walk changes nothing, so runs with and without it are equal.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sqlite3
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import Context
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import Any

from torch import Tensor

CONTAINERS = (dict, list, set, frozenset, tuple, deque)
BYTES = (bytes, bytearray, memoryview)
PLAIN = (int, float, complex, str, type(None), Enum, type(Ellipsis))
FOREIGN = (
    type,
    types.ModuleType,
    types.CodeType,
    types.BuiltinFunctionType,
    asyncio.AbstractEventLoop,
    logging.Logger,
    sqlite3.Connection,
    threading.Thread,
    Context,
)
CALLABLES = (types.FunctionType, types.MethodType)
SUSPENDED = (types.CoroutineType, types.GeneratorType, types.AsyncGeneratorType)


@dataclass(kw_only=True)
class ProcessHoldings:
    """The containers, bytes and tasks that a walk has found."""

    largest: dict[str, int] = field(default_factory=dict)
    """Items of the largest container of each label."""
    num_bytes: int = 0
    """Of tensors and bytes, each once."""
    num_tasks: int = 0
    """That have not ended."""


class _Walk:
    """One walk over the objects of a process."""

    def __init__(self, is_foreign: Callable[[object], bool]) -> None:
        self.found = ProcessHoldings()
        self._is_foreign = is_foreign
        self._seen: set[int] = set()
        self._storages: set[int] = set()

    def over(self, roots: Iterable[tuple[str, Any]]) -> ProcessHoldings:
        due = deque(roots)
        while due:
            label, value = due.popleft()
            if isinstance(value, PLAIN) or id(value) in self._seen:
                continue
            self._seen.add(id(value))
            due.extend(self._inside(label, value))
        return self.found

    def _inside(self, label: str, value: Any) -> Iterable[tuple[str, Any]]:  # noqa: ANN401
        if isinstance(value, BYTES):
            self.found.num_bytes += len(value)
        elif isinstance(value, Tensor):
            self._count_storage(value)
        elif isinstance(value, CONTAINERS):
            return self._items(label, value)
        elif isinstance(value, CALLABLES):
            return self._bound(label, value)
        elif isinstance(value, SUSPENDED):
            return self._locals(label, value)
        elif not isinstance(value, FOREIGN) and not self._is_foreign(value):
            return self._attributes(label, value)
        return ()

    def _count_storage(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._storages:
            self._storages.add(storage.data_ptr())
            self.found.num_bytes += storage.nbytes()

    def _items(self, label: str, value: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401
        found, inner = self.found.largest, label + "[]"
        found[label] = max(found.get(label, 0), len(value))
        if isinstance(value, dict):
            for key, item in value.items():
                yield inner, key
                yield inner, item
        else:
            for item in value:
                yield inner, item

    def _bound(self, label: str, value: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401
        if isinstance(value, types.MethodType):
            yield label, value.__self__
            yield label, value.__func__
        else:
            for cell in value.__closure__ or ():
                if cell != _EMPTY:
                    yield label, cell.cell_contents

    def _locals(self, label: str, value: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401
        name = value.__qualname__
        for each in gc.get_referents(value):
            if not isinstance(each, types.FrameType):
                yield f"{name}()", each

    def _attributes(self, label: str, value: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401
        if isinstance(value, asyncio.Task):
            self.found.num_tasks += not value.done()
        kind: Any = type(value)  # mypy takes no class for hashable
        slots = _slots(kind)
        attributes = getattr(value, "__dict__", {})
        if (not slots and not attributes) or kind.__module__.startswith("_"):  # of C, as tasks
            for each in gc.get_referents(value):
                yield label, each
            return
        for name, item in attributes.items():
            yield f"{kind.__name__}.{name}", item
        for name in slots:
            if hasattr(value, name):
                yield f"{kind.__name__}.{name}", getattr(value, name)


@cache
def _slots(kind: type) -> tuple[str, ...]:
    """Return the names of the slots of a class and of those that it inherits from."""
    found: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        found += [slots] if isinstance(slots, str) else slots
    return tuple(found)


_EMPTY = types.CellType()


def held_by(
    roots: Iterable[tuple[str, Any]], is_foreign: Callable[[object], bool] = lambda value: False
) -> ProcessHoldings:
    """Return what objects hold.

    Args:
        roots: labels and objects to begin with.
        is_foreign: returns whether an object belongs to nobody, or to somebody else.
    """
    return _Walk(is_foreign).over(roots)
