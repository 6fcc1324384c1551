"""Tensors that lie in parts, as ranks save them: who has which values, and the whole of them.

    TensorPart    some values of a tensor, with their places in it
    TensorParts   all of a tensor's, each with the rank that has read it

A run is a range of places in the tensor as it lies flat. What ranks save has a part wherever the
tensor is cut, in the same order on all of them, so the n-th parts of all are one tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atoll.optim.state import vectors
from atoll.optim.state.layout import LayoutError

Run = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class TensorPart:
    """Some values of a tensor."""

    values: Tensor
    """Flat; without values where another rank has them."""

    runs: tuple[Run, ...]
    """Start and stop of each run of the tensor, in the order of the values."""

    shape: tuple[int, ...]
    """The shape of the whole tensor."""


@dataclass(frozen=True, kw_only=True)
class TensorParts:
    """A tensor of which ranks have read the parts."""

    parts: tuple[tuple[int, TensorPart], ...]
    """Each with the rank that has its values."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the tensor."""
        return self.parts[0][1].shape

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of its values."""
        return self.parts[0][1].values.dtype


def part_here(values: Tensor, runs: tuple[Run, ...], shape: tuple[int, ...]) -> TensorPart:
    """Return the part of a tensor that this rank saves: no values if another rank has the same.

    Args:
        values: of this rank's shard, flat.
        runs: of the tensor, as `dtensors.local_runs` returns them.
        shape: of the tensor.
    """
    return TensorPart(values=values if runs else values[:0], runs=runs, shape=shape)


def mapped(node: Any, function: Callable[[TensorPart], Any]) -> Any:  # noqa: ANN401 - a tree of anything
    """Return a tree in which `function` has replaced each part, from the first to the last."""
    if isinstance(node, TensorPart):
        return function(node)
    if isinstance(node, Mapping):
        return {key: mapped(value, function) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return type(node)(mapped(value, function) for value in node)
    return node


def parts_of(tree: Any) -> list[TensorPart]:  # noqa: ANN401 - a tree of anything
    """Return the parts in a tree, in their order."""
    found = list[TensorPart]()
    mapped(tree, found.append)
    return found


def as_whole(parts: Sequence[TensorPart]) -> Tensor:
    """Return the tensor of some parts.

    Raises:
        LayoutError: they are not all of it, or of different tensors.
    """
    first = expect_all(parts)
    whole = empty(math.prod(first.shape), first.values.dtype)
    for part in parts:
        copy_common_(whole, [(0, whole.numel())], part)
    return whole.view(first.shape)


def expect_all(parts: Sequence[TensorPart]) -> TensorPart:
    """Return the first part; they are all of one tensor.

    Raises:
        LayoutError: some are missing, or are of another tensor.
    """
    first = parts[0]
    alike = {(part.shape, part.values.dtype) for part in parts}
    at = 0
    for start, stop in sorted(run for part in parts for run in part.runs):
        at = stop if start == at else -1
        if at < 0:
            break
    if len(alike) > 1 or at != math.prod(first.shape):
        raise LayoutError("expected shards that are one state together, got parts of others")
    return first


def copy_common_(target: Tensor, runs: Sequence[Run], part: TensorPart) -> None:
    """Copy the values of a part that lie in some runs to their places among these.

    Args:
        target: values of the runs, one after another.
        runs: of the same tensor.
        part: copied from, wherever it lies in the runs.
    """
    ours, theirs = list(_placed(runs)), list(_placed(part.runs))
    while ours and theirs:
        (start, stop, at), (first, last, place) = ours[-1], theirs[-1]
        low, high = max(start, first), min(stop, last)
        if low < high:
            values = part.values[place + low - first : place + high - first]
            target[at + low - start : at + high - start] = values
        (ours if start >= first else theirs).pop()


def empty(numel: int, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised flat tensor."""
    is_vector = dtype in (torch.float32, torch.bfloat16)
    return vectors.empty(numel, dtype) if is_vector else torch.empty(numel, dtype=dtype)


def _placed(runs: Sequence[Run]) -> Iterator[tuple[int, int, int]]:
    """Yield the runs by start, each with the place of its first value."""
    found, at = [], 0
    for start, stop in runs:
        found.append((start, stop, at))
        at += stop - start
    yield from sorted(found)
