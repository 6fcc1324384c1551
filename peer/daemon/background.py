"""Threads that do a round's work while another one trains, and yield to it.

They run in inference mode: without autograd's record of views each call of torch takes a tenth
less. Tensors made here must not be changed in place elsewhere, which torch refuses.
"""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import torch

from atoll.compression import threads

NICENESS = 10  # a tenth of a contended core; at 5, inner steps ended as late as at 0
MOST = 19  # the highest niceness of Linux
_thread = threading.local()


def background_threads(count: int, name: str, *, short_calls: bool = False) -> ThreadPoolExecutor:
    """Return a pool of threads of lower priority.

    Args:
        count: threads of the pool.
        name: begins the name of each.
        short_calls: call torch on one thread where it has few: its calls take some 100 us each.
    """
    begin = partial(_begin, short_calls=short_calls)
    return ThreadPoolExecutor(count, thread_name_prefix=name, initializer=begin)


def _begin(*, short_calls: bool) -> None:
    _thread.without_gradients = torch.inference_mode()
    _thread.without_gradients.__enter__()
    _yield_to_others()
    if short_calls:
        threads.call_torch_alone()


def _yield_to_others() -> None:
    """Lower this thread's priority on Linux; elsewhere threads have none of their own."""
    if sys.platform == "linux":
        niceness = min(MOST, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
        with suppress(OSError):  # forbidden here: the thread then competes
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
