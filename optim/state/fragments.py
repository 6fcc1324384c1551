"""Fragments of a layout: the sets of its values that are reduced at once.

A fragment is cut into pieces, and each piece is one codec frame (`pieces.py`).

    whole        all values, in cells
    by_tensor    all values, tensors in pieces of whole rows (codecs of matrices: `dct`)
    tiled        all values, tensors in cells, matrices in tiles of 64 x 64 (SparseLoCo)
    sequential   consecutive blocks of layers (Streaming DiLoCo)
    strided      every n-th block of layers, the one that the paper found best
"""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from atoll.optim.state import vectors
from atoll.optim.state.layout import CELL, Layout
from atoll.optim.state.pieces import Dims, FragmentError, Piece, grid, piece_slices

TILE = 64  # SparseLoCo's and DeMo's chunks: 64 x 64 values
MAX_PIECE = 2 * CELL  # values, unless TILE rows have more: parts are cut between pieces only
RUN = 4 * CELL  # values of a pass: fewer would stay in the L2 cache, but then calls cost more
_BLOCK = re.compile(r"(?:^|\.)(\d+)\.")


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
