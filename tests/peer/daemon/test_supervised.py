"""A process ends with whoever holds the other end of its standard input."""

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import signal, sys, time
from atoll.peer.daemon import supervised
{before}
supervised.stop_with_stdin()
print("ready", flush=True)
time.sleep(60)
"""


def start(before=""):
    command = [sys.executable, "-c", PROGRAM.format(before=before)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.parametrize(
    ("before", "code"),
    [
        ("", -signal.SIGTERM),
        ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))", 7),
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN); supervised.STOP_S = 0.2", 1),
    ],
    ids=["unready", "heeds it", "deaf"],
)
def test_the_end_of_its_input_stops_it(before, code):
    with start(before) as process:
        assert process.stdout.readline() == "ready\n"
        process.stdin.write("what it is told makes no difference\n")
        process.stdin.flush()
        assert process.poll() is None
        process.stdin.close()
        assert process.wait(10) == code
        assert process.stderr.read() == ""


def test_its_own_end_is_not_disturbed():
    """The thread that reads holds no lock that the interpreter wants at its end."""
    program = "from atoll.peer.daemon.supervised import stop_with_stdin; stop_with_stdin()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.wait(10) == 0
        assert process.stderr.read() == b""
