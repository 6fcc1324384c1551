"""Steps of `scripts/gpu` in one process: tests, equal bits, codecs, a window's end, model FLOPs.

# B sequences, T positions, N values
"""

import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from gpu_place import ROOT, Activity, Place, activity, event_share, peak_tflops
from gpu_results import Check, Facts, Found
from torch import Tensor

from atoll.compression import parse
from atoll.compression.base import HEADER_BYTES, Codec
from atoll.coordinator.run.sections import InnerSection
from atoll.optim import in_process, methods
from atoll.optim.log.replay import residual_of
from atoll.optim.methods.worker import Worker
from atoll.optim.state.outer_state import is_finite
from atoll.peer.training import models, saved
from atoll.peer.training.devices import Device
from atoll.peer.training.learner import Learner

TESTS_S = 900.0
REPEATS = 5
CLOSE = 0.01  # of an error
HALF = 0.5  # of the bandwidth of a copy
BYTES = 256  # vocabulary

# The least that a window's end at a size takes, in bytes a parameter: model, gradients and AdamW
# (16) with a sequence's activations; vectors of the outer step; the state that is saved.
DEVICE_BYTES, HOST_BYTES, DISK_BYTES = 20, 60, 18

SAME_FRAMES = ("fp32", "bf16", "int8", "int8-dynamic", "int4", "fp4", "nf4")
"""Codecs whose codes follow from largest magnitudes and single products alone."""
SAME_VALUES = ("fp16", "int8-uniform", "sign", "2bit", "ternary(seed=1)")
"""Codecs that add many values up, each device in its own order, or measure a block in another way
on a GPU, as `fp16`: their frames may differ, must lose as much, and must be decoded alike."""
NOT_ON_FAKE = ("topk(k=256)+int4", "dct(k=64)")
"""More of these: they read values on the host, or take products that the fake device lacks."""
ELEMENTWISE = ("fp16", "bf16", "int8", "int4", "fp4", "sign", "2bit")
METHODS = ("diloco", "diloco(codec=int4)", "muloco", "sparseloco", "streaming(count=2, tau=2)")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Hold the amounts that steps measure."""

    bits_values: int
    windows: int
    inner_steps: int
    codec_values: int
    window_presets: tuple[str, ...]
    """The largest first; the first one that fits is measured."""
    overrides: Mapping[str, int]
    """fields of the presets"""
    vocab_size: int
    batch_size: int
    seq_len: int
    steps: int
    """timed"""
    compiles: tuple[bool, ...]


REAL = Sizes(
    bits_values=1 << 22,
    windows=4,
    inner_steps=4,
    codec_values=1 << 27,
    window_presets=("1b", "350m", "150m"),
    overrides={},
    vocab_size=32_768,
    batch_size=32,
    seq_len=2048,
    steps=10,
    compiles=(False, True),
)
TINY_MODEL = {"dim": 16, "num_layers": 2, "num_heads": 2, "ffn_dim": 24}
TINY = Sizes(
    bits_values=1 << 14,
    windows=2,
    inner_steps=2,
    codec_values=1 << 14,
    window_presets=("nano",),
    overrides=TINY_MODEL,
    vocab_size=BYTES,
    batch_size=2,
    seq_len=16,
    steps=1,
    compiles=(False,),
)


# --- the tests


def tests(place: Place, folder: Path) -> Found:
    """Run the tests that need a CUDA device; a dry run finds that all of them are skipped."""
    report = folder / "tests.xml"
    words = [str(ROOT / "scripts" / "test"), "--cuda"]
    if place.is_dry:
        words = [sys.executable, "-m", "pytest", "-q", "-n", "0", "tests/cuda", "-m", "cuda"]
    log = folder / "tests.log"
    with log.open("wb") as out:
        code = subprocess.run(
            [*words, f"--junitxml={report}"],
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=TESTS_S,
        ).returncode
    if not report.exists():
        raise RuntimeError(f"the tests ended with exit code {code} and no report; see {log}")
    counts = counted(report)
    run = counts["tests"] - counts["skipped"]
    return Found(
        rows=[counts],
        checks=[
            Check(name="tests", got=f"exit code {code}; {log.name}", expected="0", is_met=not code),
            Check(
                name="tests run",
                got=f"{run} of {counts['tests']}",
                expected="some",
                is_met=counts["tests"] > 0 if place.is_dry else run > 0,
            ),
        ],
    )


def counted(report: Path) -> dict[str, int]:
    """Return the numbers in a JUnit report."""
    suite = ET.parse(report).getroot().find("testsuite")
    assert suite is not None, "pytest writes one"
    return {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}


# --- equal bits


def bits(place: Place, sizes: Sizes) -> Found:
    """Compare encoding and decoding, and train a peer on the device and one on the CPU together."""
    rows, checks = [], []
    for spec in (*SAME_FRAMES, *SAME_VALUES, *(() if place.is_dry else NOT_ON_FAKE)):
        row = codec_bits(place, spec, sizes.bits_values)
        rows.append(row)
        checks.append(_holds(f"{spec}: frames decode alike", row["decoded_alike"]))
        checks.append(
            Check(
                name=f"{spec}: relative error of a frame from the device",
                got=f"{row['error_on_device']:.5f}",
                expected=f"that of one from the CPU, {row['error_on_cpu']:.5f}",
                is_met=abs(row["error_on_device"] - row["error_on_cpu"])
                <= CLOSE * row["error_on_cpu"],
            )
        )
        if spec in SAME_FRAMES:
            checks.append(_holds(f"{spec}: frames of a vector", row["frames_alike"]))
    for spec in METHODS:
        row = group_bits(place, spec, sizes)
        rows.append(row)
        checks.append(_holds(f"{spec}: synced parameters", row["synced_alike"]))
        checks.append(_holds(f"{spec}: local parameters", row["local_is_synced"]))
    return Found(rows=rows, checks=checks)


def _holds(name: str, is_met: bool | None) -> Check:
    got = "equal bits" if is_met is not False else "other bits"
    return Check(name=name, got=got, expected="equal bits", is_met=is_met is not False)


def codec_bits(place: Place, spec: str, numel: int) -> Facts:
    """Encode a vector on both devices, and decode both frames on both."""
    x = vector(numel)
    here = parse(spec).encode(x)
    there = parse(spec).encode(x.to(place.device.device))
    alike = []
    for frame in (here, there):
        codec = parse(spec)
        decoded = codec.decode(frame, x.shape, device=place.device.device)
        alike.append(same_bits(codec.decode(frame, x.shape), decoded.cpu()))
    differ = sum(a != b for a, b in zip(here, there, strict=True)) if here != there else 0
    return {
        "codec": spec,
        "frames_alike": here == there,
        "bytes_that_differ": differ,
        "of": len(here),
        "decoded_alike": all(alike),
        "error_on_cpu": error(x, parse(spec).decode(here, x.shape)),
        "error_on_device": error(x, parse(spec).decode(there, x.shape)),
    }


def error(x: Tensor, decoded: Tensor) -> float:
    """Return the relative norm of what a codec lost of a vector."""
    return float((decoded - x).norm() / x.norm())


def vector(numel: int) -> Tensor:
    """Return values on the CPU like those of a pseudo-gradient, always the same ones."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(0)) * 1e-3


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two fp32 tensors on the CPU are equal, their zeros' signs included."""
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def group_bits(place: Place, spec: str, sizes: Sizes) -> Facts:
    """Train one peer on the device and one on the CPU, in one group."""
    method = methods.parse(spec)
    group = in_process(2, method)
    both = [
        trained_worker(group.member(index), method, device, sizes)
        for index, device in enumerate((place.device, Device.choose("cpu", "float32")))
    ]
    for step in range(sizes.windows * sizes.inner_steps):
        for index, (learner, worker) in enumerate(both):
            batch_BT = tokens(BYTES, 2, 32, seed=100 * step + index)
            gradient = learner.gradient([batch_BT], step=step)
            worker.step(tokens=batch_BT[:, 1:].numel(), loss=gradient.loss)
    (there, here) = (worker for _, worker in both)
    local = [worker.layout.flatten(worker.model) for worker in (there, here)]
    return {
        "method": spec,
        "rounds": group.statistics().rounds,
        "synced_alike": same_bits(there.synced_N, here.synced_N),
        # With a delay, what was trained meanwhile stays with each.
        "local_is_synced": None
        if here.delay
        else all(same_bits(each, here.synced_N) for each in local),
        "root": group.state_of(0).root().hex()[:16],
    }


def trained_worker(
    member: object, method: methods.Method, device: Device, sizes: Sizes
) -> tuple[Learner, Worker]:
    """Return a small model on a device, with its place in a group."""
    model = models.build("nano", overrides=sizes.overrides, vocab_size=BYTES, seq_len=32, seed=0)
    learner = Learner(
        model, InnerSection(warmup_steps=2), device, total_steps=0, optimizer=method.inner
    )
    worker = method.worker(learner.model, learner.optimizer, member, inner_steps=sizes.inner_steps)  # type: ignore[arg-type]
    return learner, worker


def tokens(vocab_size: int, batch: int, length: int, *, seed: int = 0) -> Tensor:
    """Return random tokens, int64 `(B, T + 1)` on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (batch, length + 1), generator=generator)


# --- codecs against a copy


def codecs(place: Place, sizes: Sizes) -> Found:
    """Time encoding and decoding beside a copy of the same values."""
    device = place.device.device
    x = vector(sizes.codec_values).to(device)
    out = torch.empty_like(x)
    host = torch.empty(x.shape, pin_memory=not place.is_dry)
    copy_s = place.fastest_s(lambda: out.copy_(x), REPEATS)
    to_host_s = place.fastest_s(lambda: host.copy_(x), REPEATS)
    to_device_s = place.fastest_s(lambda: x.copy_(host), REPEATS)
    gigabytes = 4 * x.numel() / 1e9
    rows: list[Facts] = [
        {
            "copy_gb_s": 2 * gigabytes / copy_s,  # read and written
            "to_host_gb_s": gigabytes / to_host_s,
            "to_device_gb_s": gigabytes / to_device_s,
        }
    ]
    checks = []
    for spec in ELEMENTWISE:
        times = codec_times(place, parse(spec), x, out)
        row = {
            "codec": spec,
            "write_of_copy": copy_s / times.write_s,
            "read_of_copy": copy_s / times.read_s,
            "encode_of_transfer": to_host_s / times.encode_s,
            "decode_of_transfer": to_device_s / times.decode_s,
            "encode_gb_s": gigabytes / times.encode_s,
            "decode_gb_s": gigabytes / times.decode_s,
        }
        rows.append(row)
        for way in ("write", "read"):
            share = float(row[f"{way}_of_copy"])
            checks.append(
                Check(
                    name=f"{spec}: {way} against a copy on the device",
                    got=f"{share:.2f} of its speed",
                    expected=f"at least {HALF}",
                    is_met=share >= HALF,
                    is_speed=True,
                )
            )
    return Found(rows=rows, checks=checks)


@dataclass(frozen=True, kw_only=True)
class CodecTimes:
    """Seconds of one codec."""

    write_s: float
    """kernels on the device alone, without header, checksum and transfer"""
    read_s: float
    encode_s: float
    """to bytes of the host"""
    decode_s: float


def codec_times(place: Place, codec: Codec, x: Tensor, out: Tensor) -> CodecTimes:
    """Time one codec on the device's values."""
    dims = tuple(x.shape)
    buffer = bytearray(codec.wire_bytes(dims))
    length = codec.encode_into(x, buffer)
    frame = memoryview(buffer)[:length]
    payload = torch.empty(length - HEADER_BYTES, dtype=torch.uint8, device=x.device)
    return CodecTimes(
        # The kernels have no other name.
        write_s=place.fastest_s(lambda: codec._write(x, dims, payload), REPEATS),
        read_s=place.fastest_s(lambda: codec._read(payload, dims, out), REPEATS),
        encode_s=place.fastest_s(lambda: codec.encode_into(x, buffer), REPEATS),
        decode_s=place.fastest_s(
            lambda: codec.decode(frame, dims, device=x.device, out=out), REPEATS
        ),
    )


# --- the end of a window


def window(place: Place, sizes: Sizes, folder: Path) -> Found:
    """Time what a trainer does at the end of a window, and to save and encode its state."""
    preset = next((p for p in sizes.window_presets if fits(place, p, sizes, folder)), None)
    if preset is None:
        raise RuntimeError(
            f"no model fits: expected {DEVICE_BYTES} bytes a parameter on the GPU, {HOST_BYTES} on "
            f"the host and {DISK_BYTES} on the disk of {folder}, for {sizes.window_presets[-1]}"
        )
    length = min(sizes.seq_len, 512)  # activations are not measured here
    learner = learner_of(place, preset, sizes, batch_size=1, seq_len=length)
    batch_BT = tokens(sizes.vocab_size, 1, length)
    learner.gradient([batch_BT], step=1)
    learner.optimizer.step()  # fills the moments
    method = methods.parse("diloco")
    group = in_process(1, method)
    worker = method.worker(learner.model, learner.optimizer, group.member(0), inner_steps=1)
    numel = worker.layout.numel
    rows = [{"preset": preset, "parameters": numel, "device_bytes": place.peak_bytes()}]

    def timed(name: str, passes: int, work: Callable[[], object]) -> None:
        took_s = place.seconds(work)
        rows.append({"part": name, "seconds": took_s, "gb_s": 4 * passes * numel / took_s / 1e9})

    local_N = worker.layout.flatten(learner.model)
    timed("flatten, to the host", 1, lambda: worker.layout.flatten(learner.model))
    timed("check for NaN, on the CPU", 1, lambda: is_finite(local_N))
    timed("load, to the device", 1, lambda: worker.layout.load_(learner.model, local_N))
    timed("whole end of a window, with a round of one peer", 1, lambda: worker.advance(tokens=1))
    for name, where in (
        ("on the CPU", torch.device("cpu")),
        ("on the device", place.device.device),
    ):
        feedback = residual_of(method, worker.fragments[0])
        feedback.encode_on(where)
        feedback.offer(local_N, 1.0)  # peers use its memory again
        timed(f"encode with feedback, {name}", 1, partial(feedback.offer, local_N, 1.0))
    tree = {
        "model": learner.model.state_dict(),
        "inner": learner.optimizer.state_dict(),
        "synced": worker.synced_N,
    }
    with tempfile.TemporaryDirectory(dir=folder) as disk:
        path, begun = Path(disk) / "state", list[saved.Begun]()
        begin = partial(saved.begin, path, tree, kind="gpu", run="-")
        timed("save, training stands", 4, lambda: begun.append(begin()))
        timed("hash and sync what was saved", 4, lambda: saved.finish(begun[0]))
        back = saved.load(path, kind="gpu", run="-")
    is_back = same_bits(back["synced"], worker.synced_N) and all(
        torch.equal(value.cpu(), back["model"][name])
        for name, value in learner.model.state_dict().items()
    )
    return Found(rows=rows, checks=[_holds("what was saved", is_back)])


def fits(place: Place, preset: str, sizes: Sizes, folder: Path) -> bool:
    """Return whether device, host and disk hold what the end of a window takes."""
    config = models.preset(
        preset, sizes.overrides, vocab_size=sizes.vocab_size, seq_len=sizes.seq_len
    )
    device, host = place.free_bytes()
    room = (device, DEVICE_BYTES), (host, HOST_BYTES), (shutil.disk_usage(folder).free, DISK_BYTES)
    return all(config.num_params * each <= free for free, each in room)


# --- model FLOPs


def mfu(place: Place, sizes: Sizes, preset: str) -> Found:
    """Time inner steps; halve the batch until it fits."""
    rows = []
    for compiled in sizes.compiles:
        place.forget()
        rows.append(step_row(place, sizes, preset, compiled=compiled))
    return Found(rows=rows)


def step_row(place: Place, sizes: Sizes, preset: str, *, compiled: bool) -> Facts:
    """Return the speed of one model's inner steps."""
    learner = learner_of(
        place, preset, sizes, batch_size=sizes.batch_size, seq_len=sizes.seq_len, compiles=compiled
    )
    batch_BT = tokens(sizes.vocab_size, sizes.batch_size, sizes.seq_len)

    def one() -> None:
        learner.gradient([batch_BT], step=1)
        learner.optimizer.step()

    for _ in range(2):  # fills caches, compiles, and finds what fits
        place.seconds(one)
    sampler = activity(place)
    step_s, busy = watched(place, sampler, one, sizes.steps)
    source = sampler.source if sampler is not None else "nothing"
    if busy is None and not place.is_dry:
        busy, source = event_share(place, one, sizes.steps), "CUDA events, an upper bound"
    config = models.preset(
        preset, sizes.overrides, vocab_size=sizes.vocab_size, seq_len=sizes.seq_len
    )
    tflops = flops_per_token(config, sizes.seq_len) * batch_BT[:, 1:].numel() / step_s / 1e12
    peak = peak_tflops(place.name, place.device.precision)
    peak_bytes = place.peak_bytes()
    return {
        "preset": preset,
        "parameters": config.num_params,
        "precision": place.device.precision,
        "compiled": compiled and learner._forward is not learner.model,
        "batch": sizes.batch_size,
        "at_once": str(learner.fit),
        "length": sizes.seq_len,
        "step_ms": 1e3 * step_s,
        "tokens_s": batch_BT[:, 1:].numel() / step_s,
        "tflops": tflops,
        "mfu": tflops / peak if peak else None,
        "gigabytes": peak_bytes / 1e9 if peak_bytes is not None else None,
        "busy": busy,
        "busy_by": source,
    }


def watched(
    place: Place, sampler: Activity | None, work: Callable[[], object], count: int
) -> tuple[float, float | None]:
    """Return the mean seconds of calls, and how busy the device was in them."""

    def all_of_them() -> None:
        for _ in range(count):
            work()

    if sampler is None:
        return place.seconds(all_of_them) / count, None
    with sampler:
        began_s = time.monotonic()
        took_s = place.seconds(all_of_them)
        return took_s / count, sampler.mean(began_s, began_s + took_s)


def flops_per_token(config: models.ModelConfig, seq_len: int) -> float:
    """Return the FLOPs of a token, forward and backward; what is computed again does not count.

    6 for each parameter (arXiv:2001.08361, with the embedding, which is also the head) and, for
    attention, 12 times layers, width and length (arXiv:2204.02311), halved as it is causal.
    """
    return 6.0 * config.num_params + 6.0 * config.num_layers * config.dim * seq_len


def learner_of(
    place: Place,
    preset: str,
    sizes: Sizes,
    *,
    batch_size: int,
    seq_len: int,
    compiles: bool = False,
) -> Learner:
    """Return a model of the built-in kind on the device."""
    model = models.build(
        preset, overrides=sizes.overrides, vocab_size=sizes.vocab_size, seq_len=seq_len, seed=0
    )
    inner = InnerSection(batch_size=batch_size, warmup_steps=2, compile=compiles)
    return Learner(model, inner, place.device, total_steps=0)
