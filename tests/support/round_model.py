"""Whole rounds in every order of events, driven through the machines that leaders run.

A world has one `Round` for each of some terms of one position, each with a leader of its own, and
the electors' `Acceptor`s. Events happen one at a time, in every order: reports, probes, finished
parts (also late ones, of owners that have lost the part), bytes that arrive or do not, fetches,
promises, votes, ends of polls, the position's turn, and time. Mishaps are bounded: the death of a
process, which may be a leader, an owner or both, the loss of a stream that brings a part, and a
fetch in vain.

What counts of a message is when it is delivered. One that is never delivered was lost; a question
delivered late was slow. An answer reaches its leader at once or never; its effect on the elector
stays. What an elector checks before its vote is not modelled: it votes for any entry that its
acceptor takes.

Machines are interned: equal ones are one number, and a step of one is worked out once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import is_dataclass
from enum import Enum, IntEnum
from functools import cached_property
from typing import Any, NamedTuple, cast

from atoll.dht.refusals import RefusalCode
from atoll.dht.transport import Refused
from atoll.optim.log.entry import (
    CertificateInvalid,
    Elector,
    Entry,
    Member,
    Record,
    check_certificate,
    is_quorum,
    sha256,
    vote_payload,
)
from atoll.peer.rounds.consensus import round as machine
from atoll.peer.rounds.consensus.ballots import Accepted, Acceptor, Leads, Place, leader_of
from atoll.peer.rounds.consensus.round import Round, RoundState, Rules
from atoll.peer.rounds.consensus.round_events import (
    AskPromises,
    CloseGroup,
    Decide,
    Fetch,
    FetchEnded,
    LeaderAbsent,
    LeaderView,
    Left,
    PartReduced,
    Polled,
    Probed,
    Promised,
    RepairPart,
    Reported,
    SendProposal,
    VoteArrived,
)
from atoll.peer.rounds.messages import PROTOCOL, Group, PartDone, PartPlan, Ready, Report
from support.model import elector, signature, verify

PLACE = Place(1, 0)
GRACE_S, STALL_S, DEADLINE_S = 1.0, 0.0, 2.0
PART_BYTES = 10


class Broken(AssertionError):
    """A rule of rounds does not hold in a world that can be reached."""


class Ask(NamedTuple):
    """A question of a leader to all electors; `entry` is the number of the proposed one."""

    leader: int
    attempt: int
    entry: int = -1


class World(NamedTuple):
    """All that is remembered, and all that may still happen."""

    rounds: tuple[int | None, ...]
    """the machine of each leader's term; None while it is not begun, and once its process died"""
    acceptors: tuple[tuple[int, tuple[int, int] | None], ...]
    """by elector: promised attempt, and accepted (attempt, entry)"""
    up: tuple[bool, ...]
    asks: frozenset[Ask] = frozenset()
    votes: frozenset[tuple[int, int, int]] = frozenset()
    """(attempt, entry, elector)"""
    orders: frozenset[tuple[int, int, int, int]] = frozenset()
    """(leader, part, generation, owner): work that owners may finish"""
    fetches: frozenset[tuple[int, int, bytes]] = frozenset()
    """(leader, part, digest)"""
    held: frozenset[tuple[int, bytes]] = frozenset()
    """(leader, digest): bytes in hand"""
    cut: frozenset[tuple[int, int]] = frozenset()
    """(leader, part): streams that bring no more"""
    now: int = 0
    turn: bool = True
    mishaps: int = 0
    polls: int = 0
    members: tuple[int | None, ...] = ()
    """of a joint world, by process: its member's machine; None once the process died"""
    sessions: tuple[tuple[int, Session] | None, ...] = ()
    """of a joint world, by process: the term whose leader it reports to, and how far it came"""
    known: frozenset[int] = frozenset()
    """of a joint world: processes that know the decision"""
    ordered: bool = False
    """an order has come to those that hear of it (`ordered_model`)"""


class Session(IntEnum):
    """A member's session with a leader."""

    DIALLING = 0
    REPORTED = 1
    GROUPED = 2


class Cells:
    """One cell a part."""

    def max_body_bytes(self, members: int, start: int = 0, stop: int | None = None) -> int:
        return PART_BYTES


class RoundModel:
    """Processes that elect and train, the leaders of the first terms, and what may go wrong."""

    def __init__(
        self,
        *,
        processes: int = 2,
        terms: int = 1,
        parts: int = 1,
        mishaps: int = 0,
        ticks: int = 0,
        early: bool = False,
        reported: bool = False,
        polls: int | None = None,
    ) -> None:
        """`early`: the turn comes later; `reported`: all have reported when the first looks.

        `polls` of the leaders, or all of them, may end without some of their answers.
        """
        self.polls = polls
        self.electorate = tuple(elector(index, 0) for index in range(processes))
        self.num_parts, self.mishaps, self.ticks = parts, mishaps, ticks
        self.early, self.reported = early, reported
        leaders = [leader_of(self.electorate, PLACE.position, term) for term in range(terms)]
        self.leaders = [self.electorate.index(leader) for leader in leaders]
        """the process that leads each term"""
        assert len(set(self.leaders)) == terms
        self._machines: list[Round] = []
        self._numbers: dict[Hashable, int] = {}
        self._steps: dict[Hashable, tuple[int, tuple[Any, ...]]] = {}
        self._entries: list[Entry] = []
        self._records: list[bytes] = []
        """the same entries, encoded"""
        self._votes: dict[tuple[int, int, int], VoteArrived] = {}
        self._entry_numbers: dict[bytes, int] = {}
        self._done = {
            (part, generation, owner): PartDone(
                part=part,
                generation=generation,
                wire_bytes=PART_BYTES,
                digest=sha256(f"{part}.{generation} of {owner}".encode()),
                partial=(),
            )
            for part in range(parts)
            for generation in range(8)
            for owner in range(processes)
        }
        self._ready = {
            (process, term): _ready(process, term)
            for process in range(processes)
            for term in range(terms)
        }
        self.decided: set[int] = set()
        """entries that some leader saw decided"""
        self.states: set[RoundState] = set()
        """through which machines went"""

    # exploring

    def explore(self) -> set[World]:
        """Every world that can be reached.

        Raises:
            Broken: in one of them a rule does not hold.
        """
        start = self.start()
        seen, todo = {start}, [start]
        while todo:
            for after in self.steps(todo.pop()):
                if after not in seen:
                    self.check(after)
                    seen.add(after)
                    todo.append(after)
        return seen

    def start(self) -> World:
        processes = len(self.electorate)
        world = World(
            rounds=(None,) * len(self.leaders),
            acceptors=((0, None),) * processes,
            up=(True,) * processes,
            turn=not self.early,
        )
        world = self._begin(world, 0)
        if world.turn:
            world = self._begin_later(world)
        if self.reported:
            for process in range(processes):
                report = Reported(peer=f"p{process}", ready=self._ready[process, 0])
                world = self._feed(world, 0, report)
        return world

    def check(self, world: World) -> None:
        """At most one entry has a certificate."""
        ballots: dict[tuple[int, int], list[int]] = {}
        for attempt, entry, voter in world.votes:
            ballots.setdefault((attempt, entry), []).append(voter)
        won = {entry for (_, entry), voters in ballots.items() if self._is_quorum(voters)}
        if len(won) > 1:
            raise Broken(f"decided twice: {sorted(world.votes)}")

    def _is_quorum(self, electors: list[int]) -> bool:
        return is_quorum(sorted(electors), len(self.electorate))

    def steps(self, world: World) -> Iterator[World]:
        for leader, number in enumerate(world.rounds):
            if number is not None:
                yield from self._reports(world, leader)
                yield from self._parts(world, leader)
                yield from self._polls(world, leader)
        yield from self._answers(world)
        yield from self._mishaps(world)
        if not world.turn:
            yield self._begin_later(self._look_all(world._replace(turn=True)))
        if world.now < self.ticks:
            yield self._look_all(world._replace(now=world.now + 1))

    # what may happen

    def _reports(self, world: World, leader: int) -> Iterator[World]:
        current = self._round(world, leader)
        if current.group is None:
            for process, up in enumerate(world.up):
                if up and not current.is_live(f"p{process}"):
                    ready = self._ready[process, leader]
                    yield self._feed(world, leader, Reported(peer=f"p{process}", ready=ready))
        if current.state is RoundState.FORMING:
            at = {f"p{i}": float(world.now) for i, up in enumerate(world.up) if up}
            yield self._feed(world, leader, Probed(ready_at=at))
        if current.state is RoundState.CALLED:
            yield self._feed(world, leader, LeaderAbsent())

    def _reduced(self, world: World, leader: int) -> Iterator[World]:
        current = self._round(world, leader)
        for order in world.orders:
            if order[0] == leader and current.is_live(f"p{order[3]}"):
                done = self._done[order[1:]]
                yield self._feed(world, leader, PartReduced(peer=f"p{order[3]}", done=done))

    def _parts(self, world: World, leader: int) -> Iterator[World]:
        current = self._round(world, leader)
        yield from self._reduced(world, leader)
        digests = current.parts.digests if current.parts is not None else {}
        for part, digest in digests.items():
            if (leader, part) not in world.cut and (leader, digest) not in world.held:
                held = world._replace(held=world.held | {(leader, digest)})
                yield self._look(held, leader)
        for fetch in world.fetches:
            if fetch[0] == leader:
                ended = FetchEnded(part=fetch[1], digest=fetch[2])
                rest = world._replace(fetches=world.fetches - {fetch})
                yield self._feed(
                    rest._replace(held=rest.held | {(leader, fetch[2])}), leader, ended
                )
                if world.mishaps < self.mishaps:
                    fails = rest._replace(mishaps=rest.mishaps + 1)
                    yield self._feed(fails, leader, ended)

    def _polls(self, world: World, leader: int) -> Iterator[World]:
        current = self._round(world, leader)
        attempt = None if current._polled else current.question
        if attempt is not None and world.polls != self.polls:
            after = world._replace(polls=world.polls + 1)
            yield self._feed(after, leader, Polled(attempt=attempt))

    def _answers(self, world: World) -> Iterator[World]:
        for ask in world.asks:
            for index, up in enumerate(world.up):
                if up:
                    yield from self._answer(world, ask, index)

    def _answer(self, world: World, ask: Ask, index: int) -> Iterator[World]:
        acceptor = self._acceptor(world, index)
        accepted = acceptor.accepted
        if ask.entry < 0:
            if not acceptor.prepare(ask.attempt):
                return
            event: Any = Promised(attempt=ask.attempt, elector=index, accepted=accepted)
            after = world
        else:
            if not acceptor.accept(ask.attempt, self._records[ask.entry]):
                return
            event = self._vote(index, ask)
            after = world._replace(votes=world.votes | {(ask.attempt, ask.entry, index)})
        told = None
        if acceptor.accepted is not None:
            told = acceptor.accepted.attempt, self._number_of(acceptor.accepted.entry)
        acceptors = list(world.acceptors)
        acceptors[index] = acceptor.promised, told
        after = after._replace(acceptors=tuple(acceptors))
        yield after
        if world.rounds[ask.leader] is not None:
            yield self._feed(after, ask.leader, event)

    def _vote(self, index: int, ask: Ask) -> VoteArrived:
        key = index, ask.attempt, ask.entry
        if key not in self._votes:
            payload = vote_payload(self._entries[ask.entry], ask.attempt)
            signed = signature(self.electorate[index].peer_id, payload)
            self._votes[key] = VoteArrived(attempt=ask.attempt, elector=index, signature=signed)
        return self._votes[key]

    def _acceptor(self, world: World, index: int) -> Acceptor:
        acceptor = Acceptor()
        acceptor.promised, told = world.acceptors[index]
        if told is not None:
            attempt, entry = told
            acceptor.accepted = Accepted(attempt=attempt, entry=self._records[entry])
        return acceptor

    def _mishaps(self, world: World) -> Iterator[World]:
        if world.mishaps == self.mishaps:
            return
        again = world._replace(mishaps=world.mishaps + 1)
        for process, up in enumerate(world.up):
            if up:
                yield self._die(again, process)
        for leader, number in enumerate(world.rounds):
            for part in range(self.num_parts):
                if number is not None and (leader, part) not in world.cut:
                    cut = again._replace(cut=again.cut | {(leader, part)})
                    yield self._look(cut, leader)

    def _die(self, world: World, process: int) -> World:
        up = tuple(alive and index != process for index, alive in enumerate(world.up))
        rounds = tuple(
            None if self.leaders[leader] == process else number
            for leader, number in enumerate(world.rounds)
        )
        world = world._replace(up=up, rounds=rounds)
        for leader, number in enumerate(rounds):
            if number is not None and self._machines[number].is_live(f"p{process}"):
                world = self._feed(world, leader, Left(peer=f"p{process}"))
        return world

    # machines

    def _begin(self, world: World, leader: int) -> World:
        begun = Round(
            PLACE,
            leader,
            leads=Leads(self.electorate[self.leaders[leader]]),
            rules=self._rules[leader],
            view=self._view(world, leader, None),
        )
        rounds = list(world.rounds)
        rounds[leader] = self._number(begun)
        return world._replace(rounds=tuple(rounds))

    def _begin_later(self, world: World) -> World:
        """Later terms are led at the position's turn only."""
        for leader in range(1, len(self.leaders)):
            if world.rounds[leader] is None and world.up[self.leaders[leader]]:
                world = self._begin(world, leader)
        return world

    @cached_property
    def _rules(self) -> list[Rules]:
        return [self._rules_of(term) for term in range(len(self.leaders))]

    def _rules_of(self, term: int) -> Rules:
        def form(ready: Any) -> Group:
            owners = [part % len(ready) for part in range(self.num_parts)]
            return Group(
                epoch=PLACE.epoch,
                position=PLACE.position,
                term=term,
                members=tuple(_member(peer) for peer in ready),
                parts=tuple(
                    PartPlan(start_cell=part, stop_cell=part + 1, owner=owner)
                    for part, owner in enumerate(owners)
                ),
                stall_s=STALL_S,
                deadline_s=DEADLINE_S,
            )

        def entry(kind: Any, members: Any, parts: Any, dropped: Any) -> Entry:
            return Entry(
                run_id=b"r" * 32,
                epoch=PLACE.epoch,
                position=PLACE.position,
                kind=kind,
                previous_chain=b"c" * 32,
                fragment=0,
                lr=1.0,
                momentum=0.0,
                members=tuple(members),
                parts=tuple(parts),
                electorate=self.electorate,
            )

        return Rules(form=form, entry=entry, cells=Cells(), grace_s=GRACE_S)  # type: ignore[arg-type]

    def _round(self, world: World, leader: int) -> Round:
        number = world.rounds[leader]
        assert number is not None
        return self._machines[number]

    def _view(self, world: World, leader: int, current: Round | None) -> LeaderView:
        digests = current.parts.digests if current is not None and current.parts else {}
        parts = range(self.num_parts)
        return LeaderView(
            now=float(world.now),
            turn=world.turn,
            electorate=self.electorate,
            opened_at=0.0,
            last_s=0.0,
            held=frozenset(p for p, digest in digests.items() if (leader, digest) in world.held),
            coming=frozenset(p for p in parts if (leader, p) not in world.cut),
        )

    def _look_all(self, world: World) -> World:
        for leader, number in enumerate(world.rounds):
            if number is not None:
                world = self._look(world, leader)
        return world

    def _look(self, world: World, leader: int) -> World:
        return self._feed(world, leader, None)

    def _feed(self, world: World, leader: int, event: Any) -> World:
        """An event reaches a machine, which is then looked at until it asks for nothing more."""
        world, actions = self._step(world, leader, event)
        todo = deque(actions)
        while True:
            while todo:
                world = self._do(world, leader, todo.popleft())
            world, actions = self._step(world, leader, None)
            if not actions:
                return world
            todo.extend(actions)

    def _step(self, world: World, leader: int, event: Any) -> tuple[World, tuple[Any, ...]]:
        number = world.rounds[leader]
        assert number is not None
        view = self._view(world, leader, self._machines[number]) if event is None else None
        key = number, canonical(event), view
        if key not in self._steps:
            current = clone(self._machines[number])
            try:
                actions = current.advance(view) if view is not None else current.receive(event)
            except Refused as error:
                assert error.code is RefusalCode.CLOSED
                actions = []
            self.states.add(current.state)
            self._steps[key] = self._number(current), tuple(actions)
        after, done = self._steps[key]
        rounds = list(world.rounds)
        rounds[leader] = after
        return world._replace(rounds=tuple(rounds)), done

    def _number(self, current: Round) -> int:
        key = canonical(current)
        if key not in self._numbers:
            self._numbers[key] = len(self._machines)
            self._machines.append(current)
        return self._numbers[key]

    def _number_of(self, record: bytes) -> int:
        if record not in self._entry_numbers:
            self._entry_numbers[record] = len(self._entries)
            self._entries.append(Entry.decode(record))
            self._records.append(record)
        return self._entry_numbers[record]

    # what machines ask for

    def _do(self, world: World, leader: int, action: Any) -> World:
        match action:
            case CloseGroup(group=group):
                self._check_closed(world, leader)
                new = {
                    (leader, i, 0, self._owner(group, p.owner)) for i, p in enumerate(group.parts)
                }
                return world._replace(orders=world.orders | new)
            case RepairPart(order=order, owner=owner):
                new = {(leader, order.part, order.generation, int(owner[1:]))}
                return world._replace(orders=world.orders | new)
            case Fetch(part=part, done=done):
                return world._replace(fetches=world.fetches | {(leader, part, done.digest)})
            case AskPromises(attempt=attempt):
                return world._replace(asks=world.asks | {Ask(leader, attempt)})
            case SendProposal():
                return self._propose(world, leader, action)
            case Decide():
                self._check_decided(action)
        return world

    def _owner(self, group: Group, index: int) -> int:
        return int(group.members[index].peer_id[1:])

    def _check_closed(self, world: World, leader: int) -> None:
        """All who are expected are there, or a quorum had its grace, or the first was alone."""
        current = self._round(world, leader)
        ready = set(current.live)
        quorum = self._is_quorum([int(peer[1:]) for peer in ready])
        waited = world.now >= (GRACE_S if quorum else machine.ALONE_GRACES * GRACE_S)
        if current.expected is None or not (self._awaited(world, current) <= ready or waited):
            raise Broken(f"closed too early, with {sorted(ready)} at {world.now} s")

    def _awaited(self, world: World, current: Round) -> set[str]:
        return set(current.expected or ())

    def _propose(self, world: World, leader: int, action: SendProposal) -> World:
        if not world.turn:
            raise Broken("proposed before the position's turn")
        current, entry = self._round(world, leader), action.entry
        number = self._number_of(entry.encode())
        if entry.kind == "update":
            self._check_update(entry)
        elif entry.kind == "control":
            self._check_control(world, leader, entry)
        elif all(ask.entry != number for ask in world.asks):  # else it may be bound to it
            if current.live and world.now <= DEADLINE_S:
                raise Broken(f"gave up at {world.now} s, with {current.live} there")
        same = [ask for ask in world.asks if ask.attempt == action.attempt and ask.entry >= 0]
        if any(ask.entry != number for ask in same):
            raise Broken(f"two entries at attempt {action.attempt}")
        return world._replace(asks=world.asks | {Ask(leader, action.attempt, number)})

    def _check_update(self, entry: Entry) -> None:
        """Every part is one that its owner of that generation has finished."""
        if [part.start_cell for part in entry.parts] != list(range(self.num_parts)):
            raise Broken(f"proposed {len(entry.parts)} of {self.num_parts} parts")
        for index, part in enumerate(entry.parts):
            owner = int(entry.members[part.owner].peer_id[1:])
            if part.digest != self._done[index, part.generation, owner].digest:
                raise Broken(f"part {index} is not of its owner's generation {part.generation}")

    def _check_control(self, world: World, leader: int, entry: Entry) -> None:
        raise Broken("proposed an order that nobody gave")

    def _check_decided(self, action: Decide) -> None:
        try:
            check_certificate(action.entry, action.certificate, self.electorate, verify)
        except CertificateInvalid as error:
            raise Broken(f"decided without a certificate: {error}") from error
        self.decided.add(self._number_of(action.entry.encode()))

    # where nothing fails any more

    def finish(self, world: World, leader: int = 0, *, limit: int = 200) -> World:
        """Deliver everything to one leader, without a mishap; time passes when nothing is left."""
        for _ in range(limit):
            current = self._round(world, leader)
            if current.state in machine.OVER:
                return world
            after = next((w for w in self._fair(world, leader) if w != world), None)
            world = after or self._look_all(world._replace(now=world.now + 1))
        raise Broken(f"{self._round(world, leader).state} for ever")

    def _fair(self, world: World, leader: int) -> Iterator[World]:
        if not world.turn:
            yield self._begin_later(self._look_all(world._replace(turn=True)))
        yield from self._reports(world, leader)
        yield from self._parts(world, leader)
        for ask in world.asks:
            if ask.leader == leader and ask.attempt == self._round(world, leader).question:
                for index, up in enumerate(world.up):
                    if up:
                        yield from list(self._answer(world, ask, index))[1:]
        yield from self._polls(world, leader)


def _ready(process: int, term: int) -> Ready:
    report = Report(
        epoch=PLACE.epoch,
        position=PLACE.position,
        incarnation="0",
        weight=1.0,
        tokens=1,
        steps=1,
        loss=None,
        norm=1.0,
        uplink_mbit_s=100.0,
    )
    return Ready(
        protocol=PROTOCOL,
        term=term,
        stands_at=PLACE.position,
        chain=b"c" * 32,
        report=report,
        signature=b"s",
    )


def _member(peer: str) -> Member:
    return Member(
        peer_id=peer,
        incarnation="0",
        weight=1.0,
        clip=1.0,
        norm=1.0,
        tokens=1,
        steps=1,
        loss=None,
    )


LEAVES = (
    str,
    bytes,
    int,
    float,
    bool,
    type(None),
    Enum,
    Record,
    Rules,
    Cells,
    Elector,
    frozenset,
    range,
)

PLAIN = frozenset({str, bytes, int, float, bool, type(None), range})


def clone(thing: Any) -> Any:
    """Return a copy that shares only what never changes."""
    if type(thing) in PLAIN:
        return thing
    if isinstance(thing, LEAVES) or callable(thing):
        return thing
    if isinstance(thing, dict):
        return {key: clone(value) for key, value in thing.items()}
    if isinstance(thing, set):
        return set(thing)
    if isinstance(thing, list | tuple):
        kind: Callable[[Any], Any] = list if isinstance(thing, list) else _tuple_of(thing)
        return kind([clone(each) for each in thing])
    copy = object.__new__(type(thing))
    for name, value in vars(thing).items():
        object.__setattr__(copy, name, clone(value))
    return copy


def _tuple_of(thing: tuple[Any, ...]) -> Callable[[Any], Any]:
    make = getattr(type(thing), "_make", None)
    return make if make is not None else tuple


_records: dict[int, tuple[Record, bytes]] = {}


def canonical(thing: Any) -> Hashable:
    """Return what is equal for equal things, and hashes."""
    if type(thing) in PLAIN:  # most of them are; asking for all leaves takes longer
        return cast(Hashable, thing)
    if isinstance(thing, Record):
        known = _records.get(id(thing))
        if known is None:
            known = _records[id(thing)] = thing, type(thing).__name__.encode() + thing.encode()
        return known[1]
    if isinstance(thing, LEAVES) or callable(thing):
        return thing if not isinstance(thing, Rules | Cells) else id(thing)
    if isinstance(thing, dict):
        return tuple((key, canonical(value)) for key, value in thing.items())
    if isinstance(thing, set):
        return frozenset(thing)
    if isinstance(thing, list | tuple):
        return tuple(canonical(each) for each in thing)
    assert is_dataclass(thing) or type(thing).__module__.startswith("atoll."), type(thing)
    return type(thing).__name__, tuple((name, canonical(v)) for name, v in vars(thing).items())
