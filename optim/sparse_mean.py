"""The mean of what members sent of a part, of a sparse codec, encoded again cell by cell.

Nothing is made dense but some cells at a time, in scratch: what members sent waits, as values at
indices, until nobody's cell is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from atoll.compression.scratch import room
from atoll.compression.sparse import Sparse
from atoll.optim.cells import Cells, require_finite
from atoll.optim.sent import Sent, encode_sent

Weights = Sequence[tuple[range, float]]
"""Consecutive runs of cells, and the weight behind each."""


class SparseMean:
    """Of the cells `[start, stop)` of a fragment; cells and indices count from the part's first."""

    def __init__(self, cells: Cells, start: int, stop: int) -> None:
        """Nothing was sent yet."""
        self._cells, self._start = cells, start
        self._base = cells.fragment.slices[start].start
        self._numel = self._values(0, stop - start).stop
        self._waiting: dict[int, list[Sparse]] = {}
        """by member, in the order of the cells"""
        self._decoded: list[Sparse] = []
        self._lost: list[Sparse] = []

    def add(self, member: int, first: int, sent: Sent, share: float) -> None:
        """Take what a member sent of the cells from `first` on; its next ones follow those."""
        assert sent.indices is not None, "a sparse codec tells them"
        waits = self._part(sent.indices + self._values(first, first + 1).start, sent.values * share)
        self._waiting.setdefault(member, []).append(waits)

    def encode(self, weights: Weights) -> list[bytes]:
        """The reduced frames of the next cells.

        Raises:
            CodecError: when the mean is not finite.
        """
        first, stop = weights[0][0].start, weights[-1][0].stop
        sent = [self._take(member, self._values(first, stop)) for member in sorted(self._waiting)]
        frames: list[bytes] = []
        for run, codec in self._cells.runs(self._start + first, self._start + stop):
            pieces = self._cells.fragment.pieces[run.start : run.stop]
            cells = range(run.start - self._start, run.stop - self._start)
            mean, indices = self._sum(self._values(cells.start, cells.stop), sent)
            parts = list(self._weighted(mean, cells, weights))
            for part, weight in parts:
                part.div_(weight)
            encoded, kept = encode_sent(codec, mean, pieces)
            require_finite(kept.values)
            kept.take_from_(mean)
            for part, weight in parts:
                part.mul_(weight)
            self._keep(cells, mean, kept, indices)
            frames += encoded
        return frames

    def finish(self) -> None:
        """Put together what all cells came to, so that who asks for it need not."""
        self._decoded, self._lost = [self.decoded], [self.lost]

    @property
    def decoded(self) -> Sparse:
        """What the frames decode to, once all cells are encoded."""
        return self._joined(self._decoded)

    @property
    def lost(self) -> Sparse:
        """W (a - u), once all cells are encoded; an index may come twice, with the same value."""
        return self._joined(self._lost)

    def _values(self, first: int, stop: int) -> slice:
        values = self._cells.values(self._start + first, self._start + stop)
        return slice(values.start - self._base, values.stop - self._base)

    def _part(self, indices: Tensor, values: Tensor) -> Sparse:
        return Sparse(indices=indices, values=values, shape=(self._numel,))

    def _joined(self, parts: Sequence[Sparse]) -> Sparse:
        if len(parts) == 1:
            return parts[0]
        indices = torch.cat([torch.empty(0, dtype=torch.int64), *(p.indices for p in parts)])
        return self._part(indices, torch.cat([torch.empty(0), *(p.values for p in parts)]))

    def _take(self, member: int, values: slice) -> Sparse:
        """What a member sent of the next values; what comes after them waits on."""
        waits = self._joined(self._waiting.pop(member))
        stop = int(torch.searchsorted(waits.indices, values.stop))
        if stop < len(waits.indices):
            self._waiting[member] = [self._part(waits.indices[stop:], waits.values[stop:])]
        return self._part(waits.indices[:stop], waits.values[:stop])

    def _sum(self, run: slice, sent: Sequence[Sparse]) -> tuple[Tensor, list[Tensor]]:
        """The sum of some values, in scratch, and the indices in it of what each member sent."""
        total = room("sums", (run.stop - run.start,), torch.device("cpu"), torch.float32).zero_()
        ends, at = torch.tensor([run.start, run.stop]), []
        for of_member in sent:
            first, stop = torch.searchsorted(of_member.indices, ends).tolist()
            at.append(of_member.indices[first:stop] - run.start)
            Sent(values=of_member.values[first:stop], indices=at[-1]).add_to_(total)
        return total, at

    def _weighted(
        self, total: Tensor, cells: range, weights: Weights
    ) -> Iterator[tuple[Tensor, float]]:
        """Values with one weight above 0 behind them, which are a view, and that weight."""
        start = self._values(cells.start, cells.stop).start
        for run, weight in weights:
            first, stop = max(run.start, cells.start), min(run.stop, cells.stop)
            if weight > 0 and first < stop:
                values = self._values(first, stop)
                yield total[values.start - start : values.stop - start], weight

    def _keep(self, cells: range, lost: Tensor, kept: Sent, at: Sequence[Tensor]) -> None:
        """Note what some cells decode to and what was lost, where anything was sent or kept."""
        assert kept.indices is not None, "a sparse codec tells them"
        start = self._values(cells.start, cells.stop).start
        somewhere = torch.cat([*at, kept.indices])
        self._decoded.append(self._part(kept.indices + start, kept.values))
        self._lost.append(self._part(somewhere + start, lost.index_select(0, somewhere)))
