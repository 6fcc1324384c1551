"""One peer of one stage, as a machine without sockets, threads or clocks.

Its driver calls a method for everything that happens (a header arrived, a job is done, a send
failed, time passed) with the time, and carries out the actions that it returns, in their order. The
driver runs in the event loop, the jobs in the trainer's thread. The rules are in the parts:

    which peer gets an output, and what replaces a lost one     `router.py`, `wiring.py`
    what is let in, and what a pass is when it comes again      `intake.py`, `ledger.py`
    who gets a return                                           `returns.py`
    when a step is due, and how many may be in flight           `steps.py`
    what the trainer computes first                             `jobs.py`
    who counted, and exact settlement                           `origins.py`

A neighbour is believed about its own part of a pass alone. A return, and word that a pass is given
up, are taken from a peer that was given the output; a settlement from the origin; the first stage's
passes from their origin; shapes from the run. The name of a microbatch holds a random number, so a
peer that was never on its way can neither claim its return nor occupy its place.

A pass goes through these phases (`passes.Phase`)::

    first               QUEUED -> ROUTING <-> AWAITED -> RETURNED -> DONE
    middle  ARRIVING -> QUEUED -> ROUTING <-> AWAITED -> RETURNED [-> HELD] -> DONE
    last    ARRIVING -> QUEUED [-> HELD] -> DONE

and from each of them to OMITTED: at its deadline, after an error of this peer's own, or when all
peers of the next stage have refused it. Only a pass whose gradients are being computed at its
deadline still counts.
"""

from __future__ import annotations

import random
from math import inf, isfinite

from atoll.peer.pipeline.actions import (
    Action,
    AnswerPass,
    Complain,
    Drained,
    JobKind,
    RunJob,
    SendFailure,
    SendPass,
    TakeStep,
    Tell,
)
from atoll.peer.pipeline.books import Books
from atoll.peer.pipeline.flow import Flow
from atoll.peer.pipeline.messages import (
    Microbatch,
    Note,
    OmitNote,
    Outward,
    PassAnswer,
    PassHeader,
    PassKey,
    Payload,
    SettleNote,
    shape_problem,
)
from atoll.peer.pipeline.passes import HopRules, Pass, Phase, remaining_ms
from atoll.peer.pipeline.tallies import HopStatistics, Wait


class Hop:
    """The machine of one peer in one stage. All times are seconds on one clock of this peer."""

    def __init__(
        self, *, me: str, incarnation: str, stage: int, rules: HopRules, rng: random.Random
    ) -> None:
        """Begin drained: `resume` lets it take passes, or begin microbatches.

        Args:
            me: PeerID.
            incarnation: of this process.
            stage: that this peer serves, from 0.
            rules: of the run.
            rng: names microbatches and spreads retries; outside tests `random.SystemRandom()`, as
                names must not be guessed.
        """
        if not 0 <= stage < rules.stages:
            raise ValueError(f"expected a stage below {rules.stages}, got {stage}")
        self._me, self._incarnation, self._stage = me, incarnation, stage
        self._rules, self._rng = rules, rng
        self._is_first, self._holds = stage == 0, rules.exact and stage > 0
        self._books = Books(rules)
        self._flow = Flow(me=me, stage=stage, rules=rules, rng=rng, books=self._books)
        self._next_sequence = 0
        self._evaluations = 0
        """that have not begun"""
        self._said_drained = True

    # What the network reports.

    def offered(self, peer: str, header: PassHeader, now_s: float) -> list[Action]:
        """Take the header of a pass that a peer wants to send."""
        answer = self._flow.intake.answer(peer, header, now_s)
        self._flow.tallies.answered(answer, is_return=header.is_return)
        self._flow.actions.append(AnswerPass(peer=peer, header=header, answer=answer))
        if answer.reason == "shape":
            text = f"announces another shape: {shape_problem(header, self._rules.shape)}"
            self._flow.actions.append(Complain(peer=peer, text=text))
        if answer.verdict == "known":
            self._flow.known(peer, header, now_s)
        return self._advance(now_s)

    def received(
        self, peer: str, header: PassHeader, payload: Payload, now_s: float
    ) -> list[Action]:
        """Take the payload of an accepted pass, as `messages.read_payload` checked it."""
        one = self._books.open(header.key)
        if one is not None and header.is_return:
            self._flow.take_return(one, peer, header, payload, now_s)
        elif one is not None:
            self._flow.take_input(one, peer, payload)
        return self._advance(now_s)

    def not_received(self, peer: str, header: PassHeader, now_s: float) -> list[Action]:
        """Note that the payload of an accepted pass did not come, or was another one."""
        one = self._books.open(header.key)
        if one is not None and header.is_return:
            self._flow.lose_return(one, peer, now_s)
        elif one is not None and one.phase is Phase.ARRIVING and one.requesters == [peer]:
            self._flow.lose_input(one, now_s)
        return self._advance(now_s)

    def answered(self, send: SendPass, answer: PassAnswer, now_s: float) -> list[Action]:
        """Take a peer's answer to a header."""
        if send.header.is_return:
            self._flow.actions += self._flow.returns.answered(send, answer, now_s)
            return self._advance(now_s)
        one = self._flow.at_peer(send)
        if one is not None and not self._flow.router.answered(one, answer, now_s):
            self._flow.route(one, now_s)
        return self._advance(now_s)

    def delivered(self, send: SendPass, now_s: float) -> list[Action]:
        """Note that a peer has taken a payload."""
        if send.header.is_return:
            self._flow.returns.delivered(send)
            return self._advance(now_s)
        one = self._flow.at_peer(send)
        if one is not None:
            self._flow.router.delivered(one, now_s)
        return self._advance(now_s)

    def send_failed(self, send: SendPass, failure: SendFailure, now_s: float) -> list[Action]:
        """Note that a peer did not answer a header, or did not take the payload."""
        if send.header.is_return:
            self._flow.actions += self._flow.returns.failed(send, now_s)
            return self._advance(now_s)
        one = self._flow.at_peer(send)
        if one is not None:
            self._flow.router.failed(one, failure, now_s)
            self._flow.doubt(send.peer, now_s)
            if failure == "own":  # it would fail alike on the way to any other peer
                self._flow.omit(one, "failed")
            else:
                self._flow.route(one, now_s)
        return self._advance(now_s)

    def remaining_ms(self, send: SendPass, now_s: float) -> int:
        """Return the time that a send has left; 0 if nobody needs it any more."""
        if send.header.is_return:
            return self._flow.returns.remaining_ms(send, now_s)
        one = self._flow.at_peer(send)
        return 0 if one is None else remaining_ms(one.deadline_s, now_s)

    def noted(self, peer: str, note: Note, now_s: float) -> list[Action]:
        """Take a peer's note."""
        if isinstance(note, OmitNote):
            self._flow.given_up(peer, note.key, now_s)
        elif isinstance(note, SettleNote):
            self._flow.settled(peer, note.microbatch)
        else:
            self._flow.counted_by.note(note.microbatch, note.path)
        return self._advance(now_s)

    def told(self, tell: Tell, now_s: float) -> list[Action]:
        """Note that a note has arrived."""
        self._flow.settlements.told(tell)
        return self._advance(now_s)

    def untold(self, tell: Tell, now_s: float) -> list[Action]:
        """Note that a note did not arrive; only settlements are sent again."""
        self._flow.settlements.untold(tell, now_s)
        return self._advance(now_s)

    def appeared(
        self, peer: str, *, incarnation: str, rows_per_s: float | None, now_s: float
    ) -> list[Action]:
        """Take a peer of the next stage, as announced; passes at its former process are lost."""
        if self._flow.router.wiring.appeared(peer, incarnation=incarnation, rows_per_s=rows_per_s):
            self._flow.lose_peer(peer, now_s)
            for one in self._books:
                one.excluded.discard(peer)
                if one.phase is Phase.ROUTING:
                    self._flow.route(one, now_s)
        return self._advance(now_s)

    def leaves(self, peer: str, now_s: float) -> list[Action]:
        """Note that a peer is about to leave the next stage: it only returns what it has."""
        self._flow.router.wiring.left(peer)
        return self._advance(now_s)

    def left(self, peer: str, now_s: float) -> list[Action]:
        """Note that a peer serves the next stage no longer."""
        self._flow.router.wiring.left(peer)
        self._flow.lose_peer(peer, now_s)
        return self._advance(now_s)

    # What the trainer reports.

    def began(
        self, key: PassKey, *, sequences: int, rows: int, output: Payload, now_s: float
    ) -> list[Action]:
        """Take the tokens of a microbatch that this first stage has drawn, and its output."""
        one = self._books.ended_job(key)
        if one is not None:
            one.sequences, one.rows = sequences, rows
            one.received = Payload(output.tokens, b"", b"")
            self._flow.send_on(one, output, now_s)
        return self._advance(now_s)

    def forwarded(self, key: PassKey, output: Payload, now_s: float) -> list[Action]:
        """Take an output, with the tokens of its input."""
        one = self._books.ended_job(key)
        if one is not None:
            self._flow.send_on(one, output, now_s)
        return self._advance(now_s)

    def gradient_ready(
        self, key: PassKey, gradient: Payload, now_s: float, *, loss: float | None = None
    ) -> list[Action]:
        """Take the gradient of an input; at the last stage also the loss, in nats a token."""
        _check_loss(loss)
        one = self._books.open(key)
        if one is not None and self._books.adds_gradients(one):
            one.loss = one.loss if loss is None else loss
            self._flow.send_back(one, gradient, now_s)
        return self._advance(now_s)

    def finished(self, key: PassKey, now_s: float) -> list[Action]:
        """Note that the gradients of the weights are added up, or held."""
        one = self._books.ended_job(key)
        if one is not None:
            self._flow.finish(one)
        return self._advance(now_s)

    def evaluated(self, key: PassKey, loss: float, now_s: float) -> list[Action]:
        """Take the loss of an evaluation, from the last stage, in nats a token."""
        _check_loss(loss)
        one = self._books.ended_job(key)
        if one is not None:
            one.loss = loss
            self._flow.end_evaluation(one, now_s)
        return self._advance(now_s)

    def job_failed(self, key: PassKey, now_s: float) -> list[Action]:
        """Note that a job raised: an error of this peer's own, which bans nobody."""
        one = self._books.ended_job(key)
        if one is not None:
            self._flow.omit(one, "failed")
        return self._advance(now_s)

    def job_refused(self, key: PassKey, sender: str, text: str, now_s: float) -> list[Action]:
        """Note that what a peer sent for a job cannot be used.

        The microbatch is given up. The sender's own computation may have failed, so it stays.
        """
        text = f"sends what cannot be used: {text}"
        self._flow.actions.append(Complain(peer=sender, text=text, origin=key.microbatch.origin))
        return self.job_failed(key, now_s)

    def stepped(self, now_s: float) -> list[Action]:
        """Note that the inner step is taken."""
        self._books.jobs.end_step()
        self._books.steps.taken()
        return self._advance(now_s)

    # What the peer's owner wants.

    def resume(self, now_s: float) -> list[Action]:
        """Take passes; at the first stage, begin microbatches."""
        self._books.is_draining, self._said_drained = False, True
        return self._advance(now_s)

    def drain(self, now_s: float) -> list[Action]:
        """Take nothing new, and report `Drained` when all that is in work has ended."""
        self._books.is_draining, self._said_drained = True, False
        return self._advance(now_s)

    def withdraw(self, now_s: float) -> list[Action]:
        """Give up what is in work, and drain: this peer leaves its stage now."""
        for one in self._books:
            self._flow.give_up(one, "withdrawn")
        return self.drain(now_s)

    def flush(self, now_s: float) -> list[Action]:
        """Take a step with what is counted, once drained; nothing if nothing is."""
        if self._books.steps.counted and not len(self._books):
            self._take_step()
        return self._advance(now_s)

    def evaluate(self, microbatches: int, now_s: float) -> list[Action]:
        """Begin evaluations, at the first stage; each ends with `MicrobatchEnded`."""
        if not self._is_first:
            raise ValueError(f"expected stage 0 to begin evaluations, got stage {self._stage}")
        self._evaluations += microbatches
        return self._advance(now_s)

    def tick(self, now_s: float) -> list[Action]:
        """End what is late, and try again what is due."""
        expired, forgotten = self._books.sweep(now_s)
        for one in expired:
            self._flow.expire(one)
        for key in forgotten:
            self._flow.counted_by.forget(key.microbatch)
        for one in self._books:
            if one.due_s <= now_s:
                self._flow.due(one, now_s)
        self._flow.actions += self._flow.returns.tick(now_s)
        self._flow.actions += self._flow.settlements.tick(now_s)
        return self._advance(now_s)

    @property
    def arrival_s(self) -> float:
        """Return the seconds that a payload may take; a pass is given up if it takes longer."""
        return self._flow.intake.arrival_s

    @property
    def due_s(self) -> float:
        """Return when `tick` has something to do; infinity if never."""
        own = min((one.due_s for one in self._books), default=inf)
        return min(
            own, self._books.ledger.due_s, self._flow.returns.due_s, self._flow.settlements.due_s
        )

    def statistics(self) -> HopStatistics:
        """Return what this hop has counted, and what it holds."""
        tallies, books = self._flow.tallies, self._books
        return HopStatistics(
            counted=tallies.counted,
            evaluated=tallies.evaluated,
            steps=books.steps.version,
            omitted=dict(tallies.omitted),
            late_returns=tallies.late_returns,
            resends=self._flow.router.resends,
            busy_answers=tallies.busy_answers,
            double_counts=dict(self._flow.counted_by.doubles),
            waited_s=dict(tallies.waited_s),
            in_flight=len(books),
            queued_jobs=books.jobs.num_waiting,
            remembered=len(books.ledger),
            held_bytes=books.ledger.num_bytes,
            rows_per_s=self._flow.router.wiring.rows_per_s(),
        )

    # What comes next.

    def _advance(self, now_s: float) -> list[Action]:
        """Give the trainer what it can take, and return all actions."""
        while self._books.jobs.has_room and self._start_job(now_s):
            pass
        books = self._books
        is_idle = not (len(books) or books.jobs.num_running or len(self._flow.returns))
        if is_idle and not self._said_drained:
            self._said_drained = True
            self._flow.actions.append(Drained(microbatches=books.steps.counted))
        self._flow.tallies.wait(self._wait_reason(), now_s)
        actions, self._flow.actions = self._flow.actions, []
        return actions

    def _start_job(self, now_s: float) -> bool:
        if self._books.steps.is_due and not self._is_evaluating:
            self._take_step()
            return True
        if self._is_first and self._books.jobs.prefers_new and self._begin(now_s):
            return True
        job = self._books.jobs.take()
        if job is not None:
            self._run(*job)
        return job is not None or (self._is_first and self._begin(now_s))

    @property
    def _is_evaluating(self) -> bool:
        """True while evaluations of this origin go on; its trainer takes no step meanwhile."""
        return self._is_first and (
            self._evaluations > 0 or any(not one.key.trains for one in self._books)
        )

    def _take_step(self) -> None:
        self._books.jobs.start_step()
        self._flow.actions.append(TakeStep(microbatches=self._books.steps.take()))

    def _run(self, key: PassKey, kind: JobKind) -> None:
        one = self._books.open(key)
        assert one is not None  # a pass that is closed has no job that waits
        if kind != "backward":
            self._books.steps.begin_forward(key)
        self._flow.actions.append(
            RunJob(
                kind=kind,
                key=key,
                sequences=one.sequences,
                rows=one.rows,
                tokens=one.received.tokens,
                frame=one.received.frame,
                gradient=one.gradient,
                loss=one.loss,
                sender=one.returned_by if kind == "backward" else one.requesters[0],
                holds=self._holds and kind in ("loss", "backward"),
            )
        )

    def _begin(self, now_s: float) -> bool:
        direction: Outward = "evaluate" if self._evaluations else "forward"
        if not self._books.has_room(direction):
            return False
        key = PassKey(
            Microbatch(self._me, self._incarnation, self._next_sequence, self._rng.randbytes(8)),
            direction,
        )
        most = self._rules.shape.max_rows  # until it is drawn
        one = Pass(
            key=key,
            deadline_s=now_s + self._rules.lifetime_s,
            phase=Phase.QUEUED,
            due_s=inf,
            sequences=most,
            rows=most,
        )
        if not self._books.enter(one, sender=self._me):
            return False
        self._next_sequence += 1
        self._evaluations -= direction == "evaluate"
        if one.key.trains and not self._rules.exact:
            self._flow.counted_by.begin(key.microbatch)
        self._books.steps.begin_forward(key)
        self._books.jobs.start(key, "begin")
        self._flow.actions.append(RunJob(kind="begin", key=key))
        return True

    def _wait_reason(self) -> Wait | None:
        books = self._books
        if books.jobs.num_running:
            return None
        if any(one.phase is Phase.ROUTING for one in books):
            return "route"
        if len(books):
            return "returns" if books.steps.has_room else "step"
        return "drain" if books.is_draining else "input"


def _check_loss(loss: float | None) -> None:
    if loss is not None and not isfinite(loss):
        raise ValueError(f"expected a finite loss, got {loss}; report the job as failed")
