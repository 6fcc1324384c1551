"""Hops without a network: small shapes, and a whole pipeline in virtual time with faults."""

import heapq
import itertools
import random
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from atoll.peer.pipeline.actions import (
    AnswerPass,
    Drained,
    MicrobatchEnded,
    RunJob,
    SendPass,
    SettleHeld,
    TakeStep,
    Tell,
)
from atoll.peer.pipeline.hop import Hop
from atoll.peer.pipeline.messages import (
    PIPELINE_PROTOCOL,
    FrameShape,
    Microbatch,
    PassHeader,
    PassKey,
    Payload,
    encode_tokens,
)
from atoll.peer.pipeline.passes import HopRules

ROWS, SEQUENCES, WIDTH, VOCAB = 6, 2, 3, 50

SHAPE = FrameShape(
    max_rows=ROWS,
    max_length=ROWS // SEQUENCES,
    width=WIDTH,
    vocab_size=VOCAB,
    forward_codec="int8",
    backward_codec="bf16",
    forward_bytes=lambda rows, width: rows * (width + 4),
    backward_bytes=lambda rows, width: 2 * rows * width,
)
TOKENS = encode_tokens(np.arange(ROWS + SEQUENCES).reshape(SEQUENCES, -1))
OUTPUT = Payload.of(TOKENS, b"o" * SHAPE.forward_bytes(ROWS, WIDTH))
GRADIENT = Payload.of(b"", b"g" * SHAPE.backward_bytes(ROWS, WIDTH))


def rules(**changes):
    return HopRules(
        **{"stages": 3, "shape": SHAPE, "lifetime_s": 20.0, "step_microbatches": 4} | changes
    )


def microbatch(sequence=0, origin="a0", nonce=b"12345678"):
    return Microbatch(origin, "i0", sequence, nonce)


def pass_key(sequence=0, direction="forward", **name):
    return PassKey(microbatch(sequence, **name), direction)


def header(sequence=0, direction="forward", *, stage=1, path=(), **changes):
    """A header as an honest peer sends it."""
    is_return = direction in ("backward", "evaluated")
    payload = {"backward": GRADIENT, "evaluated": Payload.of(b"", b"")}.get(direction, OUTPUT)
    name = microbatch(sequence)
    return PassHeader(
        **{
            "protocol": PIPELINE_PROTOCOL,
            "direction": direction,
            "stage": stage,
            "origin": name.origin,
            "incarnation": name.incarnation,
            "sequence": name.sequence,
            "nonce": name.nonce,
            "remaining_ms": 20_000,
            "sequences": SEQUENCES,
            "rows": ROWS,
            "width": WIDTH,
            "codec": SHAPE.codec(direction),
            "digest": payload.digest,
            "path": tuple(path),
            "loss": 2.5 if is_return else None,
        }
        | changes
    )


def of(kind, actions):
    """The actions of one kind."""
    return [action for action in actions if isinstance(action, kind)]


def the(kind, actions):
    """The only action of one kind."""
    (action,) = of(kind, actions)
    return action


def hop(stage=1, *, name=None, now_s=0.0, next_peers=("c0",), **changes):
    """A hop that takes passes, with peers of the next stage."""
    made = Hop(
        me=name or f"{'abcdef'[stage]}0",
        incarnation="i0",
        stage=stage,
        rules=rules(**changes),
        rng=random.Random(5),
    )
    for peer in next_peers if stage < changes.get("stages", 3) - 1 else ():
        made.appeared(peer, incarnation="i0", rows_per_s=None, now_s=now_s)
    return made, made.resume(now_s)


# A whole pipeline.


@dataclass(kw_only=True)
class Weather:
    """What goes wrong."""

    lost: float = 0.0
    """probability that a message of a send fails"""
    repeated: float = 0.0
    """probability that a message comes twice"""
    kills: int = 0
    restarts: bool = True
    cuts: int = 0
    silent_cuts: bool = False
    """messages vanish, and senders notice by a time-out only"""
    slow: float = 1.0
    """factor of the slowest peer's jobs"""
    spared: frozenset = frozenset()
    """peers that are not killed"""


JOB_S = {"begin": 0.04, "forward": 0.04, "loss": 0.09, "backward": 0.1, "evaluate": 0.03}
TICK_S, SEND_TIMEOUT_S, NOTICED_S = 0.25, 3.0, 4.0


@dataclass(eq=False)
class Process:
    """One process of a peer: the machine, and a trainer that computes nothing."""

    name: str
    stage: int
    incarnation: str
    hop: Hop
    pace: float
    alive: bool = True
    jobs: deque = field(default_factory=deque)
    is_computing: bool = False
    version: int = 0
    forward_at: dict = field(default_factory=dict)
    added: Counter = field(default_factory=Counter)
    held: set = field(default_factory=set)
    step_sizes: list = field(default_factory=list)
    began_at: dict = field(default_factory=dict)
    ended: dict = field(default_factory=dict)
    drained: int = 0


class Pipeline:
    """Peers of all stages, a network and a clock; checks what must hold at every moment."""

    def __init__(self, seed, *, peers=(2, 2, 2), weather=None, run_s=12.0, **changes):
        self.rng = random.Random(seed)
        self.weather = weather or Weather()
        self.rules = rules(**({"stages": len(peers), "lifetime_s": 8.0} | changes))
        self.run_s = run_s
        self.now_s = 0.0
        self._events = []
        self._numbers = itertools.count()
        self.processes = []
        self.live = {}
        self.cut = {}
        self.peers = [[f"{'abcdef'[s]}{i}" for i in range(n)] for s, n in enumerate(peers)]
        names = [name for stage in self.peers for name in stage]
        slowest = self.rng.choice(names)
        self.pace = {
            name: self.weather.slow if name == slowest else self.rng.uniform(0.8, 1.25)
            for name in names
        }
        for name in names:
            self._start(name)
        self._plan_faults(names)
        for process in list(self.processes):
            self._do(process, process.hop.resume(self.now_s))
        self.at(run_s, self._drain)

    # The clock.

    def at(self, time_s, do, *args):
        heapq.heappush(self._events, (time_s, next(self._numbers), do, args))

    def after(self, delay_s, do, *args):
        self.at(self.now_s + delay_s, do, *args)

    def run(self):
        """Run until the last name is forgotten."""
        end_s = self.run_s + 2.5 * self.rules.lifetime_s + 5
        while self._events and self._events[0][0] <= end_s:
            self.now_s, _, do, args = heapq.heappop(self._events)
            do(*args)
        return self

    def _delay(self):
        return self.rng.uniform(0.005, 0.05)

    # Peers.

    def _start(self, name):
        stage = "abcdef".index(name[0])
        incarnation = f"i{sum(p.name == name for p in self.processes)}"
        seed = self.rng.getrandbits(32)
        machine = Hop(
            me=name,
            incarnation=incarnation,
            stage=stage,
            rules=self.rules,
            rng=random.Random(seed),
        )
        process = Process(name, stage, incarnation, machine, self.pace[name])
        self.processes.append(process)
        self.live[name] = process
        for other in list(self.live.values()):
            if other.stage == stage + 1:
                self._announce(process, other)
            elif other.stage == stage - 1:
                self.after(self._delay(), self._announce, other, process)
        self.after(self.rng.uniform(0, TICK_S), self._tick, process)
        return process

    def _announce(self, to, other):
        if to.alive:
            actions = to.hop.appeared(
                other.name, incarnation=other.incarnation, rows_per_s=None, now_s=self.now_s
            )
            self._do(to, actions)

    def _restart(self, name):
        process = self._start(name)
        if process.stage or self.now_s < self.run_s:
            self._do(process, process.hop.resume(self.now_s))

    def kill(self, name):
        process = self.live.pop(name, None)
        if process is None:
            return
        process.alive = False
        if self.weather.restarts:
            self.after(self.rng.uniform(0.5, 5), self._restart, name)
        else:
            self.after(NOTICED_S, self._gone, name)

    def _gone(self, name):
        if name in self.live:
            return
        for other in list(self.live.values()):
            self._do(other, other.hop.left(name, self.now_s))

    def _drain(self):
        for process in list(self.live.values()):
            if process.stage == 0:
                self._do(process, process.hop.drain(self.now_s))

    def _tick(self, process):
        if process.alive:
            self._do(process, process.hop.tick(self.now_s))
            self.after(TICK_S, self._tick, process)

    def _plan_faults(self, names):
        at_risk = [name for name in names if name not in self.weather.spared]
        for _ in range(self.weather.kills):
            self.at(self.rng.uniform(0.5, self.run_s), self.kill, self.rng.choice(at_risk))
        for _ in range(self.weather.cuts):
            pair = frozenset(self.rng.sample(names, 2))
            start_s = self.rng.uniform(0, self.run_s)
            self.cut.setdefault(pair, []).append((start_s, start_s + self.rng.uniform(0.5, 6)))

    def _is_cut(self, one, other):
        spans = self.cut.get(frozenset((one, other)), ())
        return any(start <= self.now_s < stop for start, stop in spans)

    # The network.

    def _do(self, process, actions):
        for action in actions:
            if isinstance(action, SendPass):
                self.after(self._delay(), self._arrive, process, action)
            elif isinstance(action, Tell):
                self.after(self._delay(), self._told, process, action)
            elif isinstance(action, RunJob | TakeStep):
                process.jobs.append(action)
                self._compute(process)
            elif isinstance(action, SettleHeld):
                assert action.key in process.held
                process.held.remove(action.key)
                if action.counts:
                    self._add(process, action.key)
            elif isinstance(action, MicrobatchEnded):
                assert action.microbatch not in process.ended, "ended twice"
                process.ended[action.microbatch] = (action, self.now_s)
            else:
                assert isinstance(action, Drained)
                process.drained += 1

    def _fails(self, one, other):
        """How a message from a process to a peer fails, if it does."""
        if self._is_cut(one.name, other):
            return "timed-out" if self.weather.silent_cuts else "lost"
        if other not in self.live:
            return "unreachable"
        return "lost" if self.rng.random() < self.weather.lost else None

    def _fail(self, process, send, failure):
        if process.alive:
            self._do(process, process.hop.send_failed(send, failure, self.now_s))

    def _arrive(self, process, send):
        failure = self._fails(process, send.peer) if process.alive else "lost"
        if failure is not None:
            wait_s = SEND_TIMEOUT_S if failure == "timed-out" else self._delay()
            self.after(wait_s, self._fail, process, send, failure)
            return
        receiver = self.live[send.peer]
        answer = self._offer(receiver, process.name, send)
        self.after(self._delay(), self._answer, process, receiver, send, answer)
        if self.rng.random() < self.weather.repeated:
            self.after(self._delay(), self._offer_again, process, receiver, send)

    def _offer(self, receiver, name, send):
        header = PassHeader.decode(send.header.encode())
        actions = receiver.hop.offered(name, header, self.now_s)
        answer = the(AnswerPass, actions).answer
        self._do(receiver, [action for action in actions if not isinstance(action, AnswerPass)])
        return answer

    def _offer_again(self, process, receiver, send):
        if receiver.alive and self._offer(receiver, process.name, send).verdict == "accepted":
            self.after(1.0, self._not_received, process, receiver, send)

    def _not_received(self, process, receiver, send):
        if receiver.alive:
            now_s = self.now_s
            self._do(receiver, receiver.hop.not_received(process.name, send.header, now_s))

    def _answer(self, process, receiver, send, answer):
        failure = self._fails(receiver, process.name) if receiver.alive else "lost"
        if failure is not None or not process.alive:
            self._fail(process, send, failure or "lost")
            if answer.verdict == "accepted":
                self._not_received(process, receiver, send)
            return
        self._do(process, process.hop.answered(send, answer, self.now_s))
        if answer.verdict == "accepted":
            self.after(2 * self._delay(), self._deliver, process, receiver, send)

    def _deliver(self, process, receiver, send):
        is_there = process.alive and receiver.alive
        failure = self._fails(process, send.peer) if is_there else "lost"
        if failure is not None:
            self._fail(process, send, failure)
            self._not_received(process, receiver, send)
            return
        self._receive(process, receiver, send)
        if self.rng.random() < self.weather.repeated:
            self.after(self._delay(), self._receive, process, receiver, send)
        if self.rng.random() < self.weather.lost:  # the payload arrived, its receipt does not
            self.after(self._delay(), self._fail, process, send, "lost")
        else:
            self.after(self._delay(), self._delivered, process, send)

    def _receive(self, process, receiver, send):
        if receiver.alive:
            actions = receiver.hop.received(process.name, send.header, send.payload, self.now_s)
            self._do(receiver, actions)

    def _delivered(self, process, send):
        if process.alive:
            self._do(process, process.hop.delivered(send, self.now_s))

    def _told(self, process, tell):
        if not process.alive:
            return
        if self._fails(process, tell.peer) is not None:
            self._do(process, process.hop.untold(tell, self.now_s))
            return
        receiver = self.live[tell.peer]
        for _ in range(1 + (self.rng.random() < self.weather.repeated)):
            self._do(receiver, receiver.hop.noted(process.name, tell.note, self.now_s))
        self._do(process, process.hop.told(tell, self.now_s))

    # Trainers.

    def _compute(self, process):
        if process.is_computing or not process.jobs or not process.alive:
            return
        process.is_computing = True
        job = process.jobs.popleft()
        if isinstance(job, TakeStep):
            process.version += 1
            process.step_sizes.append(job.microbatches)
            self.after(0.02, self._end, process, process.hop.stepped)
            return
        took_s = JOB_S[job.kind] * process.pace
        self._note_version(process, job)
        if job.kind in ("loss", "backward") and process.stage:
            loss = 2.5 if job.kind == "loss" else None
            self.after(0.6 * took_s, self._gradient, process, job.key, loss)
        self.after(took_s, self._end, process, *self._outcome(process, job))

    def _note_version(self, process, job):
        if job.kind == "begin":
            process.began_at[job.key.microbatch] = self.now_s
        if job.kind in ("begin", "forward", "loss"):
            process.forward_at[job.key] = process.version
        if job.kind in ("loss", "backward"):
            stale = process.version - process.forward_at[job.key]
            assert stale <= self.rules.staleness, "a gradient at another version"

    def _outcome(self, process, job):
        hop = process.hop
        if job.kind == "begin":
            return lambda now_s: hop.began(
                job.key, sequences=SEQUENCES, rows=ROWS, output=OUTPUT, now_s=now_s
            ), None
        if job.kind == "forward":
            assert job.frame == OUTPUT.frame and job.tokens == TOKENS
            return lambda now_s: hop.forwarded(job.key, OUTPUT, now_s), None
        if job.kind == "evaluate":
            return lambda now_s: hop.evaluated(job.key, 2.5, now_s), None
        assert job.tokens == TOKENS
        assert job.gradient == (GRADIENT.frame if job.kind == "backward" else b"")
        return lambda now_s: hop.finished(job.key, now_s), job

    def _gradient(self, process, key, loss):
        if process.alive:
            self._do(process, process.hop.gradient_ready(key, GRADIENT, self.now_s, loss=loss))

    def _end(self, process, report, job=None):
        if not process.alive:
            return
        process.is_computing = False
        if job is not None and job.holds:
            process.held.add(job.key)
        elif job is not None:
            self._add(process, job.key)
        self._do(process, report(self.now_s))
        self._compute(process)

    def _add(self, process, key):
        process.added[key.microbatch] += 1
        assert process.added[key.microbatch] == 1, "counted twice at one peer"

    # What came of it.

    def counted(self):
        """How many peers of each stage counted each microbatch; the dead ones too."""
        counts = Counter()
        for process in self.processes:
            counts.update((process.stage, name) for name in process.added)
        return counts

    def ends(self):
        """How the microbatches of the origins that live have ended, and when."""
        return {name: end for p in self.live.values() for name, end in p.ended.items()}

    def began(self):
        """When the microbatches of the origins that live began."""
        return {name: at for p in self.live.values() for name, at in p.began_at.items()}
