"""A pipeline of two stages in virtual time: the whole of each peer but the arithmetic.

The hunt's machines, disks, clocks and networks, with `PipelineRun` instead of `LogRun`: real rounds
and a log for each stage, a real `Carrier` between them, moves, and the coordinator's epochs. A
trainer draws noise for a gradient, and sends bytes of the right length.
"""

import asyncio
import json
import queue
import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch

from atoll.coordinator.run.spec import RunSpec
from atoll.dht.tasks import beside
from atoll.optim.log.entry import Entry
from atoll.peer.daemon import pipeline_run
from atoll.peer.daemon.options import PeerOptions
from atoll.peer.daemon.peer import Peer
from atoll.peer.daemon.pipeline_run import PipelineRun, frame_shape
from atoll.peer.lab.hunt import plans
from atoll.peer.lab.hunt.audits import Audit
from atoll.peer.lab.hunt.edges import living
from atoll.peer.lab.hunt.machines import Habits, PeerMachine, _admit, _watch
from atoll.peer.lab.hunt.plans import PlannedFault
from atoll.peer.lab.hunt.trainers import (
    RATE,
    LoopTurns,
    PointModel,
    Training,
    TurnQueue,
    TurnThread,
)
from atoll.peer.lab.hunt.world import LOOK_S, World, _identity, _keys
from atoll.peer.pipeline import workbench
from atoll.peer.pipeline.actions import RunJob, TakeStep
from atoll.peer.pipeline.carrier import Carrier, Ended
from atoll.peer.pipeline.messages import Payload, encode_tokens
from atoll.peer.pipeline.placement import StageNeeds
from atoll.peer.training.stages import Shape

STAGES, DEADLINE_S = 2, 20.0
LATE_S = 1.0  # of an end, beyond the deadline: a hop looks at the clock each 0.05 s
SEQUENCES, LENGTH = 1, 16
SHAPE = Shape(vocab_size=256, seq_len=LENGTH, width=8)
NEEDS = (StageNeeds(cost=1.0, state_bytes=6000, device_bytes=1),) * STAGES
TOKENS = encode_tokens(np.zeros((SEQUENCES, LENGTH + 1), dtype=np.int64))
KINDS = ("kill", "power", "freeze", "cut", "part", "reset", "loss", "slow", "leave")
LASTS_S = (0.5, 2.0, 5.0, 20.0)
FAULTS_S = 45.0  # then everything heals


def plan_of(seed):
    """The plan of a seed: three to five peers, and a fault of peers or links each few seconds."""
    chance = random.Random(f"stages {seed}")
    every_s, at_s, faults = chance.choice([3.0, 6.0, 12.0]), 8.0, []
    while (at_s := at_s + chance.expovariate(1 / every_s)) < FAULTS_S:
        fault = PlannedFault(
            at_s=round(at_s, 1),
            kind=chance.choice(KINDS),
            who=chance.randrange(1000),
            other=chance.randrange(1000),
            lasts_s=chance.choice(LASTS_S),
            amount=chance.random(),
        )
        faults.append(fault)
    return replace(
        plans.draw(seed),
        method="diloco",
        codec=chance.choice(["int8", "fp32"]),
        trainers=chance.choice([3, 4, 4, 5]),
        keepers=0,
        step_s=0.2,
        admission_hours=168.0,
        lasts_s=FAULTS_S,
        faults=tuple(faults),
        units=0,  # a pipeline's first stage draws the rows
        copies=False,
    )


ORDERS = ("pause", "set", "oust")


def plan_with_orders(seed):
    """The plan of a seed with few faults, a pause for a while, and other orders."""
    chance, plan = random.Random(f"ordered stages {seed}"), plan_of(seed)
    orders = [
        PlannedFault(
            at_s=at_s,
            kind=kind,
            who=chance.randrange(1000),
            other=0,  # of numbers, inner_steps
            lasts_s=chance.choice(LASTS_S),
            amount=chance.random(),
        )
        for at_s, kind in ((12.0, "pause"), (25.0, chance.choice(ORDERS)), (38.0, "pause"))
    ]
    faults = sorted([*plan.faults[::2], *orders], key=lambda fault: fault.at_s)
    return replace(plan, trainers=max(4, plan.trainers), faults=tuple(faults))


def spec_of(spec):
    """A dense run's spec, of two stages."""
    plain = json.loads(spec.canonical())
    plain["topology"] = {
        "stages": STAGES,
        "activations": "fp32",
        "gradients": "fp32",
        "deadline_s": DEADLINE_S,
        "rebalance_s": 0.0,
    }
    plain["data"]["seq_len"] = LENGTH
    plain["inner"] |= {"batch_size": SEQUENCES, "grad_accumulation": 2}
    return RunSpec.from_dict(plain)


class StageAudit(Audit):
    """Rules of a run with several logs: a place is one of a log."""

    def __init__(self, *given):
        super().__init__(*given)
        self.control = set()
        """(log, position) of the entries that brought orders"""

    def decided(self, machine, entry):
        self.orders.decided(machine.name, entry)
        if entry.kind == "control":
            self.control.add((entry.run_id, entry.position))
        place = entry.run_id, entry.epoch, entry.position
        if self._decided.setdefault(place, entry.digest) != entry.digest:
            self.fail("one entry a position", f"{machine.name} has another at {place[1:]}")

    def acknowledged(self, machine, epoch, position):
        """Not told by logs."""

    def reopened(self, machine, epoch, position):
        """As `acknowledged`."""

    def opened(self, machine, epoch, record):
        """Likewise: each log has epochs of its own."""


class WatchedCarrier(Carrier):
    """A carrier whose own microbatches the trainer sees end."""

    def __init__(self, *given, **named):
        super().__init__(*given, ended=Ended(on_ended=self._note), **named)

    @staticmethod
    def _note(ended):
        machine = living()
        if machine is not None and machine.training is not None:
            machine.training.ended.add(ended.microbatch)
            machine.training.open.pop(ended.microbatch, None)


class StageThread(TurnThread):
    """A loop that is asked in turns, as what it is asked starts tasks."""

    def ask(self, function):
        async def call():
            return function()

        return self.run(call(), timeout_s=60.0) if LoopTurns.current() else function()


class StageTraining(Training):
    """A trainer of a stage."""

    def __init__(self, peer, step_s, seed):
        super().__init__(peer, step_s, seed)
        self._thread = StageThread(peer)
        self.counted, self.ended, self.open = Counter(), set(), {}
        """open: own microbatches that have not ended, and when they began"""

    def _loop(self, reducer):
        run, spec = self._peer.run, self._peer.spec
        model = PointModel(self._machine.world.layout)
        inner = torch.optim.SGD(model.parameters(), lr=RATE)
        worker = reducer.method.worker(model, inner, reducer, inner_steps=spec.outer.inner_steps)
        frames = frame_shape(spec, SHAPE)
        numbers = frames.forward_bytes(SEQUENCES * LENGTH, SHAPE.width)
        assert numbers == frames.backward_bytes(SEQUENCES * LENGTH, SHAPE.width)
        self._frame = bytes(numbers)
        run.on_move = self.stop
        run.open_stage(SHAPE, NEEDS, 1 << 30)
        run.bench.report("resume")
        while not reducer.finished and not reducer.stopping.is_set():
            job = run.bench.take(1.0)
            if isinstance(job, TakeStep):
                self._take_step(worker, model, job)
                run.bench.report("stepped")
            elif job is not None:
                self._do(job)

    def _take_step(self, worker, model, job):
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=self._noise)
            parameter.grad = parameter.detach() + 0.3 * noise
        worker.inner.step()
        worker.advance(tokens=LENGTH * job.microbatches, loss=1.0)

    def _do(self, job):
        assert isinstance(job, RunJob)
        report, name = self._peer.run.bench.report, job.key.microbatch
        LoopTurns.current().sleep(self._step_s)
        output = Payload.of(TOKENS, self._frame)
        if job.kind == "begin":
            if name not in self.ended:  # given up while this waited for a round
                self.open[name] = self._machine.world.now()
            report("began", job.key, sequences=SEQUENCES, rows=LENGTH, output=output)
            return
        if job.kind == "forward":
            report("forwarded", job.key, output)
            return
        if job.kind == "loss":
            report("gradient_ready", job.key, Payload.of(b"", self._frame), loss=1.0)
        self.counted[name] += 1
        if self.counted[name] > 1:
            rule = "a microbatch counts once at a peer"
            self._machine.world.audit.fail(rule, f"{self._machine.name}: {name}")
        report("finished", job.key)


class StageMachine(PeerMachine):
    """A trainer's, which moves to another stage when it is named."""

    async def _main(self):
        invite, moved = await self._invite(), None
        while True:
            options = PeerOptions(
                invite=invite,
                state_dir=self.disk.folder,
                name=self.name,
                listen=(),
                announce=("/ip4/10.0.0.1/tcp/1",),
                moved=moved,
            )
            async with Peer.open(
                options,
                lambda spec: PipelineRun.start,
                admit=_admit,
                on_event=self._on_event,
                on_phase=lambda phase, position, left=None: None,
            ) as peer:
                self.peer = peer
                async with beside(_watch(peer)):
                    seed = self.number * 1000 + self.num_starts
                    self.training = StageTraining(peer, self.habits.step_s, seed)
                    await self.training.run()
            moved, self.peer, self.training = peer.run.moves, None, None
            if moved is None:
                return
            self.world.faults.counts["move"] += 1


class StageWorld(World):
    """The machines of a pipeline."""

    def __init__(self, plan, folder, loop):
        super().__init__(plan, folder, loop)
        self.spec = spec_of(self.spec)
        run_key = _keys(plan.seed).run_public_key
        self.audit = StageAudit(run_key, self.spec.method(), self.genesis())

    def add_peer(self, *, is_keeper=False):
        number = len(self.peers) + 1
        habits = Habits(step_s=self.plan.step_s * (1 + 0.2 * (number % 3)))
        peer = StageMachine(self, number, habits, _identity(self.plan, number))
        self.peers.append(peer)
        return peer

    def _look(self):
        late = self.now() - DEADLINE_S - LATE_S
        for peer in self.peers:
            opened = peer.training.open if peer.training is not None else {}
            if min(opened.values(), default=late) < late:
                rule = "no microbatch waits for ever"
                self.audit.fail(rule, f"{peer.name} has begun some that did not end")
        super()._look()

    async def _resume(self):
        self._goals = {name: place[1] + 2 for name, place in self._heads().items()}
        await super()._resume()
        await self._drain()

    def _settings(self):
        """Those of the coordinator's log that has the fewest orders."""
        up = self.coordinator.running
        logs = [] if up is None else [log.settings for log in up.coordinator.logs.values()]
        least = min(logs, key=lambda settings: settings.number, default=None)
        return {} if least is None else {self.coordinator.name: least}

    def _heads(self):
        up = self.coordinator.running
        if up is None:
            return dict.fromkeys(self.spec.modules, (0, 0))
        heads = {name: log.head() for name, log in up.coordinator.logs.items()}
        return {name: (head.epoch, head.position) for name, head in heads.items()}

    def _has_resumed(self, goal):
        wanted = self._wanted()
        if any(peer.peer is None for peer in wanted):
            return False
        heads = self._heads()
        return all(heads[name][1] >= least for name, least in self._goals.items()) and all(
            each.peer.position >= self._goals[each.peer.module] for each in wanted
        )

    def _standing(self):
        places = [
            f"{p.name} {(p.peer.module, p.peer.run.epoch, p.peer.position) if p.peer else None}"
            for p in self._wanted()
        ]
        return f"{', '.join(places)}; coordinator {self._heads()}"

    async def _drain(self):
        """Begin nothing more: what is in work ends everywhere by its deadline."""
        for peer in self._wanted():
            carrier = peer.peer.run._carrier if peer.peer is not None else None
            if carrier is not None:
                carrier.act(carrier.hop.drain(asyncio.get_running_loop().time()))
        await asyncio.sleep(DEADLINE_S + 2 * LATE_S)
        self._look()
        for peer in self._wanted():
            flow = peer.peer.run.flow() if peer.peer is not None else None
            if flow is not None and (flow.in_flight or peer.training.open):
                self.audit.fail("no microbatch waits for ever", f"{peer.name}: {flow}")
        await asyncio.sleep(LOOK_S)
        self._look()

    def check_logs(self):
        for machine in self.machines():
            for replica in self._replicas(machine):
                for record in replica.store.headers(0, 1 << 30):
                    self.audit.decided(machine, Entry.decode(record.entry))

    def _replicas(self, machine):
        if machine is not self.coordinator:
            return [machine.peer.run.replica] if machine.peer is not None else []
        up = machine.running
        return [log.replica for log in up.coordinator.logs.values()] if up is not None else []

    def places(self, edges):
        queues = SimpleNamespace(SimpleQueue=TurnQueue, Empty=queue.Empty)
        chance = SimpleNamespace(SystemRandom=lambda: random.Random(edges.incarnation()))
        return [
            *super().places(edges),
            (workbench, "queue", queues),
            (pipeline_run, "random", chance),
            (pipeline_run, "Carrier", WatchedCarrier),
        ]
