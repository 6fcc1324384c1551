"""Checks of training loops that people write around a worker, and several optimizers as one.

A loop can do what no method expects and no error shows: step the inner optimizer as well, learn
something in a buffer, which no peer sends. The worker watches for both.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.optim.state.layout import LayoutError

NAMED = 3  # buffers in a warning; a ResNet has a hundred


class Several(Optimizer):
    """Optimizers over different parameters of one model, stepped together."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        """Combine them; each keeps its own options and state.

        Raises:
            ValueError: when there is none, or two of them train one parameter.
        """
        if not optimizers:
            raise ValueError("expected at least one optimizer, got an empty list")
        params = [p for each in optimizers for group in each.param_groups for p in group["params"]]
        if len({id(p) for p in params}) < len(params):
            raise ValueError("expected each parameter in one optimizer, got one in two of them")
        super().__init__(params, {})
        self.optimizers = tuple(optimizers)
        self.param_groups = groups_of(self)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step each."""
        for each in self.optimizers:
            each.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of each."""
        for each in self.optimizers:
            each.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all, in their order."""
        return {"optimizers": [each.state_dict() for each in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave.

        Raises:
            ValueError: when it is of another number of optimizers.
        """
        for each, saved in zip(self.optimizers, state_dict["optimizers"], strict=True):
            each.load_state_dict(saved)
        self.param_groups = groups_of(self)  # loading makes new ones


def as_one(inner: Optimizer | Sequence[Optimizer]) -> Optimizer:
    """Return one optimizer for one or several.

    Raises:
        ValueError: when one of them needs a closure, or two train one parameter.
    """
    parts = list(inner) if isinstance(inner, Sequence) else [inner]
    if any(isinstance(each, torch.optim.LBFGS) for each in parts):
        raise ValueError(
            "expected an optimizer that steps on gradients, got LBFGS, which calls a closure"
        )
    return Several(parts) if isinstance(inner, Sequence) else inner


def parts_of(inner: Optimizer) -> Sequence[Optimizer]:
    """Return the optimizers that `as_one` was given."""
    return inner.optimizers if isinstance(inner, Several) else [inner]


def groups_of(inner: Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups of one or several, as they are now."""
    if not isinstance(inner, Several):
        return inner.param_groups
    return [group for each in inner.optimizers for group in each.param_groups]


def expect_optimizer_of(model: nn.Module, inner: Optimizer) -> None:
    """Check that an optimizer trains some parameters of a model.

    Raises:
        LayoutError: when it trains none of them.
    """
    held = {id(p) for group in inner.param_groups for p in group["params"]}
    if held.isdisjoint(map(id, model.parameters())):
        raise LayoutError("expected an optimizer over this model's parameters, got another's")


class StepWatch:
    """Counts the steps of inner optimizers that their worker did not take.

    It knows no worker: the hook stays with the optimizer, and would keep the model alive.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        """Hook into each optimizer; those that wrap another have no hooks."""
        self.others = 0
        """Steps since the last `reset`."""
        self._is_own = False
        for each in optimizers:
            with suppress(AttributeError):
                each.register_step_post_hook(self._stepped)

    @contextmanager
    def own(self) -> Iterator[None]:
        """Do not count the steps in the block."""
        self._is_own = True
        try:
            yield
        finally:
            self._is_own = False

    def reset(self) -> None:
        """Count from 0."""
        self.others = 0

    def _stepped(self, *_: object) -> None:
        self.others += not self._is_own


class BufferWatch:
    """Finds the buffers that training changes, by their sums: a constant table is no news."""

    def __init__(self, model: nn.Module) -> None:
        """Note what the buffers hold."""
        self._before = _sums(model)

    def changed(self, model: nn.Module) -> list[str]:
        """Return the names of floating point buffers that hold something else now."""
        return [
            name
            for name, value in _sums(model).items()
            if not math.isclose(value, self._before.get(name, value), rel_tol=1e-9)
            and not (math.isnan(value) and math.isnan(self._before[name]))
        ]


def _sums(model: nn.Module) -> dict[str, float]:
    buffers = ((n, b) for n, b in model.named_buffers() if b.is_floating_point() and b.numel())
    # On the CPU: MPS has no float64.
    return {name: float(buffer.detach().cpu().double().sum()) for name, buffer in buffers}


def named(names: Sequence[str]) -> str:
    """Name the first few."""
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


def unscale_(inner: Optimizer, scale: Tensor) -> None:
    """Divide the gradients by the scale of a gradient scaler."""
    factor = 1.0 / float(scale)
    for group in inner.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                param.grad.mul_(factor)
