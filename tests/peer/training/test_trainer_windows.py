"""Test windows that grow as the rate falls: equal at every peer, whenever it joined."""

import numpy as np
import pytest
import torch

from atoll.coordinator.run.spec import RunSpec
from atoll.optim.inprocess.rounds import in_process
from atoll.peer.training.data import load as data
from atoll.peer.training.trainer import Trainer, TrainerOptions

ROUNDS = 16


@pytest.fixture(scope="module")
def corpus():
    text = np.frombuffer(b"the closed ring of a low coral island. " * 200, dtype=np.uint8)
    return data.LocalCorpus(
        train_N=text[:6000], valid_N=text[6000:], tokenizer=data.ByteTokenizer()
    )


def spec_of(method, **outer):
    return RunSpec.from_dict(
        {
            "run": {"rounds": ROUNDS, "seed": 3},
            "model": {"overrides": {"dim": 16, "num_layers": 2, "num_heads": 2, "ffn_dim": 24}},
            "data": {"seq_len": 16},
            "inner": {"batch_size": 2, "warmup_steps": 3, "lr": 0.01, "min_lr_ratio": 0.1},
            "outer": {
                "method": method,
                "windows": "qsr",
                "inner_steps": 4,
                "growth": 0.02,
                "max_inner_steps": 13,
            }
            | outer,
        }
    )


def make(corpus, spec, member, position=0, peer="one", **options):
    options = TrainerOptions(peer_id=peer, device="cpu", position=position, **options)
    return Trainer(spec, member, options, corpus=corpus)


class Seen:
    """Return each step's position in the schedule and the length of its window."""

    def __init__(self, trainer):
        self.trainer, self.schedule, self.windows = trainer, [], []
        gradient = trainer.learner.gradient

        def noted(batches, *, step, seed):
            self.schedule.append(step)
            self.windows.append(trainer.worker.inner_steps)
            return gradient(batches, step=step, seed=seed)

        trainer.learner.gradient = noted

    def rate(self):
        return self.trainer.learner.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(
    "method",
    [
        "diloco(tau=3)",
        *(
            pytest.param(method, marks=pytest.mark.exhaustive)
            for method in ("diloco", "eager", "noloco")
        ),
    ],
)
def test_each_step_has_the_place_that_the_spec_gives_it(corpus, method):
    spec = spec_of(method)
    group, windows = in_process(2, spec.method()), spec.timetable(1)
    seen = [Seen(make(corpus, spec, group.member(i), peer=str(i))) for i in range(2)]
    steps = windows.steps_until(ROUNDS)
    for _ in range(steps):
        for each in seen:
            each.trainer.step()
    for each in seen:
        assert each.schedule == list(range(steps))
        assert each.windows == [windows.window(windows.turn_at(step)) for step in range(steps)]
        assert each.rate() == spec.inner.rate.at(steps - 1, windows.total_steps)
        hidden = spec.method().hidden_steps(each.windows[-1])
        assert each.trainer.worker.delay == hidden
        assert each.trainer.statistics().windows == ROUNDS
    assert (min(each.windows), max(each.windows)) == (4, 13)


@pytest.mark.parametrize("method", ["diloco(count=2, tau=1)", "streaming(count=2, tau=2)"])
def test_fragments_take_turns_in_windows_that_grow(corpus, method):
    spec = spec_of(method)
    group, windows = in_process(1, spec.method()), spec.timetable(2)
    seen = Seen(make(corpus, spec, group.member(0)))
    while not seen.trainer.finished:
        seen.trainer.step()
    assert abs(len(seen.schedule) - windows.steps_until(ROUNDS)) <= 2
    off = [abs(found - step) for step, found in enumerate(seen.schedule)]
    assert max(off) <= 1
    assert seen.windows[0] == windows.window(0)
    assert seen.windows[-1] == windows.window(ROUNDS - 1)
    assert seen.windows == sorted(seen.windows)


def test_who_joins_late_takes_the_window_of_the_others(corpus):
    spec = spec_of("diloco")
    group, windows = in_process(2, spec.method()), spec.timetable(1)
    first = make(corpus, spec, group.member(0))
    while first.statistics().position < 12:
        first.step()
    late = Seen(make(corpus, spec, group.member(1), position=12, peer="late"))
    assert late.trainer.statistics().inner_steps == windows.window(12)
    for _ in range(windows.window(12) + 1):
        first.step()
        late.trainer.step()
    assert first.statistics().position == late.trainer.statistics().position == 13
    assert late.schedule[0] == windows.steps_until(12)
    assert first.statistics().inner_steps == late.trainer.statistics().inner_steps


@pytest.mark.parametrize(
    "method",
    [
        "streaming(count=2, tau=2)",
        pytest.param("diloco", marks=pytest.mark.exhaustive),
        pytest.param("diloco(tau=3)", marks=pytest.mark.exhaustive),
    ],
)
def test_a_restart_goes_on_in_the_same_window_to_the_bit(corpus, tmp_path, method):
    spec = spec_of(method)
    steps = spec.timetable(1).steps_until(9) + 2
    pairs = [in_process(1, spec.method()) for _ in range(2)]
    kept, other = [make(corpus, spec, group.member(0)) for group in pairs]
    for _ in range(steps):
        kept.step()
    kept.save(tmp_path / "state")
    other.load(tmp_path / "state")
    assert other.worker.inner_steps == kept.worker.inner_steps > 4
    assert other.worker.delay == kept.worker.delay == spec.method().hidden_steps(4)
    for _ in range(20):
        kept.step()
        other.step()
        assert other.statistics().inner_steps == kept.statistics().inner_steps
    assert torch.equal(*(t.worker.layout.flatten(t.learner.model) for t in (kept, other)))


def test_who_stood_aside_takes_the_window_of_where_the_run_is(corpus):
    spec = spec_of("diloco")
    group, windows = in_process(1, spec.method()), spec.timetable(1)
    trainer = make(corpus, spec, group.member(0))
    trainer.step()
    trainer._reducer.go_back(14, trainer.worker.synced_N)
    trainer.step()
    assert trainer.statistics().inner_steps == windows.window(14) == 13
    assert trainer.schedule_step == windows.steps_until(14) + 1
