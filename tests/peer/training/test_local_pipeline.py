import example_stages
import pytest
import torch

from atoll.compression.activations import parse_activations
from atoll.optim import inner
from atoll.peer.training import models, stages
from atoll.peer.training.devices import Device
from atoll.peer.training.local_pipeline import LocalPipeline
from atoll.peer.training.stage_compute import StageCompute

CPU = Device(device=torch.device("cpu"), precision="float32")
STEPS = 30
UNEVEN = [["slices.[0-2].*"], ["slices.3.*"]]  # an even cut gives the second stage a block too


def decoder():
    overrides = {"dim": 32, "num_layers": 2, "num_heads": 4, "ffn_dim": 48}
    return stages.slices("nano", overrides=overrides, vocab_size=64, seq_len=16)


def example():
    return stages.Slices(
        title="the example",
        builders=example_stages.build(vocab_size=64, seq_len=16, width=16, depth=2),
        vocab_size=64,
        seq_len=16,
    )


def adamw(model):
    return inner.build("adamw", model, lr=3e-3, fused=True)


def pipeline(found, count, **options):
    computes = [StageCompute(found.build(run, seed=3), CPU) for run in found.cut(count)]
    return LocalPipeline(computes, [adamw(each.model) for each in computes], **options)


def batches(step, count=1):
    """Text in which each token follows from the one before it, more or less."""
    generator = torch.Generator().manual_seed(step)
    noise = torch.randint(4, (count, 2, 17), generator=generator)
    return list((noise.cumsum(-1) * 5) % 64)


def whole_losses(found):
    """Train the model in one piece by autograd; return the loss of each step."""
    whole, losses = found.build(range(len(found)), seed=3), []
    optimizer = adamw(whole)
    for step in range(STEPS):
        parts = batches(step)
        found_losses = [models.loss_of(whole, part[:, :-1], part[:, 1:]) for part in parts]
        loss = torch.stack(found_losses).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("model", [decoder, example])
def test_a_pipeline_learns_what_the_whole_model_learns(model):
    expected = whole_losses(model())
    assert expected[-1] < 0.8 * expected[0]
    for stages_of_it in (1, 3, 4, UNEVEN):
        cut = pipeline(model(), stages_of_it)
        losses = [cut.step(batches(step)) for step in range(STEPS)]
        assert losses == pytest.approx(expected, rel=1e-5)


def test_float32_on_the_wire_changes_no_bit():
    fp32 = parse_activations("fp32")
    plain = pipeline(decoder(), 3)
    sent = pipeline(decoder(), 3, forward=fp32, backward=fp32)
    for step in range(3):
        assert plain.step(batches(step)) == sent.step(batches(step))


class Spy:
    """Sends values as they are, and remembers what it was given."""

    def __init__(self):
        self.shapes, self.seeds = [], []

    def encode(self, x_RD, *, seed=0):
        self.shapes.append(tuple(x_RD.shape))
        self.seeds.append(seed)
        return x_RD.clone()

    def decode(self, frame, rows, width):
        return frame.view(rows, width)


def test_every_cut_is_coded_in_both_directions():
    forward, backward = Spy(), Spy()
    pipeline(decoder(), 4, forward=forward, backward=backward).step(batches(0, count=3))
    assert forward.shapes == backward.shapes == [(32, 32)] * 9
    assert len({*forward.seeds, *backward.seeds}) == 18  # rounding at random needs seeds apart


def test_a_coarse_codec_learns_too():
    int8 = parse_activations("int8")
    exact, coarse = pipeline(decoder(), 3), pipeline(decoder(), 3, forward=int8, backward=int8)
    losses = [(exact.step(batches(step)), coarse.step(batches(step))) for step in range(STEPS // 2)]
    assert losses[-1][1] == pytest.approx(losses[-1][0], rel=0.02)
    assert losses[-1][1] != losses[-1][0]


def test_held_out_loss_is_the_mean_over_tokens():
    found = decoder()
    whole = found.build(range(4), seed=3)
    tokens = [batches(0)[0], batches(1)[0][:1, :9]]
    sums = [
        models.loss_of(whole, each[:, :-1], each[:, 1:]) * each[:, 1:].numel() for each in tokens
    ]
    assert pipeline(found, 3).evaluate(tokens) == pytest.approx(sum(sums).item() / 40, rel=1e-6)


def test_each_stage_is_clipped_by_its_own_norm():
    computes = [StageCompute(decoder().build(run, seed=3), CPU) for run in decoder().cut(3)]
    optimizers = [torch.optim.SGD(each.model.parameters(), lr=1.0) for each in computes]
    before = [[param.clone() for param in each.model.parameters()] for each in computes]
    LocalPipeline(computes, optimizers, clip_norm=0.01).step(batches(0))
    for each, values in zip(computes, before, strict=True):
        moved = [(a - b).norm() for a, b in zip(each.model.parameters(), values, strict=True)]
        assert torch.stack(moved).norm().item() == pytest.approx(0.01, rel=1e-2)
