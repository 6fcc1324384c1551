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

LONG = 1 << 20  # values: shorter vectors come from the heap, which is warm anyway
SPARE = 4  # vectors a length: pseudo-gradient, residual's change, update, the state before it
LENGTHS = 8  # kept at once: vectors, states and parts; a program with many runs forgets some

_spare: dict[int, deque[np.ndarray]] = {}


def empty(numel: int) -> Tensor:
    """Return an uninitialised fp32 vector on the CPU."""
    if numel < LONG:
        return torch.empty(numel, dtype=torch.float32)
    # Parts change a little in length from round to round: exact lengths were rarely reused.
    length = -(-numel // LONG) * LONG
    try:
        memory = _spare[length].pop()
    except (KeyError, IndexError):  # no `if` before: another thread may take the last one
        memory = np.empty(length, dtype=np.float32)
    lease = memory[:numel]  # an object of its own, which all tensors of it keep alive
    weakref.finalize(lease, _keep, memory).atexit = False
    return torch.from_numpy(lease)


def cat(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate vectors to a new one."""
    return torch.cat(list(parts), out=empty(sum(part.numel() for part in parts)))


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate vectors: a view if they lie so in one memory, else a new vector."""
    memory, start = parts[0].untyped_storage().data_ptr(), parts[0].storage_offset()
    stop = start
    for part in parts:
        if part.untyped_storage().data_ptr() != memory or part.storage_offset() != stop:
            return cat(parts)
        stop += part.numel()
    return parts[0].as_strided((stop - start,), (1,))


def _keep(memory: np.ndarray) -> None:
    """Keep memory that is no longer in use.

    It takes no lock: it runs in the thread that drops the last reference, perhaps inside `empty`.
    """
    if memory.size not in _spare and len(_spare) >= LENGTHS:
        _spare.clear()
    _spare.setdefault(memory.size, deque(maxlen=SPARE)).append(memory)
