"""Inner steps of one model: gradient, learning rate, optimizer; and its loss on held-out text.

This module knows no other peers. The trainer combines a `Learner` with a method; the baseline of
the lab uses it alone.

# B sequences, T positions, N parameters
"""

import copy
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from atoll.coordinator.run.sections import InnerSection
from atoll.optim.inner import build
from atoll.optim.methods.base import InnerName
from atoll.optim.state import dtensors
from atoll.optim.state.layout import Layout
from atoll.peer.training import models
from atoll.peer.training.devices import Device
from atoll.peer.training.ranks import OneRank

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """Loss and norm of one step; the gradient itself is in the parameters."""

    loss: float
    """Mean loss in nats."""
    norm: float
    """L2 norm before clipping."""

    @property
    def is_finite(self) -> bool:
        """Return whether loss and norm are finite, so that the step may be taken."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)


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
        self._ranks = ranks or OneRank()
        self.model = self._ranks.place(model, device.device)
        self.device = device
        self.optimizer = build(
            optimizer,
            self.model,
            lr=inner.lr,
            betas=(inner.beta1, inner.beta2),
            weight_decay=inner.weight_decay,
            fused=True if device.device.type in ("cpu", "cuda") else None,
        )
        self._inner, self._total_steps = inner, total_steps
        self._forward: nn.Module = self.model
        if inner.compile:
            self._forward = cast(nn.Module, torch.compile(self.model))

    def gradient(self, batches: Sequence[Tensor], *, step: int) -> Gradient:
        """Compute the clipped mean gradient of micro-batches and set the learning rate.

        Args:
            batches: int64 tokens `(B, T + 1)` each.
            step: step of the run that the schedule follows.
        """
        rate = self._inner.rate.at(step, self._total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.clear()
        loss = torch.zeros((), device=self.device.device)
        for number, batch in enumerate(batches, start=1):
            self._ranks.expect_backward(self.model, is_last=number == len(batches))
            loss += self._backward(batch, len(batches))
        self._ranks.average_(self.model)
        loss = self._ranks.mean(loss)
        # A clip norm of 0 clips nothing; the norm is measured all the same.
        norm = torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), self._inner.clip_norm or math.inf
        )
        norm = dtensors.whole(norm).float()
        loss_value, norm_value = torch.stack((loss, norm)).tolist()  # one wait for the GPU
        return Gradient(loss=loss_value, norm=norm_value)

    def clear(self) -> None:
        """Drop the gradient."""
        self.optimizer.zero_grad(set_to_none=True)

    def _backward(self, batch: Tensor, parts: int) -> Tensor:
        tokens_BT = batch.to(self.device.device, non_blocking=True)
        try:
            # `torch.compile` only wraps the model: the first call compiles, and may fail.
            return self._accumulate(tokens_BT, parts)
        except Exception as error:
            if not _is_compiler_error(error):
                raise
            _log.warning("torch.compile failed; training continues without it: %s", error)
            self._forward = self.model
            return self._accumulate(tokens_BT, parts)

    def _accumulate(self, tokens_BT: Tensor, parts: int) -> Tensor:
        with self.device.autocast():
            loss = models.loss_of(self._forward, tokens_BT[:, :-1], tokens_BT[:, 1:]) / parts
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach().float()


class Evaluator:
    """Measures the loss on fixed batches with its own copy of the model."""

    def __init__(self, model: nn.Module, batches: Iterable[Tensor], device: Device) -> None:
        """Copy the model to the device.

        Args:
            model: a module that is not compiled.
            batches: int64 tokens `(B, T + 1)` each.
            device: device to compute on.
        """
        self._model = copy.deepcopy(model).to(device.device).eval()
        self._layout = Layout.of(self._model)
        self._batches, self._device = list(batches), device

    @property
    def num_batches(self) -> int:
        """Number of batches that each measurement takes."""
        return len(self._batches)

    def loss(self, params_N: Tensor, *, between: Callable[[], object] = lambda: None) -> float:
        """Return the mean loss in nats per token.

        Args:
            params_N: parameters in the order of the model's layout.
            between: called before each batch; an exception from it ends the measurement.
        """
        self._layout.load_(self._model, params_N)
        total = torch.zeros((), dtype=torch.float64)
        with torch.no_grad(), self._device.autocast():
            for batch in self._batches:
                between()
                tokens_BT = batch.to(self._device.device)
                loss = models.loss_of(self._model, tokens_BT[:, :-1], tokens_BT[:, 1:])
                total += loss.double().cpu()
        return float(total) / len(self._batches)


def _is_compiler_error(error: Exception) -> bool:
    # Compares names of modules because importing torch._dynamo takes 2 s.
    return any(kind.__module__.startswith("torch._dynamo") for kind in type(error).__mro__)
