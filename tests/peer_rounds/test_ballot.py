"""The rules of votes, model-checked: no schedule of messages gives two entries at one position."""

import itertools

import pytest

from atoll.optim.log import is_quorum
from atoll.peer.rounds.ballot import Accepted, Acceptor, value_to_propose


def test_a_promise_binds():
    acceptor = Acceptor()
    assert acceptor.prepare(2)
    assert not acceptor.prepare(1)
    assert not acceptor.accept(1, b"late")
    assert acceptor.accept(2, b"entry")
    assert acceptor.accepted == Accepted(attempt=2, entry=b"entry")


def test_a_leader_that_proposes_twice_is_refused():
    acceptor = Acceptor()
    assert acceptor.accept(0, b"one")
    assert acceptor.accept(0, b"one")
    assert not acceptor.accept(0, b"two")


def test_the_entry_of_the_highest_attempt_is_proposed():
    promises = [None, Accepted(attempt=1, entry=b"old"), Accepted(attempt=3, entry=b"new")]
    assert value_to_propose(promises) == b"new"
    assert value_to_propose([None, None]) is None


class World:
    """All states that acceptors can reach when attempts 0..n-1 run in any interleaving.

    A step delivers one request of one attempt to one elector, or lets a leader that holds promises
    of a quorum choose its value.  Messages that are never delivered model crashes, partitions and
    losses; delivery at any later time models delay.
    """

    def __init__(self, electors, attempts):
        self.electors, self.attempts = electors, attempts
        self.chosen = {}
        self.states = 0

    def explore(self):
        # acceptor: (promised, accepted attempt, accepted value); leader: (value, promises)
        acceptors = ((0, -1, -1),) * self.electors
        leaders = tuple((0 if a == 0 else None, frozenset()) for a in range(self.attempts))
        start = (acceptors, leaders, frozenset())
        seen, todo = {start}, [start]
        while todo:
            state = todo.pop()
            self.check(state)
            for after in self.steps(state):
                if after not in seen:
                    seen.add(after)
                    todo.append(after)
        self.states = len(seen)

    def check(self, state):
        votes = state[2]
        won = set()
        for attempt in range(self.attempts):
            for value in range(self.attempts):
                voters = [e for e, a, v in votes if (a, v) == (attempt, value)]
                if is_quorum(voters, self.electors):
                    won.add(value)
        assert len(won) <= 1, f"two entries are certified: {won}"

    def steps(self, state):
        leaders = state[1]
        for attempt, elector in itertools.product(range(self.attempts), range(self.electors)):
            value, promises = leaders[attempt]
            if value is None and elector not in {p[0] for p in promises}:
                yield from self.promise(state, attempt, elector)
            if value is not None:
                yield from self.vote(state, attempt, elector)

    def promise(self, state, attempt, elector):
        acceptors, leaders, votes = state
        acceptor = restored(acceptors[elector])
        if not acceptor.prepare(attempt):
            return
        accepted = acceptor.accepted
        told = (elector, accepted.attempt, accepted.entry[0]) if accepted else (elector, -1, -1)
        value, promises = leaders[attempt]
        promises = promises | {told}
        if is_quorum([p[0] for p in promises], self.electors):
            known = [
                Accepted(attempt=a, entry=bytes([v])) if a >= 0 else None for _, a, v in promises
            ]
            adopted = value_to_propose(known)
            value = adopted[0] if adopted is not None else attempt
        yield (
            replaced(acceptors, elector, saved(acceptor)),
            replaced(leaders, attempt, (value, promises)),
            votes,
        )

    def vote(self, state, attempt, elector):
        acceptors, leaders, votes = state
        value = leaders[attempt][0]
        if (elector, attempt, value) in votes:
            return
        acceptor = restored(acceptors[elector])
        if acceptor.accept(attempt, bytes([value])):
            yield (
                replaced(acceptors, elector, saved(acceptor)),
                leaders,
                votes | {(elector, attempt, value)},
            )


def restored(state):
    acceptor = Acceptor()
    acceptor.promised = state[0]
    if state[1] >= 0:
        acceptor.accepted = Accepted(attempt=state[1], entry=bytes([state[2]]))
    return acceptor


def saved(acceptor):
    accepted = acceptor.accepted
    return (
        (acceptor.promised, accepted.attempt, accepted.entry[0])
        if accepted
        else (acceptor.promised, -1, -1)
    )


def replaced(items, index, item):
    return (*items[:index], item, *items[index + 1 :])


@pytest.mark.parametrize(
    ("electors", "attempts", "least"), [(2, 3, 100), (3, 2, 200), (3, 3, 1_000), (4, 2, 500)]
)
def test_no_interleaving_decides_a_position_twice(electors, attempts, least):
    world = World(electors, attempts)
    world.explore()
    assert world.states > least


def test_the_model_check_finds_a_broken_rule(monkeypatch):
    monkeypatch.setattr(Acceptor, "prepare", lambda self, attempt: True)
    with pytest.raises(AssertionError, match="two entries"):
        World(3, 2).explore()
