"""A copy of what one log decides: its state, its chain, its epoch, and the entries that led here.

A run decides each part of its parameters in a log of its own; a dense run has one. A replica is
given the log's `Module` and asks for nothing else of the run. `Replay` are the rules by which
entries become states, equal at every replica. Fragments take turns: with n of them, position p
moves fragment (p + 1) mod n. That is the order in which their first windows end
(`atoll.optim.methods.worker`).

A `Replica` accepts what a quorum of the electorate has certified, and nothing else. All calls are
synchronous and may block (SQLite, hashing, decoding, applying); one thread at a time may change it.

    accept    check(entry, certificate) -> Claim     all but the body
              accept(claim, body)                    the state moves on
    recover   verify(records) -> [Claim]             entries that somebody sent
              install(state, claims)                 a snapshot whose root an entry certifies,
                                                     or the run's key until one does
    epochs    adopt(record), rewind()                an epoch that the run's key signed
              open_epoch(electorate, sign)           by the owner of that key, at its own head
    restart   resume()                               the newest snapshot and the entries after it

A peer keeps what it needs: `install` replaces its log, and the bodies of old entries are pruned. A
ledger, as the coordinator keeps it, drops nothing and never waits: it stores each certified entry,
if need be without its body or without a state (`is_current`), so its head may be beyond its state.
It also compares certified roots with its own; if one differs, or a certified entry does not apply,
then this machine computes wrongly. A ledger reports that (`diverged`), keeps no more states, and
continues to store the log. A peer raises instead: it votes, so it must not pretend to follow. If a
certified root differs from its own, it drops its state (`is_disproved`) and recovers another.

Snapshots are taken at multiples of `Module.snapshot_every`; the entry `snapshot_every` positions
later carries their root. An entry counts once it is applied and stored; the state is hashed and
written to a file beside the next positions (`write_snapshot`, then `keep_snapshot`), and only the
entry before the one that carries its root waits for that. After a crash in between, a replica
resumes from the snapshot before. Peers give joiners the files from the newest one whose root is
certified on (usually two); a ledger keeps the roots, and gives all its files.

A `LiveReplica` is the same in an event loop: peers and the coordinator follow their log through it.
Changes run in a pool of threads, one at a time. What the loop reads (`standing`) changes only
between two of its steps, when a change is complete: so what a task reads without awaiting is of one
moment. `ReplicaView` is what can be read of either without waiting.

Exceptions: `LogError` (atoll.optim.log.entry) for an entry that is wrong, and of these

    ChainMismatch
      NotNext       an entry of another position or epoch than the next; it may be next elsewhere
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Protocol, TypeVar

import torch

from atoll.compression.base import CodecError
from atoll.compression.registry import parse
from atoll.compression.sparse import Sparse
from atoll.optim.log.electorate import Succession, after, at_base, remembered
from atoll.optim.log.entry import (
    Certificate,
    ChainMismatch,
    Claim,
    Elector,
    Entry,
    Epoch,
    EpochInvalid,
    LogPlace,
    MalformedRecord,
    Newcomer,
    SignedEpoch,
    SignedRoot,
    StateRoot,
    Trust,
    Verify,
    VerifyRun,
    certified_roots,
    check_certificate,
    check_follows,
    epoch_payload,
    genesis_chain,
    place_before,
    sha256,
    split_body,
    verify_claims,
    verify_linked,
)
from atoll.optim.log.orders import (
    Order,
    OrderInvalid,
    RunSettings,
    SignedOrder,
    check_settings,
    read_settings,
)
from atoll.optim.log.store import (
    PAGE,
    LogStore,
    NotStored,
    OutOfOrder,
    SnapshotFile,
    StoredEntry,
    StoreError,
    StoreHead,
    WrittenSnapshot,
)
from atoll.optim.log.units import check_units
from atoll.optim.methods.base import Method, MethodError
from atoll.optim.reduction.cells import Bytes, Cells, UpdateError
from atoll.optim.reduction.contribution import Feedback
from atoll.optim.reduction.lowrank import INPUT, LowRankCells
from atoll.optim.state import vectors
from atoll.optim.state.layout import Fragment, Layout
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


WHOLE = ""  # the module of a dense run, which has one log


def log_id(run_id: bytes, module: str) -> bytes:
    """Return the id of a module's log: the run's own for a dense run, else bound to the name.

    So nothing that is signed for one log of a run counts in another.
    """
    if module == WHOLE:
        return run_id
    return sha256(b"atoll module 1" + run_id + module.encode())


def log_folder(module: str) -> str:
    """Return the name of the folder in which a module's log lies."""
    return module or "log"


@dataclass(frozen=True, kw_only=True)
class Module:
    """A part of the parameters of a run, decided in one log."""

    run_id: bytes
    """The id of its log (`log_id`), which entries, votes and epochs name."""
    method: Method
    layout: Layout
    """The parameters that the log decides."""
    snapshot_every: int
    """Positions between two state roots, hence between two snapshots."""
    name: str = WHOLE
    """Its name among the modules of the run."""
    trust: Trust = "crash"
    """Faults of its electors that the run tolerates."""
    units: int = 0
    """Units of a pass over the run's rows (`units.py`); 0 in runs without `data.once`."""

    @cached_property
    def replay(self) -> Replay:
        """The rules that turn a state and an entry into the next state.

        Raises:
            MethodError: the method keeps no common state, as gossip does; it has no log.
        """
        return Replay(self.method, self.layout)


LEASE_S = 15.0  # of a snapshot after a request for 8 MiB of it: what 5 Mbit/s take, and a retry
SNAPSHOT_SHARE = 0.05  # of the time, that a ledger may spend on snapshots: large ones take seconds
DISK_ERRORS = (OSError, sqlite3.OperationalError)  # raised when a disk takes no more
ROOTS = 16  # newest roots that a ledger compares with certified ones: several snapshots' delay


class NotNext(ChainMismatch):
    """Not the entry that comes next here; nothing need be wrong with it."""


@dataclass(frozen=True, kw_only=True)
class ReplicaStanding:
    """Standing of a replica. It is replaced as a whole, so all of it is of one moment."""

    head: StoreHead = field(default_factory=lambda: StoreHead(epoch=0, position=0, chain=b""))
    """The epoch, the next position, and the chain there."""
    electorate: tuple[Elector, ...] = ()
    """The next entry's electorate; empty while the entries here are not the epoch's."""
    newcomers: tuple[Newcomer, ...] = ()
    """Peers that may vote after some entries more."""
    norms: tuple[float, ...] = ()
    """By fragment: what bounds the clip factors of its next contributions from below."""
    settings: bytes | None = b""
    """The settings that orders have changed up to the head (`orders.py`); None if they are not
    known: the entry before the head is missing here."""
    units: bytes | None = b""
    """The table of units at the head (`units.py`); None as for `settings`."""
    state: OuterState | None = None
    """The state at the head, or an older one (`ReplicaView.is_current`)."""
    snapshots: dict[int, SnapshotFile] = field(default_factory=dict)
    """Snapshots that joiners may fetch, by position."""
    opened: Epoch | None = None
    epoch_record: bytes = b""
    """`opened` as the run's key signed it; empty before the first."""
    diverged: str = ""
    """Why the state here is no longer the run's; empty while it is."""
    was_disproved: bool = False
    """Whether an entry has certified another root than that of a state here."""
    leaps: int = 0
    """Number of times that a state was put in place without entries leading to it."""

    def is_at_base(self, epoch: Epoch) -> bool:
        """Return whether the head is where an epoch begins."""
        return (self.head.position, self.head.chain) == (epoch.base_position, epoch.base_chain)


@dataclass(frozen=True, kw_only=True)
class Due:
    """A state whose root and snapshot are due, and the chain there."""

    state: OuterState
    chain: bytes
    leaps: int
    """As of the replica's standing when it came to be due."""
    release: Callable[[], None]
    """Ends the keeping of the state; the next one may take its place then."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """The root of a state, and its file, of which the log does not know yet."""

    position: int
    leaps: int
    root: bytes
    file: WrittenSnapshot | None
    """None if a ledger wrote none, to save time or because its disk is full."""


class ReplicaView:
    """The read-only view of a replica; nothing in it waits."""

    module: Module
    store: LogStore
    standing: ReplicaStanding
    is_ledger: bool
    follows: bool
    """A ledger of a follower: others open the epochs, which may void entries here, and joiners
    fetch its snapshots."""

    @property
    def run_id(self) -> bytes:
        return self.module.run_id

    @property
    def trust(self) -> Trust:
        """Faults of electors that the run tolerates."""
        return self.module.trust

    @property
    def replay(self) -> Replay:
        """The rules by which entries are applied."""
        return self.module.replay

    @property
    def layout(self) -> Layout:
        """The parameters that the log decides."""
        return self.module.layout

    @property
    def snapshot_every(self) -> int:
        """Positions between two snapshots."""
        return self.module.snapshot_every

    @property
    def ready(self) -> bool:
        """Return whether there is a state."""
        return self.standing.state is not None

    @property
    def state(self) -> OuterState:
        """The state at the head, or an older one if it is not `is_current`."""
        if self.standing.state is None:
            raise RuntimeError("this replica holds no state yet: resume or install one first")
        return self.standing.state

    @property
    def is_current(self) -> bool:
        """Return whether the state is the one at the head."""
        at = self.standing
        has_its_state = at.state is not None and at.state.position == at.head.position
        return has_its_state and not at.diverged

    @property
    def head(self) -> StoreHead:
        """The epoch, the next position, and the chain there."""
        return self.standing.head

    @property
    def epoch(self) -> int:
        """The newest epoch that is known."""
        return self.standing.head.epoch

    @property
    def position(self) -> int:
        """The position that is decided next; the number of entries here or before them."""
        return self.standing.head.position

    @property
    def chain(self) -> bytes:
        """The chain that the next entry has to name."""
        return self.standing.head.chain

    @property
    def electorate(self) -> tuple[Elector, ...]:
        """Return the next entry's electorate; empty while the entries here are not the epoch's."""
        return self.standing.electorate

    @property
    def first_term(self) -> int:
        """Return the term with which the next entry's position begins."""
        opened = self.opened
        is_base = opened is not None and self.position == opened.base_position
        return opened.first_term if opened is not None and is_base else 0

    @property
    def voters(self) -> Succession:
        """Return the next entry's electorate, those who may vote later, and the norms."""
        at = self.standing
        return Succession(at.electorate, at.newcomers, at.norms)

    @property
    def settings(self) -> RunSettings:
        """Return what the organiser's orders have changed up to the head."""
        return read_settings(self.standing.settings or b"")

    @property
    def snapshots(self) -> dict[int, SnapshotFile]:
        """Snapshots that joiners may fetch, by position."""
        return self.standing.snapshots

    @property
    def opened(self) -> Epoch | None:
        """The newest epoch that is known; None before the first."""
        return self.standing.opened

    @property
    def epoch_record(self) -> bytes:
        """The newest epoch as the run's key signed it; empty before the first."""
        return self.standing.epoch_record

    @property
    def diverged(self) -> str:
        """Why the state here is no longer the run's; empty while it is."""
        return self.standing.diverged

    @property
    def is_disproved(self) -> bool:
        """Return whether this peer needs another state: the log certifies another root."""
        return bool(self.standing.diverged) and not self.is_ledger

    @property
    def takes_signed(self) -> bool:
        """Return whether a root by the run's key proves a state that no entry certifies yet.

        It does to a peer, until the log has contradicted a state there.
        """
        return not self.is_ledger and not self.standing.was_disproved

    @property
    def leaps(self) -> int:
        """Return the number of states put in place without entries leading to them."""
        return self.standing.leaps

    def root_scheduled(self, position: int) -> int | None:
        """Return the position whose state root entry `position` has to carry."""
        due = position > 0 and position % self.snapshot_every == 0
        return position - self.snapshot_every if due else None

    def root_due(self, position: int) -> tuple[int, bytes] | None:
        """Return the state root that entry `position` carries; None too if it is not known here."""
        scheduled = self.root_scheduled(position)
        snapshot = self.snapshots.get(scheduled) if scheduled is not None else None
        return (snapshot.position, snapshot.root()) if snapshot is not None else None

    def certified_root(self, claims: Sequence[Claim], position: int) -> bytes | None:
        """Return the certified root of the state at a position, from claims or the stored log."""
        return self.certified_roots(claims, [position]).get(position)

    def certified_roots(
        self, claims: Sequence[Claim], positions: Collection[int]
    ) -> dict[int, bytes]:
        """Return the certified roots of the states at these positions, as far as there are any."""
        known = certified_roots(claims)
        found = ((position, known.get(position)) for position in positions)
        pairs = ((p, root or self._stored_root(p)) for p, root in found)
        return {position: root for position, root in pairs if root is not None}

    def _stored_root(self, position: int) -> bytes | None:
        record = self.store.get(position + self.snapshot_every)
        if record is None or not self.electorate:  # without, it may be void
            return None
        stored = Entry.decode(record.entry).state_root
        return stored.root if stored is not None and stored.position == position else None


class Replica(ReplicaView):
    """The synchronous core; see the module."""

    def __init__(
        self,
        module: Module,
        store: LogStore,
        *,
        verify: Verify,
        verify_run: VerifyRun,
        is_ledger: bool = False,
        follows: bool = False,
        allocate: vectors.Allocate = vectors.empty,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make an empty replica; `resume` or `install` gives it a state.

        Args:
            module: what it follows.
            store: keeps it; the caller closes it.
            verify: checks a peer's signature.
            verify_run: checks a signature of the run's key.
            is_ledger: keep the whole log, whatever becomes of the state.
            follows: it is a follower's ledger, and opens no epochs.
            allocate: makes the vectors of its states and updates: in memory, or on a disk.
            clock: any steady one, in seconds.
        """
        self.module = module
        self.store = store
        self.standing = ReplicaStanding()
        self.is_ledger = is_ledger
        self.follows = follows
        self.allocate = allocate
        self._verify = verify
        self._verify_run = verify_run
        self._clock = clock
        self._roots: dict[int, bytes] = {}
        """of the newest states here"""
        self._room = vectors.OnceAWindow()
        self._snapshot_due_s = 0.0
        if module.method.logged:
            module.replay.codec_in_force = lambda: self.settings.codec
        self._leased: tuple[int, float] | None = None
        """the snapshot that somebody fetches, and until when it stays"""
        self.due: Due | None = None
        """what `write_snapshot` and `keep_snapshot` have to be called for"""

    # Restart

    def resume(self) -> bool:
        """Take up what is stored: the newest snapshot that can be read and the entries after it.

        Returns:
            False if there is no such snapshot, so nothing to resume.

        Raises:
            EpochInvalid: the stored epoch is not signed by the run's key.
            StoreError: a ledger has snapshots, and none of them can be read.
        """
        self._resume_epoch()
        return self._resume_newest()

    def _resume_epoch(self) -> None:
        record = self.store.latest_epoch()
        if record is not None:
            self._know_epoch(self.read_epoch(record), record)

    def _resume_newest(self) -> bool:
        state = self._newest_snapshot()
        if state is None:
            return False
        chain = self.store.snapshot(state.position).chain
        head = StoreHead(epoch=self.epoch, position=state.position, chain=chain)
        snapshots: dict[int, SnapshotFile] = {}
        if self._gives_snapshots:
            snapshots[state.position] = self.store.open_snapshot(state.position)
            self._note_root(state.position, snapshots[state.position].root())
        self.due = None
        diverged = self.diverged if self.is_ledger else ""
        at = replace(self.standing, head=head, state=state, snapshots=snapshots, diverged=diverged)
        at = self._replayed(replace(at, leaps=at.leaps + 1))
        if self.is_ledger:  # the log may reach beyond the state
            at = replace(at, head=replace(self.store.head, epoch=self.epoch))
        elif self.store.head.position > at.head.position:
            # A body is gone, such as one that was being written. What comes after it is fetched
            # again: an epoch may have voided it.
            self.store.rewind(at.head.position)
        settings, units = self._stored_tables(at.head)
        at = replace(at, settings=settings, units=units)
        self.standing = at  # of which `is_disproved` speaks
        voters = Succession(()) if self.is_disproved else self._stored_voters(at.head)
        self.standing = _with_voters(at, voters)
        return True

    def _newest_snapshot(self) -> OuterState | None:
        """Load the newest snapshot that can be read, so that one damaged file costs only time."""
        failure: StoreError | None = None
        for position in reversed(self.store.snapshot_positions()):
            try:
                return self.store.load_snapshot(
                    position, self.module.method.memory_dtype, allocate=self.allocate
                )
            except StoreError as error:
                failure = error
        # A peer fetches another from the run; a ledger's first state is nowhere else.
        if failure is not None and self.is_ledger:
            raise failure
        return None

    def _replayed(self, at: ReplicaStanding) -> ReplicaStanding:
        """Apply the stored entries after the state, up to the first whose body is not here, whole.

        The head of the result is the state's. Snapshots that are missing are written on the way.
        """
        if self.is_ledger and at.state is not None and self._is_snapshot_due(at.state):
            self._note_root(at.state.position, at.state.root())
        for record in self._records_after(at):
            if not record.has_body:
                break
            entry, body = Entry.decode(record.entry), self._whole_body(record)
            if body is None:
                break
            state, diverged = self._next_state(at, entry, body, None)
            at = replace(at, state=state, diverged=diverged)
            if not diverged:
                head = replace(at.head, position=state.position, chain=entry.chain)
                at = self._noted(replace(at, head=head), entry)
                due = self._due(at)
                if due is not None:
                    at = self._kept(at, self.write_snapshot(due))
            if at.diverged:
                break
        return at

    def _whole_body(self, record: StoredEntry) -> bytes | None:
        """Return a stored body; None if the disk has spoiled it since it was last looked at.

        It is checked before the state gives way to the next one, which an error would lose.
        """
        try:
            body = self.store.body(record.position)
            split_body(Entry.decode(record.entry), memoryview(body))
        except (MalformedRecord, NotStored):
            self.store.drop_damaged(record.position, record.entry)
            return None
        return body

    def _records_after(self, at: ReplicaStanding) -> Iterator[StoredEntry]:
        position = at.state.position if at.state is not None else 0
        while records := self.store.headers(position, PAGE):
            yield from records
            position = records[-1].position + 1

    def _stored_voters(self, head: StoreHead) -> Succession:
        opened, before = self.opened, self.store.get(head.position - 1)
        if opened is not None and head.position == opened.base_position:
            return at_base(opened) if head.chain == opened.base_chain else Succession(())
        if opened is not None and before is not None:
            # An entry beyond the base that is of an older epoch is void: this process ended after
            # it heard of the epoch and before it went back to the base.
            if before.position >= opened.base_position and before.epoch < opened.epoch:
                return Succession(())
        return self._voters_at(head.position)

    def _stored_tables(self, head: StoreHead) -> tuple[bytes | None, bytes | None]:
        """Return the settings and the units before the head."""
        before, opened = self.store.get(head.position - 1), self.opened
        if before is not None:
            entry = Entry.decode(before.entry)
            return entry.settings, entry.units
        if opened is not None and head.position == opened.base_position:
            return opened.settings, opened.units
        return (None, None) if head.position else (b"", b"")

    def _voters_at(self, position: int) -> Succession:
        if self.opened is not None and position == self.opened.base_position:
            return at_base(self.opened)
        before = self.store.get(position - 1)
        return after(Entry.decode(before.entry)) if before is not None else Succession(())

    def electorate_at(self, position: int) -> tuple[Elector, ...]:
        """Return those who vote at a position of the newest epoch, by what is stored."""
        return self._voters_at(position).electorate

    # The log

    def check(self, entry: Entry, certificate: Certificate) -> Claim:
        """Check everything about the next entry but its body.

        Raises:
            NotNext: it is known already, or does not come next.
            LogError: it does not follow, its certificate is invalid, or it is not this module's.
        """
        at = self.standing
        if at.opened is None or (entry.epoch, entry.position) != (at.head.epoch, at.head.position):
            raise _not_next(entry, at.head)
        check_follows(
            entry,
            run_id=self.run_id,
            epoch=at.head.epoch,
            position=at.head.position,
            chain=at.head.chain,
        )
        check_certificate(entry, certificate, at.electorate, self._verify, self.trust)
        check_settings(entry, at.settings, self.open_order)
        check_units(entry, at.units, self.module.units)
        self.replay.check(entry)
        return Claim(entry=entry, certificate=certificate)

    def verify(self, records: Sequence[tuple[bytes, bytes]], here: LogPlace | None) -> list[Claim]:
        """Verify consecutive entries that somebody sent; see `verify_claims`.

        Raises:
            LogError: one of them is not the log's, or no epoch is known that could prove it.
        """
        if self.opened is None:
            raise EpochInvalid("no epoch record received yet; wait until a peer is reachable")
        return verify_claims(
            records,
            run_id=self.run_id,
            here=here,
            opened=self.opened,
            verify=self._verify,
            trust=self.trust,
        )

    def verify_linked(
        self, records: Sequence[tuple[bytes, bytes]], start: int, chain: bytes
    ) -> list[Claim]:
        """Verify entries that end in a known chain; see `atoll.optim.log.entry.verify_linked`.

        Raises:
            LogError: they do not.
        """
        return verify_linked(records, run_id=self.run_id, start=start, chain=chain)

    def accept(self, claim: Claim, body: Bytes, update_F: Update | None = None) -> Update | None:
        """Apply and store the next entry; what `has_unsaved` names may be left to save then.

        Args:
            claim: the entry, verified by `check` or `verify`.
            body: the bytes of its parts.
            update_F: the decoded body, if the caller has verified and decoded it. Its memory may
                become that of the next state.

        Returns:
            The decoded update of a method that takes residuals against it; otherwise what was
            given.

        Raises:
            NotNext: another entry was quicker, or an epoch has begun.
            LogError: the body is not the one that the entry names.
            UpdateError: it does not decode (not in a ledger).
        """
        if self.root_scheduled(claim.entry.position + 1) is not None:
            self.save_due()  # its root is due next; a `LiveReplica` has saved it before
        entry, at = claim.entry, self.standing
        # Much may have happened since the claim was verified: its body had to come.
        self._expect_next(entry, at)
        applies = not at.diverged and self.state.position == entry.position
        if update_F is None and entry.kind == "update" and self._decodes_first(applies=applies):
            self.replay.check(entry)
            update_F = self._decoded(entry, body)
        elif update_F is None or not applies:
            split_body(entry, memoryview(body))
        # Before it is applied: if the disk takes no more, the state is still the one before. What a
        # ledger announces is on disk, body and all; a peer's trainer does not wait for a body.
        self.store.write_bodies()  # one at most waits in memory
        self._store(claim, body, at)
        state, diverged = at.state, at.diverged
        if applies:
            state, diverged = self._next_state(at, entry, body, update_F)
        after = replace(self._after(at, entry), state=state, diverged=diverged)
        if applies and not diverged:
            after = self._noted(after, entry)
            self.due = self._due(after) or self.due
        self.standing = after
        if self.is_ledger:
            self._room.trim(self.layout.numel)  # of messages that brought bodies
        return update_F

    def open_order(self, signed: bytes, key: bytes | None) -> Order:
        """Return the order in a signed one.

        Args:
            signed: it.
            key: the organiser's that orders have named; None: the run's.

        Raises:
            LogError: malformed, signed by another key, or of another run.
        """
        order = SignedOrder.decode(signed).open(self._verify_run, key)
        if log_id(order.run_id, self.module.name) != self.run_id:
            raise OrderInvalid("order: expected one of this run, got one of another")
        return order

    def _decodes_first(self, *, applies: bool) -> bool:
        """Return whether an update is decoded before its entry is stored.

        A peer refuses what does not decode. A ledger stores it all the same, so it decodes while
        it applies, which takes less memory.
        """
        return self.replay.by_factors or (applies and not self.is_ledger)

    def _decoded(self, entry: Entry, body: Bytes) -> Update | None:
        try:
            return self.replay.decode(entry, body, self.allocate)
        except UpdateError:
            if self.is_ledger:
                return None  # applying it fails in the same way, and says so
            raise

    def _expect_next(self, entry: Entry, at: ReplicaStanding) -> None:
        if self.is_disproved:
            raise ChainMismatch(at.diverged)
        # Entries before the base were certified in older epochs; their chain proves them.
        is_before_base = at.opened is not None and entry.position < at.opened.base_position
        if (
            entry.position != at.head.position
            or entry.previous_chain != at.head.chain
            or not (is_before_base or (at.opened is not None and entry.epoch == at.head.epoch))
        ):
            raise _not_next(entry, at.head)
        check_settings(entry, at.settings, self.open_order)
        check_units(entry, at.units, self.module.units)

    def _next_state(
        self, at: ReplicaStanding, entry: Entry, body: Bytes, update_F: Update | None
    ) -> tuple[OuterState, str]:
        """Return the state after an entry; or the one before, and how this machine diverged."""
        state = at.state
        if state is None:
            raise RuntimeError("this replica holds no state yet: resume or install one first")
        if update_F is None and not self.is_ledger and entry.kind == "update":
            update_F = self.replay.decode(entry, body, self.allocate)
        before = state
        # Factors in a round that has begun read the state.
        if entry.kind == "update" and not self.replay.by_factors:
            # A peer's trainer may still be at the parameters before. While a snapshot or a
            # checkpoint is read from the state, its memory is copied.
            gives_way = state.give_way(params=self.is_ledger)
            if not gives_way and self.module.method.moves_values_apart:
                before = state.apart()
        try:
            return self.replay.next_state(before, entry, memoryview(body), update_F), at.diverged
        except UpdateError as error:
            if not self.is_ledger:
                raise
            # A quorum decoded it, so the fault is here.
            why = f"entry {entry.position}: {error}; checkpoints stop here"
            whole = self._newest_snapshot() if state.gives_params else state
            if whole is None:
                raise
            return whole, why

    def _store(self, claim: Claim, body: Bytes, at: ReplicaStanding) -> None:
        entry = claim.entry
        self.store.append(
            epoch=entry.epoch,
            position=entry.position,
            chain=entry.chain,
            entry=entry.encode(),
            certificate=claim.certificate.encode(),
            body=body,
            before_base=at.opened is not None and entry.position < at.opened.base_position,
            writes_body=self.is_ledger,
        )

    def _after(self, at: ReplicaStanding, entry: Entry) -> ReplicaStanding:
        head = StoreHead(epoch=at.head.epoch, position=entry.position + 1, chain=entry.chain)
        at = replace(at, head=head, settings=entry.settings, units=entry.units)
        at = _with_voters(at, after(entry))
        if at.opened is not None and at.is_at_base(at.opened):
            at = _with_voters(at, at_base(at.opened))
        return at

    # Snapshots and roots

    def _noted(self, at: ReplicaStanding, entry: Entry) -> ReplicaStanding:
        """Note the root that an entry certifies."""
        if entry.state_root is None:
            return at
        at = self._compared(at, entry.state_root)
        if not self._gives_snapshots:
            return at
        snapshots = {} if at.diverged else dict(at.snapshots)
        self._forget_before(snapshots, entry.state_root.position)
        return replace(at, snapshots=snapshots)

    def _compared(self, at: ReplicaStanding, certified: StateRoot) -> ReplicaStanding:
        """Compare a certified root with the one here."""
        ours = self._roots.get(certified.position)
        if ours is None or ours == certified.root:
            return at
        why = (
            f"state {certified.position}: expected the certified root "
            f"{certified.root.hex()[:12]}, got {ours.hex()[:12]}"
        )
        if self.is_ledger:
            why += "; this machine computes wrongly, checkpoints stop here"
            return replace(at, diverged=why)
        # A peer takes another state, and until then it neither votes nor leads.
        later = [p for p in self.store.snapshot_positions() if p >= certified.position]
        self.store.drop_snapshots(later)
        at = replace(at, diverged=why, was_disproved=True)
        return _with_voters(at, Succession(()))

    def _note_root(self, position: int, root: bytes) -> None:
        self._roots[position] = root
        for old in sorted(self._roots)[:-ROOTS]:
            del self._roots[old]

    def _due(self, at: ReplicaStanding) -> Due | None:
        if at.state is None or at.diverged or not self._is_snapshot_due(at.state):
            return None
        return Due(state=at.state, chain=at.head.chain, leaps=at.leaps, release=at.state.keep())

    def _is_snapshot_due(self, state: OuterState) -> bool:
        return state.position % self.snapshot_every == 0

    def _forget_before(self, snapshots: dict[int, SnapshotFile], certified: int) -> None:
        """Drop those older than the newest one with a certified root: joiners take that one."""
        is_leased = self._leased is not None and self._leased[1] >= self._clock()
        leased = self._leased[0] if self._leased is not None and is_leased else None
        for position in [p for p in snapshots if p < certified and p != leased]:
            del snapshots[position]

    @property
    def _gives_snapshots(self) -> bool:
        """Return whether peers fetch snapshots here; the coordinator gives its own by gRPC."""
        return not self.is_ledger or self.follows

    @property
    def has_unsaved(self) -> bool:
        """Return whether a body is to be written, or a snapshot."""
        return self.due is not None or self.store.has_unwritten

    def save_due(self) -> None:
        """Write the body that is left, if any; hash and write the snapshot that is due, if any."""
        self.store.write_bodies()
        if self.due is not None:
            self.keep_snapshot(self.write_snapshot(self.due))

    def write_snapshot(self, due: Due) -> Written:
        """Hash a state and write its file, in any thread, beside the changes of this replica.

        Raises:
            OSError: the disk takes no more; a ledger goes on without the file, and reports it with
                the first entry that is not stored.
        """
        try:
            return self._write_snapshot(due)
        finally:
            due.release()

    def _write_snapshot(self, due: Due) -> Written:
        state = due.state
        root = state.root()
        file: WrittenSnapshot | None = None
        started_s = self._clock()
        if not self.is_ledger:
            file = self.store.write_snapshot(state, due.chain, on_read=due.release)
        elif started_s >= self._snapshot_due_s:
            with contextlib.suppress(*DISK_ERRORS):
                file = self.store.write_snapshot(state, due.chain, on_read=due.release)
            took_s = self._clock() - started_s
            self._snapshot_due_s = started_s + took_s / SNAPSHOT_SHARE
        return Written(position=state.position, leaps=due.leaps, root=root, file=file)

    def keep_snapshot(self, written: Written) -> None:
        """Put a written snapshot in the log, unless its state is void by now."""
        if self.is_disproved or written.leaps != self.leaps:
            if written.file is not None:
                written.file.drop()
        else:
            self.standing = self._kept(self.standing, written)
        if self.due is not None and self.due.state.position == written.position:
            self.due = None

    def _kept(self, at: ReplicaStanding, written: Written) -> ReplicaStanding:
        self._note_root(written.position, written.root)
        is_kept = False
        with contextlib.suppress(*(DISK_ERRORS if self.is_ledger else ())):
            is_kept = written.file is not None and self.store.put_snapshot(written.file)
        if not is_kept or not self._gives_snapshots:
            return at
        try:
            file = self.store.open_snapshot(written.position)
        except NotStored:  # pruned at once: newer ones are here, which resuming could not read
            return at
        return replace(at, snapshots={**at.snapshots, written.position: file})

    def lease(self, position: int) -> SnapshotFile | None:
        """Return a snapshot to somebody who fetches it; it stays for a while after each request.

        One has a lease at a time, so that no more than one is kept beside those that are kept
        anyway: while it is fetched, others are given but not kept.
        """
        now_s, snapshot, leased = self._clock(), self.snapshots.get(position), self._leased
        is_free = leased is None or leased[0] == position or leased[1] < now_s
        if snapshot is not None and is_free:
            self._leased = position, now_s + LEASE_S
        return snapshot

    # Recovery

    def install(
        self,
        state: OuterState,
        claims: Sequence[Claim] = (),
        signed: SignedRoot | None = None,
    ) -> list[Claim]:
        """Continue from a snapshot, past entries whose bodies nobody may have.

        A peer's log then begins with the claims before it, which later joiners need; its snapshot
        is left to save, and a crash until then costs another recovery. A ledger adds
        to its log what is missing up to the snapshot, and applies what it has stored beyond.

        Args:
            state: the first state of the run, or one whose root an entry certifies.
            claims: consecutive verified entries around it; those that are not needed do no harm.
            signed: the root of the state by the run's key, if no entry certifies it yet. Once one
                certifies another root, the state is dropped (`is_disproved`).

        Returns:
            The entries that were new here.

        Raises:
            NotNext: the entries that are missing here do not begin at the head of a ledger.
            ChainMismatch: no entry certifies the state.
        """
        if signed is None:
            self._expect_certified(state, claims)
        else:
            self._expect_signed(state, claims, signed)
        state = state.moved(self.allocate)
        if self.is_ledger:
            return self._extend(state, claims)
        place = self._place_of(state.position, claims)
        before = [claim for claim in claims if claim.entry.position < state.position]
        self._begin_store(state.position, place.chain, before)
        self.standing = replace(
            self.standing,
            head=StoreHead(epoch=self.epoch, position=state.position, chain=place.chain),
            electorate=place.electorate,
            newcomers=place.newcomers,
            norms=place.norms,
            settings=place.settings,
            units=place.units,
            state=state,
            snapshots={},
            diverged="",
            leaps=self.leaps + 1,
        )
        self._roots = {}
        self.due = self._due(self.standing)
        return before

    def _expect_certified(self, state: OuterState, claims: Sequence[Claim]) -> None:
        if state.position == 0:
            if genesis_chain(self.run_id, state.root()) != self.store.genesis_chain:
                raise ChainMismatch(
                    f"expected the first state of this run, got {state.root().hex()[:12]}"
                )
            return
        if self.certified_root(claims, state.position) != state.root():
            raise ChainMismatch(
                f"snapshot {state.position}: expected the root that entry "
                f"{state.position + self.snapshot_every} certifies, got {state.root().hex()[:12]}"
            )

    def _expect_signed(
        self, state: OuterState, claims: Sequence[Claim], signed: SignedRoot
    ) -> None:
        self.expect_vouched(signed, claims)
        if (state.position, state.root()) != (signed.position, signed.root):
            raise ChainMismatch(
                f"snapshot {state.position}: expected the root {signed.root.hex()[:12]} that the "
                f"run's key signed, got {state.root().hex()[:12]}"
            )

    def expect_vouched(self, signed: SignedRoot, claims: Sequence[Claim]) -> None:
        """Raise ChainMismatch unless the run's key signed a root for its place in the claims."""
        if self._place_of(signed.position, claims).chain != signed.chain:
            raise ChainMismatch(
                f"snapshot {signed.position}: the signed root is of another place in the log"
            )
        if not signed.holds(self.run_id, self._verify_run):
            raise ChainMismatch(f"snapshot {signed.position}: the run's key did not sign its root")

    def _place_of(self, position: int, claims: Sequence[Claim]) -> LogPlace:
        place = place_before(claims, position, self.opened)
        if place is None and position == 0:
            return LogPlace(chain=self.store.genesis_chain, electorate=())
        if place is None:
            raise ChainMismatch(f"snapshot {position}: expected the entry before it")
        return place

    def _begin_store(self, position: int, chain: bytes, before: Sequence[Claim]) -> None:
        if (self.store.head.position, self.store.head.chain) == (position, chain):
            return
        first = before[0].entry if before else None
        self.store.begin_at(
            position=first.position if first else position,
            chain=first.previous_chain if first else chain,
        )
        for claim in before:
            self._store_header(claim)

    def _store_header(self, claim: Claim) -> None:
        entry = claim.entry
        self.store.append_header(
            epoch=entry.epoch,
            position=entry.position,
            entry=entry.encode(),
            certificate=claim.certificate.encode(),
            body_bytes=entry.body_bytes,
            chain=entry.chain,
        )

    def _extend(self, state: OuterState, claims: Sequence[Claim]) -> list[Claim]:
        at = self.standing
        new = [c for c in claims if at.head.position <= c.entry.position < state.position]
        after = at
        for claim in new:  # all are checked before the first is stored
            self._expect_next(claim.entry, after)
            after = self._after(after, claim.entry)
        if after.head.position < state.position:
            raise NotNext(
                f"snapshot {state.position}: expected the entries before it from "
                f"{after.head.position} on"
            )
        for claim in new:
            self._store_header(claim)
            # One by one: if the disk is full now, the head is still that of the store.
            self.standing = self._after(self.standing, claim.entry)
        if at.diverged or at.state is None or state.position <= at.state.position:
            return new
        before = self.store.get(state.position - 1)
        if before is None:
            raise ChainMismatch(f"snapshot {state.position}: expected the entry before it")
        self.store.save_snapshot(state, before.chain)
        after = replace(self.standing, state=state, leaps=at.leaps + 1)
        if self._gives_snapshots:
            file = self.store.open_snapshot(state.position)
            after = replace(after, snapshots={**at.snapshots, state.position: file})
        self.standing = replace(self._replayed(after), head=after.head)
        return new

    def bridge_gap(self) -> None:
        """Store the state at the head if no stored snapshot lies after the last missing update.

        Without it, nobody could get to the state at the head from here: not this ledger after a
        restart, and no peer.
        """
        newest = max(self.store.snapshot_positions(), default=-1)
        if self.is_ledger and self.is_current and self.store.first_with_bodies() > newest:
            self.store.save_snapshot(self.state, self.chain)

    def add_body(self, position: int, body: Bytes) -> None:
        """Put back the body of a stored entry.

        Raises:
            NotStored: the entry is not here.
            MalformedRecord: the body is not the one that the entry names.
        """
        record = self.store.get(position)
        if record is None:
            raise NotStored(f"entry {position} is not here")
        split_body(Entry.decode(record.entry), memoryview(body))
        self.store.add_body(position, body)

    def add_certificate(self, position: int, entry: bytes, certificate: bytes) -> None:
        """Put back the certificate of a stored entry.

        Raises:
            LogError: the entry is another one, or the certificate does not hold.
        """
        record, opened = self.store.get(position), self.opened
        if record is None or record.entry != entry:
            raise ChainMismatch(f"expected entry {position} as it is stored here, got another")
        votes = Certificate.decode(certificate)
        if opened is not None and position >= opened.base_position:  # before, the chain proves it
            electorate = self.electorate_at(position)
            check_certificate(Entry.decode(entry), votes, electorate, self._verify, self.trust)
        self.store.put_certificate(position, certificate)

    # Epochs

    def read_epoch(self, record: bytes) -> Epoch:
        """Return the epoch in a signed record.

        Raises:
            LogError: malformed, of another run, or not signed by the run's key.
        """
        epoch = SignedEpoch.decode(record).open(self._verify_run)
        if epoch.run_id != self.run_id:
            raise EpochInvalid("epoch record: expected this run, got another")
        return epoch

    def adopt(self, record: bytes) -> bool:
        """Begin an epoch if it is newer; True if this replica stands at its base.

        A replica that stands elsewhere knows the epoch from now on and has to recover: entries
        beyond the base are void, entries before it are missing. Until then it has no electorate,
        so it neither votes nor leads.
        """
        epoch = self.read_epoch(record)
        if self.opened is not None and epoch.epoch <= self.opened.epoch:
            return True  # known: nothing to recover
        # On disk first: after a crash the entries beyond the base must still be known as void.
        self.store.put_epoch(epoch.epoch, record)
        is_here = self.ready and not self.is_disproved and self.standing.is_at_base(epoch)
        self._know_epoch(epoch, record)
        voters = at_base(epoch) if is_here else Succession(())
        self.standing = _with_voters(self.standing, voters)
        return is_here

    def _know_epoch(self, epoch: Epoch, record: bytes) -> None:
        head = replace(self.standing.head, epoch=epoch.epoch)
        self.standing = replace(self.standing, head=head, opened=epoch, epoch_record=record)

    def open_epoch(
        self,
        electorate: Sequence[Elector],
        sign: Callable[[bytes], bytes],
        *,
        above: int = -1,
        first_term: int = 0,
    ) -> Epoch:
        """Sign and begin a new epoch at the head, which voids nothing here.

        Its number is higher than `above`: the key may have signed epochs that are not in the log.
        """
        head = self.head
        known = -1 if self.opened is None else self.opened.epoch
        epoch = Epoch(
            run_id=self.run_id,
            epoch=max(known, above) + 1,
            base_position=head.position,
            base_chain=head.chain,
            electorate=tuple(electorate),
            newcomers=remembered(self.voters, electorate, head.position),
            norms=self.voters.norms,
            first_term=first_term,
            settings=self.standing.settings or b"",
            units=self.standing.units or b"",
        )
        raw = epoch.encode()
        self.adopt(SignedEpoch(epoch=raw, signature=sign(epoch_payload(raw))).encode())
        return epoch

    def rewind(self) -> bool:
        """Go back to the base of the epoch if entries beyond it are void; True if that worked.

        It works if this peer's own log reaches the base with the chain that the epoch names. A
        coordinator's ledger does not go back: epochs begin at its head.
        """
        opened = self.opened
        if (self.is_ledger and not self.follows) or opened is None or not self.ready:
            return False
        if self.position <= opened.base_position:
            return False
        before = self.store.get(opened.base_position - 1)
        if before is not None and before.chain != opened.base_chain:
            return False
        try:
            self.store.rewind(opened.base_position)
        except OutOfOrder:  # the log here begins after the base
            return False
        self._roots = {p: root for p, root in self._roots.items() if p <= opened.base_position}
        is_done = self._resume_newest() and self.position == opened.base_position
        voters = at_base(opened) if is_done else Succession(())
        self.standing = _with_voters(self.standing, voters)
        return is_done


def _with_voters(at: ReplicaStanding, voters: Succession) -> ReplicaStanding:
    return replace(at, electorate=voters.electorate, newcomers=voters.newcomers, norms=voters.norms)


def _not_next(entry: Entry, head: StoreHead) -> NotNext:
    return NotNext(
        f"expected the entry at epoch {head.epoch}, position {head.position}, "
        f"got epoch {entry.epoch}, position {entry.position}"
    )


T = TypeVar("T")


OnTaken = Callable[[int], None]
"""Called in the loop with the position of each entry that came to be in the log here."""


def _ignore(position: int) -> None:
    """Take no note of an entry."""


class Compute(Protocol):
    """Runs a function off the event loop (or on it, in tests with a virtual clock)."""

    def __call__(self, function: Callable[..., Any], /, *args: Any) -> Awaitable[Any]:  # noqa: ANN401
        """Return the function's result."""
        ...


@dataclass(frozen=True, kw_only=True)
class Applied:
    """One entry, applied."""

    entry: Entry
    state: OuterState
    apply_s: float
    attempt: int = 0
    """the ballot of its certificate"""
    update_F: Update | None = None  # noqa: N815
    """the decoded update, if residuals are taken against it"""


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """The result of a recovery."""

    from_position: int
    to_position: int
    snapshot_position: int | None
    entries: int
    donors: tuple[str, ...]
    seconds: float


class RecoveryError(RuntimeError):
    """A replica cannot catch up now; it is worth another try later."""


class Nowhere(RecoveryError):
    """Peers answered, and none of them has what is missing."""


class LiveReplica(ReplicaView):
    """Waits for a replica's changes, and makes them off the loop."""

    def __init__(
        self,
        core: Replica,
        *,
        compute: Compute,
        on_failure: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        """Take over a replica.

        Args:
            core: from now on changed and read through this object alone.
            compute: runs what blocks.
            on_failure: called if the disk takes no more: a peer's replica cannot continue then.
        """
        self.core = core
        self.module = core.module
        self.store = core.store
        self.is_ledger = core.is_ledger
        self.follows = core.follows
        self.allocate = core.allocate
        self.standing = core.standing
        self.compute = compute
        self.is_installing = False
        """True while a snapshot is being put in place, which takes long with a large model."""
        self.moved_at = 0.0
        """when this replica came to stand where it stands, on the loop's clock"""
        self.stood_s = 0.0
        """how long it stood at the last position that its first ballot decided: later ballots
        follow leaders that failed, for which nobody waits longer at the next position"""
        self._by_first_ballot = True
        """whether the newest entry was decided so"""
        self.listeners: list[Callable[[Applied], None]] = []
        self._on_failure = on_failure
        self._lock = asyncio.Lock()
        self._moved = asyncio.Condition()
        self._changes: set[asyncio.Task[Any]] = set()
        self._saving: asyncio.Task[None] | None = None
        """writes the snapshot that is due, beside the changes"""

    # Waiting

    async def passed(self, position: int) -> None:
        """Wait until `position` is decided and applied, or the epoch has changed."""
        epoch = self.epoch
        async with self._moved:
            await self._moved.wait_for(lambda: self.position > position or self.epoch != epoch)

    async def moved(self) -> None:
        """Wait until anything is decided, installed or adopted."""
        async with self._moved:
            await self._moved.wait()

    async def settled(self) -> None:
        """Wait for the end of the change under way, whose caller may be gone, and its snapshot."""
        async with self._lock:
            pass
        await self.saved()

    async def saved(self) -> None:
        """Wait until nothing is left to save: it is on disk, or `on_failure` was called."""
        while self._saving is not None:
            await asyncio.shield(self._saving)

    async def close(self) -> None:
        """Finish the change under way and its snapshot, then close the store."""
        await self.settled()
        async with self._lock:
            self.store.close()

    # The log

    async def claim(self, entry: bytes, certificate: bytes) -> Claim:
        """Decode the next entry and check everything but its body; see `Replica.check`."""

        def work() -> Claim:
            return self.core.check(Entry.decode(entry), Certificate.decode(certificate))

        claim: Claim = await self.compute(work)  # reads one standing, so it waits for no change
        return claim

    async def verify(
        self, records: Sequence[tuple[bytes, bytes]], here: LogPlace | None
    ) -> list[Claim]:
        """Verify entries that somebody sent; see `Replica.verify`."""
        claims: list[Claim] = await self.compute(self.core.verify, records, here)
        return claims

    async def verify_linked(
        self, records: Sequence[tuple[bytes, bytes]], start: int, chain: bytes
    ) -> list[Claim]:
        """Verify entries that end in a known chain; see `Replica.verify_linked`."""
        claims: list[Claim] = await self.compute(self.core.verify_linked, records, start, chain)
        return claims

    async def accept(
        self,
        entry: Entry,
        certificate: Certificate,
        body: Bytes,
        update_F: Update | None = None,
        *,
        since: float | None = None,
    ) -> bool:
        """Check, apply and store the next entry; False if its position is decided already.

        `since` is when its certificate came, on the loop's clock: what was done for it before this
        call counts as applying too.

        Raises:
            LogError: the entry does not follow, or its certificate or its body is invalid.
            UpdateError: the body does not decode.
        """
        if entry.epoch == self.epoch and entry.position < self.position:
            return False

        def work() -> Update | None:
            return self.core.accept(self.core.check(entry, certificate), body, update_F)

        try:
            await self._accept(entry, work, since, attempt=certificate.attempt)
        except NotNext:
            if entry.position < self.position:
                return False
            raise
        return True

    async def accept_claim(self, claim: Claim, body: Bytes, on_taken: OnTaken = _ignore) -> bool:
        """Apply and store the next entry; False if it is not the next one any more."""
        try:
            await self._accept(
                claim.entry,
                lambda: self.core.accept(claim, body),
                None,
                on_taken,
                attempt=claim.certificate.attempt,
            )
        except NotNext:
            return False
        return True

    async def _accept(
        self,
        entry: Entry,
        work: Callable[[], Update | None],
        since: float | None,
        on_taken: OnTaken = _ignore,
        *,
        attempt: int = 0,
    ) -> None:
        if self.root_scheduled(entry.position + 1) is not None:
            await self.saved()  # the next entry carries the root of what was due last
        loop = asyncio.get_running_loop()
        started = loop.time() if since is None else since

        def report(update_F: Update | None) -> None:
            on_taken(entry.position)
            self._by_first_ballot = attempt == 0
            if not self.is_current:  # a ledger without the state
                return
            applied = Applied(
                entry=entry,
                state=self.state,
                apply_s=loop.time() - started,
                attempt=attempt,
                update_F=update_F if self.replay.by_factors else None,
            )
            for listener in self.listeners:
                listener(applied)

        await self.change(work, report)

    def electorate_at(self, position: int) -> tuple[Elector, ...]:
        """Return those who vote at a position; none if its entries are not here."""
        return self.core.electorate_at(position)

    # Recovery

    async def install(
        self,
        state: OuterState,
        claims: Sequence[Claim] = (),
        on_taken: OnTaken = _ignore,
        *,
        signed: SignedRoot | None = None,
    ) -> None:
        """Continue from a snapshot; see `Replica.install`."""

        def report(new: Sequence[Claim]) -> None:
            for claim in new:
                on_taken(claim.entry.position)

        self.is_installing = True
        try:
            await self.change(lambda: self.core.install(state, claims, signed), report)
        finally:
            self.is_installing = False

    async def expect_vouched(self, signed: SignedRoot, claims: Sequence[Claim]) -> None:
        """Check a root by the run's key; see `Replica.expect_vouched`."""
        await self.compute(self.core.expect_vouched, signed, claims)

    async def bridge_gap(self) -> None:
        """Store the state at the head if only that leads there; see `Replica.bridge_gap`."""
        await self.change(self.core.bridge_gap, is_move=False)

    async def add_body(self, position: int, body: Bytes) -> None:
        """Put back the body of a stored entry; see `Replica.add_body`."""
        await self.compute(self.core.add_body, position, body)

    async def add_certificate(self, position: int, entry: bytes, certificate: bytes) -> None:
        """Put back the certificate of a stored entry; see `Replica.add_certificate`."""
        await self.compute(self.core.add_certificate, position, entry, certificate)

    async def resume(self) -> bool:
        """Take up what is stored; see `Replica.resume`."""
        # No move: how long the run has stood here is not known to a process that begins.
        return await self.change(self.core.resume, is_move=False)

    async def rewind(self) -> bool:
        """Go back to the base of the epoch; see `Replica.rewind`."""
        return await self.change(self.core.rewind)

    def lease(self, position: int) -> SnapshotFile | None:
        """Return a snapshot to somebody who fetches it; see `Replica.lease`."""
        return self.core.lease(position)

    # Orders

    def open_order(self, signed: bytes, key: bytes | None) -> Order:
        """Return the order in a signed one; see `Replica.open_order`."""
        return self.core.open_order(signed, key)

    # Epochs

    async def adopt(self, record: bytes) -> bool:
        """Begin an epoch if it is newer; see `Replica.adopt`."""
        return await self.change(lambda: self.core.adopt(record))

    async def open_epoch(
        self,
        electorate: Sequence[Elector],
        sign: Callable[[bytes], bytes],
        *,
        above: int = -1,
        first_term: int = 0,
        on_stored: Callable[[int], None] = lambda epoch: None,
    ) -> Epoch:
        """Sign and begin a new epoch at the head; see `Replica.open_epoch`.

        `on_stored` gets its number in the thread, before the loop can read the record.
        """
        core = self.core

        def work() -> Epoch:
            opened = core.open_epoch(electorate, sign, above=above, first_term=first_term)
            on_stored(opened.epoch)
            return opened

        return await self.change(work)

    # Changes

    async def change(
        self,
        work: Callable[[], T],
        then: Callable[[T], None] = lambda result: None,
        *,
        is_move: bool = True,
    ) -> T:
        """Make a change, to its end even if the caller is cancelled meanwhile.

        A thread cannot be stopped. If its lock were given back while it works, the next change
        would run beside it, and no listener would hear of this one.
        """
        task = asyncio.create_task(self._hold(work, then, is_move))
        self._changes.add(task)  # the loop itself keeps no task alive
        task.add_done_callback(self._changes.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_report_unforeseen)  # nobody awaits it any more
            raise
        finally:
            # An error names this frame, which names the task, which has the error: its callers'
            # frames, with an update and a body, would stay until the garbage collector runs.
            del task

    async def _hold(self, work: Callable[[], T], then: Callable[[T], None], is_move: bool) -> T:
        async with self._lock:
            before = self.standing
            try:
                result: T = await self.compute(work)
            except (OSError, sqlite3.Error) as error:
                self._on_failure(error)
                raise
            finally:  # part of an install may be done even if the rest failed
                self.standing = self.core.standing
            then(result)
        if self._saving is None and self.core.has_unsaved:
            self._saving = asyncio.create_task(self._save())
        if is_move and self.standing is not before:
            await self._notify()
        return result

    async def _save(self) -> None:
        """Write bodies, and hash and write what is due, without holding up changes meanwhile."""
        core = self.core
        with contextlib.suppress(OSError, sqlite3.Error):  # reported; not tried again
            while core.has_unsaved:
                await self._reporting(core.store.write_bodies)
                if core.due is not None:
                    written: Written = await self._reporting(core.write_snapshot, core.due)
                    await self._hold(
                        partial(core.keep_snapshot, written), lambda _: None, is_move=False
                    )
        core.due = None
        self._saving = None  # after another error it stays: the next one who waits gets that

    async def _reporting(self, work: Callable[..., T], *args: Any) -> T:  # noqa: ANN401
        try:
            result: T = await self.compute(work, *args)
        except (OSError, sqlite3.Error) as error:
            self._on_failure(error)
            raise
        return result

    async def _notify(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._by_first_ballot:
            self.stood_s = now - self.moved_at if self.moved_at else 0.0
        self.moved_at = now
        async with self._moved:
            self._moved.notify_all()


def _report_unforeseen(task: asyncio.Task[Any]) -> None:
    if task.cancelled() or (failure := task.exception()) is None:
        return
    # `on_failure` has reported those of the disk, and who is second with an entry is used to it.
    if not isinstance(failure, (OSError, sqlite3.Error, NotNext)):
        context = {"message": "a change failed after its caller", "exception": failure}
        task.get_loop().call_exception_handler({**context, "task": task})
