"""Values kept as bf16, the upper half of fp32: rounded by integers, to the same bits everywhere.

    bf16 = (x + 0x7FFF + (bit 16 of x)) >> 16        x: the bits of an fp32 value

which is to nearest, ties to even. torch converts by the processor's own instruction where there is
one, and AVX-512's takes denormal numbers as 0: replicas on two machines would part. Values above
the largest bf16 by half a step or more become infinite, as in IEEE 754; infinity stays, and NaN,
as arithmetic makes it, does too.

An error of at most 2^-9 of the value. A momentum stands that, since each step forgets some of it, a
tenth and more with the usual ones; parameters do not, because a step is often smaller than that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atoll.compression.scratch import room

AT_ONCE = 1 << 16  # values rounded at once: 256 KiB of integers, which stay in the cache
EXPONENT = 0x7F80  # all ones: infinity or NaN


@torch.inference_mode()  # scratch that was made in this mode cannot be changed outside it
def store_(out: Tensor, values: Tensor) -> None:
    """Write fp32 values to a vector of as many, in fp32 as they are, or in bf16 rounded."""
    if out.dtype == torch.float32:
        out.copy_(values)
        return
    for halves, wide in _runs(out, values):
        bits = wide.view(torch.int32)
        rounded = room("rounded bits", bits.shape, bits.device, torch.int32)
        torch.bitwise_right_shift(bits, 16, out=rounded)
        rounded.bitwise_and_(1).add_(0x7FFF).add_(bits).bitwise_right_shift_(16)
        halves.view(torch.int16).copy_(rounded)


@torch.inference_mode()  # scratch that was made in this mode cannot be changed outside it
def widen_(out: Tensor, stored: Tensor) -> Tensor:
    """Write stored values, which fp32 holds exactly, to an fp32 vector of as many; return it."""
    if stored.dtype == torch.float32:
        return out.copy_(stored)
    for wide, halves in _runs(out, stored):
        bits = wide.view(torch.int32)
        bits.copy_(halves.view(torch.int16)).bitwise_left_shift_(16)
    return out


def widened(stored: Tensor) -> Tensor:
    """Return stored values as fp32: the vector itself if it is, else a new one."""
    if stored.dtype == torch.float32:
        return stored
    return widen_(torch.empty(stored.shape), stored)


def are_finite(halves_N: Tensor) -> bool:
    """Return whether bf16 values are neither NaN nor infinite."""
    runs = torch.split(halves_N.view(torch.int16), AT_ONCE)
    return not any(bool((run.bitwise_and(EXPONENT) == EXPONENT).any()) for run in runs)


def _runs(*tensors: Tensor) -> Sequence[tuple[Tensor, ...]]:
    """Cut tensors of one shape into runs; those that are no vectors are few values, and whole."""
    if tensors[0].dim() != 1:
        return [tensors]
    return list(zip(*(torch.split(tensor, AT_ONCE) for tensor in tensors), strict=True))
