"""A leader, its members and the electors together, model-checked in every order of events.

Each broken rule below is one that somebody could write; the same search has to find it.
"""

import pytest

from atoll.peer.rounds.consensus import ballots
from atoll.peer.rounds.consensus.ballots import Proposer, leader_of
from atoll.peer.rounds.consensus.member import MemberRound, MemberState
from atoll.peer.rounds.consensus.round import Round, RoundState
from support.joint_model import JointModel
from support.model import elector
from support.round_model import PLACE, Broken

TWO_TERMS = {"processes": 3, "terms": 2, "mishaps": 1, "polls": 0, "grouped": True}
FIRST = leader_of(tuple(elector(index, 0) for index in range(3)), PLACE.position, 0)
LEADER = int(FIRST.peer_id[1:])


@pytest.fixture(autouse=True)
def short_terms(monkeypatch):
    """Two attempts a term, or the worlds are up to ten times as many."""
    monkeypatch.setattr(ballots, "TERM", 2)


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({"processes": 3, "polls": 0}, 500),
        ({"early": True}, 300),
        ({"mishaps": 1, "grouped": True}, 200),
    ],
)
def test_no_order_of_events_breaks_a_rule_of_leader_and_members(options, least):
    assert len(JointModel(**options).explore()) > least


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options",
    [
        TWO_TERMS,
        TWO_TERMS | {"victim": LEADER},
        {"processes": 3},
        {"processes": 3, "mishaps": 1},
        {"mishaps": 1, "ticks": 1},
        {"early": True, "mishaps": 1, "ticks": 1},
    ],
)
def test_no_order_of_events_breaks_a_rule_in_the_larger_joint_worlds(options):
    assert len(JointModel(**options).explore()) > 1_000


def settle_without_its_leader(every, **options):
    """Kill the leader in so many of the worlds of a term; the others come to a decision."""
    model = JointModel(processes=3, terms=2, polls=0, **options)
    worlds = sorted(model.explore(), key=repr)
    ends = [model.settle(model.die(world, LEADER)) for world in worlds[::every]]
    return model, ends


def test_a_leader_may_die_at_any_moment_and_the_others_decide():
    model, ends = settle_without_its_leader(every=8)
    assert len(ends) > 50
    assert all(sum(end.up) == 2 for end in ends)
    assert model.member_states >= {MemberState.REDUCING, MemberState.OVER}
    assert RoundState.PREPARING in model.states  # the next leader took over


def expect_broken(match, **options):
    with pytest.raises(Broken, match=match):
        JointModel(**options).explore()


def test_a_member_ends_once_its_position_is_decided(monkeypatch):
    monkeypatch.setattr(MemberRound, "_is_over", lambda self, view: False)
    expect_broken("know the decision")


def test_a_member_that_ends_leaves_its_leader(monkeypatch):
    end = MemberRound._end
    monkeypatch.setattr(MemberRound, "_end", lambda self: end(self)[:0])
    expect_broken("OVER in the group")


def test_a_leader_refuses_reports_once_its_group_is_closed(monkeypatch):
    def take(self, event):
        self._reports[event.peer] = event.ready
        return []

    monkeypatch.setattr(Round, "_take_report", take)
    expect_broken("closed without it", processes=3, ticks=2, polls=0)


def test_a_later_leader_asks_for_promises_before_it_proposes(monkeypatch):
    monkeypatch.setattr(Proposer, "free", property(lambda self: True))
    with pytest.raises(Broken, match="decided twice"):
        settle_without_its_leader(every=1, grouped=True)
