"""Low rank in rounds: matrices travel as the factors of P Q^T, in two exchanges under one entry.

PowerSGD (arXiv:1905.13727) with the first phase of one round made by the second phase of the last.
A cell is a tensor, seen as the matrix M [dims[0], rest]. With the Q of the state:

    P_i = M_i orthonormal(Q)       members to the owner
    P   = orthonormal(mean P_i)    the owner, once; what everyone decodes of it counts
    Q_i = M_i^T P                  members to the owner
    Q   = mean Q_i                 the owner; the next state's Q
    u   = P Q^T                    everyone: rank outer products in order, multiply, then add

So u is the mean of the M_i that are in Q, projected on the span of P, whichever members P came
from. Each member's error is its input less u (`contribution.py`). A tensor that factors would
shrink by less than `MIN_COMPRESSION_RATE` has no P, and travels whole in the place of its Q.

The frame of a cell in an entry is the frame of P and the frame of Q, both by the codec `values`.
Their lengths follow from the shape. In the state's memory the Qs lie last, one after another,
[columns, rank] each. If an update's Q is all zeros the old one stays, because a Q of zeros has no
directions for the next round to begin with.

# F values of a fragment; C of a cell; K of all Qs; M of the state's memory; R rows, r rank
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from atoll.compression import CodecError, Fp32, PowerSGD
from atoll.compression.powersgd import as_matrix, matrix_shape, orthonormal, outer_sum, start_factor
from atoll.optim.reduction.cells import Bytes, Cells, require_finite, unpack
from atoll.optim.state import halves
from atoll.optim.state.fragments import Fragment
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import OuterState, StateError, is_finite
from atoll.optim.state.pieces import Dims, piece_slices

MIN_COMPRESSION_RATE = 2.0  # PyTorch's PowerSGD hook sends tensors that shrink by less whole
INPUT = Fp32()  # a member keeps its matrices exact until they are settled: both factors need them


def tensors(layout: Layout) -> Fragment:
    """Return all values, a piece a tensor of any size: a matrix is approximated as a whole."""
    return Fragment(spans=((0, layout.numel),), pieces=layout.shapes)


def rank_of(dims: Dims, rank: int) -> int:
    """Return the columns of a tensor's factors; 0 if it is sent whole."""
    if len(dims) < 2:
        return 0
    rows, columns = matrix_shape(dims)
    used = min(rank, rows, columns)
    shrinks = (rows + columns) * used * MIN_COMPRESSION_RATE < rows * columns
    return used if shrinks else 0


def warm_numel(layout: Layout, rank: int) -> int:
    """Return K, the number of values of all Qs."""
    return sum(matrix_shape(dims)[1] * rank_of(dims, rank) for dims in layout.shapes)


def cold(layout: Layout, rank: int) -> Tensor:
    """Return the Qs that a run begins with, K values: a fixed hash, so that all peers agree."""
    starts = [torch.empty(0)]
    for dims in layout.shapes:
        if used := rank_of(dims, rank):
            start_CK = start_factor(matrix_shape(dims)[1], used, torch.device("cpu"))
            starts.append(start_CK.reshape(-1))
    return torch.cat(starts)


@dataclass(frozen=True, kw_only=True, eq=False)
class FirstCells(Cells):
    """The factors P of all cells, empty for tensors that are sent whole."""

    together: ClassVar[bool] = False

    def encode_mean(self, index: int, mean_C: Tensor) -> bytes:
        """Return the frame of an orthonormal basis of a mean.

        Raises:
            CodecError: when it holds NaN or infinity.
        """
        if mean_C.numel() and is_finite(mean_C):  # the codec refuses other values by name
            mean_C = orthonormal(mean_C.view(self.dims(index))).contiguous()
        return super().encode_mean(index, mean_C)


@dataclass(frozen=True, kw_only=True, eq=False)
class LowRankCells(Cells):
    """The cells of a whole model, a tensor each, as factors."""

    together: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Refuse other codecs than `powersgd`.

        Raises:
            CodecError: when the codec has no factors.
        """
        super().__post_init__()
        if not isinstance(self.codec, PowerSGD):
            raise CodecError(f"expected powersgd, got {self.codec.spec}")

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Return the columns of each cell's factors; 0 if it is sent whole."""
        return tuple(rank_of(dims, self._powersgd.rank) for dims in self.fragment.pieces)

    @cached_property
    def first(self) -> FirstCells:
        """Return the frames of the first exchange."""
        pieces = [
            (matrix_shape(dims)[0], rank) if rank else (0,)
            for dims, rank in zip(self.fragment.pieces, self.ranks, strict=True)
        ]
        return FirstCells(codec=self._powersgd.values, fragment=_one_after_another(pieces))

    @cached_property
    def second(self) -> Cells:
        """Return the frames of the second exchange."""
        pieces = [
            (matrix_shape(dims)[1], rank) if rank else dims
            for dims, rank in zip(self.fragment.pieces, self.ranks, strict=True)
        ]
        return Cells(codec=self._powersgd.values, fragment=_one_after_another(pieces))

    @property
    def _powersgd(self) -> PowerSGD:
        assert isinstance(self.codec, PowerSGD), "checked on creation"
        return self.codec

    def max_sent_bytes(self, index: int) -> int:
        """Return the bytes of both frames of one member's cell, which are exact."""
        return self.first.max_sent_bytes(index) + self.second.max_sent_bytes(index)

    @cached_property
    def _most_bytes(self) -> list[int]:
        firsts, seconds = self.first._most_bytes, self.second._most_bytes
        return [first + second for first, second in zip(firsts, seconds, strict=True)]

    def encode(self, values_F: Tensor) -> list[bytes]:
        """Encode a member's own values, F, for the round: fp32, from which factors are made.

        Raises:
            CodecError: when the values hold NaN or infinity.
        """
        cells = zip(self.fragment.slices, self.fragment.pieces, strict=True)
        return [INPUT.encode(values_F[cut].view(dims)) for cut, dims in cells]

    def decode_sent(self, index: int, frame: Bytes) -> Tensor:
        """Return a member's values of one cell, flat.

        Raises:
            CodecError: when it is no frame of the cell.
        """
        return INPUT.decode(frame, self.dims(index)).view(-1)

    def split(self, index: int, frame: Bytes) -> tuple[Bytes, Bytes]:
        """Split the frame of a cell into the frames of both factors.

        Raises:
            CodecError: when it has another length.
        """
        at, length = self.first.max_sent_bytes(index), self.max_sent_bytes(index)
        if len(frame) != length:
            raise CodecError(f"expected factors of {length} bytes, got {len(frame)}")
        return frame[:at], frame[at:]

    def decode_reduced(self, index: int, frame: Bytes, out_C: Tensor) -> None:
        """Decode the frame of a cell, to the same bits on every device.

        Raises:
            CodecError: when it is none of this cell.
        """
        first, second = self.split(index, frame)
        p_frame = self.first.decode_sent(index, first)
        q = self.second.decode_sent(index, second)
        if rank := self.ranks[index]:
            product = outer_sum(p_frame.view(-1, rank), q.view(-1, rank))
            out_C.copy_(product.view(-1)[: out_C.numel()])
        else:
            out_C.copy_(q)
        require_finite(out_C)

    def keep_warm(self, before: OuterState, after: OuterState, body: Bytes) -> None:
        """Put the Qs of an update's body, decoded already, at the end of a new state's memory.

        Args:
            before: the state before the entry.
            after: the state after it, whose memory this writes; nothing may have read it yet.
            body: of the entry.

        Raises:
            StateError: when both states share one memory.
        """
        limits = [self.max_reduced_bytes(index, 1) for index in range(len(self))]
        qs = [
            self.second.decode_sent(index, self.split(index, frame)[1])
            for index, frame in enumerate(unpack(memoryview(body), limits))
            if self.ranks[index]
        ]
        self.put_warm(before, after, qs)

    def put_warm(self, before: OuterState, after: OuterState, qs: Sequence[Tensor]) -> None:
        """Put new Qs at the end of a new state's memory; a Q of zeros leaves the old one.

        Raises:
            StateError: when both states share one memory.
        """
        if after.memory_M is before.memory_M:  # writing would change the state before
            raise StateError("expected a state with a memory of its own, got one that shares it")
        for old, new, q in zip(self._stored(before), self._stored(after), qs, strict=True):
            if bool(q.any()):
                halves.store_(new, q.view_as(new))
            else:
                new.copy_(old)

    def warm(self, state: OuterState) -> list[Tensor]:
        """Return a state's Qs, [columns, rank] each in fp32, of the cells that have one."""
        return [halves.widened(q) for q in self._stored(state)]

    def _stored(self, state: OuterState) -> list[Tensor]:
        """Return views of a state's Qs, in its format."""
        shapes = [self.second.dims(index) for index, rank in enumerate(self.ranks) if rank]
        sizes = [math.prod(shape) for shape in shapes]
        warm_K = state.memory_M[state.memory_M.numel() - sum(sizes) :]
        pieces = torch.split(warm_K, sizes) if sizes else ()
        return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


class Factors:
    """A member's contribution to a round: its frames of each cell in both exchanges."""

    def __init__(self, cells: LowRankCells, state: OuterState, inputs: Sequence[Bytes]) -> None:
        """Keep the inputs, one frame a cell (`LowRankCells.encode`), and the Qs of a state."""
        self._cells = cells
        self._inputs = inputs
        warm = iter(cells.warm(state))
        self._qs = [next(warm) if rank else None for rank in cells.ranks]

    def first(self, index: int) -> bytes:
        """Return the frame of M orthonormal(Q), empty for a tensor that is sent whole.

        Raises:
            CodecError: when the product is not finite.
        """
        q = self._qs[index]
        matrix = torch.empty(0) if q is None else self._matrix(index) @ orthonormal(q)
        return self._cells.first.codec.encode(matrix)

    def second(self, index: int, p_frame: Bytes) -> bytes:
        """Return the frame of M^T P, or of the whole tensor.

        Args:
            index: of the cell.
            p_frame: the owner's frame of P.

        Raises:
            CodecError: when it is none, or the product is not finite.
        """
        cells = self._cells
        p = cells.first.decode_sent(index, p_frame)
        if rank := cells.ranks[index]:
            return cells.second.codec.encode(self._matrix(index).T @ p.view(-1, rank))
        whole = cells.decode_sent(index, self._inputs[index])
        return cells.second.codec.encode(whole.view(cells.dims(index)))

    def _matrix(self, index: int) -> Tensor:
        values_C = self._cells.decode_sent(index, self._inputs[index])
        return as_matrix(values_C, self._cells.dims(index))


def _one_after_another(pieces: Sequence[Dims]) -> Fragment:
    total = piece_slices(pieces)[-1].stop
    return Fragment(spans=((0, total),), pieces=tuple(pieces))
