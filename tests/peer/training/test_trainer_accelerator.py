"""A trainer on a device that refuses float64, implicit copies and operations across devices."""

import numpy as np
import pytest
import torch

from atoll.coordinator.run.spec import RunSpec
from atoll.optim.inprocess.rounds import in_process
from atoll.peer.training import models, opening
from atoll.peer.training import trainer as training
from atoll.peer.training.data import load as data
from atoll.peer.training.trainer import Trainer, TrainerOptions
from support.accelerator import DEVICE, Accelerator, OnDevice, Refused, fake_device

H = 4


@pytest.fixture(scope="module")
def corpus():
    text = np.frombuffer(b"the closed ring of a low coral island. " * 200, dtype=np.uint8)
    return data.LocalCorpus(
        train_N=text[:6000], valid_N=text[6000:], tokenizer=data.ByteTokenizer()
    )


@pytest.fixture
def accelerator(monkeypatch):
    monkeypatch.setattr(training.Device, "choose", lambda name, precision: fake_device())
    with Accelerator() as accelerator:
        yield accelerator


def spec_of(method="diloco", **sections):
    plain = {
        "run": {"rounds": 3, "seed": 3},
        "model": {"overrides": {"dim": 16, "num_layers": 2, "num_heads": 2, "ffn_dim": 24}},
        "data": {"seq_len": 16},
        "inner": {"batch_size": 4, "warmup_steps": 3, "lr": 0.01},
        "outer": {"inner_steps": H, "method": method},
    }
    for name, fields in sections.items():
        plain[name] = plain[name] | fields
    return RunSpec.from_dict(plain)


def trainer_of(corpus, spec, **options):
    reducer = in_process(1, spec.method()).member(0)
    return Trainer(spec, reducer, TrainerOptions(device="cpu", **options), corpus=corpus)


# --- the harness


def test_values_move_by_explicit_copies_alone():
    host = torch.arange(6.0).view(2, 3)
    with Accelerator() as accelerator:
        there = host.to(DEVICE)
        assert isinstance(there, OnDevice)
        assert there.device == DEVICE
        assert torch.equal((there.T @ there).cpu(), host.T @ host)
        assert accelerator.copies == [9]
        back = torch.zeros(2, 3)
        back.copy_(there)
        there.zero_()
        assert torch.equal(back, host)
        there.copy_(back)
        assert torch.equal(there.cpu(), host)
    assert accelerator.copies == [9, 6, 6]


@pytest.mark.parametrize(
    "does",
    [
        lambda there: there.double(),
        lambda there: torch.zeros(2, dtype=torch.float64, device=DEVICE),
        lambda there: there.sum().item(),
        lambda there: float(there.sum()),
        lambda there: bool(there.sum() > 0),
        lambda there: there.tolist(),
        lambda there: there.numpy(),
        lambda there: there + torch.ones(2, 3),
        lambda there: torch.equal(there, there),
        lambda there: there.nonzero(),
        lambda there: there[there > 0],
        lambda there: there[torch.tensor([0])],
    ],
)
def test_what_a_device_lacks_or_waits_for_is_refused(does):
    with Accelerator():
        there = torch.ones(2, 3).to(DEVICE)
        with pytest.raises((Refused, RuntimeError), match=r"float64|waits|subclasses|on tensors"):
            does(there)


def test_a_tied_model_stays_tied_and_gets_gradients():
    with Accelerator():
        model = opening.build_model(spec_of(), 256).to(DEVICE)
        assert model.head.weight is model.embedding.weight
        tokens_BT = torch.randint(256, (2, 17)).to(DEVICE)
        models.loss_of(model, tokens_BT[:, :-1], tokens_BT[:, 1:]).backward()
        assert all(isinstance(param.grad, OnDevice) for param in model.parameters())


# --- a trainer on it


@pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter")  # torch believes `meta`
@pytest.mark.parametrize(
    "method",
    [
        *(
            pytest.param(method, marks=pytest.mark.exhaustive)
            for method in ("diloco", "muloco", "ddp", "eager", "dlion", "sparseloco")
        ),
        "streaming(count=2, tau=2)",
        "demo",
    ],
)
def test_a_run_trains_validates_and_saves_on_a_device(corpus, accelerator, tmp_path, method):
    path = tmp_path / "state"
    spec = spec_of(method, outer={"inner_steps": 1} if method in ("ddp", "dlion", "demo") else {})
    trainer = trainer_of(corpus, spec, validate_every=3, state_path=path, save_every_s=0.0)
    assert all(isinstance(param, OnDevice) for param in trainer.learner.model.parameters())
    trainer.run()
    assert trainer.finished
    assert trainer.statistics().valid_position == 3
    again = trainer_of(corpus, spec)
    again.load(path)
    for one, other in zip(
        again.learner.model.parameters(), trainer.learner.model.parameters(), strict=True
    ):
        assert isinstance(one, OnDevice)
        assert torch.equal(one.cpu(), other.cpu())


def test_a_run_has_the_same_losses_as_on_the_cpu(corpus, accelerator, monkeypatch):
    there = trainer_of(corpus, spec_of())
    there.run()
    monkeypatch.undo()
    here = trainer_of(corpus, spec_of())
    here.run()
    assert there.statistics().device == "fake"
    assert there.statistics().loss == pytest.approx(here.statistics().loss, rel=1e-4)
    assert there.evaluate() == pytest.approx(here.evaluate(), rel=1e-4)


def test_a_step_within_a_window_waits_for_the_device_once(corpus, accelerator):
    trainer = trainer_of(corpus, spec_of(inner={"grad_accumulation": 3}))
    trainer.step()
    accelerator.copies.clear()
    trainer.step()
    assert accelerator.copies == [2]  # loss and norm


def test_a_step_that_fits_only_with_less_memory_runs_on_a_device(corpus, accelerator, monkeypatch):
    loss_of = models.loss_of

    def limited(model, inputs_BT, targets_BT):
        if torch.is_grad_enabled() and not model.recomputes:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss_of(model, inputs_BT, targets_BT)

    monkeypatch.setattr(models, "loss_of", limited)
    monkeypatch.setattr(models, "LOGITS", 40 * 256)
    trainer = trainer_of(corpus, spec_of(run={"rounds": 1}), validate_every=1)
    models.separate_documents(trainer.learner.model, 32)
    trainer.run()
    assert trainer.learner.fit.recompute
    assert trainer.finished
