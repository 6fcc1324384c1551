"""The coordinator's copy of the run: it follows the log, keeps all of it, and opens epochs.

It applies what a quorum of the electorate has certified, and nothing else; it has no vote. Its
calls block (SQLite, hashing, applying), so the service runs them in a thread; a lock makes any
thread right.

    offer    precheck(entry, certificate) -> Claim      before a body is received
             accept(claim, body) -> state moves on      after
    epochs   open_epoch(electorate) -> signed record    always at its own head
    restart  resume()                                   newest snapshot + log

A certified entry that does not apply here, or a certified root that is not ours, means that this
machine computes wrongly: it goes on storing the log, says so (`diverged`), and keeps no more
states.

Exceptions: `LogError` (atoll.optim.log) for an entry that is wrong, and

    FollowerError
      NotNext       an entry of another position or epoch than the next; nothing is wrong with it
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from atoll.compression import Codec
from atoll.optim.log import (
    Certificate,
    Elector,
    Entry,
    Epoch,
    MalformedRecord,
    SignedEpoch,
    Verify,
    check_certificate,
    check_follows,
    epoch_payload,
    genesis_chain,
    split_body,
)
from atoll.optim.replay import next_state
from atoll.optim.state import OuterState
from atoll.optim.store import Head, LogStore, NotStored, Record, StoreCorrupt
from atoll.optim.update import UpdateError, cells_bytes

SNAPSHOT_SHARE = 0.05  # of the time that writing snapshots may take
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
        codec: Codec,
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
        self._run_key = run_key
        self._codec = codec
        self._snapshot_every = snapshot_every
        self._verify = verify
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
        """The state at the head, or where `diverged` began."""
        if self._state is None:
            raise RuntimeError("expected resume() to have been called")
        return self._state

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

    def body_bytes(self) -> int:
        """Length of the body of every update of this run."""
        return cells_bytes(self._codec, self.state.layout.numel)

    # Restart

    def begin(self, genesis: OuterState) -> None:
        """Keep the genesis of a new run."""
        if 0 not in self.store.snapshot_positions():
            self.store.save_snapshot(genesis, genesis_chain(self.run_id, genesis.root()))

    def resume(self) -> int:
        """Be where the stored log ends; returns how many entries were replayed."""
        with self._lock:
            self._resume_epoch()
            self._state = self._newest_snapshot()
            self._note_root(self._state)
            replayed = 0
            for record in self._records(self._state.position):
                entry = Entry.decode(record.entry)
                body = self.store.body(record.position)
                self._state = next_state(self._state, entry, body, self._codec)
                self._note_root(self._state)
                replayed += 1
            self._head = self.store.head
            self._electorate = self._stored_electorate()
            return replayed

    def _newest_snapshot(self) -> OuterState:
        """The newest that can be read: the log has everything since the first."""
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
            SignedEpoch.decode(self._epoch_record).open(self._run_key.verify)

    def _stored_electorate(self) -> tuple[Elector, ...]:
        if self._epoch_record:
            epoch = SignedEpoch.decode(self._epoch_record).open(self._run_key.verify)
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
            self._check(entry, certificate)
        return Claim(entry=entry, certificate=certificate)

    def accept(self, claim: Claim, body: bytes | bytearray) -> None:
        """Apply and store the next entry.

        Raises:
            NotNext: another one was quicker.
            LogError: the body is not the one that the entry names.
        """
        entry = claim.entry
        with self._lock:
            self._check_next(entry)
            state = self._apply(entry, body)
            self.store.append(
                epoch=entry.epoch,
                position=entry.position,
                entry=entry.encode(),
                certificate=claim.certificate.encode(),
                body=body,
                chain=entry.chain,
            )
            self._head = Head(epoch=entry.epoch, position=entry.position + 1, chain=entry.chain)
            self._electorate = entry.electorate
            if state is not None:
                self._state = state
                self._keep(state, entry)

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
            signature = self._run_key.sign(epoch_payload(raw))
            self._epoch_record = SignedEpoch(epoch=raw, signature=signature).encode()
            self.store.put_epoch(epoch.epoch, self._epoch_record)
            self._head = Head(
                epoch=epoch.epoch, position=self._head.position, chain=self._head.chain
            )
            self._electorate = epoch.electorate
        return epoch

    def _check(self, entry: Entry, certificate: Certificate) -> None:
        self._check_next(entry)
        head = self._head
        check_follows(
            entry,
            run_id=self.run_id,
            epoch=head.epoch,
            position=head.position,
            chain=head.chain,
        )
        check_certificate(entry, certificate, self._electorate, self._verify)
        expected = self.body_bytes() if entry.kind == "update" else 0
        if entry.body_bytes != expected:
            raise MalformedRecord(
                f"entry {entry.position}: expected a body of {expected} bytes, "
                f"got one of {entry.body_bytes}"
            )

    def _check_next(self, entry: Entry) -> None:
        head = self._head
        if not self._epoch_record or (entry.epoch, entry.position) != (head.epoch, head.position):
            raise NotNext(
                f"expected the entry at epoch {head.epoch}, position {head.position}, "
                f"got epoch {entry.epoch}, position {entry.position}"
            )

    def _apply(self, entry: Entry, body: bytes | bytearray) -> OuterState | None:
        view = memoryview(body)
        split_body(entry, view)
        if self.diverged:
            return None
        try:
            return next_state(self.state, entry, view, self._codec)
        except UpdateError as error:  # a quorum decoded it, so the fault is here
            self.diverged = f"entry {entry.position}: {error}; checkpoints stop here"
            return None

    def _keep(self, state: OuterState, entry: Entry) -> None:
        if state.position % self._snapshot_every == 0:
            self._note_root(state)
            self._snapshot(state)
        if entry.state_root is not None:
            self._compare(entry.state_root.position, entry.state_root.root)

    def _note_root(self, state: OuterState) -> None:
        if state.position % self._snapshot_every == 0:
            self._roots[state.position] = state.root()
            for position in sorted(self._roots)[:-_ROOTS]:
                del self._roots[position]

    def _compare(self, position: int, root: bytes) -> None:
        ours = self._roots.get(position)
        if ours is not None and ours != root:
            self.diverged = (
                f"state {position}: expected the certified root {root.hex()[:12]}, got "
                f"{ours.hex()[:12]}; this machine computes wrongly, checkpoints stop here"
            )

    def _snapshot(self, state: OuterState) -> None:
        started_s = self._steady()
        if started_s < self._snapshot_due_s:
            return
        self.store.save_snapshot(state, self._head.chain)
        took_s = self._steady() - started_s
        self._snapshot_due_s = started_s + took_s / SNAPSHOT_SHARE
