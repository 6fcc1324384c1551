import dataclasses
import logging
import math
import re
import threading
import time
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from atoll.coordinator.run.spec import RunSpec
from atoll.optim.inprocess.rounds import InProcessGroup, in_process
from atoll.optim.reducer import Commit
from atoll.optim.state.fragments import whole
from atoll.peer.daemon import process
from atoll.peer.errors import ModelError, SavedStateError
from atoll.peer.training import learner, saved
from atoll.peer.training.data import load as data
from atoll.peer.training.data.documents import Document
from atoll.peer.training.opening import first_state
from atoll.peer.training.permission import Allowed
from atoll.peer.training.trainer import (
    MAX_DROPPED,
    MAX_SKIPS,
    Trainer,
    TrainerOptions,
    TrainingFailed,
)

H = 4


def make_spec(**sections):
    plain = {
        "run": {"rounds": 6, "seed": 3},
        "model": {"overrides": {"dim": 16, "num_layers": 1, "num_heads": 2, "ffn_dim": 24}},
        "data": {"seq_len": 16},
        "inner": {"batch_size": 4, "warmup_steps": 3, "lr": 0.01},
        "outer": {"inner_steps": H},
        "compression": {"codec": "int8"},
    }
    for name, fields in sections.items():
        plain[name] = plain.get(name, {}) | fields
    return RunSpec.from_dict(plain)


@pytest.fixture(scope="module")
def corpus():
    text = np.frombuffer(b"the closed ring of a low coral island. " * 200, dtype=np.uint8)
    return data.LocalCorpus(
        train_N=text[:6000], valid_N=text[6000:], tokenizer=data.ByteTokenizer()
    )


def group(size=1):
    return InProcessGroup(size, lr=0.7, momentum=0.5, codec="int8")


def make(corpus, spec=None, reducer=None, **options):
    return Trainer(
        spec or make_spec(),
        reducer or group().member(0),
        TrainerOptions(**{"device": "cpu"} | options),
        corpus=corpus,
    )


def local(trainer):
    return trainer.worker.layout.flatten(trainer.learner.model)


def poison(trainer, *, steps, with_gradient=False):
    """Make some of the next losses (or gradients) infinite or NaN."""
    honest = trainer.learner.gradient
    left = iter(range(steps))

    def gradient(batches, **options):
        found = honest(batches, **options)
        if next(left, None) is None:
            return found
        for param in trainer.learner.model.parameters():
            param.grad.fill_(math.nan)
        broken = {"norm": math.inf} if with_gradient else {"loss": math.nan}
        return dataclasses.replace(found, **broken)

    trainer.learner.gradient = gradient


# --- training


def test_a_run_learns_and_finishes(corpus):
    trainer = make(corpus, make_spec(run={"rounds": 20}))
    before = trainer.evaluate()
    trainer.run()
    statistics = trainer.statistics()
    assert statistics.phase == "finished"
    assert statistics.position == 20
    assert statistics.steps == 20 * H
    assert statistics.tokens == 20 * H * 4 * 16
    assert trainer.evaluate() < before - 1.0
    assert statistics.loss < before - 1.0


def test_the_same_run_gives_the_same_bits(corpus):
    one, two = make(corpus), make(corpus)
    one.run()
    two.run()
    assert torch.equal(local(one), local(two))


def test_peers_train_on_different_text_and_end_equal(corpus):
    shared = group(3)
    peers = [make(corpus, reducer=shared.member(i), peer_id=f"p{i}") for i in range(3)]
    for peer in peers:
        peer.step()
    assert not torch.equal(local(peers[0]), local(peers[1]))
    while not peers[0].finished:
        for peer in peers:
            peer.step()
    assert all(torch.equal(peer.worker.synced_N, peers[0].worker.synced_N) for peer in peers)
    assert shared.statistics().rounds == 6


def test_accumulation_equals_a_larger_batch(corpus):
    batches = validation_batches(corpus, 4)
    parts, whole = make(corpus).learner, make(corpus).learner
    split = parts.gradient([batches[0][:2], batches[0][2:]], step=0)
    once = whole.gradient([batches[0]], step=0)
    assert split.loss == pytest.approx(once.loss, rel=1e-5)
    assert split.norm == pytest.approx(once.norm, rel=1e-4)


def validation_batches(corpus, batch_size):
    return corpus.validation(batches=2, batch_size=batch_size, seq_len=16)


def test_the_gradient_is_clipped(corpus):
    trainer = make(corpus, make_spec(inner={"clip_norm": 0.01}))
    found = trainer.learner.gradient(validation_batches(corpus, 4), step=0)
    grads = [p.grad for p in trainer.learner.model.parameters()]
    assert found.norm > 0.1
    assert torch.nn.utils.get_total_norm(grads).item() == pytest.approx(0.01, rel=1e-3)


def test_no_clipping_when_the_limit_is_zero(corpus):
    trainer = make(corpus, make_spec(inner={"clip_norm": 0.0}))
    found = trainer.learner.gradient(validation_batches(corpus, 4), step=0)
    grads = [p.grad for p in trainer.learner.model.parameters()]
    assert torch.nn.utils.get_total_norm(grads).item() == pytest.approx(found.norm)


def test_only_matrices_decay(corpus):
    decays = {
        parameter.dim() >= 2: group["weight_decay"]
        for group in make(corpus).learner.optimizer.param_groups
        for parameter in group["params"]
    }
    assert decays == {True: 0.1, False: 0.0}


# --- the schedule


def rates(steps, **inner):
    section = make_spec(inner={"warmup_steps": 4, "lr": 1.0, "min_lr_ratio": 0.1} | inner).inner
    return [section.rate.at(i, steps) for i in range(20)]


def test_the_rate_warms_up_and_follows_a_cosine_to_its_end():
    found = rates(20)
    assert found[:4] == [0.25, 0.5, 0.75, 1.0]
    assert found[4] == 1.0
    assert found[4:] == sorted(found[4:], reverse=True)
    assert found[19] == pytest.approx(0.1)
    assert rates(21)[12] == pytest.approx(0.55)


def test_the_rate_is_constant_in_a_run_without_an_end():
    assert rates(0)[4:] == [1.0] * 16


def test_a_run_without_warm_up_starts_at_the_peak():
    assert rates(20, warmup_steps=0)[0] == 1.0


def test_a_joiner_starts_at_the_step_of_the_run(corpus):
    trainer = make(corpus, position=3)
    trainer.step()
    expected = trainer.spec.inner.rate.at(3 * H, 6 * H)
    assert trainer.statistics().learning_rate == expected
    assert trainer.statistics().position == 3


@pytest.mark.parametrize(("spec", "keeps"), [("diloco", False), ("diloco(tau=2)", True)])
def test_gradients_are_gone_before_a_copy_that_is_waited_for(corpus, spec, keeps, monkeypatch):
    run = make_spec(outer={"method": spec})
    trainer = make(corpus, run, InProcessGroup(1, run.method()).member(0))
    held, flatten = [], trainer.worker.places.flatten

    def watched(model, index):
        held.append(any(param.grad is not None for param in model.parameters()))
        return flatten(model, index)

    monkeypatch.setattr(trainer.worker.places, "flatten", watched)
    for _ in range(2 * H):
        trainer.step()
    assert held == [keeps] * 2


def test_the_schedule_follows_the_position(corpus):
    trainer = make(corpus)
    for step in range(3 * H):
        assert trainer.schedule_step == step
        trainer.step()
    assert trainer.statistics().schedule_step == 3 * H


class Undecided:
    """A reducer whose rounds never close."""

    position = 0

    def start(self, layout, params_N, settle):
        self.fragments = (whole(layout),)
        return params_N

    def submit(self, contribution):
        self.contribution = contribution

    def wait(self):
        pass

    def state_dict(self):
        return {}


def test_without_decisions_a_peer_trains_on_but_its_rate_waits(corpus):
    trainer = make(corpus, reducer=Undecided())
    for _ in range(5 * H):
        trainer.step()
    assert trainer.statistics().steps == 5 * H
    assert trainer.schedule_step == 2 * H


# --- numbers that are not finite


@pytest.mark.parametrize("with_gradient", [False, True])
def test_a_bad_step_is_skipped_and_counted(corpus, with_gradient):
    trainer = make(corpus)
    before = local(trainer)
    poison(trainer, steps=1, with_gradient=with_gradient)
    trainer.step()
    assert torch.equal(local(trainer), before)
    assert trainer.statistics().skipped_steps == 1
    assert trainer.statistics().tokens == 0
    trainer.run()
    assert torch.isfinite(trainer.worker.synced_N).all()
    assert math.isfinite(trainer.statistics().loss)


def test_infinite_weights_in_a_real_model_are_caught(corpus):
    trainer = make(corpus)
    for _ in range(2):
        trainer.step()
    with torch.no_grad():
        next(iter(trainer.learner.model.parameters()))[5, 3] = math.inf
    trainer.run()
    assert trainer.statistics().skipped_steps > 0
    assert trainer.statistics().dropped_windows == 1
    assert torch.isfinite(trainer.worker.synced_N).all()


def test_repeated_bad_steps_drop_the_window(corpus):
    seen = []
    reducer = group().member(0)
    submit = reducer.submit
    reducer.submit = lambda contribution: (seen.append(contribution), submit(contribution))
    trainer = make(corpus, make_spec(outer={"inner_steps": 20}), reducer=reducer)
    for _ in range(5):
        trainer.step()
    poison(trainer, steps=MAX_SKIPS)
    for _ in range(MAX_SKIPS):
        trainer.step()
    assert trainer.statistics().dropped_windows == 1
    assert trainer.statistics().step == 0
    assert torch.equal(local(trainer), trainer.worker.synced_N)
    assert not trainer.learner.optimizer.state
    assert not seen
    for _ in range(20):
        trainer.step()
    assert [(c.tokens, c.steps) for c in seen] == [(20 * 64, 20)]


def test_nothing_is_dropped_while_a_contribution_is_undecided(corpus):
    trainer = make(corpus, reducer=Undecided())
    for _ in range(H + 1):
        trainer.step()
    poison(trainer, steps=MAX_SKIPS + 3)
    for _ in range(MAX_SKIPS + 3):
        trainer.step()
    assert trainer.statistics().dropped_windows == 0


def test_a_peer_that_computes_only_nan_gives_up(corpus):
    trainer = make(corpus, make_spec(outer={"inner_steps": 100}, run={"rounds": 0}))
    poison(trainer, steps=MAX_SKIPS * MAX_DROPPED)
    with pytest.raises(
        TrainingFailed, match="5 windows in a row ended in 10 steps without a finite"
    ):
        trainer.run()
    assert trainer.statistics().phase == "stopped"


# --- stopping and resuming


def test_a_saved_trainer_resumes_to_the_bit(corpus, tmp_path):
    whole = make(corpus)
    whole.run()
    for stop_after in (H - 1, H, 2 * H + 1):
        first = make(corpus)
        for _ in range(stop_after):
            first.step()
        first.save(tmp_path / "state")
        second = make(corpus, make_spec())
        second.load(tmp_path / "state")
        assert second.statistics().steps == stop_after
        second.run()
        assert torch.equal(local(second), local(whole))
        assert second.statistics().loss == whole.statistics().loss


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(256, 16)
        self.drop = nn.Dropout(0.5)
        self.out = nn.Linear(16, 256)

    def forward(self, tokens_BT):
        return self.out(self.drop(self.table(tokens_BT)))


def dropping(corpus):
    torch.manual_seed(0)
    options = TrainerOptions(device="cpu")
    return Trainer(make_spec(), group().member(0), options, corpus=corpus, model=Dropping())


def test_dropout_resumes_to_the_bit_and_sleeps_in_validation(corpus, tmp_path):
    whole, first = dropping(corpus), dropping(corpus)
    whole.run()
    for _ in range(6):
        first.step()
    assert first.evaluate() == first.evaluate()
    first.save(tmp_path / "state")
    second = dropping(corpus)
    second.load(tmp_path / "state")
    torch.rand(7)
    second.run()
    assert torch.equal(local(second), local(whole))


def test_a_run_that_went_on_keeps_only_what_is_the_peers_own(corpus, tmp_path):
    first = make(corpus)
    for _ in range(H + 2):
        first.step()
    first.save(tmp_path / "state")
    second = make(corpus, position=4)
    synced = second.worker.synced_N.clone()
    second.load(tmp_path / "state", exact=False)
    assert torch.equal(local(second), synced)
    assert second.schedule_step == 4 * H
    assert (second.statistics().steps, second.statistics().tokens) == (H + 2, (H + 2) * 64)
    moments = [s["step"].item() for s in second.learner.optimizer.state.values()]
    assert set(moments) == {H + 2}
    second.step()


def test_run_saves_when_it_stops_and_in_between(corpus, tmp_path):
    path, clock, steps = tmp_path / "state", Ticks(), []
    trainer = make(corpus, state_path=path, save_every_s=1.0, clock=clock)
    trainer._saves._begin = lambda to: (
        steps.append(trainer.statistics().step),
        saved.save(to, trainer.state_dict(), kind="trainer", run=trainer.spec.digest()),
    )
    trainer.run()
    assert steps == [0] * 6
    again = make(corpus)
    again.load(path)
    assert again.finished


class Ticks:
    """A clock that goes on by a second whenever somebody looks at it."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        self.now_s += 1.0
        return self.now_s


def test_training_goes_on_while_a_save_is_written(corpus, tmp_path, monkeypatch):
    path, written = tmp_path / "state", threading.Event()
    finish = saved.finish

    def slow(begun):
        assert written.wait(30)
        finish(begun)

    monkeypatch.setattr(saved, "finish", slow)
    trainer = make(corpus, make_spec(run={"rounds": 0}), state_path=path, save_every_s=0.0)
    thread = threading.Thread(target=trainer.run)
    thread.start()
    try:
        while trainer._saves._saving is None:
            assert thread.is_alive()
        there = trainer.statistics().steps
        while trainer.statistics().steps < there + 3 * H:
            assert thread.is_alive()
        assert not path.exists()
    finally:
        written.set()
        trainer.stop()
        thread.join(30)
    again = make(corpus, make_spec(run={"rounds": 0}))
    again.load(path)
    assert again.statistics().steps == trainer.statistics().steps


def test_a_save_that_fails_beside_the_training_ends_it(corpus, tmp_path):
    path = tmp_path / "gone" / "state"
    trainer = make(corpus, make_spec(run={"rounds": 0}), state_path=path, save_every_s=0.0)
    with pytest.raises(FileNotFoundError):
        trainer.run()
    assert trainer.statistics().phase == "stopped"


def test_saves_take_no_more_than_their_share(corpus, tmp_path):
    trainer = make(corpus, state_path=tmp_path / "state", save_every_s=0.0, clock=Ticks())
    saves = trainer._saves
    saves._begin(tmp_path / "state")
    saves._end()
    every_s = saves._after_s
    assert every_s >= 50.0  # two looks or more at the clock
    began_s = saves._saved_at_s
    while saves._saving is None:
        saves.when_due(at_window_end=True)
    assert saves._saved_at_s - began_s >= every_s
    saves._end()


def test_stop_ends_between_two_steps(corpus, tmp_path):
    trainer = make(corpus, make_spec(run={"rounds": 0}), state_path=tmp_path / "state")
    thread = threading.Thread(target=trainer.run)
    thread.start()
    while trainer.statistics().steps < 5:
        assert thread.is_alive()
    trainer.stop()
    thread.join(10)
    assert not thread.is_alive()
    assert trainer.statistics().phase == "stopped"
    assert (tmp_path / "state").exists()


def test_a_state_of_another_run_peer_or_model_is_refused(corpus, tmp_path):
    path = tmp_path / "state"
    make(corpus).save(path)
    with pytest.raises(SavedStateError, match="is of another run"):
        make(corpus, make_spec(run={"seed": 4})).load(path)
    with pytest.raises(SavedStateError, match="expected the state of peer bob, got that of local"):
        make(corpus, peer_id="bob").load(path)
    with pytest.raises(SavedStateError, match="does not fit this model"):
        dropping(corpus).load(path)


def test_the_same_text_under_another_path_is_the_same_run(tmp_path):
    """A volunteer moves the text to another disk; another text starts with a fresh optimizer."""
    path, text = tmp_path / "state", b"the closed ring of a low coral island. " * 200
    corpora = {}
    for name, content in (("here", text), ("there", text), ("other", text[7:])):
        (tmp_path / name).write_bytes(content)
        own = make_spec(data={"source": str(tmp_path / name)})
        corpora[name] = (
            own,
            data.LocalCorpus.read(
                [Document(key="text", data=content)],
                data.ByteTokenizer(),
                valid_fraction=0.1,
                min_tokens=40,
            ),
        )
    own, corpus = corpora["here"]
    make(corpus, own).save(path)
    own, corpus = corpora["there"]
    make(corpus, own).load(path)
    own, corpus = corpora["other"]
    with pytest.raises(SavedStateError, match="is of another run"):
        make(corpus, own).load(path)


def test_what_an_older_version_saved_under_this_path_is_resumed(corpus, tmp_path):
    path = tmp_path / "state"
    trainer = make(corpus)
    saved.save(path, trainer.state_dict(), kind="trainer", run=trainer.spec.digest())
    make(corpus).load(path)


# --- how it is


def test_statistics_are_those_of_the_trainer(corpus):
    trainer = make(corpus)
    assert trainer.statistics().phase == "starting"
    assert trainer.statistics().utilisation == 1.0
    for _ in range(H + 1):
        trainer.step()
    statistics = trainer.statistics()
    assert (statistics.phase, statistics.step, statistics.position) == ("training", 1, 1)
    assert statistics.params == trainer.worker.layout.numel
    assert statistics.windows == 1
    assert statistics.tokens_per_s > 0
    left_s = statistics.ready_at_s - time.monotonic()
    assert 0 < statistics.step_s * (H - 1) - left_s < 60  # the time since is over
    assert 0 < statistics.utilisation <= 1
    assert (statistics.device, statistics.precision) == ("cpu", "float32")


def test_the_phase_says_when_a_round_is_on(corpus):
    reducer = group().member(0)
    submit, phases = reducer.submit, []
    trainer = make(corpus, reducer=reducer)
    reducer.submit = lambda c: (phases.append(trainer.statistics().phase), submit(c))
    trainer.run()
    assert phases == ["reducing"] * 6


@pytest.mark.parametrize("method", ["diloco", "diloco(tau=2)"])
def test_a_peer_that_waits_for_rounds_has_no_gradients_in_them(corpus, method):
    spec = make_spec(run={"rounds": 3}, outer={"method": method})
    reducer, held = in_process(1, spec.method()).member(0), []
    submit, trainer = reducer.submit, make(corpus, spec, reducer)

    def look(contribution):
        held.append([param.grad is not None for param in trainer.learner.model.parameters()])
        submit(contribution)

    reducer.submit = look
    trainer.run()
    assert len(held) >= 3
    assert all(map(all, held)) if method != "diloco" else not any(map(any, held))


def test_validation_is_measured_at_its_positions(corpus):
    trainer = make(corpus, validate_every=4)
    found = []
    while not trainer.finished:
        trainer.step()
        found.append(trainer.statistics().valid_position)
    assert sorted(set(found)) == [-1, 4, 6]
    assert trainer.statistics().valid_loss == trainer.evaluate()


def test_validation_takes_no_more_than_its_share(corpus):
    clock = Ticks()
    trainer = make(corpus, make_spec(run={"rounds": 0}), validate_every=1, validate_share=0.02)
    trainer.options = dataclasses.replace(trainer.options, clock=clock)
    found = []
    for _ in range(40 * H):
        before = trainer.statistics().valid_position
        trainer.step()
        if trainer.statistics().valid_position != before:
            found.append(clock.now_s)
    assert len(found) >= 3
    took_s = 1.0  # nobody looks at the clock between
    assert all(later - earlier >= took_s / 0.02 for earlier, later in pairwise(found))


def test_trainers_take_turns_at_validation(corpus):
    trainer = make(corpus, validate_every=1, validates=lambda position: position % 3 == 1)
    found = []
    while not trainer.finished:
        trainer.step()
        found.append(trainer.statistics().valid_position)
    assert sorted(set(found)) == [-1, 1, 4, 6]  # and at the end


def test_a_stop_does_not_wait_for_a_validation_which_is_done_after_it(
    corpus, tmp_path, monkeypatch
):
    path, reducer = tmp_path / "state", group().member(0)
    trainer = make(corpus, reducer=reducer, validate_every=2, state_path=path)
    loss_of, batches = learner.models.loss_of, []

    def stopping(model, inputs_BT, targets_BT):
        if trainer.statistics().phase == "validating":
            batches.append(inputs_BT)
            if len(batches) == 3:
                trainer.stop()
        return loss_of(model, inputs_BT, targets_BT)

    monkeypatch.setattr(learner.models, "loss_of", stopping)
    trainer.run()
    assert len(batches) == 3
    assert (trainer.statistics().position, trainer.statistics().valid_position) == (2, -1)
    again = make(corpus, reducer=reducer, validate_every=2)
    again.load(path)
    again.step()
    assert again.statistics().valid_position == 2


def test_the_last_validation_of_a_run_is_waited_for(corpus, monkeypatch):
    trainer = make(corpus, validate_every=6)
    loss_of = learner.models.loss_of

    def stopping(model, inputs_BT, targets_BT):
        if trainer.statistics().phase == "validating":
            trainer.stop()
        return loss_of(model, inputs_BT, targets_BT)

    monkeypatch.setattr(learner.models, "loss_of", stopping)
    trainer.run()
    assert trainer.statistics().valid_position == 6


def test_validation_leaves_training_alone(corpus):
    plain, measured = make(corpus), make(corpus, validate_every=1)
    plain.run()
    measured.run()
    assert torch.equal(local(plain), local(measured))


def test_compilation_that_fails_falls_back(corpus, monkeypatch, caplog):
    def broken(model):
        class Compiled(nn.Module):
            def forward(self, tokens_BT):
                raise torch._dynamo.exc.TorchDynamoException("no compiler")

        return Compiled()

    monkeypatch.setattr(torch, "compile", broken)
    with caplog.at_level(logging.WARNING):
        trainer = make(corpus, make_spec(inner={"compile": True}))
        trainer.run()
    assert caplog.text.count("training continues without it") == 1
    plain = make(corpus)
    plain.run()
    assert torch.equal(local(trainer), local(plain))


def test_bfloat16_trains_with_float32_parameters(corpus):
    trainer = make(corpus, make_spec(inner={"precision": "bfloat16"}))
    trainer.run()
    assert {p.dtype for p in trainer.learner.model.parameters()} == {torch.float32}
    assert trainer.statistics().precision == "bfloat16"
    assert trainer.evaluate() < 5.0


def test_the_spec_alone_is_enough():
    trainer = Trainer(make_spec(), group().member(0), TrainerOptions(device="cpu"))
    trainer.step()
    assert trainer.statistics().loss == pytest.approx(math.log(256), rel=0.05)


def test_a_saved_trainer_holds_no_pickle(corpus, tmp_path):
    make(corpus).save(tmp_path / "state")
    head = (tmp_path / "state").read_bytes()
    assert re.search(rb'"format":"atoll-saved-1"', head)
    assert b"\x80\x04\x95" not in head[:10]


def test_a_run_that_ends_in_the_middle_of_a_window_ends_there(corpus):
    spec = make_spec(outer={"inner_steps": 1000})
    trainer = make(corpus, spec, validate_every=1, is_over=lambda: trainer._progress.steps >= 3)
    last = Commit(position=6, params_N=trainer.worker.synced_N, included=None, members=2)

    def wait():
        assert trainer._progress.steps == 3
        trainer._reducer._deliver(dataclasses.replace(last, settles=False))

    trainer._reducer.wait = wait
    trainer.run()
    told = trainer.statistics()
    assert (told.phase, told.steps, told.position) == ("finished", 3, 6)
    assert told.valid_position == 6


def test_documents_that_share_a_sequence_are_told_apart_if_the_run_says_so(corpus):
    packed = make(corpus, make_spec(data={"packing": "documents"}))
    assert packed.learner.model.document_end == corpus.tokenizer.end_token
    packed.run()
    assert packed.finished
    assert make(corpus).learner.model.document_end is None


def test_validation_and_saving_stay_within_their_budgets(corpus, tmp_path, monkeypatch):
    now_s = [0.0]

    def taking(seconds, result):
        def take(*_, **__):
            now_s[0] += seconds
            return result

        return take

    trainer = make(
        corpus,
        make_spec(run={"rounds": 0}, outer={"inner_steps": 20}),
        validate_every=1,
        validate_share=process.VALIDATE_SHARE,
        state_path=tmp_path / "state",
        save_every_s=process.SAVE_EVERY_S,
        clock=lambda: now_s[0],
    )
    trainer.learner.gradient = taking(2.0, learner.Gradient(loss=1.0, norm=1.0, tokens=1))
    trainer.evaluate = taking(5.0, 2.0)
    monkeypatch.setattr(saved, "begin", taking(4.0, None))
    monkeypatch.setattr(saved, "finish", taking(6.0, None))
    counted, saves = {"validations": set(), "saves": 0}, trainer._saves
    for _ in range(1500):
        trainer.step()
        saves.when_due(at_window_end=trainer.worker.step_in_window == 0)
        if saves._saving is not None:
            # On a clock of its own it would be written beside the steps.
            saves._saving.written.result(30)
            counted["saves"] += 1
        counted["validations"].add(trainer.statistics().valid_position)
    spent = trainer.time_spent()
    saves.close()
    assert counted["saves"] >= 4
    assert len(counted["validations"]) >= 5
    assert spent.validate_s <= 0.01 * spent.total_s + 5.0  # and the first one
    assert spent.save_s <= 0.02 * spent.total_s + 4.0
    assert spent.utilisation > 0.95


GPU_ONLY = """
import torch
from torch import nn
from atoll.peer.training.models import model
class Kernel(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(256, 8)
    def forward(self, tokens_BT):
        raise RuntimeError("FlashAttention only supports CUDA")
@model
def build(*, vocab_size, seq_len):
    return Kernel()
"""


def test_a_model_that_needs_a_gpu_begins_a_run_without_one(corpus, tmp_path, monkeypatch):
    (tmp_path / "gpu_only.py").write_text(GPU_ONLY)
    monkeypatch.syspath_prepend(tmp_path)
    spec = make_spec(model={"custom": "gpu_only:build", "overrides": {}})
    allowed = Allowed(models=frozenset({"gpu_only:build"}))
    assert first_state(spec, allowed, own_loop=True).layout.numel == 256 * 8  # the coordinator's
    with pytest.raises(ModelError, match=r"gpu_only:build' failed on tokens.*FlashAttention only"):
        make(corpus, spec, allowed=allowed)
