"""Layout of a model's parameters in the flat vector that peers reduce, and its fragments.

The vector holds the trainable parameters in registration order, fp32, each in row-major order,
tied parameters once, without gaps. It is cut into cells of 65,536 values on a grid that starts
at value 0; the last cell may be shorter. Parts, codec frames, norms and inclusion masks all
follow this grid, so none of them depends on the model's shapes.

    LayoutError (ValueError)   a module or a JSON text that does not fit

Parameters may be cut over several ranks, by FSDP2 or by other means: names and shapes are those of
whole tensors, so the layout and the vector know nothing of ranks (`dtensors`).

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor, nn

from atoll.compression import Codec, CodecError, staging
from atoll.compression.base import Frame
from atoll.compression.scratch import MAX_TILES
from atoll.optim.state import dtensors, vectors

CELL = 65_536  # values; 64 KiB in int8, which is one piece of a paced flow
MAX_NUMEL = 1 << 40  # a layout from a stranger claims no more than 4 TiB of fp32
MAX_JSON_BYTES = 1 << 24  # 100,000 parameters with names of 150 letters
TILE = 64  # SparseLoCo's and DeMo's chunks: 64 x 64 values
MAX_PIECE = 2 * CELL  # values, unless TILE rows have more: parts are cut between pieces only
AT_ONCE = MAX_TILES  # pieces that are encoded at once: more calls cost more than the cache gives
AT_ONCE_ON_DEVICE = 64  # of a GPU: 16 MiB of values, and some times as much of scratch beside it
RUN = 4 * CELL  # values of a pass: fewer would stay in the L2 cache, but then calls cost more
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
_BLOCK = re.compile(r"(?:^|\.)(\d+)\.")

Dims = tuple[int, ...]


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


class FragmentError(ValueError):
    """A layout that can't be cut like this, or frames that do not fit a fragment."""


class Piece(tuple[int, ...]):
    """The shape of a piece of one tensor, with that tensor's name.

    It equals and hashes as the bare shape does: only a codec by layers looks at the name.
    """

    layer: str

    def __new__(cls, dims: Dims, layer: str) -> Self:
        """Name a shape."""
        piece = super().__new__(cls, dims)
        piece.layer = layer
        return piece


def codec_of(codec: Codec, dims: Dims) -> Codec:
    """Return the codec of one piece.

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
        """Return F, the number of values."""
        return sum(stop - start for start, stop in self.spans)

    @cached_property
    def slices(self) -> tuple[slice, ...]:
        """Return the values of each piece, as slices of the F."""
        return piece_slices(self.pieces)

    def take(self, vector_N: Tensor) -> Tensor:
        """Return the fragment's values in its order; a view if they lie so in the vector."""
        return self.ordered(self.cut(vector_N))

    def put_(self, vector_N: Tensor, values_F: Tensor) -> None:
        """Write the fragment's values, in its order, to their places in a vector."""
        self.put_cut_(vector_N, self.unordered(values_F))

    def put_cut_(self, vector_N: Tensor, cut_F: Tensor) -> None:
        """Write values in the order of `cut` to their places in a vector."""
        for (start, stop), values in zip(self.spans, self._of_spans(cut_F), strict=True):
            vector_N[start:stop] = values

    def cut(self, vector_N: Tensor) -> Tensor:
        """Return the fragment's values in the order of the vector; a view if it is one span."""
        if len(self.spans) == 1:
            start, stop = self.spans[0]
            return vector_N[start:stop]
        return vectors.cat([vector_N[start:stop] for start, stop in self.spans])

    def ordered(self, cut_F: Tensor) -> Tensor:
        """Return values in the fragment's order, given those in the order of the vector."""
        if not self.tensors:
            return cut_F
        values_F = torch.empty_like(cut_F)
        for tiles, places in self._tiles(values_F, cut_F):
            tiles.copy_(places)
        return values_F

    def unordered(self, values_F: Tensor) -> Tensor:
        """Return values in the order of the vector, given those in the fragment's order."""
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
        first = bisect_right(self._starts, run.start) - 1
        for tensor in range(first, bisect_left(self._starts, run.stop)):
            shape, (start, stop) = self.tensors[tensor], self._starts[tensor : tensor + 2]
            within = range(max(run.start, start) - start, min(run.stop, stop) - start)
            views = [_tiled_run(cut_F[start:stop], shape, within) for cut_F in cuts_F]
            yield from zip(*views, strict=True)

    def aligned(self, values_F: Tensor, *vectors_N: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield runs of the fragment's values, each with its places in vectors of N; views.

        Runs of spans are short enough to stay in a processor's caches: over 30M values a pass that
        leaves them costs 4 to 8 ms. Runs of tiled tensors are all whole tiles of one tensor, or a
        margin of it.
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

    def part(self, start: int, stop: int) -> Fragment:
        """Return the pieces `[start, stop)` of a fragment without tiled tensors, as a fragment."""
        first, last, at = self.slices[start].start, self.slices[stop - 1].stop, 0
        spans: list[tuple[int, int]] = []
        for begin, end in self.spans:
            inside = max(first, at), min(last, at + end - begin)
            if inside[0] < inside[1]:
                spans.append((begin + inside[0] - at, begin + inside[1] - at))
            at += end - begin
        return Fragment(spans=tuple(spans), pieces=self.pieces[start:stop])

    @property
    def gaps(self) -> Iterator[slice]:
        """Return the parts of the vector before, between and after the spans."""
        start = 0
        for first, stop in self.spans:
            yield slice(start, first)
            start = stop
        yield slice(start, None)

    def mask(self, included: Tensor) -> Tensor:
        """Return bools that mark the values of some pieces, F in the order of the vector.

        Args:
            included: bool a piece.
        """
        mask_F = torch.empty(self.numel, dtype=torch.bool)
        start = 0
        for is_in, run in itertools.groupby(included.tolist()):
            stop = start + len(list(run))
            values = slice(self.slices[start].start, self.slices[stop - 1].stop)
            for (places,) in self.places(values, mask_F):
                places.fill_(is_in)
            start = stop
        return mask_F

    @cached_property
    def _starts(self) -> list[int]:
        """Return the start of each tensor and the end of the last one."""
        return [0, *itertools.accumulate(map(math.prod, self.tensors))]

    def _of_spans(self, values_F: Tensor) -> Sequence[Tensor]:
        """Return views of the values of each span."""
        return torch.split(values_F, [stop - start for start, stop in self.spans])

    def _tiles(self, values_F: Tensor, cut_F: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield runs of the fragment's values, each with its places in the tensors; views."""
        start = 0
        for shape in self.tensors:
            stop = start + math.prod(shape)
            at = start
            for places in _tiled_places(cut_F[start:stop], shape):
                yield values_F[at : at + places.numel()].view(places.shape), places
                at += places.numel()
            start = stop


def whole(layout: Layout) -> Fragment:
    """Return all values, in cells of the grid."""
    return Fragment(spans=((0, layout.numel),), pieces=grid(layout.numel))


def by_tensor(layout: Layout) -> Fragment:
    """Return all values, a piece a tensor; large tensors by rows, 64 or a multiple of it."""
    return Fragment(spans=((0, layout.numel),), pieces=_named(layout, _by_rows))


def tiled(layout: Layout) -> Fragment:
    """Return all values, tensor by tensor in cells, those of a 64 x 64 tile of a matrix in a run.

    Whole tiles come first, row by row; the margins at the right and at the bottom follow.
    Tensors of more dimensions are the matrix [dims[0], rest]; vectors keep their order.
    """
    pieces = _named(layout, lambda shape: grid(math.prod(shape)))
    return Fragment(spans=((0, layout.numel),), pieces=pieces, tensors=layout.shapes)


def sequential(layout: Layout, count: int, *, tensors: bool = False) -> tuple[Fragment, ...]:
    """Return fragments of consecutive blocks, as even in blocks as possible.

    The parameters of a block share the first number in their names (`blocks.3.`). A parameter
    without a number joins the block before it, or the first block if it comes earlier. Fragments
    are in pieces as `by_tensor` makes them if `tensors`, else in cells.

    Raises:
        FragmentError: when there are fewer blocks than fragments.
    """
    blocks = _blocks(layout)
    _require(blocks, count)
    places = [block * count // len(blocks) for block in range(len(blocks))]
    return _fragments(layout, places, tensors)


def strided(layout: Layout, count: int, *, tensors: bool = False) -> tuple[Fragment, ...]:
    """Return fragments of every `count`-th block; blocks and pieces as in `sequential`.

    Raises:
        FragmentError: when there are fewer blocks than fragments.
    """
    blocks = _blocks(layout)
    _require(blocks, count)
    return _fragments(layout, [block % count for block in range(len(blocks))], tensors)


def grid(numel: int) -> tuple[Dims, ...]:
    """Return pieces of one cell each; the last one may be shorter."""
    full, rest = divmod(numel, CELL)
    return ((CELL,),) * full + (((rest,),) if rest else ())


def piece_slices(pieces: Sequence[Dims]) -> tuple[slice, ...]:
    """Return the values of each piece, one after the other."""
    slices, start = [], 0
    for dims in pieces:
        stop = start + math.prod(dims)
        slices.append(slice(start, stop))
        start = stop
    return tuple(slices)


def batches(
    codec: Codec, pieces: Sequence[Dims], at_once: int = AT_ONCE
) -> Iterator[tuple[slice, Codec]]:
    """Yield runs of pieces that are encoded at once, each with its codec.

    Pieces share a run if they are equally long and the codec looks at values alone, or if the codec
    takes pieces of any shapes together. A codec by layers ends a run where its choice changes.
    """
    first = 0
    while first < len(pieces):
        dims, own = pieces[first], codec_of(codec, pieces[first])
        last = first + 1
        while last < min(len(pieces), first + at_once):
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


def decode_pieces(codec: Codec, frames: Sequence[Frame], pieces: Sequence[Dims]) -> Tensor:
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
            # a batch decodes or fails as one, so the error cannot name the piece
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
    """Cut some tensors, all by default, into pieces that know their names.

    Equal pieces of a tensor are one object: a model of 70B has a million of them.
    """
    pieces = list[Piece]()
    for index in range(len(layout.names)) if indices is None else indices:
        dims = cut(layout.shapes[index])
        named = {each: Piece(each, layout.names[index]) for each in set(dims)}
        pieces += map(named.__getitem__, dims)
    return tuple(pieces)


def _by_rows(shape: Dims) -> list[Dims]:
    """Cut a tensor's shape into pieces of at most `MAX_PIECE` values, but of `TILE` rows or more.

    Steps are multiples of `TILE`, so that only the last piece can cut through DeMo's tiles.
    """
    if math.prod(shape) <= MAX_PIECE:
        return [shape]
    rows, *rest = shape
    step = max(TILE, MAX_PIECE // math.prod(rest) // TILE * TILE)
    return [(min(step, rows - start), *rest) for start in range(0, rows, step)]


def _tiled_places(values: Tensor, shape: Dims) -> list[Tensor]:
    """Return views of a tensor's values: whole tiles, the columns right of them, the rows below.

    Copying strided views takes 28 ms at 30M values; gathering through a table of indices takes 90.
    """
    if len(shape) < 2:
        return [values]
    matrix_RC = values.view(shape[0], -1)
    down, across = (size // TILE for size in matrix_RC.shape)
    tiled_RC = matrix_RC[: down * TILE, : across * TILE]
    tiles = tiled_RC.view(down, TILE, across, TILE).transpose(1, 2)
    return [tiles, matrix_RC[: down * TILE, across * TILE :], matrix_RC[down * TILE :]]


def _tiled_run(values: Tensor, shape: Dims, run: range) -> Iterator[Tensor]:
    """Yield views of some of a tensor's values, consecutive in the order of its tiles."""
    at = 0
    for places in _tiled_places(values, shape):
        start, stop = max(run.start, at) - at, min(run.stop, at + places.numel()) - at
        if start < stop:
            yield from _consecutive(places, start, stop)
        at += places.numel()


def _consecutive(places: Tensor, start: int, stop: int) -> Iterator[Tensor]:
    """Yield the values `[start, stop)` of a view, by rows of blocks: tiles, or single values.

    A run may begin and end within a row of tiles, so it is up to three views: the rest of a row,
    whole rows, and the start of a row.
    """
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
    """Return the indices of each block's parameters, in order."""
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
    starts = [0, *itertools.accumulate(layout.sizes)]
    fragments: list[Fragment] = []
    for key in sorted(members):
        indices = sorted(members[key])
        spans = _joined([(starts[i], starts[i + 1]) for i in indices])
        cells = grid(sum(stop - start for start, stop in spans))
        pieces = _named(layout, _by_rows, indices) if tensors else cells
        fragments.append(Fragment(spans=spans, pieces=pieces))
    return tuple(fragments)


def _joined(spans: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Join neighbouring runs."""
    joined: list[tuple[int, int]] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


class Difference:
    """a - b, of a fragment's values in its order; both must stay as they are while it is used.

    The encoder computes a pseudo-gradient with it piece by piece, beside the inner steps, so a
    round need not write all of it to memory.
    """

    def __init__(
        self, fragment: Fragment, a_F: Tensor, b_F: Tensor, *, spends: bool = False
    ) -> None:
        """Keep two vectors returned by `Fragment.cut`.

        Args:
            fragment: whose order the difference has.
            a_F: the minuend.
            b_F: the subtrahend.
            spends: whether nobody reads `b_F` afterwards, so that it may be overwritten.
        """
        self._fragment = fragment
        self.a_F, self.b_F, self.spends = a_F, b_F, spends

    @property
    def spent_F(self) -> Tensor | None:  # noqa: N802
        """Return memory of F values that may be overwritten, each run after it was asked for.

        None if there is none, or if its values lie in another order.
        """
        return self.b_F if self.spends and not self._fragment.tensors else None

    def __call__(self) -> Tensor:
        """Return all of it, as a new vector of F values."""
        values_F = vectors.empty(self._fragment.numel)
        self.write_(slice(0, self._fragment.numel), values_F)
        return values_F

    def write_(self, run: slice, out: Tensor) -> None:
        """Write the values of `run`, whole pieces of the fragment, to `out`."""
        at = 0
        for a, b in self._fragment.places(run, self.a_F, self.b_F):
            torch.sub(a, b, out=out[at : at + a.numel()].view(a.shape))
            at += a.numel()
