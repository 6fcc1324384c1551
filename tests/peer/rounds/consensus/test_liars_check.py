"""The ballots of a run that withstands liars, model-checked: no lie decides a position twice.

One elector of four lies in every way (`support.liars_model`). Each broken rule below is one that
somebody could write; the same search has to find the fork.
"""

import random

import pytest

from atoll.optim.log import entry as log
from atoll.optim.log import locks
from atoll.optim.log.entry import is_quorum
from atoll.peer.rounds.consensus import ballots
from atoll.peer.rounds.consensus.ballots import TERM, Acceptor
from support.liars_model import LiarsModel
from support.model import DecidedTwice

FIRST, SECOND, THIRD = (int(LiarsModel(4, [TERM * t], []).leaders[TERM * t][1:]) for t in range(3))
"""Who leads the first terms."""
TWO_TERMS = [0, TERM]
AGAIN = [0, 1]  # the first leader proposes anew
# Some electors report to the third leader at once, and pass over the second one; others do not, as
# each has a memory of its own. A term that all pass over has no ballots.
PASSED_OVER = [0, 2 * TERM]


@pytest.mark.parametrize(
    ("attempts", "liar", "least"),
    [
        ([0], FIRST, 100),
        pytest.param(TWO_TERMS, FIRST, 15_000, marks=pytest.mark.exhaustive),
        pytest.param(TWO_TERMS, SECOND, 10_000, marks=pytest.mark.exhaustive),
        (PASSED_OVER, THIRD, 10_000),
        pytest.param(AGAIN, FIRST, 20_000, marks=pytest.mark.exhaustive),
    ],
)
def test_no_lie_decides_a_position_twice(attempts, liar, least):
    assert len(LiarsModel(4, attempts, [liar]).explore()) > least


@pytest.mark.exhaustive
@pytest.mark.parametrize("liar", [FIRST, SECOND, THIRD])
def test_no_lie_decides_a_position_twice_in_three_terms(liar):
    model = LiarsModel(4, [0, TERM, 2 * TERM], [liar])
    assert len(model.explore(limit=1_000_000)) > 500_000


def wander(
    schedules, *, electors=4, liars=(FIRST,), attempts=(0, 1, TERM, 2 * TERM, 3 * TERM, 4 * TERM)
):
    """Schedules in which an entry was decided."""
    model, rng = LiarsModel(electors, attempts, liars), random.Random(f"{electors} {liars}")
    return sum(bool(model.winners(model.wander(rng, 200))) for _ in range(schedules))


@pytest.mark.parametrize("liar", [FIRST, SECOND])
def test_no_random_schedule_of_many_terms_decides_twice(liar):
    assert wander(60, liars=(liar,)) > 5


def test_two_liars_of_seven_decide_nothing_twice():
    assert wander(25, electors=7, liars=(0, 1), attempts=(0, TERM, 2 * TERM)) > 0


def test_no_random_schedule_with_terms_passed_over_decides_twice():
    assert wander(100, liars=(THIRD,), attempts=(0, 1, 2 * TERM, 5 * TERM)) > 10


@pytest.mark.exhaustive
@pytest.mark.parametrize("liar", range(4))
def test_no_random_schedule_decides_twice_in_many_more(liar):
    assert wander(30_000, liars=(liar,)) > 3_000


@pytest.mark.exhaustive
def test_two_liars_of_seven_decide_nothing_twice_in_many_more():
    assert wander(2_000, electors=7, liars=(0, 1), attempts=(0, TERM, 2 * TERM)) > 100


# broken rules


def expect_fork(attempts, *liars, electors=4):
    with pytest.raises(DecidedTwice):
        LiarsModel(electors, attempts, liars).explore()


def test_a_majority_is_no_quorum_with_liars(monkeypatch):
    def majority(voters, electors, trust="crash"):
        return is_quorum(voters, electors)

    for module in (log, locks, ballots):
        monkeypatch.setattr(module, "is_quorum", majority)
    expect_fork([0], FIRST)


def test_promises_have_to_justify_a_proposal(monkeypatch):
    monkeypatch.setattr(locks, "check_justified", lambda *args: None)
    expect_fork(TWO_TERMS, SECOND)


def test_votes_without_locks_certify_nothing(monkeypatch):
    monkeypatch.setattr(log, "commit_payload", log.vote_payload)
    expect_fork(TWO_TERMS, SECOND)


def test_a_lock_is_shown_with_the_promise_that_names_it(monkeypatch):
    monkeypatch.setattr(locks, "check_lock", lambda *args: None)
    expect_fork(TWO_TERMS, SECOND)


def test_promises_of_a_quorum_are_needed(monkeypatch):
    monkeypatch.setattr(locks, "is_quorum", lambda voters, electors, trust: len(voters) >= 2)
    expect_fork(TWO_TERMS, SECOND)


def test_promises_are_signed_by_those_that_they_name(monkeypatch):
    def forged(self, state, attempt, lies, count):
        yield frozenset((index, None) for index in range(3))

    monkeypatch.setattr(locks, "check_promise", lambda *args: None)
    monkeypatch.setattr(LiarsModel, "_promises", forged)
    expect_fork(TWO_TERMS, SECOND)


def test_an_attempt_has_one_lock(monkeypatch):
    accept, commit = Acceptor.accept, Acceptor.commit

    def accept_all(self, attempt, entry):
        self.accepted = None
        return accept(self, attempt, entry)

    def commit_all(self, locked):
        self.locked = None
        return commit(self, locked)

    monkeypatch.setattr(Acceptor, "accept", accept_all)
    monkeypatch.setattr(Acceptor, "commit", commit_all)
    expect_fork([0], FIRST)


def test_an_elector_keeps_its_lock(monkeypatch):
    commit = Acceptor.commit

    def forget(self, locked):
        done = commit(self, locked)
        self.locked = None
        return done

    monkeypatch.setattr(Acceptor, "commit", forget)
    expect_fork(TWO_TERMS, SECOND)


def test_an_elector_commits_nothing_below_its_promise(monkeypatch):
    commit = Acceptor.commit

    def commit_all(self, locked):
        promised, self.promised = self.promised, 0
        done = commit(self, locked)
        self.promised = max(promised, self.promised)
        return done

    monkeypatch.setattr(Acceptor, "commit", commit_all)
    expect_fork(TWO_TERMS, SECOND)
