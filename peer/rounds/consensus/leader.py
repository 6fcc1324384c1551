"""The leader of one term at one position: group, parts, repair, votes, certificate.

A leadership begins with the first peer that reports ready, whether or not the leader itself is
ready; it may lead a group that it is not a member of.  All its waits are bounded: sessions by signs
of life, the group by the grace, the reduction by the group's deadline, votes by their calls.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from atoll.dht.refusals import RefusalCode
from atoll.dht.tasks import beside, end, race
from atoll.dht.transport import Refused, Stream, TransportError
from atoll.optim.log.entry import (
    Elector,
    Entry,
    Member,
    Part,
    StateRoot,
    is_quorum,
    next_electorate,
)
from atoll.peer.rounds.consensus.ballot import TERM, Leads, Place, leader_of
from atoll.peer.rounds.consensus.closing import Delivery
from atoll.peer.rounds.consensus.expected import PROBE_S, Expected
from atoll.peer.rounds.consensus.forming import form_group
from atoll.peer.rounds.consensus.member import AttemptFailed
from atoll.peer.rounds.consensus.parts import Parts
from atoll.peer.rounds.consensus.voter import Voter
from atoll.peer.rounds.consensus.votes import Outcome, Votes, ask_head
from atoll.peer.rounds.context import Context
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
    Group,
    PartDone,
    Ready,
    Repair,
    Seated,
    tagged,
)
from atoll.peer.rounds.policies import (
    Close,
    Rendezvous,
    close_decision,
)

LEAVE_STALLS = 2  # a decision that goes from peer to peer takes a second among a thousand
ALONE_GRACES = 3  # graces after which a group without a quorum of electors closes all the same

Check = Callable[[str, Ready], Awaitable[None]]
"""(member, its report): raises Refused."""


@dataclass(kw_only=True, eq=False)
class Session:
    """A member's line to the leader."""

    remote: str
    ready: Ready
    stream: Stream
    alive: bool = True


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
    group: Group | None = None
    parts: Parts | None = None
    sessions: dict[str, Session] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    left_out: dict[str, str] = field(default_factory=dict)
    """peers that the group was closed without, and why"""

    def __post_init__(self) -> None:
        """Begin; Refused where it is the position's turn and it is not this peer's to lead."""
        self.cells = self.ctx.replay.cells_at(self.position)
        self.votes: Votes | None = None
        self.expected = Expected(
            self.ctx,
            electorate=lambda: self.electorate,
            ready=lambda: {session.remote for session in self._live()},
            on_change=self.changed.set,
        )
        self._reducing = True
        self._delivery: Delivery | None = None
        self._delivering: asyncio.Task[None] | None = None
        if self._has_turn():
            self._begin_votes()

    @property
    def position(self) -> int:
        """The position that it is about."""
        return self.place.position

    @property
    def electorate(self) -> tuple[Elector, ...]:
        """Who votes at the position; before its turn, who will if nothing changes."""
        return self.votes.electorate if self.votes is not None else self.ctx.replica.electorate

    def _has_turn(self) -> bool:
        replica = self.ctx.replica
        return (replica.epoch, replica.position) == self.place

    def _begin_votes(self) -> Votes:
        """Fix what the term is about: the electorate, and the entry that it follows.

        Raises:
            Refused: it is another elector's, or was led before.
        """
        if self.votes is None:
            electorate = tuple(self.ctx.replica.electorate)
            self.votes = Votes(
                ctx=self.ctx,
                voter=self.voter,
                place=self.place,
                electorate=electorate,
                leads=self.leads,
                attempt=self.term * TERM,
                is_live=self._is_live,
            )
        return self.votes

    async def serve(self, remote: str, ready: Ready, stream: Stream) -> None:
        """Hold a member's session until it ends.

        Raises:
            Refused: the group is closed.
        """
        if self.group is not None:
            self.left_out.setdefault(remote, "came after the group was closed")
            raise Refused(
                RefusalCode.CLOSED,
                f"the group of round {self.position + 1} is closed; "
                "what you learned stays in your next contribution",
            )
        session = Session(remote=remote, ready=ready, stream=stream)
        self.sessions[remote] = session
        self.changed.set()
        try:
            async with beside(self._send_alive(session)):
                await self._listen(session)
        finally:
            session.alive = False
            self.changed.set()
            if self._delivery is not None and self.sessions[remote] is session:
                self._delivery.gone(remote)
            await self._tell_gone(session)

    async def run(self) -> Outcome:
        """Lead to a certificate.

        Raises:
            AttemptFailed: a later ballot took over, or no quorum answered.
        """
        if self.term:
            await self._await_call()
            votes = self._begin_votes()
            adopted = await votes.collect_promises()
            if adopted is not None:
                return await votes.decide(adopted, None)
        await self._gather_group()
        reduce_by = self._reduce_by()
        failure = await self._reduce(reduce_by)
        if failure and not self._has_turn():
            raise AttemptFailed(f"reduced early: {failure}")
        while not self._has_turn():
            await self.ctx.replica.passed(self.ctx.replica.position)
        try:
            return await self._propose(self._begin_votes(), failure, reduce_by)
        finally:
            self._reducing = False

    async def _propose(self, votes: Votes, failure: str, reduce_by: float) -> Outcome:
        """Have an entry decided; where a part of it is lost, reduce that again and propose anew."""
        deadline_s = self._closed_group().deadline_s
        while not failure:
            deciding = votes.decide(self._update_entry(), deadline_s)
            outcome = await race(deciding, self._await_loss(), expected=(AttemptFailed,))
            if outcome is not None:
                return outcome
            failure = await self._reduce(reduce_by)
            adopted = await votes.try_again()
            if adopted is not None:
                return await votes.decide(adopted, deadline_s)
        return await votes.decide(self._null_entry(failure), deadline_s)

    async def _await_loss(self) -> None:
        while not self._closed_parts().lost():
            await self._await_change(self.ctx.alive_s)

    async def until_left(self) -> None:
        """Wait until the members have heard of the decision and ended their sessions, or a while.

        A session that ended before would look to its member like the leader's death.
        """
        deadline = self.ctx.now() + LEAVE_STALLS * self.ctx.settings.stall_s
        while self._live() and self.ctx.now() < deadline:
            await self._await_change(self.ctx.alive_s)

    async def close(self) -> None:
        """End all sessions."""
        for session in list(self.sessions.values()):
            await session.stream.close()
        if self.parts is not None:
            await self.parts.close()
        if self._delivering is not None:
            await end(self._delivering)

    async def _await_call(self) -> None:
        """Wait until this term is called for: by a quorum, or by the earlier leader's absence.

        One peer with a bad link to a healthy leader must not end that leader's round.
        """
        earlier = leader_of(self.electorate, self.position, self.term - 1).peer_id
        await race(self._await_quorum(), self._await_absence(earlier))

    async def _await_quorum(self) -> None:
        deadline = self.ctx.now() + ALONE_GRACES * self.ctx.settings.grace_s
        while self.ctx.now() <= deadline and not self._has_quorum(self._live()):
            await self._await_change(self.ctx.alive_s)

    async def _await_absence(self, peer: str) -> None:
        while peer != self.ctx.me.peer_id and await ask_head(self.ctx, peer) is not None:
            await asyncio.sleep(PROBE_S)

    # sessions

    async def _listen(self, session: Session) -> None:
        with suppress(TransportError):
            while True:
                message = await session.stream.recv(timeout_s=self.ctx.settings.stall_s)
                if message is None:
                    return
                if message[:1] == PART_DONE:
                    self._note_done(session.remote, PartDone.decode(message[1:]))
                elif message[:1] == SEATED and self._delivery is not None:
                    self._delivery.note(session.remote, Seated.decode(message[1:]).group)
                elif message[:1] == READY:
                    await self._take_turn(session.remote, Ready.decode(message[1:]))

    async def _take_turn(self, remote: str, ready: Ready) -> None:
        """A member says that the position's turn has come where it stands.

        Raises:
            Refused: it has not come here, and does not soon: the next leader tries.
        """
        if (ready.epoch, ready.position, ready.term) != (*self.place, self.term):
            raise Refused(RefusalCode.BAD_READY, f"expected a report at {tuple(self.place)}")
        await self.check(remote, ready)

    async def _send_alive(self, session: Session) -> None:
        with suppress(TransportError):
            while True:
                await asyncio.sleep(self.ctx.alive_s)
                await session.stream.send(ALIVE, timeout_s=self.ctx.settings.stall_s)

    async def _tell_gone(self, session: Session) -> None:
        members = [m.peer_id for m in self.group.members] if self.group else []
        remote = session.remote
        if self.sessions[remote] is session and remote in members and self._reducing:
            await self._broadcast(GONE, Gone(member=members.index(remote)))

    def _note_done(self, remote: str, done: PartDone) -> None:
        if self.parts is not None:
            self.parts.note(remote, done)
            self.changed.set()

    async def _send(self, session: Session, kind: bytes, record: Closed | Repair | Gone) -> None:
        try:
            await session.stream.send(tagged(kind, record), timeout_s=self.ctx.settings.stall_s)
        except TransportError:
            session.alive = False
            self.changed.set()

    async def _send_group(self, member: str, closed: Closed) -> None:
        await self._send(self.sessions[member], GROUP, closed)

    async def _broadcast(self, kind: bytes, record: Repair | Gone) -> None:
        await asyncio.gather(*(self._send(s, kind, record) for s in self._live()))

    def _is_live(self, peer: str) -> bool:
        return peer in self.sessions and self.sessions[peer].alive

    def _live(self) -> list[Session]:
        return [s for s in self.sessions.values() if s.alive]

    async def _await_change(self, timeout_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.changed.wait()
        self.changed.clear()

    # the group

    async def _gather_group(self) -> None:
        async with beside(self.expected.run()):
            first = quorum = None
            while True:
                now = self.ctx.now()
                live = self._live()
                first = (first or now) if live else None
                quorum = (quorum or now) if self._has_quorum(live) else None
                if self._close(live, first, quorum, now):
                    return await self._open_reduction(live)
                await self._await_change(self.ctx.alive_s)

    def _has_quorum(self, live: Sequence[Session]) -> bool:
        return is_quorum(self._voters(s.remote for s in live), len(self.electorate))

    def _voters(self, peers: object) -> list[int]:
        names = set(peers)  # type: ignore[call-overload]
        return [i for i, e in enumerate(self.electorate) if e.peer_id in names]

    def _close(
        self, live: Sequence[Session], first: float | None, quorum: float | None, now: float
    ) -> bool:
        view = Rendezvous(
            ready={s.remote for s in live},
            expected=self.expected.ready_at,
            electors={elector.peer_id for elector in self.electorate},
            opened_at=self.ctx.replica.moved_at if self._has_turn() else math.inf,
            last_s=self.ctx.replica.stood_s,
            first_ready_at=first if first is not None else now,
            quorum_ready_at=quorum,
            grace_s=self.ctx.settings.grace_s,
            alone_s=ALONE_GRACES * self.ctx.settings.grace_s,
        )
        return self.expected.known and close_decision(view, now) is Close.CLOSE

    async def _open_reduction(self, live: Sequence[Session]) -> None:
        ready = {session.remote: session.ready for session in live}
        self.group = form_group(self.ctx, self.place, self.term, ready)
        self.parts = Parts(
            self.ctx,
            self.group,
            self.cells,
            is_live=self._is_live,
            order=partial(self._broadcast, REPAIR),
            changed=self.changed,
        )
        self.left_out = {p: "not ready in time" for p in self.expected.ready_at if p not in ready}
        uplinks = {peer: report.uplink_mbit_s for peer, report in ready.items()}
        self._delivery = Delivery(
            self.ctx, self.group, uplinks_mbit_s=uplinks, send=self._send_group
        )
        await self._delivery.begin()
        self._delivering = asyncio.create_task(self._delivery.run())

    # the reduction

    def _reduce_by(self) -> float:
        group = self._closed_group()
        return self.ctx.now() + group.deadline_s + 2 * group.stall_s

    async def _reduce(self, deadline: float) -> str:
        """Return once all parts are done, here or on their way, or why they will not be."""
        if not any(member.weight > 0 for member in self._closed_group().members):
            return "nobody brought work that counts"
        while not await self._closed_parts().settle():
            if self.ctx.now() > deadline:
                return "no part of it could be reduced in time"
            if not self._live():
                return "every member left"
            await self._await_change(self.ctx.alive_s)
        return ""

    def _closed_group(self) -> Group:
        if self.group is None:
            raise AttemptFailed("the group was not closed")
        return self.group

    def _closed_parts(self) -> Parts:
        if self.parts is None:
            raise AttemptFailed("the group was not closed")
        return self.parts

    # entries

    def _update_entry(self) -> Entry:
        parts = self._closed_parts().logged(self._gone_without_work())
        return self._entry("update", self._closed_group().members, parts)

    def _gone_without_work(self) -> list[int]:
        """Members of weight 0 that left: nothing of theirs is counted, so they do not vote next."""
        members = self._closed_group().members
        return [
            i for i, m in enumerate(members) if m.weight == 0 and not self.sessions[m.peer_id].alive
        ]

    def _null_entry(self, why: str) -> Entry:
        self.ctx.on_event("error", f"round {self.position + 1}: given up: {why}")
        return self._entry("null", (), ())

    def _entry(self, kind: str, members: tuple[Member, ...], parts: tuple[Part, ...]) -> Entry:
        replica = self.ctx.replica
        lr, momentum = self.ctx.scalars(self.position)
        root = replica.root_due(self.position)
        return Entry(
            run_id=replica.run_id,
            epoch=self.place.epoch,
            position=self.position,
            kind="update" if kind == "update" else "null",
            previous_chain=replica.chain,
            fragment=self.ctx.replay.fragment_at(self.position),
            lr=lr,
            momentum=momentum,
            members=members,
            parts=parts,
            electorate=next_electorate(members, parts, self.electorate),
            state_root=StateRoot(position=root[0], root=root[1]) if root else None,
        )
