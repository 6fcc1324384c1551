"""The outer step: state(e+1) = apply(state(e), update(e)), to the bit on every device.

Only fp32 add, sub and mul, each rounded once, in a fixed order; nothing fused, no division by a
scalar, no reduction. Scalars are fp32 and travel as fp32 bits. `tests/optim/test_outer.py` holds
this to a checked-in digest.
"""

import struct

import torch
from torch import Tensor

from atoll.optim.state import OuterState, StateError


def nesterov(state: OuterState, update_N: Tensor, *, lr: float, momentum: float) -> OuterState:
    """One outer step of DiLoCo (arXiv:2311.08105): Nesterov on the averaged pseudo-gradient.

        m' = mu m + u        theta' = theta - lr (u + mu m')

    This is PyTorch's SGD(nesterov=True) without dampening, in unfused operations.

    Args:
        state: parameters theta and momentum m, N each; left as it is.
        update_N: u, the decoded update, fp32 on the CPU.
        lr: outer learning rate, rounded to fp32.
        momentum: mu, rounded to fp32.

    Returns:
        A new state in new buffers, one position on.

    Raises:
        StateError: when the update is no fp32 CPU vector of N values, or a scalar is not finite.
    """
    if update_N.shape != state.params_N.shape or update_N.dtype != torch.float32:
        raise StateError(
            f"expected an fp32 update of {state.layout.numel} values, "
            f"got {update_N.dtype} of shape {tuple(update_N.shape)}"
        )
    lr_, mu = _scalar(lr), _scalar(momentum)
    new = OuterState.blank(state.layout, state.position + 1)
    torch.mul(state.momentum_N, mu, out=new.momentum_N)
    torch.add(new.momentum_N, update_N, out=new.momentum_N)
    step_N = new.params_N
    torch.mul(new.momentum_N, mu, out=step_N)
    torch.add(update_N, step_N, out=step_N)
    torch.mul(step_N, lr_, out=step_N)
    torch.sub(state.params_N, step_N, out=new.params_N)
    return new


def to_fp32(value: float) -> float:
    """The nearest fp32 number, as entries carry it.

    Raises:
        StateError: when it is not finite in fp32.
    """
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        rounded = float("inf")
    if rounded - rounded != 0.0:
        raise StateError(f"expected a finite fp32 number, got {value}")
    return rounded


def _scalar(value: float) -> Tensor:
    return torch.tensor(to_fp32(value), dtype=torch.float32)
