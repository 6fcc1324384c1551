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

`Leading` (`leading.py`) holds the leaderships of this peer; `Leadership` is one of them. `Polls`
(`polls.py`) asks electors for promises and votes, and `forming.py` forms the group.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from atoll.dht.refusals import RefusalCode
from atoll.dht.tasks import Tasks, beside, end, together
from atoll.dht.transport import RELAY_LOST, Refused, Stream, TransportError
from atoll.optim.log.electorate import succeed
from atoll.optim.log.entry import Certificate, Elector, Entry, EntryKind, Member, Part, StateRoot
from atoll.optim.log.units import units_after
from atoll.optim.reduction.cells import UpdateError
from atoll.peer.rounds import notices
from atoll.peer.rounds.allreduce.exchange import Exchange
from atoll.peer.rounds.consensus.ballots import Leads, Place, leader_of
from atoll.peer.rounds.consensus.dissemination import Delivery, seal
from atoll.peer.rounds.consensus.forming import form_group
from atoll.peer.rounds.consensus.polls import PROBE_S, Polls
from atoll.peer.rounds.consensus.round import Round, RoundState, Rules
from atoll.peer.rounds.consensus.round_events import (
    Action,
    AskPromises,
    CloseGroup,
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
    Probed,
    Readmit,
    RepairPart,
    ReportArrived,
    Reported,
    SendLock,
    SendProposal,
    StopPoll,
    TellGone,
    Unreachable,
)
from atoll.peer.rounds.consensus.voter import Voter
from atoll.peer.rounds.context import (
    DECISION_UNDER_WAY,
    HEAD_STALLS,
    AttemptFailed,
    Context,
    Decoded,
    ask_head,
    stands_at,
)
from atoll.peer.rounds.fetching import fetch_part
from atoll.peer.rounds.messages import (
    ALIVE,
    GONE,
    GROUP,
    PART_DONE,
    READY,
    REPAIR,
    SEATED,
    AskHeard,
    Closed,
    Gone,
    Head,
    Heard,
    PartDone,
    Ready,
    Repair,
    Seated,
    is_large,
    reports_root,
    tagged,
)
from atoll.peer.rounds.policies import agreed_silent

CATCHES_UP = 4  # entries that a trainer may lack and be waited for by a peer that is ready alone
MAX_PROBED = 64  # trainers that are asked again in one probe; admitted keys may be many
LEAVE_STALLS = 2  # a decision that goes from peer to peer takes a second among a thousand


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
        self._behind: set[str] = set()
        """trainers that lacked several entries when they were asked last, and may catch up"""
        self._arriving: set[str] = set()
        """those that were among them at any time, whose promises here were about that too"""
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
            ready_at = await self._ask_trainers()
            self._take(Probed(ready_at=ready_at, behind=frozenset(self._behind)))
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
            self._promised[peer] = now + self._comes_in_s(peer, head)
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

    def _comes_in_s(self, peer: str, head: Head | None) -> float:
        """Return when a peer expects to be ready; infinite if it takes no part here."""
        self._behind.discard(peer)
        if head is None or head.role != "trainer":
            return math.inf
        lacks = self.ctx.replica.position - head.position
        if lacks > DECISION_UNDER_WAY:
            if not self._may_catch_up(peer, lacks):
                return math.inf
            self._behind.add(peer)
            self._arriving.add(peer)
        return head.ready_in_s

    def _may_catch_up(self, peer: str, lacks: int) -> bool:
        """Return whether the group waits for a trainer that lacks several entries.

        A peer that is ready alone decides as fast as its processor can, and others with the same
        processor take in entries no faster: they would stay behind for good.
        """
        is_one = len(self.round.live) <= 1
        return is_one and lacks <= CATCHES_UP and self.ctx.arrivals.believes(peer)

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
            if peer in self._arriving:
                self.ctx.arrivals.broke(peer)
            elif self.ctx.promises.broke(peer):
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
