"""Several peers a stage, in threads: hops over a network in memory, rounds in this process."""

import asyncio
import itertools
import random
import threading

import torch

from atoll.dht.tasks import KeptTasks
from atoll.dht.testing.memory import MemoryNetwork
from atoll.optim.inprocess.rounds import in_process
from atoll.peer.daemon.pipeline_run import frame_shape, hop_rules
from atoll.peer.pipeline.carrier import Carrier
from atoll.peer.pipeline.hop import Hop
from atoll.peer.pipeline.workbench import Workbench
from atoll.peer.training.devices import Device
from atoll.peer.training.opening import build_stage, slices_of
from atoll.peer.training.permission import Allowed
from atoll.peer.training.stage_learner import StageLearner, StoppedInStep, codecs_of
from support.pacing import unlimited
from support.records import record_of
from support.small_stages import VOCAB, batches

INCARNATION = "1" * 32


class StagePeer(threading.Thread):
    """The trainer of one peer of a stage, which averages with the others of that stage."""

    def __init__(self, spec, module, index, bench, group, method, inner_steps, steps, drawn):
        super().__init__(daemon=True)
        self.bench, self.gradients, self.error = bench, [], None
        self.losses, self.worker = [], None
        self._method, self._steps = method, steps
        self._inner_steps = inner_steps
        self.stopping = threading.Event()
        self._member, self._group = index, group
        self.learner = StageLearner(
            build_stage(spec, module, VOCAB, Allowed()),
            spec.inner,
            Device.choose("cpu", spec.inner.precision),
            bench,
            codecs_of(spec),
            draw=lambda trains: next(drawn),
            total_steps=0,
            optimizer=method.inner,
            is_stopped=self.stopping.is_set,
        )

    def run(self):
        torch.set_num_threads(1)
        try:
            self._train()
        except Exception as error:
            self.error = error

    def _train(self):
        learner = self.learner
        member = self._group.member(self._member)
        self.worker = self._method.worker(
            learner.model, learner.optimizer, member, inner_steps=self._inner_steps
        )
        for step in range(self._steps):
            try:
                gradient = learner.gradient(step=step)
            except StoppedInStep:
                return
            self.gradients.append({n: p.grad.clone() for n, p in learner.model.named_parameters()})
            self.losses.append(gradient.loss)
            self.worker.step(tokens=gradient.tokens)
            learner.clear()
        member.close()
        while not self.stopping.is_set():
            learner.serve()


def trained(spec, peers, method, steps, *, inner_steps=1, draw=batches):
    """Train so many peers a stage by a method; return them by stage, and their hops.

    `draw` gives the endless microbatches of a peer of the first stage, by its number.
    """

    async def main():
        network = MemoryNetwork()
        frames = frame_shape(spec, slices_of(spec, VOCAB, Allowed()).shape)
        stages, hops, carriers = [], [], []
        async with KeptTasks(lambda text: None) as tasks:
            for stage, module in enumerate(spec.modules):
                group = in_process(peers, method, inner_steps=inner_steps, threads=True)
                stages.append([])
                carriers.append([])
                for index in range(peers):
                    bench, name = Workbench(), f"{module}-{index}"
                    hop = Hop(
                        me=name,
                        incarnation=INCARNATION,
                        stage=stage,
                        rules=hop_rules(spec, frames),
                        rng=random.Random(10 * stage + index),
                    )
                    carrier = Carrier(
                        hop,
                        network.transport(name),
                        frames,
                        bench=bench,
                        tasks=tasks,
                        compute=asyncio.to_thread,
                        turn=unlimited().turn,
                    )
                    tasks.keep(carrier.keep)
                    hops.append(hop)
                    carriers[-1].append(carrier)
                    drawn = draw(spec, index)
                    peer = StagePeer(
                        spec, module, index, bench, group, method, inner_steps, steps, drawn
                    )
                    stages[-1].append(peer)
            for here, following in zip(carriers, spec.modules[1:], strict=False):
                names = [f"{following}-{index}" for index in range(peers)]
                records = [
                    record_of(name, incarnation=INCARNATION, module=following) for name in names
                ]
                for carrier in here:
                    carrier.look(records)
            everyone = list(itertools.chain(*stages))
            for peer in everyone:
                peer.start()
            async with asyncio.timeout(150):
                while min(len(peer.losses) for peer in everyone) < steps:
                    assert [peer.error for peer in everyone if peer.error] == []
                    await asyncio.sleep(0.02)
            for peer in everyone:
                peer.stopping.set()
            await asyncio.to_thread(lambda: [peer.join(10) for peer in everyone])
        return stages, hops

    return asyncio.run(main())
