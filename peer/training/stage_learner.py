"""Inner steps of one stage of a pipeline: gradients come with the microbatches that flow through.

A `StageLearner` stands where a dense peer's `Learner` does. Its `gradient` computes whatever the
flow asks of this stage, until enough microbatches have counted for an inner step. What flows, and
where to, is decided elsewhere (`atoll.peer.pipeline`): a `Flow` gives jobs and takes results.

Frames become tensors and back here, so that the codec's work is done in the trainer's thread.

# B sequences, T positions, D width, R = B T rows
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from atoll.compression.activations import ActivationCodec, parse_activations
from atoll.compression.base import CodecError
from atoll.coordinator.run.sections import InnerSection
from atoll.coordinator.run.spec import RunSpec
from atoll.dht.identity import short
from atoll.optim.inner import build
from atoll.optim.methods.base import InnerName
from atoll.peer.errors import SetupError
from atoll.peer.pipeline.actions import MicrobatchEnded, RunJob, SettleHeld, TakeStep
from atoll.peer.pipeline.messages import PassKey, Payload, encode_tokens
from atoll.peer.pipeline.workbench import Job, Workbench
from atoll.peer.training.beside import ParameterTurns
from atoll.peer.training.devices import Device
from atoll.peer.training.fit import Fit
from atoll.peer.training.learner import Gradient
from atoll.peer.training.stage_compute import StageCompute, WeightGradients
from atoll.peer.training.stages import StageModel

_log = logging.getLogger(__name__)

RATE_S = 60.0  # of computing, over which the rate of a stage is measured
KNOWN_AFTER = 4  # microbatches: the first passes are slow
POLL_S = 0.2  # between two looks whether the trainer shall stop, while nothing flows
BESIDE_POLL_S = 0.05  # the same while it waits for a round, whose end it shall notice soon


class StoppedInStep(Exception):
    """The trainer was stopped, or its run ended, before the step had its microbatches."""


class UnusableFrame(ValueError):
    """A frame that another peer sent holds numbers that are not finite."""


class DrawMicrobatch(Protocol):
    """Draws microbatches at the first stage."""

    def __call__(self, *, trains: bool) -> Tensor:
        """Return int64 tokens `(B, T + 1)`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Codecs:
    """Codecs between the stages of a run."""

    forward: ActivationCodec
    backward: ActivationCodec


def codecs_of(spec: RunSpec) -> Codecs:
    """Return the codecs that a run names."""
    return Codecs(
        forward=parse_activations(spec.topology.activations, seed=spec.run.seed),
        backward=parse_activations(spec.topology.gradients, seed=spec.run.seed),
    )


class StageLearner:
    """A stage on its device, with its inner optimizer, schedule and gradient clipping."""

    def __init__(
        self,
        model: StageModel,
        inner: InnerSection,
        device: Device,
        bench: Workbench,
        codecs: Codecs,
        *,
        draw: DrawMicrobatch | None = None,
        total_steps: int,
        optimizer: InnerName = "adamw",
        is_stopped: Callable[[], bool],
    ) -> None:
        """Move the stage to the device and create its optimizer.

        Args:
            model: the stage.
            inner: the inner section of the spec.
            device: device to train on.
            bench: gives jobs, and takes their results.
            codecs: of what is sent and received.
            draw: draws microbatches; of the first stage alone.
            total_steps: inner steps of the run; 0 for a run without an end.
            optimizer: name of the inner optimizer.
            is_stopped: returns whether to give up the step in progress.
        """
        self.compute = StageCompute(model, device)
        self.model, self.device = self.compute.model, self.compute.device
        self.fit = Fit(sequences=inner.batch_size)
        self.optimizer = build(
            optimizer,
            self.model,
            lr=inner.lr,
            betas=(inner.beta1, inner.beta2),
            weight_decay=inner.weight_decay,
            fused=True if device.device.type in ("cpu", "cuda") else None,
            quantized=inner.state == "8bit",
        )
        self._inner, self._total_steps = inner, total_steps
        self._bench, self._codecs, self._draw = bench, codecs, draw
        self._is_stopped = is_stopped
        self._held: dict[PassKey, tuple[WeightGradients, float]] = {}
        self._loss_sum, self._losses = 0.0, 0
        self._is_open = False
        self.waited_s = 0.0
        """Seconds without a job."""
        self._busy_s = self._busy_tokens = 0.0
        """recent seconds of computing, and tokens of microbatches that they brought to an end"""
        self._num_counted = 0
        self._owes_step = False
        """whether the flow waits to hear that the last step is taken"""
        self._is_put_off = False
        """whether a step came due while the trainer waited for a round"""
        self._failures = 0
        """microbatches in a row that failed here"""
        self.scale = 1.0
        """Factor of the schedule's learning rate."""
        self.beside_s = 0.0
        """Seconds of computing while the trainer waited for a round."""

    def gradient(self, *, step: int) -> Gradient:
        """Compute for the flow until a step is due; leave its clipped mean gradient in the model.

        If as many microbatches as a step has fail in a row, that is a step whose loss is NaN.

        Args:
            step: step of the run that the learning rate follows.

        Raises:
            StoppedInStep: the trainer is stopped.
        """
        rate = self.scale * self._inner.rate.at(step, self._total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self._open()
        self._end_step()
        if self._is_put_off and self.compute.microbatches:
            return self._finish()
        while not self._is_stopped():
            job = self._next()
            if isinstance(job, TakeStep):
                self._owes_step = True
                if self.compute.microbatches:
                    return self._finish()
                self._end_step()  # all that it held was dropped
            elif job is not None:
                self._do(job)
                if self._failures >= self._inner.grad_accumulation:
                    self._failures = 0
                    return Gradient(loss=math.nan, norm=math.nan, tokens=0)
        raise StoppedInStep

    def evaluate(self, microbatches: int) -> float:
        """Send held-out microbatches through the pipeline, from its first stage.

        The loss is that of the parameters which the stages have at that moment. Training goes on
        meanwhile, but for this stage's steps, which the flow puts off.

        Returns:
            The mean loss in nats a token; NaN if none came back.

        Raises:
            StoppedInStep: the trainer is stopped.
        """
        self._open()
        self._bench.report("evaluate", microbatches)  # before the flow may name another step
        self._end_step()
        losses, left = list[float](), microbatches
        while left and not self._is_stopped():
            job = self._next()
            if isinstance(job, MicrobatchEnded):
                left -= 1
                losses += [] if job.loss is None else [job.loss]
            elif isinstance(job, TakeStep):  # named before; what it counts was in the last one
                self._owes_step = True
                self._end_step()
            elif job is not None:
                self._do(job)
        if left:
            raise StoppedInStep
        return sum(losses) / len(losses) if losses else math.nan

    def compute_beside(self, turns: ParameterTurns, is_over: Callable[[], bool]) -> None:
        """Compute for the flow while the trainer waits for a round, if the staleness allows it.

        Steps that come due are put off: what they hold counts in the next one.

        Args:
            turns: of whoever uses the parameters.
            is_over: returns whether the trainer waits no longer.
        """
        self._open()
        self._end_step()
        while not is_over():
            job = self._bench.take(BESIDE_POLL_S)
            if isinstance(job, TakeStep):
                self._is_put_off = self._owes_step = True
                self._end_step()
            elif job is not None:
                with turns.taken():
                    began_s = time.perf_counter()
                    self._do(job)
                    self.beside_s += time.perf_counter() - began_s

    def serve(self) -> None:
        """Compute one job without training: the run's other stages are not done yet."""
        self._end_step()
        job = self._next()
        if isinstance(job, TakeStep):
            self.compute.clear()
            self._loss_sum, self._losses = 0.0, 0
            self._owes_step = True
        elif job is not None:
            self._do(job)

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second that this stage can do if there is always work; 0 before it is known."""
        return self._busy_tokens / self._busy_s if self._num_counted >= KNOWN_AFTER else 0.0

    def clear(self) -> None:
        """Drop the gradient."""
        self.optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Return what a restart needs beside model and optimizer: nothing of a stage."""
        return {"device": self.device.label}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""

    def _open(self) -> None:
        """Let passes in, once the trainer is there."""
        if not self._is_open:
            self._is_open = True
            self._bench.report("resume")

    def _next(self) -> Job | None:
        began_s = time.perf_counter()
        job = self._bench.take(POLL_S)
        self.waited_s += time.perf_counter() - began_s
        return job

    def _end_step(self) -> None:
        if self._owes_step:
            self._owes_step = False
            self._bench.report("stepped")

    def _finish(self) -> Gradient:
        tokens = self.compute.tokens
        found = self.compute.finish(clip_norm=self._inner.clip_norm)
        loss = self._loss_sum / self._losses if self._losses else math.nan
        self._loss_sum, self._losses, self._is_put_off = 0.0, 0, False
        return Gradient(loss=loss, norm=found.norm, tokens=tokens)

    def _do(self, job: RunJob | SettleHeld | MicrobatchEnded) -> None:
        """Carry out one job; an error of the computation ends the job alone.

        Raises:
            SetupError: the text has no more, or the model breaks its contract: so will the next.
        """
        if isinstance(job, SettleHeld):
            self._settle(job)
            return
        if isinstance(job, MicrobatchEnded):
            return  # of an evaluation that was given up
        began_s = time.perf_counter()
        try:
            self._run(job)
            self._busy_s += time.perf_counter() - began_s
        except SetupError:
            raise
        except UnusableFrame as error:  # the sender's fault, which says nothing about this stage
            self._bench.report("job_refused", job.key, sender=job.sender, text=str(error))
        except (RuntimeError, ValueError) as error:
            # Also out of memory: the flow gives the microbatch up, and this peer goes on.
            origin = short(job.key.microbatch.origin)
            text = "a microbatch of %s is given up: its %s failed: %s"
            _log.warning(text, origin, job.kind, error)
            self._failures += job.key.trains
            self._bench.report("job_failed", job.key)

    def _run(self, job: RunJob) -> None:
        match job.kind:
            case "begin":
                self._begin(job)
            case "forward":
                frame = self._encoded(self._codecs.forward, self._output(job), job)
                self._bench.report("forwarded", job.key, Payload.of(job.tokens, frame))
            case "loss":
                self._loss(job)
            case "backward":
                self._backward(job)
            case "evaluate":
                loss = self.compute.evaluate(self._input(job), _targets(_tokens(job)))
                self._bench.report("evaluated", job.key, _finite(float(loss)))

    def _begin(self, job: RunJob) -> None:
        assert self._draw is not None  # the flow begins microbatches at the first stage alone
        tokens_BT = self._draw(trains=job.key.trains)
        inputs = tokens_BT[:, :-1]
        frame = self._encoded(self._codecs.forward, self._computed(inputs, job), job)
        self._bench.report(
            "began",
            job.key,
            sequences=len(inputs),
            rows=inputs.numel(),
            output=Payload.of(encode_tokens(tokens_BT.numpy()), frame),
        )

    def _output(self, job: RunJob) -> Tensor:
        return self._computed(self._input(job), job)

    def _computed(self, inputs: Tensor, job: RunJob) -> Tensor:
        if not job.key.trains:
            return self.compute.evaluate(inputs)
        return self.compute.forward(inputs, seed=_seed(job.key))

    def _loss(self, job: RunJob) -> None:
        targets_BT = _targets(_tokens(job))
        half = self.compute.loss_and_gradient(self._input(job), targets_BT, seed=_seed(job.key))
        assert half.input_gradient_BTD is not None  # the last stage is not the first one
        assert half.loss is not None
        self._send_back(job, half.input_gradient_BTD, _finite(half.loss))
        self._add(job, half.weights(), half.loss)

    def _backward(self, job: RunJob) -> None:
        inputs = self._input(job)
        shape = (*inputs.shape[:2], self.model.shape.width)
        gradient_BTD = self._decoded(self._codecs.backward, job.gradient, shape)
        half = self.compute.backward(inputs, gradient_BTD, seed=_seed(job.key))
        if half.input_gradient_BTD is not None:
            self._send_back(job, half.input_gradient_BTD, None)
        self._add(job, half.weights(), job.loss)

    def _send_back(self, job: RunJob, gradient_BTD: Tensor, loss: float | None) -> None:
        """Let the gradient of an input travel before those of the weights are computed."""
        frame = self._encoded(self._codecs.backward, gradient_BTD, job)
        self._bench.report("gradient_ready", job.key, Payload.of(b"", frame), loss=loss)

    def _add(self, job: RunJob, found: WeightGradients, loss: float | None) -> None:
        self._failures = 0
        value = math.nan if loss is None else loss
        if job.holds:
            self._held[job.key] = found, value
        else:
            self._count(found, value)
        self._bench.report("finished", job.key)

    def _count(self, found: WeightGradients, loss: float) -> None:
        self.compute.add(found)
        self._busy_tokens += found.tokens
        self._num_counted += 1
        if self._busy_s > RATE_S:  # older ones count ever less
            self._busy_s, self._busy_tokens = self._busy_s / 2, self._busy_tokens / 2
        if math.isfinite(loss):
            self._loss_sum += loss
            self._losses += 1

    def _settle(self, job: SettleHeld) -> None:
        held = self._held.pop(job.key, None)
        if held is not None and job.counts:
            self._count(*held)

    def _input(self, job: RunJob) -> Tensor:
        """Return the tokens of the first stage, or the decoded activations of the others."""
        if self.model.is_first:
            return _tokens(job)[:, :-1]
        tokens_BT = _tokens(job)
        shape = (len(tokens_BT), tokens_BT.shape[1] - 1, self.model.shape.width)
        return self._decoded(self._codecs.forward, job.frame, shape)

    def _encoded(self, codec: ActivationCodec, x_BTD: Tensor, job: RunJob) -> bytes:
        frame = codec.encode(x_BTD.flatten(0, 1), seed=_seed((job.kind, job.key)))
        return frame.numpy().tobytes()

    def _decoded(self, codec: ActivationCodec, frame: bytes, shape: tuple[int, ...]) -> Tensor:
        batch, length, width = shape
        try:
            return codec.decode(frame, batch * length, width).view(shape)
        except CodecError as error:
            raise UnusableFrame(str(error)) from error


def _tokens(job: RunJob) -> Tensor:
    """Return inputs and targets, int64 `(B, T + 1)`."""
    ids = torch.frombuffer(bytearray(job.tokens), dtype=torch.int32)
    return ids.view(job.sequences, -1).to(torch.int64)


def _targets(tokens_BT: Tensor) -> Tensor:
    return tokens_BT[:, 1:].contiguous()


def _finite(loss: float) -> float:
    """Return a loss that may travel; raise ValueError, which gives its microbatch up."""
    if not math.isfinite(loss):
        raise ValueError(f"expected a finite loss, got {loss}")
    return loss


def _seed(name: object) -> int:
    """Return the seed of what a microbatch draws: the same in both of its passes."""
    return int.from_bytes(hashlib.sha256(repr(name).encode()).digest()[:4], "big")
