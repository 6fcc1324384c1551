"""What a step is said to take, against the tensors that live in one on the CPU."""

import contextlib
from dataclasses import replace

import pytest
import torch

from atoll.coordinator.run.spec import RunSpec
from atoll.optim.state.layout import Layout
from atoll.peer.lab.plan import bare_model, needed
from atoll.peer.training import models
from atoll.peer.training.activations import DecoderShape, StepPass, step_of
from atoll.peer.training.models import Decoder, preset
from support.live_memory import Live

NEAR = 0.1
SEQ_LENS = (128, 512)


def peak_bytes(config, step, *, gradients):
    """Return the most bytes beside the model's, and its gradients' if there are some before."""
    torch.manual_seed(0)
    model = Decoder(config)
    model.recomputes = step.recompute
    model.document_end = 0 if step.documents else None
    tokens = torch.randint(config.vocab_size, (step.sequences, step.seq_len + 1))
    known = [*model.parameters(), *model.buffers(), tokens]
    if gradients:
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
            known.append(param.grad)
    half = torch.autocast("cpu", torch.bfloat16) if step.half else contextlib.nullcontext()
    with Live(*known) as live:
        with half:
            loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
    return live.peak


def step_for(name="mini", sequences=2, seq_len=128, vocab_size=256, **fields):
    overrides = {"num_layers": 2} | fields.pop("overrides", {})
    config = preset(name, overrides, vocab_size=vocab_size, seq_len=seq_len)
    with torch.device("meta"):
        shape = DecoderShape.of(Layout.of(Decoder(config)))
    return config, StepPass(shape=shape, sequences=sequences, seq_len=seq_len, **fields)


@pytest.mark.parametrize("seq_len", SEQ_LENS)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"overrides": {"num_kv_heads": 2, "tied": False}},
        {"name": "nano", "vocab_size": 8000},
        {"documents": True},
    ],
)
def test_a_step_takes_what_it_is_said_to(seq_len, recompute, fields):
    config, step = step_for(seq_len=seq_len, recompute=recompute, **fields)
    assert step.bytes == pytest.approx(peak_bytes(config, step, gradients=True), rel=NEAR)


@pytest.mark.parametrize("seq_len", SEQ_LENS)
@pytest.mark.parametrize("recompute", [False, True])
def test_a_first_pass_takes_less_by_the_gradients_to_come(seq_len, recompute):
    config, step = step_for(seq_len=seq_len, recompute=recompute)
    model, gradients = 12 * step.shape.numel, 4 * step.shape.numel
    found = peak_bytes(config, step, gradients=False)
    assert model + gradients + step.more_bytes == pytest.approx(model + found, rel=NEAR)
    assert step.more_bytes < step.bytes


@pytest.mark.parametrize("recompute", [False, True])
def test_parts_of_the_logits_bound_the_loss(recompute, monkeypatch):
    monkeypatch.setattr(models, "LOGITS", 64 * 8000)
    config, step = step_for(seq_len=512, vocab_size=8000, recompute=recompute)
    found = peak_bytes(config, step, gradients=True)
    assert found == pytest.approx(step.bytes, rel=0.2)
    monkeypatch.setattr(models, "LOGITS", 1 << 26)
    assert step.bytes > found


@pytest.mark.parametrize("seq_len", SEQ_LENS)
def test_half_the_bytes_are_counted_for_products_on_a_gpu(seq_len):
    """The CPU's norm is not fused: it also keeps its input, normalised, in fp32."""
    config, step = step_for(seq_len=seq_len, half=True)
    normalised = 4 * config.dim * 2 * seq_len * (2 * config.num_layers + 1)
    found = peak_bytes(config, step, gradients=True)
    assert step.bytes + normalised == pytest.approx(found, rel=NEAR)


def test_one_recomputed_sequence_is_the_least():
    _, step = step_for(sequences=8)
    assert step.least == replace(step, sequences=1, recompute=True)
    assert step.least.bytes < replace(step, sequences=1).bytes < step.bytes


def test_only_whole_built_in_models_are_known():
    spec = RunSpec()
    layout = Layout.of(bare_model(spec))
    assert step_of(spec, layout, half=True) == StepPass(
        shape=DecoderShape.of(layout),
        sequences=spec.inner.batch_size,
        seq_len=spec.data.seq_len,
        half=True,
    )
    fp32 = RunSpec.from_dict({"inner": {"precision": "float32"}})
    assert step_of(fp32, layout, half=True) == step_of(spec, layout, half=False)
    assert step_of(spec, Layout(names=("w",), shapes=((8,),)), half=True) is None
    staged = RunSpec.from_dict({"topology": {"stages": 2}})
    assert step_of(staged, layout, half=True) is None


def test_the_plan_counts_activations_of_a_step():
    small, large = (
        RunSpec.from_dict({"data": {"seq_len": 2048}, "inner": {"batch_size": size}})
        for size in (1, 64)
    )
    model = bare_model(small)
    few, many = (needed(spec, model, 2) for spec in (small, large))
    assert many.step_memory > few.step_memory
    assert many.gpu_memory > few.gpu_memory > few.gpu_memory_least == many.gpu_memory_least
    assert few.gpu_memory_least > few.inner_memory
    assert few.peer_memory == many.peer_memory
    assert many.host_memory(on_gpu=False) == many.step_memory > many.peer_memory
    assert many.host_memory(on_gpu=True) == many.peer_memory - many.inner_memory
    twice = RunSpec.from_dict(
        {"data": {"seq_len": 2048}, "inner": {"batch_size": 64, "grad_accumulation": 2}}
    )
    gradients = 4 * Layout.of(model).numel
    again = needed(twice, model, 2)
    assert again.step_memory == many.step_memory + gradients
    hidden = RunSpec.from_dict({"outer": {"method": "eager"}, "data": {"seq_len": 2048}})
    beside = needed(hidden, model, 2)
    assert beside.step_memory > beside.peer_memory
