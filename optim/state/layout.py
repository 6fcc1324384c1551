"""Layout of a model's parameters in the flat vector that peers reduce, and its fragments.

The vector holds the trainable parameters in registration order, fp32, each in row-major order,
tied parameters once, without gaps. It is cut into cells of 65,536 values on a grid that starts
at value 0; the last cell may be shorter. Parts, codec frames, norms and inclusion masks all
follow this grid, so none of them depends on the model's shapes.

    LayoutError (ValueError)   a module or a JSON text that does not fit

A fragment is a set of values of the layout's vector. It is cut into pieces, and each piece is
one codec frame: cells of 65,536 values for codecs that look at single values, rows of tensors for
codecs that look at shapes or names. The pieces of a tensor know its name, so that a codec by layers
(`mixed`) encodes each by that layer's codec: `codec_of`.

    whole        all values, in cells
    by_tensor    all values, tensors in pieces of whole rows (codecs of matrices: `dct`)
    tiled        all values, tensors in cells, matrices in tiles of 64 x 64 (SparseLoCo)
    sequential   consecutive blocks of layers (Streaming DiLoCo)
    strided      every n-th block of layers, the one that the paper found best

    FragmentError (ValueError)   more fragments than blocks, or frames that do not fit
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor, nn

from atoll.compression import Codec, CodecError
from atoll.compression.base import Frame
from atoll.compression.scratch import MAX_TILES
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
    def of(cls, module: nn.Module) -> Layout:
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
    def from_json(cls, text: str | bytes) -> Layout:
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


TILE = 64  # SparseLoCo's and DeMo's chunks: 64 x 64 values
MAX_PIECE = 2 * CELL  # values, if TILE rows have no more: parts are cut between pieces
AT_ONCE = MAX_TILES  # pieces that are encoded at once: more calls cost more than the cache gives
RUN = CELL  # values: four vectors of so many are 1 MiB, as much as an L2 cache
_BLOCK = re.compile(r"(?:^|\.)(\d+)\.")
Dims = tuple[int, ...]


class FragmentError(ValueError):
    """A layout that can't be cut like this, or frames that do not fit a fragment."""


class Piece(tuple[int, ...]):
    """The shape of a piece of one tensor, and that tensor's name."""

    layer: str

    def __new__(cls, dims: Dims, layer: str) -> Self:
        """Name a shape."""
        piece = super().__new__(cls, dims)
        piece.layer = layer
        return piece


def codec_of(codec: Codec, dims: Dims) -> Codec:
    """The codec of one piece.

    Raises:
        CodecError: when a codec by layers has none for it.
    """
    return codec.for_layer(dims.layer) if isinstance(dims, Piece) else codec


@dataclass(frozen=True, kw_only=True, eq=False)
class Fragment:
    """Some values of a layout's vector, F of its N."""

    spans: tuple[tuple[int, int], ...]
    """Start and stop of each run of values in the flat vector, rising."""

    pieces: tuple[Dims, ...]
    """Shapes of what is encoded one by one; together F values."""

    tensors: tuple[Dims, ...] = ()
    """Shapes of all tensors of the vector, if their tiles are put in a row; none: no reordering."""

    @cached_property
    def numel(self) -> int:
        """F, the number of values."""
        return sum(stop - start for start, stop in self.spans)

    @cached_property
    def slices(self) -> tuple[slice, ...]:
        """Values of each piece."""
        return piece_slices(self.pieces)

    def take(self, vector_N: Tensor) -> Tensor:
        """The fragment's values, in its order; a view where it is the whole vector."""
        return self.ordered(self.cut(vector_N))

    def put_(self, vector_N: Tensor, values_F: Tensor) -> None:
        """Write the fragment's values back to where they belong."""
        self.put_cut_(vector_N, self.unordered(values_F))

    def put_cut_(self, vector_N: Tensor, cut_F: Tensor) -> None:
        """Write back what `cut` gave."""
        for (start, stop), values in zip(self.spans, self._of_spans(cut_F), strict=True):
            vector_N[start:stop] = values

    def cut(self, vector_N: Tensor) -> Tensor:
        """The fragment's values in the order of the vector; a view where it is one span."""
        if len(self.spans) == 1:
            start, stop = self.spans[0]
            return vector_N[start:stop]
        return vectors.cat([vector_N[start:stop] for start, stop in self.spans])

    def ordered(self, cut_F: Tensor) -> Tensor:
        """Values in the fragment's order, given those in the order of the vector."""
        if not self.tensors:
            return cut_F
        values_F = torch.empty_like(cut_F)
        for tiles, places in self._tiles(values_F, cut_F):
            tiles.copy_(places)
        return values_F

    def unordered(self, values_F: Tensor) -> Tensor:
        """Return the pieces in the order that `ordered` was given."""
        if not self.tensors:
            return values_F
        cut_F = torch.empty_like(values_F)
        for tiles, places in self._tiles(values_F, cut_F):
            places.copy_(tiles)
        return cut_F

    def places(self, run: slice, *cuts_F: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Return views of consecutive values of the fragment in vectors returned by `cut`.

        One after another; a run begins and ends where a piece does.
        """
        if not self.tensors:
            yield tuple(cut_F[run] for cut_F in cuts_F)
            return
        for tensor in self._tensors_in(run):
            shape, (start, stop) = self.tensors[tensor], self._starts[tensor : tensor + 2]
            within = range(max(run.start, start) - start, min(run.stop, stop) - start)
            views = [_tiled_run(cut_F[start:stop], shape, within) for cut_F in cuts_F]
            yield from zip(*views, strict=True)

    def aligned(self, values_F: Tensor, *vectors_N: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Runs of the fragment's values, each with its places in vectors of all values; views.

        Runs of spans are short enough to stay in cache; of tensors in tiles each is all of one.
        """
        if self.tensors:
            pairs = [self._tiles(values_F, vector_N) for vector_N in vectors_N]
            for (tiles, first), *others in zip(*pairs, strict=True):
                yield tiles, first, *(places for _, places in others)
            return
        for (start, stop), values in zip(self.spans, self._of_spans(values_F), strict=True):
            yield from zip(
                torch.split(values, RUN),
                *(torch.split(vector_N[start:stop], RUN) for vector_N in vectors_N),
                strict=True,
            )

    @property
    def gaps(self) -> Iterator[slice]:
        """Return the parts of the vector before, between and after the spans."""
        start = 0
        for first, stop in self.spans:
            yield slice(start, first)
            start = stop
        yield slice(start, None)

    def mask(self, included: Tensor) -> Tensor:
        """Which values lie in some pieces, in the order of the vector.

        Args:
            included: bool a piece.
        """
        sizes = torch.tensor([math.prod(dims) for dims in self.pieces])
        return self.unordered(torch.repeat_interleave(included, sizes))

    def _tensors_in(self, run: slice) -> range:
        """Which tensors some consecutive values are of."""
        first = bisect_right(self._starts, run.start) - 1
        return range(first, bisect_left(self._starts, run.stop))

    @cached_property
    def _starts(self) -> list[int]:
        """Return the start of each tensor and the end of the last one."""
        return [0, *itertools.accumulate(map(math.prod, self.tensors))]

    def _of_spans(self, values_F: Tensor) -> Sequence[Tensor]:
        """The values of each span; views."""
        return torch.split(values_F, [stop - start for start, stop in self.spans])

    def _tiles(self, values_F: Tensor, cut_F: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Runs of the fragment's values, each with its places in the tensors; views."""
        start = 0
        for shape in self.tensors:
            stop = start + math.prod(shape)
            at = start
            for places in _tiled_places(cut_F[start:stop], shape):
                yield values_F[at : at + places.numel()].view(places.shape), places
                at += places.numel()
            start = stop


def whole(layout: Layout) -> Fragment:
    """All values, in cells of the grid."""
    return Fragment(spans=((0, layout.numel),), pieces=grid(layout.numel))


def by_tensor(layout: Layout) -> Fragment:
    """All values, a piece a tensor in its own shape; large ones by rows, 64 or a multiple."""
    return Fragment(spans=((0, layout.numel),), pieces=_named(layout, _by_rows))


def tiled(layout: Layout) -> Fragment:
    """All values, tensor by tensor in cells, the values of each 64 x 64 tile of a matrix in a run.

    Whole tiles come first, row by row; what is left at the right and at the bottom follows.
    Tensors of more dimensions are the matrix [dims[0], rest]; vectors keep their order.
    """
    pieces = _named(layout, lambda shape: grid(math.prod(shape)))
    return Fragment(spans=((0, layout.numel),), pieces=pieces, tensors=layout.shapes)


def sequential(layout: Layout, count: int, *, tensors: bool = False) -> tuple[Fragment, ...]:
    """Fragments of consecutive blocks, as even in blocks as they go.

    A block is what shares the first number in its names (`blocks.3.`); what comes before the
    first block joins it, what comes after the last joins that. They are in pieces as `by_tensor`
    makes them if `tensors`, else in cells.

    Raises:
        FragmentError: when there are fewer blocks than fragments.
    """
    blocks = _blocks(layout)
    _require(blocks, count)
    places = [block * count // len(blocks) for block in range(len(blocks))]
    return _fragments(layout, places, tensors)


def strided(layout: Layout, count: int, *, tensors: bool = False) -> tuple[Fragment, ...]:
    """Fragments of every `count`-th block; blocks and pieces as in `sequential`.

    Raises:
        FragmentError: when there are fewer blocks than fragments.
    """
    blocks = _blocks(layout)
    _require(blocks, count)
    return _fragments(layout, [block % count for block in range(len(blocks))], tensors)


def grid(numel: int) -> tuple[Dims, ...]:
    """Pieces of one cell each, the last one perhaps shorter."""
    full, rest = divmod(numel, CELL)
    return ((CELL,),) * full + (((rest,),) if rest else ())


def piece_slices(pieces: Sequence[Dims]) -> tuple[slice, ...]:
    """Values of each piece, one after the other."""
    slices, start = [], 0
    for dims in pieces:
        stop = start + math.prod(dims)
        slices.append(slice(start, stop))
        start = stop
    return tuple(slices)


def batches(codec: Codec, pieces: Sequence[Dims]) -> Iterator[tuple[slice, Codec]]:
    """Runs of pieces that are encoded at once: which, and by what codec.

    More than one only where they are equally long and the codec looks at values alone, or where it
    takes pieces of any shapes together.
    """
    first = 0
    while first < len(pieces):
        dims, own = pieces[first], codec_of(codec, pieces[first])
        last = first + 1
        while last < min(len(pieces), first + AT_ONCE):
            alike = own.any_shapes or (own.elementwise and pieces[last] == dims)
            if not alike or codec_of(codec, pieces[last]) is not own:
                break
            last += 1
        yield slice(first, last), own
        first = last


def encode_pieces(codec: Codec, values_F: Tensor, pieces: Sequence[Dims]) -> list[bytes]:
    """Encode values piece by piece.

    Raises:
        CodecError: when they hold NaN or infinity.
    """
    frames, slices = list[bytes](), piece_slices(pieces)
    for batch, own in batches(codec, pieces):
        values = values_F[slices[batch][0].start : slices[batch][-1].stop]
        frames += encode_batch(own, values, pieces[batch])
    return frames


def encode_batch(codec: Codec, values: Tensor, pieces: Sequence[Dims]) -> list[bytes]:
    """Encode the pieces of one of `batches`."""
    if codec.any_shapes or len(pieces) == 1:
        return codec.encode_pieces(values, pieces)
    return codec.encode_rows(values.view(len(pieces), -1))


def decode_pieces(codec: Codec, frames: Sequence[bytes], pieces: Sequence[Dims]) -> Tensor:
    """Decode the frames of `encode_pieces`.

    Returns:
        values_F, fp32 on the CPU.

    Raises:
        FragmentError: when the number of frames is wrong, or one does not decode.
    """
    if len(frames) != len(pieces):
        raise FragmentError(f"expected {len(pieces)} frames, got {len(frames)}")
    slices = piece_slices(pieces)
    values_F = vectors.empty(slices[-1].stop)
    for batch, own in batches(codec, pieces):
        values = values_F[slices[batch][0].start : slices[batch][-1].stop]
        try:
            decode_batch(own, frames[batch], pieces[batch], values)
        except CodecError as error:
            where = f"piece {batch.start}, or one of {len(pieces[batch])} from there on"
            raise FragmentError(f"{where}: {error}") from error
    return values_F


def decode_batch(
    codec: Codec, frames: Sequence[Frame], pieces: Sequence[Dims], out: Tensor
) -> None:
    """Decode the pieces of one of `batches`.

    Raises:
        CodecError: when a frame is none of its piece.
    """
    if codec.any_shapes or len(pieces) == 1:
        codec.decode_pieces(frames, pieces, out)
    else:
        codec.decode_rows(frames, out.view(len(pieces), -1))


def _named(
    layout: Layout, cut: Callable[[Dims], Sequence[Dims]], indices: Sequence[int] | None = None
) -> tuple[Piece, ...]:
    """The pieces of some tensors, all by default, with their names."""
    chosen = range(len(layout.names)) if indices is None else indices
    return tuple(Piece(dims, layout.names[i]) for i in chosen for dims in cut(layout.shapes[i]))


def _by_rows(shape: Dims) -> list[Dims]:
    """A tensor's shape in pieces of at most `MAX_PIECE` values, but of `TILE` rows at least."""
    if math.prod(shape) <= MAX_PIECE:
        return [shape]
    rows, *rest = shape
    step = max(TILE, MAX_PIECE // math.prod(rest) // TILE * TILE)
    return [(min(step, rows - start), *rest) for start in range(0, rows, step)]


def _tiled_places(values: Tensor, shape: Dims) -> list[Tensor]:
    """Views of a tensor's values: its whole tiles, the columns right of them, the rows below."""
    if len(shape) < 2:
        return [values]
    matrix_RC = values.view(shape[0], -1)
    down, across = (size // TILE for size in matrix_RC.shape)
    tiled_RC = matrix_RC[: down * TILE, : across * TILE]
    tiles = tiled_RC.view(down, TILE, across, TILE).transpose(1, 2)
    return [tiles, matrix_RC[: down * TILE, across * TILE :], matrix_RC[down * TILE :]]


def _tiled_run(values: Tensor, shape: Dims, run: range) -> Iterator[Tensor]:
    """Views of some of a tensor's values, consecutive in the order of its tiles."""
    at = 0
    for places in _tiled_places(values, shape):
        start, stop = max(run.start, at) - at, min(run.stop, at + places.numel()) - at
        if start < stop:
            yield from _consecutive(places, start, stop)
        at += places.numel()


def _consecutive(places: Tensor, start: int, stop: int) -> Iterator[Tensor]:
    """The values `[start, stop)` of a view, by rows of blocks: tiles, or single values."""
    if places.dim() == 1:
        yield places[start:stop]
        return
    across, block = places.shape[1], math.prod(places.shape[2:])
    (row, column), (last, rest) = divmod(start // block, across), divmod(stop // block, across)
    if row == last:
        yield places[row, column:rest]
        return
    if column:
        yield places[row, column:]
        row += 1
    if row < last:
        yield places[row:last]
    if rest:
        yield places[last, :rest]


def _blocks(layout: Layout) -> list[list[int]]:
    """Indices of the parameters of each block, in order."""
    numbers: list[int | None] = []
    for name in layout.names:
        match = _BLOCK.search(name)
        numbers.append(int(match[1]) if match else None)
    found = sorted({number for number in numbers if number is not None})
    if not found:
        return [list(range(len(numbers)))]
    blocks: dict[int, list[int]] = {number: [] for number in found}
    current = found[0]
    for index, number in enumerate(numbers):
        current = current if number is None else number
        blocks[current].append(index)
    return list(blocks.values())


def _require(blocks: list[list[int]], count: int) -> None:
    if not 1 <= count <= len(blocks):
        raise FragmentError(
            f"expected 1 to {len(blocks)} fragments, as many as the model has blocks (parameters "
            f"whose names share a number, as in 'layers.0.weight'), got {count}"
        )


def _fragments(layout: Layout, fragment_of: list[int], tensors: bool) -> tuple[Fragment, ...]:
    members: dict[int, list[int]] = {}
    for block, fragment in zip(_blocks(layout), fragment_of, strict=True):
        members.setdefault(fragment, []).extend(block)
    return tuple(_of_tensors(layout, sorted(members[key]), tensors) for key in sorted(members))


def _of_tensors(layout: Layout, indices: Sequence[int], tensors: bool) -> Fragment:
    starts = [0, *itertools.accumulate(layout.sizes)]
    spans = _joined([(starts[i], starts[i + 1]) for i in indices])
    if tensors:
        return Fragment(spans=spans, pieces=_named(layout, _by_rows, indices))
    return Fragment(spans=spans, pieces=grid(sum(stop - start for start, stop in spans)))


def _joined(spans: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Neighbouring runs as one."""
    joined: list[tuple[int, int]] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


class Difference:
    """a - b, of a fragment's values in its order; both must stay as they are while it is used."""

    def __init__(self, fragment: Fragment, a_F: Tensor, b_F: Tensor) -> None:
        """Return the difference of two vectors returned by `Fragment.cut`."""
        self._fragment = fragment
        self._a_F, self._b_F = a_F, b_F

    def __call__(self) -> Tensor:
        """All of it, as a new vector."""
        values_F = vectors.empty(self._fragment.numel)
        self.write_(slice(0, self._fragment.numel), values_F)
        return values_F

    def write_(self, run: slice, out: Tensor) -> None:
        """Write some consecutive values, whole pieces of the fragment."""
        at = 0
        for a, b in self._fragment.places(run, self._a_F, self._b_F):
            torch.sub(a, b, out=out[at : at + a.numel()].view(a.shape))
            at += a.numel()
