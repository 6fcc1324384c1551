"""AdamW with moments of 8 bits, by the package torchao: 2 bytes a parameter instead of 8.

Blocks of 256 values share a scale (arXiv:2110.02861); tensors of fewer than 4,096 values stay in
float32. Departures from the library's class: the learning rate is a number, as of any optimizer of
torch; a state holds plain tensors and numbers, so that it can be saved without pickle; on a CPU,
where compiling takes a minute, the steps are not compiled.
"""

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.optim import Optimizer

from atoll.optim.methods.base import MethodError

PARTS = ("codes", "scale", "qmap")  # tensors of a quantized one


def adamw_8bit(groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float]) -> Optimizer:
    """Return an AdamW over parameter groups.

    Raises:
        MethodError: the package is not installed, or is too old for this torch.
    """
    try:
        library: Any = importlib.import_module("torchao.optim")
        quantized: Any = importlib.import_module("torchao.optim.subclass_8bit").OptimState8bit
    except ImportError as error:
        raise MethodError(
            "inner.state = '8bit' needs the package 'torchao', which is not installed or too old "
            f"({error}); install it with: pip install torchao"
        ) from error

    class AdamW8bit(library.AdamW8bit):  # type: ignore[misc]  # a class that may be absent
        @torch.no_grad()
        def step(self, closure: Callable[[], float] | None = None) -> float | None:
            rates = [group["lr"] for group in self.param_groups]
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = torch.tensor(rate, dtype=torch.float32)
            on_cpu = self.param_groups[0]["params"][0].device.type == "cpu"
            try:
                with torch.compiler.set_stance("force_eager") if on_cpu else nullcontext():
                    loss: float | None = super().step(closure)
            finally:
                for group, rate in zip(self.param_groups, rates, strict=True):
                    group["lr"] = rate
            return loss

        def state_dict(self) -> dict[str, Any]:
            state: dict[str, Any] = super().state_dict()
            moments = {
                index: {name: _plain(value, quantized) for name, value in of_param.items()}
                for index, of_param in state["state"].items()
            }
            return state | {"state": moments}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            moments = {
                index: {name: _rebuilt(value, quantized) for name, value in of_param.items()}
                for index, of_param in state_dict["state"].items()
            }
            super().load_state_dict(state_dict | {"state": moments})

    made = AdamW8bit(groups, lr=lr, betas=betas)
    for group in made.param_groups:  # the library makes tensors of them
        group["lr"] = lr
    optimizer: Optimizer = made
    return optimizer


def _plain(value: Any, quantized: Any) -> Any:  # noqa: ANN401 - a tensor or what stands for one
    if not isinstance(value, quantized):
        return value
    tensors = {name: getattr(value, name) for name in PARTS}
    return tensors | {"signed": value.signed, "dtype": str(value.dtype).removeprefix("torch.")}


def _rebuilt(value: Any, quantized: Any) -> Any:  # noqa: ANN401 - as `_plain`
    if not isinstance(value, dict):
        return value
    tensors = (value[name] for name in PARTS)
    return quantized(*tensors, value["signed"], getattr(torch, value["dtype"]))
