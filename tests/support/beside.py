"""Parts of peers without an interpreter of their own, which takes 3 s of a processor.

Network sides, and the ranks of a peer of several. `support.forks.NetworkFork` is what all tests
have; what starts real ones is in tests/peer/daemon/beside/test_trainer_side.py.
"""

import asyncio
import gc
import os
import resource
import signal
import socket
import subprocess
import sys
import threading

from atoll.peer.cli.main import main
from atoll.peer.daemon import launching
from atoll.peer.daemon.beside import network_side, starting, trainer_side
from atoll.peer.daemon.beside.channel import Channel
from atoll.peer.daemon.beside.owner_side import OwnerSide


class InThread:
    """A network side in a thread of this process, used as the process that it stands for."""

    pid = os.getpid()

    def __init__(self, connection):
        self.returncode = None
        side = network_side.NetworkSide(Channel(connection.dup()))
        self._thread = threading.Thread(target=side.run, name="network-side", daemon=True)
        self._thread.start()

    def wait(self, timeout=None):
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise subprocess.TimeoutExpired("network side", timeout)
        self.returncode = 0
        return 0

    def kill(self):
        """Leave it: a thread cannot be killed, and its test fails anyway."""


class InFork:
    """A process that is forked from this one, which had no threads."""

    def __init__(self, become, *arguments):
        self.returncode = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                gc.freeze()  # objects that close their descriptors at their end, of other owners
                become(*arguments)
            finally:
                os._exit(1)

    def wait(self, timeout=None):
        ended = threading.Event()

        def reap():
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
            ended.set()

        if self.returncode is None:
            threading.Thread(target=reap, daemon=True).start()
            if not ended.wait(timeout):
                raise subprocess.TimeoutExpired("network side", timeout)
        return self.returncode

    def poll(self):
        if self.returncode is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number):
        os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def admitted(consent, membership, fetch_tokenizer):
    """Let the owner's side and the network's side agree to a run; raise what ends it."""
    ours, theirs = socket.socketpair()
    side = network_side.NetworkSide(Channel(theirs))

    def admit():
        try:
            asyncio.run(side._admit(consent.paths, membership, fetch_tokenizer))
        except BaseException as error:
            side.end(error)
        else:
            side._channel.send("joined", None)
            side.end(None)

    line = trainer_side.NetworkLine(
        ours, on_event=lambda level, text: consent.show(text), stopping=threading.Event()
    )
    thread = threading.Thread(target=admit, daemon=True)
    thread.start()
    try:
        line._attend(OwnerSide(consent, lambda spec, module: None))
    finally:
        line.close()
        thread.join(10)


def _serve(connection):
    """Become the network process: nothing of the trainer's may stay open here."""
    kept = connection.detach()
    _close_all_but(kept)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(null, number)
    network_side.serve(socket.socket(fileno=kept))
    os._exit(0)


def _be_rank(arguments, environment, pipe, leads):
    """Become a rank: nothing of the launcher's may stay open here but its pipe."""
    os.setsid()
    _close_all_but(pipe)
    if not leads:
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    code = main(arguments)
    sys.stdout.flush()
    os._exit(code)


def _close_all_but(kept):
    most = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1 << 16)
    os.closerange(3, kept)
    os.closerange(kept + 1, most)
    signal.set_wakeup_fd(-1)


def by_forks():
    """Let this process, which has no threads yet, fork its network process and its ranks."""
    starting.start_process = lambda connection: InFork(_serve, connection)
    launching.start_rank = lambda *rank, leads: InFork(_be_rank, *rank, leads)
