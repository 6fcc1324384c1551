"""Ranges of a fragment: which rank keeps which pieces.

A range is a run of whole pieces, so that every frame is of one rank. Of a fragment whose tensors
are reordered in tiles, a range also has to be a run of the vector: it begins with a tensor, or
with a row of tiles of a matrix that has no margin at its right.

    F values of a fragment, P pieces
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from atoll.optim.state.fragments import TILE, Fragment
from atoll.optim.state.pieces import Dims


@dataclass(frozen=True, kw_only=True)
class Range:
    """The share of one rank in a fragment."""

    pieces: slice
    """Range of the P pieces."""

    values: slice
    """Range of the F values, in the fragment's order and in that of `cut`."""

    spans: tuple[tuple[int, int], ...]
    """Runs of the layout's vector."""

    tensors: tuple[Dims, ...]
    """Shapes of the reordered tensors in it, of the first and last perhaps a part."""

    def fragment(self, of: Fragment, start: int) -> Fragment:
        """Return the range as a fragment of own values that begins at `start`."""
        numel = self.values.stop - self.values.start
        return Fragment(
            spans=((start, start + numel),), pieces=of.pieces[self.pieces], tensors=self.tensors
        )


def ranges(fragment: Fragment, ranks: int) -> list[Range]:
    """Cut a fragment into one range a rank, as even as its pieces allow; some may be empty."""
    starts = [0, *itertools.accumulate(math.prod(dims) for dims in fragment.pieces)]
    places = _places(fragment)
    cuts = sorted(places)  # numbers of pieces
    bounds = [0]
    for rank in range(1, ranks):
        even = fragment.numel * rank / ranks
        at = bisect_left(cuts, even, key=starts.__getitem__)
        before, after = cuts[max(0, at - 1)], cuts[at]
        bounds.append(before if even - starts[before] < starts[after] - even else after)
    bounds.append(len(fragment.pieces))
    pairs = itertools.pairwise(bounds)
    return [_range(fragment, starts, places, first, last) for first, last in pairs]


def _range(
    fragment: Fragment, starts: list[int], places: dict[int, tuple[int, int]], first: int, last: int
) -> Range:
    values = slice(starts[first], starts[last])
    return Range(
        pieces=slice(first, last),
        values=values,
        spans=tuple(_runs(fragment, values)),
        tensors=tuple(_shapes(fragment, places[first], places[last])),
    )


def _runs(fragment: Fragment, values: slice) -> Iterator[tuple[int, int]]:
    """Yield the runs of the vector that hold some values of `cut`."""
    done = 0
    for start, stop in fragment.spans:
        first, last = max(values.start, done), min(values.stop, done + stop - start)
        if first < last:
            yield start + first - done, start + last - done
        done += stop - start


def _places(fragment: Fragment) -> dict[int, tuple[int, int]]:
    """Return the numbers of pieces before which a range may end, each with tensor and row."""
    if not fragment.tensors:
        return {piece: (0, 0) for piece in range(len(fragment.pieces) + 1)}
    found, value = dict[int, tuple[int, int]](), 0
    pieces = {0: 0}  # by the value at which they start
    for piece, dims in enumerate(fragment.pieces):
        value += math.prod(dims)
        pieces[value] = piece + 1
    start = 0
    for tensor, shape in enumerate(fragment.tensors):
        for row in _rows(shape):
            at = start + row * math.prod(shape[1:])
            if at in pieces:
                found[pieces[at]] = (tensor, row)
        start += math.prod(shape)
    return found | {len(fragment.pieces): (len(fragment.tensors), 0)}


def _rows(shape: Dims) -> range:
    """Return the rows of a tensor before which all values come earlier in both orders."""
    rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, 1)
    has_margin = columns % TILE != 0
    return range(1) if has_margin or rows < TILE else range(0, rows // TILE * TILE, TILE)


def _shapes(fragment: Fragment, first: tuple[int, int], last: tuple[int, int]) -> Iterator[Dims]:
    """Yield the shapes of the tensors from one place to another."""
    for tensor in range(first[0], min(last[0] + 1, len(fragment.tensors))):
        rows, *rest = fragment.tensors[tensor] or (1,)
        begin = first[1] if tensor == first[0] else 0
        end = last[1] if tensor == last[0] else rows
        if begin < end:
            yield (end - begin, *rest) if (begin, end) != (0, rows) else fragment.tensors[tensor]
