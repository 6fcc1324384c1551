"""Ending with the program that started this one.

That program gives us a pipe as standard input and keeps the other end. However it ends, even by
SIGKILL, the kernel closes its end; we then read the end of the input and stop as on SIGTERM. Unlike
a signal on a parent's death, this works on every Unix and whichever thread started us.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress

STDIN = 0
STOP_S = 20.0  # a peer says goodbye to everybody within this, or is stuck


def stop_with_stdin(pipe: int = STDIN) -> None:
    """Send this process SIGTERM when its standard input ends; kill it if it does not stop.

    Args:
        pipe: another file descriptor to read instead.
    """
    threading.Thread(target=_watch, args=(pipe,), name="atoll-stdin", daemon=True).start()


def _watch(pipe: int) -> None:
    with suppress(OSError):  # closed: nobody holds the other end
        while os.read(pipe, 4096):  # not sys.stdin, whose lock would outlive the interpreter
            pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(STOP_S)
    os._exit(1)
