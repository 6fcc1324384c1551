"""Peers of a pipeline over a network in memory, with trainers that compute nothing."""

import asyncio
import random
from collections import Counter

from atoll.dht.tasks import KeptTasks
from atoll.dht.testing.memory import MemoryNetwork
from atoll.dht.testing.virtualtime import inline, run_virtual
from atoll.peer.pipeline.actions import RunJob, SettleHeld, TakeStep
from atoll.peer.pipeline.carrier import Carrier, Ended
from atoll.peer.pipeline.hop import Hop
from atoll.peer.pipeline.messages import FrameShape, Payload
from atoll.peer.pipeline.passes import HopRules
from atoll.peer.pipeline.workbench import Workbench
from support.pacing import unlimited
from support.records import record_of

WIDTH, LENGTH = 16, 8
LIFETIME_S = 20.0
INCARNATION = "1" * 32


def shape_of(width=WIDTH):
    return FrameShape(
        max_rows=LENGTH,
        max_length=LENGTH,
        width=width,
        vocab_size=256,
        forward_codec="int8",
        backward_codec="int8",
        forward_bytes=lambda rows, width: rows * width,
        backward_bytes=lambda rows, width: rows * width,
    )


class Bench(Workbench):
    """A workbench whose trainer is a task of the loop."""

    def __init__(self):
        super().__init__()
        self.has_jobs = asyncio.Event()

    def put(self, job):
        super().put(job)
        self.has_jobs.set()


class Member:
    """A peer with a hop, and a trainer that answers each job at once with bytes of its own."""

    def __init__(self, network, tasks, name, stage, shape, stages=2, job_s=0.0):
        self.name, self.stage, self.shape = name, stage, shape
        self.network, self.job_s = network, job_s
        self.jobs, self.ends, self.steps, self.said = Counter(), [], [], []
        self.counted, self.held = Counter(), set()
        """microbatches by name"""
        self.began_s, self.ended_s = {}, {}
        self.bench = Bench()
        rules = HopRules(stages=stages, shape=shape, lifetime_s=LIFETIME_S, step_microbatches=2)
        self.hop = Hop(
            me=name, incarnation=INCARNATION, stage=stage, rules=rules, rng=random.Random(name)
        )
        self.carrier = Carrier(
            self.hop,
            network.transport(name),
            shape,
            bench=self.bench,
            tasks=tasks,
            compute=inline,
            turn=unlimited().turn,
            ended=Ended(on_ended=self._ended),
            on_event=lambda level, text: self.said.append(f"{level}: {text}"),
        )
        self.began = 0
        self.most = 4
        """Microbatches to begin."""
        tasks.keep(self.carrier.keep)
        tasks.keep(self.train)
        self.bench.report("resume")

    async def train(self):
        while True:
            job = self.bench.take(0)
            if job is None:
                self.bench.has_jobs.clear()
                await self.bench.has_jobs.wait()
            elif isinstance(job, TakeStep):
                self.steps.append(job.microbatches)
                self.bench.report("stepped")
            else:
                if self.job_s:
                    await asyncio.sleep(self.job_s)
                self.do(job)

    def do(self, job):
        if isinstance(job, SettleHeld):
            self.held.remove(job.key)
            self.counted[job.key.microbatch] += job.counts
            return
        assert isinstance(job, RunJob)
        self.jobs[job.kind] += 1
        number = job.key.microbatch.sequence
        frame = bytes([number]) * (LENGTH * self.shape.width)
        if job.kind == "begin":
            self.began += 1
            self.began_s[job.key.microbatch] = asyncio.get_running_loop().time()
            tokens = bytes(4 * (LENGTH + 1))
            output = Payload.of(tokens, frame)
            self.bench.report("began", job.key, sequences=1, rows=LENGTH, output=output)
            if self.began == self.most:
                self.bench.report("drain")
        elif job.kind == "forward":
            assert job.frame == frame
            self.bench.report("forwarded", job.key, Payload.of(job.tokens, frame))
        elif job.kind == "loss":
            assert job.frame == frame  # whole, and of this microbatch
            self.bench.report(
                "gradient_ready", job.key, Payload.of(b"", frame[::-1]), loss=float(number)
            )
            self._finish(job)
        elif job.kind == "backward":
            assert job.gradient == frame[::-1] and job.loss == number
            if self.stage:
                gradient = Payload.of(b"", frame[::-1])
                self.bench.report("gradient_ready", job.key, gradient, loss=None)
            self._finish(job)

    def _finish(self, job):
        if job.holds:
            self.held.add(job.key)
        else:
            self.counted[job.key.microbatch] += 1
        self.bench.report("finished", job.key)

    def _ended(self, end):
        self.ends.append(end)
        self.ended_s[end.microbatch] = asyncio.get_running_loop().time()


def record(member, name=None):
    module = f"stage-{member.stage + 1}"
    return record_of(name or member.name, incarnation=INCARNATION, module=module)


def with_members(use, *names, width=WIDTH):
    """Use a network, its peer of the first of two stages, and peers of the second."""

    async def main():
        network = MemoryNetwork()
        async with KeptTasks(lambda text: None) as tasks:
            first = Member(network, tasks, "first", 0, shape_of(width))
            others = [Member(network, tasks, name, 1, shape_of(width)) for name in names]
            await use(network, first, *others)

    run_virtual(main())


async def until(condition, limit_s=60):

    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.05)
