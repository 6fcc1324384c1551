"""The arithmetic of rows: a relay adds its row's cells, an owner adds the sums.

A sum is sent as one frame a cell: a bit for each member of the row, lowest bit first, set if its
cell is in the sum; then sum(w c d) in fp32, little-endian. A member that is missing in one cell is
missing in all later ones, as in a small group.

An owner counts each cell of a member once. A member of another row may also send its cells itself:
the owner skips those that came in its row's sums, and holds back those that may still come in them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from atoll.compression import CodecError
from atoll.optim.reduction.cells import Bytes
from atoll.peer.rounds.allreduce.reduction import (
    NORM_SLACK,
    CellRefused,
    FrameBuffer,
    PartReducer,
)
from atoll.peer.rounds.policies import SUM_BYTES


def mask_bytes(members: int) -> int:
    """Return the bytes before the values: one bit a member."""
    return -(-members // 8)


class RowReducer(PartReducer):
    """A relay's side: it adds the cells of its row. Its frames are the sums."""

    adds_rows = True

    def __init__(self, *, row: Sequence[int], **options: Any) -> None:  # noqa: ANN401
        """Take the options of `PartReducer`, and all members of the row in order."""
        super().__init__(**options)
        self._row = row

    def _encode(self, first: int, stop: int) -> list[bytes]:
        sums_N = self._sum_of(first, stop).numpy().astype("<f4", copy=False)
        start = self.part.cell(first).start
        return [
            self._mask(index) + sums_N[cell.start - start : cell.stop - start].tobytes()
            for index in range(first, stop)
            for cell in [self.part.cell(index)]
        ]

    def _mask(self, index: int) -> bytes:
        bits = sum(1 << place for place, m in enumerate(self._row) if self.arrived(m) > index)
        return bits.to_bytes(mask_bytes(len(self._row)), "little")


@dataclass(kw_only=True)
class RowState:
    """A row that still sends sums."""

    members: tuple[int, ...]
    covered: set[int]
    """members that are in all sums so far"""
    limit: float
    """the highest L2 norm that its sums can have"""
    incoming: FrameBuffer
    cells: int = 0


@dataclass(kw_only=True)
class Direct:
    """Cells that a member of another row sent to the owner itself."""

    taken: int = 0
    early: list[bytes] = field(default_factory=list)
    """held back while its row's sums may still hold them"""


class TreeReducer(PartReducer):
    """An owner's side: it adds the cells of its own row, and the other rows' sums."""

    adds_rows = True

    def __init__(self, *, rows: Mapping[int, Sequence[int]], **options: Any) -> None:  # noqa: ANN401
        """Take the options of `PartReducer`, and the members of the other rows."""
        super().__init__(**options)
        self._row_of = {m: row for row, members in rows.items() for m in members}
        self._direct = {m: Direct() for m in self._row_of if m in self._shares}
        self._rows = {row: self._state(tuple(members)) for row, members in rows.items()}

    def _state(self, members: tuple[int, ...]) -> RowState:
        mask, part = mask_bytes(len(members)), self.part
        shares = [self._shares[m] for m in members if m in self._shares]
        limits = [
            mask + SUM_BYTES * (part.cell(i).stop - part.cell(i).start)
            for i in range(part.num_cells)
        ]
        return RowState(
            members=members,
            covered={m for m in members if m in self._live},
            limit=sum(s.weight * s.clip * s.norm for s in shares) * NORM_SLACK,
            incoming=FrameBuffer(limits),
        )

    @property
    def open_rows(self) -> set[int]:
        """The rows whose sums are incomplete."""
        return {row for row, state in self._rows.items() if state.cells < self.part.num_cells}

    def is_dissolved(self, row: int) -> bool:
        """Return whether a row's sums are refused, although cells are missing."""
        return row not in self._rows

    def is_covered(self, member: int) -> bool:
        """Return whether its row's sums may still hold a member."""
        state = self._rows.get(self._row_of.get(member, -1))
        return state is not None and member in state.covered

    def alone(self) -> set[int]:
        """Return members of other rows with missing cells that no sums can hold any more."""
        return {m for m in self._direct if self.waits_for(m) and not self.is_covered(m)}

    def add_sums(self, row: int, message: memoryview) -> None:
        """Add the next sums of a row; ignore them once it is dissolved.

        Raises:
            CellRefused: a sum is too long or too large, or names a member that it cannot hold.
        """
        state = self._rows.get(row)
        if state is not None:
            for frame in state.incoming.feed(message):
                self._add_sum(row, state, frame)

    def dissolve(self, row: int) -> None:
        """Expect no more sums of a row: its members send the cells after them themselves."""
        state = self._rows.pop(row, None)
        if state is not None:
            self._uncover(state, state.covered)

    def drop(self, member: int) -> None:
        """Expect no more cells from a member itself, unless its row's sums may hold it."""
        if not self.is_covered(member):
            super().drop(member)

    def _add_frames(self, member: int, frames: Sequence[Bytes]) -> None:
        """Add the next cells that a member sends itself, except those that sums hold."""
        direct = self._direct.get(member)
        if direct is None:
            return super()._add_frames(member, frames)
        if self.is_covered(member):
            if len(direct.early) + len(frames) > self.part.num_cells:
                raise CellRefused(f"expected {self.part.num_cells} chunks, got one more")
            direct.early += map(bytes, frames)
            return None
        counted = max(0, self._arrived[member] - direct.taken)
        direct.taken += len(frames)
        return super()._add_frames(member, frames[counted:]) if frames[counted:] else None

    def _add_sum(self, row: int, state: RowState, frame: memoryview) -> None:
        mask = mask_bytes(len(state.members))
        bits = int.from_bytes(frame[:mask], "little")
        named = {m for place, m in enumerate(state.members) if bits >> place & 1}
        values = self._sum_of(state.cells, state.cells + 1)
        strangers = bits >> len(state.members) or named - state.covered
        if len(frame) != mask + SUM_BYTES * len(values) or strangers:
            raise CellRefused(f"expected the sum of some of {len(state.covered)} members")
        sum_N = torch.frombuffer(bytearray(frame[mask:]), dtype=torch.float32)
        norm = self._norms.add(-1 - row, self._exchange, float(torch.dot(sum_N, sum_N)))
        if not norm <= state.limit + 1e-12:
            raise CellRefused(f"expected a norm of at most {state.limit:.3g}, got {norm:.3g}")
        if named:  # a sum of nobody may come after the cell was encoded without its row
            values.add_(sum_N)
        for member in named:
            self._arrived[member] += 1
            self._weight[state.cells] += self._shares[member].weight
        state.cells += 1
        self._uncover(state, state.covered - named)
        if state.cells == self.part.num_cells:
            self._uncover(state, state.covered)

    def _uncover(self, state: RowState, members: Collection[int]) -> None:
        """Take members out of a row's sums: the cells that they sent themselves count from here."""
        members = set(members)
        state.covered -= members
        for member in sorted(members):
            early, self._direct[member].early = self._direct[member].early, []
            try:
                self._add_frames(member, early)
            except (CodecError, CellRefused):
                super().drop(member)
