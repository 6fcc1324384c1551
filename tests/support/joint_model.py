"""A leader, its members and the electors in one world: forming, reducing, voting and deciding.

`round_model` lets reports come at any time, and asks nothing of those who made them. Here every
process is a member as well: its `MemberRound` decides to whom it reports, its report opens a
session with the `Round` of that term, the group goes back by the session, and the parts are reduced
by members that have it. Leader, members and votes are the product's own machines, driven together.
Parts stay abstract, as there: an owner finishes once every live member of the group has joined it.

Mishaps, bounded together, are a process that dies, a session that is lost while both ends live,
and those of `round_model`. A decision becomes known at the leader that counted it, and from there
at any process, in any order; one that is known only to the dead is not known.

Outside stay the all-reduce itself, what an elector checks of an entry before its vote, the way of
an entry between peers, and a leader's driver.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

from atoll.dht.refusals import RefusalCode
from atoll.peer.rounds.consensus.ballots import Place, term_of
from atoll.peer.rounds.consensus.member import (
    Failed,
    FetchEntries,
    Grouped,
    Join,
    Leave,
    MemberRound,
    MemberState,
    MemberView,
)
from atoll.peer.rounds.consensus.round import OVER, RoundState
from atoll.peer.rounds.consensus.round_events import Decide, LeaderAbsent, Left, Probed, Reported
from support.round_model import (
    PLACE,
    Broken,
    RoundModel,
    Session,
    World,
    canonical,
    clone,
)

BEFORE, AFTER = Place(PLACE.epoch, PLACE.position - 1), Place(PLACE.epoch, PLACE.position + 1)
LOST = Failed(why="the leader is lost")
DECIDED = Failed(why="it is decided", code=RefusalCode.DECIDED)


class JointModel(RoundModel):
    """Processes that elect, train and report; the first terms' leaders are among them."""

    def __init__(self, *, victim: int | None = None, grouped: bool = False, **options: Any) -> None:
        """`victim`: its death is the only mishap. `grouped`: all begin in the first group."""
        super().__init__(reported=grouped, **options)
        self._victim = victim
        self.member_states: set[MemberState] = set()
        """through which members went"""
        self._members: list[MemberRound] = []
        self._member_numbers: dict[Hashable, int] = {}
        self._member_steps: dict[Hashable, tuple[int, tuple[Any, ...]]] = {}

    def start(self) -> World:
        is_grouped, self.reported = self.reported, False  # by the members' own sessions, here
        world = super().start()
        processes = range(len(self.electorate))
        member = self._number_of_member(MemberRound(PLACE, stall_s=0.0))
        world = world._replace(
            members=(member,) * len(processes), sessions=(None,) * len(processes)
        )
        for process in processes:
            world = self._look_member(world, process)
        if is_grouped:
            for process in processes:
                world = next(self._sessions(world, process))
            world = next(self._reports(world, 0))
            for process in processes:
                world = next(self._sessions(world, process))
        return world

    def check(self, world: World) -> None:
        super().check(world)
        for process, number in enumerate(world.members):
            if number is None:
                continue
            state, session = self._members[number].state, world.sessions[process]
            if (state is MemberState.OVER) != (process in world.known):
                raise Broken(f"p{process} is {state}, and {sorted(world.known)} know the decision")
            if session is None or session[0] >= len(self.leaders):
                continue
            if session[1] is Session.GROUPED and state is not MemberState.REDUCING:
                raise Broken(f"p{process} is {state} in the group of term {session[0]}")
            self._check_session(world, process, session)

    def _check_session(self, world: World, process: int, session: tuple[int, Session]) -> None:
        term, progress = session
        if world.rounds[term] is None or self._round(world, term).state in OVER:
            return  # it ends next
        current, peer = self._round(world, term), f"p{process}"
        if (progress >= Session.REPORTED) != current.is_live(peer):
            raise Broken(f"{peer} is {progress!r}, and its leader counts {current.live}")
        is_member = current.group is not None and peer in _members_of(current.group)
        if progress is Session.GROUPED and not is_member:
            raise Broken(f"{peer} reduces in a group that it is not in")
        if progress is Session.REPORTED and current.group is not None and not is_member:
            raise Broken(f"{peer} waits for a group that was closed without it")

    # what may happen

    def steps(self, world: World) -> Iterator[World]:
        for process, up in enumerate(world.up):
            if up:
                yield from self._sessions(world, process)
                yield from self._hear(world, process)
        yield from super().steps(world)

    def _reports(self, world: World, leader: int) -> Iterator[World]:
        state = self._round(world, leader).state
        if state is RoundState.FORMING:
            at = {f"p{i}": float(world.now) for i, up in enumerate(world.up) if up}
            yield self._feed(world, leader, Probed(ready_at=at))
        if state is RoundState.CALLED and not world.up[self.leaders[leader - 1]]:
            yield self._feed(world, leader, LeaderAbsent())

    def _reduced(self, world: World, leader: int) -> Iterator[World]:
        group = self._round(world, leader).group
        members = _members_of(group) if group is not None else ()
        live = [int(peer[1:]) for peer in members if self._round(world, leader).is_live(peer)]
        if all(world.sessions[process] == (leader, Session.GROUPED) for process in live):
            yield from super()._reduced(world, leader)

    def _sessions(self, world: World, process: int) -> Iterator[World]:
        session = world.sessions[process]
        if session is None or session[0] >= len(self.leaders):
            return
        term, progress = session
        if world.rounds[term] is None:
            if world.up[self.leaders[term]] and not self._knows(world, self.leaders[term]):
                return  # its term has not begun
            failure = DECIDED if world.up[self.leaders[term]] else LOST
            yield self._end_session(world, process, failure)
            return
        current, peer = self._round(world, term), f"p{process}"
        if current.state is RoundState.FAILED:
            yield self._end_session(world, process, LOST)
        elif progress is Session.DIALLING:
            after = self._feed(world, term, Reported(peer=peer, ready=self._ready[process, term]))
            if self._round(after, term).is_live(peer):
                yield self._enter(after, process, (term, Session.REPORTED))
            else:
                refused = Failed(why="closed", code=RefusalCode.CLOSED)
                yield self._end_session(after, process, refused)
        elif progress is Session.REPORTED and current.group is not None:
            after = self._enter(world, process, (term, Session.GROUPED))
            yield self._tell(after, process, Grouped())
        may_fail = self._victim is None and world.mishaps < self.mishaps
        if may_fail and progress > Session.DIALLING:
            again = world._replace(mishaps=world.mishaps + 1)
            yield self._end_session(again, process, LOST)

    def _mishaps(self, world: World) -> Iterator[World]:
        if self._victim is None:
            yield from super()._mishaps(world)
        elif world.mishaps < self.mishaps and world.up[self._victim]:
            yield self._die(world._replace(mishaps=world.mishaps + 1), self._victim)

    def _hear(self, world: World, process: int) -> Iterator[World]:
        if process not in world.known and any(world.up[other] for other in world.known):
            yield self._learn(world, process)

    def _knows(self, world: World, process: int) -> bool:
        return process in world.known

    # members

    def _end_session(self, world: World, process: int, failure: Failed) -> World:
        return self._tell(self._leave(world, process), process, failure)

    def _leave(self, world: World, process: int) -> World:
        session = world.sessions[process]
        world = self._enter(world, process, None)
        if session is not None and session[1] >= Session.REPORTED:
            number = world.rounds[session[0]]
            if number is not None and self._machines[number].is_live(f"p{process}"):
                return self._feed(world, session[0], Left(peer=f"p{process}"))
        return world

    def _enter(self, world: World, process: int, session: tuple[int, Session] | None) -> World:
        sessions = list(world.sessions)
        sessions[process] = session
        return world._replace(sessions=tuple(sessions))

    def _learn(self, world: World, process: int) -> World:
        """The entry arrives: the process leads the position no more, and its member is done."""
        rounds = tuple(
            None
            if number is not None
            and self.leaders[term] == process
            and self._machines[number].state not in OVER
            else number
            for term, number in enumerate(world.rounds)
        )
        world = world._replace(known=world.known | {process}, rounds=rounds)
        return self._look_member(world, process)

    def _tell(self, world: World, process: int, event: Grouped | Failed) -> World:
        world, actions = self._member_step(world, process, event)
        for action in actions:
            world = self._do_member(world, process, action)
        return self._look_member(world, process)

    def _look_member(self, world: World, process: int) -> World:
        for _ in range(20):
            if world.members[process] is None:
                return world
            world, actions = self._member_step(world, process, None)
            if not actions:
                return world
            for action in actions:
                world = self._do_member(world, process, action)
        raise Broken(f"p{process} acts without end")

    def _member_step(
        self, world: World, process: int, event: Grouped | Failed | None
    ) -> tuple[World, tuple[Any, ...]]:
        number = world.members[process]
        assert number is not None
        view = self._member_view(world, process) if event is None else None
        key = number, canonical(event), view
        if key not in self._member_steps:
            member = clone(self._members[number])
            actions = member.advance(view) if event is None else member.receive(event)
            self.member_states.add(member.state)
            self._member_steps[key] = self._number_of_member(member), tuple(actions)
        after, done = self._member_steps[key]
        members = list(world.members)
        members[process] = after
        return world._replace(members=tuple(members)), done

    def _member_view(self, world: World, process: int) -> MemberView:
        here = PLACE if world.turn else BEFORE
        return MemberView(
            now=float(world.now),
            place=AFTER if process in world.known else here,
            electorate=self.electorate,
            term=term_of(world.acceptors[process][0]),
        )

    def _do_member(self, world: World, process: int, action: Any) -> World:
        match action:
            case Join(leader=leader, term=term):
                if term < len(self.leaders) and leader != f"p{self.leaders[term]}":
                    raise Broken(f"p{process} took {leader} for the leader of term {term}")
                if world.turn and term < term_of(world.acceptors[process][0]):
                    raise Broken(f"p{process} joined term {term} after it promised a later one")
                return self._enter(world, process, (term, Session.DIALLING))
            case Leave():
                return self._leave(world, process)
            case FetchEntries() if any(world.up[other] for other in world.known):
                return self._learn(world, process)
        return world

    def _number_of_member(self, member: MemberRound) -> int:
        key = canonical(member)
        if key not in self._member_numbers:
            self._member_numbers[key] = len(self._members)
            self._members.append(member)
        return self._member_numbers[key]

    # what machines ask for

    def _do(self, world: World, leader: int, action: Any) -> World:
        world = super()._do(world, leader, action)
        if isinstance(action, Decide) and self.leaders[leader] not in world.known:
            world = self._learn(world, self.leaders[leader])
        return world

    def _die(self, world: World, process: int) -> World:
        members, sessions = list(world.members), list(world.sessions)
        members[process] = sessions[process] = None
        return super()._die(
            world._replace(members=tuple(members), sessions=tuple(sessions)), process
        )

    def _look_all(self, world: World) -> World:
        world = super()._look_all(world)
        for process, number in enumerate(world.members):
            if number is not None:
                world = self._look_member(world, process)
        return world

    def die(self, world: World, process: int) -> World:
        """A process is killed."""
        return self._die(world, process)

    # where nothing fails any more

    def settle(self, world: World, *, limit: int = 400) -> World:
        """Deliver everything without a mishap, until all that live know the decision."""
        calm = world._replace(mishaps=self.mishaps)
        for _ in range(limit):
            if all(process in calm.known for process, up in enumerate(calm.up) if up):
                return calm
            after = next((w for w in self._calm(calm) if w != calm), None)
            calm = after or self._look_all(calm._replace(now=calm.now + 1))
            self.check(calm)
        raise Broken(f"no decision for ever: {self._told(calm)}")

    def _calm(self, world: World) -> Iterator[World]:
        for process, up in enumerate(world.up):
            if up:
                yield from self._hear(world, process)
                yield from self._sessions(world, process)
        for leader, number in enumerate(world.rounds):
            if number is not None and self._machines[number].state not in OVER:
                yield from self._fair(world, leader)

    def _told(self, world: World) -> list[object]:
        rounds = [self._machines[n].state for n in world.rounds if n is not None]
        members = [self._members[n].state for n in world.members if n is not None]
        return [*rounds, *members, *world.sessions]


def _members_of(group: Any) -> tuple[str, ...]:
    return tuple(member.peer_id for member in group.members)
