"""Parameters that are cut over several devices: `DTensor`s, as `fully_shard` makes them.

A `DTensor` holds a shard of a tensor and knows the others' ranks. All ranks of its mesh must call
what is here, in the same order. Any placement of whole values will do: `Shard`, `Replicate` and
combinations of them over a mesh of several dimensions, as in HSDP.

    PlacementError (ValueError)   a tensor that lies on its ranks as partial sums
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class PlacementError(ValueError):
    """A tensor is placed in a way that its values can't be read or set."""


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether a tensor is cut over ranks."""
    kind = _loaded("torch.distributed.tensor", "DTensor")
    return kind is not None and isinstance(tensor, kind)


def local(tensor: Tensor) -> Any:  # noqa: ANN401 - perhaps a library's kind of tensor
    """Return this rank's shard of a tensor that is cut, or the tensor."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return all values of a tensor: itself, or its shards gathered from all ranks.

    Raises:
        PlacementError: its ranks hold partial sums.
    """
    if not is_dtensor(tensor):
        return tensor
    _expect_values(tensor)
    return tensor.full_tensor()


def local_runs(tensor: DTensor) -> tuple[tuple[int, int], ...]:
    """Return the runs of a tensor, as it lies flat, that this rank holds and no rank before it.

    Raises:
        PlacementError: its ranks hold partial sums.
    """
    _expect_values(tensor)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None or any(
        place and placement.is_replicate()
        for place, placement in zip(coordinate, tensor.placements, strict=True)
    ):
        return ()  # another rank holds the same
    places_M = torch.zeros(1, dtype=torch.int64)
    inner, is_one_run = 1, True
    for dim in reversed(range(tensor.dim())):
        rows = rows_here(tensor, dim)
        if is_one_run and len(rows) == tensor.shape[dim]:
            inner *= len(rows)
            continue
        is_one_run = False
        places_M = (rows[:, None] * (inner_stride(tensor, dim) // inner) + places_M).flatten()
    return _runs_of(places_M, inner)


def rows_here(tensor: DTensor, dim: int) -> Tensor:
    """Return the places along a dimension of which this rank holds values, rising."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = tensor.device_mesh
    # The rows of a dimension are cut as a vector of its length would be.
    cuts = [Shard(0) if each.is_shard(dim) else Replicate() for each in tensor.placements]
    every = torch.arange(tensor.shape[dim], device=tensor.to_local().device)
    own = DTensor.from_local(every, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return own.redistribute(mesh, cuts).to_local().cpu()


def sizes_by_rows(tensor: DTensor) -> list[int]:
    """Return how many values each shard has; none if it is cut otherwise than once, by rows."""
    shape, mesh = tensor.shape, tensor.device_mesh
    cuts = [
        (mesh.size(dim), placement)
        for dim, placement in enumerate(tensor.placements)
        if not placement.is_replicate()
    ]
    if len(cuts) != 1 or not cuts[0][1].is_shard(0):
        return []
    (shards, _), (rows, *rest) = cuts[0], shape
    most = -(-rows // shards)
    return [max(0, min(most, rows - shard * most)) * math.prod(rest) for shard in range(shards)]


def inner_stride(tensor: Tensor, dim: int) -> int:
    """Return how many values a step along a dimension passes, as the tensor lies flat."""
    return math.prod(tensor.shape[dim + 1 :])


def _runs_of(places_M: Tensor, width: int) -> tuple[tuple[int, int], ...]:
    """Return the runs of rising places, each of so many values."""
    if not places_M.numel():
        return ()
    ends = (torch.diff(places_M) != 1).nonzero().flatten()
    first = torch.cat([places_M[:1], places_M[ends + 1]])
    last = torch.cat([places_M[ends], places_M[-1:]])
    pairs = zip(first.tolist(), last.tolist(), strict=True)
    return tuple((start * width, (stop + 1) * width) for start, stop in pairs)


def put_whole_(tensor: Tensor, values: Tensor) -> None:
    """Copy values to a tensor; each rank takes its shard of them, and nothing is sent.

    Args:
        tensor: to change, in its own dtype and on its own device.
        values: all of them, in its shape and equal on all ranks.

    Raises:
        PlacementError: its ranks hold partial sums.
    """
    if not is_dtensor(tensor):
        tensor.copy_(values)
        return
    from torch.distributed.tensor import DTensor, Replicate

    _expect_values(tensor)
    mesh = tensor.device_mesh
    everywhere = DTensor.from_local(
        values.to(tensor.to_local().device), mesh, [Replicate()] * mesh.ndim, run_check=False
    )
    tensor.copy_(everywhere.redistribute(mesh, tensor.placements))


def like(tensor: DTensor, local: Tensor) -> DTensor:
    """Return a tensor that lies on its ranks as another one does, given this rank's shard."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def reshard(module: nn.Module) -> None:
    """Let FSDP2 drop what it gathered: its root stays gathered after a forward pass alone.

    Until then the module's parameters are copies, and what is written to them is lost.
    """
    kind = _loaded("torch.distributed.fsdp", "FSDPModule")
    if kind is not None:
        for each in module.modules():
            if isinstance(each, kind):
                cast(Any, each).reshard()


def _loaded(module: str, name: str) -> Any:  # noqa: ANN401 - a class
    """Return a class of a module, which takes a second to import; None if nothing can be of it.

    While another thread imports the module, it is there without its classes.
    """
    return getattr(sys.modules.get(module), name, None)


def _expect_values(tensor: DTensor) -> None:
    if any(placement.is_partial() for placement in tensor.placements):
        raise PlacementError(
            f"expected a tensor placed by Shard or Replicate, got {tuple(tensor.placements)}; "
            "give the optimizer and Atoll a model whose parameters are no partial sums"
        )
