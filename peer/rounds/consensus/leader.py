"""The leader of one term at one position: the driver of its `Round`.

A leadership begins with the first peer that reports ready, whether or not the leader itself is
ready; it may lead a group that it is not a member of. It owns the members' sessions and all tasks
of the term; what is done, and when, the machine in `round.py` decides. All waits are bounded:
sessions by signs of life, the group by the grace, the reduction by the group's deadline, votes by
their calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from atoll.dht.identity import short
from atoll.dht.refusals import RefusalCode
from atoll.dht.tasks import Tasks, beside, end
from atoll.dht.transport import Refused, Stream, TransportError
from atoll.optim.log.entry import (
    Certificate,
    Elector,
    Entry,
    Member,
    Part,
    StateRoot,
    next_electorate,
)
from atoll.peer.rounds.allreduce.exchange import Exchange
from atoll.peer.rounds.consensus.ballot import Leads, Place, leader_of
from atoll.peer.rounds.consensus.closing import Delivery
from atoll.peer.rounds.consensus.expected import PROBE_S, Expected
from atoll.peer.rounds.consensus.forming import form_group
from atoll.peer.rounds.consensus.member import AttemptFailed
from atoll.peer.rounds.consensus.parts import Fetch, FetchEnded, RepairPart
from atoll.peer.rounds.consensus.polls import Polls, ask_head
from atoll.peer.rounds.consensus.round import (
    Action,
    AskPromises,
    CloseGroup,
    Decide,
    Event,
    Fail,
    Kind,
    LeaderAbsent,
    LeaderView,
    Left,
    PartReduced,
    Probed,
    ReportArrived,
    Reported,
    Round,
    RoundState,
    Rules,
    SendProposal,
    StopPoll,
    TellGone,
    Unreachable,
)
from atoll.peer.rounds.consensus.voter import Voter
from atoll.peer.rounds.context import Context
from atoll.peer.rounds.fetching import fetch_part
from atoll.peer.rounds.messages import (
    ALIVE,
    GONE,
    GROUP,
    PART_DONE,
    READY,
    REPAIR,
    SEATED,
    Closed,
    Gone,
    PartDone,
    Ready,
    Repair,
    Seated,
    tagged,
)

LEAVE_STALLS = 2  # a decision that goes from peer to peer takes a second among a thousand

Check = Callable[[str, Ready], Awaitable[None]]
"""(member, its report): raises Refused."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
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
    check: Check
    """whether a member may take part"""
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
        )
        self.round = Round(
            self.place, self.term, leads=self.leads, rules=rules, view=self._log_view()
        )
        self._expected = Expected(
            self.ctx, electorate=self._electorate, ready=lambda: set(self.round.live)
        )
        self._polls = Polls(
            self.ctx, self.voter, self.place, is_live=self.round.is_live, take=self._take
        )
        self._tasks = Tasks()
        self._helper: asyncio.Task[None] | None = None
        self._helped = RoundState.DECIDED
        self._delivery: Delivery | None = None
        self._outcome: Outcome | None = None

    async def serve(self, remote: str, ready: Ready, stream: Stream) -> None:
        """Hold a member's session until it ends.

        Raises:
            Refused: the group is closed.
        """
        self._take(Reported(peer=remote, ready=ready))
        session = Session(remote=remote, ready=ready, stream=stream)
        self.sessions[remote] = session
        left: list[Action] = []
        try:
            async with beside(self._send_alive(session)):
                try:
                    await self._listen(session)
                finally:
                    left = self._end_session(session)
        finally:
            await self._do_all(left)

    def _end_session(self, session: Session) -> list[Action]:
        """The member counts as gone at once, unless it has reported anew."""
        if self.sessions[session.remote] is not session:
            return []
        actions = self._take(Left(peer=session.remote))
        if self._delivery is not None:
            self._delivery.gone(session.remote)
        return actions

    async def run(self) -> Outcome:
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
                    self._check_help()
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
        return LeaderView(
            now=self.ctx.now(),
            turn=(replica.epoch, replica.position) == self.place,
            electorate=tuple(replica.electorate),
            opened_at=replica.moved_at,
            last_s=replica.stood_s,
        )

    def _view(self) -> LeaderView:
        view, parts = self._log_view(), self.round.parts
        if parts is None:
            return view
        held, exchange = self.ctx.parts, self.exchange
        digests = parts.digests.items()
        indices = range(len(parts)) if exchange is not None else ()
        return replace(
            view,
            held=frozenset(i for i, digest in digests if held.body(digest) is not None),
            coming=frozenset(i for i in indices if exchange is not None and exchange.busy(i)),
        )

    def _entry(
        self,
        kind: Kind,
        members: Sequence[Member],
        parts: Sequence[Part],
        electorate: Sequence[Elector],
    ) -> Entry:
        replica, position = self.ctx.replica, self.place.position
        lr, momentum = self.ctx.scalars(position)
        root = replica.root_due(position)
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
            electorate=next_electorate(tuple(members), tuple(parts), tuple(electorate)),
            state_root=StateRoot(position=root[0], root=root[1]) if root else None,
        )

    # events for the machine

    def _take(self, event: Event) -> list[Action]:
        actions = self.round.receive(event)
        self.changed.set()
        return actions

    async def _watch_log(self) -> None:
        """The turn comes, or another electorate, as soon as an entry is applied."""
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
            self._helper = asyncio.create_task(self._await_absence())
        elif self._helped is RoundState.FORMING:
            self._helper = asyncio.create_task(self._probe())

    def _check_help(self) -> None:
        if self._helper is not None and self._helper.done():
            self._helper.result()

    async def _end_help(self) -> None:
        if self._helper is not None:
            await end(self._helper)
            self._helper = None

    async def _await_absence(self) -> None:
        leader = leader_of(self._electorate(), self.place.position, self.term - 1).peer_id
        while leader != self.ctx.me.peer_id and await ask_head(self.ctx, leader) is not None:
            await asyncio.sleep(PROBE_S)
        self._take(LeaderAbsent())

    async def _probe(self) -> None:
        while True:
            self._take(Probed(ready_at=await self._expected.ask()))
            await asyncio.sleep(PROBE_S)

    async def _listen(self, session: Session) -> None:
        with suppress(TransportError):
            while True:
                message = await session.stream.recv(timeout_s=self.ctx.settings.stall_s)
                if message is None:
                    return
                if message[:1] == PART_DONE:
                    done = PartDone.decode(message[1:])
                    self._take(PartReduced(peer=session.remote, done=done))
                elif message[:1] == SEATED and self._delivery is not None:
                    self._delivery.note(session.remote, Seated.decode(message[1:]).group)
                elif message[:1] == READY:
                    await self._take_turn(session.remote, Ready.decode(message[1:]))

    async def _take_turn(self, remote: str, ready: Ready) -> None:
        """A member reports that the position's turn has come at its place in the log.

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
            case RepairPart():
                await self._repair(action)
            case Fetch():
                self._tasks.spawn(self._fetch(action))
            case AskPromises() | SendProposal():
                self._polls.ask(action, self._electorate())
            case StopPoll():
                await self._polls.stop()
            case ReportArrived():
                self.ctx.on_event(action.level, action.text)
            case Decide():
                self._outcome = Outcome(entry=action.entry, certificate=action.certificate)
            case Fail():
                raise AttemptFailed(action.why)

    async def _deliver(self, action: CloseGroup) -> None:
        self._delivery = Delivery(
            self.ctx, action.group, uplinks_mbit_s=action.uplinks_mbit_s, send=self._send_group
        )
        await self._delivery.begin()
        self._tasks.spawn(self._delivery.run())

    async def _repair(self, action: RepairPart) -> None:
        text = (
            f"round {self.place.position + 1}: part {action.order.part} "
            f"goes to {short(action.owner)}"
        )
        self.ctx.on_event("warning", text)
        await self._broadcast(REPAIR, action.order)

    async def _fetch(self, action: Fetch) -> None:
        digest = action.done.digest
        with suppress(TransportError):
            body = await fetch_part(self.ctx, action.members, digest, action.done.wire_bytes)
            self.ctx.parts.put(self.place.position, digest, body)
        self._take(FetchEnded(part=action.part, digest=digest))

    async def _send_alive(self, session: Session) -> None:
        while True:
            await asyncio.sleep(self.ctx.alive_s)
            await session.stream.send(ALIVE, timeout_s=self.ctx.settings.stall_s)

    async def _send_group(self, member: str, closed: Closed) -> None:
        await self._send(self.sessions[member], GROUP, closed)

    async def _broadcast(self, kind: bytes, record: Repair | Gone) -> None:
        live = [self.sessions[peer] for peer in self.round.live]
        await asyncio.gather(*(self._send(session, kind, record) for session in live))

    async def _send(self, session: Session, kind: bytes, record: Closed | Repair | Gone) -> None:
        try:
            await session.stream.send(tagged(kind, record), timeout_s=self.ctx.settings.stall_s)
        except TransportError:
            if self.sessions[session.remote] is session:
                self._take(Unreachable(peer=session.remote))

    async def _await_change(self, timeout_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.changed.wait()
        self.changed.clear()
