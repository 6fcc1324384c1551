"""Electors of which some lie, driven through the rules that peers run.

A state is what every honest elector remembers and has signed, and what honest leaders proposed.
Signatures are never lost: whoever wants one has it, also much later, which is the same as that the
liars control the network. Whatever a liar may sign counts as signed: votes and commits for all
entries at all attempts, and promises that name any lock or none. So an honest elector meets

    from a leader that lies    every question, every entry that some promises justify, every lock
                               that can be put together, in any order, a part of them, or none
    from an honest leader      one entry an attempt, chosen from the promises of any quorum, in
                               which liars name any lock that they can show; and its lock

An elector that stops or starts again is one that receives nothing more. Two entries suffice: a
third one would only be another that is not the first. What an elector checks of an entry itself is
not modelled. Signatures are tokens that nobody forges (`support.model.signature`).

Honest electors are alike, and so are the two entries; states that differ in their names are one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations
from typing import NamedTuple

from atoll.dht.transport import Refused
from atoll.optim.log import entry as log
from atoll.optim.log import locks
from atoll.optim.log.entry import Certificate, Entry, LogError, Vote, vote_payload
from atoll.optim.log.locks import NO_DIGEST, Decree, Justification, Lock, SignedPromise
from atoll.peer.rounds.consensus.ballots import Accepted, Booth, Leads, Place, leader_of, term_of
from support.model import DecidedTwice, elector, signature, verify

PLACE = Place(1, 0)
VALUES = (0, 1)

Chosen = tuple[int, int]
"""(attempt, value)"""


class Signed(NamedTuple):
    """A signature of an honest elector; of a promise, `what` is the lock that it names."""

    kind: str
    attempt: int
    what: Chosen | int | None


class Voter(NamedTuple):
    """What one honest elector remembers, and has signed."""

    promised: int = 0
    accepted: Chosen | None = None
    locked: Chosen | None = None
    signed: frozenset[Signed] = frozenset()


class State(NamedTuple):
    voters: tuple[Voter, ...]
    proposed: tuple[Chosen, ...] = ()
    """by honest leaders"""


Promises = frozenset[tuple[int, Chosen | None]]
"""(elector, lock that it names)"""


class LiarsModel:
    """Electors 0..n-1 and some attempts; who lies is said by name."""

    def __init__(self, electors: int, attempts: Sequence[int], liars: Sequence[int]) -> None:
        self.electorate = tuple(elector(i, 0) for i in range(electors))
        self.attempts, self.liars = tuple(attempts), tuple(liars)
        self.honest = [i for i in range(electors) if i not in liars]
        self.entries = {value: self._entry(value) for value in VALUES}
        self.records = {value: one.encode() for value, one in self.entries.items()}
        self.leaders = {
            a: leader_of(self.electorate, PLACE.position, term_of(a)).peer_id for a in attempts
        }
        self._lying = {self.electorate[i].peer_id for i in liars}
        self._answers: dict[tuple[object, ...], Voter | None] = {}
        self._allowed: dict[tuple[object, ...], frozenset[int]] = {}
        self._quorum = next(
            n for n in range(electors + 1) if log.is_quorum(list(range(n)), electors, "byzantine")
        )
        self._says: dict[Chosen, list[Signed]] = {}
        self._certified: dict[tuple[object, ...], bool] = {}
        self._locks: dict[tuple[object, ...], Lock | None] = {}

    def _entry(self, value: int) -> Entry:
        return Entry(
            run_id=b"r" * 32,
            epoch=PLACE.epoch,
            position=PLACE.position,
            kind="null",
            previous_chain=b"c" * 32,
            fragment=0,
            lr=float(value),
            momentum=0.0,
            members=(),
            parts=(),
            electorate=self.electorate,
        )

    def start(self) -> State:
        return State(tuple(Voter() for _ in self.honest))

    def explore(self, limit: int | None = None) -> set[State]:
        """Every reachable state, or so many.

        Raises:
            DecidedTwice: in one of them two entries have a certificate.
        """
        start = self.start()
        seen, todo = {start}, [start]
        while todo and (limit is None or len(seen) < limit):
            state = todo.pop()
            self.check(state)
            for after in map(self._named, self.steps(state)):
                if after not in seen:
                    seen.add(after)
                    todo.append(after)
        return seen

    def wander(self, rng: random.Random, tries: int) -> State:
        """Try so many events, later attempts later; the last state shows all that was signed."""
        state = self.start()
        for number in range(tries):
            under_way = self.attempts[: 1 + number * len(self.attempts) // tries]
            attempt = rng.choice(under_way[-2:])
            kind = rng.choice(("promise", "vote", "vote", "commit", "commit"))
            if self.leaders[attempt] not in self._lying and rng.random() < 0.3:
                following = list(self._lead(state, attempt))
            else:
                index, value = rng.randrange(len(state.voters)), rng.choice(VALUES)
                if kind == "vote" and value not in self._proposed(state, attempt):
                    continue
                signed = Signed(kind, attempt, None if kind == "promise" else value)
                following = list(self._step(state, index, signed))
            if following:
                state = rng.choice(following)
        self.check(state)
        return state

    def winners(self, state: State) -> set[int]:
        """The entries that have a certificate."""
        return {v for a in self.attempts for v in VALUES if self._is_certified(state, a, v)}

    def check(self, state: State) -> None:
        if len(self.winners(state)) > 1:
            raise DecidedTwice(f"{state}")

    @staticmethod
    def _named(state: State) -> State:
        """The one of the states that differ in names only."""
        one = sorted(state.voters, key=_order)
        other = sorted(map(_other, state.voters), key=_order)
        proposed = tuple((a, 1 - v) for a, v in state.proposed)
        if (list(map(_order, other)), proposed) < (list(map(_order, one)), state.proposed):
            return State(tuple(other), proposed)
        return State(tuple(one), state.proposed)

    # what liars, and all who gather, can put together

    def _certifying(self, attempt: int, value: int) -> list[Signed]:
        """The signatures that say what a certificate has to say, whatever they were made for."""
        key = attempt, value
        if key not in self._says:
            wanted = log.commit_payload(self.entries[value], attempt)
            payloads = {"vote": log.vote_payload, "commit": log.commit_payload}
            self._says[key] = [
                Signed(kind, a, v)
                for kind, payload in payloads.items()
                for a in self.attempts
                for v in VALUES
                if payload(self.entries[v], a) == wanted
            ]
        return self._says[key]

    def _votes(self, signers: Sequence[int], payload: bytes) -> tuple[Vote, ...]:
        return tuple(
            Vote(elector=i, signature=signature(self.electorate[i].peer_id, payload))
            for i in signers
        )

    def _is_certified(self, state: State, attempt: int, value: int) -> bool:
        says = self._certifying(attempt, value)
        voters = zip(self.honest, state.voters, strict=True)
        signers = [i for i, voter in voters if not voter.signed.isdisjoint(says)]
        signers = sorted([*signers, *self.liars])
        key = (attempt, value, *signers)
        if key not in self._certified:
            payload = log.commit_payload(self.entries[value], attempt)
            certificate = Certificate(attempt=attempt, votes=self._votes(signers, payload))
            entry = self.entries[value]
            try:
                log.check_certificate(entry, certificate, self.electorate, verify, "byzantine")
                self._certified[key] = True
            except LogError:
                self._certified[key] = False
        return self._certified[key]

    def _voters_of(self, state: State, chosen: Chosen) -> tuple[int, ...]:
        voted = Signed("vote", *chosen)
        honest = zip(self.honest, state.voters, strict=True)
        return tuple(sorted([*(i for i, v in honest if voted in v.signed), *self.liars]))

    def _lock(self, state: State, chosen: Chosen) -> Lock | None:
        """The lock of an entry at an attempt, if there are votes for it."""
        signers = self._voters_of(state, chosen)
        key = (*chosen, *signers)
        if key not in self._locks:
            attempt, value = chosen
            votes = self._votes(signers, vote_payload(self.entries[value], attempt))
            lock = Lock(attempt=attempt, votes=votes)
            try:
                locks.check_lock(self.entries[value], lock, self.electorate, verify)
                self._locks[key] = lock
            except LogError:
                self._locks[key] = None
        return self._locks[key]

    def _promises(
        self, state: State, attempt: int, lies: Sequence[Chosen], count: int
    ) -> Iterator[Promises]:
        """All promises of so many electors; each liar names one of these locks or none."""
        named: list[list[tuple[int, Chosen | None]]] = [
            [(index, signed.what) for signed in voter.signed if _is_promise(signed, attempt)]
            for index, voter in zip(self.honest, state.voters, strict=True)
        ]
        named += [[(index, lie) for lie in (None, *lies)] for index in self.liars]
        for some in combinations([each for each in named if each], count):
            yield from _choices(some)

    def _signed_promise(self, attempt: int, index: int, named: Chosen | None) -> SignedPromise:
        height, digest = (named[0] + 1, self.entries[named[1]].digest) if named else (0, NO_DIGEST)
        payload = locks.promise_payload(Decree.of(self.entries[0]), attempt, height, digest)
        signed = signature(self.electorate[index].peer_id, payload)
        return SignedPromise(elector=index, locked=height, digest=digest, signature=signed)

    # steps

    def steps(self, state: State) -> Iterator[State]:
        for attempt in self.attempts:
            if self.leaders[attempt] not in self._lying:
                yield from self._lead(state, attempt)
            allowed = sorted(self._proposed(state, attempt))
            for index in range(len(state.voters)):
                yield from self._step(state, index, Signed("promise", attempt, None))
                for value in allowed:
                    yield from self._step(state, index, Signed("vote", attempt, value))
                for value in VALUES:
                    yield from self._step(state, index, Signed("commit", attempt, value))

    def _proposed(self, state: State, attempt: int) -> frozenset[int]:
        """The entries that honest electors may be asked to vote for."""
        if self.leaders[attempt] in self._lying:
            return self._lie(state, attempt)
        return frozenset(v for a, v in state.proposed if a == attempt)

    def _below(self, attempt: int) -> list[Chosen]:
        return [(a, v) for a in self.attempts if a < attempt for v in VALUES]

    def _lie(self, state: State, attempt: int) -> frozenset[int]:
        """The entries that a leader that lies can make honest electors vote for."""
        if attempt == 0:
            return frozenset(VALUES)
        below = self._below(attempt)
        known = tuple(self._voters_of(state, chosen) for chosen in below)
        promised = tuple(
            tuple(signed.what for signed in voter.signed if _is_promise(signed, attempt))
            for voter in state.voters
        )
        key = (attempt, promised, known)
        if key not in self._allowed:
            found: set[int] = set()
            for count in (self._quorum, self._quorum - 1):
                for promises in self._promises(state, attempt, below, count):
                    left = [v for v in VALUES if v not in found]
                    found |= {v for v in left if self._is_justified(state, attempt, v, promises)}
                    if len(found) == len(VALUES):
                        break
            self._allowed[key] = frozenset(found)
        return self._allowed[key]

    def _is_justified(self, state: State, attempt: int, value: int, promises: Promises) -> bool:
        highest = max((named for _, named in promises if named), default=None)
        lock = None
        if highest is not None:
            votes = vote_payload(self.entries[highest[1]], highest[0])
            signers = self._voters_of(state, highest)
            lock = Lock(attempt=highest[0], votes=self._votes(signers, votes))
        signed = tuple(
            self._signed_promise(attempt, *promise) for promise in sorted(promises, key=_index)
        )
        return self._accepts(value, attempt, Justification(promises=signed, lock=lock))

    def _accepts(self, value: int, attempt: int, reason: Justification) -> bool:
        try:
            locks.check_justified(self.entries[value], attempt, reason, self.electorate, verify)
        except LogError:
            return False
        return True

    def _lead(self, state: State, attempt: int) -> Iterator[State]:
        """An honest leader proposes once."""
        if any(a == attempt for a, _ in state.proposed):
            return
        for value in sorted(self._choose(state, attempt)):
            proposed = tuple(sorted([*state.proposed, (attempt, value)]))
            yield state._replace(proposed=proposed)

    def _choose(self, state: State, attempt: int) -> frozenset[int]:
        if attempt == 0:
            return frozenset(VALUES)
        shown = [chosen for chosen in self._below(attempt) if self._lock(state, chosen)]
        found: frozenset[int] = frozenset()
        for promises in self._promises(state, attempt, shown, self._quorum):
            if any(named is not None and named not in shown for _, named in promises):
                raise AssertionError("an honest elector names a lock that it cannot show")
            key = ("honest", attempt, promises)
            if key not in self._allowed:
                self._allowed[key] = frozenset(
                    self._proposal(state, attempt, own, promises) for own in VALUES
                )
            found |= self._allowed[key]
        return found

    def _proposal(self, state: State, attempt: int, own: int, promises: Promises) -> int:
        me = next(e for e in self.electorate if e.peer_id == self.leaders[attempt])
        proposer = Leads(me, trust="byzantine").begin(PLACE, attempt, self.electorate)
        for index, named in sorted(promises, key=_index):
            accepted = self._accepted(state, named)
            proposer.promise(index, accepted, self._signed_promise(attempt, index, named))
        value = self._value(proposer.choose(self.records[own]))
        assert self._accepts(value, attempt, proposer.justification)
        return value

    def _step(self, state: State, index: int, asked: Signed) -> Iterator[State]:
        """An honest elector receives a question of the leader of an attempt."""
        voter = state.voters[index]
        lock = None
        if asked.kind == "commit" and isinstance(asked.what, int):
            lock = self._lock(state, (asked.attempt, asked.what))
            if lock is None:
                return
        key = (voter, index, asked)
        if key not in self._answers:
            self._answers[key] = self._answer(state, voter, index, asked, lock)
        after = self._answers[key]
        if after is not None and after != voter:
            voters = (*state.voters[:index], after, *state.voters[index + 1 :])
            yield state._replace(voters=voters)

    def _answer(
        self, state: State, voter: Voter, index: int, asked: Signed, lock: Lock | None
    ) -> Voter | None:
        booth = Booth(self.electorate[self.honest[index]], trust="byzantine")
        booth.turn(PLACE, self.electorate)
        booth.acceptor.promised = voter.promised
        if voter.accepted is not None:
            attempt, value = voter.accepted
            booth.acceptor.accepted = Accepted(attempt=attempt, entry=self.records[value])
        booth.acceptor.locked = self._accepted(state, voter.locked)
        leader = self.leaders[asked.attempt]
        signed = asked
        try:
            if asked.kind == "promise":
                named = booth.prepare(leader, PLACE, asked.attempt)
                signed = asked._replace(what=self._chosen(named))
            elif asked.kind == "vote":
                booth.accept(leader, PLACE, asked.attempt, self.records[_number(asked.what)])
            else:
                entry = self.records[_number(asked.what)]
                booth.commit(leader, PLACE, Accepted(attempt=asked.attempt, entry=entry, lock=lock))
        except Refused:
            return None
        acceptor = booth.acceptor
        return Voter(
            promised=acceptor.promised,
            accepted=self._chosen(acceptor.accepted),
            locked=self._chosen(acceptor.locked),
            signed=voter.signed | {signed},
        )

    def _accepted(self, state: State, chosen: Chosen | None) -> Accepted | None:
        if chosen is None:
            return None
        lock = self._lock(state, chosen)
        return Accepted(attempt=chosen[0], entry=self.records[chosen[1]], lock=lock)

    def _chosen(self, accepted: Accepted | None) -> Chosen | None:
        return (accepted.attempt, self._value(accepted.entry)) if accepted else None

    def _value(self, record: bytes) -> int:
        return next(value for value, known in self.records.items() if known == record)


def _is_promise(signed: Signed, attempt: int) -> bool:
    return signed.kind == "promise" and signed.attempt == attempt


def _choices(
    some: Sequence[Sequence[tuple[int, Chosen | None]]],
) -> Iterator[Promises]:
    """One promise of each elector."""
    if not some:
        yield frozenset()
        return
    for rest in _choices(some[1:]):
        for promise in some[0]:
            yield rest | {promise}


def _index(promise: tuple[int, Chosen | None]) -> int:
    return promise[0]


def _number(what: Chosen | int | None) -> int:
    assert isinstance(what, int)
    return what


@cache
def _other(voter: Voter) -> Voter:
    """The same with the two entries exchanged."""
    signed = frozenset(s._replace(what=_exchanged(s.what)) for s in voter.signed)
    accepted, locked = _exchanged(voter.accepted), _exchanged(voter.locked)
    return Voter(voter.promised, accepted, locked, signed)  # type: ignore[arg-type]


def _exchanged(what: Chosen | int | None) -> Chosen | int | None:
    if isinstance(what, tuple):
        return what[0], 1 - what[1]
    return None if what is None else 1 - what


@cache
def _order(voter: Voter) -> str:
    signed = sorted(map(str, voter.signed))
    return f"{voter.promised} {voter.accepted} {voter.locked} {signed}"
