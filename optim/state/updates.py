"""Updates: what is applied at a position, all values or those that were sent.

Of a sparse codec's update 1.56% is not 0. Written out and read again the zeros cost more than all
else that is done with it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from atoll.compression.scratch import room
from atoll.compression.sparse import Sparse
from atoll.optim.state import vectors
from atoll.optim.state.layout import Fragment

Update = Tensor | Sparse
"""fp32 values, or those of them that were sent, at their indices."""

PIECES = 8  # put between their zeros at once: 2 MiB, which stays in the cache


def numel_of(update: Update) -> int:
    """Values of an update, zeros counted."""
    return math.prod(update.shape)


def dense(update: Update) -> Tensor:
    """All values of an update."""
    if isinstance(update, Tensor):
        return update
    return vectors.empty(numel_of(update)).zero_().scatter_(0, update.indices, update.values)


def joined(parts: Sequence[Update]) -> Update:
    """Updates of consecutive values, as one; sparse if all are."""
    if all(isinstance(part, Sparse) for part in parts):
        return _joined_sparse([part for part in parts if isinstance(part, Sparse)])
    return vectors.joined([dense(part) for part in parts])


def aligned(update: Update, fragment: Fragment, *vectors_N: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Align an update like `Fragment.aligned`, with sent values between zeros in scratch."""
    if isinstance(update, Sparse) and len(fragment.spans) == 1:
        yield from _aligned_sparse(update, fragment, *map(fragment.cut, vectors_N))
    else:
        yield from fragment.aligned(dense(update), *vectors_N)


def _joined_sparse(parts: Sequence[Sparse]) -> Sparse:
    starts = [0, *itertools.accumulate(map(numel_of, parts))]
    pairs = zip(parts, starts, strict=False)
    return Sparse(
        indices=torch.cat([part.indices + start for part, start in pairs]),
        values=torch.cat([part.values for part in parts]),
        shape=(starts[-1],),
    )


def _aligned_sparse(
    update: Sparse, fragment: Fragment, *cuts_F: Tensor
) -> Iterator[tuple[Tensor, ...]]:
    for run, sent in _runs(update, fragment):
        values = room("update", (run.stop - run.start,), torch.device("cpu"), torch.float32)
        values.zero_().scatter_(0, update.indices[sent] - run.start, update.values[sent])
        at = 0
        for places in fragment.places(run, *cuts_F):
            some = values[at : at + places[0].numel()]
            yield some.view(places[0].shape), *places
            at += places[0].numel()


def _runs(update: Sparse, fragment: Fragment) -> Iterator[tuple[slice, slice]]:
    """Runs of whole pieces, and what was sent of each."""
    last = len(fragment.slices) - 1
    stops = [fragment.slices[min(i + PIECES - 1, last)].stop for i in range(0, last + 1, PIECES)]
    sent = torch.searchsorted(update.indices, torch.tensor(stops)).tolist()
    runs = zip(itertools.pairwise([0, *stops]), itertools.pairwise([0, *sent]), strict=True)
    yield from ((slice(*run), slice(*of_run)) for run, of_run in runs)
