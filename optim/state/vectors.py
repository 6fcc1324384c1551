"""Long vectors in memory that is used again.

A model's vector is allocated at every step of a round. Fresh pages cost more than what is computed
on them: of 120 MB the system zeroes each, 8 ms where memory is in pages of 2 MB, up to 60 where it
has to be gathered first; a pass of arithmetic takes 8.

Memory is free again when the last tensor, array or memoryview of it is gone, whoever held it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

LONG = 1 << 20  # values: shorter ones come from the heap, which is warm anyway
SPARE = 4  # of a length: pseudo-gradient, residual's change, update and the state before it
LENGTHS = 8  # whose memory is kept: vectors, states and parts; programs with many runs forget some

_spare: dict[int, deque[np.ndarray]] = {}


def empty(numel: int) -> Tensor:
    """An fp32 vector on the CPU; its values are anything."""
    if numel < LONG:
        return torch.empty(numel, dtype=torch.float32)
    memory = _taken(-(-numel // LONG) * LONG)  # parts of a round differ a little in length
    lease = memory[:numel]  # an object of its own, which all tensors of it keep alive
    weakref.finalize(lease, _keep, memory).atexit = False
    return torch.from_numpy(lease)


def cat(parts: Sequence[Tensor]) -> Tensor:
    """Vectors one after another, as a new one."""
    return torch.cat(list(parts), out=empty(sum(part.numel() for part in parts)))


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Vectors one after another: a view where they lie so in one memory, else a new one."""
    memory, start = parts[0].untyped_storage().data_ptr(), parts[0].storage_offset()
    stop = start
    for part in parts:
        if part.untyped_storage().data_ptr() != memory or part.storage_offset() != stop:
            return cat(parts)
        stop += part.numel()
    return parts[0].as_strided((stop - start,), (1,))


def _taken(length: int) -> np.ndarray:
    try:
        return _spare[length].pop()
    except (KeyError, IndexError):
        return np.empty(length, dtype=np.float32)


def _keep(memory: np.ndarray) -> None:
    """Without a lock: this runs wherever the last user lets go, maybe inside `empty`."""
    if memory.size not in _spare and len(_spare) >= LENGTHS:
        _spare.clear()
    _spare.setdefault(memory.size, deque(maxlen=SPARE)).append(memory)
