"""Several peers a stage with `ddp`, against the model in one piece with as many times the batch."""

import asyncio
import itertools
import random
import threading

import pytest
import torch

from atoll.dht.tasks import KeptTasks
from atoll.dht.testing.memory import MemoryNetwork
from atoll.optim.inner import build
from atoll.optim.inprocess.rounds import in_process
from atoll.optim.methods import parse
from atoll.peer.daemon.pipeline_run import frame_shape, hop_rules
from atoll.peer.pipeline.carrier import Carrier
from atoll.peer.pipeline.hop import Hop
from atoll.peer.pipeline.workbench import Workbench
from atoll.peer.training import models
from atoll.peer.training.devices import Device
from atoll.peer.training.opening import build_stage, slices_of
from atoll.peer.training.permission import Allowed
from atoll.peer.training.stage_learner import StageLearner, StoppedInStep, codecs_of
from support.pacing import unlimited
from support.records import record_of
from support.small_stages import VOCAB, batches, spec_of

STEPS, ACCUMULATION = 6, 2
DDP = parse("ddp(codec=fp32, clip_at=0)")
INCARNATION = "1" * 32


def in_one_piece(spec, peers):
    """The gradients of each step by parameter, and the parameters at the end."""
    known = slices_of(spec, VOCAB, Allowed())
    model = known.build(range(len(known)), seed=spec.run.seed)
    optimizer = build("adamw", model, lr=1.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    group = in_process(1, DDP, inner_steps=1)
    worker = DDP.worker(model, optimizer, group.member(0), inner_steps=1)
    drawn, gradients = [batches(spec, seed) for seed in range(peers)], []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = spec.inner.rate.at(step, 0)
        optimizer.zero_grad()
        texts = [next(each) for each in drawn for _ in range(ACCUMULATION)]
        batch = torch.cat(texts)
        models.loss_of(model, batch[:, :-1], batch[:, 1:]).backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
        worker.step(tokens=batch[:, 1:].numel())
    return gradients, {n: p.detach().clone() for n, p in model.named_parameters()}


class StagePeer(threading.Thread):
    """The trainer of one peer of a stage: `ddp` with the others of that stage."""

    def __init__(self, spec, module, index, bench, group):
        super().__init__(daemon=True)
        self.bench, self.gradients, self.error = bench, [], None
        self.stopping = threading.Event()
        self._member, self._group = index, group
        drawn = batches(spec, index)
        self._rate = spec.inner.rate
        self.learner = StageLearner(
            build_stage(spec, module, VOCAB, Allowed()),
            spec.inner,
            Device.choose("cpu", spec.inner.precision),
            bench,
            codecs_of(spec),
            draw=lambda trains: next(drawn),
            total_steps=0,
            optimizer=DDP.inner,
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
        worker = DDP.worker(learner.model, learner.optimizer, member, inner_steps=1)
        for step in range(STEPS):
            try:
                gradient = learner.gradient(step=step)
            except StoppedInStep:
                return
            self.gradients.append({n: p.grad.clone() for n, p in learner.model.named_parameters()})
            worker.step(tokens=gradient.tokens)
            learner.clear()
        member.close()
        while not self.stopping.is_set():
            learner.serve()


def trained(spec, peers):
    """Train with so many peers a stage; return them by stage, and their hops."""

    async def main():
        network = MemoryNetwork()
        frames = frame_shape(spec, slices_of(spec, VOCAB, Allowed()).shape)
        stages, hops, carriers = [], [], []
        async with KeptTasks(lambda text: None) as tasks:
            for stage, module in enumerate(spec.modules):
                group = in_process(peers, DDP, inner_steps=1, threads=True)
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
                    stages[-1].append(StagePeer(spec, module, index, bench, group))
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
                while min(len(peer.gradients) for peer in everyone) < STEPS:
                    assert [peer.error for peer in everyone if peer.error] == []
                    await asyncio.sleep(0.02)
            for peer in everyone:
                peer.stopping.set()
            await asyncio.to_thread(lambda: [peer.join(10) for peer in everyone])
        return stages, hops

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("stages", "peers"), [(2, 2), pytest.param(3, 3, marks=pytest.mark.exhaustive)]
)
def test_peers_of_a_stage_train_as_one_with_as_many_times_the_batch(stages, peers):
    spec = spec_of(stages, accumulation=ACCUMULATION, deadline_s=50.0)
    expected, whole = in_one_piece(spec, peers)
    found, hops = trained(spec, peers)
    for stage in found:
        for step in range(STEPS):
            for name in stage[0].gradients[step]:
                mean = sum(peer.gradients[step][name] for peer in stage) / peers
                most = float(expected[step][name].abs().max())
                assert torch.allclose(mean, expected[step][name], rtol=1e-4, atol=1e-5 * most), (
                    step,
                    name,
                )
        for peer in stage:
            for name, param in peer.learner.model.named_parameters():
                assert torch.allclose(param, whole[name], rtol=1e-3, atol=1e-4), name
    assert [hop.statistics().omitted for hop in hops] == [{}] * len(hops)
