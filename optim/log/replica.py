"""This peer's copy of the run: state, chain, epoch, and the log that led here.

``append`` is the only way forward and takes nothing without a certificate; ``install`` puts a
verified snapshot in place; ``adopt`` begins an epoch.  Snapshots stay at multiples of
``snapshot_every``: from the newest one whose root a later entry has certified, which is two beside
the current state.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.optim.log.entry import (
    Certificate,
    Elector,
    Entry,
    Epoch,
    EpochInvalid,
    SignedEpoch,
    Verify,
    check_certificate,
    check_follows,
)
from atoll.optim.log.replay import Replay
from atoll.optim.log.store import LogStore, StoreError
from atoll.optim.state.outer_state import OuterState
from atoll.optim.state.updates import Update

Compute = Callable[..., Awaitable[Any]]
LEASE_S = 15.0  # of a snapshot after a request for 8 MiB of it: what 5 Mbit/s take, and a retry


@dataclass(frozen=True, kw_only=True)
class Applied:
    """One entry, applied."""

    entry: Entry
    state: OuterState
    apply_s: float
    update_F: Update | None = None  # noqa: N815
    """the decoded update, where residuals are taken against it"""


class Replica:
    """Single-loop: all coroutines run in one event loop, apply work in ``compute``."""

    def __init__(
        self,
        *,
        run_id: bytes,
        replay: Replay,
        store: LogStore,
        verify: Verify,
        verify_run: Callable[[bytes, bytes], bool],
        snapshot_every: int,
        compute: Compute,
        on_failure: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        """Empty: ``resume`` or ``install`` gives it a state.

        ``on_failure`` is told when the disk takes nothing more: such a replica can't go on.
        """
        self.run_id = run_id
        self.replay = replay
        self.layout = replay.layout
        self.store = store
        self.snapshot_every = snapshot_every
        self.chain = b""
        self.epoch = 0
        self.epoch_record = b""
        self.opened: Epoch | None = None
        self.electorate: tuple[Elector, ...] = ()
        self._verify = verify
        self._verify_run = verify_run
        self._compute = compute
        self._on_failure = on_failure
        self._state: OuterState | None = None
        self.leaps = 0
        """how often a state was put in place that no entry led to from the one before"""
        self.snapshots: dict[int, OuterState] = {}
        self._leased: tuple[int, float] | None = None
        """the snapshot that somebody fetches, and until when it stays; on the loop's clock"""
        self._lock = asyncio.Lock()
        self._moved = asyncio.Condition()
        self.moved_at = 0.0
        """when this replica came to stand where it stands, on the loop's clock"""
        self.stood_s = 0.0
        """how long it stood where it was before"""
        self.listeners: list[Callable[[Applied], None]] = []

    @property
    def ready(self) -> bool:
        """Whether there is a state."""
        return self._state is not None

    @property
    def state(self) -> OuterState:
        """The current state."""
        if self._state is None:
            raise RuntimeError("expected a state, got a replica that holds none yet")
        return self._state

    @property
    def position(self) -> int:
        """The position that is decided next; the number of entries applied."""
        return self._state.position if self._state is not None else 0

    async def passed(self, position: int) -> None:
        """Wait until ``position`` is decided and applied, or the epoch has changed."""
        epoch = self.epoch
        async with self._moved:
            await self._moved.wait_for(lambda: self.position > position or self.epoch != epoch)

    async def moved(self) -> None:
        """Wait until anything is decided, installed or adopted."""
        async with self._moved:
            await self._moved.wait()

    async def append(
        self,
        entry: Entry,
        certificate: Certificate,
        body: bytes,
        update_N: Update | None = None,
        *,
        since: float | None = None,
    ) -> bool:
        """Apply the next entry; False where its position is decided already.

        ``since`` is when its certificate came, on the loop's clock: what was done for it before
        this call counts as applying too.

        Raises:
            LogError: the entry does not follow, its certificate or its body is invalid.
            UpdateError: the body does not decode.
        """
        async with self._lock:
            if entry.position < self.position:
                return False
            check_follows(
                entry,
                run_id=self.run_id,
                epoch=self.epoch,
                position=self.position,
                chain=self.chain,
            )
            check_certificate(entry, certificate, self.electorate, self._verify)
            await self._apply(entry, certificate, body, update_N, since)
        await self._notify()
        return True

    async def append_verified(self, entry: Entry, certificate: Certificate, body: bytes) -> bool:
        """``append`` for an entry that ``verify_headers`` has vouched for.

        Entries before the base of an epoch follow from its chain, not from their certificates.
        """
        async with self._lock:
            if entry.position != self.position or entry.previous_chain != self.chain:
                return False
            await self._apply(entry, certificate, body, None)
            opened = self.opened
            if opened is not None and self._at_base(opened):
                self.electorate = opened.electorate
        await self._notify()
        return True

    async def _apply(
        self,
        entry: Entry,
        certificate: Certificate,
        body: bytes,
        update_N: Update | None,
        since: float | None = None,
    ) -> None:
        loop, opened = asyncio.get_running_loop(), self.opened
        started = loop.time() if since is None else since
        if self.replay.by_factors and update_N is None and entry.kind == "update":
            self.replay.check(entry)
            update_N = await self._compute(self.replay.decode, entry, body)
        state = await self._compute(self.replay.next_state, self.state, entry, body, update_N)
        await self._write(
            lambda: self.store.append(
                epoch=entry.epoch,
                position=entry.position,
                chain=entry.chain,
                entry=entry.encode(),
                certificate=certificate.encode(),
                body=body,
                before_base=opened is not None and entry.position < opened.base_position,
            )
        )
        self._state, self.chain, self.electorate = state, entry.chain, entry.electorate
        if entry.state_root is not None:
            self._forget_before(entry.state_root.position)
        if state.position % self.snapshot_every == 0:
            await self._keep(state)
        applied = Applied(
            entry=entry,
            state=state,
            apply_s=loop.time() - started,
            update_F=update_N if self.replay.by_factors else None,
        )
        for listener in self.listeners:
            listener(applied)

    async def _write(self, function: Callable[..., Any], *arguments: object) -> None:
        try:
            await self._compute(function, *arguments)
        except (OSError, sqlite3.Error) as error:
            self._on_failure(error)
            raise

    async def _keep(self, state: OuterState) -> None:
        await self._write(self.store.save_snapshot, state, self.chain)
        self.snapshots[state.position] = state

    def lease(self, position: int) -> OuterState | None:
        """A snapshot for somebody who fetches it; it stays for a while after each request.

        One at a time, so that no more than one is kept beside those that are kept anyway: while it
        is fetched, others are given but not kept.
        """
        now, state = asyncio.get_running_loop().time(), self.snapshots.get(position)
        is_free = self._leased is None or self._leased[0] == position or self._leased[1] < now
        if state is not None and is_free:
            self._leased = position, now + LEASE_S
        return state

    def _forget_before(self, certified: int) -> None:
        """Drop snapshots older than the newest one with a certified root: joiners take that one."""
        now = asyncio.get_running_loop().time()
        leased = self._leased[0] if self._leased and self._leased[1] >= now else None
        for position in [p for p in self.snapshots if p < certified and p != leased]:
            del self.snapshots[position]

    async def install(
        self,
        state: OuterState,
        chain: bytes,
        electorate: Sequence[Elector],
        headers: Sequence[tuple[Entry, Certificate]] = (),
    ) -> None:
        """Put a verified state in place of whatever there is.

        Args:
            state: the state before entry ``state.position``.
            chain: the chain there.
            electorate: who votes there; nobody where no epoch has begun.
            headers: verified entries that end right before it, kept for later joiners.
        """
        async with self._lock:
            await self._compute(self._begin_store, state.position, chain, headers)
            self._state, self.chain = state, chain
            self.leaps += 1
            self.electorate = tuple(electorate)
            self.snapshots = {}
            if state.position % self.snapshot_every == 0:
                await self._keep(state)
        await self._notify()

    def _begin_store(
        self, position: int, chain: bytes, headers: Sequence[tuple[Entry, Certificate]]
    ) -> None:
        first = headers[0][0] if headers else None
        if self.store.head.position == position and self.store.head.chain == chain:
            return
        self.store.begin_at(
            position=first.position if first else position,
            chain=first.previous_chain if first else chain,
        )
        for entry, certificate in headers:
            self.store.append_header(
                epoch=entry.epoch,
                position=entry.position,
                entry=entry.encode(),
                certificate=certificate.encode(),
                body_bytes=entry.body_bytes,
                chain=entry.chain,
            )

    async def rewind(self) -> bool:
        """Go back to the base of the epoch where entries beyond it are void; whether that worked.

        It works where this peer's own log reaches the base with the chain that the epoch names.
        """
        opened = self.opened
        if opened is None or not self.ready or self.position <= opened.base_position:
            return False
        async with self._lock:
            base = opened.base_position
            before = self.store.get(base - 1)
            if before is not None and before.chain != opened.base_chain:
                return False
            await self._compute(self.store.rewind, base)
            done = await self._resume_newest() and self.position == base
            self.electorate = opened.electorate if done else ()
        await self._notify()
        return done

    async def resume(self) -> bool:
        """Take up the state that the store holds: its newest snapshot and the entries after it.

        False where the store holds no snapshot that can be read; then there is nothing to resume.
        """
        record = self.store.latest_epoch()
        if record is not None:
            self.opened = self.open_epoch(record)
            self.epoch, self.epoch_record = self.opened.epoch, record
        return await self._resume_newest()

    async def _resume_newest(self) -> bool:
        for position in reversed(self.store.snapshot_positions()):
            try:
                state = await self._compute(self.store.load_snapshot, position)
            except StoreError:
                continue
            await self._resume_from(state)
            return True
        return False

    async def _resume_from(self, state: OuterState) -> None:
        info = self.store.snapshot(state.position)
        self.snapshots = {state.position: state}
        self.chain = info.chain
        count = self.store.head.position - state.position
        for record in self.store.headers(state.position, count):
            if not record.has_body:
                break
            entry = Entry.decode(record.entry)
            body = await self._compute(self.store.body, record.position)
            state = await self._compute(self.replay.next_state, state, entry, body)
            self.chain = entry.chain
            if state.position % self.snapshot_every == 0:
                self.snapshots[state.position] = state
        self._state = state
        self.leaps += 1
        self.electorate = self._stored_electorate(state.position)

    def _stored_electorate(self, position: int) -> tuple[Elector, ...]:
        opened = self.opened
        if opened is not None and position == opened.base_position:
            return opened.electorate if self.chain == opened.base_chain else ()
        before = self.store.get(position - 1)
        return Entry.decode(before.entry).electorate if before is not None else ()

    def open_epoch(self, record: bytes) -> Epoch:
        """The epoch in a signed record.

        Raises:
            LogError: malformed, of another run, or not signed by the run's key.
        """
        epoch = SignedEpoch.decode(record).open(self._verify_run)
        if epoch.run_id != self.run_id:
            raise EpochInvalid("epoch record: expected this run, got another")
        return epoch

    async def adopt(self, record: bytes) -> bool:
        """Begin an epoch if it is newer; True where this replica stands at its base.

        A replica that stands elsewhere knows the epoch from now on and has to recover: entries
        beyond the base are void, entries before it are missing.  Until then it has no electorate,
        so it neither votes nor leads.
        """
        epoch = self.open_epoch(record)
        async with self._lock:
            if self.opened is not None and epoch.epoch <= self.opened.epoch:
                return True
            self.opened, self.epoch, self.epoch_record = epoch, epoch.epoch, record
            await self._compute(self.store.put_epoch, epoch.epoch, record)
            here = self.ready and self._at_base(epoch)
            self.electorate = epoch.electorate if here else ()
        await self._notify()
        return here

    def _at_base(self, epoch: Epoch) -> bool:
        return (self.position, self.chain) == (epoch.base_position, epoch.base_chain)

    def root_scheduled(self, position: int) -> int | None:
        """The position whose state root entry ``position`` has to carry."""
        due = position > 0 and position % self.snapshot_every == 0
        return position - self.snapshot_every if due else None

    def root_due(self, position: int) -> tuple[int, bytes] | None:
        """The state root that entry ``position`` carries; None also where it is not known here."""
        scheduled = self.root_scheduled(position)
        state = self.snapshots.get(scheduled) if scheduled is not None else None
        return (state.position, state.root()) if state is not None else None

    async def _notify(self) -> None:
        now = asyncio.get_running_loop().time()
        self.stood_s = now - self.moved_at if self.moved_at else 0.0
        self.moved_at = now
        async with self._moved:
            self._moved.notify_all()
