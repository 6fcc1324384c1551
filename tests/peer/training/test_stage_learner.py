"""Stages that train over a network in memory, against the model in one piece."""

import asyncio
import math
import random
import threading

import pytest
import torch

from atoll.dht.tasks import KeptTasks
from atoll.dht.testing.memory import MemoryNetwork
from atoll.optim.inner import build
from atoll.peer.daemon.pipeline_run import frame_shape, hop_rules
from atoll.peer.errors import DataError
from atoll.peer.pipeline.actions import RunJob
from atoll.peer.pipeline.carrier import Carrier
from atoll.peer.pipeline.hop import Hop
from atoll.peer.pipeline.messages import Microbatch, PassKey, encode_tokens
from atoll.peer.pipeline.workbench import Workbench
from atoll.peer.training import models
from atoll.peer.training.beside import ParameterTurns
from atoll.peer.training.devices import Device
from atoll.peer.training.opening import build_stage, slices_by_stage, slices_of
from atoll.peer.training.permission import Allowed
from atoll.peer.training.stage_compute import StageCompute
from atoll.peer.training.stage_learner import StageLearner, StoppedInStep, codecs_of
from support.pacing import unlimited
from support.records import record_of
from support.small_stages import VOCAB, batches, spec_of

STEPS = 12
MANY = 50  # after which rounding would show that something else differs


def in_one_piece(spec, steps):
    """The losses of the unsplit model, and its parameters at the end."""
    known = slices_of(spec, VOCAB, Allowed())
    model = known.build(range(len(known)), seed=spec.run.seed)
    inner = spec.inner
    optimizer = build(
        "adamw",
        model,
        lr=inner.lr,
        betas=(inner.beta1, inner.beta2),
        weight_decay=inner.weight_decay,
        fused=True,
    )
    drawn, losses = batches(spec), []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = inner.rate.at(step, 0)
        optimizer.zero_grad()
        total = 0.0
        for _ in range(inner.grad_accumulation):
            batch = next(drawn)
            loss = models.loss_of(model, batch[:, :-1], batch[:, 1:]) / inner.grad_accumulation
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        losses.append(total)
    return losses, dict(model.named_parameters())


class Trainer(threading.Thread):
    """One stage's trainer: inner steps alone, without outer rounds."""

    def __init__(self, spec, module, bench, steps):
        super().__init__(daemon=True)
        self.stopping = threading.Event()
        self.losses, self.tokens, self.steps = [], [], steps
        self.drawn, self.held_out = batches(spec), batches(spec, seed=6)
        self.before = self.after_step = None
        model = build_stage(spec, module, VOCAB, Allowed())
        self.learner = StageLearner(
            model,
            spec.inner,
            Device.choose("cpu", spec.inner.precision),
            bench,
            codecs_of(spec),
            draw=lambda trains: next(self.drawn if trains else self.held_out),
            total_steps=0,
            is_stopped=self.stopping.is_set,
        )

    def run(self):
        torch.set_num_threads(1)
        if self.before is not None and self.learner.model.is_first:
            self.before(self)
        for step in range(self.steps):
            try:
                gradient = self.learner.gradient(step=step)
            except StoppedInStep:
                return
            self.losses.append(gradient.loss)
            self.tokens.append(gradient.tokens)
            self.learner.optimizer.step()
            self.learner.clear()
            if self.after_step is not None and self.learner.model.is_first:
                self.after_step(self)
        while not self.stopping.is_set():
            self.learner.serve()


def record(peer, module):
    return record_of(peer, incarnation="1" * 32, module=module)


def trained(spec, steps=STEPS, before=None, after_step=None):
    """Train all stages, a peer each; return their trainers and hops.

    `before` is called in the first one's thread, before its first step; `after_step` after each.
    """

    async def main():
        network, benches, hops, carriers = MemoryNetwork(), [], [], []
        known = slices_of(spec, VOCAB, Allowed())
        frames = frame_shape(spec, known.shape)
        async with KeptTasks(lambda text: None) as tasks:
            for stage, module in enumerate(spec.modules):
                benches.append(Workbench())
                hop = Hop(
                    me=module,
                    incarnation="1" * 32,
                    stage=stage,
                    rules=hop_rules(spec, frames),
                    rng=random.Random(stage),
                )
                hops.append(hop)
                carriers.append(
                    Carrier(
                        hop,
                        network.transport(module),
                        frames,
                        bench=benches[-1],
                        tasks=tasks,
                        compute=asyncio.to_thread,
                        turn=unlimited().turn,
                    )
                )
                tasks.keep(carriers[-1].keep)
            for carrier, following in zip(carriers, spec.modules[1:], strict=False):
                carrier.look([record(following, following)])
            trainers = [
                Trainer(spec, *each, steps) for each in zip(spec.modules, benches, strict=True)
            ]
            for trainer in trainers:
                trainer.before, trainer.after_step = before, after_step
                trainer.start()
            async with asyncio.timeout(60):
                while min(len(trainer.losses) for trainer in trainers) < steps:
                    await asyncio.sleep(0.02)
            for trainer in trainers:
                trainer.stopping.set()
            await asyncio.to_thread(lambda: [trainer.join(10) for trainer in trainers])
        return trainers, hops

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("stages", "steps"),
    [
        (2, STEPS),
        (5, STEPS),
        pytest.param(3, STEPS, marks=pytest.mark.exhaustive),
        pytest.param(3, MANY, marks=pytest.mark.exhaustive),
    ],
)
def test_one_peer_a_stage_trains_as_the_model_in_one_piece(stages, steps):
    spec = spec_of(stages)
    expected, whole = in_one_piece(spec, steps)
    trainers, hops = trained(spec, steps)
    for trainer in trainers:  # every stage knows the loss
        assert trainer.losses == pytest.approx(expected, rel=1e-6)
    for trainer in trainers:
        for name, param in trainer.learner.model.named_parameters():
            assert torch.allclose(param, whole[name], rtol=1e-5, atol=1e-7), name
    assert [hop.statistics().omitted for hop in hops] == [{}] * stages


def test_gradients_that_were_held_count_once_settled():
    spec = spec_of(exact=True)
    expected, _ = in_one_piece(spec, STEPS)
    trainers, _ = trained(spec)
    assert trainers[-1].losses == pytest.approx(expected, rel=1e-6)


def test_codecs_change_what_is_trained_a_little():
    exact, coarse = spec_of(), spec_of(activations="int8", gradients="int8")
    expected, _ = in_one_piece(exact, STEPS)
    trainers, _ = trained(coarse)
    found = trainers[-1].losses
    assert found != pytest.approx(expected, rel=1e-6)
    assert found == pytest.approx(expected, rel=0.02)


def test_a_computation_that_fails_gives_its_microbatch_up_alone(monkeypatch):
    spec = spec_of()
    honest, calls = StageLearner._loss, []

    def fails_once(self, job):
        calls.append(job.key)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        honest(self, job)

    monkeypatch.setattr(StageLearner, "_loss", fails_once)
    trainers, hops = trained(spec, steps=4)
    assert all(len(trainer.losses) == 4 for trainer in trainers)
    assert hops[-1].statistics().omitted == {"failed": 1}


@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_numbers_that_are_not_finite_are_blamed_on_their_sender(kind, codec):
    spec, reports = spec_of(activations=codec, gradients=codec), []
    bench = Workbench()
    bench.report_to(lambda *report: reports.append(report))
    trainer = Trainer(spec, "stage-2", bench, 1)
    tokens = next(batches(spec))
    rows, width = tokens[:, 1:].numel(), trainer.learner.model.shape.width
    forward = codecs_of(spec).forward
    good = forward.encode(torch.ones(rows, width)).numpy().tobytes()
    key = PassKey(Microbatch("origin", "1" * 32, 0, b"n" * 8), "forward")
    job = RunJob(
        kind=kind,
        key=key,
        sequences=len(tokens),
        rows=rows,
        tokens=encode_tokens(tokens.numpy()),
        frame=b"\xff" * len(good) if kind == "forward" else good,
        gradient=b"\xff" * len(good) if kind == "backward" else b"",
        sender="neighbour",
    )
    trainer.learner._do(job)
    ((result, values, named),) = reports
    assert (result, values, named["sender"]) == ("job_refused", (key,), "neighbour")
    assert "got nan" in named["text"]
    assert trainer.learner._failures == 0  # a neighbour cannot end this peer


def test_held_out_text_goes_through_all_stages_while_they_train():
    spec = spec_of(accumulation=8)  # more than what begins before, so that nobody has stepped yet
    known = slices_of(spec, VOCAB, Allowed())
    model = known.build(range(len(known)), seed=spec.run.seed)
    drawn = batches(spec, seed=6)
    texts = [next(drawn) for _ in range(3)]
    with torch.no_grad():
        losses = [float(models.loss_of(model, text[:, :-1], text[:, 1:])) for text in texts]
    measured = []

    def first_measures(trainer):
        measured.append(trainer.learner.evaluate(3))

    trainers, hops = trained(spec, steps=4, before=first_measures)
    # Before any step, so of the first parameters.
    assert measured == [pytest.approx(sum(losses) / 3, rel=1e-6)]
    assert hops[0].statistics().evaluated == 3
    assert all(len(trainer.losses) == 4 for trainer in trainers)


@pytest.mark.parametrize(
    ("staleness", "accumulation"),
    [(0, 2), (1, 1), pytest.param(1, 2, marks=pytest.mark.exhaustive)],
)
def test_an_evaluation_ends_while_steps_are_due(staleness, accumulation):
    """More microbatches than a peer has in flight, so some wait until others have gone."""
    spec, measured = spec_of(staleness=staleness, accumulation=accumulation), []

    def measures(trainer):
        if len(trainer.losses) < 4:
            measured.append(trainer.learner.evaluate(20))

    trainers, _ = trained(spec, steps=4, after_step=measures)
    assert len(measured) == 3 and all(math.isfinite(loss) for loss in measured)
    assert all(len(trainer.losses) == 4 for trainer in trainers)


def test_a_loss_that_is_not_finite_gives_its_microbatch_up_alone(monkeypatch):
    honest = StageCompute.evaluate

    def overflows(self, inputs, targets_BT=None):
        found = honest(self, inputs, targets_BT)
        return found if targets_BT is None else found * math.inf

    monkeypatch.setattr(StageCompute, "evaluate", overflows)
    measured = []
    trainers, hops = trained(
        spec_of(), steps=4, before=lambda trainer: measured.append(trainer.learner.evaluate(3))
    )
    assert math.isnan(measured[0])  # none came back
    assert hops[-1].statistics().omitted == {"failed": 3}
    assert all(len(trainer.losses) == 4 for trainer in trainers)


@pytest.mark.parametrize("num_beside", [7, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_step_that_is_due_while_its_trainer_waits_counts_all_since(num_beside):
    """The other stages take as many steps as ever: without the first one they would stand still."""
    spec = spec_of(staleness=2)

    def waits(trainer):
        learner = trainer.learner
        if len(trainer.losses) == 1:
            turns = ParameterTurns()
            learner.compute_beside(turns, lambda: learner.compute.microbatches >= num_beside)

    trainers, hops = trained(spec, steps=6, after_step=waits)
    tokens = spec.inner.batch_size * spec.data.seq_len
    usual = spec.inner.grad_accumulation
    assert trainers[0].tokens[1] == tokens * max(usual, num_beside)
    assert all(math.isfinite(loss) for loss in trainers[0].losses)
    # A step of microbatches that counted in an earlier one is none.
    assert sum(trainers[0].tokens) <= tokens * hops[0].statistics().counted


def test_text_that_cannot_be_read_ends_the_peer():
    """Each microbatch would fail alike, and another begin at once."""

    def draw(trains):
        raise DataError("the data set has ended")

    spec, bench = spec_of(2), Workbench()
    stage = Trainer(spec, "stage-1", bench, 0)
    stage.learner._draw = draw
    named = Microbatch("stage-1", "1" * 32, 0, b"n" * 8)
    bench.put(RunJob(kind="begin", key=PassKey(named, "forward")))
    with pytest.raises(DataError, match="has ended"):
        stage.learner.gradient(step=0)


def test_the_slices_of_a_stage_are_those_of_its_module():
    spec = spec_of(2)
    known = slices_of(spec, VOCAB, Allowed())
    runs = [slices_by_stage(spec, known)[module] for module in spec.modules]
    assert [index for run in runs for index in run] == list(range(len(known)))
