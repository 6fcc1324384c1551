"""The context that all modules of a round share: identity, log, links, settings, parts in hand."""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from atoll.coordinator.run.levels import Level
from atoll.coordinator.run.notice import Notice
from atoll.dht.refusals import RefusalCode
from atoll.dht.roster import PeerRecord, RecordError, Roster, RosterError
from atoll.dht.transport import Refused, Transport, TransportError
from atoll.optim.log.electorate import Electors
from atoll.optim.log.entry import Elector, Entry, LogError, Verify, is_quorum, leader_order
from atoll.optim.log.evidence import Evidence, EvidenceBook
from atoll.optim.log.live_replica import Compute, LiveReplica
from atoll.optim.log.orders import OrderBook, OrderInvalid, read_order
from atoll.optim.log.replay import Replay
from atoll.optim.reduction.cells import Bytes
from atoll.optim.reduction.robust import Rule, rule_of
from atoll.optim.state.updates import Update
from atoll.peer.notices import roster_unread
from atoll.peer.rounds import notices
from atoll.peer.rounds.conduct import Conduct, Fault
from atoll.peer.rounds.messages import (
    Closed,
    Group,
    Head,
    Known,
    PlannedPart,
    Reports,
    Seals,
    is_large,
    planned_parts,
    reports_root,
)
from atoll.peer.rounds.pacing import Link
from atoll.peer.rounds.reliance import (
    FailedLeaders,
    Omissions,
    Promises,
    Usurpers,
    terms_over,
)

RECORDS_PER_S = 64.0  # read from the roster, of about 700 bytes each
HEAD_STALLS = 0.5  # a group should not wait a whole stall for the dead
DECISION_UNDER_WAY = 1  # entries that a peer may lack: the last one is still on its way to it
EVIDENCE = "evidence"  # the note of the log's store that holds it
ALIVE_PER_STALL = 4  # signs of life in one stall, so that three may be late


class AttemptFailed(Exception):
    """This term decides nothing; the next leader tries."""


@dataclass(frozen=True, kw_only=True)
class RoundSettings:
    """Times of a round and its electors, as the spec of the run gives them (`round` in `spec`)."""

    stall_s: float
    """a peer without a sign of life for this long is taken for dead in this round"""

    grace_s: float
    """how long a group waits for stragglers once a quorum is ready"""

    electors: Electors = "members"
    """who leads and votes"""


Scalars = Callable[[int], tuple[float, float]]
"""position -> outer lr and momentum of its entry, as fp32 values."""


class OnEvent(Protocol):
    """Takes an event for the operator."""

    def __call__(self, level: Level, notice: Notice, /, *, key: Hashable | None = None) -> None:
        """Report it; warnings with equal keys (by default: equal texts) are throttled."""


def failure_key(error: Exception) -> Hashable:
    """Return what makes two failures the same event, whatever attempt their texts name."""
    code = error.code if isinstance(error, Refused) else None
    peer = error.peer if isinstance(error, TransportError) else ""
    return type(error).__name__, code, peer


@dataclass(kw_only=True)
class PeerContext:
    """One peer's view of a run of any kind."""

    me: Elector
    transport: Transport
    roster: Roster
    settings: RoundSettings
    compute: Compute
    on_event: OnEvent
    ready_in_s: Callable[[], float | None] = lambda: None
    """seconds until this peer's own contribution is expected; None if none will come"""
    conduct: Conduct = field(default_factory=Conduct)
    """faults that this peer saw, by peer"""
    lags: Conduct = field(default_factory=Conduct)
    """how often they sent far less than the others, or did not finish parts; an owner expects
    nothing of those barred here, and a leader gives them no parts; they keep their votes and their
    turns to lead"""
    link: Link = field(default_factory=Link)
    _seen: dict[str, PeerRecord] = field(default_factory=dict)
    _seen_until: float = 0.0

    async def roster_peers(self) -> dict[str, PeerRecord]:
        """Return the peers of the run, or those known before if the roster cannot be read now.

        The more there are, the longer what was read holds.
        """
        if self.now() < self._seen_until:
            return self._seen
        try:
            self._seen = await self.roster.peers()
        except (RosterError, TransportError, TimeoutError, OSError) as error:
            self.on_event("warning", roster_unread(reason=str(error)))
        self._seen_until = self.now() + len(self._seen) / RECORDS_PER_S
        return self._seen

    @property
    def seen(self) -> dict[str, PeerRecord]:
        """The peers of the run when the roster was last read."""
        return self._seen

    @property
    def alive_s(self) -> float:
        """Seconds between signs of life."""
        return self.settings.stall_s / ALIVE_PER_STALL

    @staticmethod
    def now() -> float:
        """The clock of deadlines: the event loop's."""
        return asyncio.get_running_loop().time()

    def fault(self, peer: str, why: Fault) -> None:
        """Note that a peer broke a rule; report it if that bans the peer."""
        barred = self.conduct.fault(peer, why, self.now())
        if barred is not None:
            self.on_event("error", notices.of_barred(peer, barred))

    def expect_unbarred(self, peer: str) -> None:
        """Raise Refused for a peer that is barred, for good or for a while."""
        barred = self.conduct.barred(peer, self.now())
        if barred is not None:
            raise Refused(RefusalCode.BARRED, str(barred))

    def reading_door(self, peer: str) -> None:
        """Raise Refused for a peer that must not read the log."""
        if not self.conduct.may_read(peer):
            raise Refused(RefusalCode.BARRED, str(self.conduct.barred(peer, self.now())))

    def door(self, peer: str) -> None:
        """Raise Refused for a peer that is barred for good."""
        if self.conduct.is_out(peer):
            raise Refused(RefusalCode.BARRED, str(self.conduct.barred(peer, self.now())))


MAX_GROUPS = 8  # that are kept, and their reports: of four positions in flight, two terms each


class TakesGroup(Protocol):
    """A place in an attempt, for which a group may come from any member."""

    def expect_leaders(self, digest: bytes, signature: bytes) -> None:
        """Raise MalformedRecord unless the leader signed the group of this digest."""
        ...

    def pass_known(self, closed: Closed, digest: bytes) -> bool:
        """Pass on the group that has begun; raises MalformedRecord if it is another one."""
        ...

    def take(self, closed: Closed, group: Group, *, passed: bool) -> None:
        """Begin with a group; raises MalformedRecord if it is not the leader's."""
        ...

    async def take_seals(self, seals: Seals) -> None:
        """Keep its reports' signatures; raises MalformedRecord unless they are the leader's."""
        ...


class Arriving(Protocol):
    """A reduction under way."""

    async def arrival(self, start_cell: int, stop_cell: int) -> bool:
        """Wait until a part is complete here or brings nothing for a while.

        Returns:
            Whether it may still arrive.
        """
        ...


class Decoded(NamedTuple):
    """The values that bytes have as these cells; as others they may have none."""

    start_cell: int
    stop_cell: int
    values: Update


@dataclass(frozen=True, kw_only=True)
class HeldPart:
    """A part's bytes, and its values if they were decoded as they came."""

    body: Bytes
    decoded: tuple[Decoded, ...] = ()
    """as each of the parts that have these bytes"""


class Stored(NamedTuple):
    """The place of a part in the log: some bytes of the body of an entry."""

    position: int
    start: int
    stop: int


class Holdings:
    """Reduced parts of the positions in flight.

    Parts are held by position and digest, because equal bytes at two positions may decode to
    different values. Those of the last entry are served from the log to peers that its commit has
    not reached yet.
    """

    def __init__(self) -> None:
        self._parts: dict[int, dict[bytes, HeldPart]] = {}
        self._stored: dict[bytes, Stored] = {}
        self.arriving: dict[int, Arriving] = {}
        """by position: the reduction that may still bring its parts"""
        self._reports: OrderedDict[bytes, tuple[int, Reports]] = OrderedDict()
        """positions and reports, by digest"""
        self._groups: OrderedDict[bytes, Group] = OrderedDict()

    def note_stored(self, entry: Entry) -> None:
        """Note that an entry and its body are in the log now."""
        ends = itertools.pairwise([0, *itertools.accumulate(p.wire_bytes for p in entry.parts)])
        self._stored = {
            part.digest: Stored(entry.position, *within)
            for part, within in zip(entry.parts, ends, strict=True)
        }

    def stored(self, digest: bytes) -> Stored | None:
        """Return where a part of the entry that was stored last is in the log."""
        return self._stored.get(digest)

    def put(
        self, position: int, digest: bytes, body: Bytes, decoded: Decoded | None = None
    ) -> None:
        """Keep a part until its position is decided."""
        at = self._parts.setdefault(position, {})
        before = at[digest].decoded if digest in at else ()
        if decoded is not None:
            others = [other for other in before if other[:2] != decoded[:2]]
            at[digest] = HeldPart(body=body, decoded=(*others, decoded))
        elif digest not in at:
            at[digest] = HeldPart(body=body)

    def keep_reports(self, position: int, reports: Reports) -> None:
        """Keep the reports of a group that began here, by the digest that its entry names."""
        self._reports[reports_root(reports)] = position, reports
        if len(self._reports) > MAX_GROUPS:
            self._reports.popitem(last=False)

    def keep_group(self, digest: bytes, group: Group) -> None:
        """Keep a group that began here, whose members its entry need not repeat."""
        self._groups[digest] = group
        if len(self._groups) > MAX_GROUPS:
            self._groups.popitem(last=False)

    def group(self, digest: bytes) -> Group | None:
        """Return a group that began here."""
        return self._groups.get(digest)

    def reports(self, root: bytes) -> Reports | None:
        """Return the reports of a group that began here."""
        return self._reports.get(root, (0, None))[1] if root else ()

    def lay(self, position: int, digest: bytes, body: Bytes) -> None:
        """Hold a part's bytes where they lie in the body of its entry, and not beside that."""
        at = self._parts.get(position, {})
        if digest in at:
            at[digest] = replace(at[digest], body=body)

    def body(self, digest: bytes) -> Bytes | None:
        """Return the bytes of a part of any position."""
        for at in self._parts.values():
            if digest in at:
                return at[digest].body
        return None

    def holds(self, digest: bytes, wire_bytes: int) -> bool:
        """Return whether the part is here, as long as its owner said: a digest proves no length."""
        body = self.body(digest)
        return body is not None and len(body) == wire_bytes

    def decoded(self, position: int, digest: bytes, cells: tuple[int, int]) -> Update | None:
        """Return the values of a part, if they were decoded as these cells, [start, stop)."""
        held = self._parts.get(position, {}).get(digest)
        decoded = held.decoded if held is not None else ()
        return next((values for *found, values in decoded if tuple(found) == cells), None)

    def begin(self, position: int, reduction: Arriving) -> None:
        """Note a reduction that may still bring parts of a position.

        The values of an earlier one there are dropped: they keep its whole vector, and are decoded
        again if its parts are decided after all.
        """
        self.arriving[position] = reduction
        at = self._parts.get(position, {})
        for digest, held in at.items():
            at[digest] = HeldPart(body=held.body)

    def decided_up_to(self, position: int) -> None:
        """Keep parts and groups from `position` on."""
        for decided in [p for p in self._parts if p < position]:
            del self._parts[decided]
        for root in [r for r, (at, _) in self._reports.items() if at < position]:
            del self._reports[root]
        for name in [n for n, group in self._groups.items() if group.position < position]:
            del self._groups[name]

    def clear(self) -> None:
        """Drop all: their epoch is over."""
        self._parts.clear()
        self._reports.clear()
        self._groups.clear()


@dataclass(frozen=True, kw_only=True)
class Reporting:
    """A session of a contribution with the leader of a term."""

    leader: str
    term: int
    since: float
    has_ended: bool = False
    """the leader refused the report, as its group was closed, or the session broke"""


@dataclass(kw_only=True)
class Context(PeerContext):
    """One peer's view of a run with a log, shared by leader, member and voter."""

    sign: Callable[[bytes], bytes]
    verify: Verify
    replica: LiveReplica
    replay: Replay
    scalars: Scalars
    parts: Holdings = field(default_factory=Holdings)
    """reduced parts of the positions in flight"""
    seats: dict[tuple[int, int, int], TakesGroup] = field(default_factory=dict)
    """terms (epoch, position, term) that this peer is a member of, or waits to be"""
    rule: Rule | None = None
    """how owners reduce a cell if no order has set another rule; None: the weighted mean"""
    last_parts: dict[int, tuple[PlannedPart, ...]] = field(default_factory=dict)
    """by fragment: how the last entry was cut, which the next one is expected to be too; not where
    its group was large"""

    promises: Promises = field(default_factory=Promises)
    """which peers groups wait for"""
    arrivals: Promises = field(default_factory=Promises)
    """which peers that lack entries a group of one waits for"""
    failed: FailedLeaders = field(default_factory=FailedLeaders)
    """leaders that this peer passes over"""
    omissions: Omissions = field(default_factory=Omissions)
    """how often leaders decided without this peer's report"""
    usurpers: Usurpers = field(default_factory=Usurpers)
    """how often leaders ended this peer's own terms early"""

    orders: OrderBook = field(default_factory=OrderBook)
    """of the organiser's, that the log here may not hold yet"""

    evidence: EvidenceBook = field(default_factory=EvidenceBook)
    """against peers that signed two entries at one place"""
    on_evidence: Callable[[bytes], None] = lambda record: None
    """takes each new record of evidence, for the coordinator; the old ones after a restart"""
    spread: Callable[[Evidence], None] = lambda evidence: None
    """passes new evidence on to other peers"""

    @property
    def rule_in_force(self) -> Rule | None:
        """Return the rule for a cell by the orders up to the head; None for the weighted mean."""
        reducer = self.replica.settings.reducer
        return self.rule if reducer is None else rule_of(reducer)

    def take_order(self, signed: bytes) -> bool:
        """Keep an order that the log here does not hold; return whether it is news.

        The log here says which key signs the next order. Who gives a later one may know of another
        key, so one that does not fit the orders known here is no fault, and is not kept.

        Raises:
            LogError: it is malformed; or it is to come next, and is none of this run's.
        """
        settings = self.replica.settings
        number = read_order(signed).number
        if number <= settings.number:
            return False
        try:
            key = self.orders.key_before(number, settings)
            return self.orders.add(signed, self.replica.open_order(signed, key))
        except OrderInvalid:
            if number == settings.number + 1:
                raise
            return False

    def next_order(self) -> bytes | None:
        """Return the order that the next entry may bring, if it is known here."""
        replica = self.replica
        settings = replica.settings
        if settings.is_over(replica.position):
            return None
        signed = self.orders.next(settings.number)
        try:
            if signed is not None:
                replica.open_order(signed, settings.key)
        except OrderInvalid:  # the log took an order that names another key than was known
            self.orders.drop(settings.number + 1)
            return None
        return signed

    def restore_evidence(self) -> None:
        """Bar those against whom an earlier process of this peer held evidence."""
        kept = self.replica.store.note(EVIDENCE)
        if kept is None:
            return
        try:
            self.evidence.restore(kept, self.replica.run_id, self.verify)
        except LogError as error:
            self.on_event("error", notices.evidence_damaged(reason=str(error)))
        for evidence in self.evidence:
            self.conduct.bar_for_good(evidence.peer_id, Fault.EQUIVOCATION)
            self.on_evidence(evidence.encode())

    def accuse(self, evidence: Evidence) -> None:
        """Keep verified evidence, bar its peer for good, and pass it on; known evidence is not."""
        peer = evidence.peer_id
        if peer == self.me.peer_id:
            # Two processes with one key: others bar both, and only a new key helps.
            self.on_event("error", notices.own_key_twice())
            return
        if not self.evidence.add(evidence):
            return
        self.replica.store.put_note(EVIDENCE, self.evidence.encode())
        self.conduct.bar_for_good(peer, Fault.EQUIVOCATION)
        signed = notices.signed_two(round=evidence.position + 1, peer=peer, kind=evidence.kind)
        self.on_event("error", signed)
        self.on_evidence(evidence.encode())
        self.spread(evidence)

    def note_idle_owner(self, peer: str) -> None:
        """Note an owner that is there and did not finish its parts of a group in time."""
        if self.lags.fault(peer, Fault.NO_PROGRESS, self.now()) is not None:
            self.on_event("warning", notices.gives_no_parts(peer=peer))

    def note_term(self, entry: Entry, term: int, ready_at: float | None) -> None:
        """Note which leaders failed at a position that was decided at a term.

        Called before the replica's clock takes the entry.

        Args:
            entry: what was decided.
            term: of its certificate.
            ready_at: since when this peer's contribution has been on offer there; None: it was not.
        """
        is_new = self.failed.is_new(entry.position)
        if not term and entry.kind == "update" and self.failed.is_empty:
            return
        electorate = self.replica.electorate_at(entry.position)
        moved_at, opened = self.replica.moved_at, self.replica.opened
        window_s = 0.0 if ready_at is None else ready_at - moved_at
        over = terms_over(
            self.now() - moved_at if moved_at else 0.0,
            max(self.replica.stood_s, window_s),
            grace_s=self.settings.grace_s,
            stall_s=self.settings.stall_s,
        )
        if is_new and ready_at is not None and self._were_passed_over(entry, electorate):
            over = term
        is_base = opened is not None and opened.base_position == entry.position
        first_term = opened.first_term if opened is not None and is_base else 0
        self.failed.note(
            entry.kind, entry.position, electorate, term, over=over, first_term=first_term
        )

    def note_included(self, entry: Entry, term: int) -> None:
        """Note which leader decided with this peer's contribution."""
        if not self.omissions.is_empty:
            self.omissions.included(self._leader_of(entry, term))

    def note_omitted(self, entry: Entry, term: int, reported: Reporting) -> None:
        """Note and report that a leader decided without this peer, which had reported to it."""
        leader = self._leader_of(entry, term)
        if leader != reported.leader:
            return  # an entry in between gave the term to another
        ago_s = self.now() - reported.since
        # A leader that has not taken a report sends no keepalives, and the session ends in a stall.
        was_taken = not reported.has_ended and ago_s > self.settings.stall_s
        if not reported.has_ended:
            omitted = notices.omitted(round=entry.position + 1, peer=leader, reported_s=ago_s)
            self.on_event("warning", omitted)
        if self.omissions.omitted(leader, was_taken=was_taken):
            self.failed.leave(leader, entry.position)
            self.on_event("warning", notices.reports_no_longer(peer=leader))

    def note_usurper(self, leader: str, position: int) -> None:
        """Note that a leader ended a term that this peer led, and that had time left."""
        if self.usurpers.took(leader, position):
            self.on_event("warning", notices.usurper(peer=leader))

    def _leader_of(self, entry: Entry, term: int) -> str:
        electorate = self.replica.electorate_at(entry.position)
        if not electorate:
            return ""
        order = leader_order(electorate, entry.position)
        return electorate[order[term % len(order)]].peer_id

    def _were_passed_over(self, entry: Entry, electorate: Sequence[Elector]) -> bool:
        """Return whether most acceptors reported to another leader than this peer did."""
        names = {member.peer_id for member in entry.members}
        if self.me.peer_id in names:
            return False
        if self.settings.electors == "keepers":
            return bool(names)
        reported = [i for i, elector in enumerate(electorate) if elector.peer_id in names]
        return is_quorum(reported, len(electorate))

    def skipped_terms(self, position: int) -> Collection[int]:
        """Return the terms at a position whose leaders this peer passes over."""
        return self.failed.skipped(self.replica.electorate, position)

    def carried_norm(self, position: int) -> float:
        """Return the norm that bounds the clip factors at a position from below; 0 if none does.

        Those in flight move different fragments, so it is known before the entries between are.
        """
        return self.replica.voters.norm(self.replay.fragment_at(position))

    def note_parts(self, entry: Entry) -> None:
        """An entry was applied, and is in the log."""
        self.parts.note_stored(entry)
        if entry.kind == "update":
            self.last_parts.pop(entry.fragment, None)
            if not is_large(len(entry.members)):
                self.last_parts[entry.fragment] = planned_parts(entry.parts, entry.members)

    @property
    def known_epoch(self) -> int | None:
        """The epoch whose record this peer has."""
        return self.replica.epoch if self.replica.opened is not None else None


@dataclass(kw_only=True)
class RoundTrace:
    """The times of one position, as this peer saw them, in seconds."""

    position: int
    wait_s: float = 0.0
    send_s: float = 0.0
    reduce_s: float = 0.0
    vote_s: float = 0.0
    apply_s: float = 0.0
    rejected: float = 0.0
    """L2 norm of what a robust rule took out of the parts that this peer reduced"""
    left_out: dict[str, str] = field(default_factory=dict)
    """PeerIDs that this peer went on without, and why: as an owner of parts, and as the leader"""


async def fetch_head(
    transport: Transport, roster: Roster, peer: str, *, epoch: int | None, timeout_s: float
) -> Head:
    """Return a peer's place in the log; records of others in its answer go to the roster.

    `epoch` is the newest epoch whose record the caller has.
    """
    known = Known(epoch=epoch, roster=roster.question()).encode()
    head = Head.decode(await transport.call(peer, "head", known, timeout_s=timeout_s))
    if head.roster:
        with suppress(RecordError):  # the rest of the answer may serve all the same
            await roster.hear(head.roster)
    return head


async def ask_head(ctx: Context, peer: str, stalls: float = HEAD_STALLS) -> Head | None:
    """Ask a peer where it stands; None if it does not answer soon: then it is frozen or gone."""
    if ctx.conduct.is_out(peer):  # as if it were gone: the next electorate is without it
        return None
    with suppress(TransportError, ValueError):
        timeout_s = stalls * ctx.settings.stall_s
        asked_at = ctx.now()
        head = await fetch_head(
            ctx.transport, ctx.roster, peer, epoch=ctx.known_epoch, timeout_s=timeout_s
        )
        ctx.link.note_round_trip(peer, ctx.now() - asked_at)
        return head
    return None


def stands_at(elector: Elector, head: Head | None, place: tuple[int, int]) -> bool:
    """Return whether an elector answered as itself, and can vote at (epoch, position), or soon."""
    epoch, position = place
    return (
        head is not None
        and head.incarnation == elector.incarnation
        and head.epoch == epoch
        and head.position >= position - DECISION_UNDER_WAY
    )
