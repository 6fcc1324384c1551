"""A member's way through the terms of a position, in every order of entries, groups and failures.

Each broken rule below is one that somebody could write; the same search has to find it.
"""

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from atoll.dht.refusals import RefusalCode
from atoll.peer.rounds.consensus.ballots import Place, leader_of
from atoll.peer.rounds.consensus.member import (
    CLOSED_STALLS,
    Failed,
    Grouped,
    Join,
    Leave,
    MemberRound,
    MemberState,
    MemberView,
    NoteTurn,
    ReportTurn,
    SendReport,
)
from support.model import elector
from support.round_model import Broken, canonical, clone

PLACE = Place(1, 5)
AHEAD = 2
ELECTORATES = tuple(elector(index, 0) for index in range(3)), tuple(elector(i, 0) for i in (1, 2))
CODES = None, RefusalCode.CLOSED, RefusalCode.DECIDED, RefusalCode.ELSEWHERE
STALL_S = 1.0


class World(NamedTuple):
    member: int
    place: Place
    electorate: int
    """which; -1: none is known"""
    promised: int = 0
    now: float = 0.0
    failures: int = 0
    session: tuple[str, int, bool, bool] | None = None
    """(leader, term, joined early, told of the turn)"""


class MemberModel:
    """One member, entries that may change its electors, and so many failures of sessions."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.states: set[MemberState] = set()
        self._members: list[MemberRound] = []
        self._numbers: dict[object, int] = {}

    def explore(self) -> set[World]:
        member = self._number(MemberRound(PLACE, stall_s=STALL_S))
        start = self._look(World(member, Place(1, PLACE.position - AHEAD), 0))
        seen, todo = {start}, [start]
        while todo:
            for after in self._steps(todo.pop()):
                if after not in seen:
                    self._check(after)
                    seen.add(after)
                    todo.append(after)
        return seen

    def member(self, world: World) -> MemberRound:
        return self._members[world.member]

    def view(self, world: World) -> MemberView:
        known = ELECTORATES[world.electorate] if world.electorate >= 0 else ()
        return MemberView(now=world.now, place=world.place, electorate=known, term=world.promised)

    def _steps(self, world: World) -> Iterator[World]:
        if world.place <= PLACE:
            after = Place(1, world.place.position + 1)
            for electorate in range(-1, len(ELECTORATES)):
                yield self._look(world._replace(place=after, electorate=electorate))
            yield self._look(world._replace(place=Place(2, 0)))
            if world.electorate < 0:
                yield self._look(world._replace(electorate=0))
        if world.place == PLACE and not world.promised:
            yield self._look(world._replace(promised=1))
        if world.session is not None:
            yield self._look(self._feed(world, Grouped()))
            if world.failures < self.failures:
                for code in CODES:
                    failed = world._replace(failures=world.failures + 1, session=None)
                    yield self._look(self._feed(failed, Failed(why="", code=code)))
        wake_at = self.member(world).wake_at
        if wake_at is not None:
            yield self._look(world._replace(now=wake_at))

    def _feed(self, world: World, event) -> World:
        member = clone(self.member(world))
        member.receive(event)
        return world._replace(member=self._number(member))

    def _look(self, world: World) -> World:
        for _ in range(20):
            member = clone(self.member(world))
            actions = member.advance(self.view(world))
            self.states.add(member.state)
            world = world._replace(member=self._number(member))
            if not actions:
                return world
            for action in actions:
                world = self._do(world, action)
        raise Broken("actions without end")

    def _do(self, world: World, action) -> World:
        match action:
            case Join(leader=leader, term=term):
                if world.session is not None:
                    raise Broken("joined a leader before it left another")
                self._check_leader(world, leader, term)
                return world._replace(session=(leader, term, world.place < PLACE, False))
            case Leave():
                return world._replace(session=None)
            case NoteTurn() if world.place != PLACE:
                raise Broken("took another position's turn for its own")
            case ReportTurn():
                if world.session is None or not world.session[2] or world.session[3]:
                    raise Broken("reported a turn to a leader that knows it")
                return world._replace(session=(*world.session[:3], True))
        return world

    def _check_leader(self, world: World, leader: str, term: int) -> None:
        electorate = ELECTORATES[world.electorate] if world.electorate >= 0 else ()
        if not electorate or leader != leader_of(electorate, PLACE.position, term).peer_id:
            raise Broken(f"{leader} does not lead term {term}")
        if world.place < PLACE and term:
            raise Broken(f"reduced early in term {term}")
        if world.place == PLACE and term < world.promised:
            raise Broken(f"joined term {term} after a promise to {world.promised}")

    def _check(self, world: World) -> None:
        state, session = self.member(world).state, world.session
        over = world.place > PLACE
        if over != (state is MemberState.OVER) or (over and session is not None):
            raise Broken(f"{state} with {session} at {world.place}")
        if session is not None and session[2] and world.electorate >= 0:
            self._check_leader(world._replace(promised=0), session[0], session[1])
        if session is not None and session[2] and world.place == PLACE and not session[3]:
            raise Broken("a leader that was joined early was not told of the turn")
        if world.place == PLACE and session is None and world.electorate >= 0:
            self._expect_another_session(world)

    def _expect_another_session(self, world: World) -> None:
        """At the turn time alone brings a member back to a leader."""
        later = self._look(world._replace(now=world.now + CLOSED_STALLS * STALL_S))
        later = self._look(later._replace(now=later.now + STALL_S))
        if later.session is None:
            raise Broken(f"{self.member(world).state} for ever")

    def _number(self, member: MemberRound) -> int:
        key = canonical(member)
        if key not in self._numbers:
            self._numbers[key] = len(self._members)
            self._members.append(member)
        return self._numbers[key]


@pytest.mark.parametrize(("failures", "least"), [(0, 20), (1, 100), (3, 1_000)])
def test_no_order_of_events_leads_a_member_astray(failures, least):
    assert len(MemberModel(failures).explore()) > least


def test_a_member_goes_through_all_its_states():
    model = MemberModel(3)
    model.explore()
    assert model.states | {MemberState.REDUCING} == set(MemberState)


def expect_broken(match, failures=1):
    with pytest.raises(Broken, match=match):
        MemberModel(failures).explore()


def test_a_leader_that_lost_its_term_is_left(monkeypatch):
    monkeypatch.setattr(MemberRound, "_lost_lead", lambda self, view: False)
    expect_broken("does not lead")


def test_a_leader_that_was_joined_early_is_told_of_the_turn(monkeypatch):
    watch = MemberRound._watch

    def keep_quiet(self, view):
        return [each for each in watch(self, view) if not isinstance(each, ReportTurn)]

    monkeypatch.setattr(MemberRound, "_watch", keep_quiet)
    expect_broken("not told of the turn")


def test_a_promise_rules_out_the_terms_before_it(monkeypatch):
    join = MemberRound._join
    monkeypatch.setattr(
        MemberRound,
        "_join",
        lambda self, view: join(self, view.__class__(**vars(view) | {"term": 0})),
    )
    expect_broken("after a promise")


def test_an_early_failure_does_not_go_to_the_next_leader(monkeypatch):
    def fail_early(self, failure, view):
        self._try_next()
        return self._join(view)

    monkeypatch.setattr(MemberRound, "_fail_early", fail_early)
    expect_broken("early in term 1")


def test_a_member_that_came_too_late_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr(MemberRound, "_rest", lambda self, view: [])
    expect_broken("for ever")


def test_a_session_ends_with_the_position(monkeypatch):
    monkeypatch.setattr(MemberRound, "_end", lambda self: [])
    expect_broken("with")


def test_a_wrong_early_leader_that_fails_at_the_turn_costs_no_term():
    """The right leader of the same term is joined instead."""
    position = PLACE.position
    before, after = ELECTORATES
    assert leader_of(before, position, 0) != leader_of(after, position, 0)

    def view(at, electorate):
        return MemberView(now=0.0, place=Place(1, at), electorate=electorate, term=0)

    member = MemberRound(PLACE, stall_s=STALL_S)
    joins = [a for a in member.advance(view(position - 1, before)) if isinstance(a, Join)]
    assert [j.leader for j in joins] == [leader_of(before, position, 0).peer_id]
    member.receive(Failed(why="the leader is lost"))
    actions = member.advance(view(position, after))
    assert actions == [Leave()]
    (join,) = (a for a in member.advance(view(position, after)) if isinstance(a, Join))
    assert (join.leader, join.term) == (leader_of(after, position, 0).peer_id, 0)


def joined(member, **view):
    """The terms that a member reports to when it looks around."""
    fields = {"now": 0.0, "place": PLACE, "electorate": ELECTORATES[0], "term": 0}
    actions = member.advance(MemberView(**(fields | view)))
    return [action.term for action in actions if isinstance(action, Join)]


def test_a_member_passes_over_the_terms_of_leaders_that_failed():
    assert joined(MemberRound(PLACE, stall_s=STALL_S), skipped={0, 1}) == [2]
    assert joined(MemberRound(PLACE, stall_s=STALL_S), skipped={1}) == [0]


def test_nothing_is_reduced_early_by_a_leader_that_is_passed_over():
    member = MemberRound(PLACE, stall_s=STALL_S)
    early = Place(1, PLACE.position - 1)
    assert joined(member, place=early, skipped={0}) == []
    assert member.state is MemberState.LATE
    assert joined(member, place=early, skipped=()) == [], "it waits for the next entry"
    assert joined(member, skipped={0}) == [1]


def test_a_member_of_another_release_is_told_what_to_do():
    member = MemberRound(PLACE, stall_s=STALL_S)
    view = MemberView(now=0.0, place=PLACE, electorate=ELECTORATES[0], term=0)
    assert any(isinstance(action, Join) for action in member.advance(view))
    told = []
    for code in (RefusalCode.ELSEWHERE, RefusalCode.PROTOCOL):
        failing = clone(member)
        failing.receive(Failed(why="expected 2, got 1", code=code))
        reports = [a for a in failing.advance(view) if isinstance(a, SendReport)]
        told += [report.notice for report in reports]
    other, release = told
    assert "install" not in other
    assert release.endswith("install the organiser's version of Atoll")
