"""A trainer of a stage: what it computes while it waits for a round, and when it gives up."""

import math
import threading
from dataclasses import replace

import pytest
import torch

from atoll.compression.activations import parse_activations
from atoll.coordinator.run.spec import RunSpec
from atoll.optim.reducer import Commit
from atoll.peer.pipeline.actions import RunJob, TakeStep
from atoll.peer.pipeline.messages import Microbatch, PassKey, encode_tokens
from atoll.peer.pipeline.workbench import Workbench
from atoll.peer.training.stage_compute import StageCompute
from atoll.peer.training.trainer import (
    MAX_DROPPED,
    MAX_SKIPS,
    StageSeat,
    Trainer,
    TrainerOptions,
    TrainingFailed,
)
from support.scripted import ScriptedReducer

DIM, SEQ_LEN, BATCH = 16, 12, 2
TOKENS = BATCH * SEQ_LEN
WINDOW = 2


def spec_of(inner_steps=WINDOW, **topology):
    return RunSpec.from_dict(
        {
            "model": {"overrides": {"dim": DIM, "num_layers": 2, "num_heads": 2, "ffn_dim": 32}},
            "data": {"seq_len": SEQ_LEN},
            "inner": {"batch_size": BATCH, "grad_accumulation": 2},
            "outer": {"inner_steps": inner_steps},
            "topology": {"stages": 2, "activations": "fp32", "gradients": "fp32"} | topology,
        }
    )


class Rounds(ScriptedReducer):
    """Decides each round once `wait_for` returns."""

    wait_for = staticmethod(lambda: None)

    def start(self, layout, params_N, settle):
        self.params_N = params_N
        return super().start(layout, params_N, settle)

    def submit(self, contribution):
        super().submit(contribution)
        everything = torch.ones(1, dtype=torch.bool)
        number = len(self.submitted)
        self.queue.append(
            [Commit(position=number, params_N=self.params_N, included=everything, members=1)]
        )

    def wait(self):
        if self.queue:
            self.wait_for()
        super().wait()


class Feeding(Workbench):
    """The last stage's jobs, without end: a step is due after each second microbatch."""

    def __init__(self, most_steps=math.inf):
        super().__init__()
        self.done = 0
        self.steps_left = most_steps
        self.stepped = 0
        self.report_to(self.note)
        self.one_more()

    def note(self, result, values, named):
        if result in ("finished", "job_failed"):
            self.done += result == "finished"
            if self.done % 2 == 0 and result == "finished" and self.steps_left:
                self.steps_left -= 1
                self.put(TakeStep(microbatches=2))
            self.one_more()
        self.stepped += result == "stepped"

    def one_more(self):
        generator = torch.Generator().manual_seed(self.done)
        tokens_BT = torch.randint(64, (BATCH, SEQ_LEN + 1), generator=generator)
        x_RD = torch.randn(TOKENS, DIM, generator=generator)
        frame = parse_activations("fp32", seed=0).encode(x_RD, seed=0).numpy().tobytes()
        name = Microbatch("origin", "1" * 32, self.done, b"n" * 8)
        self.put(
            RunJob(
                kind="loss",
                key=PassKey(name, "forward"),
                sequences=BATCH,
                rows=TOKENS,
                tokens=encode_tokens(tokens_BT.to(torch.int32).numpy()),
                frame=frame,
            )
        )


def trainer_of(spec, rounds, bench):
    return Trainer(
        spec,
        rounds,
        TrainerOptions(device="cpu", stage=StageSeat(module="stage-2", bench=bench)),
    )


def test_a_stage_computes_while_it_waits_for_its_round():
    rounds, bench = Rounds(), Feeding(most_steps=WINDOW + 1)
    trainer = trainer_of(spec_of(staleness=1), rounds, bench)

    def until_nine():
        while bench.done < 9:
            pass

    rounds.wait_for = until_nine
    for _ in range(WINDOW):
        trainer.step()
    assert bench.done >= 9 and trainer.worker.statistics().included == 1
    assert trainer.statistics().tokens == 4 * TOKENS
    before = bench.done
    guard = threading.Timer(20, trainer.stop)  # for want of a step the next one would never end
    guard.start()
    trainer.step()  # it is due, and no other will be
    guard.cancel()
    # What came meanwhile is in it; and the flow has heard of each step.
    assert bench.done == before and trainer.statistics().tokens == before * TOKENS
    assert bench.stepped == WINDOW + 1
    spent = trainer.time_spent()
    assert 0 < spent.train_s < spent.total_s and spent.wait_s < spent.total_s


def test_without_staleness_a_stage_stands_still_until_its_round_is_decided():
    rounds, bench = Rounds(), Feeding()
    trainer = trainer_of(spec_of(), rounds, bench)
    done = []

    def looks():
        before = bench.done
        threading.Event().wait(0.1)
        done.append(bench.done - before)

    rounds.wait_for = looks
    for _ in range(WINDOW):
        trainer.step()
    assert done == [0]


def test_a_stage_whose_parameters_are_corrupt_returns_to_the_synced_ones():
    bench = Feeding()
    trainer = trainer_of(spec_of(2 * MAX_SKIPS), Rounds(), bench)
    with torch.no_grad():
        for param in trainer.learner.model.parameters():
            param.fill_(math.nan)
    for _ in range(MAX_SKIPS):
        assert bench.done == 0
        trainer.step()
    trainer.step()
    assert bench.done == 2 and math.isfinite(trainer.statistics().loss)
    assert trainer.statistics().skipped_steps == MAX_SKIPS


def test_a_stage_that_computes_nothing_finite_ends(monkeypatch):
    """Microbatch by microbatch would fail otherwise, and nobody would hear of it."""
    honest = StageCompute.loss_and_gradient

    def diverges(self, *inputs, **options):
        return replace(honest(self, *inputs, **options), loss=math.inf)

    monkeypatch.setattr(StageCompute, "loss_and_gradient", diverges)
    bench = Feeding()
    trainer = trainer_of(spec_of(2 * MAX_SKIPS), Rounds(), bench)
    with pytest.raises(TrainingFailed, match="without a finite loss"):
        for _ in range(MAX_DROPPED * MAX_SKIPS):
            trainer.step()
    assert bench.done == 0 and trainer.statistics().dropped_windows == MAX_DROPPED - 1
