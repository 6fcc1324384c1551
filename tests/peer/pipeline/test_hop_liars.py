"""A hop among neighbours that say anything at any time keeps its promises and its memory."""

import random
from collections import Counter

import pytest

from atoll.peer.pipeline.actions import (
    AnswerPass,
    MicrobatchEnded,
    RunJob,
    SendPass,
    TakeStep,
    Tell,
)
from atoll.peer.pipeline.messages import (
    ACCEPTED,
    KNOWN,
    OmitNote,
    Payload,
    RecountNote,
    SettleNote,
    busy,
    refused,
)
from support.pipelines import GRADIENT, OUTPUT, ROWS, SEQUENCES, SHAPE, header, hop, of

PEERS = ["a0", "a1", "b0", "b1", "c0", "c1", "x0"]
REASONS = ["protocol", "stage", "shape", "origin", "expired", "not-asked"]
MAX_BYTES = 20 * SHAPE.held_bytes(ROWS, SEQUENCES)


class Liars:
    """Random events for one hop; the trainer alone is honest."""

    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        self.stage = rng.randrange(3)
        self.exact = rng.random() < 0.5
        self.hop, actions = hop(
            self.stage,
            name="me",
            next_peers=("c0", "c1") if self.stage else ("b0", "b1"),
            exact=self.exact,
            step_microbatches=rng.randint(1, 3),
            staleness=rng.randrange(2),
            max_bytes=MAX_BYTES,
            max_in_flight=8,
            lifetime_s=20.0,
        )
        self.now_s = 0.0
        self.jobs, self.sends, self.tells, self.accepted = [], [], [], []
        self.names = [header(i) for i in range(4)]
        self.added, self.begun, self.ended = Counter(), set(), Counter()
        self.take(actions)

    def take(self, actions):
        self.jobs += of(RunJob, actions) + of(TakeStep, actions)
        self.sends += of(SendPass, actions)
        self.tells += of(Tell, actions)
        self.accepted += [a for a in of(AnswerPass, actions) if a.answer.verdict == "accepted"]
        self.begun |= {job.key.microbatch for job in of(RunJob, actions) if job.kind == "begin"}
        self.names += [send.header for send in of(SendPass, actions)]
        self.ended.update(end.microbatch for end in of(MicrobatchEnded, actions))

    def offer(self):
        """Offer anything: half of the time the return of an output, from the peer that has it."""
        outward = [send for send in self.sends[-20:] if not send.header.is_return]
        if outward and self.rng.random() < 0.5:
            send = self.rng.choice(outward)
            self.offer_return(send.peer, send.header)
            return
        rng, name = self.rng, self.rng.choice(self.names[-30:])
        direction = rng.choice(["forward", "evaluate", "backward", "evaluated"])
        is_return = direction in ("backward", "evaluated")
        peer = rng.choice(PEERS)
        path = [rng.choice(PEERS) for _ in range(2 - self.stage)] if is_return else []
        if path and rng.random() < 0.8:
            path[-1] = peer
        made = header(
            name.sequence,
            direction,
            stage=rng.choice([self.stage, self.stage, self.stage, 0, 2]),
            origin=rng.choice([name.origin, peer]),
            incarnation=name.incarnation,
            nonce=name.nonce,
            path=path,
            remaining_ms=rng.choice([1, 500, 20_000, 3_600_000]),
            rows=rng.choice([ROWS, ROWS, 2]),
        )
        self.take(self.hop.offered(peer, made, self.now_s))

    def offer_return(self, peer, sent):
        path = (*self.rng.choices(PEERS, k=1 - self.stage), peer)
        made = header(
            sent.sequence,
            "backward" if sent.direction == "forward" else "evaluated",
            stage=self.stage,
            origin=sent.origin,
            incarnation=sent.incarnation,
            nonce=sent.nonce,
            path=path,
        )
        self.take(self.hop.offered(peer, made, self.now_s))

    def deliver(self):
        if self.accepted:
            each = self.rng.choice(self.accepted)
            payload = OUTPUT if each.header.has_tokens else GRADIENT
            peer = self.rng.choice([each.peer, each.peer, self.rng.choice(PEERS)])
            self.take(self.hop.received(peer, each.header, payload, self.now_s))

    def break_off(self):
        if self.accepted:
            each = self.rng.choice(self.accepted)
            self.take(self.hop.not_received(each.peer, each.header, self.now_s))

    def answer(self):
        if self.sends:
            send, rng = self.rng.choice(self.sends[-20:]), self.rng
            said = rng.choice(
                [ACCEPTED, ACCEPTED, KNOWN, busy(rng.choice([0, 60])), refused(rng.choice(REASONS))]
            )
            self.take(self.hop.answered(send, said, self.now_s))

    def fail(self):
        if self.sends:
            send = self.rng.choice(self.sends[-20:])
            failure = self.rng.choice(["unreachable", "lost", "timed-out", "own"])
            self.take(self.hop.send_failed(send, failure, self.now_s))

    def note(self):
        rng, name = self.rng, self.rng.choice(self.names[-30:])
        fields = {
            "origin": name.origin,
            "incarnation": name.incarnation,
            "sequence": name.sequence,
            "nonce": name.nonce,
        }
        note = rng.choice(
            [
                OmitNote(**fields, direction=rng.choice(["forward", "evaluate"]), reason="late"),
                SettleNote(**fields),
                RecountNote(**fields, path=tuple(rng.choices(PEERS, k=rng.randrange(5)))),
            ]
        )
        self.take(self.hop.noted(rng.choice(PEERS), note, self.now_s))

    def move(self):
        peer = self.rng.choice(["b0", "b1", "c0", "c1"])
        if self.rng.random() < 0.5:
            self.take(self.hop.left(peer, self.now_s))
        else:
            incarnation = f"i{self.rng.randrange(3)}"
            self.take(
                self.hop.appeared(peer, incarnation=incarnation, rows_per_s=1e9, now_s=self.now_s)
            )

    def compute(self):
        if not self.jobs:
            return
        job, now_s = self.jobs.pop(0), self.now_s
        if isinstance(job, TakeStep):
            self.take(self.hop.stepped(now_s))
        elif self.rng.random() < 0.05:
            self.take(self.hop.job_failed(job.key, now_s))
        elif job.kind == "begin":
            self.take(
                self.hop.began(job.key, sequences=SEQUENCES, rows=ROWS, output=OUTPUT, now_s=now_s)
            )
        elif job.kind == "forward":
            output = Payload.of(job.tokens, OUTPUT.frame)
            self.take(self.hop.forwarded(job.key, output, now_s))
        elif job.kind == "evaluate":
            self.take(self.hop.evaluated(job.key, 1.0, now_s))
        else:
            if self.stage:
                loss = 1.0 if job.kind == "loss" else None
                self.take(self.hop.gradient_ready(job.key, GRADIENT, now_s, loss=loss))
            self.added[job.key] += 1
            assert self.added[job.key] == 1
            self.take(self.hop.finished(job.key, now_s))

    def tick(self):
        self.now_s += self.rng.uniform(0, 0.3)
        self.take(self.hop.tick(self.now_s))

    def step(self):
        often = [self.offer, self.deliver, self.answer, self.compute] * 4
        seldom = [self.break_off, self.fail, self.note, self.move, self.tick]
        self.rng.choice(often + seldom)()
        said = self.hop.statistics()
        assert said.in_flight <= 8 and 0 <= said.held_bytes <= MAX_BYTES

    def quiet(self):
        """Let the neighbours fall silent, and time pass."""
        self.take(self.hop.drain(self.now_s))
        for _ in range(120):
            self.now_s += 0.5
            while self.jobs:
                self.compute()
            self.take(self.hop.tick(self.now_s))


def check(seed):
    liars = Liars(seed)
    for _ in range(600):
        liars.step()
    liars.quiet()
    said = liars.hop.statistics()
    assert (said.in_flight, said.queued_jobs, said.remembered, said.held_bytes) == (0, 0, 0, 0)
    assert set(liars.ended) == liars.begun and max(liars.ended.values(), default=1) == 1


@pytest.mark.parametrize("seed", [*range(40), 539])  # 539: asks in the last millisecond
def test_a_hop_among_liars_keeps_its_bounds(seed):
    check(seed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(40, 1000))
def test_a_hop_among_liars_keeps_its_bounds_at_length(seed):
    check(seed)
