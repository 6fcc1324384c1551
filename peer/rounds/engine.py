"""The rounds of one peer: one position after another, until cancelled.

The engine joins or leads attempts with this peer's contribution, votes, serves what others ask
for, and keeps the replica at the head of the log. It decides nothing by itself: a
member's way through the terms is in `consensus.member`, a leader's in `consensus.round`, their
choices in `policies`, and what counts in `consensus.voter` and `optim.log`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from atoll.coordinator.run.outcome import Outcome
from atoll.coordinator.run.phases import OnPhase, RoundPhase
from atoll.dht.refusals import RefusalCode
from atoll.dht.roster import RecordError
from atoll.dht.tasks import Tasks, beside, end, race
from atoll.dht.transport import Refused, Stream, TransportError
from atoll.optim.log.entry import (
    Certificate,
    Entry,
    EntryHead,
    LogError,
    MalformedRecord,
    Named,
    NamedEntry,
    check_certificate,
    decode_first,
    is_quorum,
    sha256,
)
from atoll.optim.log.evidence import Evidence, double_votes
from atoll.optim.log.live_replica import Applied
from atoll.optim.reduction.cells import Bytes
from atoll.optim.state.updates import Update
from atoll.peer.rounds import notices
from atoll.peer.rounds.allreduce.eager import EagerCodes, EagerSlot, furthest_upfront, not_upfront
from atoll.peer.rounds.allreduce.exchange import Exchange, HeldStream, check_upfront
from atoll.peer.rounds.conduct import guarded_call, guarded_stream
from atoll.peer.rounds.consensus.ballots import Ballots, Place, term_of
from atoll.peer.rounds.consensus.dissemination import Dissemination, take_passed, take_seals
from atoll.peer.rounds.consensus.leading import Leading, OnLed
from atoll.peer.rounds.consensus.member import CONNECT_STALLS, Flight, OfferedWindow, Pending
from atoll.peer.rounds.consensus.ordering import Ordering
from atoll.peer.rounds.consensus.voter import Voter
from atoll.peer.rounds.context import Context, RoundTrace
from atoll.peer.rounds.entries import named, parsed
from atoll.peer.rounds.fetching import Archive, fetch_headers
from atoll.peer.rounds.messages import (
    PROTOCOL,
    REDUCE,
    UPFRONT,
    Announced,
    AnnouncedHead,
    AskHeard,
    Decided,
    Head,
    Known,
    Reduce,
    Upfront,
    Voted,
    entry_head,
)
from atoll.peer.rounds.policies import positions_ahead

SPREAD = 8  # peers that are no electors: by 8 each, word reaches a thousand in four steps
FORK_ENTRIES = 16  # that a branch is followed back: the other one stops for want of a quorum
REACH_TRIES = 4  # a commit may be under way: look again this often before refusing a peer


@dataclass(kw_only=True)
class RoundsStatistics:
    """Counters of the rounds of this peer."""

    phase: RoundPhase = RoundPhase.IDLE
    position: int = 0
    rounds: int = 0
    included: int = 0
    left_out: int = 0
    attempts_failed: int = 0
    in_flight: int = 0
    """positions that contributions of this peer are under way to"""
    last: RoundTrace | None = None


@dataclass(kw_only=True)
class Settled:
    """A position that was decided, with what it means for this peer."""

    applied: Applied
    included: list[bool] | None
    settles: int | None
    """the number of the contribution that was on offer when it was decided"""
    credits: list[tuple[slice, Update]] = field(default_factory=list)
    trace: RoundTrace | None = None
    missed: Outcome = Outcome.NOT_IN_GROUP
    """why this peer is no member, if it is none"""


class Rounds:
    """The engine. `serve` once, then `run` as a task."""

    def __init__(
        self,
        ctx: Context,
        *,
        catch_up: Callable[[], Coroutine[None, None, None]],
        on_settled: Callable[[Settled], None],
        on_phase: OnPhase,
        on_led: OnLed,
        uplink_mbit_s: float = 0.0,
        ballots: Ballots | None = None,
    ) -> None:
        """Callbacks run on the event loop and must return at once.

        `uplink_mbit_s` is what the owner declares; at 0 the rounds measure it.

        `on_led` gets the entries that this peer led to their certificate. `ballots` remembers over
        restarts where this elector may have voted; by default nothing outlives the process.
        """
        self._ctx = ctx
        self._catch_up = catch_up
        self._on_settled = on_settled
        self._on_phase = on_phase
        ctx.link.declare(uplink_mbit_s)
        self._ballots = ballots = ballots or Ballots()
        self.voter = Voter(ctx, reach=self._reach, on_certified=self._certified, ballots=ballots)
        self._tasks = Tasks()
        self._dissemination = Dissemination(ctx)
        self.leading = Leading(
            ctx,
            self.voter,
            dissemination=self._dissemination,
            reach=self._reach,
            commit=self._commit,
            on_led=on_led,
            ballots=ballots,
        )
        self.ordering = Ordering(ctx, self.voter, self.leading, catch_up=self.kick_catch_up)
        self.archive = Archive(ctx, is_awaited=self._is_awaited)
        self.eager = EagerCodes(ctx)
        self._ahead = positions_ahead(len(ctx.replay.fragments))
        self._pending: dict[int, Pending] = {}
        """what waits for a decision, by fragment"""
        self._flights: dict[int, tuple[Flight, asyncio.Task[None]]] = {}
        """what is under way, by position"""
        self._changed = asyncio.Event()
        """set when something is offered, withdrawn or decided"""
        self._grouped = asyncio.Event()
        """set when a flight has joined a group"""
        self._catching_up: asyncio.Task[None] | None = None
        self._looks_again = False
        """whether word of an entry came since that began: its donors may have answered before"""
        self._stats = RoundsStatistics()
        ctx.replica.listeners.append(self._settle)
        ctx.spread = self._spread
        ctx.restore_evidence()

    def statistics(self) -> RoundsStatistics:
        """Return the counters, as they are now."""
        self._stats.position = self._ctx.replica.position
        self._stats.in_flight = len(self._flights)
        return self._stats

    def serve(self) -> None:
        """Answer the others from now on."""
        transport, fault, door = self._ctx.transport, self._ctx.fault, self._ctx.door
        reading = self._ctx.reading_door
        transport.serve("head", guarded_call(self._serve_head, fault, reading))
        votes = ("prepare", "propose", "lock")
        for method in votes if self._ctx.replica.trust == "byzantine" else votes[:2]:
            transport.serve(method, self._serve_vote(method))
        transport.serve("heard", guarded_call(self._serve_heard, fault, door))
        transport.serve("voted", guarded_call(self._serve_voted, fault, door))
        transport.serve("evidence", guarded_call(self._serve_evidence, fault, door))
        transport.serve("order", guarded_call(self.ordering.serve, fault, door))
        transport.serve("commit", guarded_call(self._serve_commit, fault, door))
        transport.serve("group", guarded_call(self._serve_group, fault, door))
        transport.serve("seals", guarded_call(self._serve_seals, fault, door))
        transport.serve_stream("round", guarded_stream(self.leading.serve, fault, door))
        transport.serve_stream("reduce", guarded_stream(self._serve_reduce, fault, door))
        self.archive.serve()

    def offer(self, window: OfferedWindow) -> None:
        """Offer a contribution; it stays offered until a position of its fragment settles it."""
        self._pending[window.fragment] = Pending(window=window, since=self._ctx.now())
        self._changed.set()

    def withdraw(self) -> None:
        """Forget what was offered: the state that it belongs to is gone."""
        self._pending.clear()
        self._changed.set()

    async def run(self) -> None:
        """Take part in position after position, in some of them before their turn."""
        try:
            async with beside(self.ordering.run()):
                while True:
                    self._changed.clear()
                    await self._steer()
                    await self._await_change()
        finally:
            await self._end(list(self._flights))

    async def _steer(self) -> None:
        """End the flights that are over, begin those that can."""
        here, settings = self._ctx.replica.position, self._ctx.replica.settings
        if self._ctx.replica.is_disproved:  # no entry follows here, so none would tell
            self.kick_catch_up()
        ahead = filter(settings.takes_updates, range(here, here + self._ahead + 1))
        due = {p: self._pending_at(p) for p in ahead}
        under_way = list(self._flights.items())
        await self._end([p for p, (f, t) in under_way if t.done() or not self._holds(f, due)])
        for position, pending in due.items():
            if pending is not None and position not in self._flights:
                place = Place(self._ctx.replica.epoch, position)
                flight = Flight(self._ctx, self, place, pending)
                task = asyncio.create_task(flight.run())
                task.add_done_callback(lambda _: self._changed.set())
                self._flights[position] = flight, task

    def _holds(self, flight: Flight, due: Mapping[int, Pending | None]) -> bool:
        """Return whether a flight still carries the contribution that is due at its position."""
        epoch, position = flight.place
        return epoch == self._ctx.replica.epoch and due.get(position) is flight.pending

    async def _await_change(self) -> None:
        """Wait for an offer, for a decision, or for a flight to end, which it does by a fault."""
        replica = self._ctx.replica
        await race(replica.passed(replica.position), self._changed.wait())
        for _, task in self._flights.values():
            if task.done():
                task.result()

    async def _end(self, positions: Sequence[int]) -> None:
        await end(*(self._flights.pop(position)[1] for position in positions))

    def _pending_at(self, position: int) -> Pending | None:
        return self._pending.get(self._ctx.replay.fragment_at(position))

    def _exchange_at(self, position: int) -> Exchange | None:
        """Return the exchange of the group that this peer's contribution is in, if any."""
        pending = self._pending_at(position)
        return pending.exchange if pending is not None else None

    async def retire(self) -> None:
        """Resign as an elector, so that the others need not wait for this peer's votes."""
        await self.voter.retire()

    async def end_ballots(self) -> None:
        """Sign nothing more that is new; wait until what was signed last is decided.

        An elector that is back after a restart abstains where it may have voted before.
        """
        self._ballots.closed = True
        replica = self._ctx.replica
        while self._ballots.furthest >= Place(replica.epoch, replica.position):
            await replica.moved()

    @property
    def retired(self) -> bool:
        """Return whether this peer has resigned; see `Booth.retired`."""
        return self.voter.retired

    async def close(self) -> None:
        """End everything that is under way."""
        await self.leading.close()
        await self._dissemination.close()
        await self.voter.close()
        await self._tasks.close()

    # what flights report

    def show(self, flight: Flight) -> None:
        """Publish the phase of a flight, if its position is the one that is decided next."""
        if flight.phase is RoundPhase.REDUCE:
            self._grouped.set()
        if flight.place.position == self._ctx.replica.position:
            self._phase(flight.phase)

    def count_failure(self) -> None:
        """Count a failed term, and look for the entry that may have ended it."""
        self._stats.attempts_failed += 1
        self.kick_catch_up()

    async def catch_up(self) -> None:
        """Look for missing entries, and return when that was done."""
        self.kick_catch_up()
        if self._catching_up is not None:
            await asyncio.wait({self._catching_up})

    def kick_catch_up(self) -> None:
        """Look for missing entries; if that is under way, once more afterwards."""
        if self._catching_up is None or self._catching_up.done():
            self._catching_up = self._tasks.spawn(self._look_for_entries())
        else:
            self._looks_again = True

    async def _look_for_entries(self) -> None:
        self._looks_again = False
        await self._catch_up()
        if self._looks_again:
            self._catching_up = self._tasks.spawn(self._look_for_entries())

    async def _reach(self, position: int) -> None:
        """Wait a moment until this peer stands at a position; look for missing entries."""
        replica = self._ctx.replica
        for number in range(REACH_TRIES):
            if replica.ready and replica.position >= position and replica.electorate:
                return
            if number:  # at first the decision may just be on its way
                self.kick_catch_up()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._ctx.settings.stall_s / REACH_TRIES / 2):
                    await replica.moved()

    def _phase(self, phase: RoundPhase) -> None:
        if phase != self._stats.phase:
            self._stats.phase = phase
            self._on_phase(phase, self._ctx.replica.position)

    async def _commit(self, entry: Entry, certificate: Certificate, body: Bytes) -> None:
        since = self._ctx.now()
        update_N = await self.voter.update(entry)
        await self._ctx.replica.accept(entry, certificate, body, update_N, since=since)

    def _certified(self, entry: Entry, certificate: Certificate) -> None:
        """Apply an entry that was certified here by the votes that electors sent."""
        self._tasks.spawn(self._commit_own_vote(entry, certificate))

    async def _commit_own_vote(self, entry: Entry, certificate: Certificate) -> None:
        try:
            body = await self.voter.gather(entry, self._ctx.me.peer_id)
            await self._commit(entry, certificate, body)
        except (TransportError, LogError):  # as if no commit had arrived
            self.kick_catch_up()

    # what a decided entry means for this peer

    def _settle(self, applied: Applied) -> None:
        entry = applied.entry
        self._ctx.note_parts(entry)
        if entry.kind == "control":
            return self._settle_order(applied)
        pending = self._pending.pop(entry.fragment, None)
        self._note_leader(entry, term_of(applied.attempt), pending)
        self._ctx.promises.kept(member.peer_id for member in entry.members)
        self._ctx.arrivals.kept(member.peer_id for member in entry.members)
        included = entry.included_cells(self._ctx.me.peer_id, self._ctx.me.incarnation)
        if pending is not None and pending.exchange is None:
            included = None  # what it names was withdrawn: this one has been in no group yet
        self._stats.rounds += 1
        number = pending.window.number if pending is not None else None
        settled = Settled(applied=applied, included=included, settles=number)
        if pending is not None:
            settled.missed = pending.missed
            self._stats.included += included is not None
            self._stats.left_out += included is None
            self._tell_left_out(entry, included)
            settled.credits = self._credits(entry, pending.exchange)
            settled.trace = self._trace(applied, pending)
            self._stats.last = settled.trace
        self._changed.set()
        self._phase(RoundPhase.TRAIN)
        self._on_settled(settled)

    def _settle_order(self, applied: Applied) -> None:
        """Take an order: what is on offer is offered again, as nothing was decided of it.

        What is encoded in a codec that the run has left is settled as left out.
        """
        entry, settles = applied.entry, None
        pending = self._pending.pop(entry.fragment, None)
        self._note_leader(entry, term_of(applied.attempt), pending)
        if pending is not None and pending.window.codec == self._ctx.replica.settings.codec:
            self._pending[entry.fragment] = Pending(window=pending.window, since=pending.since)
        elif pending is not None:
            settles = pending.window.number
        self._stats.rounds += 1
        self._changed.set()
        self._on_settled(Settled(applied=applied, included=None, settles=settles))

    def _note_leader(self, entry: Entry, term: int, pending: Pending | None) -> None:
        self._ctx.note_term(entry, term, None if pending is None else pending.since)
        if pending is None or entry.kind != "update":
            return
        if any(member.peer_id == self._ctx.me.peer_id for member in entry.members):
            self._ctx.note_included(entry, term)
        elif pending.exchange is None and (reported := pending.reported_in(term)) is not None:
            self._ctx.note_omitted(entry, term, reported)

    def _credits(self, entry: Entry, exchange: Exchange | None) -> list[tuple[slice, Update]]:
        """Return what the encoding lost of the parts that the entry names as this peer's own."""
        if exchange is None:
            return []
        mine = []
        for index, part in enumerate(entry.parts):
            done = exchange.parts.get(index)
            credit = exchange.credits.get(index)
            if credit is not None and done is not None and done.digest == part.digest:
                mine.append((exchange.range_of(index).values, credit))
        return mine

    def _trace(self, applied: Applied, pending: Pending) -> RoundTrace:
        now = self._ctx.now()
        trace = round_trace(
            applied, pending.exchange, since=pending.since, turn_at=pending.turn_at, now=now
        )
        entry = applied.entry
        trace.left_out = self.leading.left_out(Place(entry.epoch, entry.position)) | trace.left_out
        return trace

    def _tell_left_out(self, entry: Entry, included: list[bool] | None) -> None:
        """Report that this peer was left out, and that it loses nothing."""
        if entry.kind == "update" and not (included and all(included)):
            counted = sum(included) if included else 0
            left_out = notices.left_out(
                round=entry.position + 1, counted=counted, chunks=entry.num_cells
            )
            self._ctx.on_event("warning", left_out)

    # answering

    async def _serve_head(self, remote: str, body: bytes) -> bytes:
        known = Known.decode(body)
        head = self.head(known)
        if known.roster:
            try:
                records = await self._ctx.roster.answer(known.roster, remote)
            except RecordError as error:
                raise MalformedRecord(str(error)) from error
            head = head.model_copy(update={"roster": records})
        return head.encode()

    def head(self, known: Known) -> Head:
        """Return where this peer stands; with the epoch's record for callers that lack it."""
        replica = self._ctx.replica
        is_new = known.epoch is None or known.epoch < replica.epoch
        ready_in_s = self._ctx.ready_in_s()
        if ready_in_s is not None and self._seeks_group():
            ready_in_s = 0.0  # the trainer may be in its next window already
        return Head(
            protocol=PROTOCOL,
            epoch=replica.epoch,
            position=replica.position,
            chain=replica.chain or bytes(32),
            incarnation=self._ctx.me.incarnation,
            role="trainer" if ready_in_s is not None else "follower",
            ready_in_s=ready_in_s or 0.0,
            open_term=self.voter.open_term,
            first_body=replica.store.first_with_bodies(),
            snapshots=tuple(sorted(replica.snapshots)),
            epoch_record=replica.epoch_record if is_new else b"",
        )

    @property
    def is_in_group(self) -> bool:
        """Return whether the contribution to the next decision is in a group."""
        flight, _ = self._flights.get(self._ctx.replica.position, (None, None))
        return flight is not None and flight.phase is not RoundPhase.WAIT

    def _seeks_group(self) -> bool:
        """Return whether any contribution is in no group: its flight waits, or has yet to begin."""
        under_way = {flight.pending: flight.phase for flight, _ in self._flights.values()}
        return any(
            under_way.get(p, RoundPhase.WAIT) is RoundPhase.WAIT for p in self._pending.values()
        )

    def _is_awaited(self) -> bool:
        """Return whether training here waits for a round whose bytes are on the way."""
        if self._ctx.replay.method.hidden_steps(1):
            return False  # it goes on meanwhile, and rounds may follow each other without a pause
        return any(flight.phase is RoundPhase.REDUCE for flight, _ in self._flights.values())

    def _serve_vote(self, method: str) -> Callable[[str, bytes], Awaitable[bytes]]:
        async def answer(remote: str, body: bytes) -> bytes:
            self._ctx.door(remote)
            return await self.voter.answer(remote, method, body)

        return answer

    async def _serve_heard(self, remote: str, body: bytes) -> bytes:
        self._ctx.expect_unbarred(remote)
        return (await self.voter.take_silence(remote, AskHeard.decode(body))).encode()

    async def _serve_voted(self, remote: str, body: bytes) -> bytes:
        await self.voter.take_vote(remote, Voted.decode(body))
        return b""

    async def _serve_commit(self, remote: str, body: bytes) -> bytes:
        self._ctx.expect_unbarred(remote)
        head = decode_first(AnnouncedHead, body)
        place = entry_head(head.entry)
        replica = self._ctx.replica
        if replica.position <= place.position <= replica.position + self._ahead + 1:
            await self._reach(place.position)
        self._expect_here(place)
        record, name = await named(self._ctx.compute, head.entry)
        self._expect_here(place)  # inflating may take a while
        if name.position < replica.position:
            await self._compare_with_known(record, head.certificate)
            await self._pass_on_known(record, Announced.decode(body).tell)
            return b""
        # Anybody may bring a decided entry, so nobody's is parsed before its certificate holds.
        certificate = Certificate.decode(head.certificate)
        check_certificate(name, certificate, replica.electorate, self._ctx.verify, replica.trust)
        self._expect_honest_quorum(name, certificate)
        if name.previous_chain != replica.chain:
            self._tasks.spawn(self._compare_branches(remote, name.position - 1))
            raise Refused(RefusalCode.ELSEWHERE, "the entry is on another branch of the log")
        announced = Announced.decode(body)
        entry = await parsed(self._ctx.compute, record)
        try:
            parts = await self.voter.gather(entry, remote)
        except (TransportError, MalformedRecord) as error:
            self.kick_catch_up()
            raise Refused(RefusalCode.NO_PARTS, str(error)) from error
        decided = Decided(entry=record, certificate=announced.certificate)
        self._dissemination.pass_on(decided, announced.tell)
        await self._commit(entry, certificate, parts)
        return b""

    def _expect_here(self, place: EntryHead) -> None:
        """Refuse an entry that is neither the next one nor an older one.

        With a state that the log contradicts, no entry is the next one.
        """
        replica = self._ctx.replica
        at = replica.epoch, replica.position
        is_other = (place.epoch, place.position) != at or replica.is_disproved
        if place.position >= replica.position and is_other:
            self.kick_catch_up()
            raise Refused(RefusalCode.ELSEWHERE, f"expected position {replica.position}")

    def _expect_honest_quorum(self, entry: Named, certificate: Certificate) -> None:
        """Refuse a quorum that a peer is needed for which signed two entries at this place.

        There may be another such quorum for the other entry. The electors that are left take the
        position to its next attempt. If a peer applied the entry all the same, `catch_up` finds it.
        With a quorum for each lie, there is no such other, and the liar's commit is as good as any.
        """
        if self._ctx.replica.trust == "byzantine":
            return
        liars = self._ctx.evidence.at(entry.epoch, entry.position)
        electorate = self._ctx.replica.electorate
        honest = [
            v.elector for v in certificate.votes if electorate[v.elector].peer_id not in liars
        ]
        if not is_quorum(honest, len(electorate)):
            self.kick_catch_up()
            raise Refused(RefusalCode.BARRED, "the certificate needs the vote of a banned peer")

    async def _compare_with_known(self, record: bytes, certificate_bytes: bytes) -> None:
        """Look for two certified entries at one position: the log has forked then."""
        name = NamedEntry.of(record)
        known = await self._ctx.compute(self._ctx.replica.store.get, name.position)
        if known is None or known.entry == record:
            return
        held, certificate = NamedEntry.of(known.entry), Certificate.decode(certificate_bytes)
        if (name.epoch, name.previous_chain) != (held.epoch, held.previous_chain):
            return
        electorate = self._ctx.replica.core.electorate_at(name.position)
        check_certificate(name, certificate, electorate, self._ctx.verify, self._ctx.replica.trust)
        entry, other = [await parsed(self._ctx.compute, r) for r in (record, known.entry)]
        self._ctx.on_event("error", notices.forked(round=entry.position + 1))
        if not known.certificate:  # it was damaged on the disk
            return
        other_certificate = Certificate.decode(known.certificate)
        trust = self._ctx.replica.trust
        for evidence in double_votes(
            entry, certificate, other, other_certificate, electorate, trust
        ):
            self._ctx.accuse(evidence)

    async def _compare_branches(self, peer: str, position: int) -> None:
        """Go back on a peer's branch to where it left this peer's, for the evidence there."""
        for at in range(position, max(-1, position - FORK_ENTRIES), -1):
            try:
                headers = await fetch_headers(self._ctx, peer, at, at + 1)
                if not headers:
                    return
                decided = headers[0]
                entry = Entry.decode(decided.entry)
                known = await self._ctx.compute(self._ctx.replica.store.get, at)
                if known is None or known.entry == decided.entry or entry.position != at:
                    return
                if Entry.decode(known.entry).previous_chain == entry.previous_chain:
                    return await self._compare_with_known(decided.entry, decided.certificate)
            except (TransportError, LogError):
                return

    async def _serve_evidence(self, remote: str, body: bytes) -> bytes:
        evidence = Evidence.decode(body)
        evidence.check(self._ctx.replica.run_id, self._ctx.verify)
        if self._may_have_voted(evidence):
            self._ctx.accuse(evidence)
        return b""

    def _may_have_voted(self, evidence: Evidence) -> bool:
        """Return whether the accused had a vote: keys are free, so lies of others are no news."""
        replica = self._ctx.replica
        electors = replica.core.electorate_at(evidence.position)
        return evidence.peer_id in {e.peer_id for e in (*electors, *replica.electorate)}

    def _spread(self, evidence: Evidence) -> None:
        """Pass evidence on to the electors, and to some others, each of which does the same."""
        me = self._ctx.me.peer_id
        others = sorted(self._ctx.seen, key=lambda peer: sha256((me + peer).encode()))
        peers = {e.peer_id for e in self._ctx.replica.electorate} | set(others[:SPREAD])
        for peer in sorted(peers - {me, evidence.peer_id}):
            self._tasks.spawn(self._send_evidence(peer, evidence.encode()))

    async def _send_evidence(self, peer: str, record: bytes) -> None:
        timeout_s = self._ctx.settings.stall_s
        with suppress(TransportError):
            await self._ctx.transport.call(peer, "evidence", record, timeout_s=timeout_s)

    async def _serve_group(self, remote: str, body: bytes) -> bytes:
        self._ctx.expect_unbarred(remote)
        return await take_passed(self._ctx, body)

    async def _serve_seals(self, remote: str, body: bytes) -> bytes:
        self._ctx.expect_unbarred(remote)
        return await take_seals(self._ctx, body)

    async def _pass_on_known(self, record: bytes, tell: Sequence[str]) -> None:
        """Forward an entry that is here already, as long as it is the newest."""
        store, last = self._ctx.replica.store, self._ctx.replica.position - 1
        known = await self._ctx.compute(store.get, last)
        if known is not None and known.entry == record and known.certificate:
            decided = Decided(entry=known.entry, certificate=known.certificate)
            self._dissemination.pass_on(decided, tell)

    async def _serve_reduce(self, remote: str, stream: Stream) -> None:
        message = await stream.recv(timeout_s=self._ctx.settings.stall_s)
        if message is not None and message[:1] == UPFRONT:
            return await self._serve_upfront(remote, Upfront.decode(message[1:]), stream)
        if message is None or message[:1] != REDUCE:
            raise Refused(RefusalCode.BAD_HEAD, "expected a Reduce or an Upfront record first")
        head = Reduce.decode(message[1:])
        exchange = await self._await_exchange(head)
        await exchange.serve(remote, head, stream)

    async def _serve_upfront(self, remote: str, head: Upfront, stream: Stream) -> None:
        """Keep codes until their group is closed, or can't be any more."""
        if head.position <= furthest_upfront(self._ctx):
            await self._reach(max(0, head.position - self._ahead))
        limit = check_upfront(self._ctx, remote, head)
        with self.eager.slot(remote, head.position, head.part) as slot:
            async with HeldStream(stream, limit, self._ctx.settings.stall_s, slot) as held:
                exchange = await self._await_planned(head, held, slot)
                reduce = exchange.takes_upfront(remote, head)
                slot.seat()
                await exchange.serve(remote, reduce, held)

    async def _await_planned(self, head: Upfront, held: HeldStream, slot: EagerSlot) -> Exchange:
        """Return the exchange of the position, whose codes came before it.

        Raises:
            Refused: there will be none, or their sender took them back.
        """
        grouped = self._await_grouped(head.position)
        decided, dropped = self._ctx.replica.passed(head.position), slot.dropped.wait()
        exchange = await race(grouped, decided, held.read_all(), dropped)
        if exchange is None or held.ended or slot.dropped.is_set():
            raise not_upfront(head.position)
        return exchange

    async def _await_grouped(self, position: int) -> Exchange:
        while True:
            self._grouped.clear()
            exchange = self._exchange_at(position)
            if exchange is not None and not exchange.is_over:
                return exchange
            await self._grouped.wait()

    async def _await_exchange(self, head: Reduce) -> Exchange:
        """Return the stream's exchange; the group may reach this peer after the stream does."""
        deadline = self._ctx.now() + CONNECT_STALLS * self._ctx.settings.stall_s
        while self._ctx.now() < deadline:
            self._grouped.clear()
            exchange = self._exchange_at(head.position)
            if exchange is not None and exchange.digest == head.group:
                return exchange
            with suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await self._grouped.wait()
        raise Refused(RefusalCode.NO_SUCH_ROUND, f"unknown group for round {head.position + 1}")


def round_trace(
    applied: Applied,
    exchange: Exchange | None,
    *,
    since: float,
    turn_at: float | None,
    now: float,
) -> RoundTrace:
    """Return the account of a round to which this peer offered a contribution.

    Args:
        applied: the decided position.
        exchange: this peer's part in the reduction, None where it came to none.
        since: when the contribution was offered.
        turn_at: when its position came to be decided, None where this peer has not seen that; what
            was reduced before waits until then.
        now: when the position was decided and applied.
    """
    trace = RoundTrace(position=applied.entry.position, apply_s=applied.apply_s)
    if exchange is None:
        trace.wait_s = now - since
        return trace
    times = exchange.times
    sent = times.sent if times.sent is not None else now
    reduced = times.reduced if times.reduced is not None else now
    turn_at = max(reduced, reduced if turn_at is None else turn_at)
    trace.wait_s = times.started - since + turn_at - reduced
    trace.send_s = sent - times.started
    trace.reduce_s = max(0.0, reduced - sent)
    trace.vote_s = max(0.0, now - applied.apply_s - turn_at)
    trace.rejected = math.hypot(*exchange.rejected.values())
    members = exchange.group.members
    trace.left_out = {members[index].peer_id: why for index, why in exchange.left_out.items()}
    return trace
