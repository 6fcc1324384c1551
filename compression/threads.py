"""The threads of each piece of a round: how many it takes, and those that share it.

    apply, residual    own ones, at most 4    many short calls over runs of values
    root               own ones, at most 4    BLAKE3 of leaves holds no lock
    decoding, means    one of torch of two    many short calls, in a pool of two already
    long calls         those of torch         it divides each of them once

A pass over a tile takes 10 to 50 us. torch divides each between its threads, and all wait for the
slowest. In a process in which several threads call torch, libgomp counts more threads than
processors, and lets those that wait for the next call sleep: then a second thread makes passes two
to three times slower. Own threads wait for each other once a piece. Each takes whole runs, one
after another, and calls torch on one thread.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import torch

AT_MOST = 4  # memory serves other work beside it, and each call takes the interpreter's lock
FEW = 2  # threads of torch, where one is as fast in short calls

# Of the calling thread alone. `torch.set_num_threads` sets the number of threads to come as well.
_set_threads = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)

T = TypeVar("T")
R = TypeVar("R")


class _OfThread(threading.local):
    """The settings of one thread."""

    usable = 0
    """threads that its pieces may take; 0 for as many as torch has"""

    def __init__(self) -> None:
        """Begin in each thread; a mode lasts as long as its object."""
        self.without_gradients = torch.inference_mode()


_of_thread = _OfThread()


def usable() -> int:
    """Return how many threads a piece may take that this thread begins."""
    return _of_thread.usable or torch.get_num_threads()


def call_torch_alone() -> None:
    """Let this thread call torch on one thread from now on, if torch has few.

    What it shares with own threads still takes as many as before.
    """
    if torch.get_num_threads() <= FEW and _set_threads is not None:
        _of_thread.usable = usable()
        _set_threads(1)


def share(work: Callable[[T], R], runs: Sequence[T]) -> list[R]:
    """Call a function with each of some runs, on own threads and this one; return the results.

    Each thread takes the next run when it is through with one, so runs should last 50 us or more,
    and be independent. Own threads are in inference mode.

    Raises:
        Exception: the first one of a run, after which no other run begins.
    """
    count = min(usable(), AT_MOST, len(runs))
    if count < 2 or _set_threads is None:
        return [work(run) for run in runs]
    turns, results = iter(range(len(runs))), dict[int, R]()

    def take_turns() -> None:
        try:
            for turn in turns:
                results[turn] = work(runs[turn])
        except BaseException:
            deque(turns, maxlen=0)  # nobody begins another
            raise

    with _on_one_thread():
        helping = _ask(take_turns, count - 1)
        try:
            take_turns()
        finally:
            busy = [each for each in helping if not each.cancel()]
            wait(busy)
    for each in busy:
        each.result()
    return [results[turn] for turn in range(len(runs))]


def _ask(work: Callable[[], None], count: int) -> list[Future[None]]:
    """Ask own threads to do some work, if they still take any."""
    helpers = _helpers(_niceness())
    try:
        return [helpers.submit(work) for _ in range(count)]
    except RuntimeError:  # the interpreter ends, which lets threads end what they do
        return []


@contextmanager
def _on_one_thread() -> Iterator[None]:
    before, of_pieces = torch.get_num_threads(), _of_thread.usable
    assert _set_threads is not None, "`share` looks"
    _of_thread.usable = 1  # what is shared within a run is not shared again
    _set_threads(1)
    try:
        yield
    finally:
        _of_thread.usable = of_pieces
        _set_threads(before)


def _niceness() -> int:
    """Return the priority of this thread, which those that it starts inherit."""
    return os.getpriority(os.PRIO_PROCESS, 0) if sys.platform == "linux" else 0


@cache
def _helpers(niceness: int) -> ThreadPoolExecutor:
    """Return the own threads for callers of a priority: nobody waits for a thread of a lower one.

    They keep their scratch memory from call to call.
    """
    name = f"atoll-share-{niceness}"
    return ThreadPoolExecutor(AT_MOST - 1, thread_name_prefix=name, initializer=_help)


def _help() -> None:
    _of_thread.without_gradients.__enter__()
    torch.get_num_threads()  # the first call of torch would set the number of the process
    assert _set_threads is not None, "`share` looks"
    _set_threads(1)


if hasattr(os, "register_at_fork"):  # a forked process has no threads but one
    os.register_at_fork(after_in_child=_helpers.cache_clear)
