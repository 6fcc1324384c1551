"""Working memory that stays in cache: one set of buffers for each thread, reused from call to call.

A fresh 256 KiB costs more in page faults than the arithmetic on it.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

TILE = 65_536  # values; 256 KiB of fp32 and its codes stay in a 1 MiB L2 cache
CAPACITY = TILE + 64  # planes of a tile are rounded up to whole words
FRAME_BYTES = 512 * 1024  # longer frames get a buffer of their own

_thread = threading.local()


def scratch(slot: str, like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return an uninitialised vector with as many values as `like`, on its device; see `room`."""
    return room(slot, like.numel(), like.device, dtype)


def room(slot: str, numel: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised vector of `numel` values.

    It is overwritten by the next call with the same `slot` and `dtype` in this thread, so it
    must not be returned to a caller.
    """
    if device.type != "cpu" or numel > CAPACITY:
        return torch.empty(numel, dtype=dtype, device=device)
    pool: dict[object, Tensor] = _thread.__dict__
    kept = pool.get((slot, dtype))
    if kept is None:
        kept = pool[slot, dtype] = torch.empty(CAPACITY, dtype=dtype)
    return kept[:numel]


def frame_buffer(length: int) -> bytearray:
    """Return a buffer of at least `length` bytes, overwritten by the next call in this thread."""
    if length > FRAME_BYTES:
        return bytearray(length)
    pool: dict[object, bytearray] = _thread.__dict__
    kept = pool.get("frame")
    if kept is None:
        kept = pool["frame"] = bytearray(FRAME_BYTES)
    return kept
