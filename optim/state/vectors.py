"""Long vectors in memory that is used again.

A model's vector is allocated at every step of a round. Fresh pages cost more than what is computed
on them: of 120 MB the system zeroes each, 8 ms where memory is in pages of 2 MB, up to 60 where it
has to be gathered first; a pass of arithmetic takes 8.

Memory is free again when the last tensor, array or memoryview of it is gone, whoever held it. What
waits to be used again is bounded in bytes, by a multiple of the longest vector: what does not fit
goes back to the system, the length that was not asked for longest first.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

LONG = 1 << 20  # values: shorter vectors come from the heap, which is warm anyway
SPARE = 2.0  # longest vectors: what a round frees, the old parameters and the old residual

_spare: dict[int, deque[np.ndarray]] = {}
"""by length, the length that was asked for last at the end"""
_longest = 0


def _of_heap(length: int) -> np.ndarray:
    return np.empty(length, dtype=np.float32)


_allocate: Callable[[int], np.ndarray] = _of_heap


def allocate_with(function: Callable[[int], np.ndarray]) -> None:
    """Take the memory of long vectors from a function from now on: fp32 of a given length.

    What waits to be used again goes back to the system, and what is still in use follows it.
    """
    global _allocate
    if function is not _allocate:
        _allocate = function
        for kept in list(_spare.values()):
            kept.clear()


def empty(numel: int) -> Tensor:
    """Return an uninitialised fp32 vector on the CPU."""
    if numel < LONG:
        return torch.empty(numel, dtype=torch.float32)
    # Parts change a little in length from round to round: exact lengths were rarely reused.
    length = -(-numel // LONG) * LONG
    _note(length)
    try:
        memory = _spare[length].pop()
    except (KeyError, IndexError):  # no `if` before: another thread may take the last one
        memory = _allocate(length)
    lease = memory[:numel]  # an object of its own, which all tensors of it keep alive
    weakref.finalize(lease, _keep, memory, _allocate).atexit = False
    return torch.from_numpy(lease)


def buffer(num_bytes: int) -> memoryview:
    """Return bytes that go back to the system with the last view of them.

    The heap keeps what a body left: bodies of some megabytes lie between smaller things there.
    Pages that nobody writes to take no memory.
    """
    if num_bytes < 4 * LONG:
        return memoryview(bytearray(num_bytes))
    return memoryview(mmap.mmap(-1, num_bytes))


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


def _keep(memory: np.ndarray, came_from: Callable[[int], np.ndarray]) -> None:
    """Keep memory that is no longer in use.

    It takes no lock: it runs in the thread that drops the last reference, perhaps inside `empty`.
    """
    if came_from is not _allocate:
        return
    _spare.setdefault(memory.size, deque()).append(memory)
    excess = spare_bytes() - SPARE * 4 * _longest
    for length in list(_spare):
        while excess > 0:
            try:
                _spare[length].popleft()
            except (KeyError, IndexError):
                break
            excess -= 4 * length


def release() -> None:
    """Give what waits to be used again back to the system, and bound it anew from here on."""
    global _longest
    _longest = 0
    for kept in list(_spare.values()):
        kept.clear()


def spare_bytes() -> int:
    """Return the bytes that wait to be used again."""
    return sum(4 * length * len(kept) for length, kept in list(_spare.items()))


def _note(length: int) -> None:
    """Remember that a length was asked for."""
    global _longest
    _longest = max(_longest, length)
    if (kept := _spare.pop(length, None)) is not None:
        _spare[length] = kept
