"""Dissemination of entries and groups along a tree: a peer sends to at most eight others.

With P members an entry has some 190 P bytes, half of it deflated; a leader that sent it to each
of a thousand would need eight seconds. A message also names the peers to which its receiver
forwards it, once that has verified the certificate and holds the body. If a peer does not take it
within a stall, the next of its branch gets it, with the rest of the branch. A peer that takes it
but does not forward it only costs time: a peer that hears of no decision asks others for it.

Groups go the same way, signed: on the sessions of at most eight members, which forward them by
calls. A member that got its group from another one reports that on its session. After half a
stall, or once one of the eight is gone, the leader sends the group again to those that lack it,
beginning with others: a member that withholds a group costs the round this time.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Self, TypeVar

from atoll.dht.refusals import RefusalCode
from atoll.dht.tasks import Tasks, together
from atoll.dht.transport import Refused, TransportError
from atoll.optim.log.entry import MalformedRecord, sha256
from atoll.peer.rounds.allreduce.exchange import Exchange
from atoll.peer.rounds.context import Context
from atoll.peer.rounds.messages import (
    Announced,
    Closed,
    Decided,
    Gone,
    Group,
    GroupHead,
    Ready,
    Repair,
    Reports,
    Seals,
    deflated,
    head_of,
    inflated,
    is_large,
    report_payload,
    reports_root,
)
from atoll.peer.rounds.policies import (
    check_reports,
    positions_ahead,
    round_deadline_s,
    slowest_mbit_s,
)

FAN_OUT = 8  # a thousand peers in four steps, and eight copies of an entry are what one sends
CALL_STALLS = 4  # of a call that may have to fetch parts before it answers
PATIENCE_STALLS = 0.5  # for members to forward a group, beyond the time of its transfer

T = TypeVar("T")


Body = Callable[[Sequence[str]], bytes]
"""Returns the message for a peer that forwards it to these."""


class Tree:
    """Calls of one method that peers forward."""

    def __init__(self, ctx: Context, method: str) -> None:
        self._ctx = ctx
        self._method = method
        self._tasks = Tasks()

    async def tell(self, peers: Sequence[str], body: Body) -> None:
        """Return when one peer of each branch has taken it, or none has."""
        await together(*(self._tell_branch(branch, body) for branch in branches(peers)))

    def spawn(self, work: Coroutine[None, None, T]) -> asyncio.Task[T]:
        """Do something until it is done or the tree is closed."""
        return self._tasks.spawn(work)

    async def close(self) -> None:
        """End what is under way."""
        await self._tasks.close()

    async def _tell_branch(self, branch: Sequence[str], body: Body) -> None:
        for index, peer in enumerate(branch):
            call = self.spawn(self._call(peer, body(branch[index + 1 :])))
            await asyncio.wait({call}, timeout=self._ctx.settings.stall_s)
            if call.done() and not call.cancelled() and call.result():
                return

    async def _call(self, peer: str, body: bytes) -> bool:
        """Return whether the peer took it; one that did not looks for decisions by itself."""
        timeout_s = CALL_STALLS * self._ctx.settings.stall_s
        with suppress(TransportError):
            await self._ctx.transport.call(peer, self._method, body, timeout_s=timeout_s)
            return True
        return False


class Dissemination:
    """Announces the newest decided entry, to each peer at most once."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._tree = Tree(ctx, "commit")
        self._entry = b""
        self._told: set[str] = set()

    async def tell(self, decided: Decided, peers: Sequence[str]) -> None:
        """Announce an entry; return when one peer of each branch has taken it, or none has.

        Args:
            decided: verified.
            peers: those that surely live first: they pass it on.
        """
        if decided.entry != self._entry:
            self._entry, self._told = decided.entry, {self._ctx.me.peer_id}
        new = [peer for peer in dict.fromkeys(peers) if peer not in self._told]
        self._told.update(new)
        await self._tree.tell(new, _announcing(decided))

    def pass_on(self, decided: Decided, peers: Sequence[str]) -> None:
        """`tell`, in the background."""
        if peers:
            self._tree.spawn(self.tell(decided, peers))

    async def close(self) -> None:
        """End what is under way."""
        await self._tree.close()


def _announcing(decided: Decided) -> Body:
    entry = deflated(decided.entry)

    def body(tell: Sequence[str]) -> bytes:
        announced = Announced(entry=entry, certificate=decided.certificate, tell=tuple(tell))
        return announced.encode()

    return body


def branches(peers: Sequence[str]) -> list[tuple[str, ...]]:
    """At most eight branches of nearly equal size; the first peers begin them."""
    return [tuple(peers[start::FAN_OUT]) for start in range(min(FAN_OUT, len(peers)))]


Send = Callable[[str, Closed], Awaitable[None]]
"""(member, group): on its session."""


def group_payload(run_id: bytes, digest: bytes) -> bytes:
    """Return what the leader of a group signs; the record holds epoch, position and term."""
    return b"atoll group 1" + run_id + digest


def group_of(closed: Closed) -> Group:
    """Return the group in a message; MalformedRecord on anything else, before it takes memory."""
    head_of(GroupHead, closed.group)  # those to whom it is passed on read this first
    return Group.decode(inflated(closed.group, Group.max_bytes))


class Delivery:
    """The leader's side: brings one group to all its members."""

    def __init__(
        self, ctx: Context, group: Group, *, uplinks_mbit_s: Mapping[str, float], send: Send
    ) -> None:
        """Members with fast uplinks get it first: they forward it."""
        self._ctx = ctx
        self._send = send
        self._digest = group.digest
        self._index = {member.peer_id: i for i, member in enumerate(group.members)}
        self._waiting = sorted(self._index, key=lambda peer: -uplinks_mbit_s[peer])
        self._passing: set[str] = set()
        self._lost = False
        self._changed = asyncio.Event()
        self._group = deflated(group.sent().encode())
        self._signature = ctx.sign(group_payload(ctx.replica.run_id, self._digest))
        self._mbit_s = max(0.1, statistics.median(uplinks_mbit_s.values()))

    @property
    def closed(self) -> Closed:
        """The group for a member that forwards it to nobody."""
        return Closed(group=self._group, signature=self._signature, tell=())

    async def begin(self) -> None:
        """Send it to the first members of the branches."""
        here = [[peer] for peer in self._waiting if peer == self._ctx.me.peer_id]
        others = [peer for peer in self._waiting if [peer] not in here]
        begun = [*here, *branches(others)]
        self._passing, self._lost = {branch[0] for branch in begun}, False
        await together(*(self._tell(branch) for branch in begun))

    async def run(self) -> None:
        """Return when every member has it or is gone."""
        while self._waiting:
            await self._await_members(self._patience_s())
            await self.begin()

    def note(self, peer: str, digest: bytes) -> None:
        """A member got a group from another one."""
        if digest == self._digest:
            self._strike_off(peer)

    def gone(self, peer: str) -> None:
        """A member's session ended."""
        self._lost = self._lost or peer in self._passing
        self._strike_off(peer)

    def _strike_off(self, peer: str) -> None:
        if peer in self._waiting:
            self._waiting.remove(peer)
        self._changed.set()

    async def _tell(self, branch: Sequence[str]) -> None:
        tell = tuple(self._index[peer] for peer in branch[1:])
        self._strike_off(branch[0])
        await self._send(branch[0], self.closed.model_copy(update={"tell": tell}))

    async def _await_members(self, patience_s: float) -> None:
        """Return when all have it, a member that forwards it is gone, or patience is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while self._waiting and not self._lost:
                    self._changed.clear()
                    await self._changed.wait()

    def _patience_s(self) -> float:
        """Half a stall, and the transfers of a branch, one after the other."""
        transfer_s = FAN_OUT * len(self._group) * 8 / (self._mbit_s * 1e6)
        hops = math.log(len(self._waiting), max(2, FAN_OUT))
        return PATIENCE_STALLS * self._ctx.settings.stall_s + hops * transfer_s


async def seal(ctx: Context, group: Group, acceptors: Collection[str]) -> None:
    """Bring the signatures of a large group's reports to the acceptors among its members.

    They arrive while the group reduces. An acceptor that votes without them asks for them.
    """
    index = {member.peer_id: i for i, member in enumerate(group.members)}
    digest = group.digest
    payload = seals_payload(ctx.replica.run_id, digest, group.reports)
    seals = Seals(
        epoch=group.epoch,
        position=group.position,
        term=group.term,
        group=digest,
        signatures=tuple(report.signature for report in group.reports),
        signature=ctx.sign(payload),
        tell=(),
    )
    tree = Tree(ctx, "seals")
    others = [peer for peer in acceptors if peer in index and peer != ctx.me.peer_id]
    try:
        await tree.tell(others, _addressing(seals, index))
    finally:
        await tree.close()


def seals_payload(run_id: bytes, group: bytes, reports: Reports) -> bytes:
    """Return what the leader of a large group signs."""
    return b"atoll seals 1" + run_id + group + reports_root(reports)


def _addressing(record: Closed | Seals, index: Mapping[str, int]) -> Body:
    def body(tell: Sequence[str]) -> bytes:
        return record.model_copy(update={"tell": tuple(index[p] for p in tell)}).encode()

    return body


class Seat:
    """A member's place in a term: begins with the group, whoever brings it first."""

    def __init__(
        self, ctx: Context, ready: Ready, leader: str, begin: Callable[[Group], Exchange]
    ) -> None:
        """`begin` is called once, with a group that is the leader's and fits the report."""
        self._ctx = ctx
        self._ready = ready
        self._leader = leader
        self._begin = begin
        self._groups, self._seals = Tree(ctx, "group"), Tree(ctx, "seals")
        self._told: dict[Tree, set[int]] = {self._groups: set(), self._seals: set()}
        self._orders: list[Repair | Gone] = []
        self._begun = asyncio.Event()
        self._seals_wait = False
        self.exchange: Exchange | None = None
        self.was_passed = False
        """whether another member than the leader brought the group"""

    async def __aenter__(self) -> Self:
        """Take groups from now on."""
        self._ctx.seats[self._key] = self
        return self

    async def __aexit__(self, *_: object) -> None:
        """Take none any more."""
        if self._ctx.seats.get(self._key) is self:
            del self._ctx.seats[self._key]
        for tree in self._told:
            await tree.close()

    @property
    def _key(self) -> tuple[int, int, int]:
        return self._ready.epoch, self._ready.position, self._ready.term

    async def begun(self) -> Exchange:
        """The exchange, once there is one."""
        while self.exchange is None:
            await self._begun.wait()
        return self.exchange

    def expect_leaders(self, digest: bytes, signature: bytes) -> None:
        """Raise MalformedRecord unless the leader signed the group of this digest."""
        payload = group_payload(self._ctx.replica.run_id, digest)
        if not self._ctx.verify(self._leader, payload, signature):
            raise MalformedRecord("group: expected the leader's signature")

    def pass_known(self, closed: Closed, digest: bytes) -> bool:
        """Pass on a group that has begun, as often as it comes; return whether any has begun.

        Raises:
            MalformedRecord: it is another one than that.
        """
        if self.exchange is None:
            return False
        if digest != self.exchange.digest:
            raise MalformedRecord("group: expected the one that began, got another")
        self._pass_on(self._groups, closed, self.exchange.group)
        return True

    def take(self, closed: Closed, group: Group, *, passed: bool) -> None:
        """Begin, and pass the group on.

        Raises:
            MalformedRecord: it is not the leader's, does not fit, or is another one than before.
        """
        digest = group.digest
        self.expect_leaders(digest, closed.signature)
        if self.exchange is None:
            check_group(self._ctx, group, self._ready)
            self._ctx.parts.keep_group(digest, group)
            if not is_large(len(group.members)):
                self._ctx.parts.keep_reports(group.position, group.reports)
            self.was_passed = passed
            self.exchange = self._begin(group)
            self._begun.set()
            for order in self._orders:
                self.order(order)
        self.pass_known(closed, digest)

    def order(self, order: Repair | Gone) -> None:
        """Do what the leader says; before the group is here, then."""
        if self.exchange is None:
            self._orders.append(order)
        elif isinstance(order, Repair):
            self.exchange.repair(order)
        else:
            self.exchange.gone(order.member)

    def _pass_on(self, tree: Tree, record: Closed | Seals, group: Group) -> None:
        told = self._told[tree]
        new = {i for i in record.tell if i < len(group.members)} - told
        if not new:
            return
        told |= new
        index = {group.members[i].peer_id: i for i in record.tell if i in new}
        tree.spawn(tree.tell(list(index), _addressing(record, index)))

    async def take_seals(self, seals: Seals) -> None:
        """Keep the signatures of the group's reports for the vote, and pass them on.

        Raises:
            MalformedRecord: they are not the leader's, or of another group.
            Refused: no group comes in time, or other signatures wait for it.
        """
        if self.exchange is None:
            await self._await_group()
        assert self.exchange is not None
        reports = seals.sealed(self.exchange.group, self.exchange.digest)
        payload = seals_payload(self._ctx.replica.run_id, seals.group, reports)
        if not self._ctx.verify(self._leader, payload, seals.signature):
            raise MalformedRecord("seals: expected the leader's signature")
        self._ctx.parts.keep_reports(seals.position, reports)
        self._pass_on(self._seals, seals, self.exchange.group)

    async def _await_group(self) -> None:
        """Signatures may overtake the group. Only one message waits: anyone may send half a MB."""
        if self._seals_wait:
            raise Refused(RefusalCode.NO_SEAT, "other signatures already wait for the group here")
        self._seals_wait = True
        try:
            async with asyncio.timeout(self._ctx.settings.stall_s):
                await self.begun()
        except TimeoutError:
            raise Refused(RefusalCode.NO_SEAT, "no group has arrived here") from None
        finally:
            self._seals_wait = False


def check_group(ctx: Context, group: Group, ready: Ready) -> None:
    """Raises MalformedRecord unless a group is the one that this peer reported to, and whole."""
    asked = (ready.epoch, ready.position, ready.term)
    got = (group.epoch, group.position, group.term)
    if got != asked:
        raise MalformedRecord(f"group: expected (epoch, position, term) {asked}, got {got}")
    me = ctx.me.peer_id, ctx.me.incarnation
    if me not in [(m.peer_id, m.incarnation) for m in group.members]:
        raise MalformedRecord("group: expected to be a member of it")
    behind = positions_ahead(len(ctx.replay.fragments)) + 1
    most_s = own_deadline_s(ctx, group, behind=behind)
    if group.stall_s != ctx.settings.stall_s or group.deadline_s > most_s:
        raise MalformedRecord(
            f"group: expected a stall of {ctx.settings.stall_s:g} s and a deadline of at most "
            f"{most_s:.0f} s, got {group.stall_s:g} and {group.deadline_s:.0f}"
        )
    mine = report_payload(ctx.replica.run_id, ready.report)

    def is_mine(peer: str, data: bytes, signature: bytes) -> bool:
        return peer != ctx.me.peer_id or data == mine  # acceptors verify the signatures of all

    check_reports(
        group.members,
        group.reports,
        (group.epoch, group.position),
        run_id=ctx.replica.run_id,
        rule=ctx.replay.method.weights,
        clip_at=ctx.replay.method.clip_at,
        carried=ctx.carried_norm(group.position),
        verify=is_mine if is_large(len(group.members)) else ctx.verify,
    )
    covered = 0
    for plan in group.parts:
        if plan.start_cell != covered or plan.stop_cell <= covered:
            raise MalformedRecord("group: expected parts without gap or overlap")
        if plan.owner >= len(group.members):
            raise MalformedRecord("group: an owner is not a member")
        covered = plan.stop_cell
    num_cells = len(ctx.replay.cells_at(group.position))
    if covered != num_cells:
        raise MalformedRecord(f"group: expected {num_cells} chunks, got {covered}")


def own_deadline_s(ctx: Context, group: Group, *, behind: int = 0) -> float:
    """Return a group's deadline by this peer's own account.

    Args:
        ctx: the peer's.
        group: whose members signed their uplinks.
        behind: entries that the leader may stand before this peer: it then counts more positions.
    """
    before = max(0, group.position - ctx.replica.position)
    return round_deadline_s(
        ctx.replay.cells_at(group.position).max_body_bytes(len(group.members)),
        slowest_mbit_s([one.uplink_mbit_s for one in group.reports] or [0.0]),
        ctx.settings.stall_s,
        before=before + behind,
    )


async def take_passed(ctx: Context, body: bytes) -> bytes:
    """Answer the call `group`: what another member passes on.

    Raises:
        MalformedRecord: it is no group.
        Refused: it is none that this peer waits for. That is no fault: of an early term two
            leaders, or two groups of one, may be under way.
    """
    closed = Closed.decode(body)
    head = head_of(GroupHead, closed.group)
    seat = ctx.seats.get((head.epoch, head.position, head.term))
    if seat is None:
        raise Refused(RefusalCode.NO_SEAT, f"this peer has no open report to term {head.term}")
    record = inflated(closed.group, Group.max_bytes)
    try:
        digest = sha256(record)
        seat.expect_leaders(digest, closed.signature)  # only its groups are worth parsing, once
        if not seat.pass_known(closed, digest):
            seat.take(closed, Group.decode(record), passed=True)
    except MalformedRecord as error:
        raise Refused(RefusalCode.OTHER_GROUP, str(error)) from error
    return b""


async def take_seals(ctx: Context, body: bytes) -> bytes:
    """Answer the call `seals`: signatures for the vote on the group's entry.

    Raises:
        MalformedRecord: they are none.
        Refused: they are of no group that began here, or not its leader's.
    """
    seals = Seals.decode(body)
    seat = ctx.seats.get((seals.epoch, seals.position, seals.term))
    if seat is None:
        raise Refused(RefusalCode.NO_SEAT, f"this peer has no open report to term {seals.term}")
    try:
        await seat.take_seals(seals)
    except MalformedRecord as error:
        raise Refused(RefusalCode.OTHER_GROUP, str(error)) from error
    return b""
