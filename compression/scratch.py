"""Working memory that stays in cache: one set of buffers for each thread, reused from call to call.

A fresh 256 KiB costs more in page faults than the arithmetic on it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

TILE = 65_536  # values; codes are packed by tiles
MAX_VIEWS = 1_000  # kept for each thread; shapes are few, but a caller's choice
MAX_TILES = 16  # at once: fewer would stay in the L2 cache, but then calls cost more than the L3
CAPACITY = MAX_TILES * (TILE + 2048)  # codes of a tile have their scales and a header beside them
FRAME_BYTES = 512 * 1024  # twice a tile in fp32; a thread would keep a longer buffer for good


class _Pool(threading.local):
    """The buffers of one thread."""

    def __init__(self) -> None:
        """Start empty, on the first use in each thread."""
        self.tensors: dict[tuple[str, torch.dtype], Tensor] = {}
        self.tiles: dict[tuple[str, torch.dtype, Sequence[int]], Tensor] = {}
        self.frame = bytearray()


_pool = _Pool()


def scratch(slot: str, like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return an uninitialised tensor of the shape and on the device of `like`; see `room`."""
    return room(slot, like.shape, like.device, dtype)


def room(slot: str, shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor.

    It is overwritten by the next call with the same `slot` and `dtype` in this thread, so it
    must not be returned to a caller.
    """
    ready = _pool.tiles.get((slot, dtype, shape)) if device.type == "cpu" else None
    return _prepare(slot, shape, device, dtype) if ready is None else ready


def _prepare(slot: str, shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    numel = torch.Size(shape).numel()
    if device.type != "cpu" or numel > CAPACITY:
        return torch.empty(shape, dtype=dtype, device=device)
    kept = _pool.tensors.get((slot, dtype))
    if kept is None:
        kept = _pool.tensors[slot, dtype] = torch.empty(CAPACITY, dtype=dtype)
    view = kept[:numel].view(shape)
    if len(_pool.tiles) >= MAX_VIEWS:  # views cost little to make again; their memory is kept
        _pool.tiles.clear()
    _pool.tiles[slot, dtype, shape] = view
    return view


def tiles_at_once() -> int:
    """Return how many tiles pass after pass takes at once, on one thread what its caches hold.

    Of several threads each call waits for the slowest, which costs more than the cache gives.
    """
    return MAX_TILES if torch.get_num_threads() > 1 else 4


def frame_buffer(length: int) -> bytearray:
    """Return a buffer of at least `length` bytes, overwritten by the next call in this thread."""
    if length > FRAME_BYTES:
        return bytearray(length)
    if not _pool.frame:
        _pool.frame = bytearray(FRAME_BYTES)
    return _pool.frame
