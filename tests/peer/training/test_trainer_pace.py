"""Test windows by a peer's speed: the measured pace, the reported ones, and shares of time."""

import numpy as np
import pytest
import torch

from atoll.coordinator.run.spec import RunSpec, SpecError
from atoll.optim.inprocess.rounds import InProcessGroup, in_process
from atoll.optim.schedules import WindowEnd
from atoll.peer.training.data import load as data
from atoll.peer.training.data.units import HeldUnits, UnitStream
from atoll.peer.training.statistics import StepPace
from atoll.peer.training.trainer import Trainer, TrainerOptions

H = 8


@pytest.fixture(scope="module")
def corpus():
    text = np.frombuffer(b"the closed ring of a low coral island. " * 200, dtype=np.uint8)
    return data.LocalCorpus(
        train_N=text[:6000], valid_N=text[6000:], tokenizer=data.ByteTokenizer()
    )


class Clock:
    """Moves by the work of one trainer only: a step, and the validation after a window."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s

    def charge(self, trainer, step_s, valid_s):
        gradient, evaluate = trainer.learner.gradient, trainer.evaluate

        def timed_gradient(batches, *, step, seed):
            self.now_s += step_s
            return gradient(batches, step=step, seed=seed)

        def timed_evaluate(**_):
            self.now_s += valid_s
            return evaluate(batches=1)

        trainer.learner.gradient, trainer.evaluate = timed_gradient, timed_evaluate


class Crew:
    """Trainers of one run in one process; each knows the paces that the others report."""

    def __init__(self, corpus, steps_s, *, windows="deadline", claims=(), **outer):
        self.spec = RunSpec.from_dict(
            {
                "run": {"rounds": 20, "seed": 3},
                "model": {"overrides": {"dim": 16, "num_layers": 2, "num_heads": 2, "ffn_dim": 24}},
                "data": {"seq_len": 16},
                "inner": {"batch_size": 4, "warmup_steps": 3, "lr": 0.01},
                "outer": {"inner_steps": H, "windows": windows} | outer,
            }
        )
        self.claims, self.ends_s, self.joins = list(claims), tuple, False
        self.clocks = [Clock() for _ in steps_s]
        self.group = in_process(len(steps_s), self.spec.method())
        self.trainers = [self._trainer(corpus, index) for index in range(len(steps_s))]
        for clock, trainer, step_s in zip(self.clocks, self.trainers, steps_s, strict=True):
            clock.charge(trainer, step_s, valid_s=2 * step_s)

    def _trainer(self, corpus, index):
        options = TrainerOptions(
            peer_id=f"peer-{index}",
            device="cpu",
            validate_every=1,
            clock=self.clocks[index],
            paces_s=lambda: self._paces_but(index),
            window_ends=lambda: [WindowEnd(step_s=1.0, in_s=s) for s in self.ends_s()],
            joins=lambda: self.joins,
        )
        return Trainer(self.spec, self.group.member(index), options, corpus=corpus)

    def _paces_but(self, index):
        told = [t.statistics().pace_s for i, t in enumerate(self.trainers) if i != index]
        return [pace_s for pace_s in told if pace_s > 0] + self.claims

    def window(self):
        """Train a window at every peer; return the seconds that each took."""
        before_s = [clock.now_s for clock in self.clocks]
        for trainer in self.trainers:
            done = trainer.statistics().windows
            while trainer.statistics().windows == done:
                trainer.step()
        return [clock.now_s - s for clock, s in zip(self.clocks, before_s, strict=True)]

    @property
    def lengths(self):
        return [trainer.statistics().inner_steps for trainer in self.trainers]


@pytest.mark.parametrize(
    "method",
    [
        "diloco",
        "streaming(count=2, tau=2)",
        *(pytest.param(method, marks=pytest.mark.exhaustive) for method in ("eager", "noloco")),
    ],
)
def test_peers_of_three_speeds_are_ready_together(corpus, method):
    crew = Crew(corpus, [1.0, 1.6, 2.6], method=method)
    for _ in range(7):
        last = crew.window()
    assert max(last) < 1.2 * min(last)
    fast, medium, slow = crew.lengths
    assert fast > medium > slow
    assert medium == H
    one, *others = crew.trainers
    if crew.spec.method().logged:
        assert all(torch.equal(t.worker.synced_N, one.worker.synced_N) for t in others)


def test_a_joiner_ends_its_first_window_with_the_others(corpus):
    # With windows of 8 s, they end 5 s from now, and again 8 s later: 5 s is nearer than 13 s.
    crew = Crew(corpus, [1.0], claims=[1.0] * 3)
    (clock,) = crew.clocks
    crew.ends_s = lambda: [5.0 - clock.now_s] * 3
    (first_s,) = crew.window()
    assert first_s == 5 + 2  # and the validation
    crew.ends_s = tuple
    (second_s,) = crew.window()
    assert abs(second_s - H) <= 1  # a whole one again


@pytest.mark.parametrize("windows", ["equal", "deadline"])
def test_a_peer_that_began_late_ends_with_the_others_and_stays_in_step(corpus, windows):
    crew = Crew(corpus, [1.0], windows=windows, claims=[1.0] * 3, inner_steps=40)
    (clock,) = crew.clocks
    crew.window()
    ends_s = clock.now_s + 36.0  # it took the commit 4 s after them: they wait for 1.5 s
    crew.ends_s = lambda: [ends_s - clock.now_s] * 3
    crew.window()
    assert crew.lengths == [36]
    ends_s = clock.now_s + 40.0
    crew.window()
    assert crew.lengths == [40]


def test_windows_of_equal_steps_stay_so_among_peers_of_another_pace(corpus):
    crew = Crew(corpus, [1.3], windows="equal", inner_steps=40)
    crew.ends_s = lambda: [5.0] * 3
    for _ in range(2):
        crew.window()
        assert crew.lengths == [40]


def test_a_first_window_that_counts_nothing_may_be_short(corpus):
    crew = Crew(corpus, [1.0], claims=[1.0] * 3, inner_steps=40)
    (clock,) = crew.clocks
    crew.window()
    crew.joins, ends_s = True, clock.now_s + 10.0
    crew.ends_s = lambda: [ends_s - clock.now_s] * 3
    (took_s,) = crew.window()
    assert took_s <= 10.0 + 2.0  # and the validation; half of a window is the least that counts


def test_each_window_is_compared_with_the_others_once(corpus):
    crew, asked = Crew(corpus, [1.0], inner_steps=40), []
    crew.ends_s = lambda: asked.append(crew.trainers[0].worker.step_in_window) or []
    for _ in range(3):
        crew.window()
    assert asked == [4, 4, 4]


def test_a_restart_near_the_end_of_a_window_shifts_nothing(corpus):
    crew = Crew(corpus, [1.0], inner_steps=40)
    (trainer,) = crew.trainers
    for _ in range(35):
        trainer.step()
    trainer._windows._is_in_step = False  # as in a new process
    crew.ends_s = lambda: [20.0]
    for _ in range(4):
        trainer.step()
    assert crew.lengths == [40]


def test_a_restart_measures_no_slow_first_step(corpus):
    crew = Crew(corpus, [1.0], inner_steps=40)
    (trainer,), (clock,) = crew.trainers, crew.clocks
    trainer._progress.steps = 1000  # as it was saved
    gradient = trainer.learner.gradient

    def slow_gradient(batches, *, step, seed):
        clock.now_s += 30.0
        trainer.learner.gradient = gradient
        return gradient(batches, step=step, seed=seed)

    trainer.learner.gradient = slow_gradient
    for _ in range(2):
        trainer.step()
        assert trainer.statistics().pace_s == 0.0
    trainer.step()
    assert trainer.statistics().pace_s == trainer.statistics().step_s == 1.0


def test_without_units_the_first_steps_pass_at_the_pace_of_others(corpus):
    """Its first step was slow: at that pace it would miss each round, and never get units."""
    crew = Crew(corpus, [1.45], windows="equal", claims=[0.005, 0.01], inner_steps=40)
    (trainer,), passed_s = crew.trainers, []
    stream, without = trainer._stream, UnitStream.__new__(UnitStream)
    without.held = HeldUnits()

    def passed_step_s():
        trainer._stream = without
        trainer.step()
        trainer._stream = stream
        return passed_s.pop()

    trainer._stopping.wait = passed_s.append
    trainer.step()
    assert trainer.statistics().pace_s == 0.0 and passed_step_s() == 0.005
    crew.claims = []
    assert passed_step_s() == 1.45
    for _ in range(3):
        trainer.step()
    crew.claims = [0.005]
    assert passed_step_s() == trainer.statistics().pace_s == pytest.approx(1.45)


def test_equal_windows_stay_equal(corpus):
    crew = Crew(corpus, [1.0, 4.0], windows="equal")
    for _ in range(4):
        crew.window()
    assert crew.lengths == [H, H]


def test_what_strangers_claim_bends_a_window_within_half_to_twice(corpus):
    for claim, expected in [(1e-300, H // 2), (1e14, 2 * H)]:
        crew = Crew(corpus, [1.0], claims=[claim] * 3)
        for _ in range(3):
            crew.window()
        assert crew.lengths == [expected]


def test_the_rate_follows_the_run_whatever_the_window(corpus):
    crew = Crew(corpus, [1.0, 2.0, 4.0])
    for _ in range(4):
        crew.window()
    for trainer in crew.trainers:
        position = trainer.worker.statistics().position
        own, seen = trainer.worker.inner_steps, []
        for _ in range(min(crew.lengths) - 1):
            trainer.step()
            seen.append(trainer.schedule_step - position * H)
        assert seen == [(step + 1) * H // own for step in range(len(seen))]


def test_a_share_of_the_time_slows_a_peer_down(corpus):
    spec = Crew(corpus, [1.0]).spec
    options = TrainerOptions(device="cpu", share=0.25)
    trainer = Trainer(spec, InProcessGroup(1, spec.method()).member(0), options, corpus=corpus)
    rested = []
    trainer._stopping.wait = rested.append
    for _ in range(4):
        trainer.step()
    assert all(seconds > 0 for seconds in rested)
    assert len(rested) == 4


def test_a_step_in_which_the_machine_slept_asks_for_no_rest(corpus):
    clock = Clock()
    spec = Crew(corpus, [1.0]).spec
    options = TrainerOptions(device="cpu", share=0.25, clock=clock)
    trainer = Trainer(spec, InProcessGroup(1, spec.method()).member(0), options, corpus=corpus)
    rested, gradient = [], trainer.learner.gradient
    trainer._stopping.wait = rested.append
    for step_s in [1.0, 1.0, 1.0, 3600.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0]:

        def timed(batches, *, step, seed, step_s=step_s):
            clock.now_s += step_s
            return gradient(batches, step=step, seed=seed)

        trainer.learner.gradient = timed
        trainer.step()
        if step_s > 1000.0:
            assert trainer.statistics().step_s < 2.0  # others are told when it will be ready
    assert trainer._pace.step_s < 2.0  # and its windows stay as long
    assert rested == pytest.approx([3.0] * 7 + [4.5, 6.0, 6.0])


def test_a_pace_is_measured_over_windows_without_waits():
    pace = StepPace()
    pace.measure(0.0, 0)
    pace.measure(50.0, 2)  # the first steps are slow
    assert pace.step_s == 0.0
    pace.measure(60.0, 12)
    assert pace.step_s == 1.0
    pace.measure(90.0, 22)
    assert pace.step_s == 2.0
    pace.measure(4000.0, 32)  # the machine slept
    assert pace.step_s == 5.0


def test_a_suspended_process_is_no_slower_afterwards():
    """Its windows would be half as long for a minute, and it would wait in each of them."""
    pace = StepPace()
    pace.measure(0.0, 2)
    pace.measure(10.0, 12)
    pace.leave_out(20.0)  # of the 30 s until the next window
    pace.measure(40.0, 22)
    assert pace.step_s == 1.0


def test_methods_of_one_step_have_no_windows_to_size():
    with pytest.raises(SpecError, match=r"outer\.windows: must be 'equal' with 'ddp'"):
        RunSpec.from_dict({"outer": {"method": "ddp", "inner_steps": 1, "windows": "deadline"}})


def test_a_pause_that_the_owner_asks_for_is_no_training(corpus):
    clock = Clock()
    spec = Crew(corpus, [1.0]).spec
    options = TrainerOptions(device="cpu", share=0.25, clock=clock)
    trainer = Trainer(spec, InProcessGroup(1, spec.method()).member(0), options, corpus=corpus)
    gradient = trainer.learner.gradient

    def passes(seconds):
        clock.now_s += seconds

    def timed(batches, *, step, seed):
        passes(1.0)
        return gradient(batches, step=step, seed=seed)

    trainer.learner.gradient, trainer._stopping.wait = timed, passes
    for _ in range(4):
        trainer.step()
    spent = trainer.time_spent()
    assert (spent.train_s, spent.pause_s) == pytest.approx((4.0, 12.0), rel=0.01)
