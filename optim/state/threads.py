"""Work on many pieces in threads of Python, each with one of torch's threads.

torch divides every call among its threads and waits for the slowest. Over values that stay in a
cache a call takes microseconds, so that waiting costs more than a second thread gains. Threads that
take whole pieces wait once, at the end; in its calls torch gives the interpreter's lock back.

`torch.set_num_threads` would not do: in the whole process it also sets the threads of MKL, and
those of threads that start later. OpenMP's own function sets them for the calling thread alone.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from typing import TypeVar

import torch

from atoll.compression.scratch import left_behind

T = TypeVar("T")

MAX_THREADS = 8  # each holds the interpreter's lock for about a tenth of its time

_set_own_threads = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)


def side_by_side(
    work: Callable[[T], object],
    pieces: Sequence[T],
    *,
    at_least: int = 1,
    at_most: int = MAX_THREADS,
) -> None:
    """Call a function with each piece, in as many threads as torch uses for arithmetic.

    The calling thread is one of them. The others have its priority (on Linux) and its inference
    mode, and have ended when this returns. If torch's threads are not those of OpenMP, the calling
    thread takes all pieces, as it does where torch has one thread.

    Args:
        work: called in several threads at once, with one thread of torch's in each.
        pieces: begun in this order.
        at_least: number of pieces that are worth a thread.
        at_most: number of threads.

    Raises:
        Exception: one that `work` raised; what had not begun then never does.
    """
    threads = min(torch.get_num_threads(), at_most, len(pieces) // at_least)
    if threads < 2 or not _can_be_alone():
        for piece in pieces:
            work(piece)
        return
    left, inference = deque(pieces), torch.is_inference_mode_enabled()

    def take() -> None:
        with _alone():
            try:
                for piece in _taken(left):
                    work(piece)
            except BaseException:
                left.clear()
                raise

    def help_out() -> None:
        with torch.inference_mode(inference), left_behind():
            take()

    with ThreadPoolExecutor(threads - 1, thread_name_prefix="atoll-beside") as others:
        taking = [others.submit(help_out) for _ in range(threads - 1)]
        take()
    for each in taking:
        each.result()


def _taken(left: deque[T]) -> Iterator[T]:
    """Take pieces, as other threads do, until none is left."""
    with suppress(IndexError):
        while True:
            yield left.popleft()


@contextmanager
def _alone() -> Iterator[None]:
    """Let torch use no threads beside the calling one."""
    before = torch.get_num_threads()  # a thread's first call of this sets the number, too
    _set_own_threads(1)
    try:
        yield
    finally:
        _set_own_threads(before)


@cache
def _can_be_alone() -> bool:
    """Return whether the OpenMP that this process finds is torch's."""
    if _set_own_threads is None:
        return False
    with _alone():
        return torch.get_num_threads() == 1
