"""The rules by which the entries of a log become states, equal at every replica.

Fragments take turns: with n of them, position p moves fragment (p + 1) mod n. That is the order in
which their first windows end (`atoll.optim.methods.worker`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from atoll.compression.base import CodecError
from atoll.compression.registry import parse
from atoll.compression.sparse import Sparse
from atoll.optim.log.entry import Entry, MalformedRecord, split_body
from atoll.optim.log.orders import (
    read_settings,
)
from atoll.optim.methods.base import Method, MethodError
from atoll.optim.reduction.cells import Bytes, Cells
from atoll.optim.reduction.contribution import Feedback
from atoll.optim.reduction.lowrank import INPUT, LowRankCells
from atoll.optim.state import vectors
from atoll.optim.state.fragments import Fragment
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import OuterState
from atoll.optim.state.updates import Update, dense

MAX_CODECS = 8  # of which cells are kept


class Replay:
    """The rules of one log."""

    def __init__(self, method: Method, layout: Layout) -> None:
        """Cut the layout into fragments as the method does.

        Raises:
            MethodError: the method keeps no common state that a log could hold.
            CodecError: its codec is of no use in a round.
        """
        if not method.logged:
            raise MethodError(f"expected a method whose state is in the log, got {method.name}")
        self.method = method
        self.layout = layout
        self.fragments: tuple[Fragment, ...] = method.fragments(layout)
        self.codec_in_force: Callable[[], str | None] = lambda: None
        """returns the codec that orders up to the head have set; None for the method's own"""
        self._cells: dict[str | None, tuple[Cells, ...]] = {}
        self.cells_in(None)

    @property
    def memory_numel(self) -> int:
        """Values of the state beside the parameters."""
        return self.method.memory_numel(self.layout)

    @property
    def memory_dtype(self) -> torch.dtype:
        """Their format."""
        return self.method.memory_dtype

    @property
    def by_factors(self) -> bool:
        """Return whether matrices travel as factors and residuals are taken against the update."""
        return self.method.reduction == "low-rank"

    def fragment_at(self, position: int) -> int:
        """Return the fragment that a position moves."""
        return (position + 1) % len(self.fragments)

    def cells_at(self, position: int) -> Cells:
        """Return the cells of the fragment that a position moves, by the orders up to the head."""
        return self.cells_in(self.codec_in_force())[self.fragment_at(position)]

    def cells_for(self, entry: Entry) -> Cells:
        """Return the cells of an entry's fragment, by the orders before it.

        Raises:
            MalformedRecord: it names a codec that is none.
        """
        try:
            return self.cells_in(read_settings(entry.settings).codec)[
                self.fragment_at(entry.position)
            ]
        except CodecError as error:
            raise MalformedRecord(f"entry {entry.position}: {error}") from None

    def cells_in(self, codec: str | None) -> tuple[Cells, ...]:
        """Return the cells of all fragments in a codec; None for the method's own.

        Raises:
            CodecError: there is none, or it is of no use in a round.
        """
        if codec not in self._cells:
            if len(self._cells) > MAX_CODECS:
                self._cells = {None: self._cells[None]}
            method = with_codec(self.method, codec)
            self._cells[codec] = tuple(cells_of(method, each) for each in self.fragments)
        return self._cells[codec]

    def max_body_bytes(self, entry: Entry) -> int:
        """Return the bytes of the longest body that an entry can have."""
        if entry.kind != "update":
            return 0
        return self.cells_for(entry).max_body_bytes(len(entry.members))

    def check(self, entry: Entry) -> None:
        """Check what follows from the method and the layout alone.

        Raises:
            MalformedRecord: another fragment than is due, other cells, or parts that are too long.
        """
        due, cells = self.fragment_at(entry.position), self.cells_for(entry)
        if entry.fragment != due:
            raise MalformedRecord(
                f"entry {entry.position}: expected fragment {due}, got {entry.fragment}"
            )
        if entry.kind != "update":
            return
        if entry.num_cells != len(cells):
            raise MalformedRecord(
                f"entry {entry.position}: expected {len(cells)} chunks, got {entry.num_cells}"
            )
        for part in entry.parts:
            # Refused before anybody fetches it: a signed entry must not make peers allocate more.
            longest = cells.max_body_bytes(len(entry.members), part.start_cell, part.stop_cell)
            if part.wire_bytes > longest:
                raise MalformedRecord(
                    f"entry {entry.position}: expected a part of at most {longest} bytes, "
                    f"got one of {part.wire_bytes}"
                )

    def decode(
        self, entry: Entry, body: Bytes, allocate: vectors.Allocate = vectors.empty
    ) -> Update:
        """Return the update of an entry; `allocate` makes the vector of it.

        Raises:
            MalformedRecord: the body is not the one that the entry names.
            UpdateError: it does not decode to finite numbers.
        """
        split_body(entry, memoryview(body))
        return self.cells_for(entry).decode_body(body, len(entry.members), allocate)

    def next_state(
        self, state: OuterState, entry: Entry, body: Bytes, update_F: Update | None = None
    ) -> OuterState:
        """Return state(p+1) = apply(state(p), entry(p)).

        Args:
            state: the state before the entry; left as it is, unless it gives way. Then the update
                does too, and after an error neither holds anything.
            entry: the entry; the caller has checked that it follows and is certified.
            body: the bytes of its parts, checked here against their digests.
            update_F: the decoded body, if the caller has verified and decoded it already.

        Raises:
            MalformedRecord: the entry or the body is none of this run's.
            UpdateError: the body does not decode to finite numbers.
        """
        self.check(entry)
        if entry.kind != "update":
            return state.at(entry.position + 1)  # not even the momentum moves
        fragment = self.fragments[entry.fragment]
        if update_F is None and state.gives_params and self._goes_by_pieces(fragment):
            return self._next_by_pieces(state, entry, body)
        if update_F is None:
            update_F = self.decode(entry, body, state.allocate)
        scalars = {"lr": entry.lr, "momentum": entry.momentum}
        if isinstance(update_F, Sparse):
            new = self.method.apply_sparse(state, update_F, fragment=fragment, **scalars)
        else:
            new = self.method.apply(state, update_F, fragment=fragment, **scalars)
        cells = self.cells_for(entry)
        if isinstance(cells, LowRankCells):
            # The state holds Q, the body's second factors: the next update starts warm from them.
            cells.keep_warm(state, new, body)
        return new

    def _goes_by_pieces(self, fragment: Fragment) -> bool:
        return self.method.moves_values_apart and not fragment.tensors and not self.by_factors

    def _next_by_pieces(self, state: OuterState, entry: Entry, body: Bytes) -> OuterState:
        """Apply an update while it is decoded, some cells at a time, in place of the state."""
        split_body(entry, memoryview(body))
        cells, fragment = self.cells_for(entry), self.fragments[entry.fragment]
        new = state
        for first, stop, update in cells.decode_by_runs(body, len(entry.members)):
            new = self.method.apply(
                state,
                dense(update),
                fragment=fragment.part(first, stop),
                lr=entry.lr,
                momentum=entry.momentum,
            )
        return new

    def residual(self, fragment: int) -> Feedback:
        """Return a peer's error feedback of one fragment, empty."""
        return residual_of(self.method, self.fragments[fragment])


def with_codec(method: Method, codec: str | None) -> Method:
    """Return a method with another codec; with None itself.

    Raises:
        CodecError: there is no such codec.
    """
    return method if codec is None else replace(method, codec=parse(codec))


def cells_of(method: Method, fragment: Fragment) -> Cells:
    """Return how a fragment travels in the method's rounds.

    Raises:
        CodecError: the codec cannot be used in a round.
    """
    if method.reduction == "low-rank":
        return LowRankCells(codec=method.codec, fragment=fragment)
    return Cells(
        codec=method.codec,
        fragment=fragment,
        gathers=method.reduction == "gather",
        by_senders=method.divides_by == "senders",
    )


def residual_of(method: Method, fragment: Fragment) -> Feedback:
    """Return a member's error feedback of a fragment, empty.

    Raises:
        ValueError: feedback does not go with the codec.
    """
    by_factors = method.reduction == "low-rank"
    return Feedback(
        fragment.numel,
        INPUT if by_factors else method.codec,
        beta=method.residual,
        pieces=fragment.pieces,
        against_update=by_factors,
    )
