"""One stage's computations for a microbatch: tensors in, tensors out, in one thread.

    output = compute.forward(inputs)                    keeps no graph
    half = compute.backward(inputs, gradient)           computes the forward pass again
    half = compute.loss_and_gradient(inputs, targets)   instead of both, at the last stage
    send(half.input_gradient_BTD)                       before the gradients of the weights exist
    compute.add(half.weights())
    ...                                                 more microbatches, of any order
    found = compute.finish(clip_norm=1.0)               the mean gradient, in the parameters

A stage keeps nothing of a microbatch between its passes: the caller keeps the inputs. What a stage
draws at random (dropout) follows from the `seed` of the call, which must be the same in both
passes; the built-in models draw nothing. The parameters may have changed between them (the
caller bounds by how many steps); the gradient is that of the present ones.

The gradient of the inputs is computed first, and those of the weights when they are asked for, so
that the stages before can continue meanwhile. torch's pipelines split a backward pass in the same
way, but the functions are private: `input_half` alone uses them, and does without where they are
missing.

Gradients are clipped by the norm of the stage: that of the whole model is known to no peer. The
parameters, the inputs and the outputs are float32, and `Device` chooses the precision between.

# B sequences, T positions, D width, R = B T rows
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from atoll.peer.errors import DeviceError, ModelError
from atoll.peer.training.devices import Device, is_out_of_memory
from atoll.peer.training.stages import StageModel

# Before it, the gradient of a parameter that is used twice in a stage was wrong.
SPLITS_SINCE = "2.13"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WeightGradients:
    """The gradients of a stage's trainable parameters for one microbatch."""

    values: list[Tensor | None]
    """In the parameters' order, None for one that took no part; of the microbatch's mean loss."""
    tokens: int
    """Positions of the microbatch, its weight in the mean."""


@dataclass(frozen=True, kw_only=True)
class Half:
    """A backward pass of which the gradient of the inputs is done and those of weights are not.

    It holds the activations until it is dropped.
    """

    input_gradient_BTD: Tensor | None  # noqa: N815
    """float32, on the stage's device; None at the first stage, whose inputs are tokens."""
    loss: float | None
    """Mean loss of the microbatch in nats, at the last stage."""
    tokens: int
    """Positions of the microbatch."""
    _weights: Callable[[], list[Tensor | None]]

    def weights(self) -> WeightGradients:
        """Compute the gradients of the weights; to be called once."""
        return WeightGradients(values=self._weights(), tokens=self.tokens)


@dataclass(frozen=True, kw_only=True)
class StepGradient:
    """The gradients that `finish` put into the parameters."""

    norm: float
    """L2 norm of the stage's gradient before clipping."""
    microbatches: int
    tokens: int

    @property
    def is_finite(self) -> bool:
        """Return whether the step may be taken."""
        return math.isfinite(self.norm)


class StageCompute:
    """A stage on its device, with the sum of the gradients since the last step."""

    def __init__(self, model: StageModel, device: Device) -> None:
        """Move a stage to a device."""
        device.activate()
        if device.precision == "float16":
            # The scale of the loss would have to be one for all stages.
            _log.warning("a stage cannot compute in float16; on %s it uses float32", device.label)
            device = replace(device, precision="float32")
        self.device = device
        self.model = model.to(device.device)
        self.tokens = self.microbatches = 0
        self._params = [param for param in model.parameters() if param.requires_grad]
        self._sums: list[Tensor | None] = [None] * len(self._params)
        self._unit = 0
        """tokens of the first microbatch in the sum, which counts once"""

    def forward(self, inputs: Tensor, *, seed: int = 0) -> Tensor:
        """Return the output of a stage other than the last.

        Args:
            inputs: `tokens_BT` at the first stage, else `x_BTD`.
            seed: of what the stage draws at random.

        Returns:
            x_BTD, float32, on the stage's device.

        Raises:
            ValueError: the inputs do not fit the model.
        """
        with torch.no_grad():
            return self._output(self._taken(inputs), seed)

    def backward(self, inputs: Tensor, gradient_BTD: Tensor, *, seed: int = 0) -> Half:
        """Compute the gradient of the inputs from that of the output.

        Args:
            inputs: those of the forward pass.
            gradient_BTD: of the microbatch's mean loss, for the output.
            seed: that of the forward pass.

        Raises:
            ValueError: the inputs or the gradient do not fit the model.
        """
        self._expect_stream(gradient_BTD, "a gradient", inputs.shape[:2])
        taken = self._taken(inputs)
        output_BTD = self._output(taken, seed)
        gradient_BTD = gradient_BTD.to(self.device.device, torch.float32)
        return self._half(output_BTD, gradient_BTD, taken)

    def loss_and_gradient(self, inputs: Tensor, targets_BT: Tensor, *, seed: int = 0) -> Half:
        """Compute the loss and the gradient of the inputs, at the last stage.

        Args:
            inputs: `x_BTD`, or `tokens_BT` if the stage is the whole model.
            targets_BT: int64, the token after each position.
            seed: of what the stage draws at random.

        Raises:
            ValueError: the inputs or the targets do not fit the model.
        """
        taken = self._taken(inputs)
        loss = self._loss(taken, targets_BT, seed)
        half = self._half(loss, None, taken)
        return replace(half, loss=float(loss.detach()))  # waits for the device

    def evaluate(self, inputs: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Return the output of a stage, without dropout.

        Args:
            inputs: `tokens_BT` at the first stage, else `x_BTD`.
            targets_BT: for the loss, at the last stage.

        Returns:
            `x_BTD`; at the last stage the logits, or the mean loss if there are targets.

        Raises:
            ValueError: the inputs or the targets do not fit the model.
        """
        with torch.no_grad():
            taken = self._taken(inputs)
            targets_BT = None if targets_BT is None else self._taken_tokens(targets_BT)
            return self._computed(taken, targets_BT, trains=False)

    def add(self, gradients: WeightGradients) -> None:
        """Add the gradients of a microbatch to the sum, weighted by its tokens.

        The sum may take over the tensors, so the caller must not use them any more.
        """
        self._unit = self._unit or gradients.tokens
        weight = gradients.tokens / self._unit  # 1 for equal microbatches, without rounding
        for index, value in enumerate(gradients.values):
            if value is None:
                continue
            held = self._sums[index]
            if held is None:
                self._sums[index] = value if weight == 1 else value.mul_(weight)
            else:
                held.add_(value, alpha=weight)
        self.tokens += gradients.tokens
        self.microbatches += 1

    def finish(self, *, clip_norm: float = 0.0) -> StepGradient:
        """Put the mean gradient of the microbatches in the parameters, and begin a new sum.

        Args:
            clip_norm: largest norm of the stage's gradient; 0 clips nothing.

        Raises:
            ValueError: nothing was added.
        """
        if not self.microbatches:
            raise ValueError("expected at least one microbatch before a step, got none")
        share = self.tokens / self._unit  # how many microbatches, if they are equal
        for param, total in zip(self._params, self._sums, strict=True):
            param.grad = None if total is None else total.div_(share)
        norm = torch.nn.utils.clip_grad_norm_(self._params, clip_norm or math.inf)
        found = StepGradient(norm=float(norm), microbatches=self.microbatches, tokens=self.tokens)
        self.clear()
        return found

    def clear(self) -> None:
        """Drop the sum."""
        self._sums = [None] * len(self._params)
        self._unit = self.tokens = self.microbatches = 0

    def _half(self, output: Tensor, gradient: Tensor | None, taken: Tensor) -> Half:
        rows = taken.shape[0] * taken.shape[1]
        if self.model.is_first:
            # No stage waits for a gradient, so there is nothing to do first.
            return Half(
                input_gradient_BTD=None,
                loss=None,
                tokens=rows,
                _weights=lambda: _gradients(output, self._params, gradient),
            )
        input_gradient_BTD, weights = input_half(output, gradient, taken, self._params)
        return Half(input_gradient_BTD=input_gradient_BTD, loss=None, tokens=rows, _weights=weights)

    def _output(self, taken: Tensor, seed: int) -> Tensor:
        if self.model.is_last:
            raise ValueError(f"the {self.model.title} is the last one; call loss_and_gradient")
        self._seed(seed)
        return self._computed(taken, None, trains=True)

    def _loss(self, taken: Tensor, targets_BT: Tensor, seed: int) -> Tensor:
        targets_BT = self._taken_tokens(targets_BT)
        self._seed(seed)
        return self._computed(taken, targets_BT, trains=True)

    def _seed(self, seed: int) -> None:
        if self.device.device.type == "cpu":
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)  # of all devices, which takes 1 ms where there are none

    def _computed(self, taken: Tensor, targets_BT: Tensor | None, *, trains: bool) -> Tensor:
        if targets_BT is not None and not self.model.is_last:
            raise ValueError(f"the {self.model.title} is not the last one; expected no targets")
        if targets_BT is not None and targets_BT.shape != taken.shape[:2]:
            raise ValueError(
                f"expected a target for each of {tuple(taken.shape[:2])} positions, got shape "
                f"{tuple(targets_BT.shape)}"
            )
        if self.model.training != trains:
            self.model.train(trains)
        with self.device.autocast():
            output: Tensor = self.model(taken, targets_BT)
        if not self.model.is_last:
            self._expect_stream(output, "an output", taken.shape[:2])
        elif targets_BT is not None and output.dim():
            raise ModelError(
                f"the last slice must return a scalar if it is given targets, got shape "
                f"{tuple(output.shape)}"
            )
        return output.float()

    def _taken(self, inputs: Tensor) -> Tensor:
        """Return inputs on the device; all but tokens as a leaf that gets a gradient."""
        if self.model.is_first:
            return self._taken_tokens(inputs)
        self._expect_stream(inputs, "an input", inputs.shape[:2])
        return inputs.detach().to(self.device.device, torch.float32).requires_grad_()

    def _taken_tokens(self, tokens_BT: Tensor) -> Tensor:
        shape = self.model.shape
        if tokens_BT.dtype != torch.int64 or tokens_BT.dim() != 2 or not tokens_BT.numel():
            raise ValueError(
                f"expected int64 tokens of shape (B, T), got {tokens_BT.dtype} of shape "
                f"{tuple(tokens_BT.shape)}"
            )
        self._expect_length(tokens_BT)
        least, most = int(tokens_BT.min()), int(tokens_BT.max())
        if least < 0 or most >= shape.vocab_size:  # CUDA would end the process
            raise ValueError(
                f"expected tokens from 0 to {shape.vocab_size - 1}, got {least} to {most}"
            )
        return self.device.put(tokens_BT)

    def _expect_stream(self, x_BTD: Tensor, what: str, positions: Sequence[int]) -> None:
        width = self.model.shape.width
        expected = (*positions, width)
        if not x_BTD.is_floating_point() or not x_BTD.numel() or tuple(x_BTD.shape) != expected:
            raise ValueError(
                f"expected {what} of floating-point values of shape (B, T, {width}), got "
                f"{x_BTD.dtype} of shape {tuple(x_BTD.shape)}"
            )
        self._expect_length(x_BTD)

    def _expect_length(self, inputs: Tensor) -> None:
        if inputs.shape[1] > self.model.shape.seq_len:
            raise ValueError(
                f"expected at most {self.model.shape.seq_len} positions, got {inputs.shape[1]}"
            )


def expect_runs(title: str, compute: StageCompute, *, sequences: int) -> None:
    """Run a forward and a backward pass of the run's size on the stage's device.

    The stage's parameters and its sum of gradients remain as they are.

    Args:
        title: of the model, for messages.
        compute: the stage.
        sequences: of a microbatch.

    Raises:
        ModelError: a slice breaks the contract.
        DeviceError: the device has too little memory.
    """
    shape = compute.model.shape
    tokens_BT = torch.arange(sequences * shape.seq_len).view(sequences, -1) % shape.vocab_size
    x_BTD = torch.linspace(-1, 1, tokens_BT.numel() * shape.width)
    x_BTD = x_BTD.view(sequences, shape.seq_len, shape.width)
    inputs = tokens_BT if compute.model.is_first else x_BTD
    try:
        if compute.model.is_last:
            compute.loss_and_gradient(inputs, tokens_BT).weights()
        else:
            compute.backward(inputs, torch.ones_like(compute.forward(inputs))).weights()
    except ModelError as error:
        raise ModelError(f"{title}: {error}") from error
    except Exception as error:
        if isinstance(error, RuntimeError) and is_out_of_memory(error):
            raise DeviceError(
                f"{title}: the {compute.model.title} does not fit on {compute.device.label} with "
                f"microbatches of {sequences} x {shape.seq_len} tokens: out of memory; end other "
                "programs that use this device, or choose another one with --device"
            ) from error
        raise ModelError(
            f"{title}: the {compute.model.title} failed on inputs of shape {tuple(inputs.shape)}: "
            f"{type(error).__name__}: {error}"
        ) from error


def input_half(
    output: Tensor, gradient: Tensor | None, inputs: Tensor, params: Sequence[nn.Parameter]
) -> tuple[Tensor, Callable[[], list[Tensor | None]]]:
    """Compute the gradient of the inputs, and leave those of the parameters for later.

    Args:
        output: of the forward pass.
        gradient: of the output; None if that is a scalar, the loss itself.
        inputs: a leaf.
        params: leaves; their `grad` remains as it is.

    Returns:
        The gradient of the inputs, and the function that computes those of the parameters, which
        can be called once.

    Raises:
        ModelError: the output does not depend on the inputs.
    """
    halves = _torch_halves()
    if halves is None:
        (found,) = torch.autograd.grad(
            output, [inputs], gradient, retain_graph=True, allow_unused=True
        )
        return _existing(found), lambda: _gradients(output, params, gradient)
    input_of, weights_of = halves
    if output._is_view():  # torch detaches the output in place
        output = output.clone()
    outer = None if gradient is None else [gradient]
    (found,), groups = input_of([output], outer, [inputs], iter(params))
    inputs.grad = None

    def weights() -> list[Tensor | None]:
        before = [param.grad for param in params]
        for param in params:
            param.grad = None
        try:
            weights_of(iter(params), groups)
            return [param.grad for param in params]
        finally:
            for param, kept in zip(params, before, strict=True):
                param.grad = kept

    return _existing(found), weights


@cache
def _torch_halves() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return torch's functions for the two halves of a backward pass; None without good ones."""
    if torch.__version__ < SPLITS_SINCE:
        return None
    try:  # here, because the import takes a second
        from torch.distributed.pipelining._backward import (
            stage_backward_input,
            stage_backward_weight,
        )
    except ImportError:
        return None
    return stage_backward_input, stage_backward_weight


def _gradients(
    output: Tensor, params: Sequence[nn.Parameter], gradient: Tensor | None
) -> list[Tensor | None]:
    return list(torch.autograd.grad(output, params, gradient, allow_unused=True))


def _existing(found: Tensor | None) -> Tensor:
    if found is None:
        raise ModelError("the output of a stage does not depend on its inputs")
    return found
