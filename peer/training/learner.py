"""The inner half of training: gradients, learning rate and optimizer, and held-out loss.

Nothing here knows of other peers: the trainer puts a method around a `Learner`, the baseline does
not.

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
from atoll.optim.inner.choose import build
from atoll.optim.methods.base import InnerName
from atoll.optim.state.layout import Layout
from atoll.peer.training import models
from atoll.peer.training.devices import Device

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """What a backward pass came to; the gradient itself lies in the parameters."""

    loss: float
    """Mean loss in nats."""
    norm: float
    """L2 norm before clipping."""

    @property
    def is_finite(self) -> bool:
        """Whether the step may be taken."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)


class Learner:
    """A model on a device with its inner optimizer, its schedule and its clipping."""

    def __init__(
        self,
        model: nn.Module,
        inner: InnerSection,
        device: Device,
        *,
        total_steps: int,
        optimizer: InnerName = "adamw",
    ) -> None:
        """Move the model to the device and make its optimizer.

        Args:
            model: as in `atoll.peer.training.models`.
            inner: the inner section of the spec.
            device: where to train.
            total_steps: of the run, 0 for one without an end.
            optimizer: which one trains.
        """
        self.model = model.to(device.device)
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
        """Compute the mean gradient over micro-batches, clipped, and set the step's rate.

        Args:
            batches: int64 tokens ``(B, T + 1)`` each.
            step: of the run, for the schedule.
        """
        rate = self._inner.rate.at(step, self._total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.clear()
        loss = torch.zeros((), device=self.device.device)
        for batch in batches:
            loss += self._backward(batch, len(batches))
        norm = torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), self._inner.clip_norm or math.inf
        )
        loss_value, norm_value = torch.stack((loss, norm.float())).tolist()  # one wait for the GPU
        return Gradient(loss=loss_value, norm=norm_value)

    def clear(self) -> None:
        """Forget the gradient."""
        self.optimizer.zero_grad(set_to_none=True)

    def _backward(self, batch: Tensor, parts: int) -> Tensor:
        tokens_BT = batch.to(self.device.device, non_blocking=True)
        try:
            return self._accumulate(tokens_BT, parts)
        except Exception as error:
            if not _is_of_compiler(error):
                raise
            _log.warning("torch.compile failed here, training goes on without it: %s", error)
            self._forward = self.model
            return self._accumulate(tokens_BT, parts)

    def _accumulate(self, tokens_BT: Tensor, parts: int) -> Tensor:
        with self.device.autocast():
            loss = models.loss_of(self._forward, tokens_BT[:, :-1], tokens_BT[:, 1:]) / parts
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach().float()


class Evaluator:
    """The loss on fixed batches, with a copy of the model that training does not touch."""

    def __init__(self, model: nn.Module, batches: Iterable[Tensor], device: Device) -> None:
        """Copy the model.

        Args:
            model: not compiled.
            batches: int64 tokens ``(B, T + 1)``.
            device: where to compute.
        """
        self._model = copy.deepcopy(model).to(device.device).eval()
        self._layout = Layout.of(self._model)
        self._batches, self._device = list(batches), device

    @property
    def num_batches(self) -> int:
        """How many batches each measurement takes."""
        return len(self._batches)

    def loss(self, params_N: Tensor, *, between: Callable[[], object] = lambda: None) -> float:
        """Return the mean loss in nats a token.

        Args:
            params_N: parameters in the order of the model's layout.
            between: called before each batch; what it raises ends the measurement.
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


def _is_of_compiler(error: Exception) -> bool:
    """Whether torch.compile failed; told by its module's name, which takes 2 s to import."""
    return any(kind.__module__.startswith("torch._dynamo") for kind in type(error).__mro__)
