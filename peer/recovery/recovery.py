"""Catching up: snapshot + log, as in a database, while the run goes on.

A peer that is behind takes the cheaper way: the entries it missed where a donor still has their
bodies, else the newest snapshot whose root the log certifies, and the entries after it.

Trust starts at the epoch record, which the run's key signed: it names a position, the chain there,
and who votes there.  From that base on each entry carries a certificate of the electorate that the
entry before it names; before the base, entries are good when their chain ends in the base's.  So no
donor is trusted with anything but its time, and each may be asked for a different piece.

Errors::

    RecoveryError (RuntimeError)
     +-- NoDonor     nobody who could be reached has what is missing; try again later
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from atoll.optim.log.entry import (
    Certificate,
    ChainMismatch,
    Elector,
    Entry,
    Epoch,
    LogError,
    Verify,
    check_certificate,
    check_follows,
)
from atoll.optim.state.outer_state import Assembly, OuterState, StateError
from atoll.peer.recovery.bodies import Bodies
from atoll.peer.recovery.sources import FETCH_ERRORS, Donor, PeerSource, Source, whom_to_ask
from atoll.peer.rounds.context import Context
from atoll.peer.rounds.messages import Decided, Head

LEAVES_A_REQUEST = 8  # 8 MiB: 0.7 s at 100 Mbit/s, so a lost donor costs little
KEEP_WORK = 4  # entries a fragment, replayed whatever they weigh: a snapshot would cost open work
SLOW_STALLS = 0.5  # how long the next answer may take after one has come
MAX_PASSES = 64  # of catching up with a head that moves on meanwhile


class RecoveryError(RuntimeError):
    """This peer cannot catch up now."""


class NoDonor(RecoveryError):  # noqa: N818
    """Nobody who could be reached has what is missing."""


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """What it took."""

    from_position: int
    to_position: int
    snapshot_position: int | None
    entries: int
    donors: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Header:
    """An entry of which everything but the body is verified."""

    entry: Entry
    certificate: Certificate


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the log stands before an entry: the chain, and who votes."""

    chain: bytes
    electorate: tuple[Elector, ...]


class Recovery:
    """Brings a replica to the head of the log."""

    def __init__(
        self,
        ctx: Context,
        *,
        run_id: bytes,
        genesis: Callable[[], Awaitable[OuterState]],
        on_progress: Callable[[str, int], None],
        fallback: Source | None = None,
    ) -> None:
        """Recover from the peers of the roster.

        Args:
            ctx: of the peer; its replica is brought to the head.
            run_id: of the run.
            genesis: gives the verified first state, from which anyone may replay everything.
            on_progress: told what is fetched ("replay", "snapshot") and how much is left.
            fallback: asked last, as the coordinator is, which has better things to do.
        """
        self._ctx = ctx
        self._run_id = run_id
        self._genesis = genesis
        self._on_progress = on_progress
        self._fallback = fallback
        self._turn = 0

    async def run(self) -> Recovered | None:
        """Catch up with the furthest donor; None where nothing was missing.

        Raises:
            NoDonor: nobody has what is missing.
        """
        replica = self._ctx.replica
        started, before = self._ctx.now(), replica.position
        donors: set[str] = set()
        snapshot: int | None = None
        if not self._on_the_log() and await replica.rewind():
            self._on_event_rewound(before)
        for _ in range(MAX_PASSES):
            ahead = await self._donors_ahead()
            if not ahead:
                break
            snapshot = await self._pass(ahead, donors, snapshot)
        else:
            raise NoDonor("the log moves on faster than this peer can follow")
        if not donors and snapshot is None:
            return None  # what moved came as a commit
        return Recovered(
            from_position=before,
            to_position=replica.position,
            snapshot_position=snapshot,
            entries=replica.position - (before if snapshot is None else snapshot),
            donors=tuple(sorted(donors)),
            seconds=self._ctx.now() - started,
        )

    def _on_event_rewound(self, before: int) -> None:
        replica = self._ctx.replica
        self._ctx.on_event(
            "warning",
            f"epoch {replica.epoch} begins at position {replica.position}: "
            f"{before - replica.position} entries beyond it are void",
        )

    async def _pass(
        self, ahead: Sequence[Donor], used: set[str], snapshot: int | None
    ) -> int | None:
        """One step forward with the first donor whose word holds; the snapshot it took, if any."""
        for first in range(len(ahead)):
            donors = [*ahead[first:], *ahead[:first]]
            try:
                if await self._replay(donors, used, restored=snapshot is not None):
                    return snapshot
                return await self._restore(donors, used)
            except FETCH_ERRORS as error:
                self._ctx.on_event("warning", f"recovery from {donors[0].name}: {error}")
        raise NoDonor(f"none of {len(ahead)} donors gave entries that hold")

    # donors

    async def _donors_ahead(self) -> list[Donor]:
        """Who is at this replica's epoch and has entries that it lacks, the furthest first."""
        records = await self._ctx.roster_peers()
        self._turn += 1
        for some in whom_to_ask(records, me=self._ctx.me.peer_id, turn=self._turn):
            donors = await self._ask_all([PeerSource(self._ctx, peer) for peer in some])
            ahead = self._ahead(donors)
            if ahead or (donors and self._on_the_log()):
                break
        else:
            ahead = []
        if not ahead and self._fallback is not None:
            ahead = self._ahead(await self._ask_all([self._fallback]))
        return ahead

    async def _ask_all(self, sources: Sequence[Source]) -> list[Donor]:
        """Those who answer; a frozen peer is not waited for once another has answered."""
        asking = {asyncio.create_task(self._ask(source)): source for source in sources}
        pending = set(asking)
        timeout_s: float | None = None
        while pending:
            done, pending = await asyncio.wait(
                pending, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                break
            if any(task.result() is not None for task in done):
                timeout_s = SLOW_STALLS * self._ctx.settings.stall_s
        await _cancel(pending)
        heads = {asking[task]: task.result() for task in asking if task not in pending}
        donors = [Donor(source=s, head=head) for s, head in heads.items() if head is not None]
        for donor in donors:
            await self._learn_epoch(donor.head)
        return donors

    def _ahead(self, donors: Sequence[Donor]) -> list[Donor]:
        replica = self._ctx.replica
        if replica.opened is None:
            return []
        lost = not self._on_the_log()
        ahead = [
            d
            for d in donors
            if d.head.epoch == replica.epoch and (d.head.position > replica.position or lost)
        ]
        return sorted(ahead, key=lambda d: (-d.head.position, d.name))

    async def _ask(self, source: Source) -> Head | None:
        with suppress(*FETCH_ERRORS):
            return await source.head()
        return None

    async def _learn_epoch(self, head: Head) -> None:
        replica = self._ctx.replica
        if head.epoch > replica.epoch or (head.epoch_record and replica.opened is None):
            with suppress(LogError):
                await replica.adopt(head.epoch_record)

    def _on_the_log(self) -> bool:
        """Whether the replica's entries are those of its epoch (none of them void)."""
        return bool(self._ctx.replica.electorate)

    # the log alone

    async def _replay(
        self, donors: Sequence[Donor], used: set[str], *, restored: bool = False
    ) -> bool:
        """Fetch and apply the missing entries; False where only a snapshot helps.

        After a snapshot that was ``restored`` just now there is no other way: it was the newest
        that could be had.  It may lie before the base of the epoch, where nobody votes.
        """
        replica = self._ctx.replica
        if not replica.ready or not (restored or self._on_the_log()):
            return False
        start, furthest = replica.position, donors[0]
        sources = [d for d in donors if d.head.first_body <= start]
        if not sources or not (restored or self._replay_is_cheaper(furthest.head)):
            return False
        here = Place(chain=replica.chain, electorate=replica.electorate)
        headers = await self._headers(furthest, start, here)
        async with Bodies([h.entry for h in headers], sources, self._on_failure) as bodies:
            for header in headers:
                await self._apply(header, bodies, used)
        return bool(headers)

    def _on_failure(self, entry: Entry, donor: Donor, error: Exception) -> None:
        text = f"entry {entry.position} of {donor.name}: {error}"
        self._ctx.on_event("warning", text)

    def _replay_is_cheaper(self, head: Head) -> bool:
        """Whether the missing entries are few, or fewer bytes than the newest snapshot's way."""
        replica = self._ctx.replica
        body_bytes = self._body_bytes()
        missing = head.position - replica.position
        if missing <= KEEP_WORK * len(replica.replay.fragments):
            return True
        newest = max(head.snapshots, default=0)
        by_snapshot = replica.state.snapshot_bytes + (head.position - newest) * body_bytes
        return newest <= replica.position or missing * body_bytes <= by_snapshot

    def _body_bytes(self) -> int:
        """About what the body of an entry takes: the last one's length, else the longest."""
        replica = self._ctx.replica
        last = replica.store.get(replica.position - 1)
        if last is not None and last.body_bytes:
            return last.body_bytes
        return replica.replay.cells_at(replica.position).max_body_bytes(len(replica.electorate))

    async def _headers(self, donor: Donor, start: int, here: Place | None) -> list[Header]:
        fetched: list[Decided] = []
        while start + len(fetched) < donor.head.position:
            more = await donor.source.headers(start + len(fetched), donor.head.position)
            if not more:
                break
            fetched += more
        opened = self._ctx.replica.opened
        if opened is None:
            raise NoDonor("expected an epoch record of the run, nobody has sent one")
        return verify_headers(
            fetched, run_id=self._run_id, here=here, opened=opened, verify=self._ctx.verify
        )

    async def _apply(self, header: Header, bodies: Bodies, used: set[str]) -> None:
        entry = header.entry
        replica = self._ctx.replica
        if replica.position > entry.position:
            return
        async for donor, body in bodies.of(entry):
            try:
                if not await replica.append_verified(entry, header.certificate, body):
                    return
            except FETCH_ERRORS as error:
                self._on_failure(entry, donor, error)
                continue
            used.add(donor.name)
            self._on_progress("replay", donor.head.position - entry.position - 1)
            return
        raise NoDonor(f"nobody gave the body of entry {entry.position}")

    # a snapshot, then the log

    async def _restore(self, donors: Sequence[Donor], used: set[str]) -> int:
        """Install the newest certified snapshot; its position."""
        furthest = donors[0]
        opened = self._ctx.replica.opened
        if opened is None:
            raise NoDonor("expected an epoch record of the run, nobody has sent one")
        offered = {p for d in donors for p in d.head.snapshots}
        oldest = min(offered, default=0)
        headers = await self._headers(furthest, min(oldest, opened.base_position), None)
        for position in sorted(offered, reverse=True):
            root = certified_root(headers, position)
            if root is None:
                continue
            holders = [d.source for d in donors if position in d.head.snapshots]
            with suppress(NoDonor):
                state = await self._fetch_snapshot(position, root, holders, used)
                await self._install(state, headers, opened)
                return position
        if any(d.head.first_body == 0 for d in donors):
            return await self._restore_genesis(await self._headers(furthest, 0, None), opened)
        raise NoDonor("nobody has a snapshot with a certified root, or the log from its start")

    async def _restore_genesis(self, headers: Sequence[Header], opened: Epoch) -> int:
        await self._install(await self._genesis(), headers, opened)
        return 0

    async def _install(self, state: OuterState, headers: Sequence[Header], opened: Epoch) -> None:
        there = place(headers, state.position, opened)
        before = [(h.entry, h.certificate) for h in headers if h.entry.position < state.position]
        await self._ctx.replica.install(state, there.chain, there.electorate, before)

    async def _fetch_snapshot(
        self, position: int, root: bytes, holders: Sequence[Source], used: set[str]
    ) -> OuterState:
        assembly = await self._assembly(position, root, holders)
        queue = _ranges(sorted(assembly.missing))
        await asyncio.gather(
            *(self._drain(source, position, assembly, queue, used) for source in holders)
        )
        if assembly.missing:
            raise NoDonor(f"{len(assembly.missing)} leaves of snapshot {position} are missing")
        try:
            return assembly.finish()
        except StateError as error:
            raise NoDonor(f"snapshot {position}: {error}") from error

    async def _assembly(self, position: int, root: bytes, holders: Sequence[Source]) -> Assembly:
        for source in holders:
            with suppress(*FETCH_ERRORS):
                digests = await source.leaf_digests(position)
                replay = self._ctx.replay
                return Assembly(
                    layout=replay.layout,
                    position=position,
                    leaf_digests=digests,
                    root=root,
                    memory_numel=replay.memory_numel,
                )
        raise NoDonor(f"nobody gave the digests of snapshot {position}")

    async def _drain(
        self,
        source: Source,
        position: int,
        assembly: Assembly,
        queue: list[list[int]],
        used: set[str],
    ) -> None:
        """Take ranges of leaves from one donor until none is left or the donor fails."""
        while queue:
            indices = queue.pop()
            try:
                async for index, leaf in source.leaves(position, indices):
                    await self._ctx.compute(assembly.add, index, leaf)
                    used.add(source.name)
                    self._on_progress("snapshot", len(assembly.missing))
            except FETCH_ERRORS as error:
                queue.append([i for i in indices if i in assembly.missing])
                self._ctx.on_event("warning", f"snapshot {position} of {source.name}: {error}")
                return


def verify_headers(
    headers: Sequence[Decided],
    *,
    run_id: bytes,
    here: Place | None,
    opened: Epoch,
    verify: Verify,
) -> list[Header]:
    """Entries that are the log's, in order.

    Args:
        headers: consecutive entries as a donor sent them.
        run_id: of the run.
        here: the place before the first of them, None where it is not known: then they must
            reach the epoch's base, whose chain proves them.
        opened: the current epoch.
        verify: checks a peer's signature.

    Raises:
        LogError: one of them is not the log's.
    """
    verified: list[Header] = []
    for decided in headers:
        entry = Entry.decode(decided.entry)
        certificate = Certificate.decode(decided.certificate)
        if entry.position == opened.base_position:
            _expect_base_chain(here, opened)
            here = Place(chain=opened.base_chain, electorate=opened.electorate)
        if here is None:
            here = Place(chain=entry.previous_chain, electorate=())
        certified = entry.position >= opened.base_position
        check_follows(
            entry,
            run_id=run_id,
            epoch=opened.epoch if certified else entry.epoch,
            position=verified[-1].entry.position + 1 if verified else entry.position,
            chain=here.chain,
        )
        if certified:
            check_certificate(entry, certificate, here.electorate, verify)
        here = Place(chain=entry.chain, electorate=entry.electorate)
        verified.append(Header(entry=entry, certificate=certificate))
    _check_reaches_base(verified, opened)
    return verified


def _expect_base_chain(here: Place | None, opened: Epoch) -> None:
    """Entries before a base are good only when their chain ends in the base's."""
    if here is not None and here.chain != opened.base_chain:
        raise ChainMismatch(
            f"expected the chain {opened.base_chain.hex()[:12]} at the base "
            f"{opened.base_position} of epoch {opened.epoch}, got {here.chain.hex()[:12]}"
        )


def _check_reaches_base(verified: Sequence[Header], opened: Epoch) -> None:
    if not verified or verified[-1].entry.position + 1 > opened.base_position:
        return
    last = verified[-1].entry
    if last.position + 1 < opened.base_position or last.chain != opened.base_chain:
        raise ChainMismatch(
            f"expected entries up to the base {opened.base_position} of epoch {opened.epoch}, "
            f"got them up to {last.position} with another chain"
        )


def certified_root(headers: Sequence[Header], position: int) -> bytes | None:
    """The root of the state at ``position``, if an entry carries it."""
    for header in headers:
        root = header.entry.state_root
        if root is not None and root.position == position:
            return root.root
    return None


def place(headers: Sequence[Header], position: int, opened: Epoch) -> Place:
    """The place before the entry at ``position``."""
    if position == opened.base_position:
        return Place(chain=opened.base_chain, electorate=opened.electorate)
    for header in headers:
        if header.entry.position + 1 == position:
            return Place(chain=header.entry.chain, electorate=header.entry.electorate)
        if header.entry.position == position:
            return Place(chain=header.entry.previous_chain, electorate=())
    raise NoDonor(f"expected the entry before snapshot {position}, nobody gave it")


def _ranges(indices: Sequence[int]) -> list[list[int]]:
    """Runs of consecutive leaves; the last comes first off the list."""
    step = LEAVES_A_REQUEST
    return [list(indices[i : i + step]) for i in range(0, len(indices), step)][::-1]


async def _cancel(tasks: set[asyncio.Task[Head | None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
