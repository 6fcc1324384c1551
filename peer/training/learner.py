"""Inner steps of one model: gradient, learning rate, optimizer; and its loss on held-out text.

This module knows no other peers. The trainer combines a `Learner` with a method; the baseline of
the lab uses it alone.

# B sequences, T positions, N parameters
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from atoll.compression import staging
from atoll.coordinator.run.sections import InnerSection
from atoll.optim.inner import build
from atoll.optim.methods.base import InnerName
from atoll.optim.ranks import RanksError
from atoll.optim.state import dtensors, vectors
from atoll.optim.state.layout import Layout
from atoll.peer.errors import DeviceError
from atoll.peer.training import models
from atoll.peer.training.devices import Device, is_out_of_memory
from atoll.peer.training.fit import Fit, pieces
from atoll.peer.training.ranks import OneRank

ALIGNED = 64  # bytes: a multiple of the width of every dtype

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """Loss and norm of one step; the gradient itself is in the parameters."""

    loss: float
    """Mean loss in nats."""
    norm: float
    """L2 norm before clipping."""
    tokens: int
    """Positions behind it."""

    @property
    def is_finite(self) -> bool:
        """Return whether loss and norm are finite, so that the step may be taken."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)


class StartSmaller(RanksError):
    """A rank is out of memory within a step of a model that is cut over ranks.

    All have to start again, and take the smaller fit.
    """

    def __init__(self, fit: Fit) -> None:
        """Name what to start with."""
        super().__init__(f"out of memory; all ranks start again with {fit}")
        self.fit = fit


class Learner:
    """A model on its device, with its inner optimizer, schedule and gradient clipping."""

    def __init__(
        self,
        model: nn.Module,
        inner: InnerSection,
        device: Device,
        *,
        total_steps: int,
        optimizer: InnerName = "adamw",
        ranks: OneRank | None = None,
    ) -> None:
        """Move the model to the device and create its optimizer.

        Args:
            model: a module that meets the contract of `atoll.peer.training.models`.
            inner: the inner section of the spec.
            device: device to train on.
            total_steps: inner steps of the run; 0 for a run without an end.
            optimizer: name of the inner optimizer.
            ranks: the processes that train the model together; this one alone by default.
        """
        device.activate()
        self._ranks = ranks or OneRank()
        self.model = self._ranks.place(model, device.device)
        self.device = device
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
        self.scale = 1.0
        """Factor of the schedule's learning rate."""
        self._scaler = device.scaler()
        self._forward: nn.Module = self.model
        if inner.compile:
            self._forward = cast(nn.Module, torch.compile(self.model))

    def gradient(
        self, batches: Sequence[Tensor], *, step: int, seed: int | None = None
    ) -> Gradient:
        """Compute the clipped mean gradient of micro-batches and set the learning rate.

        If the device runs out of memory, `fit` becomes smaller for good, and the step is repeated;
        on all ranks if that happens to one.

        Args:
            batches: int64 tokens `(B, T + 1)` each.
            step: step of the run that the schedule follows.
            seed: seeds dropout; None continues with torch's random state.

        Raises:
            DeviceError: the device does not hold a single sequence.
            StartSmaller: this rank is out of memory while others wait for its part of the model.
        """
        rate = self.scale * self._inner.rate.at(step, self._total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        tried = self.fit
        while (found := self._attempt(batches, seed)) is None:
            self.clear()
            self.device.release()
            self.use(self._smaller())
        if self.fit != tried:
            _log.warning(
                "out of memory on %s with %s; this peer continues with %s, and the batch of a step "
                "stays the run's",
                self.device.label,
                tried,
                self.fit,
            )
        return found

    def use(self, fit: Fit) -> None:
        """Compute gradients in this way from now on."""
        if fit.recompute:
            models.recompute_activations(self.model)
        self.fit = fit

    def clear(self) -> None:
        """Drop the gradient."""
        self.optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Return what a restart on the same device needs beside model and optimizer."""
        state: dict[str, Any] = {"device": self.device.label, "fit": self.fit.to_dict()}
        return state | ({"scaler": self._scaler.state_dict()} if self._scaler is not None else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; another device finds a fit of its own.

        Raises:
            SavedStateError: the state is of another batch.
        """
        if state["device"] == self.device.label:
            self.use(Fit.from_dict(state["fit"], self._inner.batch_size))
        if self._scaler is not None and "scaler" in state:
            self._scaler.load_state_dict(dict(state["scaler"]))

    def _attempt(self, batches: Sequence[Tensor], seed: int | None) -> Gradient | None:
        """Return a gradient; None if this rank, or another, was out of memory."""
        loss = self._in_memory(lambda: self._accumulated(batches, seed))
        # Here no rank waits for another yet, unless the model is cut.
        if not self._ranks.all_of(loss is not None) or loss is None:
            return None
        if self._ranks.size > 1:
            return self._clipped(loss, batches)
        return self._in_memory(lambda: self._clipped(loss, batches))

    def _in_memory(self, compute: Callable[[], T]) -> T | None:
        """Return what is computed; None if the memory was not enough.

        Outside, since within a handler the traceback keeps the activations alive.
        """
        try:
            return compute()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if self._ranks.is_cut:
                # The others are in the middle of gathering the model, and cannot repeat the step.
                raise StartSmaller(self._smaller()) from error
            return None

    def _accumulated(self, batches: Sequence[Tensor], seed: int | None) -> Tensor:
        """Compute this rank's gradient; return its loss."""
        self.clear()
        if seed is not None:
            torch.manual_seed(seed)
        sequences = sum(map(len, batches))
        loss = torch.zeros((), device=self.device.device)
        parts = list(pieces(batches, self.fit.sequences))
        for number, piece in enumerate(parts, start=1):
            self._ranks.expect_backward(self.model, is_last=number == len(parts))
            # The quotient of equal pieces is a whole number, without rounding.
            loss += self._backward(piece, sequences / len(piece))
        return loss

    def _clipped(self, loss: Tensor, batches: Sequence[Tensor]) -> Gradient:
        """Average the gradient over the ranks, and clip it."""
        self._ranks.average_(self.model)
        loss = self._ranks.mean(loss)
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        # A clip norm of 0 clips nothing; the norm is measured all the same.
        norm = torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), self._inner.clip_norm or math.inf
        )
        norm = dtensors.whole(norm).float()
        both = torch.stack((loss, norm)).cpu()  # one wait for the GPU
        if self._scaler is not None:
            self._scaler.update()  # after an overflow, whose norm is not finite, scale less
        loss_value, norm_value = both.tolist()
        tokens = sum(batch[:, 1:].numel() for batch in batches)
        return Gradient(loss=loss_value, norm=norm_value, tokens=tokens)

    def _smaller(self) -> Fit:
        can_recompute = models.can_recompute(self.model)
        smaller = self.fit.smaller(self._inner.batch_size, can_recompute=can_recompute)
        if smaller is None:
            raise DeviceError(
                f"the model does not fit on {self.device.label}: out of memory with {self.fit}; "
                "end other programs that use this device, or choose another one with --device"
            )
        return smaller

    def _backward(self, piece: Tensor, share: float) -> Tensor:
        tokens_BT = self.device.put(piece)
        try:
            # `torch.compile` only wraps the model: the first call compiles, and may fail.
            return self._accumulate(tokens_BT, share)
        except Exception as error:
            if not _is_compiler_error(error):
                raise
            _log.warning("torch.compile failed; training continues without it: %s", error)
            self._forward = self.model
            return self._accumulate(tokens_BT, share)

    def _accumulate(self, tokens_BT: Tensor, share: float) -> Tensor:
        with self.device.autocast():
            loss = models.loss_of(self._forward, tokens_BT[:, :-1], tokens_BT[:, 1:]) / share
        scaled = loss if self._scaler is None else self._scaler.scale(loss)
        scaled.backward()  # type: ignore[no-untyped-call]
        return loss.detach().float()


class Evaluator:
    """Measures the loss of given parameters on fixed batches, in a model that is in use.

    The model's own values wait in host memory meanwhile, so its device holds one model.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Tensor],
        device: Device,
        *,
        fit: Callable[[], Fit | None] = lambda: None,
    ) -> None:
        """Move the model to the device.

        Args:
            model: a module that is not compiled.
            batches: int64 tokens `(B, T + 1)` each.
            device: device to compute on.
            fit: returns how many sequences the device holds at once; by default whole batches.
        """
        self._model = model.to(device.device)
        self._layout = Layout.of(model)
        self._batches, self._device, self._fit = list(batches), device, fit

    @property
    def num_batches(self) -> int:
        """Number of batches that each measurement takes."""
        return len(self._batches)

    def loss(self, params_N: Tensor, *, between: Callable[[], object] = lambda: None) -> float:
        """Return the mean loss in nats per token; leave the model as it was.

        Args:
            params_N: parameters in the order of the model's layout.
            between: called before each batch; an exception from it ends the measurement.
        """
        fit, total = self._fit(), 0.0
        with _put_back(self._model), torch.no_grad(), self._device.autocast():
            self._layout.load_(self._model, params_N)
            self._model.eval()
            for batch in self._batches:
                between()
                for piece in pieces([batch], fit.sequences if fit else len(batch)):
                    tokens_BT = self._device.put(piece)
                    loss = models.loss_of(self._model, tokens_BT[:, :-1], tokens_BT[:, 1:])
                    total += float(loss.cpu()) * len(piece)
        return total / sum(map(len, self._batches))


@contextmanager
def _put_back(model: nn.Module) -> Iterator[None]:
    """Give a model its values and modes back, whatever happens in between."""
    modes = [(module, module.training) for module in model.modules()]
    held = [*(param for param in model.parameters() if param.requires_grad), *model.buffers()]
    values = _copies([value.detach() for value in held])
    try:
        yield
    finally:
        with torch.no_grad():
            pairs = list(zip(values, held, strict=True))
            staging.to_device(pair for pair in pairs if pair[1].is_contiguous())
            for before, value in pairs:
                if not value.is_contiguous():
                    value.copy_(before)
        for module, training in modes:
            module.training = training


def _copies(values: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors to host memory that is used again."""
    sizes = [-(-value.numel() * value.element_size() // ALIGNED) * ALIGNED for value in values]
    places = torch.split(vectors.empty(sum(sizes) // 4).view(torch.uint8), sizes)
    copies = [
        place[: value.numel() * value.element_size()].view(value.dtype).view(value.shape)
        for place, value in zip(places, values, strict=True)
    ]
    staging.to_host((value.contiguous(), copy) for value, copy in zip(values, copies, strict=True))
    return copies


def _is_compiler_error(error: Exception) -> bool:
    # Compares names of modules because importing torch._dynamo takes 2 s.
    return any(kind.__module__.startswith("torch._dynamo") for kind in type(error).__mro__)
