"""Test that the real demo leaves no process behind, however it ends."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

from support.limits import DEADLINE_S

EARLY = 2  # a coordinator, and its libp2p daemon
LATE = 4  # and a peer, with its own


def atoll_demo(folder):
    arguments = ["demo", "--peers", "1", "--rounds", "1000", "--inner-steps", "1"]
    return subprocess.Popen(
        [sys.executable, "-m", "atoll.peer.cli.main", *arguments, "--out", "out"],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("processes", [EARLY, pytest.param(LATE, marks=pytest.mark.exhaustive)])
def test_no_process_outlives_a_demo_that_is_killed(tmp_path, processes):
    with atoll_demo(tmp_path) as demo:
        try:
            deadline = time.monotonic() + DEADLINE_S
            while len(children := psutil.Process(demo.pid).children(recursive=True)) < processes:
                assert demo.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
            demo.send_signal(signal.SIGKILL)
            _, alive = psutil.wait_procs(children, timeout=DEADLINE_S)
            assert alive == []
            _, err = demo.communicate(timeout=DEADLINE_S)
        finally:
            demo.kill()
    assert demo.returncode == -signal.SIGKILL
    assert "Traceback" not in err
