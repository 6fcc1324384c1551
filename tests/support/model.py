"""All states that a position's electors can reach, driven through the rules that peers run.

A state is what every process remembers, and every question and vote that was ever sent.  They stay:
one that is never delivered was lost or its receiver was dead, one delivered late was slow, one
delivered twice was repeated.  All leaders have asked from the start, which is the same as asking
later: what counts is when it is delivered.  A promise reaches its leader at once or never; late is
the same as at once, because what the leader makes of it may come late.

Beside deliveries a process may start again (another incarnation, nothing remembered), after which
it leads and votes if the rules let it; or go on to the next position once a certificate exists and
come back to this one, as a replica does that recovers from an older snapshot.  Or it retires: it
votes no more, and says where it stands once the rules let it; that tells the coordinator what it
takes to be undecided here for ever.

The rules are those of `atoll.peer.rounds.consensus.ballots` and `atoll.optim.log.entry`; this file
only stores and restores what their objects hold.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

from atoll.coordinator import policies
from atoll.dht.transport import Refused
from atoll.optim.log.entry import (
    Certificate,
    CertificateInvalid,
    Elector,
    Entry,
    Vote,
    check_certificate,
    vote_payload,
)
from atoll.peer.rounds.consensus.ballots import (
    TERM,
    Accepted,
    Booth,
    Leads,
    Place,
    Proposer,
    leader_of,
    term_of,
)

HERE, NEXT = Place(1, 0), Place(1, 1)

Told = tuple[int, int] | None
"""(attempt, value) that was accepted."""


class Message(NamedTuple):
    """``elector`` is who answers; ``told`` is what a promise tells."""

    kind: str
    attempt: int
    value: int = -1
    elector: int = -1
    told: Told = None


class Lead(NamedTuple):
    """An attempt that a process leads: the promises it holds, and the value it chose."""

    attempt: int
    promises: tuple[tuple[int, Told], ...]
    chosen: int | None


class Process(NamedTuple):
    """What one process remembers of this position."""

    incarnation: int = 0
    returned: bool = False
    retiring: bool = False
    gone_from: Place | None = None
    """said when its first incarnation, the elector, left"""
    promised: int = 0
    accepted: Told = None
    leads: tuple[Lead, ...] = ()


class State(NamedTuple):
    processes: tuple[Process, ...]
    messages: frozenset[Message]
    mishaps: int = 0


class DecidedTwice(AssertionError):
    """Two certificates for one position."""


class Voided(AssertionError):
    """A certificate for a position that the coordinator takes to be undecided for ever."""


Change = tuple[Process, Message | None] | None
"""What a step makes of a process, and what it sends; None where it refuses."""


Rule = Callable[[int, Process, Any], Change]


class Model:
    """Electors 0..n-1, some attempts, so many restarts or returns to a position; do they leave?"""

    def __init__(
        self,
        electors: int,
        attempts: Sequence[int],
        mishaps: int,
        *,
        leaving: bool = False,
        passing: Collection[int] = (),
        place: Place = HERE,
    ) -> None:
        """`passing`: attempts that pass over what no quorum accepted, whenever they may."""
        self.passing, self.place = passing, place
        self.passed_over = 0
        self.electorate = tuple(elector(i, 0) for i in range(electors))
        self.attempts, self.mishaps, self.leaving = attempts, mishaps, leaving
        term = term_of(max(attempts)) + 1
        self.further = [TERM * (term + i) for i in range(electors)]
        """attempts for ``finish``"""
        every = (*attempts, *self.further)
        self.leaders = {a: self.electorate.index(self.leader(a)) for a in every}
        self._entries: dict[int, Entry] = {}
        self._winners: dict[frozenset[Message], frozenset[int]] = {}
        self._changes: dict[tuple[object, ...], Change] = {}

    def leader(self, attempt: int) -> Elector:
        return leader_of(self.electorate, self.place.position, term_of(attempt))

    def explore(self) -> set[State]:
        """Every reachable state.

        Raises:
            DecidedTwice: in one of them two entries have a certificate.
            Voided: in one of them an epoch that the coordinator may open here voids an entry.
        """
        start = self.start()
        seen, todo = {start}, [start]
        while todo:
            state = todo.pop()
            won = self.winners(state.messages)
            if len(won) > 1:
                raise DecidedTwice(f"{sorted(won)} by {sorted(map(str, state.messages))}")
            if won and self.is_given_up(state):
                raise Voided(f"{sorted(won)} by {sorted(map(str, state.messages))}")
            for after in self.steps(state, bool(won)):
                if after not in seen:
                    seen.add(after)
                    todo.append(after)
        return seen

    def is_given_up(self, state: State) -> bool:
        """Whether the coordinator opens an epoch here, by what peers said that left."""
        gone: policies.Retired = {}
        for index, process in enumerate(state.processes):
            if process.gone_from is not None:
                gone[f"p{index}", "0"] = process.gone_from
        return not policies.can_decide(self.electorate, gone, HERE)

    def start(self) -> State:
        """Every leader has asked, nobody has answered."""
        state = State(tuple(Process() for _ in self.electorate), frozenset())
        for attempt in self.attempts:
            (state,) = self._step(state, self.leaders[attempt], self._begin, attempt)
        return state

    # certificates

    def winners(self, messages: frozenset[Message]) -> frozenset[int]:
        """The values for which the votes that were sent make a certificate."""
        votes = frozenset(m for m in messages if m.kind == "vote")
        if votes not in self._winners:
            ballots = {(vote.attempt, vote.value) for vote in votes}
            self._winners[votes] = frozenset(v for a, v in ballots if self._holds(votes, a, v))
        return self._winners[votes]

    def _holds(self, votes: frozenset[Message], attempt: int, value: int) -> bool:
        entry = self.entry(value)
        voters = sorted(m.elector for m in votes if (m.attempt, m.value) == (attempt, value))
        signed = tuple(
            Vote(elector=e, signature=signature(f"p{e}", vote_payload(entry, attempt)))
            for e in voters
        )
        certificate = Certificate(attempt=attempt, votes=signed)
        try:
            check_certificate(entry, certificate, self.electorate, verify)
        except CertificateInvalid:
            return False
        return True

    def entry(self, value: int) -> Entry:
        """Entries differ in their learning rate only."""
        if value not in self._entries:
            self._entries[value] = Entry(
                run_id=b"r" * 32,
                epoch=self.place.epoch,
                position=self.place.position,
                kind="null",
                previous_chain=b"c" * 32,
                fragment=0,
                lr=float(value),
                momentum=0.0,
                members=(),
                parts=(),
                electorate=self.electorate,
            )
        return self._entries[value]

    # steps: what happens at one process depends on that process alone, so it is worked out once

    def steps(self, state: State, decided: bool) -> Iterator[State]:
        for message in state.messages:
            if message.kind != "vote":
                for index in range(len(self.electorate)):
                    yield from self._deliver(state, index, message)
        if state.mishaps < self.mishaps:
            yield from self._mishaps(state, decided)
        if self.leaving:
            yield from self._leave(state, decided)
        if state.mishaps:
            for attempt in self.attempts:
                yield from self._step(state, self.leaders[attempt], self._begin, attempt)

    def _deliver(self, state: State, index: int, ask: Message) -> Iterator[State]:
        for after, answer in self._asked(state, index, ask):
            if answer.kind == "vote":
                yield after._replace(messages=after.messages | {answer})
            else:
                yield after
                yield from self._step(
                    after, self.leaders[answer.attempt], self._take_promise, answer
                )

    def _asked(self, state: State, index: int, ask: Message) -> Iterator[tuple[State, Message]]:
        change = self._change(state, index, self._answer, ask)
        if change is not None and change[1] is not None:
            yield put(state, index, change[0]), change[1]

    def _step(self, state: State, index: int, rule: Rule, what: Any) -> Iterator[State]:
        change = self._change(state, index, rule, what)
        if change is not None:
            yield put(state, index, *change)

    def _change(self, state: State, index: int, rule: Rule, what: Any) -> Change:
        process = state.processes[index]
        key = (rule, index, process, what)
        if key not in self._changes:
            self._changes[key] = rule(index, process, what)
        return self._changes[key]

    def _begin(self, index: int, process: Process, attempt: int) -> Change:
        leads, electorate = Leads(elector(index, process.incarnation)), self.electorate_of(index)
        try:
            for led in process.leads:
                leads.begin(self.place, led.attempt, electorate)
            proposer = leads.begin(self.place, attempt, electorate)
        except Refused:
            return None
        return self._lead_on(index, process, proposer)

    def _take_promise(self, index: int, process: Process, promise: Message) -> Change:
        """A promise reaches the leader that asked, if its process still runs."""
        for led in process.leads:
            if led.attempt == promise.attempt and led.chosen is None:
                electors = len(self.electorate_of(index))
                proposer = Proposer(attempt=led.attempt, electors=electors)
                for voter, told in (*led.promises, (promise.elector, promise.told)):
                    proposer.promise(voter, as_accepted(told))
                return (
                    self._lead_on(index, process, proposer)
                    if proposer.free and not self._waits(proposer)
                    else (with_lead(process, proposer), None)
                )
        return None

    def _waits(self, proposer: Proposer) -> bool:
        """Whether a leader that passes entries over waits for more promises than a quorum's."""
        self._pass_over(proposer)
        adopted = proposer.adopted()
        may_be = adopted is not None and proposer.may_be_decided(adopted)
        all_promised = len(proposer.promises) == len(self.electorate)
        return proposer.attempt in self.passing and may_be and not all_promised

    def _pass_over(self, proposer: Proposer) -> None:
        if proposer.attempt not in self.passing:
            return
        while (adopted := proposer.adopted()) and not proposer.may_be_decided(adopted):
            proposer.pass_over()
            self.passed_over += 1

    def _lead_on(self, index: int, process: Process, proposer: Proposer) -> Change:
        """Choose and propose as soon as that is allowed; each process has a value of its own."""
        sent = Message("prepare", proposer.attempt)
        if proposer.free:
            self._pass_over(proposer)
            own = self._own(index, proposer.attempt, process.incarnation)
            chosen = as_value(proposer.choose(as_entry(own)))
            sent = Message("propose", proposer.attempt, chosen)
        return with_lead(process, proposer), sent

    def electorate_of(self, index: int) -> tuple[Elector, ...]:
        """Who votes here, as one process takes it."""
        return self.electorate

    def _own(self, index: int, attempt: int, incarnation: int) -> int:
        """The value that a process proposes if the choice is free."""
        return attempt + 64 * incarnation

    def _sender(self, ask: Message) -> str:
        return self.electorate[self.leaders[ask.attempt]].peer_id

    def _answer(self, index: int, process: Process, ask: Message) -> Change:
        """A leader's message reaches an elector, who answers if the rules let it."""
        me = elector(index, process.incarnation)
        booth = restored(process, me, self.electorate_of(index), self.place)
        leader = self._sender(ask)
        try:
            if ask.kind == "prepare":
                told = as_told(booth.prepare(leader, self.place, ask.attempt))
                reply = Message("promise", ask.attempt, elector=index, told=told)
            else:
                booth.accept(leader, self.place, ask.attempt, as_entry(ask.value))
                reply = Message("vote", ask.attempt, ask.value, index)
        except Refused:
            return None
        acceptor = booth.acceptor
        after = process._replace(promised=acceptor.promised, accepted=as_told(acceptor.accepted))
        return after, reply

    def _mishaps(self, state: State, decided: bool) -> Iterator[State]:
        """Start again with nothing; or, where a certificate exists, move on and be put back."""
        again = state._replace(mishaps=state.mishaps + 1)
        for index, process in enumerate(state.processes):
            anew = Process(incarnation=process.incarnation, gone_from=process.gone_from)
            if process != anew:
                yield put(again, index, anew._replace(incarnation=process.incarnation + 1))
            if decided and not process.returned:
                yield put(again, index, process._replace(returned=True))

    def _leave(self, state: State, decided: bool) -> Iterator[State]:
        """Vote no more; say goodbye where the rules let it, here or one position further on."""
        for index, process in enumerate(state.processes):
            if process.incarnation:
                continue
            if not process.retiring:
                yield put(state, index, process._replace(retiring=True))
            elif process.gone_from is None:
                booth = restored(process, elector(index, 0), self.electorate)
                if booth.retired:
                    yield put(state, index, process._replace(gone_from=HERE))
                booth.turn(NEXT, self.electorate)
                if decided and booth.retired:
                    yield put(state, index, process._replace(gone_from=NEXT))

    # where nothing fails any more

    def finish(self, state: State) -> frozenset[int]:
        """The winners once a further leader that never failed meets electors that answer.

        Its attempt is beyond all that were promised; messages of earlier ones come no more.
        """
        intact = [i for i, p in enumerate(state.processes) if not (p.incarnation or p.returned)]
        attempt = next(a for a in self.further if self.leaders[a] in intact)
        leader = self.electorate[self.leaders[attempt]]
        proposer = Leads(leader).begin(self.place, attempt, self.electorate)
        processes = list(state.processes)
        for index in intact:
            change = self._answer(index, processes[index], Message("prepare", attempt))
            assert change is not None
            processes[index], promise = change
            proposer.promise(index, as_accepted(promise.told if promise else None))
        value = as_value(proposer.choose(as_entry(attempt)))
        votes = {Message("vote", attempt, value, index) for index in intact}
        return self.winners(state.messages | votes)


def elector(index: int, incarnation: int) -> Elector:
    return Elector(peer_id=f"p{index}", incarnation=str(incarnation))


def signature(peer_id: str, payload: bytes) -> bytes:
    return peer_id.encode() + payload


def verify(peer_id: str, payload: bytes, signed: bytes) -> bool:
    return signed == signature(peer_id, payload)


def as_entry(value: int) -> bytes:
    return bytes([value])


def as_value(entry: bytes) -> int:
    return entry[0]


def as_told(accepted: Accepted | None) -> Told:
    return (accepted.attempt, as_value(accepted.entry)) if accepted else None


def as_accepted(told: Told) -> Accepted | None:
    return Accepted(attempt=told[0], entry=as_entry(told[1])) if told else None


def restored(
    process: Process, me: Elector, electorate: tuple[Elector, ...], place: Place = HERE
) -> Booth:
    """The booth as this process left it."""
    booth = Booth(me)
    if process.retiring:
        booth.retire()
    booth.turn(place, electorate)
    booth.acceptor.promised = process.promised
    booth.acceptor.accepted = as_accepted(process.accepted)
    if process.returned:
        booth.turn(Place(place.epoch, place.position + 1), electorate)
        booth.turn(place, electorate)
    return booth


def with_lead(process: Process, proposer: Proposer) -> Process:
    promises = tuple(sorted((e, as_told(a)) for e, a in proposer.promises.items()))
    chosen = as_value(proposer.chosen) if proposer.chosen is not None else None
    others = [lead for lead in process.leads if lead.attempt != proposer.attempt]
    leads = sorted([*others, Lead(proposer.attempt, promises, chosen)], key=lambda x: x.attempt)
    return process._replace(leads=tuple(leads))


def put(state: State, index: int, process: Process, sent: Message | None = None) -> State:
    processes = (*state.processes[:index], process, *state.processes[index + 1 :])
    messages = state.messages if sent is None else state.messages | {sent}
    return State(processes, messages, state.mishaps)
