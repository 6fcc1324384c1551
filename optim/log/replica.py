"""A copy of what one log decides: its state, its chain, its epoch, and the entries that led here.

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

`standing.py` has what can be read of a replica, `live_replica.py` the same in an event loop.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from atoll.optim.log.claims import Claim, LogPlace, place_before, verify_claims, verify_linked
from atoll.optim.log.electorate import Succession, after, at_base, remembered
from atoll.optim.log.entry import (
    Certificate,
    ChainMismatch,
    Elector,
    Entry,
    Epoch,
    EpochInvalid,
    MalformedRecord,
    SignedEpoch,
    SignedRoot,
    StateRoot,
    Verify,
    VerifyRun,
    check_certificate,
    check_follows,
    epoch_payload,
    genesis_chain,
    split_body,
)
from atoll.optim.log.module import Module, log_id
from atoll.optim.log.orders import (
    Order,
    OrderInvalid,
    SignedOrder,
    check_settings,
)
from atoll.optim.log.standing import Due, NotNext, ReplicaStanding, ReplicaView, Written
from atoll.optim.log.store import PAGE, LogStore, StoredEntry, StoreHead
from atoll.optim.log.store_errors import NotStored, OutOfOrder, StoreError
from atoll.optim.log.stored_snapshots import SnapshotFile, WrittenSnapshot
from atoll.optim.log.units import check_units
from atoll.optim.reduction.cells import Bytes, UpdateError
from atoll.optim.state import vectors
from atoll.optim.state.outer_state import OuterState
from atoll.optim.state.updates import Update

LEASE_S = 15.0  # of a snapshot after a request for 8 MiB of it: what 5 Mbit/s take, and a retry
SNAPSHOT_SHARE = 0.05  # of the time, that a ledger may spend on snapshots: large ones take seconds
DISK_ERRORS = (OSError, sqlite3.OperationalError)  # raised when a disk takes no more
ROOTS = 16  # newest roots that a ledger compares with certified ones: several snapshots' delay


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
        """Yield the stored entries from the state on; none if the log begins after it."""
        position = at.state.position if at.state is not None else 0
        while records := self.store.headers(position, PAGE):
            if records[0].position != position:
                return
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
