"""A peer of several processes against a real coordinator, one of which is killed."""

import json
import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest

from atoll.peer.daemon.launching import LOST, SMALLER, environment, is_lost
from support.organiser import LOOPBACK

TIMEOUT_S = 90


class Child:
    """`atoll peer --ranks`, and the events that it prints."""

    def __init__(self, invite, state_dir, ranks, text):
        command = [sys.executable, "-m", "atoll.peer.cli.main", "peer", str(invite), "--json"]
        command += ["--yes", "--device", "cpu", "--ranks", str(ranks), "--listen", *LOOPBACK]
        command += ["--data", str(text), "--share", "0.3"]
        self.process = subprocess.Popen(
            [*command, "--state-dir", str(state_dir)], stdout=subprocess.PIPE, text=True
        )
        self.events = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self.events.append(json.loads(line))

    def said(self, text, kind="event"):
        return sum(event["kind"] == kind and text in event["text"] for event in self.events)

    def rank(self, number):
        """The process of one rank."""
        ranks = psutil.Process(self.process.pid).children()
        (found,) = [each for each in ranks if each.environ()["RANK"] == str(number)]
        return found

    def end(self):
        self.process.kill()  # its ranks end with it
        self.process.wait(TIMEOUT_S)
        self.process.stdout.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_peer_of_two_ranks_starts_again_when_one_is_killed(organise, kit, tmp_path):
    organiser = organise(kit.tiny_spec(run={"rounds": 0}))
    text = tmp_path / "text.txt"
    text.write_text("the closed ring of a low coral island. " * 2000)
    child = Child(organiser.invite.encode(), tmp_path / "peer", 2, text)
    try:
        kit.until(lambda: organiser.status().position >= 1, "a round of the ranks", TIMEOUT_S)
        (peer,) = organiser.status().peers
        assert peer.device == "2 x cpu"
        child.rank(1).kill()
        kit.until(lambda: child.said("starting all 2 again"), "a new start", TIMEOUT_S)
        kit.until(lambda: child.said("trains on", "ready") == 2, "training", TIMEOUT_S)
        position = organiser.status().position
        kit.until(lambda: organiser.status().position > position, "another round", TIMEOUT_S)
        ranks = [child.rank(number) for number in range(2)]
        child.process.send_signal(signal.SIGTERM)
        assert child.process.wait(TIMEOUT_S) == 0
        assert not any(rank.is_running() for rank in ranks)
    finally:
        child.end()


@pytest.mark.slow
def test_gpus_on_a_machine_without_any_are_refused_at_once(tmp_path):
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "atoll.peer.cli.main", "peer", "INVITE", "--gpus", "all"]
    refused = subprocess.run(command, env=hidden, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert refused.returncode == 2
    assert "sees no CUDA device" in refused.stderr


@pytest.mark.parametrize(
    ("codes", "lost"),
    [
        ([0, 0], False),
        ([2, LOST], False),  # a refusal, which another start would not cure
        ([1, LOST], False),
        ([LOST, -9], True),
        ([-9, LOST], True),
        ([1, -9], True),  # torch's own error at the first rank
        ([LOST, 1], True),
        ([1, SMALLER], True),  # out of memory
    ],
)
def test_ranks_start_again_only_if_one_was_lost(codes, lost):
    assert is_lost(codes) is lost


def test_the_environment_is_that_of_torchrun_and_the_owners_wins(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("RANK", "5")
    found = environment(1, 4, store="file", pipe=9)
    assert (found["RANK"], found["LOCAL_RANK"]) == ("1", "1")
    assert found["WORLD_SIZE"] == found["LOCAL_WORLD_SIZE"] == "4"
    assert found["OMP_NUM_THREADS"] == "7"
