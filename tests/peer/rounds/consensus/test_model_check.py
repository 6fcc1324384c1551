"""The rules of votes, model-checked: no order of events gives a position two entries.

Each broken rule below is one that somebody could write; the same search has to find it.
"""

import pytest

from atoll.coordinator import policies
from atoll.dht.refusals import RefusalCode
from atoll.dht.transport import Refused
from atoll.optim.log import entry as log
from atoll.optim.log.entry import is_quorum
from atoll.peer.rounds.consensus import ballots
from atoll.peer.rounds.consensus.ballots import TERM, Acceptor, Booth, Leads
from support.model import DecidedTwice, Message, Model, Voided


def terms(count):
    """The first attempts of so many leaders."""
    return [TERM * term for term in range(count)]


LARGE = pytest.mark.exhaustive  # worlds of 10,000 states and more: seconds each
AGAIN = [0, 1, TERM]  # the first leader proposes anew, then there is another


@pytest.mark.parametrize(
    ("electors", "attempts", "mishaps", "least"),
    [
        (1, terms(2), 1, 5),
        (2, terms(3), 2, 1_000),
        (3, terms(2), 2, 5_000),
        pytest.param(3, terms(3), 0, 14_000, marks=LARGE),
        pytest.param(4, terms(2), 1, 20_000, marks=LARGE),
        (2, AGAIN, 2, 1_000),
        (3, [0, 1], 2, 4_000),
        (3, AGAIN, 0, 14_000),
        pytest.param(4, [0, 1], 1, 10_000, marks=LARGE),
    ],
)
def test_no_order_of_events_decides_a_position_twice(electors, attempts, mishaps, least):
    assert len(Model(electors, attempts, mishaps).explore()) > least


@pytest.mark.parametrize(
    ("electors", "attempts", "mishaps", "passing", "least"),
    [
        (3, terms(3), 0, [TERM, 2 * TERM], 3_000),
        pytest.param(3, terms(3), 0, [2 * TERM], 3_000, marks=LARGE),
        (3, AGAIN, 0, [1, TERM], 3_000),
        pytest.param(3, terms(2), 2, [TERM], 3_000, marks=LARGE),
        pytest.param(4, terms(2), 1, [TERM], 10_000, marks=LARGE),
    ],
)
def test_what_no_quorum_accepted_may_be_passed_over(electors, attempts, mishaps, passing, least):
    model = Model(electors, attempts, mishaps, passing=passing)
    assert len(model.explore()) > least
    assert model.passed_over


@LARGE
def test_no_order_of_events_decides_a_position_twice_in_the_larger_worlds():
    assert len(Model(3, terms(3), 1).explore()) > 50_000


@LARGE
def test_no_order_decides_twice_with_new_proposals_and_restarts():
    assert len(Model(3, AGAIN, 1).explore()) > 50_000


@pytest.mark.parametrize(
    ("electors", "attempts", "mishaps", "least"),
    [
        (1, terms(2), 1, 40),
        (2, terms(2), 2, 3_000),
        pytest.param(2, AGAIN, 1, 20_000, marks=LARGE),
        (3, terms(1), 1, 1_000),
        (3, terms(2), 0, 12_000),
        (4, terms(1), 0, 1_000),
    ],
)
def test_no_epoch_for_electors_that_left_voids_an_entry(electors, attempts, mishaps, least):
    model = Model(electors, attempts, mishaps, leaving=True)
    states = model.explore()
    assert len(states) > least
    assert any(model.is_given_up(state) for state in states)


@pytest.mark.parametrize("electors", [1, 2, 3, 4])
def test_where_nothing_fails_the_first_attempt_decides(electors):
    model = Model(electors, terms(1), 0)
    state = model.start()
    for message in sorted(state.messages):
        for index in range(electors):
            (state,) = model._deliver(state, index, message)
    assert Message("propose", 0, 0) in state.messages
    assert model.winners(state.messages) == {0}


@pytest.mark.parametrize(
    ("electors", "attempts"),
    [(2, terms(3)), (3, terms(2)), pytest.param(3, AGAIN, marks=LARGE), (4, terms(1))],
)
def test_from_every_state_a_quorum_that_fails_no_more_decides(electors, attempts):
    """What was decided stays; where nothing was, something is."""
    model = Model(electors, attempts, 0)
    for state in model.explore():
        before = model.winners(state.messages)
        after = model.finish(state)
        assert len(after) == 1
        assert before <= after


@pytest.mark.parametrize("electors", [3, pytest.param(4, marks=LARGE)])
def test_one_elector_that_starts_again_does_not_stop_the_others(electors):
    model = Model(electors, terms(2), 1)
    restarted = [s for s in model.explore() if any(p.incarnation for p in s.processes)]
    assert len(restarted) > 500
    assert all(len(model.finish(state)) == 1 for state in restarted[::7])


# broken rules


def plurality(voters, electors, trust="crash"):
    return 2 * len(set(voters)) >= electors


def any_promise_is_as_good(promises):
    known = [p for p in promises if p is not None]
    return min(known, key=lambda a: a.attempt).entry if known else None


def vote_for_anything(self, attempt, entry):
    self.promised = max(self.promised, attempt)
    self.accepted = ballots.Accepted(attempt=attempt, entry=entry)
    return True


def test_half_of_the_electors_are_no_quorum(monkeypatch):
    monkeypatch.setattr(ballots, "is_quorum", plurality)
    monkeypatch.setattr(log, "is_quorum", plurality)
    with pytest.raises(DecidedTwice):
        Model(4, terms(2), 0).explore()


def test_a_leader_must_not_ignore_what_was_accepted(monkeypatch):
    monkeypatch.setattr(ballots, "value_to_propose", lambda promises: None)
    with pytest.raises(DecidedTwice):
        Model(3, terms(2), 0).explore()


def test_a_leader_must_adopt_the_entry_of_the_highest_attempt(monkeypatch):
    monkeypatch.setattr(ballots, "value_to_propose", any_promise_is_as_good)
    with pytest.raises(DecidedTwice):
        Model(3, terms(3), 0).explore()


def test_a_leader_must_wait_for_a_quorum_of_promises(monkeypatch):
    monkeypatch.setattr(ballots.Proposer, "free", property(lambda self: bool(self.promises)))
    with pytest.raises(DecidedTwice):
        Model(3, terms(2), 0).explore()


def test_a_leader_that_proposes_anew_needs_promises(monkeypatch):
    free = property(lambda self: self.attempt in (0, 1) or len(self.promises) * 2 > self._electors)
    monkeypatch.setattr(ballots.Proposer, "free", free)
    with pytest.raises(DecidedTwice):
        Model(3, [0, 1], 0).explore()


def test_a_leader_must_not_propose_two_entries_at_one_attempt(monkeypatch):
    monkeypatch.setattr(Acceptor, "accept", vote_for_anything)
    monkeypatch.setattr(ballots, "value_to_propose", lambda promises: None)
    with pytest.raises(DecidedTwice):
        Model(3, [0, 1], 0).explore()


def test_a_promise_must_be_remembered(monkeypatch):
    monkeypatch.setattr(Acceptor, "prepare", lambda self, attempt: True)
    with pytest.raises(DecidedTwice):
        Model(3, terms(2), 0).explore()


def test_a_vote_of_an_earlier_attempt_must_be_refused(monkeypatch):
    monkeypatch.setattr(Acceptor, "accept", vote_for_anything)
    with pytest.raises(DecidedTwice):
        Model(3, terms(2), 0).explore()


def test_a_process_that_starts_again_must_not_vote_as_the_one_before(monkeypatch):
    def check(self, remote, place, attempt):
        if place != self.here or self.here != self.furthest:
            raise Refused(RefusalCode.ELSEWHERE, "")

    monkeypatch.setattr(Booth, "check", check)
    with pytest.raises(DecidedTwice):
        Model(3, terms(2), 1).explore()


def test_a_process_that_starts_again_must_not_lead_as_the_one_before(monkeypatch):
    monkeypatch.setattr(Leads, "check", lambda self, place, attempt, electorate: None)
    with pytest.raises(DecidedTwice):
        Model(3, terms(2), 1).explore()


def test_a_replica_that_comes_back_to_a_position_must_not_vote_there_again(monkeypatch):
    def turn(self, place, electorate, first_term=0):
        if place != self.here:
            self.here = self.furthest = place
            self._electorate, self.acceptor = electorate, Acceptor()

    monkeypatch.setattr(Booth, "turn", turn)
    with pytest.raises(DecidedTwice):
        Model(3, terms(2), 1).explore()


def test_a_process_that_has_retired_must_not_vote(monkeypatch):
    check = Booth.check

    def check_but_for_that(self, *args):
        self._retiring, retiring = False, self._retiring
        try:
            check(self, *args)
        finally:
            self._retiring = retiring

    monkeypatch.setattr(Booth, "check", check_but_for_that)
    with pytest.raises(Voided):
        Model(2, terms(1), 0, leaving=True).explore()


def test_a_process_that_has_voted_must_not_say_that_it_has_not(monkeypatch):
    monkeypatch.setattr(Booth, "retired", property(lambda self: self._retiring))
    with pytest.raises(Voided):
        Model(2, terms(1), 0, leaving=True).explore()


def test_a_process_that_came_back_does_not_know_what_it_voted_for(monkeypatch):
    retired = property(lambda self: self._retiring and self.acceptor.accepted is None)
    monkeypatch.setattr(Booth, "retired", retired)
    with pytest.raises(Voided):
        Model(2, terms(1), 1, leaving=True).explore()


def test_what_a_process_says_further_on_does_not_hold_here(monkeypatch):
    def can_decide(electorate, retired, at):
        return is_quorum([i for i, e in enumerate(electorate) if name(e) not in retired], 2)

    def name(elector):
        return elector.peer_id, elector.incarnation

    monkeypatch.setattr(policies, "can_decide", can_decide)
    with pytest.raises(Voided):
        Model(2, terms(1), 0, leaving=True).explore()


def test_an_entry_that_silent_electors_may_have_accepted_is_found(monkeypatch):
    def named(proposer, entry):
        return is_quorum(
            [i for i, a in proposer.promises.items() if a and a.entry == entry],
            len(proposer.promises),
        )

    monkeypatch.setattr(ballots.Proposer, "may_be_decided", named)
    with pytest.raises(DecidedTwice):
        Model(3, terms(2), 0, passing=[TERM]).explore()


def test_electors_that_accepted_an_entry_later_on_are_found_missed(monkeypatch):
    """Those that accepted it at an attempt before the highest one count too."""
    monkeypatch.setattr(ballots.Proposer, "may_be_decided", at_the_highest_attempt)
    with pytest.raises(DecidedTwice):
        Model(3, terms(3), 0, passing=[2 * TERM]).explore()


def at_the_highest_attempt(proposer, entry):
    accepted = {i: a for i, a in proposer.promises.items() if a}
    highest = max(a.attempt for a in accepted.values())
    named = [i for i, a in accepted.items() if a.attempt == highest]
    silent = set(range(proposer._electors)) - set(proposer.promises)
    return is_quorum([*named, *silent], proposer._electors)
