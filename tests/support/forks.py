"""Processes that are forked from one that has imported everything already.

Importing torch, and what it imports at the first optimizer, takes 2.5 s of a processor, and tests
start dozens of such processes.
"""

import contextlib
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
from multiprocessing import reduction

from support.limits import DEADLINE_S

# A process has one fork server, and whoever names its modules last wins: so they are named here,
# for all. `torch._dynamo` is what torch.optim imports when the first optimizer is made.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "torch._dynamo",
        "torch.distributed.fsdp",
        "atoll.peer.daemon.reach.bootstrap",
        "atoll.peer.cli.main",
        "atoll.peer.daemon.process",
        "atoll.peer.daemon.beside.network_side",
        "atoll.peer.daemon.gossip_run",
        "atoll.peer.daemon.pipeline_run",
        "support.beside",
        "atoll.coordinator.service.server",
        "support.ranks",
        "support.rank_work",
    ]
)

STREAMS = ("stdin", "stdout", "stderr")


class _Process:
    """A process of the fork server, used as a `subprocess.Popen`."""

    def __init__(self, become, *arguments):
        self._process = FORKS.Process(target=become, args=arguments)
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self._process.exitcode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("atoll", timeout)
        return self.returncode

    def send_signal(self, number):
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


class NetworkFork(_Process):
    """A network side of a peer of this process, in a process of its own."""

    def __init__(self, connection):
        there = (os.getcwd(), dict(os.environ))
        super().__init__(_serve, _Descriptor(connection.fileno()), *there)


class Forked(_Process):
    """`atoll WORDS` in a process and a process group of its own.

    With `program`, it is that file of Python which gets the words. `stdout` and `stderr` may be
    `subprocess.PIPE`, to be read here as text.
    """

    def __init__(
        self,
        *words,
        program=None,
        stdin=subprocess.DEVNULL,
        stdout=None,
        stderr=None,
        cwd=None,
        env=None,
    ):
        self.stdout = self.stderr = None
        with contextlib.ExitStack() as stack:
            given = []
            for number, stream in enumerate((stdin, stdout, stderr)):
                if stream == subprocess.PIPE:
                    ours, stream = os.pipe()
                    stack.callback(os.close, stream)
                    setattr(self, STREAMS[number], open(ours, encoding="utf-8"))
                elif stream == subprocess.DEVNULL:
                    stream = os.open(os.devnull, os.O_RDWR)
                    stack.callback(os.close, stream)
                elif stream is None:
                    stream = number
                given.append(_Descriptor(stream if isinstance(stream, int) else stream.fileno()))
            words = list(map(str, words))
            there = (given, str(cwd or os.getcwd()), dict(env or os.environ))
            super().__init__(_become, program and str(program), words, *there)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait(DEADLINE_S)

    def communicate(self, timeout=None):
        """Return what it printed, less than a pipe holds."""
        self.wait(timeout)
        return tuple(stream and stream.read() for stream in (self.stdout, self.stderr))


class _Descriptor:
    """A file descriptor that reaches the process that is forked."""

    def __init__(self, number):
        self.number = number

    def __getstate__(self):
        return reduction.DupFd(self.number)

    def __setstate__(self, given):
        self.number = given.detach()


def _serve(connection, folder, environment):
    _move_to(folder, environment)
    from atoll.peer.daemon.beside import network_side

    network_side.serve(socket.socket(fileno=connection.number))


def _become(program, words, given, folder, environment):
    os.setsid()
    for number, descriptor in enumerate(given):
        os.dup2(descriptor.number, number)
        os.close(descriptor.number)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)
    # As Python opens them: by lines for a terminal.
    sys.stdout = sys.__stdout__ = open(1, "w", buffering=1 if os.isatty(1) else -1, closefd=False)
    sys.stderr = sys.__stderr__ = open(
        2, "w", buffering=1, errors="backslashreplace", closefd=False
    )
    _move_to(folder, environment)
    from atoll.peer.cli.main import main
    from support import beside

    beside.by_forks()
    sys.argv = [program or "atoll", *words]
    if program is None:
        sys.exit(main(words))
    sys.path.insert(0, os.path.dirname(program))
    try:
        runpy.run_path(program, run_name="__main__")
    except KeyboardInterrupt:  # as the interpreter ends
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


def _move_to(folder, environment):
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
