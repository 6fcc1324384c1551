"""The leader of one term at one position: the driver of its `Round`, and all that it asks others.

A peer leads the position that is decided next, and early, those ahead of it whose first leader it
would be if the electorate stayed as it is. Of an early one only the reduction is done before its
turn. It is given up if an entry in between makes another elector the leader: nothing was
proposed, and the members still hold what they sent.

A leadership begins with the first peer that reports ready, whether or not the leader itself is
ready; it may lead a group that it is not a member of. It owns the members' sessions and all tasks
of the term; what is done, and when, the machine in `round.py` decides. All waits are bounded:
sessions by signs of life, the group by the grace, the reduction by the group's deadline, votes by
their calls. The roster is some seconds old, so each trainer is asked where it stands.

`Leading` holds the leaderships of this peer, `Leadership` is one of them, and `Polls` asks electors
for promises and votes. Over a `LocalStream` a leader is a member of its own group like the others.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

from atoll.dht.refusals import RefusalCode
from atoll.dht.tasks import Tasks, beside, end, race, together
from atoll.dht.transport import RELAY_LOST, DeadlineExceeded, Refused, Stream, TransportError
from atoll.optim.log.electorate import succeed
from atoll.optim.log.entry import (
    Certificate,
    CertificateInvalid,
    Elector,
    Entry,
    EntryKind,
    LogError,
    MalformedRecord,
    Member,
    Part,
    StateRoot,
    commit_payload,
    proposal_payload,
    sha256,
    vote_payload,
)
from atoll.optim.log.locks import NO_DIGEST, Decree, SignedPromise, check_lock, check_promise
from atoll.optim.log.units import UnitsInvalid, count_of, expect_held, read_units, units_after
from atoll.optim.reduction.cells import Bytes, UpdateError
from atoll.optim.reduction.contribution import work_weight
from atoll.peer.rounds import notices
from atoll.peer.rounds.allreduce.exchange import Exchange, expected_plan
from atoll.peer.rounds.conduct import Fault
from atoll.peer.rounds.consensus.ballots import Accepted, Ballots, Leads, Place, leader_of, term_of
from atoll.peer.rounds.consensus.dissemination import Delivery, Dissemination, seal
from atoll.peer.rounds.consensus.round import Round, RoundState, Rules
from atoll.peer.rounds.consensus.round_events import (
    Action,
    AskPromises,
    CloseGroup,
    CommitArrived,
    Decide,
    ElectorsProbed,
    Event,
    Fail,
    Fetch,
    FetchEnded,
    LeaderAbsent,
    LeaderView,
    Left,
    PartReduced,
    Polled,
    Probed,
    Promised,
    Readmit,
    RepairPart,
    ReportArrived,
    Reported,
    SendLock,
    SendProposal,
    StopPoll,
    TellGone,
    Unreachable,
    VoteArrived,
)
from atoll.peer.rounds.consensus.voter import Voter
from atoll.peer.rounds.context import (
    DECISION_UNDER_WAY,
    HEAD_STALLS,
    AttemptFailed,
    Context,
    Decoded,
    ask_head,
    failure_key,
    stands_at,
)
from atoll.peer.rounds.entries import named, parsed
from atoll.peer.rounds.fetching import fetch_part
from atoll.peer.rounds.messages import (
    ALIVE,
    GONE,
    GROUP,
    PART_DONE,
    PROTOCOL,
    READY,
    REPAIR,
    SEATED,
    AskCommit,
    AskHeard,
    Ballot,
    Closed,
    Decided,
    Gone,
    Group,
    Head,
    Heard,
    JustifiedPropose,
    LockedPromise,
    PartDone,
    PartPlan,
    Prepare,
    Promise,
    Propose,
    Ready,
    Repair,
    Report,
    Reports,
    Seated,
    Sworn,
    deflated,
    is_large,
    report_payload,
    reports_root,
    tagged,
)
from atoll.peer.rounds.policies import (
    MAX_AHEAD,
    POLL_STALLS,
    admit,
    agreed_silent,
    kept_parts,
    may_own,
    positions_ahead,
    round_deadline_s,
    slowest_mbit_s,
    split_cells,
)

PROBE_S = 1.0  # how often peers that are waited for are asked
MAX_PROBED = 64  # trainers that are asked again in one probe; admitted keys may be many
# Terms that one caller may have begun here and that are not over: as many as positions in flight.
# A leadership has tasks, and asks the others each second.
MAX_BEGUN = MAX_AHEAD + 1
ASKED_AGAIN = frozenset({RefusalCode.NO_REPORTS, RefusalCode.UNDER_WAY})
"""Refusals of electors that answer another time: with the reports, or when the term opens."""
LEAVE_STALLS = 2  # a decision that goes from peer to peer takes a second among a thousand


Question = AskPromises | SendProposal | SendLock


class Polls:
    """Asks the electors of one position, one question at a time."""

    def __init__(
        self,
        ctx: Context,
        voter: Voter,
        place: Place,
        *,
        is_live: Callable[[str], bool],
        take: Callable[[Event], object],
    ) -> None:
        """Prepare to ask the electors of `place`.

        Args:
            ctx: the leader's.
            voter: the leader's own.
            place: what the polls are about.
            is_live: whether a peer is known to be alive; others are probed before they are asked.
            take: gets the answers.
        """
        self._ctx = ctx
        self._voter = voter
        self._place = place
        self._is_live = is_live
        self._take = take
        self._poll: asyncio.Task[None] | None = None
        self._reports: dict[bytes, Reports] = {b"": ()}
        """signed reports of the entries that may be proposed, by the digest in them"""
        self._sound: set[bytes] = set()
        """digests of entries that promises named, and that break no rule"""
        self._group: Group | None = None
        """the leader's own"""

    def know_group(self, group: Group) -> None:
        """Keep the group whose entry may be proposed."""
        self._group = group
        self.know(group.reports)

    def know(self, reports: Reports) -> None:
        """Keep the reports of an entry that may be proposed."""
        self._reports[reports_root(reports)] = reports

    def ask(self, question: Question, electorate: Sequence[Elector]) -> None:
        """Ask all electors at once; `Polled` comes after the last answer."""
        self._poll = asyncio.create_task(self._run(question, electorate))

    async def stop(self) -> None:
        """Wait for no more answers."""
        poll, self._poll = self._poll, None
        if poll is not None:
            await end(poll)

    def check(self) -> None:
        """Raise what a poll failed with."""
        if self._poll is not None and self._poll.done():
            self._poll.result()

    async def _run(self, question: Question, electorate: Sequence[Elector]) -> None:
        timeout_s = POLL_STALLS * self._ctx.settings.stall_s
        try:
            async with asyncio.TaskGroup() as group:
                if isinstance(question, AskPromises):
                    record = Prepare(
                        epoch=self._place.epoch,
                        position=self._place.position,
                        attempt=question.attempt,
                    ).encode()
                    for index in range(len(electorate)):
                        asking = self._ask_promise(question, index, electorate, record, timeout_s)
                        group.create_task(asking)
                elif isinstance(question, SendLock):
                    for index, elector in enumerate(electorate):
                        record = self._lock_record(question, index)
                        asking = self._ask_commit(question, index, elector, record, timeout_s)
                        group.create_task(asking)
                else:
                    self._ask_votes(question, electorate, group, question.deadline_s or timeout_s)
        except BaseExceptionGroup as failures:  # the first one is the reason that the term failed
            raise failures.exceptions[0] from None
        self._take(Polled(attempt=question.attempt))

    def _proposals(self, question: SendProposal) -> Proposals:
        """Encode a proposal for electors that have its members with their group, and for others."""
        whole, entry = self._proposal(question), question.entry
        known: dict[str, object] = {"reports": ()}
        if self._group is not None and entry.members == self._group.members:
            known |= {"entry": deflated(entry.without_members()), "group": self._group.digest}
        return Proposals(
            members=frozenset(member.peer_id for member in entry.members),
            brief=whole.model_copy(update=known).encode(),
            whole=whole.encode(),
        )

    def _proposal(self, question: SendProposal) -> Propose:
        payload = proposal_payload(question.entry, question.attempt)
        propose = Propose(
            attempt=question.attempt,
            entry=deflated(question.entry.encode()),
            reports=self._reports.get(question.entry.reports, ()),
            signature=self._ctx.sign(payload),
        )
        if self._ctx.replica.trust == "crash":
            return propose
        return JustifiedPropose(**dict(propose), justification=question.justification)

    def _lock_record(self, question: SendLock, elector: int) -> bytes:
        """An elector that has not voted may lack the entry, which it has to name in promises."""
        entry = b""
        reports: Reports = ()
        if elector not in {vote.elector for vote in question.lock.votes}:
            entry = deflated(question.entry.encode())
            reports = self._reports.get(question.entry.reports, ())
        return AskCommit(
            epoch=self._place.epoch,
            position=self._place.position,
            lock=question.lock,
            entry=entry,
            reports=reports,
        ).encode()

    async def _ask_promise(
        self,
        question: AskPromises,
        index: int,
        electorate: Sequence[Elector],
        record: bytes,
        timeout_s: float,
    ) -> None:
        replica = self._ctx.replica
        decree = Decree(replica.run_id, *self._place, replica.chain)

        async def taken_locked(answer: bytes) -> Promised:
            promise = LockedPromise.decode(answer)
            accepted = None
            if promise.lock is not None:
                entry, record = await self._entry_of(promise, decree)
                check_lock(entry, promise.lock, electorate, self._ctx.verify)
                accepted = Accepted(attempt=promise.lock.attempt, entry=record, lock=promise.lock)
            signed = SignedPromise(
                elector=index,
                locked=accepted.attempt + 1 if accepted else 0,
                digest=sha256(accepted.entry) if accepted else NO_DIGEST,
                signature=promise.signature,
            )
            check_promise(decree, question.attempt, signed, electorate, self._ctx.verify)
            return Promised(
                attempt=question.attempt, elector=index, accepted=accepted, signed=signed
            )

        async def taken(answer: bytes) -> Promised:
            promise = Promise.decode(answer)
            accepted = None
            if promise.entry:
                if promise.accepted_attempt >= question.attempt:
                    raise MalformedRecord("expected an entry of a ballot before the promised one")
                _, record = await self._entry_of(promise, decree)
                accepted = Accepted(attempt=promise.accepted_attempt, entry=record)
            return Promised(attempt=question.attempt, elector=index, accepted=accepted)

        reader = taken_locked if replica.trust == "byzantine" else taken
        peer = electorate[index].peer_id
        # An earlier term may have its time, no longer than this one has.
        until = self._ctx.now() + self._voter.time_s(term_of(question.attempt))
        while await self._ask(peer, "prepare", record, timeout_s, reader) == RefusalCode.UNDER_WAY:
            if self._ctx.now() >= until:
                return
            await asyncio.sleep(PROBE_S)

    async def _entry_of(
        self, promise: Promise | LockedPromise, decree: Decree
    ) -> tuple[Entry, bytes]:
        """Return the entry that a promise names, which this leader may have to propose.

        Raises:
            LogError: it is no entry, did not come with the reports that it names, or breaks a rule.
            Refused: it is of another place, or breaks a rule.
        """
        record, _ = await named(self._ctx.compute, promise.entry)
        entry = await parsed(self._ctx.compute, record)
        if Decree.of(entry) != decree:
            # No fault: peers of two branches must not bar each other before an epoch joins them.
            raise Refused(
                RefusalCode.ELSEWHERE, "the promised entry is of another position or chain"
            )
        if reports_root(promise.reports) != entry.reports:
            raise MalformedRecord("expected the reports that the promised entry names")
        if (digest := sha256(record)) not in self._sound:
            await self._voter.check_promised(entry, promise.reports)
            self._sound.add(digest)
        self.know(promise.reports)
        return entry, record

    def _ask_votes(
        self,
        question: SendProposal,
        electorate: Sequence[Elector],
        group: asyncio.TaskGroup,
        timeout_s: float,
    ) -> None:
        records = self._proposals(question)
        for index, elector in enumerate(electorate):
            group.create_task(self._ask_vote(question, index, elector, records, timeout_s))

    async def _ask_vote(
        self,
        question: SendProposal,
        index: int,
        elector: Elector,
        records: Proposals,
        timeout_s: float,
    ) -> None:
        async def taken(answer: bytes) -> VoteArrived:
            signature = Ballot.decode(answer).signature
            payload = vote_payload(question.entry, question.attempt)
            if not self._ctx.verify(elector.peer_id, payload, signature):
                raise CertificateInvalid("invalid signature on the vote")
            return VoteArrived(attempt=question.attempt, elector=index, signature=signature)

        peer, refused = elector.peer_id, None
        if peer in records.members:
            refused = await self._ask(peer, "propose", records.brief, timeout_s, taken)
        if peer not in records.members or refused == RefusalCode.NO_REPORTS:
            await self._ask(peer, "propose", records.whole, timeout_s, taken)

    async def _ask_commit(
        self, question: SendLock, index: int, elector: Elector, record: bytes, timeout_s: float
    ) -> None:
        async def taken(answer: bytes) -> CommitArrived:
            signature = Ballot.decode(answer).signature
            payload = commit_payload(question.entry, question.attempt)
            if not self._ctx.verify(elector.peer_id, payload, signature):
                raise CertificateInvalid("invalid signature on the commit")
            return CommitArrived(attempt=question.attempt, elector=index, signature=signature)

        await self._ask(elector.peer_id, "lock", record, timeout_s, taken)

    async def _ask(
        self,
        peer: str,
        method: str,
        record: bytes,
        timeout_s: float,
        taken: Callable[[bytes], Awaitable[Event]],
    ) -> RefusalCode | None:
        """Pass on an elector's good answer; return the code that it refused with, if it did."""
        if self._ctx.conduct.is_out(peer):
            return None
        try:
            if peer == self._ctx.me.peer_id:
                answer = await self._voter.answer(peer, method, record)
            # A peer without a session may be gone: a head takes half a stall, a poll up to ten.
            elif self._is_live(peer) or await ask_head(self._ctx, peer) is not None:
                call = self._ctx.transport.call
                answer = await call(peer, method, record, timeout_s=timeout_s)
            else:
                return None
            self._take(await taken(answer))
        except (Refused, LogError) as error:
            if isinstance(error, Refused) and error.code in ASKED_AGAIN:
                return error.code
            if isinstance(error, LogError):
                self._ctx.fault(peer, Fault.BAD_VOTE)
            self._ctx.on_event(
                "warning",
                notices.no_vote(round=self._place.position + 1, peer=peer, reason=str(error)),
                key=("no vote", self._place.position, peer, failure_key(error)),
            )
            return error.code if isinstance(error, Refused) else None
        except TransportError:
            pass
        return None


@dataclass(frozen=True, kw_only=True)
class Proposals:
    """One proposal as two records."""

    members: frozenset[str]
    """PeerIDs of the entry's members"""
    brief: bytes
    """without members and reports: for members, which have them with their group"""
    whole: bytes


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A decided position."""

    entry: Entry
    certificate: Certificate


@dataclass(kw_only=True, eq=False)
class Session:
    """A member's line to the leader."""

    remote: str
    ready: Ready
    stream: Stream


@dataclass(kw_only=True)
class Leadership:
    """One term that this peer leads: its reduction perhaps before its turn, its votes at it."""

    ctx: Context
    voter: Voter
    leads: Leads
    place: Place
    term: int
    check: Callable[[str, Ready], Awaitable[None]]
    """(member, its report): raises Refused if the member may not take part"""
    begun_by: str = ""
    """PeerID of its first caller"""
    exchange: Exchange | None = None
    """this peer's own part in the reduction, if it is a member of the group"""
    sessions: dict[str, Session] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        """Begin; Refused if it is the position's turn and another's to lead."""
        rules = Rules(
            form=lambda ready: form_group(self.ctx, self.place, self.term, ready),
            entry=self._entry,
            cells=self.ctx.replay.cells_at(self.place.position),
            grace_s=self.ctx.settings.grace_s,
            electors=self.ctx.settings.electors,
        )
        self.round = Round(
            self.place, self.term, leads=self.leads, rules=rules, view=self._log_view()
        )
        self._polls = Polls(
            self.ctx, self.voter, self.place, is_live=self.round.is_live, take=self._take
        )
        self._lost = asyncio.Event()
        """set when a session ends: its member may be an elector that no longer answers"""
        self._tasks = Tasks()
        self._helper: asyncio.Task[None] | None = None
        self._helped = RoundState.DECIDED
        self._delivery: Delivery | None = None
        self._promised: dict[str, float] = {}
        """by peer that was asked: when it expects to be ready; infinite if it does not say"""
        self._silent: frozenset[str] = frozenset()
        """electors that this entry may drop"""
        self._overdue: set[str] = set()
        """owners that have lost a part, which is one fault however many they lose"""
        self._outcome: Decision | None = None

    async def serve(self, remote: str, ready: Ready, stream: Stream) -> None:
        """Hold a member's session until it ends.

        Raises:
            Refused: the group is closed.
        """
        readmitted = self._take(Reported(peer=remote, ready=ready))
        session = Session(remote=remote, ready=ready, stream=stream)
        self.sessions[remote] = session
        left: list[Action] = []
        try:
            async with beside(self._send_alive(session)):
                is_cut_off = False
                try:
                    await self._do_all(readmitted)
                    is_cut_off = await self._listen(session)
                finally:
                    left = self._end_session(session, is_cut_off=is_cut_off)
        finally:
            await self._do_all(left)

    def _end_session(self, session: Session, *, is_cut_off: bool) -> list[Action]:
        """Count the member as gone unless it has reported again, or may do so."""
        if self.sessions[session.remote] is not session:
            return []
        self._lost.set()
        actions = self._take(Left(peer=session.remote, is_cut_off=is_cut_off))
        if self._delivery is not None:
            self._delivery.gone(session.remote)
        return actions

    async def run(self) -> Decision:
        """Lead to a certificate.

        Raises:
            AttemptFailed: a later ballot took over, or no quorum answered.
        """
        try:
            async with beside(self._watch_log()):
                while True:
                    while actions := self.round.advance(self._view()):
                        await self._do_all(actions)
                    if self._outcome is not None:
                        return self._outcome
                    await self._help()
                    await self._await_change(self.ctx.alive_s)
                    self._polls.check()
                    if self._helper is not None and self._helper.done():
                        self._helper.result()
        finally:
            await self._polls.stop()
            await self._end_help()

    async def until_left(self) -> None:
        """Wait until the members have heard of the decision and ended their sessions, or a while.

        A session that ended before would look to its member like the leader's death.
        """
        deadline = self.ctx.now() + LEAVE_STALLS * self.ctx.settings.stall_s
        while self.round.live and self.ctx.now() < deadline:
            await self._await_change(self.ctx.alive_s)

    async def close(self) -> None:
        """End all sessions, and let go of the exchange.

        A leadership is a cycle of references: what it holds stays until the collector comes by,
        which may be many rounds later, and an exchange has some bytes for each value.
        """
        for session in list(self.sessions.values()):
            await session.stream.close()
        self.exchange = None
        await self._tasks.close()

    # views for the machine

    def _electorate(self) -> Sequence[Elector]:
        return self.round.electorate(self._log_view())

    def _log_view(self) -> LeaderView:
        replica = self.ctx.replica
        turn = (replica.epoch, replica.position) == self.place
        return LeaderView(
            now=self.ctx.now(),
            turn=turn,
            promised_term=self.voter.term if turn else 0,
            electorate=tuple(replica.electorate),
            opened_at=replica.moved_at,
            last_s=replica.stood_s,
        )

    def call(self) -> None:
        """Begin for an order, whoever reports."""
        self._take(LeaderAbsent())

    def _control(self) -> Entry | None:
        """Return the entry that brings the next order, if one waits."""
        replica, order = self.ctx.replica, self.ctx.next_order()
        if order is None or (replica.epoch, replica.position) != self.place:
            return None
        return self._entry("control", (), (), (), order=order)

    def _view(self) -> LeaderView:
        view, parts = self._log_view(), self.round.parts
        settings = self.ctx.replica.settings
        view = replace(
            view,
            control=self._control(),
            takes_updates=settings.takes_updates(self.place.position),
            evicted=frozenset(settings.evicted),
        )
        if parts is None:
            return view
        exchange, done = self.exchange, parts.done.items()
        indices = range(len(parts)) if exchange is not None else ()
        return replace(
            view,
            held=frozenset(index for index, word in done if self._holds(index, word)),
            coming=frozenset(i for i in indices if exchange is not None and exchange.busy(i)),
        )

    def _holds(self, index: int, done: PartDone) -> bool:
        """Return whether a part is here: as long as its owner said, and decoded as its cells.

        Its owner may have named the bytes of another part.
        """
        if self.round.group is None:
            return False
        plan, held = self.round.group.parts[index], self.ctx.parts
        cells = plan.start_cell, plan.stop_cell
        decoded = held.decoded(self.place.position, done.digest, cells)
        return decoded is not None and held.holds(done.digest, done.wire_bytes)

    def _entry(
        self,
        kind: EntryKind,
        members: Sequence[Member],
        parts: Sequence[Part],
        dropped: Collection[str],
        *,
        order: bytes = b"",
    ) -> Entry:
        replica, position = self.ctx.replica, self.place.position
        settings = replica.settings
        if order:
            settings = settings.after(replica.open_order(order, settings.key), position)
        lr, momentum = self.ctx.scalars(position)
        root = replica.root_due(position)
        group = self.round.group
        voters = succeed(
            replica.voters,
            position=position,
            fragment=self.ctx.replay.fragment_at(position),
            members=members,
            parts=parts,
            dropped=dropped,
            evicted=settings.evicted,
            electors=self.ctx.settings.electors,
        )
        return Entry(
            run_id=replica.run_id,
            epoch=self.place.epoch,
            position=position,
            kind=kind,
            previous_chain=replica.chain,
            fragment=self.ctx.replay.fragment_at(position),
            lr=lr,
            momentum=momentum,
            members=tuple(members),
            parts=tuple(parts),
            reports=reports_root(group.reports) if members and group is not None else b"",
            electorate=voters.electorate,
            newcomers=voters.newcomers,
            norms=voters.norms,
            state_root=StateRoot(position=root[0], root=root[1]) if root else None,
            order=order,
            settings=settings.stored,
            units=units_after(
                replica.standing.units or b"",
                position=position,
                members=members,
                parts=parts,
                electorate=voters.electorate,
                evicted=settings.evicted,
                total=replica.module.units,
            ),
        )

    # events for the machine

    def _take(self, event: Event) -> list[Action]:
        actions = self.round.receive(event)
        self.changed.set()
        return actions

    async def _watch_log(self) -> None:
        """Look again when an entry is applied: the turn comes, or another electorate."""
        while True:
            await self.ctx.replica.passed(self.ctx.replica.position)
            self.changed.set()

    async def _help(self) -> None:
        """Keep asking others as long as the machine waits for what they say."""
        if self.round.state is self._helped:
            return
        await self._end_help()
        self._helped = self.round.state
        if self._helped is RoundState.CALLED:
            self._begin_help(self._await_call())
        elif self._helped is RoundState.FORMING:
            self._begin_help(self._probe())
        elif self._helped is RoundState.REDUCING:
            self._begin_help(self._probe_electors())

    def _begin_help(self, work: Coroutine[Any, Any, None]) -> None:
        self._helper = asyncio.create_task(work)
        self._helper.add_done_callback(lambda _: self.changed.set())  # `run` raises its failure

    async def _end_help(self) -> None:
        if self._helper is not None:
            await end(self._helper)
            self._helper = None

    async def _await_call(self) -> None:
        """Probe trainers as well if they are whose call counts."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._await_absence())
            if self.ctx.settings.electors == "keepers":
                group.create_task(self._probe())

    async def _await_absence(self) -> None:
        leader = leader_of(self._electorate(), self.place.position, self.term - 1).peer_id
        while leader != self.ctx.me.peer_id and await ask_head(self.ctx, leader) is not None:
            await asyncio.sleep(PROBE_S)
        self._take(LeaderAbsent())

    async def _probe(self) -> None:
        while True:
            self._take(Probed(ready_at=await self._ask_trainers()))
            await asyncio.sleep(PROBE_S)

    async def _probe_electors(self) -> None:
        """Keep asking the electors that are not in the group: those that answer vote on."""
        while True:
            asked = [e for e in self._electorate() if not self.round.is_live(e.peer_id)]
            asked = [e for e in asked if e != self.ctx.me]
            heads = await together(*(ask_head(self.ctx, e.peer_id) for e in asked))
            await self._note_electors(dict(zip((e.peer_id for e in asked), heads, strict=True)))
            with suppress(TimeoutError):
                async with asyncio.timeout(PROBE_S):
                    await self._lost.wait()
            self._lost.clear()

    async def _note_electors(self, heads: Mapping[str, Head | None]) -> None:
        """Take those as silent that a quorum calls so: it then votes for an entry without them."""
        silent = [
            elector
            for elector in self._electorate()
            if elector.peer_id in heads
            and not stands_at(elector, heads[elector.peer_id], self.place)
        ]
        peers = frozenset(elector.peer_id for elector in silent)
        if not peers <= self._silent:
            heard = await self._ask_who_is_heard(silent)
            trust = self.ctx.replica.trust
            self._silent = agreed_silent(self._electorate(), peers, heard, trust)
        self._take(ElectorsProbed(silent=self._silent & peers))

    async def _ask_who_is_heard(self, silent: Sequence[Elector]) -> dict[str, frozenset[str]]:
        """Return which of some electors the others hear, by PeerID of those that answer."""
        ask = AskHeard(
            epoch=self.place.epoch,
            position=self.place.position,
            peers=tuple(elector.peer_id for elector in silent),
        )
        asked = [e.peer_id for e in self._electorate() if e not in silent]
        answers = await together(*(self._ask_heard(peer, ask, silent) for peer in asked))
        return {p: heard for p, heard in zip(asked, answers, strict=True) if heard is not None}

    async def _ask_heard(
        self, peer: str, ask: AskHeard, silent: Sequence[Elector]
    ) -> frozenset[str] | None:
        if peer == self.ctx.me.peer_id:
            return frozenset(await self.voter.heard(silent, self.place.position))
        timeout_s = HEAD_STALLS * self.ctx.settings.stall_s
        with suppress(TransportError, ValueError):
            answer = await self.ctx.transport.call(peer, "heard", ask.encode(), timeout_s=timeout_s)
            return frozenset(Heard.decode(answer).peers)
        return None

    async def _ask_trainers(self) -> dict[str, float]:
        """Return when each trainer that stands here expects to be ready, on the leader's clock.

        The roster is some seconds old, so each one is asked. At the beginning of an epoch it may
        show nobody, so the electorate is asked too.
        """
        me = self.ctx.me.peer_id
        records = await self.ctx.roster_peers()
        trainers = {peer for peer, record in records.items() if record.role == "trainer"}
        trainers |= {elector.peer_id for elector in self._electorate()}
        trainers -= {me}
        here = trainers & set(self.round.live)
        asked = self._due_for_probe(trainers - here)
        heads = await together(*(ask_head(self.ctx, peer) for peer in asked))
        await self._note_electors(dict(zip(asked, heads, strict=True)))
        now = self.ctx.now()
        for peer, head in zip(asked, heads, strict=True):
            self._promised.pop(peer, None)  # those that were asked last come last
            self._promised[peer] = now + self._comes_in_s(head)
        ready_at = dict.fromkeys(sorted(here), now)
        for peer in sorted(trainers - here):
            if self.ctx.conduct.barred(peer, now) is not None:
                continue  # its report would be refused
            promised = self._promised.get(peer, math.inf)
            if promised < math.inf and self.ctx.promises.believes(peer):
                ready_at[peer] = promised
        ready_in_s = self.ctx.ready_in_s()
        if ready_in_s is not None:  # a leader may lead a group that it is not a member of
            ready_at[me] = now + ready_in_s
        return ready_at

    def _comes_in_s(self, head: Head | None) -> float:
        """Return when a peer expects to be ready; infinite if it takes no part here."""
        least = self.ctx.replica.position - DECISION_UNDER_WAY
        is_here = head is not None and head.role == "trainer" and head.position >= least
        return head.ready_in_s if head is not None and is_here else math.inf

    def _due_for_probe(self, trainers: Collection[str]) -> list[str]:
        """Return those to ask now: electors, those never asked, and some of the others in turn."""
        electors = {elector.peer_id for elector in self._electorate()}
        again = [peer for peer in self._promised if peer in trainers and peer not in electors]
        return sorted(set(trainers) - set(again[MAX_PROBED:]))

    async def _listen(self, session: Session) -> bool:
        """Take what a member sends, until its session ends; return whether a relay was lost."""
        try:
            while True:
                message = await session.stream.recv(timeout_s=self.ctx.settings.stall_s)
                if message is None:
                    return False
                if message[:1] == PART_DONE:
                    done = PartDone.decode(message[1:])
                    self._take(PartReduced(peer=session.remote, done=done))
                elif message[:1] == SEATED and self._delivery is not None:
                    self._delivery.note(session.remote, Seated.decode(message[1:]).group)
                elif message[:1] == READY:
                    await self._take_turn(session.remote, Ready.decode(message[1:]))
        except TransportError as error:
            return isinstance(error, RELAY_LOST)

    async def _take_turn(self, remote: str, ready: Ready) -> None:
        """Take a member's report that the position's turn has come at its place in the log.

        Raises:
            Refused: it has not come here, and does not soon: the next leader tries.
        """
        if (ready.epoch, ready.position, ready.term) != (*self.place, self.term):
            raise Refused(RefusalCode.BAD_READY, f"expected a report at {tuple(self.place)}")
        await self.check(remote, ready)

    # actions of the machine

    async def _do_all(self, actions: Sequence[Action]) -> None:
        for action in actions:
            await self._do(action)

    async def _do(self, action: Action) -> None:
        match action:
            case CloseGroup():
                await self._deliver(action)
            case TellGone():
                await self._broadcast(GONE, Gone(member=action.member))
            case Readmit():
                await self._readmit(action)
            case RepairPart():
                await self._repair(action)
            case Fetch():
                self._tasks.spawn(self._fetch(action))
            case AskPromises() | SendProposal() | SendLock():
                self._polls.ask(action, self._electorate())
            case StopPoll():
                await self._polls.stop()
            case ReportArrived():
                self.ctx.on_event(action.level, action.notice)
            case Decide():
                self._outcome = Decision(entry=action.entry, certificate=action.certificate)
            case Fail():
                raise AttemptFailed(action.why)

    async def _deliver(self, action: CloseGroup) -> None:
        self._polls.know_group(action.group)
        self.ctx.parts.keep_group(action.group.digest, action.group)
        self._delivery = Delivery(
            self.ctx, action.group, uplinks_mbit_s=action.uplinks_mbit_s, send=self._send_group
        )
        for peer in sorted(action.broke - {self.ctx.me.peer_id}):
            if self.ctx.promises.broke(peer):
                self.ctx.on_event("warning", notices.broke_promise(peer=peer))
        await self._delivery.begin()
        self._tasks.spawn(self._delivery.run())
        if is_large(len(action.group.members)):
            self.ctx.parts.keep_reports(action.group.position, action.group.reports)
            acceptors = [elector.peer_id for elector in self._electorate()]
            self._tasks.spawn(seal(self.ctx, action.group, acceptors))

    async def _readmit(self, action: Readmit) -> None:
        session = self.sessions[action.peer]
        if self._delivery is not None:
            await self._send(session, GROUP, self._delivery.closed)
        for member in action.gone:
            await self._send(session, GONE, Gone(member=member))
        for order in action.orders:
            await self._send(session, REPAIR, order)

    async def _repair(self, action: RepairPart) -> None:
        reassigned = notices.part_reassigned(
            round=self.place.position + 1, part=action.order.part, peer=action.owner
        )
        self.ctx.on_event("warning", reassigned)
        if action.overdue and self.exchange is None and action.overdue not in self._overdue:
            self._overdue.add(action.overdue)  # else its own exchange notes it
            self.ctx.note_idle_owner(action.overdue)
        await self._broadcast(REPAIR, action.order)

    async def _fetch(self, action: Fetch) -> None:
        digest = action.done.digest
        # An owner may lie: voters would blame this leader for a part that does not decode.
        with suppress(TransportError, UpdateError):
            body = await fetch_part(self.ctx, action.members, digest, action.done.wire_bytes)
            if self.round.group is not None:
                cells = self.ctx.replay.cells_at(self.place.position)
                plan, members = self.round.group.parts[action.part], self.round.group.members
                where = plan.start_cell, plan.stop_cell
                values = await self.ctx.compute(cells.decode_part, body, len(members), *where)
                self.ctx.parts.put(self.place.position, digest, body, Decoded(*where, values))
        self._take(FetchEnded(part=action.part, digest=digest))

    async def _send_alive(self, session: Session) -> None:
        while True:
            await asyncio.sleep(self.ctx.alive_s)
            await session.stream.send(ALIVE, timeout_s=self.ctx.settings.stall_s)

    async def _send_group(self, member: str, closed: Closed) -> None:
        await self._send(self.sessions[member], GROUP, closed)

    async def _broadcast(self, kind: bytes, record: Repair | Gone) -> None:
        live = [self.sessions[peer] for peer in self.round.live]
        await together(*(self._send(session, kind, record) for session in live))

    async def _send(self, session: Session, kind: bytes, record: Closed | Repair | Gone) -> None:
        try:
            await session.stream.send(tagged(kind, record), timeout_s=self.ctx.settings.stall_s)
        except RELAY_LOST:
            pass  # the session ends by itself, and the member may report again
        except TransportError:
            if self.sessions[session.remote] is session:
                self._take(Unreachable(peer=session.remote))

    async def _await_change(self, timeout_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.changed.wait()
        self.changed.clear()


OnLed = Callable[[Entry, Certificate, Bytes], None]
"""(entry, certificate, body) of what was led here to its certificate."""

Reach = Callable[[int], Awaitable[None]]
"""Waits a moment until this peer stands at a position, and looks for what it misses."""

Commit = Callable[[Entry, Certificate, Bytes], Awaitable[None]]


class Leading:
    """Leaderships by (epoch, position, term)."""

    def __init__(
        self,
        ctx: Context,
        voter: Voter,
        *,
        dissemination: Dissemination,
        reach: Reach,
        commit: Commit,
        on_led: OnLed,
        ballots: Ballots | None = None,
    ) -> None:
        """`commit` applies an entry here; `on_led` gets it after that.

        `ballots` remembers where this elector may have proposed.
        """
        self._ctx = ctx
        self._voter = voter
        self._dissemination = dissemination
        self._reach = reach
        self._ahead = positions_ahead(len(ctx.replay.fragments))
        self._commit = commit
        self._on_led = on_led
        self._leads = Leads(ctx.me, ballots, ctx.replica.trust)
        self._leaderships: dict[tuple[int, int, int], Leadership] = {}
        self._tasks = Tasks()

    def at(self, place: Place, term: int) -> Leadership | None:
        """The leadership of a term, if it is under way here."""
        return self._leaderships.get((place.epoch, place.position, term))

    def left_out(self, place: Place) -> dict[str, str]:
        """Return the peers without which groups of a position were closed, and why."""
        found: dict[str, str] = {}
        for (epoch, position, _), leadership in self._leaderships.items():
            if (epoch, position) == place:
                found |= leadership.round.left_out
        return found

    async def close(self) -> None:
        """End everything that is under way."""
        for leadership in list(self._leaderships.values()):
            await leadership.close()
        await self._tasks.close()

    def line_to_myself(self) -> Stream:
        """A stream by which this peer is a member of a term that it leads."""
        here, there = stream_pair(self._ctx.me.peer_id, "round")
        self._tasks.spawn(self._serve_myself(there))
        return here

    async def _serve_myself(self, stream: LocalStream) -> None:
        try:
            await self.serve(self._ctx.me.peer_id, stream)
        except Refused as error:
            stream.refuse(error)
        except TransportError:
            pass
        finally:
            await stream.close()

    async def serve(self, remote: str, stream: Stream) -> None:
        """Take a member's report, and hold its session.

        Raises:
            Refused: with the reason.
        """
        message = await stream.recv(timeout_s=self._ctx.settings.stall_s)
        if message is None or message[:1] != READY:
            raise Refused(RefusalCode.BAD_READY, "expected a Ready record first")
        ready = Ready.decode(message[1:])
        await self._check(remote, ready)
        replica = self._ctx.replica
        place = Place(ready.epoch, ready.position)
        self._leads.check(place, ready.term, replica.electorate)
        self._voter.expect_near(ready.term)
        if ready.position == replica.position and ready.term < self._voter.term:
            raise Refused(RefusalCode.SUPERSEDED, f"term {self._voter.term} is under way")
        await self._lead(remote, place, ready.term).serve(remote, ready, stream)

    async def _check(self, remote: str, ready: Ready) -> None:
        barred = self._ctx.conduct.barred(remote, self._ctx.now())
        if barred is not None:
            raise Refused(RefusalCode.BARRED, str(barred))
        if ready.protocol != PROTOCOL:
            raise Refused(
                RefusalCode.PROTOCOL, f"expected protocol {PROTOCOL}, got {ready.protocol}"
            )
        self._check_report(remote, ready)
        await self._check_place(ready)
        self._check_units(remote, ready)

    def _check_report(self, remote: str, ready: Ready) -> None:
        """Check a report as voters will; the weight is 0, or follows from the work."""
        report = ready.report
        due = work_weight(report.tokens, report.steps, self._ctx.replay.method.weights)
        # Others take -0.0 for 0: for them its sender would have signed another report.
        if report.weight not in (0.0, due) or math.copysign(1.0, report.weight) < 0:
            self._ctx.fault(remote, Fault.BAD_WEIGHT)
            raise Refused(
                RefusalCode.BAD_WEIGHT,
                f"expected a weight of 0 or {due:g} for {report.tokens} tokens in {report.steps} "
                f"steps, got {report.weight:g}",
            )
        payload = report_payload(self._ctx.replica.run_id, report)
        if not self._ctx.verify(remote, payload, ready.signature):
            self._ctx.fault(remote, Fault.BAD_REPORT)
            raise Refused(RefusalCode.BAD_READY, "expected a report that its sender signed")

    def _check_units(self, remote: str, ready: Ready) -> None:
        """Refuse a report that names other units than its sender holds.

        An entry with it would be invalid. It is no fault: the sender may have lost its lease with
        an entry that it has not seen.
        """
        replica, report = self._ctx.replica, ready.report
        held = 0
        if replica.module.units:
            held = count_of(read_units(replica.standing.units or b"").held_by(remote))
        counts = report.weight > 0 if replica.module.units else report.units > 0
        try:
            expect_held(remote, report.units, held, counts=counts)
        except UnitsInvalid as error:
            raise Refused(RefusalCode.BAD_UNITS, str(error)) from error

    async def _check_place(self, ready: Ready) -> None:
        """Raise Refused unless both stand on one log, at the position or a little before it."""
        replica = self._ctx.replica
        await self._reach(ready.stands_at)
        if replica.position > ready.position:
            raise Refused(
                RefusalCode.DECIDED, f"expected a report at {replica.position} or beyond it"
            )
        same = (replica.position, replica.chain) == (ready.stands_at, ready.chain)
        on_the_log = replica.epoch == ready.epoch and (same or ready.stands_at < replica.position)
        near = ready.stands_at <= ready.position <= ready.stands_at + self._ahead
        first = ready.term == 0 or ready.position == replica.position
        if not (on_the_log and near and first):
            raise Refused(
                RefusalCode.ELSEWHERE,
                f"this peer is at (epoch, position) {(replica.epoch, replica.position)} and takes "
                f"at most {self._ahead} ahead of it, got {(ready.epoch, ready.position)} "
                f"from {ready.stands_at}; fetch the missing entries",
            )

    def bring_order(self, place: Place, term: int) -> None:
        """Lead a term of ours for an order, whether or not anybody reports.

        Raises:
            Refused: it is not ours to lead.
        """
        self._leads.check(place, term, self._ctx.replica.electorate)
        self._lead(self._ctx.me.peer_id, place, term).call()

    def _lead(self, remote: str, place: Place, term: int) -> Leadership:
        """Return the leadership of a term of ours; it starts with the first call.

        Raises:
            Refused: the caller has begun too many.
        """
        key = (place.epoch, place.position, term)
        if key not in self._leaderships:
            begun = sum(one.begun_by == remote for one in self._leaderships.values())
            if remote != self._ctx.me.peer_id and begun >= MAX_BEGUN:
                raise Refused(
                    RefusalCode.BUSY, f"you have begun {begun} terms here that are not over"
                )
            leadership = Leadership(
                ctx=self._ctx,
                voter=self._voter,
                leads=self._leads,
                place=place,
                term=term,
                check=self._check,
                begun_by=remote,
            )
            self._leaderships[key] = leadership
            self._tasks.spawn(self._run(key, leadership))
        return self._leaderships[key]

    async def _run(self, key: tuple[int, int, int], leadership: Leadership) -> None:
        try:
            outcome = await race(
                leadership.run(), self._await_end(leadership), expected=(AttemptFailed,)
            )
            if outcome is None:
                return
            announced = self._tasks.spawn(
                self._announce(leadership, outcome.entry, outcome.certificate)
            )
            body = await self._voter.gather(outcome.entry, self._ctx.me.peer_id)
            await self._commit(outcome.entry, outcome.certificate, body)
            self._on_led(outcome.entry, outcome.certificate, body)
            await announced
            await leadership.until_left()
        except (AttemptFailed, TransportError, ValueError) as error:
            # An entry before the position may name another leader for it, which is no failure.
            if not (isinstance(error, Refused) and error.code is RefusalCode.NOT_THE_LEADER):
                self._voter.give_up(leadership.place, leadership.term)
                self._ctx.on_event(
                    "warning",
                    notices.own_term_failed(round=key[1] + 1, term=key[2], reason=str(error)),
                    key=("own term failed", key[1], failure_key(error)),
                )
        finally:
            self._leaderships.pop(key, None)  # first, so that nobody joins what is over
            await leadership.close()

    async def _await_end(self, leadership: Leadership) -> None:
        """Return once the position is decided, its epoch over, or another elector to lead it."""
        replica, place = self._ctx.replica, leadership.place
        with suppress(Refused):
            while replica.epoch == place.epoch and replica.position <= place.position:
                self._leads.check(place, leadership.term, replica.electorate)
                await replica.passed(replica.position)

    async def _announce(
        self, leadership: Leadership, entry: Entry, certificate: Certificate
    ) -> None:
        decided = Decided(entry=entry.encode(), certificate=certificate.encode())
        live = sorted(leadership.round.live)  # first: they surely live, and pass it on
        others = set(leadership.sessions) | set(self._ctx.seen)
        others |= {elector.peer_id for elector in entry.electorate}
        await self._dissemination.tell(decided, [*live, *sorted(others)])


def form_group(ctx: Context, place: Place, term: int, ready: Mapping[str, Ready]) -> Group:
    """The group of these members, in their order."""
    cells = ctx.replay.cells_at(place.position)
    stall_s = ctx.settings.stall_s
    reports = [(peer, one.report) for peer, one in ready.items()]
    return Group(
        epoch=place.epoch,
        position=place.position,
        term=term,
        members=tuple(
            admit(
                reports,
                clip_at=ctx.replay.method.clip_at,
                carried=ctx.carried_norm(place.position),
            )
        ),
        reports=tuple(
            Sworn(
                counts=one.report.weight > 0,
                uplink_mbit_s=one.report.uplink_mbit_s,
                signature=one.signature,
            )
            for one in ready.values()
        ),
        parts=tuple(_cut(ctx, place.position, ready)),
        stall_s=stall_s,
        deadline_s=round_deadline_s(
            cells.max_body_bytes(len(ready)),
            slowest_mbit_s([report.uplink_mbit_s for _, report in reports]),
            stall_s,
            before=max(0, place.position - ctx.replica.position),
        ),
    )


def _cut(ctx: Context, position: int, ready: Mapping[str, Ready]) -> Sequence[PartPlan]:
    """Cut the parts as the last entry did, if its owners are here and that is no worse."""
    sizes = ctx.replay.cells_at(position).sizes
    rates = [_rate_mbit_s(ctx, peer, one.report) for peer, one in ready.items()]
    can_own = _may_own(ctx, ready)
    best = split_cells(sizes, rates, can_own)
    expected = expected_plan(ctx, position)
    place = {
        peer: index for index, (peer, can) in enumerate(zip(ready, can_own, strict=True)) if can
    }
    if expected is None or not {part.owner for part in expected.parts} <= set(place):
        return best
    last = [
        PartPlan(start_cell=part.start_cell, stop_cell=part.stop_cell, owner=place[part.owner])
        for part in expected.parts
    ]
    even = split_cells(sizes, [1.0] * len(ready), can_own)
    turn = position // len(ctx.replay.fragments)
    return kept_parts(last, best, even, rates, turn=turn, megabits=8e-6 * sum(sizes))


def _may_own(ctx: Context, ready: Mapping[str, Ready]) -> list[bool]:
    records = (ctx.seen.get(peer) for peer in ready)
    is_dialed = [record is None or record.is_dialed for record in records]
    lags = [ctx.lags.barred(peer, ctx.now()) is not None for peer in ready]
    return may_own(is_dialed, [one.report.uplink_mbit_s for one in ready.values()], lags)


def _rate_mbit_s(ctx: Context, peer: str, report: Report) -> float:
    """Return the rate of the slower direction; a downlink counts only if it is declared."""
    record = ctx.seen.get(peer)
    downlink = record.downlink_mbit_s if record is not None else 0.0
    return min(report.uplink_mbit_s, downlink or math.inf)


Queue = asyncio.Queue[bytes | Refused | None]


class LocalStream:
    """One end of a stream from a peer to itself, as `atoll.dht.transport.Stream` has it."""

    def __init__(
        self,
        remote: str,
        method: str,
        inbox: Queue,
        outbox: Queue,
    ) -> None:
        """Use `stream_pair` instead."""
        self.remote = remote
        self.method = method
        self._inbox = inbox
        self._outbox = outbox
        self._ended = False

    async def send(self, data: bytes | bytearray | memoryview, *, timeout_s: float) -> None:
        """Never blocks: the other end is in this process."""
        self._outbox.put_nowait(bytes(data))

    async def recv(self, *, timeout_s: float) -> bytes | None:
        """The next message, or None at the end."""
        try:
            async with asyncio.timeout(timeout_s):
                message = await self._inbox.get()
        except TimeoutError:
            raise DeadlineExceeded(f"no message for {timeout_s:.1f} s", peer=self.remote) from None

        if isinstance(message, Refused):
            raise message
        return message

    def refuse(self, error: Refused) -> None:
        """End the stream with a refusal, as a handler that raises it does."""
        self._outbox.put_nowait(error)

    async def end(self, *, timeout_s: float) -> None:
        """Say that nothing more will be sent."""
        if not self._ended:
            self._ended = True
            self._outbox.put_nowait(None)

    async def close(self) -> None:
        """End both directions."""
        await self.end(timeout_s=0)
        self._inbox.put_nowait(None)

    async def __aenter__(self) -> Self:
        """The stream."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        await self.close()


def stream_pair(peer: str, method: str) -> tuple[LocalStream, LocalStream]:
    """Two ends; what one sends the other receives."""
    first: Queue = asyncio.Queue()
    second: Queue = asyncio.Queue()
    return LocalStream(peer, method, first, second), LocalStream(peer, method, second, first)
