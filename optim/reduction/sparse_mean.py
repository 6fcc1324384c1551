"""The mean of members' sparse frames of a part, encoded again cell by cell.

Members' values wait, at their indices, until every member's cell is present. Then a few cells at a
time are made dense in scratch: a pass over all values would cost more than the sent ones.

# C cells, N values of a cell
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from atoll.compression import Codec, TopK
from atoll.compression.scratch import room
from atoll.compression.sparse import Sparse
from atoll.optim.reduction.cells import Cells, Sent, encode_sent, require_finite

Weights = Sequence[tuple[range, float]]
"""Consecutive runs of cells, and the weight behind each."""


class SparseMean:
    """Mean of sparse frames over cells `[start, stop)`; indices count from the part's first."""

    def __init__(self, cells: Cells, start: int, stop: int) -> None:
        """Begin an empty mean."""
        self._cells, self._start = cells, start
        self._base = cells.fragment.slices[start].start
        self._numel = self._values(0, stop - start).stop
        self._waiting: dict[int, list[Sparse]] = {}
        """Sent values whose cells are not encoded yet, by member, in the order of the cells."""
        self._decoded: list[Sparse] = []
        self._lost: list[Sparse] = []

    def add(self, member: int, first: int, sent: Sent, share: float) -> None:
        """Take a member's values of the cells from `first` on.

        Args:
            member: its index; sums are in the order of these.
            first: cell of the part; a member's cells come in order.
            sent: its decoded values.
            share: weight times clip factor.
        """
        assert sent.indices is not None, "a sparse codec gives them"
        waits = self._part(sent.indices + self._values(first, first + 1).start, sent.values * share)
        self._waiting.setdefault(member, []).append(waits)

    def encode(self, weights: Weights) -> list[bytes]:
        """Return the reduced frames of the next cells, whose sums are complete.

        Raises:
            CodecError: when the mean is not finite.
        """
        first, stop = weights[0][0].start, weights[-1][0].stop
        # Sorted, so that sums do not depend on the order in which members' values arrived.
        sent = [self._take(member, self._values(first, stop)) for member in sorted(self._waiting)]
        of_cells = [weight for run, weight in weights for _ in run]
        runs = [
            self._mean(run, codec, of_cells[run.start - self._start - first :], sent)
            for run, codec in self._cells.runs(self._start + first, self._start + stop)
        ]
        for alike in _alike(runs):
            _encode_together(alike)
        for run in runs:
            self._keep(run)
        return [frame for run in runs for frame in run.frames]

    def finish(self) -> None:
        """Join the results of all cells once, so that readers of `decoded` and `lost` need not."""
        self._decoded, self._lost = [self.decoded], [self.lost]

    @property
    def decoded(self) -> Sparse:
        """Return the values that the frames decode to, once all cells are encoded."""
        return self._joined(self._decoded)

    @property
    def lost(self) -> Sparse:
        """Return W (a - u), once all cells are encoded; an index may come twice with one value."""
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
        """Return a member's next values; later ones stay queued."""
        waits = self._joined(self._waiting.pop(member))
        stop = int(torch.searchsorted(waits.indices, values.stop))
        if stop < len(waits.indices):
            self._waiting[member] = [self._part(waits.indices[stop:], waits.values[stop:])]
        return self._part(waits.indices[:stop], waits.values[:stop])

    def _mean(
        self, run: range, codec: Codec, weights: Sequence[float], sent: Sequence[Sparse]
    ) -> _Run:
        """Compute the mean of some equal cells and select the values of it to send."""
        pieces = self._cells.fragment.pieces[run.start : run.stop]
        values = self._values(run.start - self._start, run.stop - self._start)
        mean, at = self._sum(values, sent)
        # A weight of 0 means that no member counts in the cell: its sum is 0, and stays so.
        divisors_C = torch.tensor([weight or 1.0 for weight in weights[: len(run)]])
        rows_CN = mean.view(len(run), -1)
        rows_CN.div_(divisors_C.unsqueeze(1))
        if isinstance(codec, TopK) and codec.go_together(rows_CN.shape[1]):
            frames, kept = list[bytes](), codec.choose_rows(rows_CN)
        else:
            frames, encoded = encode_sent(codec, mean, pieces)
            assert encoded.indices is not None, "a sparse codec gives them"
            kept = Sparse(
                indices=encoded.indices, values=encoded.values, shape=tuple(rows_CN.shape)
            )
        # Elsewhere the mean is 0 and decodes to 0. The codec may keep values that no peer sent.
        somewhere = torch.cat([*at, kept.indices])
        return _Run(
            start=values.start,
            codec=codec,
            indices=somewhere,
            mean=mean.index_select(0, somewhere),
            weights=divisors_C.index_select(0, somewhere // rows_CN.shape[1]),
            kept=kept,
            frames=frames,
        )

    def _sum(self, run: slice, sent: Sequence[Sparse]) -> tuple[Tensor, list[Tensor]]:
        """Return the sum of some values, in scratch, and each member's indices in it."""
        total = room("sums", (run.stop - run.start,), torch.device("cpu"), torch.float32).zero_()
        ends, at = torch.tensor([run.start, run.stop]), []
        for of_member in sent:
            first, stop = torch.searchsorted(of_member.indices, ends).tolist()
            at.append(of_member.indices[first:stop] - run.start)
            Sent(values=of_member.values[first:stop], indices=at[-1]).add_to_(total)
        return total, at

    def _keep(self, run: _Run) -> None:
        """Keep the decoded and the lost values of some cells, at the indices sent or kept."""
        require_finite(run.kept.values)
        numel = math.prod(run.kept.shape)
        # Only the places that are read below are written: the rest of the scratch is arbitrary.
        decoded = room("sums", (numel,), torch.device("cpu"), torch.float32)
        decoded.index_fill_(0, run.indices, 0.0)
        decoded.scatter_(0, run.kept.indices, run.kept.values)
        lost = run.mean.sub_(decoded.index_select(0, run.indices)).mul_(run.weights)
        self._decoded.append(self._part(run.kept.indices + run.start, run.kept.values))
        self._lost.append(self._part(run.indices + run.start, lost))


@dataclass(kw_only=True)
class _Run:
    """Some cells of one length, of which the mean is known."""

    start: int
    """First of their values in the part."""
    codec: Codec
    indices: Tensor
    """Places that anybody sent or the codec kept; some come twice."""
    mean: Tensor
    """Values of the mean at `indices`."""
    weights: Tensor
    """Weights behind the mean at `indices`."""
    kept: Sparse
    """Selected values, a row a cell; replaced by their decoded ones once they are encoded."""
    frames: list[bytes]
    """One a cell; empty until they are encoded."""


def _alike(runs: Sequence[_Run]) -> Iterable[Sequence[_Run]]:
    """Group the runs that are not encoded yet by codec and length of a cell."""
    groups: dict[tuple[Codec, int], list[_Run]] = {}
    for run in runs:
        if not run.frames:
            groups.setdefault((run.codec, run.kept.shape[1]), []).append(run)
    return groups.values()


def _encode_together(runs: Sequence[_Run]) -> None:
    """Encode the selections of some runs as one: 13 ms of an owner's round became 3."""
    codec, parts = runs[0].codec, [run.kept for run in runs]
    assert isinstance(codec, TopK), "others encode at once"
    chosen = Sparse(
        indices=torch.cat([part.indices for part in parts]),
        values=torch.cat([part.values for part in parts]),
        shape=(sum(part.shape[0] for part in parts), parts[0].shape[1]),
    )
    frames, sent = codec.encode_chosen(chosen)
    values = torch.split(sent.values, [len(part.values) for part in parts])
    of_runs = iter(frames)
    for run, of_run in zip(runs, values, strict=True):
        run.kept = replace(run.kept, values=of_run)
        run.frames = list(itertools.islice(of_runs, run.kept.shape[0]))
