"""Two positions of a log: the first may evict an elector while others propose something else.

The world is two of `support.model`, of the place that decides the order and of the one after it,
which one process after another enters once there is a certificate of the first. A process votes and
leads in one of them at a time. Who votes at the second place follows from the entry of the first,
by the rules of settings and electorates. The evicted process alone takes itself for an elector
still: it leads and votes there as if nothing had been ordered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from atoll.optim.log import electorate as electorates
from atoll.optim.log.electorate import Succession
from atoll.optim.log.entry import (
    Certificate,
    CertificateInvalid,
    Elector,
    Entry,
    Vote,
    check_certificate,
    vote_payload,
)
from atoll.optim.log.orders import EvictPeer, Order, RunSettings
from atoll.peer.rounds.consensus.ballots import Leads, Place, leader_of, term_of
from support.model import (
    HERE,
    NEXT,
    Change,
    DecidedTwice,
    Message,
    Model,
    Process,
    State,
    as_accepted,
    as_entry,
    as_value,
    elector,
    put,
    signature,
    verify,
)

ORDER, FURTHER = 255, 254
"""the value that evicts the last process, and that of a leader when nothing fails any more"""


class World(NamedTuple):
    """What is remembered at both places, and which processes have entered the second."""

    first: State
    second: State
    entered: tuple[bool, ...]
    decided: int | None = None
    """the value of the first place"""
    mishaps: int = 0


class PlaceModel(Model):
    """One place, where processes may differ in whom they take for its electors."""

    def __init__(
        self,
        views: Sequence[tuple[Elector, ...]],
        attempts: Sequence[int],
        *,
        place: Place,
        knowing: Collection[int] = (),
    ) -> None:
        """`views` are electorates by process; processes that know of the order propose it."""
        super().__init__(len(views), attempts, 0, place=place)
        self.views, self.knowing = views, frozenset(knowing)

    def electorate_of(self, index: int) -> tuple[Elector, ...]:
        return self.views[index]

    def enter(self, state: State, index: int) -> State:
        """A process comes to the place, and asks for what it may lead."""
        for attempt in self.attempts:
            for after in self._step(state, index, self._begin, attempt):
                state = after
        return state

    def evicts(self, value: int) -> bool:
        return value == ORDER

    def finish_without(self, state: State, victim: int) -> frozenset[int]:
        """The winners once a further leader that never failed meets all but one process.

        Messages of earlier attempts come no more.
        """
        view = self.views[0]
        intact = [i for i, p in enumerate(state.processes) if i != victim and not p.incarnation]
        leaders = {a: self._leader_in(view, a) for a in self.further}
        attempt = next(a for a in self.further if leaders[a] in intact)
        proposer = Leads(view[leaders[attempt]]).begin(self.place, attempt, view)
        for index in intact:
            ask = Message("prepare", attempt, elector=leaders[attempt])
            change = self._answer(index, state.processes[index], ask)
            assert change is not None and change[1] is not None
            proposer.promise(index, as_accepted(change[1].told))
        value = as_value(proposer.choose(as_entry(FURTHER)))
        votes = {Message("vote", attempt, value, index) for index in intact}
        return self.winners(state.messages | votes)

    def _leader_in(self, view: tuple[Elector, ...], attempt: int) -> int:
        return view.index(leader_of(view, self.place.position, term_of(attempt)))

    def _own(self, index: int, attempt: int, incarnation: int) -> int:
        if index in self.knowing:
            return ORDER
        return attempt + 16 * index + 64 * incarnation

    # each ask names its sender, as two processes may lead one attempt

    def _begin(self, index: int, process: Process, attempt: int) -> Change:
        return _sent_by(index, super()._begin(index, process, attempt))

    def _take_promise(self, index: int, process: Process, promise: Message) -> Change:
        return _sent_by(index, super()._take_promise(index, process, promise))

    def _sender(self, ask: Message) -> str:
        return f"p{ask.elector}"

    def _deliver(self, state: State, index: int, ask: Message) -> Iterator[State]:
        for after, answer in self._asked(state, index, ask):
            if answer.kind == "vote":
                yield after._replace(messages=after.messages | {answer})
                continue
            yield after
            if answer.elector < len(self.views[ask.elector]):  # others are not asked
                yield from self._step(after, ask.elector, self._take_promise, answer)

    def _holds(self, votes: frozenset[Message], attempt: int, value: int) -> bool:
        """Whether anybody but the evicted process takes the votes for a certificate."""
        entry = self.entry(value)
        cast = {m.elector for m in votes if (m.attempt, m.value) == (attempt, value)}
        views = {*self.views[:-1]}
        return any(self._is_certified(entry, attempt, cast, view) for view in views)

    def _is_certified(
        self, entry: Entry, attempt: int, cast: Collection[int], view: tuple[Elector, ...]
    ) -> bool:
        payload = vote_payload(entry, attempt)
        signed = tuple(
            Vote(elector=index, signature=signature(each.peer_id, payload))
            for index, each in enumerate(view)
            if int(each.peer_id[1:]) in cast
        )
        certificate = Certificate(attempt=attempt, votes=signed)
        try:
            check_certificate(entry, certificate, view, verify)
        except CertificateInvalid:
            return False
        return True


def _sent_by(index: int, change: Change) -> Change:
    if change is None or change[1] is None:
        return change
    return change[0], change[1]._replace(elector=index)


class EvictionModel:
    """Processes 0..n-1, of which the last one may be evicted; see the module."""

    def __init__(
        self,
        electors: int,
        attempts: Sequence[int],
        *,
        knowing: Collection[int],
        mishaps: int = 0,
    ) -> None:
        """The same attempts at both places; so many restarts in all."""
        self.present = tuple(elector(index, 0) for index in range(electors))
        self.victim, self.mishaps = electors - 1, mishaps
        self.attempts = attempts
        views = [self.here(index, index in knowing) for index in range(electors)]
        self.first = PlaceModel(views, attempts, place=HERE, knowing=knowing)
        self._seconds: dict[bool, PlaceModel] = {}

    def here(self, index: int, knows: bool) -> tuple[Elector, ...]:
        """Who votes at the place of the order, as a process takes it: those of the entry before."""
        return self.present

    def beyond(self, index: int, evicts: bool) -> tuple[Elector, ...]:
        """Who votes at the next place, as a process takes it."""
        return self.present if index == self.victim else self.after(evicts)

    def after(self, evicts: bool) -> tuple[Elector, ...]:
        """Who votes after an entry with or without the order, by the rules of the log."""
        change = EvictPeer(peer_id="1" * 46)
        settings = RunSettings()
        evicted: tuple[str, ...] = ()
        if evicts:
            order = Order(run_id=b"r" * 32, number=1, change=change)
            names = {"1" * 46: f"p{self.victim}"}  # of a model: no PeerID
            evicted = tuple(names[each] for each in settings.after(order, 0).evicted)
        now = Succession(self.present)
        return electorates.succeed(
            now, position=0, fragment=0, members=(), parts=(), evicted=evicted
        ).electorate

    def second(self, value: int) -> PlaceModel:
        """The place after an entry."""
        evicts = self.first.evicts(value)
        if evicts not in self._seconds:
            views = [self.beyond(index, evicts) for index in range(len(self.present))]
            self._seconds[evicts] = PlaceModel(views, self.attempts, place=NEXT)
        return self._seconds[evicts]

    def explore(self) -> set[World]:
        """Every reachable world.

        Raises:
            DecidedTwice: in one of them two entries of a place have a certificate.
        """
        start = self.start()
        seen, todo = {start}, [start]
        while todo:
            world = todo.pop()
            for after in self.steps(world):
                checked = self.checked(after)
                if checked not in seen:
                    seen.add(checked)
                    todo.append(checked)
        return seen

    def start(self) -> World:
        """All stand at the first place."""
        nothing = State(tuple(Process() for _ in self.present), frozenset())
        first = nothing
        for index in range(len(self.present)):
            first = self.first.enter(first, index)
        return World(first, nothing, (False,) * len(self.present))

    def checked(self, world: World) -> World:
        """Note what is decided; forget the first place once nobody is there."""
        won = self.first.winners(world.first.messages)
        if len(won) > 1:
            raise DecidedTwice(f"{sorted(won)} by {sorted(map(str, world.first.messages))}")
        if won and world.decided is None:
            world = world._replace(decided=next(iter(won)))
        if world.decided is None:
            return world
        ends = self.second(world.decided).winners(world.second.messages)
        if len(ends) > 1:
            raise DecidedTwice(f"{sorted(ends)} by {sorted(map(str, world.second.messages))}")
        if all(world.entered):
            world = world._replace(first=State((), frozenset()))
        return world

    def steps(self, world: World) -> Iterator[World]:
        for after in self.first.steps(world.first, decided=False):
            if _changed_only(world.first, after, [not e for e in world.entered]):
                yield world._replace(first=after)
        if world.decided is not None:
            second = self.second(world.decided)
            for after in second.steps(world.second, decided=False):
                if _changed_only(world.second, after, world.entered):
                    yield world._replace(second=after)
            for index, entered in enumerate(world.entered):
                if not entered:
                    yield self._enter(world, second, index)
        if world.mishaps < self.mishaps:
            for index in range(len(self.present)):
                yield self._restart(world, index)

    def finish(self, world: World) -> tuple[frozenset[int], frozenset[int]]:
        """The winners at both places, once all but the last process fail no more and it is gone."""
        won = frozenset({world.decided} - {None})
        if world.decided is None:
            won = self.first.finish_without(world.first, self.victim)
        (value,) = won
        second = self.second(value)
        return won, second.finish_without(self._all_enter(world, second), self.victim)

    def _all_enter(self, world: World, second: PlaceModel) -> State:
        for index, entered in enumerate(world.entered):
            if not entered and index != self.victim:
                world = self._enter(world, second, index)
        return world.second

    def _enter(self, world: World, second: PlaceModel, index: int) -> World:
        entered = list(world.entered)
        entered[index] = True
        return world._replace(entered=tuple(entered), second=second.enter(world.second, index))

    def _restart(self, world: World, index: int) -> World:
        """Start again with the log alone; it leads and votes if the rules let it."""
        at_first = not world.entered[index]
        state = world.first if at_first else world.second
        anew = Process(incarnation=state.processes[index].incarnation + 1)
        world = world._replace(mishaps=world.mishaps + 1)
        later = put(world.second, index, anew)
        if at_first:
            first = self.first.enter(put(world.first, index, anew), index)
            return world._replace(first=first, second=later)
        assert world.decided is not None
        return world._replace(second=self.second(world.decided).enter(later, index))


def _changed_only(before: State, after: State, may: Sequence[bool]) -> bool:
    """Whether only processes that stand at a place took part in a step there."""
    if not before.processes:
        return False
    pairs = zip(before.processes, after.processes, may, strict=True)
    return all(one == other or here for one, other, here in pairs)
