"""A replica in an event loop: peers and the coordinator follow their log through a `LiveReplica`.

Changes run in a pool of threads, one at a time. What the loop reads (`standing`) changes only
between two of its steps, when a change is complete: so what a task reads without awaiting is of one
moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from atoll.optim.log.claims import Claim, LogPlace
from atoll.optim.log.entry import Certificate, Elector, Entry, Epoch, SignedRoot
from atoll.optim.log.orders import (
    Order,
)
from atoll.optim.log.replica import Replica
from atoll.optim.log.standing import NotNext, ReplicaView, Written
from atoll.optim.log.stored_snapshots import SnapshotFile
from atoll.optim.reduction.cells import Bytes
from atoll.optim.state.outer_state import OuterState
from atoll.optim.state.updates import Update

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
