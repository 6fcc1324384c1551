"""Starting a network process, perhaps before anybody needs it.

Either process of a peer imports torch, seconds of work. So the command starts the other one before
its own imports, and both load at once; whoever joins first takes it. Nothing here imports torch.
"""

from __future__ import annotations

import gc
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

PROGRAM = "atoll.peer.daemon.beside.network_main"

Started = tuple[socket.socket, "subprocess.Popen[bytes]"]
"""This process's end of a pair of sockets, and the process that has the other."""

_ahead: list[Started] = []


@contextmanager
def started_ahead() -> Iterator[None]:
    """Start a process for the first who asks; end it if nobody has when the block is left."""
    _ahead.append(started())
    try:
        yield
    finally:
        if (left := take_ahead()) is not None:
            unused, process = left
            unused.close()
            process.kill()
            process.wait()


@contextmanager
def loading() -> Iterator[None]:
    """Look for no garbage while modules are imported.

    Nothing of them is garbage, and looking takes a seventh of the time that torch and the rest of a
    process take to load.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def take_ahead() -> Started | None:
    """Return the process that was started ahead, once."""
    return _ahead.pop() if _ahead else None


def started() -> Started:
    """Start a process now."""
    ours, theirs = socket.socketpair()
    with theirs:
        return ours, start_process(theirs)


def start_process(connection: socket.socket) -> subprocess.Popen[bytes]:
    """Start a network process, which gets one end of a pair of sockets.

    It is in this process's group: what kills or freezes that means both. Ctrl-C and SIGTERM mean
    the trainer, which then tells it; they stay blocked there until it has handlers for them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        return subprocess.Popen(
            # -P: nothing of the folder in which the trainer runs is imported.
            [sys.executable, "-P", "-m", PROGRAM, str(connection.fileno())],
            pass_fds=[connection.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
