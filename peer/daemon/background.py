"""Threads that do a round's work beside the one that trains, and yield to it.

No gradient is computed in them: each call of torch takes a tenth less without what autograd notes
of views. What they make is not changed in place elsewhere, which torch refuses.
"""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch

NICENESS = 10  # a tenth of a core where others want all of it; with 5 steps ended as late as with 0
MOST = 19
_thread = threading.local()


def background_threads(count: int, name: str) -> ThreadPoolExecutor:
    """So many threads of lower priority, whose names begin alike."""
    return ThreadPoolExecutor(count, thread_name_prefix=name, initializer=_begin)


def _begin() -> None:
    _thread.without_gradients = torch.inference_mode()
    _thread.without_gradients.__enter__()
    _yield_to_others()


def _yield_to_others() -> None:
    """On Linux each thread has a priority of its own; elsewhere nothing changes."""
    if sys.platform == "linux":
        niceness = min(MOST, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
        with suppress(OSError):  # forbidden here: then it competes
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
