"""AdamW with moments of 8 bits, by the package torchao: 2 bytes a parameter instead of 8.

Blocks of 256 values share a scale (arXiv:2110.02861); tensors of fewer than 4,096 values stay in
float32. Departures from the library's class: the learning rate is a number, as of any optimizer of
torch; a state holds plain tensors and numbers, so that it can be saved without pickle; on a CPU,
where compiling takes a minute, the library's arithmetic is not compiled, and runs over pieces of a
tensor, because it takes 55 bytes for each value that it moves at once; a tensor that is cut over
ranks has 8 bits on all of them or on none, so that blocks are those of the whole tensor and another
number of ranks can load them.

A moment in a state is a tensor, or a dict of what follows, each whole or in parts:

    codes    uint8, in the parameter's shape
    scale    fp32, one for each block of the tensor as it lies flat
    qmap     fp32, the 256 values that codes stand for
    signed, dtype
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from atoll.optim.methods.base import MethodError
from atoll.optim.state import dtensors
from atoll.optim.state.parts import part_here

TENSORS = ("codes", "scale", "qmap")  # of a quantized one
BLOCK = 256  # values
LEAST = 4096  # values of a tensor that has 8 bits; both numbers are the library's
AT_ONCE = 1 << 16  # values that a thread of a CPU moves at once, in 3.6 MB; a multiple of BLOCK


def adamw_8bit(groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float]) -> Optimizer:
    """Return an AdamW over parameter groups.

    Raises:
        MethodError: the package is not installed, or is too old for this torch.
    """
    try:
        library: Any = importlib.import_module("torchao.optim")
        move: Any = importlib.import_module("torchao.optim.adam").single_param_adam
        quantized: Any = importlib.import_module("torchao.optim.subclass_8bit").OptimState8bit
    except (ImportError, AttributeError) as error:
        raise MethodError(
            "inner.state = '8bit' needs the package 'torchao', which is not installed or too old "
            f"({error}); install it with: pip install torchao"
        ) from error

    class AdamW8bit(library.AdamW8bit):  # type: ignore[misc]  # a class that may be absent
        @torch.no_grad()
        def step(self, closure: Callable[[], float] | None = None) -> float | None:
            if self.param_groups[0]["params"][0].device.type != "cpu":
                return self._compiled(closure)
            if closure is not None:
                raise ValueError("expected no closure; compute the gradients before step()")
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        self._move(param, group)
            return None

        def _compiled(self, closure: Callable[[], float] | None) -> float | None:
            rates = [group["lr"] for group in self.param_groups]
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = torch.tensor(rate, dtype=torch.float32)
            try:
                loss: float | None = super().step(closure)
            finally:
                for group, rate in zip(self.param_groups, rates, strict=True):
                    group["lr"] = rate
            return loss

        def _move(self, param: Tensor, group: dict[str, Any]) -> None:
            state = self.state[param]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = self._new_buffer(param, True)
                state["exp_avg_sq"] = self._new_buffer(param, False)
            state["step"] += 1
            rate = torch.tensor(group["lr"], dtype=torch.float32)
            moments = state["exp_avg"], state["exp_avg_sq"]
            for values, grad, first, second in _pieces(param.detach(), param.grad, *moments):
                move(
                    *(values, grad, state["step"], first, second),
                    None,  # no maximum of the second moment: amsgrad
                    *(rate, *group["betas"], group["weight_decay"], group["eps"]),
                    *(True, False),  # decay is decoupled, and nothing rounded to bf16
                )

        def _new_buffer(self, p: Tensor, signed: bool) -> Any:  # noqa: ANN401 - the library's
            return super()._new_buffer(p, signed) if _is_in_blocks(p) else torch.zeros_like(p)

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


def shard_of(moment: Mapping[str, Any], param: Tensor) -> Any:  # noqa: ANN401 - as in a state
    """Return this rank's shard of a moment, whose tensors are whole; all ranks call this."""
    if not dtensors.is_dtensor(param):
        return moment
    codes, scale = moment["codes"], moment["scale"]
    if not _is_in_blocks(param):
        blocks = moment["qmap"][codes.int()].view(len(scale), -1) * scale.view(-1, 1)
        values = torch.zeros_like(param)
        dtensors.put_whole_(values, blocks.view(codes.shape))
        return values
    own = torch.zeros_like(param, dtype=codes.dtype)
    dtensors.put_whole_(own, codes)
    rows, width = dtensors.rows_here(param, 0), dtensors.inner_stride(param, 0)
    start, stop = int(rows[0]) * width // BLOCK, (int(rows[-1]) + 1) * width // BLOCK
    return {**moment, "codes": own, "scale": scale[start:stop]}


def _pieces(*tensors: Any) -> Iterator[tuple[Any, ...]]:  # noqa: ANN401 - moments among them
    """Yield views of as many values of each tensor, or the tensors themselves if they are few."""
    local = [dtensors.local(tensor) for tensor in tensors]
    numel, at_once = local[0].numel(), AT_ONCE * torch.get_num_threads()
    if numel <= at_once or not all(_is_flat(tensor) for tensor in local):
        yield tuple(local)
        return
    for start in range(0, numel, at_once):
        yield tuple(_piece(tensor, start, start + at_once) for tensor in local)


def _is_flat(tensor: Any) -> bool:  # noqa: ANN401 - the library's
    values: Tensor = getattr(tensor, "codes", tensor)
    return values.is_contiguous()


def _piece(tensor: Any, start: int, stop: int) -> Any:  # noqa: ANN401 - the library's
    if not hasattr(tensor, "codes"):
        return tensor.view(-1)[start:stop]
    codes, scale = tensor.codes.view(-1)[start:stop], tensor.scale[start // BLOCK : stop // BLOCK]
    return type(tensor)(codes, scale, tensor.qmap, tensor.signed, tensor.dtype)


def _is_in_blocks(param: Tensor) -> bool:
    """Return whether all ranks have a shard that the library keeps in 8 bits."""
    if not dtensors.is_dtensor(param):
        return True  # the library decides
    sizes = dtensors.sizes_by_rows(param)
    return bool(sizes) and all(size >= LEAST and size % BLOCK == 0 for size in sizes)


def _plain(value: Any, quantized: Any) -> Any:  # noqa: ANN401 - a tensor or what stands for one
    local = dtensors.local(value)
    if not isinstance(local, quantized):
        return value
    codes, scale = local.codes, local.scale
    if dtensors.is_dtensor(value):
        runs = dtensors.local_runs(value)
        codes = part_here(codes.reshape(-1), runs, tuple(value.shape))
        blocks = tuple((start // BLOCK, stop // BLOCK) for start, stop in runs)
        scale = part_here(scale, blocks, (value.numel() // BLOCK,))
    dtype = str(value.dtype).removeprefix("torch.")
    tensors = dict(zip(TENSORS, (codes, scale, local.qmap), strict=True))
    return tensors | {"signed": local.signed, "dtype": dtype}


def _rebuilt(value: Any, quantized: Any) -> Any:  # noqa: ANN401 - as `_plain`
    if not isinstance(value, dict):
        return value
    codes, scale, qmap = (value[name] for name in TENSORS)
    signed, dtype = value["signed"], getattr(torch, value["dtype"])
    if not dtensors.is_dtensor(codes):
        return quantized(codes, scale, qmap, signed, dtype)
    local = codes.to_local()
    moment = quantized(local, scale.to(local.device), qmap.to(local.device), signed, dtype)
    return dtensors.like(codes, moment)
