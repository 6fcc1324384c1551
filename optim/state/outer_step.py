"""Outer steps: state(e+1) = apply(state(e), update(e)), to the bit on every device.

Only fp32 add, sub, mul and sqrt, division of a tensor by a tensor, sign and clamp, each rounded
once, in a fixed order; nothing fused, no division by a scalar, no sum of fp32 values. A fused
multiply-add rounds once instead of twice, a sum depends on its order, and on CUDA torch divides
by a scalar as a product with its reciprocal: each would give other bits on another machine.
Scalars are fp32 and travel as fp32 bits. A momentum in bf16 is widened, which is exact, and what
the step makes of it moves the parameters before it is rounded by integers (`halves`).
`tests/optim/state/test_outer_step.py` holds each rule to a checked-in digest.
"""

import math
import struct
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from atoll.compression.scratch import room
from atoll.optim.state import halves
from atoll.optim.state.fragments import Fragment, whole
from atoll.optim.state.layout import CELL
from atoll.optim.state.outer_state import OuterState, StateError
from atoll.optim.state.updates import Update, for_each_run
from atoll.optim.state.vectors import empty

NORM_BITS = 23  # of a value in a norm: 65,536 squares of up to 2^46 sum to 2^62, within int64
ADAMW_SUMS = 2  # AdamW's averages of ones, kept after both moments

Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""rule(params, momentum, update, new_params, new_momentum) writes the last two, value by value.

The buffers of the result also hold intermediate values, so a rule takes no memory of its own. The
new momentum may lie where the old one does: a rule reads that before it writes this.
"""


def nesterov(
    state: OuterState,
    update_F: Tensor,
    *,
    lr: float,
    momentum: float,
    fragment: Fragment | None = None,
) -> OuterState:
    """Take one outer step of DiLoCo (arXiv:2311.08105): Nesterov on the averaged pseudo-gradient.

        m' = mu m + u        theta' = theta - lr (u + mu m')

    This is PyTorch's SGD(nesterov=True) without dampening, in unfused operations.

    Args:
        state: parameters theta and momentum m, N each; left as it is.
        update_F: u, the decoded update, fp32 on the CPU.
        lr: outer learning rate, rounded to fp32.
        momentum: mu, rounded to fp32.
        fragment: the values that the update moves; all by default. The others keep their bits.

    Returns:
        A new state in new buffers, one position on.

    Raises:
        StateError: when the update is no fp32 CPU vector of F values, or a scalar is not finite.
    """
    lr_, mu = scalar(lr), scalar(momentum)

    def rule(params: Tensor, m: Tensor, u: Tensor, new_params: Tensor, new_m: Tensor) -> None:
        torch.mul(m, mu, out=new_m)
        torch.add(new_m, u, out=new_m)
        torch.mul(new_m, mu, out=new_params)
        torch.add(u, new_params, out=new_params)
        torch.mul(new_params, lr_, out=new_params)
        torch.sub(params, new_params, out=new_params)

    return _stepped(state, update_F, rule, fragment)


def heavy_ball(
    state: OuterState,
    update_F: Tensor,
    *,
    lr: float,
    momentum: float,
    scale: float,
    clip: float,
    fragment: Fragment | None = None,
) -> OuterState:
    """Take one outer step of CO2 (arXiv:2401.16265): momentum, clipped value by value.

        m' = clamp(mu m + scale u, -clip, clip)        theta' = theta - lr m'

    With scale 1 and an infinite clip it is SlowMo's (arXiv:1910.00643) for a constant inner rate.

    Args:
        state: parameters and momentum; left as it is.
        update_F: u, the decoded update.
        lr: outer learning rate.
        momentum: mu.
        scale: 1 / staleness penalty.
        clip: largest magnitude of a momentum; infinity for none.
        fragment: the values that the update moves; all by default. The others keep their bits.

    Returns:
        A new state in new buffers, one position on.

    Raises:
        StateError: as `nesterov`.
    """
    lr_, mu, scale_ = scalar(lr), scalar(momentum), scalar(scale)
    bound = torch.tensor(clip, dtype=torch.float32)  # `scalar` would refuse infinity

    def rule(params: Tensor, m: Tensor, u: Tensor, new_params: Tensor, new_m: Tensor) -> None:
        torch.mul(m, mu, out=new_m)
        torch.mul(u, scale_, out=new_params)
        torch.add(new_m, new_params, out=new_m)
        torch.clamp(new_m, -bound, bound, out=new_m)
        torch.mul(new_m, lr_, out=new_params)
        torch.sub(params, new_params, out=new_params)

    return _stepped(state, update_F, rule, fragment)


def descend(
    state: OuterState,
    update_F: Update,
    *,
    lr: float,
    decay: float = 0.0,
    signed: bool = False,
    fragment: Fragment | None = None,
) -> OuterState:
    """Descend along the update or its sign; both states share one memory.

        theta' = (1 - lr decay) theta - lr u        or sign(u) instead of u

    Args:
        state: parameters; left as it is.
        update_F: u, the decoded update, or the values of it that were sent.
        lr: learning rate.
        decay: decoupled weight decay; 1 - lr decay is rounded to fp32 once.
        signed: take the sign of u; the sign of 0 is 0.
        fragment: the values that the update moves; all by default.

    Returns:
        A new state, one position on.

    Raises:
        StateError: as `nesterov`.
    """
    lr_, kept = scalar(lr), scalar(1.0 - lr * decay)
    fragment = fragment or whole(state.layout)
    _require(update_F, fragment.numel)
    new = state.next_with_memory()
    for gap in fragment.gaps:
        new.params_N[gap] = state.params_N[gap]

    def rule(u: Tensor, params: Tensor, new_params: Tensor) -> None:
        step = _times(torch.sign(u) if signed else u, lr_)
        torch.sub(_times(params, kept), step, out=new_params)

    for_each_run(rule, update_F, fragment, state.params_N, new.params_N)
    return new


def adamw(
    state: OuterState,
    update_N: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
) -> OuterState:
    """Take one step of AdamW (arXiv:1711.05101) on the mean gradient; vectors do not decay.

        m' = beta1 m + (1 - beta1) u            a' = beta1 a + (1 - beta1)
        v' = beta2 v + (1 - beta2) u u          b' = beta2 b + (1 - beta2)
        theta' = (1 - lr decay) theta - (lr / a') m' / (sqrt(v') (1 / sqrt(b')) + eps)

    a and b are the averages of ones, 1 - beta^t after t updates: the bias corrections, without
    a power and without a count of the positions that brought none. This is torch.optim.AdamW in
    unfused operations.

    Args:
        state: parameters theta, N, and a memory of m, v, N each, then a and b; left as it is.
            Values after these, such as warm factors, keep their bits.
        update_N: u, the decoded mean gradient.
        lr: learning rate.
        beta1: decay of the first moment.
        beta2: decay of the second one.
        eps: added to the denominator.
        decay: decoupled weight decay of matrices; 1 - lr decay is rounded to fp32 once.

    Returns:
        A new state in new buffers, one position on.

    Raises:
        StateError: as `nesterov`.
    """
    _require(update_N, state.layout.numel)
    new = state.next_blank()
    m_N, v_N, sums = _moments(new)
    old_m_N, old_v_N, old_sums = _moments(state)
    _average(old_m_N, update_N, beta1, m_N)
    _average(old_v_N, torch.mul(update_N, update_N), beta2, v_N)
    one = torch.ones(1)
    _average(old_sums[:1], one, beta1, sums[:1])
    _average(old_sums[1:], one, beta2, sums[1:])
    # Scalars are divided as tensors of one value: no division here is by a scalar.
    step_N = _sqrt(v_N)
    torch.mul(step_N, torch.div(one, _sqrt(sums[1:])), out=step_N)
    torch.add(step_N, scalar(eps), out=step_N)
    torch.div(m_N, step_N, out=step_N)
    torch.mul(step_N, torch.div(scalar(lr), sums[:1]), out=step_N)
    kept = 2 * state.layout.numel + ADAMW_SUMS
    new.memory_M[kept:] = state.memory_M[kept:]
    decayed = scalar(1.0 - lr * decay)
    split = state.layout.split
    for old, out in zip(split(state.params_N), split(new.params_N), strict=True):
        if out.dim() >= 2:
            torch.mul(old, decayed, out=out)
        else:
            out.copy_(old)
    torch.sub(new.params_N, step_N, out=new.params_N)
    return new


def _sqrt(x_N: Tensor) -> Tensor:
    """Return the correctly rounded square root of a CPU vector.

    torch.sqrt calls MKL there, whose result is an ulp off for some values with AVX-512 and exact
    without: replicas on two machines would part. NumPy uses the processor's IEEE instruction.
    """
    root_N = empty(x_N.numel())
    np.sqrt(x_N.numpy(), out=root_N.numpy())
    return root_N


def clipped(update_F: Tensor, limit: float) -> Tensor:
    """Bring an update to an L2 norm of at most `limit`; one rounding a value.

    Returns:
        The update itself if its norm is within the limit, else a new vector.

    Raises:
        StateError: when the limit is not finite.
    """
    norm = exact_norm(update_F)
    if norm <= limit:
        return update_F
    return torch.mul(update_F, scalar(limit / norm))


def exact_norm(update_F: Tensor) -> float:
    """Return the L2 norm with the same bits everywhere, within 2^-20 for up to a billion values.

    A sum of fp32 values depends on its order; a sum of integers does not. So values are rounded to
    23 bits of the largest, and their squares are summed as integers.
    """
    largest = float(update_F.abs().max())
    if largest == 0.0:
        return 0.0
    exponent = NORM_BITS - math.frexp(largest)[1]
    squares = 0  # a Python integer: the sum over all cells may exceed int64
    for piece in torch.split(update_F, CELL):
        whole = torch.round(piece.double() * 2.0**exponent).to(torch.int64)
        squares += int(whole.mul_(whole).sum())
    return math.ldexp(math.isqrt(squares), -exponent)


def gossip(
    state: OuterState, update_2N: Tensor, *, lr: float, momentum: float, pull: float
) -> OuterState:
    """Take one outer step of NoLoCo (arXiv:2506.10911) on a peer's own state.

        m' = mu m - lr u + pull v        theta' = theta + m'

    Args:
        state: this peer's slow weights theta and momentum m; left as it is.
        update_2N: u, the pair's mean pseudo-gradient, then v, its mean weights less one's own.
        lr: outer learning rate.
        momentum: mu.
        pull: share of the difference to the pair's mean that the step closes.

    Returns:
        A new state in new buffers, one position on.

    Raises:
        StateError: as `nesterov`.
    """
    numel = state.layout.numel
    _require(update_2N, 2 * numel)
    lr_, mu, pull_ = scalar(lr), scalar(momentum), scalar(pull)
    v_N = update_2N[numel:]

    def rule(params: Tensor, m: Tensor, u: Tensor, new_params: Tensor, new_m: Tensor) -> None:
        torch.mul(m, mu, out=new_m)
        torch.mul(u, lr_, out=new_params)
        torch.sub(new_m, new_params, out=new_m)
        torch.mul(v_N, pull_, out=new_params)
        torch.add(new_m, new_params, out=new_m)
        torch.add(params, new_m, out=new_params)

    new = _begun(state)
    rule(state.params_N, state.momentum_N, update_2N[:numel], new.params_N, new.momentum_N)
    return new


def to_fp32(value: float) -> float:
    """Return the nearest fp32 number, as entries carry it.

    Raises:
        StateError: when it is not finite in fp32.
    """
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        rounded = float("inf")
    if not math.isfinite(rounded):
        raise StateError(f"expected a finite fp32 number, got {value}")
    return rounded


def _stepped(
    state: OuterState, update_F: Tensor, rule: Rule, fragment: Fragment | None
) -> OuterState:
    """Apply a rule by runs of values that stay in cache; copy the values outside the fragment."""
    fragment = fragment or whole(state.layout)
    _require(update_F, fragment.numel)
    if state.gives_memory:
        return _overwritten(state, update_F, rule, fragment)
    new = _begun(state)
    for gap in fragment.gaps:
        new.params_N[gap] = state.params_N[gap]
        new.momentum_N[gap] = state.momentum_N[gap]
    old = (state.params_N, state.momentum_N)
    into = (new.params_N, new.momentum_N)
    for_each_run(partial(_apply_rule, rule), update_F, fragment, *old, *into)
    return new


@torch.inference_mode()  # scratch that was made in this mode cannot be changed outside it
def _apply_rule(
    rule: Rule, u: Tensor, params: Tensor, m: Tensor, new_params: Tensor, new_m: Tensor
) -> None:
    """Apply a rule to a run of values, whose momentum may be stored in bf16."""
    if m.dtype == torch.float32:
        rule(params, m, u, new_params, new_m)
        return
    wide = halves.widen_(room("wide", m.shape, m.device, torch.float32), m)
    rule(params, wide, u, new_params, wide)
    halves.store_(new_m, wide)


@torch.inference_mode()  # a state that was made in this mode cannot be changed outside it
def _overwritten(state: OuterState, update_F: Tensor, rule: Rule, fragment: Fragment) -> OuterState:
    """Apply a rule in the memory of a state that gives way; the bits are those of `_stepped`."""
    covers = fragment.spans == ((0, state.layout.numel),) and not fragment.tensors
    if state.gives_params:
        params_N = state.params_N
    elif covers:
        params_N = update_F
    else:
        params_N = state.allocate(state.layout.numel)
        for gap in fragment.gaps:
            params_N[gap] = state.params_N[gap]
    places = (state.params_N, state.momentum_N, params_N)
    for_each_run(partial(_overwrite, rule), update_F, fragment, *places)
    return state.next_of(params_N)


@torch.inference_mode()
def _overwrite(rule: Rule, u: Tensor, params: Tensor, m: Tensor, new_params: Tensor) -> None:
    """Apply a rule to a run of values, whose new parameters may lie where any of them do."""
    stepped = room("stepped", u.shape, u.device, torch.float32)
    _apply_rule(rule, u, params, m, stepped, m)
    new_params.copy_(stepped)


def _begun(state: OuterState) -> OuterState:
    """Return the next state, of which only the memory beyond the momentum is written."""
    new, numel = state.next_blank(), state.layout.numel
    new.memory_M[numel:] = state.memory_M[numel:]
    return new


def _times(values: Tensor, factor: Tensor) -> Tensor:
    """Multiply; by 1 return the values themselves, which have the product's bits."""
    return values if factor == 1.0 else torch.mul(values, factor)


def _moments(state: OuterState) -> tuple[Tensor, Tensor, Tensor]:
    """Return AdamW's moments, N each, and its sums; views of the memory."""
    numel = state.layout.numel
    memory_M = state.memory_M
    return memory_M[:numel], memory_M[numel : 2 * numel], memory_M[2 * numel :][:ADAMW_SUMS]


def _average(old: Tensor, x: Tensor, beta: float, out: Tensor) -> None:
    """Write the moving average beta old + (1 - beta) x to `out`; 1 - beta is rounded once."""
    torch.mul(old, scalar(beta), out=out)
    torch.add(out, torch.mul(x, scalar(1.0 - beta)), out=out)


def _require(update: Update, numel: int) -> None:
    values = update if isinstance(update, Tensor) else update.values
    is_fp32 = values.dtype == torch.float32 and values.device.type == "cpu"
    if update.shape != (numel,) or not is_fp32:
        raise StateError(
            f"expected an fp32 update of {numel} values on the CPU, "
            f"got {values.dtype} of shape {tuple(update.shape)} on {values.device}"
        )


def scalar(value: float) -> Tensor:
    """Return a number, rounded to fp32, as a tensor without dimensions.

    Raises:
        StateError: as `to_fp32`.
    """
    return torch.tensor(to_fp32(value), dtype=torch.float32)
