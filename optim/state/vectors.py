"""Long vectors in memory that is used again.

A model's vector is allocated at every step of a round. Fresh pages cost more than what is computed
on them: of 120 MB the system zeroes each, 8 ms where memory is in pages of 2 MB, up to 60 where it
has to be gathered first; a pass of arithmetic takes 8.

Memory is free again when the last tensor, array or memoryview of it is gone, whoever held it. What
waits to be used again is bounded in bytes, by a multiple of the longest vector: what does not fit
goes back to the system, the length that was not asked for longest first. Once a window the heap's
free pages go back as well (`OnceAWindow`). Windows so short that fresh pages would cost them more
than memory is worth give back neither.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

LONG = 1 << 20  # values: shorter vectors come from the heap, which is warm anyway
LINE = 16  # values of a cache line: with AVX-512, each access to others would touch two lines
# Longest vectors. A round frees two, the old parameters and the old residual, and the next one
# wants them at different times: with both kept, the peak is 4 bytes a parameter higher.
SPARE = 1.0
SHORT_SPARE = 4.0  # the same while windows are short: all that a round frees
# What was given back takes up to 10 ns a value to get again, measured at 30.8M: three vectors, and
# what the heap had. With windows of 0.7 s that was a third of all processor time.
LEAST_WINDOW_S, LEAST_WINDOW_NS_PER_VALUE = 5.0, 70

_LARGE_PAGES: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
_spare: dict[int, deque[np.ndarray]] = {}
"""by length, the length that was asked for last at the end"""
_longest = 0
_keeps = True
"""whether anything waits to be used again"""
_most = SPARE
"""longest vectors that may wait"""


Bytes = bytes | bytearray | memoryview


class Allocate(Protocol):
    """Makes long vectors: `empty`, or that of `mapped.MappedVectors`."""

    def __call__(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return an uninitialised vector on the CPU, fp32 or bf16."""
        ...


def _of_heap(length: int) -> np.ndarray:
    """Return memory that begins with a cache line; the heap's begins 16 bytes later."""
    memory = np.empty(length + LINE, dtype=np.float32)
    start = -(memory.ctypes.data // 4) % LINE
    return memory[start : start + length]


_memory: Callable[[int], np.ndarray] = _of_heap


def take_memory_from(function: Callable[[int], np.ndarray]) -> None:
    """Take the memory of long vectors from a function from now on: fp32 of a given length.

    What waits to be used again goes back to the system, and what is still in use follows it.
    """
    global _memory
    if function is not _memory:
        _memory = function
        for kept in list(_spare.values()):
            kept.clear()


def empty(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return an uninitialised vector on the CPU, fp32 or bf16."""
    if dtype == torch.bfloat16:  # two of its values take the place of one
        return empty(-(-numel // 2)).view(dtype)[:numel]
    if numel < LONG:
        return torch.empty(numel, dtype=torch.float32)
    # Parts change a little in length from round to round: exact lengths were rarely reused.
    length = -(-numel // LONG) * LONG
    _note(length)
    try:
        memory = _spare[length].pop()
    except (KeyError, IndexError):  # no `if` before: another thread may take the last one
        memory = _memory(length)
    lease = memory[:numel]  # an object of its own, which all tensors of it keep alive
    weakref.finalize(lease, _keep, memory, _memory).atexit = False
    return torch.from_numpy(lease)


def buffer(num_bytes: int) -> memoryview:
    """Return zeros that go back to the system with the last view of them.

    The heap keeps what a body left: bodies of some megabytes lie between smaller things there.
    Pages that nobody writes to take no memory. They are large where the system has such pages: a
    first write to each of 4 KiB took 2 us, measured on an EPYC, half a nanosecond a byte.
    """
    if num_bytes < 4 * LONG:
        return memoryview(bytearray(num_bytes))
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if _LARGE_PAGES is not None:
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(_LARGE_PAGES)
    return memoryview(memory)


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


def joined_bytes(pieces: Sequence[Bytes]) -> Bytes:
    """Join bytes: to a view if they lie so in one memory, else to a copy."""
    if len(pieces) < 2 or not all(isinstance(piece, memoryview) and piece for piece in pieces):
        return b"".join(pieces) if len(pieces) != 1 else pieces[0]
    views = [memoryview(piece) for piece in pieces]
    memory = memoryview(views[0].obj)
    start = stop = _address(views[0]) - _address(memory)
    for view in views:
        if view.obj is not memory.obj or _address(view) - _address(memory) != stop:
            return b"".join(views)
        stop += len(view)
    return memory[start:stop].toreadonly()


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)


def _keep(memory: np.ndarray, came_from: Callable[[int], np.ndarray]) -> None:
    """Keep memory that is no longer in use.

    It takes no lock: it runs in the thread that drops the last reference, perhaps inside `empty`.
    """
    if came_from is not _memory or not _keeps:
        return
    _spare.setdefault(memory.size, deque()).append(memory)
    _give_back()


def _give_back() -> None:
    excess = spare_bytes() - _most * 4 * _longest
    for length in list(_spare):
        while excess > 0:
            try:
                _spare[length].popleft()
            except (KeyError, IndexError):
                break
            excess -= 4 * length


def keep_none() -> None:
    """Give memory back to the system as soon as nobody has it, from now on.

    For a trainer that waits for its rounds: it uses one vector a window, which would wait all
    through the steps. New pages take 1.6 ns a value, measured at 30.9M; a round takes far more.
    """
    global _keeps
    _keeps = False
    release()


def release() -> None:
    """Give what waits to be used again back to the system, and bound it anew from here on."""
    global _longest
    _longest = 0
    for kept in list(_spare.values()):
        kept.clear()


def trim(numel: int) -> None:
    """Give the heap's free pages back to the system, and what waits but for a vector.

    Activations, gradients, frames and messages leave those between smaller things: 8 bytes a
    parameter, measured at 30.9M. It takes 0.4 ms a megabyte, in which other threads may wait for
    the heap. glibc alone has free pages to give back.

    Args:
        numel: values of the model.
    """
    global _most
    if numel < LONG:
        return
    _most = SPARE
    _give_back()
    if _trim is not None:
        _trim(0)


class OnceAWindow:
    """Decides once a window how much memory waits to be used again.

    In windows so short that fresh pages would cost more than memory is worth, more vectors may
    wait. One for each place that is passed once a window.
    """

    def __init__(self) -> None:
        """Take the first window for a long one."""
        self._called_s = -math.inf

    def trim(self, numel: int) -> None:
        """Trim for a model of so many values, if this window was long enough."""
        if self.settle(numel):
            trim(numel)

    def settle(self, numel: int) -> bool:
        """Bound what may wait; return whether this window was long enough for fresh pages."""
        global _most
        now_s = time.monotonic()
        window_s, self._called_s = now_s - self._called_s, now_s
        is_long = window_s >= max(LEAST_WINDOW_S, 1e-9 * LEAST_WINDOW_NS_PER_VALUE * numel)
        _most = SPARE if is_long else SHORT_SPARE
        return is_long


def spare_bytes() -> int:
    """Return the bytes that wait to be used again."""
    return sum(4 * length * len(kept) for length, kept in list(_spare.items()))


def _note(length: int) -> None:
    """Remember that a length was asked for."""
    global _longest
    _longest = max(_longest, length)
    if (kept := _spare.pop(length, None)) is not None:
        _spare[length] = kept
