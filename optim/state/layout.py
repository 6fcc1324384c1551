"""Layout of a model's parameters in the flat vector that peers reduce.

The vector holds the trainable parameters in registration order, fp32, each in row-major order,
tied parameters once, without gaps. It is cut into cells of 65,536 values on a grid that starts
at value 0; the last cell may be shorter. Parts, codec frames, norms and inclusion masks all
follow this grid, so none of them depends on the model's shapes.

    LayoutError (ValueError)   a module or a JSON text that does not fit
"""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from atoll.optim.state import vectors

CELL = 65_536  # values; 64 KiB in int8, which is one piece of a paced flow
MAX_NUMEL = 1 << 40  # a layout from a stranger claims no more than 4 TiB of fp32
MAX_JSON_BYTES = 1 << 24  # 100,000 parameters with names of 150 letters
_COMPILED = "_orig_mod."  # torch.compile puts this in front of each name


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
    def of(cls, module: nn.Module) -> "Layout":
        """Layout of a module's trainable parameters.

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
        """Number of values of each parameter."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def numel(self) -> int:
        """Number of values of the vector."""
        return sum(self.sizes)

    @property
    def num_cells(self) -> int:
        """Number of grid cells, the last one perhaps shorter."""
        return -(-self.numel // CELL)

    def cell(self, index: int) -> slice:
        """Values of one grid cell.

        Raises:
            IndexError: when there is no such cell.
        """
        return cell_slice(self.numel, index)

    def flatten(self, module: nn.Module, spans: Sequence[tuple[int, int]] | None = None) -> Tensor:
        """Copy a module's parameters to a new vector.

        Args:
            module: of this layout.
            spans: runs of the vector, as in `parameters_in`; all of it by default.

        Returns:
            params_N, or those of the runs, fp32 on the CPU.

        Raises:
            LayoutError: when the module is not of this layout.
        """
        spans = ((0, self.numel),) if spans is None else spans
        params_N = vectors.empty(sum(stop - start for start, stop in spans))
        for param, place in self.parameters_in(module, spans):
            params_N[place].view(param.shape).copy_(param.detach())
        return params_N

    def load_(self, module: nn.Module, params_N: Tensor) -> None:
        """Copy a vector into a module's parameters, in the dtype and on the device they have.

        Raises:
            LayoutError: when the module or the vector is not of this layout.
        """
        with torch.no_grad():
            for piece, param in self._pairs(params_N, module):
                param.copy_(piece)

    def held(
        self, module: nn.Module, values_F: Tensor, spans: Sequence[tuple[int, int]] | None = None
    ) -> Tensor:
        """Values as a module's parameters hold them: rounded, where these have fewer bits.

        Args:
            module: of this layout.
            values_F: of the runs, one after another.
            spans: runs of the vector, as in `parameters_in`; all of it by default.

        Returns:
            The values themselves if all parameters are fp32, else a new vector.

        Raises:
            LayoutError: when the module is not of this layout.
        """
        places = list(self.parameters_in(module, ((0, self.numel),) if spans is None else spans))
        if all(param.dtype == torch.float32 for param, _ in places):
            return values_F
        held_F = vectors.empty(values_F.numel())
        for param, place in places:
            held_F[place] = values_F[place].to(param.dtype)
        return held_F

    def parameters_in(
        self, module: nn.Module, spans: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[nn.Parameter, slice]]:
        """The parameters that lie in some runs of the vector, which cut none of them.

        Args:
            module: of this layout.
            spans: start and stop of each run, rising.

        Yields:
            Each parameter, and its values among those of the runs, one run after another.

        Raises:
            LayoutError: when the module is not of this layout.
        """
        start = done = 0
        for size, param in zip(self.sizes, self._parameters(module), strict=True):
            if any(first <= start < last for first, last in spans):
                yield param, slice(done, done + size)
                done += size
            start += size

    def gradient(self, module: nn.Module) -> Tensor:
        """Copy a module's gradients to a new vector; zeros where there is none.

        Returns:
            grad_N, fp32 on the CPU.

        Raises:
            LayoutError: when the module is not of this layout.
        """
        grad_N = torch.zeros(self.numel, dtype=torch.float32)
        for piece, param in self._pairs(grad_N, module):
            if param.grad is not None:
                piece.copy_(param.grad.detach().to_dense())  # of an embedding it may be sparse
        return grad_N

    def split(self, vector_N: Tensor) -> list[Tensor]:
        """Views of a vector in the shapes of the parameters.

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
        """Canonical JSON: equal layouts give equal texts."""
        return json.dumps(
            {"names": self.names, "shapes": self.shapes}, separators=(",", ":"), sort_keys=True
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> "Layout":
        """Read what `to_json` wrote, from anybody.

        Raises:
            LayoutError: when the text is too long, no JSON, or no layout.
        """
        if len(text) > MAX_JSON_BYTES:
            raise LayoutError(f"expected at most {MAX_JSON_BYTES} bytes, got {len(text)}")
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise LayoutError(f"expected JSON, got {error}") from None
        names, shapes = _checked(fields)
        return cls(names=names, shapes=shapes)

    def digest(self) -> bytes:
        """SHA-256 of the canonical JSON."""
        return hashlib.sha256(self.to_json().encode()).digest()

    def _pairs(self, vector_N: Tensor, module: nn.Module) -> Iterator[tuple[Tensor, nn.Parameter]]:
        """Each parameter of a module with its piece of a vector."""
        return zip(self.split(vector_N), self._parameters(module), strict=True)

    def _parameters(self, module: nn.Module) -> list[nn.Parameter]:
        named = list(_trainable(module))
        found = tuple((name, tuple(param.shape)) for name, param in named)
        if found != tuple(zip(self.names, self.shapes, strict=True)):
            raise LayoutError(
                f"expected the {len(self.names)} parameters of the layout, "
                f"got {_first_difference(self, found)}; build the model from the run's spec, and "
                "neither freeze nor add parameters once it has joined"
            )
        return [param for _, param in named]


def cell_slice(numel: int, index: int) -> slice:
    """Values of one cell of the grid over `numel` values.

    Raises:
        IndexError: when there is no such cell.
    """
    if not 0 <= index * CELL < numel:
        raise IndexError(f"expected a cell in [0, {-(-numel // CELL)}), got {index}")
    return slice(index * CELL, min((index + 1) * CELL, numel))


def _trainable(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, param in module.named_parameters():
        if not param.requires_grad:
            continue
        if not param.is_floating_point():
            raise LayoutError(f"expected floating point parameters, got {name}: {param.dtype}")
        yield name.replace(_COMPILED, ""), param


def _checked(fields: object) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    if not isinstance(fields, dict) or set(fields) != {"names", "shapes"}:
        raise LayoutError("expected an object with names and shapes")
    names, shapes = fields["names"], fields["shapes"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise LayoutError("expected names to be a list of strings")
    if not isinstance(shapes, list) or not all(_is_shape(shape) for shape in shapes):
        raise LayoutError("expected shapes to be a list of lists of at most 8 sizes up to 2^40")
    return tuple(names), tuple(tuple(shape) for shape in shapes)


def _is_shape(shape: object) -> bool:
    return (
        isinstance(shape, list)
        and len(shape) <= 8
        and all(type(size) is int and 0 < size <= MAX_NUMEL for size in shape)
    )


def _first_difference(layout: Layout, found: Sequence[tuple[str, tuple[int, ...]]]) -> str:
    for expected, got in zip(zip(layout.names, layout.shapes, strict=True), found, strict=False):
        if expected != got:
            return f"{got[0]} {list(got[1])} in place of {expected[0]} {list(expected[1])}"
    return f"{len(found)} parameters"
