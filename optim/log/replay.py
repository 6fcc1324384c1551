"""Replay of a log by a method over a layout, equal at every replica that follows it.

Fragments take turns: with n of them, position p moves fragment (p + 1) mod n. That is the order in
which their first windows end (`atoll.optim.methods.worker`).

A run decides each part of its parameters in a log of its own. A dense run has one part, all of
them, so one log; a replica is given the log's `Module` and asks for nothing else of the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from atoll.compression.sparse import Sparse
from atoll.optim.log.entry import Entry, MalformedRecord, split_body
from atoll.optim.methods.base import Method, MethodError
from atoll.optim.reduction.cells import Bytes, Cells
from atoll.optim.reduction.contribution import Feedback
from atoll.optim.reduction.lowrank import INPUT, LowRankCells
from atoll.optim.state.layout import Fragment, Layout
from atoll.optim.state.outer_state import OuterState
from atoll.optim.state.updates import Update


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
        self._cells = tuple(cells_of(method, fragment) for fragment in self.fragments)

    @property
    def memory_numel(self) -> int:
        """Values of the state beside the parameters."""
        return self.method.memory_numel(self.layout)

    @property
    def by_factors(self) -> bool:
        """Return whether matrices travel as factors and residuals are taken against the update."""
        return self.method.reduction == "low-rank"

    def fragment_at(self, position: int) -> int:
        """Return the fragment that a position moves."""
        return (position + 1) % len(self.fragments)

    def cells_at(self, position: int) -> Cells:
        """Return the cells of the fragment that a position moves."""
        return self._cells[self.fragment_at(position)]

    def max_body_bytes(self, entry: Entry) -> int:
        """Return the bytes of the longest body that an entry can have."""
        if entry.kind == "null":
            return 0
        return self.cells_at(entry.position).max_body_bytes(len(entry.members))

    def check(self, entry: Entry) -> None:
        """Check what follows from the method and the layout alone.

        Raises:
            MalformedRecord: another fragment than is due, other cells, or parts that are too long.
        """
        due, cells = self.fragment_at(entry.position), self.cells_at(entry.position)
        if entry.fragment != due:
            raise MalformedRecord(
                f"entry {entry.position}: expected fragment {due}, got {entry.fragment}"
            )
        if entry.kind == "null":
            return
        if entry.num_cells != len(cells):
            raise MalformedRecord(
                f"entry {entry.position}: expected {len(cells)} cells, got {entry.num_cells}"
            )
        for part in entry.parts:
            # Refused before anybody fetches it: a signed entry must not make peers allocate more.
            longest = cells.max_body_bytes(len(entry.members), part.start_cell, part.stop_cell)
            if part.wire_bytes > longest:
                raise MalformedRecord(
                    f"entry {entry.position}: expected a part of at most {longest} bytes, "
                    f"got one of {part.wire_bytes}"
                )

    def decode(self, entry: Entry, body: Bytes) -> Update:
        """Return the update of an entry.

        Raises:
            MalformedRecord: the body is not the one that the entry names.
            UpdateError: it does not decode to finite numbers.
        """
        split_body(entry, memoryview(body))
        return self.cells_at(entry.position).decode_body(body, len(entry.members))

    def next_state(
        self, state: OuterState, entry: Entry, body: Bytes, update_F: Update | None = None
    ) -> OuterState:
        """Return state(p+1) = apply(state(p), entry(p)).

        Args:
            state: the state before the entry; left as it is.
            entry: the entry; the caller has checked that it follows and is certified.
            body: the bytes of its parts, checked here against their digests.
            update_F: the decoded body, if the caller has verified and decoded it already.

        Raises:
            MalformedRecord: the entry or the body is none of this run's.
            UpdateError: the body does not decode to finite numbers.
        """
        self.check(entry)
        if entry.kind == "null":
            return state.at(entry.position + 1)  # given up: not even the momentum moves
        if update_F is None:
            update_F = self.decode(entry, body)
        fragment = self.fragments[entry.fragment]
        scalars = {"lr": entry.lr, "momentum": entry.momentum}
        if isinstance(update_F, Sparse):
            new = self.method.apply_sparse(state, update_F, fragment=fragment, **scalars)
        else:
            new = self.method.apply(state, update_F, fragment=fragment, **scalars)
        cells = self._cells[entry.fragment]
        if isinstance(cells, LowRankCells):
            # The state holds Q, the body's second factors: the next update starts warm from them.
            cells.keep_warm(state, new, body)
        return new

    def residual(self, fragment: int) -> Feedback:
        """Return a peer's error feedback of one fragment, empty."""
        return residual_of(self.method, self.fragments[fragment])


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


WHOLE = "log"  # the only log of a dense run, and the folder in which a coordinator keeps it


@dataclass(frozen=True, kw_only=True)
class Module:
    """A part of the parameters of a run, decided in one log."""

    run_id: bytes
    method: Method
    layout: Layout
    """The parameters that the log decides."""
    snapshot_every: int
    """Positions between two state roots, hence between two snapshots."""
    name: str = WHOLE
    """The name of its log among those of the run."""

    @cached_property
    def replay(self) -> Replay:
        """The rules that turn a state and an entry into the next state.

        Raises:
            MethodError: the method keeps no common state, as gossip does; it has no log.
        """
        return Replay(self.method, self.layout)
