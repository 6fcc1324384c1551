"""What an organiser's orders change of a trainer's course, from the commit that brings them on."""

from dataclasses import replace

import numpy as np
import pytest

from atoll.coordinator.run.spec import RunSpec
from atoll.optim.inprocess.rounds import InProcessGroup
from atoll.optim.reducer import Course
from atoll.peer.training.data import load as data
from atoll.peer.training.trainer import Trainer, TrainerOptions

H = 4
SPEC = RunSpec.from_dict(
    {
        "run": {"rounds": 8, "seed": 3},
        "model": {"overrides": {"dim": 16, "num_layers": 1, "num_heads": 2, "ffn_dim": 24}},
        "data": {"seq_len": 16},
        "inner": {"batch_size": 4, "warmup_steps": 3, "lr": 0.01},
        "outer": {"inner_steps": H},
        "compression": {"codec": "int8"},
    }
)


class Ordered:
    """A member of a group whose log brings a course at some positions."""

    def __init__(self, courses):
        self._member = InProcessGroup(1, lr=0.7, momentum=0.5, codec="int8").member(0)
        self._courses = courses

    def __getattr__(self, name):
        return getattr(self._member, name)

    def start(self, layout, params_N, settle):
        def deliver(commit):
            at = max((p for p in self._courses if p <= commit.position), default=None)
            settle(commit if at is None else replace(commit, course=self._courses[at]))

        return self._member.start(layout, params_N, deliver)


@pytest.fixture(scope="module")
def corpus():
    text = np.frombuffer(b"the closed ring of a low coral island. " * 200, dtype=np.uint8)
    return data.LocalCorpus(
        train_N=text[:6000], valid_N=text[6000:], tokenizer=data.ByteTokenizer()
    )


def trainer_of(corpus, courses):
    return Trainer(SPEC, Ordered(courses), TrainerOptions(device="cpu"), corpus=corpus)


def rounds_of(trainer):
    """Steps, schedule steps and learning rates of each round until the trainer is done."""
    seen = {}
    while not trainer.finished:
        at, step = trainer.statistics().position, trainer.schedule_step
        trainer.step()
        rate = trainer.learner.optimizer.param_groups[0]["lr"]
        seen.setdefault(at, []).append((step, rate))
    return seen


def test_windows_change_with_the_commit_and_the_rate_follows_the_rounds(corpus):
    plain = rounds_of(trainer_of(corpus, {}))
    longer = rounds_of(trainer_of(corpus, {2: Course(inner_steps=2 * H)}))
    assert [len(steps) for steps in plain.values()] == [H] * 8
    assert [len(steps) for steps in longer.values()] == [H] * 2 + [2 * H] * 6
    for at in range(8):
        assert longer[at][0] == plain[at][0]
        assert longer[at][-1] == plain[at][-1]


def test_shorter_windows_skip_steps_of_the_schedule(corpus):
    shorter = rounds_of(trainer_of(corpus, {2: Course(inner_steps=H // 2)}))
    assert [len(steps) for steps in shorter.values()] == [H] * 2 + [H // 2] * 6
    assert [step for step, _ in shorter[3]] == [3 * H, 3 * H + 2]


def test_the_inner_rate_is_scaled(corpus):
    plain = rounds_of(trainer_of(corpus, {}))
    scaled = rounds_of(trainer_of(corpus, {3: Course(inner_scale=0.5)}))
    for at in range(8):
        factor = 0.5 if at >= 3 else 1.0
        assert [rate for _, rate in scaled[at]] == [factor * rate for _, rate in plain[at]]


def test_a_run_ends_after_the_last_round_that_was_ordered(corpus):
    trainer = trainer_of(corpus, {2: Course(last_round=5)})
    trainer.run()
    assert trainer.statistics().phase == "finished"
    assert trainer.statistics().position == 5


class Ended(Ordered):
    """A group that an order ended while this trainer was joining: no commit comes any more."""

    position = 5
    course = Course(last_round=5)


def test_a_run_that_ended_while_this_peer_joined_takes_no_step(corpus):
    options = TrainerOptions(device="cpu", position=3)
    trainer = Trainer(SPEC, Ended({}), options, corpus=corpus)
    assert trainer.finished
    trainer.run()
    assert (trainer.statistics().phase, trainer.statistics().steps) == ("finished", 0)


def test_a_window_that_is_dropped_keeps_the_course(corpus):
    trainer = trainer_of(corpus, {2: Course(inner_steps=2 * H)})
    while trainer.statistics().position < 2:
        trainer.step()
    trainer.step()
    trainer._reducer.go_back(2, trainer.worker.synced_N)
    trainer.step()
    assert trainer.course == Course(inner_steps=2 * H)
    assert trainer.worker.inner_steps == 2 * H
