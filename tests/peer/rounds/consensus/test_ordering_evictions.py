"""Orders that evict an elector while an entry is under way, model-checked in every order of events.

Each broken rule below is one that somebody could write; the same search has to find it.
"""

from dataclasses import replace

import pytest

from atoll.peer.rounds.consensus import ballots
from atoll.peer.rounds.consensus import round as machine
from atoll.peer.rounds.consensus.ballots import TERM, Proposer, leader_of
from atoll.peer.rounds.consensus.round import Round, RoundState
from support.eviction_model import ORDER, EvictionModel
from support.liars_model import LiarsModel
from support.model import DecidedTwice, elector
from support.ordered_model import OrderedJoint, OrderedRound, RoundAfterOrder
from support.round_model import PLACE, Broken

LARGE = pytest.mark.exhaustive  # worlds that take half a second and more
TWO_TERMS = [0, TERM]
LEADER = int(leader_of(tuple(elector(i, 0) for i in range(3)), PLACE.position, 0).peer_id[1:])
OTHERS = {0, 1, 2} - {LEADER}


# two positions: one that may evict, and the one after it


@pytest.mark.parametrize(
    ("electors", "attempts", "options", "least"),
    [
        (2, TWO_TERMS, {"knowing": [0], "mishaps": 1}, 1_000),
        pytest.param(2, TWO_TERMS, {"knowing": [1], "mishaps": 1}, 1_000, marks=LARGE),
        (3, [0], {"knowing": [0, 1], "mishaps": 1}, 300),
        pytest.param(3, TWO_TERMS, {"knowing": [0, 1]}, 20_000, marks=LARGE),
        pytest.param(3, TWO_TERMS, {"knowing": [2]}, 20_000, marks=LARGE),
        pytest.param(3, [0, 2 * TERM], {"knowing": [0], "mishaps": 1}, 50_000, marks=LARGE),
        pytest.param(4, [0], {"knowing": range(4), "mishaps": 1}, 2_000, marks=LARGE),
    ],
)
def test_no_eviction_decides_a_position_twice(electors, attempts, options, least):
    assert len(EvictionModel(electors, attempts, **options).explore()) > least


def test_once_the_evicted_elector_is_gone_the_others_decide_both_positions():
    """In whatever world it leaves: what was decided stays, and something is where nothing was."""
    model = EvictionModel(3, [0], knowing=[0, 1])
    worlds = model.explore()
    assert {world.decided for world in worlds} == {None, ORDER}
    for world in worlds:
        before = model.second(ORDER).winners(world.second.messages)
        first, second = model.finish(world)
        assert len(first) == len(second) == 1
        assert before <= second


@pytest.mark.parametrize("liar", [0, *(pytest.param(each, marks=LARGE) for each in (1, 2))])
def test_of_three_keepers_that_an_eviction_leaves_one_may_lie(liar):
    """Four withstand one liar. All three are a quorum, so one that lies can only stop them."""
    assert len(LiarsModel(3, TWO_TERMS, [liar]).explore()) > 200


def expect_fork(electors, attempts, **options):
    with pytest.raises(DecidedTwice):
        EvictionModel(electors, attempts, **options).explore()


def test_an_eviction_must_not_count_at_the_position_that_decides_it(monkeypatch):
    """Those that have heard of the order from the coordinator count without the evicted one."""
    monkeypatch.setattr(EvictionModel, "here", lambda self, index, knows: self.after(evicts=knows))
    expect_fork(3, TWO_TERMS, knowing=[0])


def test_an_eviction_must_count_for_all_at_the_next_position(monkeypatch):
    """One goes by the coordinator's list, in which the evicted one is not yet."""

    def beyond(self, index, evicts):
        return self.after(evicts) if index == 0 else self.present

    monkeypatch.setattr(EvictionModel, "beyond", beyond)
    expect_fork(3, TWO_TERMS, knowing=[0, 1, 2])


# a whole round, in the middle of which the order comes


@pytest.fixture
def _short_terms(monkeypatch):
    """Two attempts a term, or the worlds are up to ten times as many."""
    monkeypatch.setattr(ballots, "TERM", 2)


@pytest.mark.usefixtures("_short_terms")
@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({"knowing": [0, 1], "evicted": 0, "early": True}, 200),
        pytest.param(
            {"knowing": [0, 1], "evicted": 1, "mishaps": 1, "reported": True}, 200, marks=LARGE
        ),
        pytest.param(
            {"knowing": [LEADER], "evicted": LEADER, "processes": 3, "reported": True},
            200,
            marks=LARGE,
        ),
    ],
)
def test_no_order_of_events_breaks_a_rule_of_a_round_that_an_order_ends(options, least):
    model = OrderedRound(**options)
    assert len(model.explore()) > least
    assert {model._entries[number].kind for number in model.decided} >= {"update", "control"}


@pytest.mark.usefixtures("_short_terms")
@pytest.mark.parametrize("knowing", [OTHERS, pytest.param({0, 1, 2}, marks=LARGE)])
def test_an_evicted_leader_may_leave_at_any_moment_and_the_others_decide(knowing):
    model = OrderedJoint(
        knowing=knowing, evicted=LEADER, processes=3, terms=2, polls=0, grouped=True
    )
    worlds = sorted(model.explore(), key=repr)
    assert len(worlds) > 100
    for world in worlds[::8]:
        assert sum(model.settle(model.die(world, LEADER)).up) == 2


@pytest.mark.usefixtures("_short_terms")
@pytest.mark.parametrize(
    "options",
    [
        {"evicted": 1 - LEADER % 2},
        pytest.param({"evicted": 0, "processes": 3, "reported": True}, marks=LARGE),
        pytest.param({"evicted": 1, "mishaps": 1}, marks=LARGE),
    ],
)
def test_no_leader_proposes_a_member_that_was_evicted_meanwhile(options):
    """An honest one would be counted as having broken a rule."""
    assert len(RoundAfterOrder(**options).explore()) > 100


@pytest.mark.parametrize("rule", ["_has_evicted", "_form"])
def test_an_early_group_with_an_evicted_member_is_given_up(monkeypatch, rule):
    if rule == "_has_evicted":
        monkeypatch.setattr(Round, rule, lambda self, view: False)
    else:
        form = Round._form
        monkeypatch.setattr(
            Round, rule, lambda self, view: form(self, replace(view, evicted=frozenset()))
        )
    with pytest.raises(Broken, match="member that is out"):
        RoundAfterOrder(evicted=1 - LEADER % 2).explore()


def expect_broken(match, **options):
    with pytest.raises(Broken, match=match):
        OrderedRound(knowing={0, 1, 2}, evicted=LEADER, **options).explore()


def test_an_order_waits_for_the_turn_of_its_position(monkeypatch):
    monkeypatch.setattr(
        Round, "_may_order", lambda self, view: self.state in machine.BEFORE_PROPOSAL
    )
    expect_broken("before the position's turn", early=True)


@pytest.mark.usefixtures("_short_terms")
def test_an_order_takes_no_place_of_an_entry_that_was_proposed(monkeypatch):
    """Its leader would have two entries at one attempt: the same votes, counted for either."""
    may_order, choose = Round._may_order, Proposer.choose

    def at_any_time(self, view):
        voting = view.turn and self.state is RoundState.VOTING
        return may_order(self, view) or (voting and self._proposed.kind == "update")

    def chosen_anew(self, own):
        self.chosen = None
        return choose(self, own)

    monkeypatch.setattr(Round, "_may_order", at_any_time)
    monkeypatch.setattr(Proposer, "choose", chosen_anew)
    expect_broken("two entries at attempt|decided twice", reported=True)
