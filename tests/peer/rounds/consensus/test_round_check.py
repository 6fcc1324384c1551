"""Whole rounds, model-checked: forming, reducing with losses, voting, deciding, in every order.

Each broken rule below is one that somebody could write; the same search has to find it.
"""

import pytest

from atoll.peer.rounds.consensus import ballots
from atoll.peer.rounds.consensus import round as machine
from atoll.peer.rounds.consensus.ballots import Proposer
from atoll.peer.rounds.consensus.parts import Parts
from atoll.peer.rounds.consensus.round import OVER, Round, RoundState
from atoll.peer.rounds.policies import Close
from support import round_model
from support.round_model import Broken, RoundModel

ALL_STATES = set(RoundState) - {RoundState.LOCKING}  # of runs without liars
FIRST_TERM = ALL_STATES - {RoundState.CALLED}  # PREPARING too, for a second attempt


@pytest.fixture(autouse=True)
def short_terms(request, monkeypatch):
    """Two attempts a term, or the worlds are up to ten times as many."""
    if request.node.get_closest_marker("exhaustive") is None:
        monkeypatch.setattr(ballots, "TERM", 2)


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({"processes": 3, "parts": 2}, 1_000),
        ({"early": True, "mishaps": 1}, 400),
        pytest.param(
            {"mishaps": 2, "parts": 2, "reported": True}, 2_000, marks=pytest.mark.exhaustive
        ),
        ({"mishaps": 2, "reported": True}, 1_000),
        ({"terms": 2, "reported": True, "polls": 0}, 2_000),
    ],
)
def test_no_order_of_events_breaks_a_rule_of_rounds(options, least):
    assert len(RoundModel(**options).explore()) > least


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options",
    [
        {"early": True, "mishaps": 1, "ticks": 1},
        {"mishaps": 2, "ticks": 1, "reported": True},
        {"terms": 2, "reported": True, "polls": 2},
        {"terms": 2, "reported": True, "mishaps": 1, "polls": 1},
        {"mishaps": 2, "ticks": 2, "reported": True},
        {"early": True, "mishaps": 1, "ticks": 4},
        {"early": True, "mishaps": 2, "ticks": 2, "reported": True},
    ],
)
def test_no_order_of_events_breaks_a_rule_in_the_larger_worlds(options):
    assert len(RoundModel(**options).explore()) > 5_000


def test_a_term_goes_through_all_its_states():
    early = RoundModel(early=True, mishaps=1, ticks=1, reported=True)
    late = RoundModel(mishaps=2, reported=True)
    two = RoundModel(terms=2, reported=True, polls=0)
    for model in (early, late, two):
        model.explore()
    assert early.states | late.states == FIRST_TERM
    assert early.states | two.states == ALL_STATES


@pytest.mark.parametrize(
    "options",
    [
        {"mishaps": 1, "ticks": 2, "reported": True},
        {"early": True, "mishaps": 1},
        {"processes": 3, "parts": 2, "reported": True},
    ],
)
def test_every_term_comes_to_an_end_once_nothing_fails_any_more(options):
    model = RoundModel(**options)
    for world in model.explore():
        if world.rounds[0] is not None:
            number = model.finish(world).rounds[0]
            assert model._machines[number].state in OVER


@pytest.mark.parametrize("options", [{"mishaps": 1}, {"mishaps": 1, "parts": 2, "reported": True}])
def test_a_lost_owner_costs_a_repair_and_not_the_round(options):
    """A quorum is alive and nobody polled in vain: the leader decides the update that is left."""
    model = RoundModel(processes=3, **{"reported": True} | options)
    for world in model.explore():
        number = world.rounds[0]
        if number is not None and model._machines[number].state is RoundState.REDUCING:
            ended = model.finish(world)
            assert model._machines[ended.rounds[0]].state is RoundState.DECIDED
            votes = {entry for _, entry, _ in ended.votes}
            assert [model._entries[entry].kind for entry in votes] == ["update"]


def expect_broken(match, **options):
    with pytest.raises(Broken, match=match):
        RoundModel(**options).explore()


def test_a_group_waits_for_those_that_are_expected(monkeypatch):
    monkeypatch.setattr(machine, "close_decision", lambda view, now: Close.CLOSE)
    expect_broken("closed too early")


def test_nothing_is_proposed_before_its_turn(monkeypatch):
    end = Round._end_reduction

    def end_early(self, view, failure):
        return self._propose_own(view) if not failure else end(self, view, failure)

    monkeypatch.setattr(Round, "_end_reduction", end_early)
    expect_broken("before the position's turn", early=True)


def test_a_part_counts_only_in_the_generation_of_its_owner(monkeypatch):
    def note(self, remote, done):
        self._parts[done.part].done = done

    monkeypatch.setattr(Parts, "note", note)
    expect_broken("not of its owner's generation", ticks=2, reported=True)


def test_all_parts_are_done_before_an_entry_is_proposed(monkeypatch):
    monkeypatch.setattr(Parts, "settled", lambda self, view, is_live: bool(self.digests))
    expect_broken("proposed 1 of 2 parts", parts=2)


def test_a_part_that_is_lost_is_repaired(monkeypatch):
    monkeypatch.setattr(Parts, "_repair", lambda self, index, view, is_live: [])
    with pytest.raises(AssertionError):
        test_a_lost_owner_costs_a_repair_and_not_the_round({"mishaps": 1})


def test_a_round_is_not_given_up_while_it_can_be_reduced(monkeypatch):
    monkeypatch.setattr(machine, "LATE_STALLS", -10)
    monkeypatch.setattr(round_model, "STALL_S", 0.2)
    expect_broken("gave up", ticks=1, reported=True)


def test_another_entry_needs_another_attempt(monkeypatch):
    def try_again(self):
        attempt = self._voting().attempt
        self._proposer = Proposer(attempt=attempt, electors=len(self._electorate))
        return self._ask_promises()

    monkeypatch.setattr(Round, "_try_again", try_again)
    expect_broken("two entries at attempt 0", mishaps=2, reported=True)


def test_another_attempt_needs_promises(monkeypatch):
    monkeypatch.setattr(Proposer, "free", property(lambda self: True))
    expect_broken("decided twice", mishaps=2, reported=True)


def test_what_promises_name_has_to_be_proposed(monkeypatch):
    monkeypatch.setattr(ballots, "value_to_propose", lambda promises: None)
    expect_broken("decided twice", mishaps=2, reported=True)


def test_votes_of_an_earlier_attempt_do_not_count(monkeypatch):
    monkeypatch.setattr(Round, "_is_asked", lambda self, state, attempt: self.state is state)
    expect_broken("without a certificate", mishaps=2, reported=True)
