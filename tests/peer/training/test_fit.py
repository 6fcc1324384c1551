import logging

import numpy as np
import pytest
import torch
from torch import nn

from atoll.coordinator.run.sections import InnerSection
from atoll.coordinator.run.spec import RunSpec
from atoll.optim.inprocess.rounds import InProcessGroup
from atoll.peer.errors import DeviceError, SavedStateError
from atoll.peer.training import models
from atoll.peer.training.data import load as data
from atoll.peer.training.devices import Device
from atoll.peer.training.fit import Fit, pieces
from atoll.peer.training.learner import Evaluator, Learner
from atoll.peer.training.trainer import Trainer, TrainerOptions

SMALL = {"dim": 16, "num_layers": 2, "num_heads": 2, "ffn_dim": 24}
END = 0


def model_of(**overrides):
    return models.build("nano", overrides=SMALL | overrides, vocab_size=256, seq_len=16, seed=0)


def learner_of(model=None, **inner):
    section = InnerSection(**({"batch_size": 7, "warmup_steps": 0} | inner))
    device = Device.choose("cpu", section.precision)
    return Learner(model or model_of(), section, device, total_steps=0)


def batches(count=1, batch=7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(256, (batch, 17), generator=generator) for _ in range(count)]


def grads(learner):
    return [param.grad for param in learner.model.parameters()]


class Memory:
    """Lets a model run out of memory with more than so many sequences."""

    def __init__(self, monkeypatch, holds, *, unless_recomputed=False):
        self.holds, self.tried = holds, []
        loss_of = models.loss_of

        def limited(model, inputs_BT, targets_BT):
            loss = loss_of(model, inputs_BT, targets_BT)
            if torch.is_grad_enabled():
                self.tried.append(len(inputs_BT))
            saved = unless_recomputed and getattr(model, "recomputes", False)
            if len(inputs_BT) > self.holds and not saved:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return loss

        monkeypatch.setattr(models, "loss_of", limited)


# --- the policy


def test_a_fit_is_halved_then_recomputes_then_ends():
    fits, fit = [], Fit(sequences=6)
    while fit is not None:
        fits.append((fit.sequences, fit.recompute))
        fit = fit.smaller(6, can_recompute=True)
    assert fits == [(n, again) for again in (False, True) for n in (6, 3, 1)]
    assert Fit(sequences=1).smaller(6, can_recompute=False) is None


def test_pieces_hold_every_sequence_once():
    whole = batches(count=2)
    parts = pieces(whole, 3)
    assert [len(part) for part in parts] == [3, 3, 1] * 2
    assert torch.equal(torch.cat(parts), torch.cat(whole))


@pytest.mark.parametrize(
    "plain", [{}, {"sequences": 0, "recompute": False}, {"sequences": 8, "recompute": True}]
)
def test_a_fit_of_another_batch_is_refused(plain):
    with pytest.raises(SavedStateError, match="expected"):
        Fit.from_dict(plain, 7)


def test_a_fit_survives_a_restart():
    fit = Fit(sequences=2, recompute=True)
    assert Fit.from_dict(fit.to_dict(), 7) == fit
    assert str(fit) == "2 sequences at a time, activations recomputed"


# --- the gradient


@pytest.mark.parametrize("end", [None, END])
@pytest.mark.parametrize("sequences", [1, 2, 3, 4, 6])
def test_pieces_have_the_gradient_of_the_batch(sequences, end):
    given = batches(count=2)
    given[0][0, :] = END
    given[1][:, ::5] = END

    def of(sequences):
        model = model_of()
        if end is not None:
            models.separate_documents(model, end)
        learner = learner_of(model, clip_norm=0.0)
        learner.use(Fit(sequences=sequences))
        return learner.gradient(given, step=0), grads(learner)

    (whole, expected), (found, got) = of(14), of(sequences)
    assert found.loss == pytest.approx(whole.loss, rel=1e-5)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_batch_is_halved_until_it_fits_and_this_is_said_once(monkeypatch, caplog):
    expected = learner_of(clip_norm=0.0)
    expected.use(Fit(sequences=1))
    step = expected.gradient(batches(), step=0)
    memory = Memory(monkeypatch, holds=2)
    learner = learner_of(clip_norm=0.0)
    with caplog.at_level(logging.WARNING):
        found = learner.gradient(batches(), step=0)
    assert memory.tried == [7, 3, *[1] * 7]
    assert learner.fit == Fit(sequences=1)
    assert found == step
    assert all(torch.equal(a, b) for a, b in zip(grads(learner), grads(expected), strict=True))
    memory.tried.clear()
    learner.gradient(batches(), step=1)
    assert memory.tried == [1] * 7
    (record,) = caplog.records
    assert "out of memory on cpu with 7 sequences at a time; this peer" in record.message
    assert "continues with 1 sequence at a time" in record.message


def test_a_step_that_ran_out_of_memory_late_starts_again(monkeypatch):
    given = batches(count=2)
    calls, loss_of = [], models.loss_of

    def once(model, inputs_BT, targets_BT):
        calls.append(len(inputs_BT))
        if len(calls) == 2:  # the first micro-batch has left its gradient
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss_of(model, inputs_BT, targets_BT)

    expected = learner_of(clip_norm=0.0)
    expected.use(Fit(sequences=3))
    expected.gradient(given, step=0)
    monkeypatch.setattr(models, "loss_of", once)
    learner = learner_of(clip_norm=0.0)
    learner.gradient(given, step=0)
    assert calls == [7, 7, *[3, 3, 1] * 2]
    assert all(torch.equal(a, b) for a, b in zip(grads(learner), grads(expected), strict=True))


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out = nn.Embedding(256, 16), nn.Linear(16, 256)

    def forward(self, tokens_BT):
        return self.out(nn.functional.dropout(self.table(tokens_BT), 0.5, self.training))


def test_a_repeated_step_draws_the_same_dropout(monkeypatch):
    expected = learner_of(Dropping())
    expected.use(Fit(sequences=3))
    found = expected.gradient(batches(), step=0, seed=5)
    Memory(monkeypatch, holds=3)
    learner = learner_of(Dropping())
    torch.rand(3)
    assert learner.gradient(batches(), step=0, seed=5) == found


def test_blocks_recompute_when_one_sequence_is_too_much(monkeypatch):
    memory = Memory(monkeypatch, holds=0, unless_recomputed=True)
    learner = learner_of()
    learner.gradient(batches(), step=0)
    assert learner.fit == Fit(sequences=7, recompute=True)
    assert memory.tried == [7, 3, 1, 7]
    assert learner.model.recomputes


def test_a_model_that_never_fits_is_refused(monkeypatch):
    Memory(monkeypatch, holds=0)
    with pytest.raises(DeviceError, match="does not fit on cpu: out of memory with 1 sequence at"):
        learner_of().gradient(batches(), step=0)


def test_other_errors_are_not_taken_for_a_lack_of_memory(monkeypatch):
    def broken(model, inputs_BT, targets_BT):
        raise RuntimeError("shapes cannot be multiplied")

    monkeypatch.setattr(models, "loss_of", broken)
    with pytest.raises(RuntimeError, match="shapes"):
        learner_of().gradient(batches(), step=0)


def test_activations_are_free_before_the_step_is_repeated(monkeypatch):
    held, loss_of = [], models.loss_of

    def heavy(model, inputs_BT, targets_BT):
        activation = nn.Linear(1, 1)  # stands for what the traceback would keep
        if len(inputs_BT) == 7:
            held.append(__import__("weakref").ref(activation))
            raise torch.OutOfMemoryError("CUDA out of memory")
        assert held[0]() is None
        return loss_of(model, inputs_BT, targets_BT)

    monkeypatch.setattr(models, "loss_of", heavy)
    assert learner_of().gradient(batches(), step=0).is_finite


# --- float16


def test_float16_has_nearly_the_gradient_of_float32():
    half, single = learner_of(precision="float16"), learner_of(precision="float32")
    found, expected = half.gradient(batches(), step=0), single.gradient(batches(), step=0)
    assert found.loss == pytest.approx(expected.loss, rel=1e-3)
    assert found.norm == pytest.approx(expected.norm, rel=2e-2)


def test_an_overflow_is_no_step_and_scales_less():
    learner = learner_of(precision="float16")
    learner._scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    overflowed = learner.gradient(batches(), step=0)
    assert not overflowed.is_finite
    assert learner.state_dict()["scaler"]["scale"] == 2.0**39
    while not learner.gradient(batches(), step=0).is_finite:
        pass
    again = learner_of(precision="float16")
    again.load_state_dict(learner.state_dict())
    assert again.gradient(batches(), step=0) == learner.gradient(batches(), step=0)


# --- the trainer


def spec_of(**inner):
    return RunSpec.from_dict(
        {
            "run": {"rounds": 4, "seed": 3},
            "model": {"overrides": SMALL},
            "data": {"seq_len": 16},
            "inner": {"batch_size": 4, "warmup_steps": 3, "lr": 0.01} | inner,
            "outer": {"inner_steps": 4},
        }
    )


@pytest.fixture(scope="module")
def corpus():
    text = np.frombuffer(b"the closed ring of a low coral island. " * 200, dtype=np.uint8)
    return data.LocalCorpus(
        train_N=text[:6000], valid_N=text[6000:], tokenizer=data.ByteTokenizer()
    )


def trainer_of(corpus, **inner):
    reducer = InProcessGroup(1, lr=0.7, momentum=0.5, codec="int8").member(0)
    options = TrainerOptions(device="cpu", validate_every=1)
    return Trainer(spec_of(**inner), reducer, options, corpus=corpus)


def test_a_run_goes_on_after_it_ran_out_of_memory_and_a_restart_remembers(
    corpus, tmp_path, monkeypatch
):
    plain = trainer_of(corpus)
    plain.run()
    memory = Memory(monkeypatch, holds=2)
    first = trainer_of(corpus)
    for _ in range(6):
        first.step()
    assert memory.tried[:3] == [4, 2, 2]
    first.save(tmp_path / "state")
    memory.tried.clear()
    second = trainer_of(corpus)
    second.load(tmp_path / "state")
    second.run()
    assert set(memory.tried) == {2}
    assert second.statistics().tokens == plain.statistics().tokens
    assert second.statistics().loss == pytest.approx(plain.statistics().loss, rel=1e-3)


def test_another_device_finds_its_own_fit(corpus, tmp_path):
    trainer = trainer_of(corpus)
    trainer.learner.use(Fit(sequences=1))
    state = trainer.state_dict()
    state["learner"]["device"] = "NVIDIA T4"
    again = trainer_of(corpus)
    again.load_state_dict(state)
    assert again.learner.fit == Fit(sequences=4)


def test_a_state_of_an_earlier_version_loads(corpus):
    trainer = trainer_of(corpus)
    state = trainer.state_dict()
    del state["learner"]
    trainer_of(corpus).load_state_dict(state)


def test_a_run_in_float16_learns(corpus):
    trainer = trainer_of(corpus, precision="float16")
    before = trainer.evaluate()
    trainer.run()
    assert trainer.statistics().precision == "float16"
    assert trainer.evaluate() < before - 0.5


# --- validation in the model itself


class StopError(Exception):
    pass


class WithBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out = nn.Embedding(256, 16), nn.Linear(16, 256)
        self.base = nn.Parameter(torch.zeros(16), requires_grad=False)
        self.register_buffer("seen", torch.zeros(1))
        self.still = nn.Dropout(0.5).eval()

    def forward(self, tokens_BT):
        self.seen += 1
        return self.out(self.still(self.table(tokens_BT)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("stops", [False, True])
def test_a_validation_leaves_every_bit_where_it_was(dtype, stops):
    model = WithBuffer().to(dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    evaluator = Evaluator(model, batches(count=2), Device.choose("cpu"))
    params_N = torch.randn(sum(p.numel() for p in model.parameters() if p.requires_grad))
    calls = []

    def between():
        calls.append(model.table.weight[0, 0].item())
        if stops and len(calls) == 2:
            raise StopError

    if stops:
        with pytest.raises(StopError):
            evaluator.loss(params_N, between=between)
    else:
        evaluator.loss(params_N, between=between)
    assert calls == [params_N.to(dtype)[0].item()] * 2
    after = model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert model.training
    assert not model.still.training


def test_a_validation_takes_pieces_that_fit():
    model, given = model_of(), batches(count=2)
    params_N = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    whole = Evaluator(model, given, Device.choose("cpu"))
    parts = Evaluator(model, given, Device.choose("cpu"), fit=lambda: Fit(sequences=3))
    sizes = []
    model.register_forward_hook(lambda module, args, out: sizes.append(len(args[0])))
    assert parts.loss(params_N) == pytest.approx(whole.loss(params_N), rel=1e-6)
    assert sizes == [3, 3, 1, 3, 3, 1, 7, 7]


def test_a_trainer_holds_one_model(corpus):
    trainer = trainer_of(corpus)
    loss = trainer.evaluate()
    assert loss == trainer.evaluate(trainer.worker.synced_N)
    assert trainer._evaluator._model is trainer.learner.model


def test_moments_of_8_bits_survive_a_restart_to_the_bit(corpus, tmp_path):
    pytest.importorskip("torchao")
    whole = trainer_of(corpus, state="8bit")
    whole.run()
    first = trainer_of(corpus, state="8bit")
    for _ in range(6):
        first.step()
    first.save(tmp_path / "state")
    second = trainer_of(corpus, state="8bit")
    second.load(tmp_path / "state")
    second.run()
    assert torch.equal(second.worker.synced_N, whole.worker.synced_N)
