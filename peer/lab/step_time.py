"""Time an inner step on this machine, on random tokens with a model's real shapes.

The forward and backward passes do not depend on the inner optimizer. Optimizers are timed
separately, on the gradients of the last step.

# B sequences, T positions
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.coordinator.run.spec import RunSpec
from atoll.optim.state.layout import Layout
from atoll.peer.lab.plan import PlanError, bare_model
from atoll.peer.training.data import load as data
from atoll.peer.training.devices import Device
from atoll.peer.training.learner import Learner
from atoll.peer.training.opening import build_model
from atoll.peer.training.permission import Allowed

PROBE_S = 2.0  # time limit for timing steps; half as much more for Muon
PROBE_MAX_PARAMS = 200_000_000  # limit on a CPU, where a larger model's step takes half a minute


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds per inner step, by inner optimizer."""

    adamw_s: float
    muon_s: float


def measured(spec: RunSpec, device: str, *, seconds: float = PROBE_S) -> StepTime:
    """Return the time of the fastest inner step on this machine.

    Args:
        spec: spec of the run.
        device: device to train on.
        seconds: time limit. After a first step, which is not counted, at least one is timed.

    Raises:
        PlanError: the model is too large to time on this machine.
        DeviceError: the device is not available.
        ModelError: the model cannot be built.
    """
    chosen = Device.choose(device)
    _expect_room(spec, chosen)
    vocab_size = data.open_tokenizer(spec.data.tokenizer).vocab_size
    model = build_model(spec, vocab_size, Allowed.everything_in(spec))  # a file of one's own
    learner = Learner(model, spec.inner, chosen, total_steps=0)
    shape = (spec.inner.batch_size, spec.data.seq_len + 1)
    batch_BT = torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(0))
    batches = [batch_BT] * spec.inner.grad_accumulation
    ends_s = time.perf_counter() + seconds
    _timed_step(learner, batches)  # fills caches, loads kernels and compiles
    times = [_timed_step(learner, batches)]
    while time.perf_counter() < ends_s:
        times.append(_timed_step(learner, batches))
    passes_s, adamw_s = (min(each) for each in zip(*times, strict=True))
    muon_s = _muon_s(learner, spec, seconds / 2)
    return StepTime(adamw_s=passes_s + adamw_s, muon_s=passes_s + muon_s)


def is_busy() -> bool:
    """Return whether other programs need more cores than this machine has, if it reports that."""
    try:
        return os.getloadavg()[0] > 1.5 * (os.cpu_count() or 1)
    except OSError:
        return False


def _timed_step(learner: Learner, batches: Sequence[Tensor]) -> tuple[float, float]:
    passes_s = _seconds(learner.device, lambda: learner.gradient(batches, step=0))
    return passes_s, _seconds(learner.device, learner.optimizer.step)


def _muon_s(learner: Learner, spec: RunSpec, seconds: float) -> float:
    # On the gradients of the last step. Muon's first step only creates its momentum. Moments in 8
    # bits are AdamW's alone.
    inner = spec.inner.model_copy(update={"state": "fp32"})
    muon = Learner(learner.model, inner, learner.device, total_steps=0, optimizer="muon")
    ends_s = time.perf_counter() + seconds
    times_s = [_seconds(learner.device, muon.optimizer.step)]
    while time.perf_counter() < ends_s:
        times_s.append(_seconds(learner.device, muon.optimizer.step))
    return min(times_s)


def _seconds(device: Device, work: Callable[[], object]) -> float:
    _synchronise(device)
    began_s = time.perf_counter()
    work()
    _synchronise(device)
    return time.perf_counter() - began_s


def _synchronise(device: Device) -> None:
    if device.device.type == "cuda":
        torch.cuda.synchronize(device.device)
    elif device.device.type == "mps":
        torch.mps.synchronize()


def _expect_room(spec: RunSpec, device: Device) -> None:
    """Raise PlanError if a step of the model would take minutes on this CPU."""
    if device.device.type != "cpu" or spec.model.custom is not None:
        return
    params = Layout.of(bare_model(spec)).numel
    if params > PROBE_MAX_PARAMS:
        raise PlanError(
            f"a model of {params / 1e6:.0f}M parameters is too large to time without an "
            "accelerator; give the time of a step with --step-ms"
        )
