"""A replica in an event loop: peers and the coordinator follow their log through it.

Changes of the replica run in a pool of threads, one change at a time. What the loop reads
(`standing`) changes only between two of its steps, when a change is complete: so what a task reads
without awaiting is of one moment.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from atoll.optim.log.entry import Certificate, Claim, Elector, Entry, Epoch, LogPlace
from atoll.optim.log.replica import NotNext, Replica, ReplicaView
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
        self.standing = core.standing
        self.compute = compute
        self.is_installing = False
        """True while a snapshot is being put in place, which takes long with a large model."""
        self.moved_at = 0.0
        """when this replica came to stand where it stands, on the loop's clock"""
        self.stood_s = 0.0
        """how long it stood where it was before"""
        self.listeners: list[Callable[[Applied], None]] = []
        self._on_failure = on_failure
        self._lock = asyncio.Lock()
        self._moved = asyncio.Condition()
        self._changes: set[asyncio.Task[Any]] = set()

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
        """Wait for the end of the change under way; its caller may have been cancelled."""
        async with self._lock:
            pass

    async def close(self) -> None:
        """Finish the change under way, then close the store."""
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

        def work() -> Update | None:
            return self.core.accept(self.core.check(entry, certificate), body, update_F)

        try:
            await self._accept(entry, work, since)
        except NotNext:
            if entry.position < self.position:
                return False
            raise
        return True

    async def accept_claim(self, claim: Claim, body: Bytes, on_taken: OnTaken = _ignore) -> bool:
        """Apply and store the next entry; False if it is not the next one any more."""
        try:
            await self._accept(claim.entry, lambda: self.core.accept(claim, body), None, on_taken)
        except NotNext:
            return False
        return True

    async def _accept(
        self,
        entry: Entry,
        work: Callable[[], Update | None],
        since: float | None,
        on_taken: OnTaken = _ignore,
    ) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time() if since is None else since

        def report(update_F: Update | None) -> None:
            on_taken(entry.position)
            if not self.is_current:  # a ledger without the state
                return
            applied = Applied(
                entry=entry,
                state=self.state,
                apply_s=loop.time() - started,
                update_F=update_F if self.replay.by_factors else None,
            )
            for listener in self.listeners:
                listener(applied)

        await self.change(work, report)

    # Recovery

    async def install(
        self, state: OuterState, claims: Sequence[Claim] = (), on_taken: OnTaken = _ignore
    ) -> None:
        """Continue from a snapshot; see `Replica.install`."""

        def report(new: Sequence[Claim]) -> None:
            for claim in new:
                on_taken(claim.entry.position)

        self.is_installing = True
        try:
            await self.change(lambda: self.core.install(state, claims), report)
        finally:
            self.is_installing = False

    async def add_body(self, position: int, body: Bytes) -> None:
        """Put back the body of a stored entry; see `Replica.add_body`."""
        await self.compute(self.core.add_body, position, body)

    async def resume(self) -> bool:
        """Take up what is stored; see `Replica.resume`."""
        # No move: how long the run has stood here is not known to a process that begins.
        return await self.change(self.core.resume, is_move=False)

    async def rewind(self) -> bool:
        """Go back to the base of the epoch; see `Replica.rewind`."""
        return await self.change(self.core.rewind)

    def lease(self, position: int) -> OuterState | None:
        """Return a snapshot to somebody who fetches it; see `Replica.lease`."""
        return self.core.lease(position)

    # Epochs

    async def adopt(self, record: bytes) -> bool:
        """Begin an epoch if it is newer; see `Replica.adopt`."""
        return await self.change(lambda: self.core.adopt(record))

    async def open_epoch(
        self, electorate: Sequence[Elector], sign: Callable[[bytes], bytes]
    ) -> Epoch:
        """Sign and begin a new epoch at the head; see `Replica.open_epoch`."""
        return await self.change(lambda: self.core.open_epoch(electorate, sign))

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
        return await asyncio.shield(task)

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
        if is_move and self.standing is not before:
            await self._notify()
        return result

    async def _notify(self) -> None:
        now = asyncio.get_running_loop().time()
        self.stood_s = now - self.moved_at if self.moved_at else 0.0
        self.moved_at = now
        async with self._moved:
            self._moved.notify_all()
