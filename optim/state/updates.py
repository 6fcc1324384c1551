"""Updates: the values that are applied at a position, all of them or those that were sent.

Of an update by `topk(k=64)`, 1.56% is not 0. Writing and reading its zeros costs more than all
other work on it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from atoll.compression.scratch import room
from atoll.compression.sparse import Sparse
from atoll.compression.threads import share
from atoll.optim.state import vectors
from atoll.optim.state.fragments import Fragment

Update = Tensor | Sparse
"""All F values, fp32, or those of them that were sent, at their indices."""

PIECES = 8  # cells made dense at once: 2 MiB, which stays in the cache


def numel_of(update: Update) -> int:
    """Return the number of values of an update, zeros included."""
    return math.prod(update.shape)


def dense(update: Update) -> Tensor:
    """Return all values of an update, F in fp32."""
    if isinstance(update, Tensor):
        return update
    return vectors.empty(numel_of(update)).zero_().scatter_(0, update.indices, update.values)


def joined(parts: Sequence[Update]) -> Update:
    """Join updates of consecutive values; the result is sparse if all of them are."""
    sparse = [part for part in parts if isinstance(part, Sparse)]
    if len(sparse) < len(parts):
        return vectors.joined([dense(part) for part in parts])
    starts = [0, *itertools.accumulate(map(numel_of, sparse))]
    pairs = zip(sparse, starts, strict=False)
    return Sparse(
        indices=torch.cat([part.indices + start for part, start in pairs]),
        values=torch.cat([part.values for part in sparse]),
        shape=(starts[-1],),
    )


def for_each_run(
    work: Callable[..., None], update: Update, fragment: Fragment, *vectors_N: Tensor
) -> None:
    """Call a function with each run of `Fragment.aligned`, shared by threads.

    What was sent lies between zeros in scratch, which is good until the function returns.
    """
    if isinstance(update, Sparse) and len(fragment.spans) == 1:
        _for_each_sparse(work, update, fragment, *map(fragment.cut, vectors_N))
    else:
        runs = list(fragment.aligned(dense(update), *vectors_N))
        share(lambda run: work(*run), runs)


def _for_each_sparse(
    work: Callable[..., None], update: Sparse, fragment: Fragment, *cuts_F: Tensor
) -> None:
    # Values go between zeros in scratch because writing to the sent places alone would gain
    # nothing, as estimated: computing the places of tiled values costs what the zeros do.
    last = len(fragment.slices) - 1
    stops = [fragment.slices[min(i + PIECES - 1, last)].stop for i in range(0, last + 1, PIECES)]
    ends = torch.searchsorted(update.indices, torch.tensor(stops)).tolist()

    def of_run(start: int, stop: int, first: int, end: int) -> None:
        values = room("update", (stop - start,), torch.device("cpu"), torch.float32)
        values.zero_().scatter_(0, update.indices[first:end] - start, update.values[first:end])
        at = 0
        for places in fragment.places(slice(start, stop), *cuts_F):
            some = values[at : at + places[0].numel()]
            work(some.view(places[0].shape), *places)
            at += places[0].numel()

    runs = zip(itertools.pairwise([0, *stops]), itertools.pairwise([0, *ends]), strict=True)
    share(lambda run: of_run(*run), [(*values, *sent) for values, sent in runs])
