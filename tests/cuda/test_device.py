"""Values that leave a device or come to it are the CPU's, to the bit."""

import pytest
import torch

from atoll.compression import parse, staging
from atoll.compression.scratch import TILE
from atoll.coordinator.run.sections import InnerSection
from atoll.optim import in_process, methods
from atoll.optim.log.replay import residual_of
from atoll.optim.state.layout import Layout
from atoll.optim.state.pieces import decode_pieces
from atoll.peer.training import models, saved
from atoll.peer.training.devices import Device
from atoll.peer.training.fit import Fit
from atoll.peer.training.learner import Evaluator, Learner

T = 16
H = 2
SIZE = {"dim": 16, "num_layers": 2, "num_heads": 2, "ffn_dim": 24}


def model_of(**changes):
    return models.build("nano", overrides=SIZE | changes, vocab_size=256, seq_len=T, seed=0)


def learner_of(device, **inner):
    section = InnerSection(warmup_steps=1, batch_size=4, **inner)
    return Learner(model_of(), section, device, total_steps=0)


def batch(seed=0, size=4):
    return torch.randint(256, (size, T + 1), generator=torch.Generator().manual_seed(seed))


def same(a, b):
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("spec", ["fp32", "bf16", "int8", "int4", "fp4", "nf4"])
def test_a_codec_writes_and_reads_the_same_bits(device, spec):
    codec = parse(spec)
    x = torch.randn(3, 700, generator=torch.Generator().manual_seed(0)) * 1e-3
    frame = codec.encode(x)
    assert codec.encode(x.to(device.device)) == frame
    decoded = codec.decode(frame, x.shape, device=device.device)
    assert same(decoded.cpu(), codec.decode(frame, x.shape))


@pytest.mark.parametrize("spec", ["fp16", "int8", "int8-dynamic", "int4", "fp4", "nf4", "2bit"])
def test_tiles_encoded_together_are_frames_of_each(device, spec):
    codec = parse(spec)
    x_RN = torch.randn(3, TILE, generator=torch.Generator().manual_seed(0)) * 1e-3
    x_RN[1] *= 1e6  # a frame's scales are its own
    there_RN = x_RN.to(device.device)
    decoded_RN = torch.empty_like(there_RN)
    frames = codec.encode_and_decode_rows(there_RN, decoded_RN)
    for frame, x_N, decoded_N in zip(frames, there_RN, decoded_RN.cpu(), strict=True):
        assert same(codec.decode(frame, TILE), decoded_N)
        assert frame == codec.encode(x_N)
    again_RN = torch.empty_like(there_RN)
    codec.decode_rows(frames, again_RN)
    assert same(again_RN.cpu(), decoded_RN.cpu())


def test_a_layout_copies_parameters_and_gradients_out_and_back(device):
    model = model_of()
    layout = Layout.of(model)
    params_N = layout.flatten(model)
    model = model.to(device.device)
    assert same(layout.flatten(model), params_N)
    changed_N = params_N + 1
    layout.load_(model, changed_N)
    assert same(layout.flatten(model), changed_N)
    for param in model.parameters():
        param.grad = torch.full_like(param, 0.5)
    assert same(layout.gradient(model), torch.full((layout.numel,), 0.5))


@pytest.mark.parametrize("spec", ["diloco", "muloco", "sparseloco"])
def test_peers_on_the_device_and_on_the_cpu_end_windows_alike(device, spec):
    method = methods.parse(spec)
    group = in_process(2, method)
    both = []
    for index, each in enumerate((device, Device.choose("cpu", "float32"))):
        learner = learner_of(each)
        worker = method.worker(learner.model, learner.optimizer, group.member(index), inner_steps=H)
        both.append((learner, worker))
    for step in range(2 * H):
        for index, (learner, worker) in enumerate(both):
            gradient = learner.gradient([batch(10 * step + index)], step=step)
            worker.step(tokens=4 * T, loss=gradient.loss)
    assert group.statistics().rounds == 2
    synced_N = group.state_of(0).params_N
    for _, worker in both:
        assert same(worker.synced_N, synced_N)
        assert same(worker.layout.flatten(worker.model), synced_N)


@pytest.mark.parametrize(
    "spec", ["diloco", "diloco(codec=int4)", "diloco(codec=bf16)", "diloco(codec=sign)"]
)
def test_the_device_encodes_what_the_cpu_would_and_owes_the_same(device, spec):
    expect_same_offers(methods.parse(spec), device)


@pytest.mark.cuda  # the fake device lacks products of blocks
def test_a_gpu_encodes_cosine_transforms_as_the_cpu_would():
    expect_same_offers(methods.parse("demo"), Device.choose("cuda", "float32"))


def expect_same_offers(method, device):
    """Let one peer encode on the CPU and one on the device, and settle three offers."""
    (fragment,) = method.fragments(Layout(names=("a",), shapes=((300, 1000),)))
    here, there = (residual_of(method, fragment) for _ in range(2))
    there.encode_on(device.device)
    for seed in range(3):
        delta_N = torch.randn(300_000, generator=torch.Generator().manual_seed(seed)) * 1e-3
        offers = [feedback.offer(delta_N, 2.0) for feedback in (here, there)]
        assert offers[0].frames == offers[1].frames
        assert offers[1].squares == pytest.approx(offers[0].squares, rel=1e-6)
        for feedback, offer in zip((here, there), offers, strict=True):
            included = torch.ones(len(offer.frames), dtype=torch.bool)
            feedback.settle(offer, included, weight=2.0)
        assert same(here.mass_N, there.mass_N)


@pytest.mark.parametrize("codec", ["int8-uniform", "topk(k=256)+int4"])
def test_what_a_device_encodes_in_its_own_way_decodes_alike(device, codec):
    method = methods.parse(f"diloco(codec={codec})")
    (fragment,) = method.fragments(Layout(names=("a",), shapes=((300_000,),)))
    here, there = (residual_of(method, fragment) for _ in range(2))
    there.encode_on(device.device)
    delta_N = torch.randn(300_000, generator=torch.Generator().manual_seed(0)) * 1e-3
    mine, other = (feedback.offer(delta_N, 1.0) for feedback in (here, there))
    assert other.norm == pytest.approx(mine.norm, rel=1e-3)
    decoded_N = decode_pieces(method.codec, other.frames, fragment.pieces)
    assert same(other.after_N, delta_N - decoded_N)  # so the residual is of these very frames


@pytest.mark.parametrize("numel", [1, 1000, staging.BUFFER_BYTES // 4 * 2 + 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_in_pieces_keep_all_values(device, numel, dtype):
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    moved = torch.empty(numel, dtype=dtype).to(device.device)
    staging.to_device([(x, moved), (x, moved)])
    back = torch.empty(numel)
    staging.to_host([(moved, back)])
    assert same(back, x.to(dtype).float())


def test_an_evaluator_leaves_the_model_as_it_was(device):
    model = model_of().to(device.device)
    layout = Layout.of(model)
    before_N = layout.flatten(model)
    evaluator = Evaluator(model, [batch()], device)
    assert evaluator.loss(torch.zeros(layout.numel)) == pytest.approx(5.545, abs=1e-3)  # ln 256
    assert same(layout.flatten(model), before_N)


@pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter")  # torch believes `meta`
def test_model_and_moments_come_back_from_a_file(device, tmp_path):
    learner = learner_of(device)
    learner.gradient([batch()], step=1)
    learner.optimizer.step()
    tree = {"model": learner.model.state_dict(), "inner": learner.optimizer.state_dict()}
    saved.save(tmp_path / "state", tree, kind="k", run="r")
    found = saved.load(tmp_path / "state", kind="k", run="r")
    again = learner_of(device)
    again.model.load_state_dict(found["model"])
    again.optimizer.load_state_dict(found["inner"])
    for each in (learner, again):
        each.gradient([batch(1)], step=2)
        each.optimizer.step()
    one, other = (Layout.of(each.model).flatten(each.model) for each in (learner, again))
    assert same(one, other)


# --- only a GPU has these


@pytest.mark.cuda
def test_a_gpu_is_the_first_choice():
    device = Device.choose()
    assert device.device.type == "cuda"
    assert device.label == torch.cuda.get_device_name()
    assert Device.choose("cuda:0").device.index == 0


@pytest.mark.cuda
@pytest.mark.parametrize("precision", ["auto", "float16"])
def test_a_gpu_trains_in_half_precision(precision):
    device = Device.choose("cuda", precision)
    learner = learner_of(device)
    before_N = Layout.of(learner.model).flatten(learner.model)
    for step in range(20):  # a scaled loss may overflow in the first ones
        gradient = learner.gradient([batch(step)], step=step)
        if gradient.is_finite:
            learner.optimizer.step()
    assert gradient.is_finite
    assert (device.scaler() is not None) == (device.precision == "float16")
    assert not torch.equal(Layout.of(learner.model).flatten(learner.model), before_N)


@pytest.mark.cuda
def test_a_gpu_that_runs_out_of_memory_takes_fewer_sequences():
    device = Device.choose("cuda", "float32")
    model = models.build("nano", vocab_size=4096, seq_len=512, seed=0)
    learner = Learner(model, InnerSection(warmup_steps=1, batch_size=64), device, total_steps=0)
    tokens_BT = torch.randint(4096, (64, 513), generator=torch.Generator().manual_seed(0))
    learner.use(Fit(sequences=4))
    learner.gradient([tokens_BT], step=1)
    limit = torch.cuda.max_memory_reserved() * 1.5
    total = torch.cuda.get_device_properties(device.device).total_memory
    learner.clear()
    device.release()
    learner.use(Fit(sequences=64))
    torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        gradient = learner.gradient([tokens_BT], step=1)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert gradient.is_finite
    assert learner.fit.recompute or learner.fit.sequences < 64
