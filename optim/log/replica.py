"""A copy of what one log decides: its state, its chain, its epoch, and the entries that led here.

It accepts what a quorum of the electorate has certified, and nothing else. All calls are
synchronous and may block (SQLite, hashing, decoding, applying); one thread at a time may change it.
`atoll.optim.log.live.LiveReplica` is the same for an event loop.

    accept    check(entry, certificate) -> Claim     all but the body
              accept(claim, body)                    the state moves on
    recover   verify(records) -> [Claim]             entries that somebody sent
              install(state, claims)                 a snapshot whose root an entry certifies
    epochs    adopt(record), rewind()                an epoch that the run's key signed
              open_epoch(electorate, sign)           by the owner of that key, at its own head
    restart   resume()                               the newest snapshot and the entries after it

A peer keeps what it needs: `install` replaces its log, and the bodies of old entries are pruned. A
ledger, as the coordinator keeps it, drops nothing and never waits: it stores each certified entry,
if need be without its body or without a state (`is_current`), so its head may be beyond its state.
It also compares certified roots with its own; if one differs, or a certified entry does not apply,
then this machine computes wrongly. A ledger reports that (`diverged`), keeps no more states, and
continues to store the log. A peer raises instead: it votes, so it must not pretend to follow.

Snapshots are taken at multiples of `Module.snapshot_every`; the entry `snapshot_every` positions
later carries their root. Peers keep them in memory too, from the newest one whose root is certified
on (usually two), because joiners fetch them. A ledger keeps their roots, and serves its files.

Exceptions: `LogError` (atoll.optim.log.entry) for an entry that is wrong, and of these

    ChainMismatch
      NotNext       an entry of another position or epoch than the next; it may be next elsewhere
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from atoll.optim.log.entry import (
    Certificate,
    ChainMismatch,
    Claim,
    Elector,
    Entry,
    Epoch,
    EpochInvalid,
    LogPlace,
    SignedEpoch,
    Verify,
    certified_root,
    check_certificate,
    check_follows,
    epoch_payload,
    genesis_chain,
    place_before,
    split_body,
    verify_claims,
)
from atoll.optim.log.replay import Module, Replay
from atoll.optim.log.store import (
    LogStore,
    NotStored,
    OutOfOrder,
    StoredEntry,
    StoreError,
    StoreHead,
)
from atoll.optim.reduction.cells import Bytes, UpdateError
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import OuterState
from atoll.optim.state.updates import Update

LEASE_S = 15.0  # of a snapshot after a request for 8 MiB of it: what 5 Mbit/s take, and a retry
SNAPSHOT_SHARE = 0.05  # of the time, that a ledger may spend on snapshots: large ones take seconds
DISK_ERRORS = (OSError, sqlite3.OperationalError)  # raised when a disk takes no more
ROOTS = 16  # newest roots that a ledger compares with certified ones: several snapshots' delay
PAGE = 64  # entries read from the disk at once

VerifyRun = Callable[[bytes, bytes], bool]
"""(data, signature) -> whether the run's key signed that data."""


class NotNext(ChainMismatch):
    """Not the entry that comes next here; nothing need be wrong with it."""


@dataclass(frozen=True, kw_only=True)
class ReplicaStanding:
    """Standing of a replica. It is replaced as a whole, so all of it is of one moment."""

    head: StoreHead = field(default_factory=lambda: StoreHead(epoch=0, position=0, chain=b""))
    """The epoch, the next position, and the chain there."""
    electorate: tuple[Elector, ...] = ()
    """The next entry's electorate; empty while the entries here are not the epoch's."""
    state: OuterState | None = None
    """The state at the head, or an older one (`ReplicaView.is_current`)."""
    snapshots: dict[int, OuterState] = field(default_factory=dict)
    """Snapshots that joiners may fetch, by position."""
    opened: Epoch | None = None
    epoch_record: bytes = b""
    """`opened` as the run's key signed it; empty before the first."""
    diverged: str = ""
    """Why the state here is no longer the run's; empty while it is."""
    leaps: int = 0
    """Number of times that a state was put in place without entries leading to it."""

    def is_at_base(self, epoch: Epoch) -> bool:
        """Return whether the head is where an epoch begins."""
        return (self.head.position, self.head.chain) == (epoch.base_position, epoch.base_chain)


class ReplicaView:
    """The read-only view of a replica; nothing in it waits."""

    module: Module
    store: LogStore
    standing: ReplicaStanding
    is_ledger: bool

    @property
    def run_id(self) -> bytes:
        """The run's."""
        return self.module.run_id

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
    def snapshots(self) -> dict[int, OuterState]:
        """Snapshots in memory, by position."""
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
        state = self.snapshots.get(scheduled) if scheduled is not None else None
        return (state.position, state.root()) if state is not None else None

    def certified_root(self, claims: Sequence[Claim], position: int) -> bytes | None:
        """Return the certified root of the state at a position, from claims or the stored log."""
        root = certified_root(claims, position)
        record = self.store.get(position + self.snapshot_every)
        if root is None and record is not None and self.electorate:  # else it may be void
            stored = Entry.decode(record.entry).state_root
            root = stored.root if stored is not None and stored.position == position else None
        return root


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make an empty replica; `resume` or `install` gives it a state.

        Args:
            module: what it follows.
            store: keeps it; the caller closes it.
            verify: checks a peer's signature.
            verify_run: checks a signature of the run's key.
            is_ledger: keep the whole log, whatever becomes of the state.
            clock: any steady one, in seconds.
        """
        self.module = module
        self.store = store
        self.standing = ReplicaStanding()
        self.is_ledger = is_ledger
        self._verify = verify
        self._verify_run = verify_run
        self._clock = clock
        self._roots: dict[int, bytes] = {}
        self._snapshot_due_s = 0.0
        self._leased: tuple[int, float] | None = None
        """the snapshot that somebody fetches, and until when it stays"""

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
        snapshots = {} if self.is_ledger else {state.position: state}
        at = replace(self.standing, head=head, state=state, snapshots=snapshots)
        at = self._replayed(replace(at, leaps=at.leaps + 1))
        if self.is_ledger:  # the log may reach beyond the state
            at = replace(at, head=replace(self.store.head, epoch=self.epoch))
        self.standing = replace(at, electorate=self._stored_electorate(at.head))
        return True

    def _newest_snapshot(self) -> OuterState | None:
        """Load the newest snapshot that can be read, so that one damaged file costs only time."""
        failure: StoreError | None = None
        for position in reversed(self.store.snapshot_positions()):
            try:
                return self.store.load_snapshot(position)
            except StoreError as error:
                failure = error
        # A peer fetches another from the run; a ledger's first state is nowhere else.
        if failure is not None and self.is_ledger:
            raise failure
        return None

    def _replayed(self, at: ReplicaStanding) -> ReplicaStanding:
        """Apply the stored entries after the state, up to the first whose body is not here.

        The head of the result is the state's.
        """
        at = self._noted(at)
        for record in self._records_after(at):
            if not record.has_body:
                break
            entry = Entry.decode(record.entry)
            state, diverged = self._next_state(at, entry, self.store.body(record.position), None)
            at = replace(at, state=state, diverged=diverged)
            if not diverged:
                head = replace(at.head, position=state.position, chain=entry.chain)
                at = self._noted(replace(at, head=head), entry)
            if at.diverged:
                break
        return at

    def _records_after(self, at: ReplicaStanding) -> Iterator[StoredEntry]:
        position = at.state.position if at.state is not None else 0
        while records := self.store.headers(position, PAGE):
            yield from records
            position = records[-1].position + 1

    def _stored_electorate(self, head: StoreHead) -> tuple[Elector, ...]:
        opened, before = self.opened, self.store.get(head.position - 1)
        if opened is not None and head.position == opened.base_position:
            return opened.electorate if head.chain == opened.base_chain else ()
        if opened is not None and before is not None:
            # An entry beyond the base that is of an older epoch is void: this process ended after
            # it heard of the epoch and before it went back to the base.
            if before.position >= opened.base_position and before.epoch < opened.epoch:
                return ()
        return self.electorate_at(head.position)

    def electorate_at(self, position: int) -> tuple[Elector, ...]:
        """Return those who vote at a position of the newest epoch, by what is stored."""
        if self.opened is not None and position == self.opened.base_position:
            return self.opened.electorate
        before = self.store.get(position - 1)
        return Entry.decode(before.entry).electorate if before is not None else ()

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
        check_certificate(entry, certificate, at.electorate, self._verify)
        self.replay.check(entry)
        return Claim(entry=entry, certificate=certificate)

    def verify(self, records: Sequence[tuple[bytes, bytes]], here: LogPlace | None) -> list[Claim]:
        """Verify consecutive entries that somebody sent; see `verify_claims`.

        Raises:
            LogError: one of them is not the log's, or no epoch is known that could prove it.
        """
        if self.opened is None:
            raise EpochInvalid("no epoch record of the run is known yet; nobody has sent one")
        return verify_claims(
            records, run_id=self.run_id, here=here, opened=self.opened, verify=self._verify
        )

    def accept(self, claim: Claim, body: Bytes, update_F: Update | None = None) -> Update | None:
        """Apply and store the next entry.

        Args:
            claim: the entry, verified by `check` or `verify`.
            body: the bytes of its parts; checked here unless the update is given.
            update_F: the decoded body, if the caller has verified and decoded it.

        Returns:
            The decoded update of a method that takes residuals against it; otherwise what was
            given.

        Raises:
            NotNext: another entry was quicker, or an epoch has begun.
            LogError: the body is not the one that the entry names.
            UpdateError: it does not decode (not in a ledger).
        """
        entry, at = claim.entry, self.standing
        # Much may have happened since the claim was verified: its body had to come.
        self._expect_next(entry, at)
        if self.replay.by_factors and update_F is None and entry.kind == "update":
            self.replay.check(entry)
            update_F = self._decoded(entry, body)
        applies = not at.diverged and self.state.position == entry.position
        if entry.kind == "null" or not applies:
            split_body(entry, memoryview(body))  # otherwise decoding does; large bodies: once
        state, diverged = at.state, at.diverged
        if applies:
            state, diverged = self._next_state(at, entry, body, update_F)
        self._store(claim, body, at)  # before the standing: what is announced is on disk
        after = replace(self._after(at, entry), state=state, diverged=diverged)
        if applies and not diverged:
            after = self._noted(after, entry)
            self._save_when_due(after)
        self.standing = after
        return update_F

    def _decoded(self, entry: Entry, body: Bytes) -> Update | None:
        try:
            return self.replay.decode(entry, body)
        except UpdateError:
            if self.is_ledger:
                return None  # applying it fails in the same way, and says so
            raise

    def _expect_next(self, entry: Entry, at: ReplicaStanding) -> None:
        # Entries before the base were certified in older epochs; their chain proves them.
        is_before_base = at.opened is not None and entry.position < at.opened.base_position
        if (
            entry.position != at.head.position
            or entry.previous_chain != at.head.chain
            or not (is_before_base or (at.opened is not None and entry.epoch == at.head.epoch))
        ):
            raise _not_next(entry, at.head)

    def _next_state(
        self, at: ReplicaStanding, entry: Entry, body: Bytes, update_F: Update | None
    ) -> tuple[OuterState, str]:
        """Return the state after an entry; or the one before, and how this machine diverged."""
        if at.state is None:
            raise RuntimeError("this replica holds no state yet: resume or install one first")
        try:
            return self.replay.next_state(at.state, entry, memoryview(body), update_F), at.diverged
        except UpdateError as error:
            if not self.is_ledger:
                raise
            # A quorum decoded it, so the fault is here.
            return at.state, f"entry {entry.position}: {error}; checkpoints stop here"

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
        )

    def _after(self, at: ReplicaStanding, entry: Entry) -> ReplicaStanding:
        head = StoreHead(epoch=at.head.epoch, position=entry.position + 1, chain=entry.chain)
        at = replace(at, head=head, electorate=entry.electorate)
        if at.opened is not None and at.is_at_base(at.opened):
            at = replace(at, electorate=at.opened.electorate)
        return at

    # Snapshots and roots

    def _noted(self, at: ReplicaStanding, entry: Entry | None = None) -> ReplicaStanding:
        """Note a state that came to be, and the root that the entry before it certifies."""
        return self._compared(at, entry) if self.is_ledger else self._kept(at, entry)

    def _compared(self, at: ReplicaStanding, entry: Entry | None) -> ReplicaStanding:
        """Compare the roots here with those that entries certify."""
        if at.state is not None and self._is_snapshot_due(at.state):
            self._roots[at.state.position] = at.state.root()
            for position in sorted(self._roots)[:-ROOTS]:
                del self._roots[position]
        certified = entry.state_root if entry is not None else None
        ours = self._roots.get(certified.position) if certified is not None else None
        if certified is None or ours is None or ours == certified.root:
            return at
        why = (
            f"state {certified.position}: expected the certified root "
            f"{certified.root.hex()[:12]}, got {ours.hex()[:12]}; "
            "this machine computes wrongly, checkpoints stop here"
        )
        return replace(at, diverged=why)

    def _kept(self, at: ReplicaStanding, entry: Entry | None) -> ReplicaStanding:
        """Keep in memory what joiners may fetch."""
        snapshots = dict(at.snapshots)
        if entry is not None and entry.state_root is not None:
            self._forget_before(snapshots, entry.state_root.position)
        if at.state is not None and self._is_snapshot_due(at.state):
            snapshots[at.state.position] = at.state
        return replace(at, snapshots=snapshots)

    def _is_snapshot_due(self, state: OuterState) -> bool:
        return state.position % self.snapshot_every == 0

    def _forget_before(self, snapshots: dict[int, OuterState], certified: int) -> None:
        """Drop those older than the newest one with a certified root: joiners take that one."""
        is_leased = self._leased is not None and self._leased[1] >= self._clock()
        leased = self._leased[0] if self._leased is not None and is_leased else None
        for position in [p for p in snapshots if p < certified and p != leased]:
            del snapshots[position]

    def _save_when_due(self, at: ReplicaStanding) -> None:
        state, chain = at.state, at.head.chain
        if state is None or at.diverged or not self._is_snapshot_due(state):
            return
        if not self.is_ledger:
            self.store.save_snapshot(state, chain)
            return
        started_s = self._clock()
        if started_s < self._snapshot_due_s:
            return
        with contextlib.suppress(*DISK_ERRORS):  # reported with the first entry that is not stored
            self.store.save_snapshot(state, chain)
        took_s = self._clock() - started_s
        self._snapshot_due_s = started_s + took_s / SNAPSHOT_SHARE

    def lease(self, position: int) -> OuterState | None:
        """Return a snapshot to somebody who fetches it; it stays for a while after each request.

        One has a lease at a time, so that no more than one is kept beside those that are kept
        anyway: while it is fetched, others are given but not kept.
        """
        now_s, state, leased = self._clock(), self.snapshots.get(position), self._leased
        is_free = leased is None or leased[0] == position or leased[1] < now_s
        if state is not None and is_free:
            self._leased = position, now_s + LEASE_S
        return state

    # Recovery

    def install(self, state: OuterState, claims: Sequence[Claim] = ()) -> list[Claim]:
        """Continue from a snapshot, past entries whose bodies nobody may have.

        A peer's log then begins with the claims before it, which later joiners need. A ledger adds
        to its log what is missing up to the snapshot, and applies what it has stored beyond.

        Args:
            state: the first state of the run, or one whose root an entry certifies.
            claims: consecutive verified entries around it; those that are not needed do no harm.

        Returns:
            The entries that were new here.

        Raises:
            NotNext: the entries that are missing here do not begin at the head of a ledger.
            ChainMismatch: no entry certifies the state.
        """
        self._expect_certified(state, claims)
        if self.is_ledger:
            return self._extend(state, claims)
        place = self._place_of(state, claims)
        before = [claim for claim in claims if claim.entry.position < state.position]
        self._begin_store(state.position, place.chain, before)
        self.standing = replace(
            self.standing,
            head=StoreHead(epoch=self.epoch, position=state.position, chain=place.chain),
            electorate=place.electorate,
            state=state,
            snapshots={},
            leaps=self.leaps + 1,
        )
        self.standing = self._noted(self.standing)
        self._save_when_due(self.standing)
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

    def _place_of(self, state: OuterState, claims: Sequence[Claim]) -> LogPlace:
        place = place_before(claims, state.position, self.opened)
        if place is None and state.position == 0:
            return LogPlace(chain=self.store.genesis_chain, electorate=())
        if place is None:
            raise ChainMismatch(f"snapshot {state.position}: expected the entry before it")
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
        self.standing = replace(self._replayed(after), head=after.head)
        return new

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
        is_here = self.ready and self.standing.is_at_base(epoch)
        self._know_epoch(epoch, record)
        self.standing = replace(self.standing, electorate=epoch.electorate if is_here else ())
        return is_here

    def _know_epoch(self, epoch: Epoch, record: bytes) -> None:
        head = replace(self.standing.head, epoch=epoch.epoch)
        self.standing = replace(self.standing, head=head, opened=epoch, epoch_record=record)

    def open_epoch(self, electorate: Sequence[Elector], sign: Callable[[bytes], bytes]) -> Epoch:
        """Sign and begin a new epoch at the head, which voids nothing here."""
        head = self.head
        epoch = Epoch(
            run_id=self.run_id,
            epoch=0 if self.opened is None else self.opened.epoch + 1,
            base_position=head.position,
            base_chain=head.chain,
            electorate=tuple(electorate),
        )
        raw = epoch.encode()
        self.adopt(SignedEpoch(epoch=raw, signature=sign(epoch_payload(raw))).encode())
        return epoch

    def rewind(self) -> bool:
        """Go back to the base of the epoch if entries beyond it are void; True if that worked.

        It works if this peer's own log reaches the base with the chain that the epoch names. A
        ledger does not go back: epochs begin at its head.
        """
        opened = self.opened
        if self.is_ledger or opened is None or not self.ready:
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
        is_done = self._resume_newest() and self.position == opened.base_position
        electorate = opened.electorate if is_done else ()
        self.standing = replace(self.standing, electorate=electorate)
        return is_done


def _not_next(entry: Entry, head: StoreHead) -> NotNext:
    return NotNext(
        f"expected the entry at epoch {head.epoch}, position {head.position}, "
        f"got epoch {entry.epoch}, position {entry.position}"
    )
