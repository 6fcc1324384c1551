"""Layout of a model's parameters in the flat vector that peers reduce.

The vector holds the trainable parameters in registration order, fp32, each in row-major order,
tied parameters once, without gaps. It is cut into cells of 65,536 values on a grid that starts
at value 0; the last cell may be shorter. Parts, codec frames, norms and inclusion masks all
follow this grid, so none of them depends on the model's shapes.

    LayoutError (ValueError)   a module or a JSON text that does not fit

Parameters may be cut over several ranks, by FSDP2 or by other means: names and shapes are those of
whole tensors, so the layout and the vector know nothing of ranks (`dtensors`).

The sets of its values that are reduced at once are its fragments (`fragments.py`).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from atoll.compression import staging
from atoll.optim.state import dtensors, vectors

CELL = 65_536  # values; 64 KiB in int8, which is one piece of a paced flow
MAX_NUMEL = 1 << 40  # a layout from a stranger claims no more than 4 TiB of fp32
MAX_JSON_BYTES = 1 << 24  # 100,000 parameters with names of 150 letters
# torch.compile puts this in front of each name. Peers that compile and peers that do not must
# have the same layout, hence the same digest.
_COMPILED = "_orig_mod."
# Wrappers that put a prefix in front of each name, and the remedy.
_WRAPPERS = {
    "module.": "DataParallel or DistributedDataParallel puts this in front of each name: give the "
    "module inside, `model.module`",
    "_fsdp_wrapped_module.": "FullyShardedDataParallel puts this in front of each name, and makes "
    "one parameter of several: use `fully_shard`, FSDP2, which keeps names and shapes",
}


class LayoutError(ValueError):
    """A module, vector or JSON text does not fit the layout."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Names and shapes of the trainable parameters, in the order of the flat vector."""

    names: tuple[str, ...]
    """Parameter names as `named_parameters` gives them, without torch.compile's prefix."""

    shapes: tuple[tuple[int, ...], ...]
    """One shape a name."""

    def __post_init__(self) -> None:
        """Check that names and shapes can describe a vector.

        Raises:
            LayoutError: when they can't.
        """
        if len(self.names) != len(self.shapes) or not self.names:
            raise LayoutError(
                f"expected one shape a name and at least one name, got {len(self.names)} names "
                f"and {len(self.shapes)} shapes"
            )
        if len(set(self.names)) != len(self.names):
            raise LayoutError("expected distinct names, got one twice")
        if any(size < 1 for shape in self.shapes for size in shape):
            raise LayoutError("expected positive sizes, got a parameter without values")
        if self.numel > MAX_NUMEL:
            raise LayoutError(f"expected at most {MAX_NUMEL} values, got {self.numel}")

    @classmethod
    def of(cls, module: nn.Module) -> Layout:
        """Return the layout of a module's trainable parameters.

        Raises:
            LayoutError: when the module has none, or one that is not floating point.
        """
        named = list(_trainable(module))
        return cls(
            names=tuple(name for name, _ in named),
            shapes=tuple(tuple(param.shape) for _, param in named),
        )

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Return the number of values of each parameter."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def numel(self) -> int:
        """Return the number of values of the vector."""
        return sum(self.sizes)

    @property
    def num_cells(self) -> int:
        """Return the number of grid cells; the last one may be shorter."""
        return -(-self.numel // CELL)

    def cell(self, index: int) -> slice:
        """Return the values of one grid cell.

        Raises:
            IndexError: when there is no such cell.
        """
        return cell_slice(self.numel, index)

    def flatten(self, module: nn.Module, spans: Sequence[tuple[int, int]] | None = None) -> Tensor:
        """Copy a module's parameters to a new vector.

        Parameters that are cut over ranks are gathered one after another, so all ranks call this,
        each with runs of its own: an empty list for none.

        Args:
            module: of this layout.
            spans: start and stop of each run of the vector, rising; all of it by default.

        Returns:
            params_N, or those of the runs one after another, fp32 on the CPU.

        Raises:
            LayoutError: when the module is not of this layout.
            PlacementError: when a parameter is a partial sum.
        """
        spans = ((0, self.numel),) if spans is None else spans
        params_N = vectors.empty(sum(stop - start for start, stop in spans))
        trained = (param.detach() for param in self.trained(module))
        staging.to_host(_places_in(params_N, zip(trained, self.runs(spans), strict=True)))
        return params_N

    def load_(self, module: nn.Module, params_N: Tensor) -> None:
        """Copy a vector into a module's parameters, in the dtype and on the device they have.

        Of parameters that are cut over ranks, each rank takes its shard: all ranks call this, with
        equal vectors.

        Raises:
            LayoutError: when the module or the vector is not of this layout.
            PlacementError: when a parameter is a partial sum.
        """
        pairs = list(self._pairs(params_N, module))
        with torch.no_grad():
            staging.to_device((piece, param) for piece, param in pairs if _is_plain(param))
            for piece, param in pairs:
                if not _is_plain(param):
                    dtensors.put_whole_(param, piece)

    def held(
        self, module: nn.Module, values_F: Tensor, spans: Sequence[tuple[int, int]] | None = None
    ) -> Tensor:
        """Round values to the dtype in which a module's parameters hold them.

        A drift is measured against the result. Measured against fp32 values, the rounding of bf16
        parameters would be sent as if it had been trained.

        Args:
            module: of this layout.
            values_F: of the runs, one after another; fp32.
            spans: runs of the vector, as in `flatten`; all of it by default.

        Returns:
            The values themselves if all parameters are fp32, else a new fp32 vector.

        Raises:
            LayoutError: when the module is not of this layout.
        """
        spans = ((0, self.numel),) if spans is None else spans
        places = [
            (param.dtype, place)
            for param, runs in zip(self.trained(module), self.runs(spans), strict=True)
            for _, place in runs
        ]
        if all(dtype == torch.float32 for dtype, _ in places):
            return values_F
        held_F = vectors.empty(values_F.numel())
        for dtype, place in places:
            held_F[place] = values_F[place].to(dtype)
        return held_F

    def runs(self, spans: Sequence[tuple[int, int]]) -> list[list[tuple[slice, slice]]]:
        """Find the parameters in some runs of the vector, which may cut through them.

        Args:
            spans: start and stop of each run, rising.

        Returns:
            For each parameter, its values in each run: where they are among its own, and where
            among those of the runs, one run after another. None for one that lies in no run.
        """
        starts, done = [0, *itertools.accumulate(self.sizes)], 0
        found: list[list[tuple[slice, slice]]] = [[] for _ in self.sizes]
        for first, last in spans:
            index = max(0, bisect_right(starts, first) - 1)
            while index < len(found) and starts[index] < last:
                start, stop = max(first, starts[index]), min(last, starts[index + 1])
                own = slice(start - starts[index], stop - starts[index])
                if start < stop:
                    found[index].append((own, slice(done + start - first, done + stop - first)))
                index += 1
            done += last - first
        return found

    def parameters_in(
        self, module: nn.Module, spans: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[nn.Parameter, slice]]:
        """Find the parameters that lie in some runs of the vector, which cut none of them.

        Args:
            module: of this layout.
            spans: start and stop of each run, rising.

        Yields:
            Each parameter, and its values among those of the runs, one run after another.

        Raises:
            LayoutError: when the module is not of this layout.
        """
        for param, runs in zip(self.trained(module), self.runs(spans), strict=True):
            for _, place in runs:
                yield param, place

    def gradient(self, module: nn.Module, spans: Sequence[tuple[int, int]] | None = None) -> Tensor:
        """Copy a module's gradients to a new vector; zeros where there is none.

        Gradients that are cut over ranks are gathered as parameters are by `flatten`.

        Args:
            module: of this layout.
            spans: runs of the vector, as in `flatten`; all of it by default.

        Returns:
            grad_N, or those of the runs, fp32 on the CPU.

        Raises:
            LayoutError: when the module is not of this layout.
        """
        spans = ((0, self.numel),) if spans is None else spans
        grad_N = torch.zeros(sum(stop - start for start, stop in spans), dtype=torch.float32)
        grads = (
            (_dense(param.grad.detach()), runs)
            for param, runs in zip(self.trained(module), self.runs(spans), strict=True)
            if param.grad is not None
        )
        staging.to_host(_places_in(grad_N, grads))
        return grad_N

    def split(self, vector_N: Tensor) -> list[Tensor]:
        """Return views of a vector in the shapes of the parameters.

        Raises:
            LayoutError: when the vector has another length.
        """
        if vector_N.shape != (self.numel,):
            raise LayoutError(
                f"expected a vector of {self.numel} values, got shape {tuple(vector_N.shape)}"
            )
        pieces = torch.split(vector_N, list(self.sizes))
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def to_json(self) -> str:
        """Return canonical JSON: equal layouts give equal texts."""
        return json.dumps(
            {"names": self.names, "shapes": self.shapes}, separators=(",", ":"), sort_keys=True
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Layout:
        """Read a text of `to_json`; a stranger may have written it.

        Raises:
            LayoutError: when the text is too long, no JSON, or no layout.
        """
        if len(text) > MAX_JSON_BYTES:
            raise LayoutError(f"expected at most {MAX_JSON_BYTES} bytes, got {len(text)}")
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:  # deep nesting exhausts the parser's stack
            raise LayoutError(f"expected JSON, got {error}") from None
        if not isinstance(fields, dict) or set(fields) != {"names", "shapes"}:
            raise LayoutError("expected an object with names and shapes")
        names, shapes = fields["names"], fields["shapes"]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise LayoutError("expected names to be a list of strings")
        if not isinstance(shapes, list) or not all(_is_shape(shape) for shape in shapes):
            raise LayoutError("expected shapes to be a list of lists of at most 8 sizes up to 2^40")
        return cls(names=tuple(names), shapes=tuple(tuple(shape) for shape in shapes))

    def digest(self) -> bytes:
        """Return the SHA-256 of the canonical JSON."""
        return hashlib.sha256(self.to_json().encode()).digest()

    def difference(self, other: Layout) -> str:
        """Name the first parameter at which another layout differs from this one.

        If a wrapper's prefix is the reason, the text names the wrapper and the remedy.
        """
        for prefix, remedy in _WRAPPERS.items():
            wrapped = [all(n.startswith(prefix) for n in each.names) for each in (self, other)]
            if wrapped == [False, True]:
                return f"{other.names[0]} instead of {self.names[0]}; {remedy}"
        return _first_difference(self, list(zip(other.names, other.shapes, strict=True)))

    def _pairs(self, vector_N: Tensor, module: nn.Module) -> Iterator[tuple[Tensor, nn.Parameter]]:
        """Pair each parameter of a module with its piece of a vector."""
        return zip(self.split(vector_N), self.trained(module), strict=True)

    def trained(self, module: nn.Module) -> list[nn.Parameter]:
        """Return the parameters of a module, in the order of the layout.

        Raises:
            LayoutError: when the module is not of this layout.
        """
        dtensors.reshard(module)
        named = list(_trainable(module))
        found = tuple((name, tuple(param.shape)) for name, param in named)
        if found != tuple(zip(self.names, self.shapes, strict=True)):
            raise LayoutError(
                f"expected the {len(self.names)} parameters of the layout, got others: "
                f"{_first_difference(self, found)}; build the model from the run's spec, and "
                "neither freeze nor add parameters once it has joined"
            )
        return [param for _, param in named]


def cell_slice(numel: int, index: int) -> slice:
    """Return the values of one cell of the grid over `numel` values.

    Raises:
        IndexError: when there is no such cell.
    """
    if not 0 <= index * CELL < numel:
        raise IndexError(f"expected a chunk in [0, {-(-numel // CELL)}), got {index}")
    return slice(index * CELL, min((index + 1) * CELL, numel))


def _trainable(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, param in module.named_parameters():
        if not param.requires_grad:
            continue
        if not param.is_floating_point():
            raise LayoutError(f"expected floating point parameters, got {name}: {param.dtype}")
        yield name.replace(_COMPILED, ""), param


def _places_in(
    out: Tensor, tensors: Iterable[tuple[Tensor, Sequence[tuple[slice, slice]]]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Pair the values of tensors that lie in some runs with their places in a vector.

    A tensor that is cut over ranks is gathered, wanted or not: all ranks take part.
    """
    for tensor, runs in tensors:
        if not runs and not dtensors.is_dtensor(tensor):
            continue
        values = dtensors.whole(tensor).reshape(-1)
        for own, place in runs:
            yield values[own], out[place]


def _is_plain(param: Tensor) -> bool:
    """Return whether a parameter's values lie in one memory, in their order."""
    return not dtensors.is_dtensor(param) and param.is_contiguous()


def _dense(grad: Tensor) -> Tensor:
    """Return a gradient without sparsity, which an embedding's may have."""
    return grad if dtensors.is_dtensor(grad) else grad.to_dense()


def _is_shape(shape: object) -> bool:
    return (
        isinstance(shape, list)
        and len(shape) <= 8
        and all(type(size) is int and 0 < size <= MAX_NUMEL for size in shape)  # a bool is an int
    )


def _first_difference(layout: Layout, found: Sequence[tuple[str, tuple[int, ...]]]) -> str:
    for expected, got in zip(zip(layout.names, layout.shapes, strict=True), found, strict=False):
        if expected != got:
            return f"{got[0]} {list(got[1])} instead of {expected[0]} {list(expected[1])}"
    if len(found) < len(layout.names):
        return f"{layout.names[len(found)]} {list(layout.shapes[len(found)])} is missing"
    name, shape = found[len(layout.names)]
    return f"{name} {list(shape)} comes in addition"
