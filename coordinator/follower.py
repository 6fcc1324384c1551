"""The coordinator's copy of the run: it follows the log, keeps all of it, and opens epochs.

It applies what a quorum of the electorate has certified, and nothing else; it has no vote. Its
calls block (SQLite, hashing, applying), so the service runs them in a thread; a lock makes any
thread right.

    offer    precheck(entry, certificate) -> Claim      before a body is received
             accept(claim, body) -> state moves on      after
    epochs   open_epoch(electorate) -> signed record    always at its own head
    restart  resume()                                   newest snapshot + log
    gap      install(state, missed)                     after entries whose bodies nobody has kept

While its state is not the one at its head (`is_current`), because bodies are missing in between, it
goes on storing the log and waits for a snapshot that the log certifies.

A certified entry that does not apply here, or a certified root that is not ours, means that this
machine computes wrongly: it goes on storing the log, says so (`diverged`), and keeps no more
states.

Exceptions: `LogError` (atoll.optim.log.entry) for an entry that is wrong, and

    FollowerError
      NotNext       an entry of another position or epoch than the next; nothing is wrong with it
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from atoll.optim.log.entry import (
    Certificate,
    ChainMismatch,
    Elector,
    Entry,
    Epoch,
    SignedEpoch,
    Verify,
    check_certificate,
    check_follows,
    epoch_payload,
    genesis_chain,
    split_body,
)
from atoll.optim.log.replay import Replay
from atoll.optim.log.store import Head, LogStore, NotStored, Record, StoreCorrupt
from atoll.optim.methods import Method
from atoll.optim.reduction.cells import UpdateError
from atoll.optim.state.outer_state import OuterState

SNAPSHOT_SHARE = 0.05  # of the time that writing snapshots may take
DISK_ERRORS = (OSError, sqlite3.OperationalError)  # what is raised where a disk takes no more
_ROOTS = 16  # newest state roots kept to be compared with certified ones


class FollowerError(Exception):
    """The follower does not take an entry."""


class NotNext(FollowerError):  # noqa: N818
    """Not the entry that comes next."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A certified entry whose body is still to come."""

    entry: Entry
    certificate: Certificate


@dataclass(frozen=True, kw_only=True)
class Missed:
    """An entry that was decided while the follower was away, and what is left of it."""

    claim: Claim
    body: Callable[[], bytes | None]
    """Reads the body; None where nobody has kept it."""


@dataclass(frozen=True, kw_only=True)
class Followed:
    """An entry that was taken."""

    entry: Entry
    electorate: tuple[Elector, ...]
    """Who voted on it."""
    has_body: bool


@dataclass(frozen=True, kw_only=True)
class RunKey:
    """The run's key as the follower uses it."""

    signer: Ed25519PrivateKey

    def sign(self, data: bytes) -> bytes:
        """Sign with the run's key."""
        return self.signer.sign(data)

    def verify(self, data: bytes, signature: bytes) -> bool:
        """Whether the run's key signed this."""
        return verify_run_key(self.signer.public_key().public_bytes_raw(), data, signature)


def verify_run_key(run_key: bytes, data: bytes, signature: bytes) -> bool:
    """Whether the run's key (32 public bytes) signed `data`; False for malformed input too."""
    try:
        Ed25519PublicKey.from_public_bytes(run_key).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


class Follower:
    """State, chain, epoch and electorate at the end of the log."""

    def __init__(
        self,
        *,
        run_id: bytes,
        run_key: RunKey,
        method: Method,
        store: LogStore,
        snapshot_every: int,
        verify: Verify,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        """`resume` must be called before anything else."""
        self.run_id = run_id
        self.store = store
        self.diverged = ""
        """Why our state is no longer the run's; empty while it is."""
        self.run_key = run_key
        self.snapshot_every = snapshot_every
        self.verify = verify
        self._method = method
        self._steady = steady
        self._lock = threading.Lock()
        self._state: OuterState | None = None
        self._head = Head(epoch=0, position=0, chain=b"")
        self._electorate: tuple[Elector, ...] = ()
        self._epoch_record = b""
        self._roots: dict[int, bytes] = {}
        self._snapshot_due_s = 0.0

    # What it knows

    @property
    def head(self) -> Head:
        """Epoch, next position, and the chain there."""
        return self._head

    @property
    def state(self) -> OuterState:
        """The state at the head; where `diverged` or a gap began, if it is not `is_current`."""
        if self._state is None:
            raise RuntimeError("expected resume() to have been called")
        return self._state

    @property
    def is_current(self) -> bool:
        """Whether the state is the one at the head."""
        return not self.diverged and self.state.position == self._head.position

    def head_and_state(self) -> tuple[Head, OuterState]:
        """Both of one moment."""
        with self._lock:
            return self._head, self.state

    @property
    def electorate(self) -> tuple[Elector, ...]:
        """Who votes on the next entry."""
        return self._electorate

    @property
    def epoch_record(self) -> bytes:
        """The newest signed epoch; empty before the first."""
        return self._epoch_record

    @property
    def is_open(self) -> bool:
        """Whether the first epoch was opened."""
        return bool(self._epoch_record)

    # Restart

    def begin(self, genesis: OuterState) -> None:
        """Keep the genesis of a new run."""
        if 0 not in self.store.snapshot_positions():
            self.store.save_snapshot(genesis, genesis_chain(self.run_id, genesis.root()))

    def resume(self) -> int:
        """Be where the stored log ends; returns how many entries were replayed."""
        with self._lock:
            self._resume_epoch()
            state = self._newest_snapshot()
            self.replay = Replay(self._method, state.layout)
            self._state = self._replayed(state)
            self._head = self.store.head
            self._electorate = self._stored_electorate()
            return self._state.position - state.position

    def _replayed(self, state: OuterState) -> OuterState:
        """The state after the stored entries, or before the first of them that has no body."""
        self._note_root(state)
        for record in self._records(state.position):
            if not record.has_body:
                break
            entry = Entry.decode(record.entry)
            after = self._next(state, entry, self.store.body(record.position))
            if after is None:
                break
            state = after
            self._note_root(state)
            self._compare(entry)
        return state

    def _newest_snapshot(self) -> OuterState:
        """The newest that can be read; the log goes on from the first one, but for gaps."""
        *later, genesis = reversed(self.store.snapshot_positions())
        for position in later:
            with contextlib.suppress(StoreCorrupt, NotStored):
                return self.store.load_snapshot(position)
        return self.store.load_snapshot(genesis)

    def _records(self, position: int) -> Iterator[Record]:
        while records := self.store.headers(position, 64):
            yield from records
            position = records[-1].position + 1

    def _resume_epoch(self) -> None:
        self._epoch_record = self.store.latest_epoch() or b""
        if self._epoch_record:
            SignedEpoch.decode(self._epoch_record).open(self.run_key.verify)

    def _stored_electorate(self) -> tuple[Elector, ...]:
        if self._epoch_record:
            epoch = SignedEpoch.decode(self._epoch_record).open(self.run_key.verify)
            if epoch.base_position == self._head.position:
                return epoch.electorate
        last = self.store.get(self._head.position - 1)
        return Entry.decode(last.entry).electorate if last else ()

    # The log

    def precheck(self, entry_bytes: bytes, certificate_bytes: bytes) -> Claim:
        """Check everything about the next entry but its body.

        Raises:
            NotNext: it is known already, or does not come next.
            LogError: it is malformed, does not follow, or its certificate is invalid.
        """
        entry = Entry.decode(entry_bytes)
        certificate = Certificate.decode(certificate_bytes)
        with self._lock:
            self._check(entry, certificate, self._head, self._electorate)
        return Claim(entry=entry, certificate=certificate)

    def accept(self, claim: Claim, body: bytes | bytearray) -> None:
        """Apply and store the next entry.

        Raises:
            NotNext: another one was quicker.
            LogError: the body is not the one that the entry names.
        """
        entry = claim.entry
        with self._lock:
            self._check_next(entry, self._head)
            state = self._apply(entry, body)
            self._append(claim, body)
            self._head, self._electorate = _after(entry), entry.electorate
            if state is not None:
                self._state = state
                self._keep(state, entry)

    def install(self, state: OuterState, missed: Sequence[Missed]) -> list[Followed]:
        """Go on from a snapshot, past entries of which nobody may have the bodies.

        All entries are checked before the first is stored, and the state against the root that one
        of them certifies.  Those that are known already are passed over.

        Args:
            state: of a position at which entries carry state roots.
            missed: consecutive entries from the head on, or from before it.

        Raises:
            NotNext: they do not begin at the head.
            LogError: an entry does not follow, is not certified, or certifies another state.
        """
        with self._lock:
            new = [each for each in missed if each.claim.entry.position >= self._head.position]
            electorates = self._check_all([each.claim for each in new])
            self._expect_certified(state, [each.claim.entry for each in new])
            taken = [self._store(*pair) for pair in zip(new, electorates, strict=True)]
            if state.position > self.state.position and not self.diverged:
                self._save_after_gap(state)
                self._state = state
            self._state = self._replayed(self.state)
            return taken

    def _check_all(self, claims: Sequence[Claim]) -> list[tuple[Elector, ...]]:
        """Check entries that follow each other from the head on; who votes on each of them."""
        head, electorate = self._head, self._electorate
        electorates = []
        for claim in claims:
            self._check(claim.entry, claim.certificate, head, electorate)
            electorates.append(electorate)
            head, electorate = _after(claim.entry), claim.entry.electorate
        return electorates

    def _expect_certified(self, state: OuterState, entries: Sequence[Entry]) -> None:
        due = state.position + self.snapshot_every
        entry = next((entry for entry in entries if entry.position == due), None)
        if entry is None and (record := self.store.get(due)) is not None:
            entry = Entry.decode(record.entry)
        root = entry.state_root if entry is not None else None
        if root is None or (root.position, root.root) != (state.position, state.root()):
            raise ChainMismatch(
                f"snapshot {state.position}: expected the root that entry {due} certifies, "
                f"got {state.root().hex()[:12]}"
            )

    def _store(self, missed: Missed, electorate: tuple[Elector, ...]) -> Followed:
        entry, body = missed.claim.entry, missed.body()
        if body is not None:
            split_body(entry, body)
            self._append(missed.claim, body)
        else:
            self.store.append_header(
                epoch=entry.epoch,
                position=entry.position,
                entry=entry.encode(),
                certificate=missed.claim.certificate.encode(),
                body_bytes=entry.body_bytes,
                chain=entry.chain,
            )
        self._head, self._electorate = _after(entry), entry.electorate
        return Followed(entry=entry, electorate=electorate, has_body=body is not None)

    def _save_after_gap(self, state: OuterState) -> None:
        before = self.store.get(state.position - 1)
        if before is None:
            raise ChainMismatch(f"snapshot {state.position}: expected the entry before it")
        self.store.save_snapshot(state, before.chain)

    def open_epoch(self, electorate: Sequence[Elector]) -> Epoch:
        """Sign and keep a new epoch that begins at our head."""
        with self._lock:
            epoch = Epoch(
                run_id=self.run_id,
                epoch=self._head.epoch + 1 if self._epoch_record else 0,
                base_position=self._head.position,
                base_chain=self._head.chain,
                electorate=tuple(electorate),
            )
            raw = epoch.encode()
            signature = self.run_key.sign(epoch_payload(raw))
            self._epoch_record = SignedEpoch(epoch=raw, signature=signature).encode()
            self.store.put_epoch(epoch.epoch, self._epoch_record)
            self._head = Head(
                epoch=epoch.epoch, position=self._head.position, chain=self._head.chain
            )
            self._electorate = epoch.electorate
        return epoch

    def _append(self, claim: Claim, body: bytes | bytearray) -> None:
        entry = claim.entry
        self.store.append(
            epoch=entry.epoch,
            position=entry.position,
            entry=entry.encode(),
            certificate=claim.certificate.encode(),
            body=body,
            chain=entry.chain,
        )

    def _check(
        self,
        entry: Entry,
        certificate: Certificate,
        head: Head,
        electorate: Sequence[Elector],
    ) -> None:
        self._check_next(entry, head)
        check_follows(
            entry,
            run_id=self.run_id,
            epoch=head.epoch,
            position=head.position,
            chain=head.chain,
        )
        check_certificate(entry, certificate, electorate, self.verify)
        self.replay.check(entry)

    def _check_next(self, entry: Entry, head: Head) -> None:
        if not self._epoch_record or (entry.epoch, entry.position) != (head.epoch, head.position):
            raise NotNext(
                f"expected the entry at epoch {head.epoch}, position {head.position}, "
                f"got epoch {entry.epoch}, position {entry.position}"
            )

    def _apply(self, entry: Entry, body: bytes | bytearray) -> OuterState | None:
        view = memoryview(body)
        if entry.kind == "null" or not self._goes_on_with(entry, self.state):
            split_body(entry, view)  # else decoding does: large bodies are hashed once
        return self._next(self.state, entry, view)

    def _goes_on_with(self, entry: Entry, state: OuterState) -> bool:
        return not self.diverged and state.position == entry.position

    def _next(self, state: OuterState, entry: Entry, body: bytes | memoryview) -> OuterState | None:
        """The state after an entry; None where there is none any more."""
        if not self._goes_on_with(entry, state):
            return None
        try:
            return self.replay.next_state(state, entry, body)
        except UpdateError as error:  # a quorum decoded it, so the fault is here
            self.diverged = f"entry {entry.position}: {error}; checkpoints stop here"
            return None

    def _keep(self, state: OuterState, entry: Entry) -> None:
        if state.position % self.snapshot_every == 0:
            self._note_root(state)
            self._snapshot(state)
        self._compare(entry)

    def _note_root(self, state: OuterState) -> None:
        if state.position % self.snapshot_every == 0:
            self._roots[state.position] = state.root()
            for position in sorted(self._roots)[:-_ROOTS]:
                del self._roots[position]

    def _compare(self, entry: Entry) -> None:
        certified = entry.state_root
        ours = self._roots.get(certified.position) if certified is not None else None
        if certified is not None and ours is not None and ours != certified.root:
            self.diverged = (
                f"state {certified.position}: expected the certified root "
                f"{certified.root.hex()[:12]}, got "
                f"{ours.hex()[:12]}; this machine computes wrongly, checkpoints stop here"
            )

    def _snapshot(self, state: OuterState) -> None:
        started_s = self._steady()
        if started_s < self._snapshot_due_s:
            return
        with contextlib.suppress(*DISK_ERRORS):  # told with the first entry that is not taken
            self.store.save_snapshot(state, self._head.chain)
        took_s = self._steady() - started_s
        self._snapshot_due_s = started_s + took_s / SNAPSHOT_SHARE


def _after(entry: Entry) -> Head:
    return Head(epoch=entry.epoch, position=entry.position + 1, chain=entry.chain)
