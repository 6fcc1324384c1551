"""Recovery: a replica catches up by snapshot and log, as in a database, while the run continues.

A replica that is behind takes the cheaper way: the entries it missed, if a donor still has their
bodies; otherwise the newest snapshot whose root the log certifies, or the run's key until an entry
does, and the entries after it. No donor is trusted with anything but its time
(`atoll.optim.log.entry`), so each may be asked for a different piece.

Peers and the coordinator recover in the same way. The coordinator's log is a ledger: it takes the
entries before a snapshot too, with the bodies that somebody still has, and leaves to the peers what
they publish to it anyway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass

from atoll.coordinator.run.notice import Report
from atoll.dht.tasks import Tasks, together
from atoll.optim.log.claims import Claim, LogPlace, place_after, place_at_base
from atoll.optim.log.entry import ChainMismatch, Entry, LogError, MalformedRecord, SignedRoot
from atoll.optim.log.live_replica import LiveReplica, OnTaken, Recovered
from atoll.optim.state import vectors
from atoll.optim.state.outer_state import OuterState
from atoll.peer import notices
from atoll.peer.recovery.bodies import Bodies
from atoll.peer.recovery.errors import NoDonor, NoWay, OffTheLog
from atoll.peer.recovery.leaves import Leaves
from atoll.peer.recovery.paces import Paces
from atoll.peer.recovery.sources import FETCH_ERRORS, Donor, LastSource, Source, Sources
from atoll.peer.rounds.fetching import MAX_SPAN
from atoll.peer.rounds.messages import Head

KEEP_WORK = 4  # entries a fragment, replayed whatever they weigh: a snapshot would cost open work
SLOW_STALLS = 0.5  # for the next answer after one has come: a frozen peer answers nobody
PASSES_GIVING_WAY = 4  # the snapshot's and three: beside quick rounds there is no time to ask
MAX_PASSES = 64  # of catching up with a head that moves on meanwhile; the next try resumes
FIRST_REST_STALLS = 2.0  # a donor that failed is not asked again for so long, then twice as long
MAX_REST_STALLS = 400.0  # ten minutes: it may have been a network that is mended now
VOUCHED = 2  # newest snapshots that the coordinator is asked about: it may lack the last one yet
MAX_RESTING = 4096  # donors, as many as a run may have; the first to fail are forgotten first


class Recovery:
    """Brings a replica to the head of the log."""

    def __init__(
        self,
        replica: LiveReplica,
        sources: Sources,
        *,
        genesis: Callable[[], Awaitable[OuterState]],
        stall_s: float,
        on_event: Report,
        on_progress: Callable[[str, int], None],
        on_taken: OnTaken = lambda position: None,
        fallback: LastSource | None = None,
        stream: Callable[[], AbstractAsyncContextManager[object]] = nullcontext,
    ) -> None:
        """Recover from others that follow the same log.

        Args:
            replica: what is brought to the head.
            sources: lists those who may have what is missing, some at a time.
            genesis: gives the verified first state, from which anyone may replay everything.
            stall_s: patience with a donor.
            on_event: called with what people should know.
            on_progress: called with what is fetched ("replay", "snapshot") and how much is left.
            on_taken: called with the position of each entry that is new in the log here.
            fallback: the coordinator, which proves what peers offer, and is in no round: it gives a
                part of what a newcomer needs, and else is asked last.
            stream: waits until the own link has time for one piece of a body more.
        """
        self._replica = replica
        self._sources = sources
        self._genesis = genesis
        self._stall_s = stall_s
        self._on_event = on_event
        self._on_progress = on_progress
        self._on_taken = on_taken
        self._fallback = fallback
        self._stream = stream
        self._leaves = Leaves(replica, on_event=on_event, on_progress=on_progress)
        self._told_disproved = ""
        self._paces = Paces()
        self._resting: dict[str, _Rest] = {}
        """donors that failed, by name"""
        self._answered: list[Donor] = []
        """The peers that answered last."""
        self._passes = 0
        """of catching up with the head of donors, in the run that is under way"""

    async def run(self) -> Recovered | None:
        """Catch up with the furthest donor; None if nothing was missing.

        Raises:
            NoDonor: nobody has what is missing.
        """
        replica, loop = self._replica, asyncio.get_running_loop()
        started, before = loop.time(), replica.position
        used: set[str] = set()
        snapshot: int | None = None
        ahead: list[Donor] = []
        if not (self._on_the_log() or replica.is_disproved) and await replica.rewind():
            self._report_rewound(before)
        self._passes = 0
        while now_ahead := await self._donors_ahead():
            if snapshot is None and self._is_published(now_ahead):
                break
            if self._passes >= MAX_PASSES:
                raise NoDonor("the log moves on faster than this replica can follow")
            self._passes += 1
            ahead = now_ahead
            snapshot = await self._pass_by_all(ahead, used, snapshot)
        await self._fill_certificates(self._answered)
        if replica.is_ledger:
            await self._fill_gaps(ahead if used or snapshot is not None else self._answered)
        if not used and snapshot is None:
            return None  # what moved came as a commit
        # Bodies and leaves have left gaps, and a trainer that begins takes as much again.
        await replica.compute(vectors.trim, replica.layout.numel)
        return Recovered(
            from_position=before,
            to_position=replica.position,
            snapshot_position=snapshot,
            entries=replica.position - (before if snapshot is None else snapshot),
            donors=tuple(sorted(used)),
            seconds=loop.time() - started,
        )

    def _report_rewound(self, before: int) -> None:
        replica = self._replica
        rewound = notices.rewound(
            epoch=replica.epoch, position=replica.position, entries=before - replica.position
        )
        self._on_event("warning", rewound)

    def _report_disproved(self) -> None:
        if self._replica.is_disproved and self._told_disproved != self._replica.diverged:
            self._told_disproved = self._replica.diverged
            self._on_event("error", notices.state_disproved(reason=self._told_disproved))

    @property
    def _is_published_to(self) -> bool:
        """Return whether this is the coordinator's log, to which peers publish."""
        return self._replica.is_ledger and not self._replica.follows

    def _is_published(self, ahead: Sequence[Donor]) -> bool:
        """Return whether peers publish to this ledger what it lacks, each entry with its body."""
        replica = self._replica
        if not self._is_published_to or not (replica.is_current or replica.diverged):
            return False
        if self._is_before_base():  # peers publish the entries of their own epoch alone
            return False
        return any(d.head.first_body <= replica.position < d.head.position for d in ahead)

    async def _pass_by_all(
        self, ahead: Sequence[Donor], used: set[str], snapshot: int | None
    ) -> int | None:
        """Go one step forward as `_pass` does, with the fallback too if peers cannot help."""
        try:
            return await self._pass(ahead, used, snapshot)
        except NoDonor:
            asked = self._fallback is not None and ahead[0].source is not self._fallback
            last = await self._ask_last() if asked else []
            if not last:
                raise
        return await self._pass([*last, *ahead], used, snapshot)

    async def _pass(
        self, ahead: Sequence[Donor], used: set[str], snapshot: int | None
    ) -> int | None:
        """Go one step forward with the first donor whose word holds.

        Returns:
            The position of the snapshot that was taken, now or before, if any.
        """
        for first in range(len(ahead)):
            # Headers come from the first alone, bodies and leaves from all.
            donors = [*ahead[first:], *ahead[:first]]
            try:
                if await self._replay(donors, used, restored=snapshot is not None):
                    return snapshot
                return await self._restore(donors, used)
            except FETCH_ERRORS as error:
                self._let_rest(donors[0])
                failed = notices.donor_failed(donor=donors[0].name, reason=str(error))
                self._on_event("warning", failed)
        raise NoDonor(f"no valid entries from {len(ahead)} donors")

    # donors

    async def _donors_ahead(self) -> list[Donor]:
        """Return those at this replica's epoch that have what it lacks, the furthest first."""
        return await self._peers_ahead() or await self._ask_last()

    async def _peers_ahead(self, beyond: int = 0) -> list[Donor]:
        """Return the peers that are ahead, and `beyond` a position that will be reached soon."""
        for some in await self._sources():
            donors = await self._ask_all(some)
            ahead = self._ahead(donors, beyond)
            # Answers without anything new end the search, unless this replica cannot stay here.
            if ahead or (donors and not self._is_lost()):
                return ahead
        return []

    async def _helpers(self, donors: Sequence[Donor]) -> list[Donor]:
        """Return the fallback, which is in no round, if it answers and is no donor already."""
        fallback = self._fallback
        if fallback is None or any(donor.source is fallback for donor in donors):
            return []
        with suppress(TimeoutError):
            async with asyncio.timeout(SLOW_STALLS * self._stall_s):
                head = await self._ask(fallback)
                return [Donor(source=fallback, head=head)] if head is not None else []
        return []

    async def _ask_last(self) -> list[Donor]:
        """Return the fallback if it has what this replica lacks."""
        if self._fallback is None:
            return []
        return self._ahead(await self._ask_all([self._fallback]))

    async def _ask_all(self, sources: Sequence[Source]) -> list[Donor]:
        """Return those who answer; once one has, a frozen one is not waited for much longer."""
        timeout_s: float | None = None
        async with Tasks() as tasks:  # it reports a failure beside the first one, which is raised
            asking = {tasks.spawn(self._ask(source)): source for source in sources}
            pending = set(asking)
            while pending:
                done, pending = await asyncio.wait(
                    pending, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    break
                if any(task.result() is not None for task in done):
                    timeout_s = SLOW_STALLS * self._stall_s
        heads = {asking[task]: task.result() for task in asking if task not in pending}
        donors = [Donor(source=s, head=head) for s, head in heads.items() if head is not None]
        for donor in donors:
            await self._learn_epoch(donor.head)
        self._answered = donors
        return donors

    def _ahead(self, donors: Sequence[Donor], beyond: int = 0) -> list[Donor]:
        replica = self._replica
        if replica.opened is None:
            return []
        is_lost, now = self._is_lost(), asyncio.get_running_loop().time()
        position = max(replica.position, beyond)  # commits have come meanwhile
        ahead = [
            d
            for d in donors
            if d.head.epoch == replica.epoch and (d.head.position > position or is_lost)
        ]
        resting = {name for name, rest in self._resting.items() if now < rest.until}
        rested = [d for d in ahead if d.name not in resting]
        # A claim costs nothing: one that no second donor confirms gives nobody the first place.
        confirmed = sorted((d.head.position for d in ahead), reverse=True)[:2][-1:]
        return sorted(
            rested or (ahead if is_lost else []),
            key=lambda d: (-min([d.head.position, *confirmed]), d.name),
        )

    def _let_rest(self, donor: Donor) -> None:
        """Ask others first for a while: this one lied, or was too slow."""
        before = self._resting.pop(donor.name, None)
        stalls = FIRST_REST_STALLS if before is None else min(2 * before.stalls, MAX_REST_STALLS)
        until = asyncio.get_running_loop().time() + stalls * self._stall_s
        self._resting[donor.name] = _Rest(stalls=stalls, until=until)
        if len(self._resting) > MAX_RESTING:
            del self._resting[next(iter(self._resting))]

    async def _ask(self, source: Source) -> Head | None:
        with suppress(*FETCH_ERRORS):
            return await source.head()
        return None

    async def _learn_epoch(self, head: Head) -> None:
        replica = self._replica
        if self._is_published_to:
            return  # the coordinator opens the epochs: another's would void what it has
        if head.epoch > replica.epoch or (head.epoch_record and replica.opened is None):
            with suppress(LogError):  # not signed by the run's key: the head may still be right
                await replica.adopt(head.epoch_record)

    def _on_the_log(self) -> bool:
        """Return whether the replica's entries are those of its epoch (none of them void)."""
        return bool(self._replica.electorate)

    def _is_before_base(self) -> bool:
        """Return whether the state here is current and before the base of the epoch."""
        replica, opened = self._replica, self._replica.opened
        return (
            opened is not None and replica.is_current and (replica.position < opened.base_position)
        )

    def _is_lost(self) -> bool:
        """Return whether entries alone do not help: they are void, or the state is missing."""
        replica = self._replica
        lacks_state = replica.is_ledger and not replica.is_current and not replica.diverged
        return lacks_state or not self._on_the_log()

    # the log alone

    async def _replay(
        self, donors: Sequence[Donor], used: set[str], *, restored: bool = False
    ) -> bool:
        """Fetch and apply the missing entries; False if only a snapshot helps.

        After a snapshot that was `restored` just now there is no other way: it was the newest that
        could be had. It may lie before the base of the epoch, where nobody votes.
        """
        replica = self._replica
        # Who was away while an epoch opened stands before its base, where nobody votes; its chain
        # proves the entries up to there.
        may_replay = restored or not self._is_lost() or self._is_before_base()
        if not replica.ready or replica.is_disproved or not may_replay:
            return False
        start, furthest = replica.position, donors[0]
        is_kept = any(d.head.first_body <= start for d in donors)
        if not is_kept or not (restored or self._replay_is_cheaper(furthest.head)):
            return False
        here = LogPlace(chain=replica.chain, electorate=replica.electorate)
        try:
            claims = await self._claims(furthest, start, here)
        except OffTheLog:
            if replica.is_ledger:
                raise
            return False
        missing = _Missing.of(claims, furthest)
        async with self._bodies() as bodies:
            await self._add(bodies, claims, donors, is_new=restored)
            await self._apply_all(missing, bodies, used, is_new=restored)
        return bool(claims)

    def _bodies(self) -> Bodies:
        return Bodies(
            compute=self._replica.compute,
            on_failure=self._on_failure,
            paces=self._paces,
            stream=self._stream,
        )

    async def _add(
        self, bodies: Bodies, claims: Sequence[Claim], donors: Sequence[Donor], *, is_new: bool
    ) -> None:
        """Begin to fetch the bodies of entries; a newcomer gives way to the rounds of donors.

        A peer that is behind does not, and a newcomer only for some passes: the next contribution
        depends on them, and where rounds follow each other quickly it would never draw level.
        """
        gives_way = is_new and self._passes <= PASSES_GIVING_WAY
        if gives_way:
            donors = [*donors, *await self._helpers(donors)]
        bodies.add([claim.entry for claim in claims], donors, gives_way=gives_way)

    async def _apply_all(
        self,
        missing: _Missing,
        bodies: Bodies,
        used: set[str],
        *,
        is_new: bool,
        install: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Apply entries, after a state, and those that donors have once all bodies are here.

        Else the link would be idle while a state is installed and the last bodies are applied.
        """
        async with Tasks() as tasks:
            while True:
                newer = tasks.spawn(self._newer(missing, bodies, is_new=is_new))
                if install is not None:
                    await install()
                    install = None
                for claim in missing.claims:
                    if await self._apply(claim, bodies, used):
                        used.add(missing.giver)  # an entry may have no body that anybody gives
                # Who has not answered by now, or a body that came as a commit, is not waited for:
                # the next pass asks all again.
                missing = newer.result() if newer.done() else _Missing()
                if not missing.claims:
                    return

    async def _newer(self, missing: _Missing, bodies: Bodies, *, is_new: bool) -> _Missing:
        """Return what comes after the last entry once all bodies are here, and fetch its bodies.

        Whatever stands in the way is left to the next pass.
        """
        await bodies.have_come()
        last = missing.last
        if last is None or self._is_published_to or self._passes >= MAX_PASSES:
            return _Missing()
        with suppress(*FETCH_ERRORS):
            ahead = await self._peers_ahead(last.position + 1)
            if ahead and self._leads_to_next(last):
                return await self._fetch_after(last, ahead, bodies, is_new=is_new)
        return _Missing()

    def _leads_to_next(self, last: Entry) -> bool:
        """Return whether an entry that is about to be applied is the one before the next.

        Meanwhile an epoch may have opened, which voids it or which it is before, and commits may
        have led beyond it.
        """
        replica = self._replica
        opened, is_last = replica.opened, replica.position <= last.position + 1
        return opened is not None and last.epoch == opened.epoch and is_last

    async def _fetch_after(
        self, last: Entry, ahead: Sequence[Donor], bodies: Bodies, *, is_new: bool
    ) -> _Missing:
        try:
            claims = await self._claims(ahead[0], last.position + 1, place_after(last))
        except FETCH_ERRORS:
            self._let_rest(ahead[0])
            raise
        if claims and self._leads_to_next(last):
            self._passes += 1
            await self._add(bodies, claims, ahead, is_new=is_new)
            return _Missing.of(claims, ahead[0])
        return _Missing()

    def _on_failure(self, entry: Entry, donor: Donor, error: Exception) -> None:
        failed = notices.entry_failed(entry=entry.position, donor=donor.name, reason=str(error))
        self._on_event("warning", failed)

    def _replay_is_cheaper(self, head: Head) -> bool:
        """Return whether the missing entries are few, or fewer bytes than by a snapshot."""
        replica = self._replica
        body_bytes = self._body_bytes()
        missing = head.position - replica.position
        if missing <= KEEP_WORK * len(replica.replay.fragments):
            return True
        newest = max(head.snapshots, default=0)
        by_snapshot = replica.state.snapshot_bytes + (head.position - newest) * body_bytes
        return newest <= replica.position or missing * body_bytes <= by_snapshot

    def _body_bytes(self) -> int:
        """Return about what the body of an entry takes: the last one's length, else the longest."""
        replica = self._replica
        last = replica.store.get(replica.position - 1)
        if last is not None and last.body_bytes:
            return last.body_bytes
        return replica.replay.cells_at(replica.position).max_body_bytes(len(replica.electorate))

    async def _claims(self, donor: Donor, start: int, here: LogPlace | None) -> list[Claim]:
        """Return a donor's entries from `start` up to the position that it claims.

        A page is verified before the next is fetched, so what a liar makes this peer hold is a
        page. Certificates prove the entries from the epoch's base on, in their order; the chain of
        the base proves those before it, the last page first.
        """
        opened = self._replica.opened
        if opened is None:
            raise NoDonor("no epoch record received yet; wait until a peer is reachable")
        claims: list[Claim] = []
        position, base = start, opened.base_position
        if start < base:
            claims = await self._claims_before(donor, start, base, opened.base_chain)
            if here is not None and claims[0].entry.previous_chain != here.chain:
                raise OffTheLog(f"entry {start}: expected the chain {here.chain.hex()[:12]}")
            position, here = base, place_at_base(opened)
        while position < donor.head.position:
            page = await donor.source.headers(position, donor.head.position)
            if not page:
                raise MalformedRecord(
                    f"expected entries up to {donor.head.position}, as the donor claims; got "
                    f"them up to {position}"
                )
            claims += await self._replica.verify([(d.entry, d.certificate) for d in page], here)
            here = place_after(claims[-1].entry)
            position = claims[-1].entry.position + 1
        return claims

    async def _claims_before(
        self, donor: Donor, start: int, stop: int, chain: bytes
    ) -> list[Claim]:
        """Return the entries of [start, stop), which end in a known chain."""
        claims: list[Claim] = []
        span = MAX_SPAN
        while stop > start:
            first = max(start, stop - span)
            page = await donor.source.headers(first, stop)
            if len(page) < stop - first:
                if span == 1:
                    raise MalformedRecord(f"expected entry {first}; the donor does not have it")
                span = max(1, span // 4)  # large entries: fewer of them fit into an answer
                continue
            records = [(decided.entry, decided.certificate) for decided in page]
            claims = [*await self._replica.verify_linked(records, first, chain), *claims]
            stop, chain = first, claims[0].entry.previous_chain
        return claims

    async def _apply(self, claim: Claim, bodies: Bodies, used: set[str]) -> bool:
        """Apply an entry; False if that is done."""
        entry, replica = claim.entry, self._replica
        if replica.position > entry.position or replica.is_disproved:
            return False
        # Beside a state that is kept until its snapshot is written, the next one would take as much
        # memory again. The bodies after it come meanwhile.
        await replica.saved()
        try:
            body = await bodies.of(entry)
            if not await replica.accept_claim(claim, body.data, self._on_taken):
                return False
        except FETCH_ERRORS as error:
            raise NoDonor(f"entry {entry.position}: {error}") from error
        used |= body.givers
        self._on_progress("replay", bodies.after(entry))
        return True

    # a snapshot, then the log

    async def _restore(self, donors: Sequence[Donor], used: set[str]) -> int:
        """Install the newest snapshot that can be proved; returns its position."""
        replica, opened = self._replica, self._replica.opened
        if opened is None:
            raise NoDonor("no epoch record received yet; wait until a peer is reachable")
        self._report_disproved()
        offered = {p for d in donors for p in d.head.snapshots}
        if replica.is_ledger:
            start = replica.position
            here: LogPlace | None = LogPlace(chain=replica.chain, electorate=replica.electorate)
            have = replica.position if replica.diverged else replica.state.position
            offered = {p for p in offered if p > have}
        else:
            # Later joiners need the entries from the base on, whose chain proves those before it.
            start, here = min(opened.base_position, min(offered, default=0)), None
        async with Tasks() as tasks:
            vouching = tasks.spawn(self._signed_roots(offered))
            helping = tasks.spawn(self._helpers(donors))
            claims = await self._claims(donors[0], start, here)
            vouched = await self._vouched(await vouching, claims)
            helpers = await helping
        certified: dict[int, bytes] = await replica.compute(
            replica.certified_roots, claims, sorted(offered)
        )
        roots = {p: signed.root for p, signed in vouched.items()} | certified
        if not replica.is_ledger:  # which has updates of its own
            roots = {p: root for p, root in roots.items() if self._leads_on(p, donors)}
        for position, root in sorted(roots.items(), reverse=True):
            holders, beside = (
                [donor.source for donor in some if position in donor.head.snapshots]
                for some in (donors, helpers)
            )
            signed = None if position in certified else vouched[position]
            with suppress(NoDonor):
                fetched = [await self._leaves.fetch(position, root, holders, used, beside=beside)]
                await self._install(fetched, claims, [*donors, *helpers], used, signed)
                return position
        if not replica.is_ledger and self._leads_on(0, donors):
            claims = await self._claims(donors[0], 0, None)
            await replica.install(await self._genesis(), claims)
            return 0
        signed = await self._last_root(donors)
        if signed is not None and self._fallback is not None:
            holders = [self._fallback]
            state = await self._leaves.fetch(signed.position, signed.root, holders, used)
            await replica.install(state, claims, self._on_taken, signed=signed)
            return signed.position
        failure = NoDonor if roots else NoWay
        raise failure("no peer has a snapshot with a certified root, or the log from its start")

    async def _install(
        self,
        fetched: list[OuterState],
        claims: Sequence[Claim],
        donors: Sequence[Donor],
        used: set[str],
        signed: SignedRoot | None,
    ) -> None:
        """Put a proved state in place, then apply the entries after it.

        Their bodies come from the beginning: else the link would idle while the state is hashed
        and written. What no donor gives now is left to the next pass.

        Args:
            fetched: the state alone, which is taken out: held on, its parameters would take memory
                beside those after it.
            claims: the entries from the state on, perhaps with some before it.
            donors: those that may have bodies.
            used: PeerIDs of those that gave something.
            signed: the root by the run's key, if no entry certifies it.
        """
        position = fetched[0].position
        is_kept = any(donor.head.first_body <= position for donor in donors)
        after = [c for c in claims if is_kept and c.entry.position >= position]
        leads_on = after or (claims and claims[-1].entry.position < position)
        missing = _Missing(
            claims=after, giver=donors[0].name, last=claims[-1].entry if leads_on else None
        )

        async def install() -> None:
            await self._replica.install(fetched.pop(), claims, self._on_taken, signed=signed)

        async with self._bodies() as bodies:
            bodies.add([claim.entry for claim in after], donors, gives_way=True)
            with suppress(NoDonor):
                await self._apply_all(missing, bodies, used, is_new=True, install=install)

    def _leads_on(self, position: int, donors: Sequence[Donor]) -> bool:
        """Return whether a donor has all updates from a state on, up to where the epoch began."""
        base = 0 if self._replica.opened is None else self._replica.opened.base_position
        return any(d.head.first_body <= position and d.head.position >= base for d in donors)

    async def _signed_roots(self, offered: Collection[int]) -> list[SignedRoot]:
        """Return the roots of the newest snapshots by the run's key, where the coordinator answers.

        An entry certifies a root an interval later; until then this is what proves a state to a
        joiner. The leaves still come from peers, so a wrong state needs a liar among them and a
        coordinator that computes as wrongly.
        """
        if not self._replica.takes_signed:
            return []
        newest = sorted(offered)[-VOUCHED:]
        with suppress(TimeoutError):
            async with asyncio.timeout(SLOW_STALLS * self._stall_s):
                found = await together(*map(self._signed_root, newest))
                return [signed for signed in found if signed is not None]
        return []

    async def _signed_root(self, position: int) -> SignedRoot | None:
        """Return what the coordinator signs for a position, if it is there and answers."""
        with suppress(*FETCH_ERRORS):
            signed = await self._fallback.signed_root(position) if self._fallback else None
            return signed if signed is not None and signed.position == position else None
        return None

    async def _vouched(
        self, signed: Sequence[SignedRoot], claims: Sequence[Claim]
    ) -> dict[int, SignedRoot]:
        """Return those of the signed roots, by position, that are of this log."""
        vouched: dict[int, SignedRoot] = {}
        for root in signed:
            with suppress(ChainMismatch):
                await self._replica.expect_vouched(root, claims)
                vouched[root.position] = root
        return vouched

    async def _last_root(self, donors: Sequence[Donor]) -> SignedRoot | None:
        """Return the root of the coordinator's newest state, if it is among the donors.

        It is the last way: an update is nowhere any more, and no entry certifies a state after it.
        """
        last = next((d for d in donors if d.source is self._fallback), None)
        if last is None or not last.head.snapshots or self._replica.standing.was_disproved:
            return None
        return await self._signed_root(max(last.head.snapshots))

    async def _fill_gaps(self, donors: Sequence[Donor]) -> None:
        """Fetch the bodies before the snapshot that somebody still has, the newest first."""
        gaps = self._replica.store.gaps()
        if gaps and self._fallback is not None:  # the only one, perhaps, that has kept them
            asked = await self._ask_all([self._fallback])
            donors = [*donors, *(donor for donor in asked if donor not in donors)]
        for start, stop in reversed(gaps):
            for first in reversed(range(start, stop, MAX_SPAN)):
                if not await self._fill(first, min(first + MAX_SPAN, stop), donors):
                    return  # what is older is not kept either

    async def _fill(self, start: int, stop: int, donors: Sequence[Donor]) -> bool:
        """Fetch the bodies of stored entries, the newest first; False once nobody gives one."""
        records = self._replica.store.headers(start, stop - start)
        entries = [Entry.decode(record.entry) for record in reversed(records)]
        async with self._bodies() as bodies:
            bodies.add(entries, donors)
            for entry in entries:
                try:
                    body = await bodies.of(entry)
                    await self._replica.add_body(entry.position, body.data)
                except FETCH_ERRORS:
                    return False
        return True

    async def _fill_certificates(self, donors: Sequence[Donor]) -> None:
        """Fetch the certificates that were damaged here."""
        for position in self._replica.store.uncertified():
            for donor in donors:
                with suppress(*FETCH_ERRORS):
                    for decided in await donor.source.headers(position, position + 1):
                        await self._replica.add_certificate(
                            position, decided.entry, decided.certificate
                        )
                        break
                    else:
                        continue
                    break


@dataclass(frozen=True, kw_only=True)
class _Missing:
    """Entries that are applied next."""

    claims: Sequence[Claim] = ()
    giver: str = ""
    """PeerID of the donor of their headers"""
    last: Entry | None = None
    """the last of them, or the one before the state that is installed; None: look no further"""

    @classmethod
    def of(cls, claims: Sequence[Claim], giver: Donor) -> _Missing:
        """Return the entries whose headers a donor gave."""
        return cls(claims=claims, giver=giver.name, last=claims[-1].entry if claims else None)


@dataclass(frozen=True, kw_only=True)
class _Rest:
    """Seconds for which a donor that failed is left alone."""

    stalls: float
    until: float
    """on the loop's clock"""
