"""`atoll peer` as two processes, either of which is killed or frozen."""

import json
import os
import signal
import subprocess
from contextlib import suppress

import psutil
import pytest

from support.forks import Forked
from support.organiser import LOOPBACK

pytestmark = pytest.mark.slow


class Started:
    """`atoll peer` and its network process."""

    def __init__(self, invite, folder, *more):
        words = ["peer", invite.encode(), "--state-dir", folder, "--device", "cpu", "--json"]
        self._errors = folder.with_suffix(".log")
        with self._errors.open("a") as errors:
            self.trainer = Forked(
                *words, "--listen", *LOOPBACK, *more, stdout=subprocess.PIPE, stderr=errors
            )

    def await_said(self, text):
        for line in self.trainer.stdout:
            if text in json.loads(line)["text"]:
                return
        raise AssertionError(f"expected {text!r}; {self.errors()}")

    def errors(self):
        return self._errors.read_text()

    def processes(self):
        """The network process, and all that belongs to it."""
        (network,) = psutil.Process(self.trainer.pid).children()
        return [network, *network.children(recursive=True)]

    def end(self):
        for process in [self.trainer, *psutil.Process(self.trainer.pid).children(recursive=True)]:
            process.kill()
        self.trainer.wait(60)
        self.trainer.stdout.close()


@pytest.fixture
def started(tmp_path):
    running = []

    def start(invite, *more, name="peer"):
        running.append(Started(invite, tmp_path / name, *more))
        return running[-1]

    shared = set(os.listdir("/dev/shm"))
    yield start
    for each in running:
        if each.trainer.poll() is None:
            each.end()
        each.trainer.stdout.close()
    assert not [name for name in set(os.listdir("/dev/shm")) - shared if "atoll" in name]


@pytest.fixture
def organiser(organise, kit):
    return organise(kit.tiny_spec(run={"rounds": 0}))


def expect_gone(kit, processes):
    kit.until(
        lambda: all(not p.is_running() or p.status() == "zombie" for p in processes),
        "the end of all processes",
    )


def test_a_peer_whose_network_is_killed_ends_with_a_remedy_and_resumes(organiser, kit, started):
    peer = started(organiser.invite, "--yes")
    peer.await_said("round 2")
    network, *others = peer.processes()
    assert any("p2pd" in each.name() for each in others)
    network.kill()
    assert peer.trainer.wait(60) == 1
    assert "was killed by SIGKILL; start the peer again" in peer.errors()
    assert "Traceback" not in peer.errors()
    expect_gone(kit, others)
    started(organiser.invite).await_said("resumed at position")


def test_the_network_of_a_killed_trainer_leaves_and_makes_room(organiser, kit, started):
    peer = started(organiser.invite, "--yes")
    peer.await_said("round 2")
    left = peer.processes()
    peer.trainer.kill()
    again = started(organiser.invite)  # at once, as a service manager does
    again.await_said("trains on")
    expect_gone(kit, left)


def test_a_stop_waits_for_a_frozen_network(organiser, kit, started):
    peer = started(organiser.invite, "--yes")
    peer.await_said("round 1")
    network, *others = peer.processes()
    network.send_signal(signal.SIGSTOP)
    peer.trainer.send_signal(signal.SIGTERM)
    peer.await_said("stopping: this peer leaves the run")
    network.send_signal(signal.SIGCONT)
    assert peer.trainer.wait(60) == 0
    expect_gone(kit, [network, *others])
    kit.until(lambda: organiser.status().peers[0].state == "left", "a goodbye")


def test_a_refused_run_leaves_no_process(organiser, kit, started):
    peer = started(organiser.invite)  # without a terminal, and without --yes
    left = set()
    while peer.trainer.poll() is None:  # it may end as soon as it has asked
        with suppress(psutil.NoSuchProcess):
            left.update(psutil.Process(peer.trainer.pid).children(recursive=True))
    assert left and peer.trainer.wait(60) == 2
    assert "or pass --yes" in peer.errors()
    expect_gone(kit, left)
