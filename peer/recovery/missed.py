"""What the coordinator missed, fetched from the peers as a joiner does (`recovery`).

A replica in a folder of its own recovers from whoever is in the roster, beside the coordinator's
log; the coordinator takes from it what it lacks, checks all of it again, and the folder goes. So
whatever fails on the way, the coordinator's own log holds only what was verified.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from atoll.coordinator.catching_up import Found
from atoll.coordinator.follower import Claim, Follower, Missed
from atoll.coordinator.run.levels import LOGGING, Level
from atoll.dht.identity import Identity
from atoll.dht.roster import PeerRecord, Roster, RosterError
from atoll.dht.transport import Transport, TransportError
from atoll.optim.log.entry import Certificate, Elector, Entry, split_body
from atoll.optim.log.replica import Replica
from atoll.optim.log.store import LogStore, Record
from atoll.optim.state.outer_state import OuterState
from atoll.peer.recovery.recovery import Recovery, RecoveryError
from atoll.peer.recovery.sources import FETCH_ERRORS, PeerSource
from atoll.peer.rounds.context import Compute, Context, RoundSettings
from atoll.peer.rounds.messages import Head

CONNECT_S = 10.0
STALL_S = 5.0  # patience with a donor; nobody waits for the coordinator
PAGE = 64  # headers read from the disk at once

_log = logging.getLogger(__name__)


async def in_thread(function: Any, /, *args: Any) -> Any:  # noqa: ANN401
    """A Compute for a process that does little else."""
    return await asyncio.to_thread(function, *args)


class MissedLog:
    """A `FetchMissed` of `atoll.coordinator.catching_up`, over libp2p."""

    def __init__(
        self,
        *,
        identity: Identity,
        transport: Transport,
        roster: Roster,
        folder: Path,
        compute: Compute = in_thread,
    ) -> None:
        """`folder` is made while something is fetched, and removed."""
        self._identity = identity
        self._transport = transport
        self._roster = roster
        self._folder = folder
        self._compute = compute

    @asynccontextmanager
    async def __call__(self, follower: Follower) -> AsyncIterator[Found | None]:
        """What the peers have beyond the follower's head; None where they can publish it."""
        shutil.rmtree(self._folder, ignore_errors=True)
        store = self._open_store(follower)
        try:
            yield await self._fetch(follower, store)
        finally:
            store.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _fetch(self, follower: Follower, store: LogStore) -> Found | None:
        ctx = self._context(follower, store)
        donors = await self._donors(ctx, follower)
        if not donors or (follower.is_current and _can_publish(donors, follower.head.position)):
            return None
        await ctx.replica.adopt(follower.epoch_record)
        recovery = Recovery(
            ctx,
            run_id=follower.run_id,
            genesis=partial(self._genesis, follower),
            on_progress=lambda what, left: _log.info("%s, %d to go", what, left),
        )
        try:
            recovered = await recovery.run()
        except RecoveryError as error:
            _log.warning("cannot catch up yet: %s", error)
            return None
        if recovered is None:
            return None
        await self._fill(ctx, store, donors, follower.head.position)
        found: Found | None = await self._compute(_found, store, follower, recovered.donors)
        return found

    def _open_store(self, follower: Follower) -> LogStore:
        return LogStore(
            self._folder,
            run_id=follower.run_id,
            genesis_chain=follower.store.snapshot(0).chain,
            keep_snapshots=3,
        )

    def _context(self, follower: Follower, store: LogStore) -> Context:
        replica = Replica(
            run_id=follower.run_id,
            replay=follower.replay,
            store=store,
            verify=follower.verify,
            verify_run=follower.run_key.verify,
            snapshot_every=follower.snapshot_every,
            compute=self._compute,
        )
        return Context(
            me=Elector(peer_id=self._identity.peer_id, incarnation="0"),
            sign=self._identity.sign,
            verify=follower.verify,
            transport=self._transport,
            roster=self._roster,
            replica=replica,
            replay=follower.replay,
            scalars=lambda position: (0.0, 0.0),  # of proposals, which a follower never makes
            settings=RoundSettings(stall_s=STALL_S, grace_s=STALL_S),
            compute=self._compute,
            on_event=_note,
        )

    async def _genesis(self, follower: Follower) -> OuterState:
        state: OuterState = await self._compute(follower.store.load_snapshot, 0)
        return state

    async def _donors(self, ctx: Context, follower: Follower) -> dict[str, Head]:
        """Peers that are ahead of the follower in its epoch, and where they stand."""
        try:
            records = await self._roster.peers()
        except (RosterError, TransportError, TimeoutError, OSError) as error:
            _log.info("the roster cannot be read: %s", error)
            return {}
        heads = await asyncio.gather(*(self._head(ctx, each) for each in records.values()))
        known = zip(records, heads, strict=True)
        at = follower.state.position
        return {
            peer: head
            for peer, head in known
            if head is not None and head.epoch == follower.head.epoch and head.position > at
        }

    async def _head(self, ctx: Context, record: PeerRecord) -> Head | None:
        with suppress(*FETCH_ERRORS, TimeoutError, ValueError):
            await self._transport.connect(record.peer_id, record.addresses, timeout_s=CONNECT_S)
            return await PeerSource(ctx, record.peer_id).head()
        return None

    async def _fill(
        self, ctx: Context, store: LogStore, donors: dict[str, Head], start: int
    ) -> None:
        """Fetch the bodies before the snapshot that somebody still has."""
        missing = [p for gap in store.gaps() for p in range(max(start, gap[0]), gap[1])]
        for position in reversed(missing):
            for peer in (p for p, head in donors.items() if head.first_body <= position):
                if await self._fill_one(ctx, store, peer, position):
                    break
            else:
                return

    async def _fill_one(self, ctx: Context, store: LogStore, peer: str, position: int) -> bool:
        record = store.get(position)
        if record is None:
            return False
        with suppress(*FETCH_ERRORS):
            body = await PeerSource(ctx, peer).body(position, record.body_bytes)
            await self._compute(split_body, Entry.decode(record.entry), body)
            await self._compute(store.add_body, position, body)
            return True
        return False


def _can_publish(donors: dict[str, Head], position: int) -> bool:
    return any(head.first_body <= position < head.position for head in donors.values())


def _found(store: LogStore, follower: Follower, donors: Sequence[str]) -> Found | None:
    """The newest snapshot with a certified root, and the entries from the follower's head on."""
    for position in reversed(store.snapshot_positions()):
        certifying = store.get(position + follower.snapshot_every)
        if certifying is None or Entry.decode(certifying.entry).state_root is None:
            continue
        return Found(
            state=store.load_snapshot(position),
            missed=[_missed(store, record) for record in _records(store, follower.head.position)],
            donors=tuple(donors),
        )
    return None


def _records(store: LogStore, position: int) -> list[Record]:
    records: list[Record] = []
    while more := store.headers(position + len(records), PAGE):
        records += more
    return records


def _missed(store: LogStore, record: Record) -> Missed:
    claim = Claim(
        entry=Entry.decode(record.entry), certificate=Certificate.decode(record.certificate)
    )
    read = partial(store.body, record.position) if record.has_body else lambda: None
    return Missed(claim=claim, body=read)


def _note(level: Level, text: str, *, key: object = None) -> None:
    _log.log(LOGGING[level], text)
