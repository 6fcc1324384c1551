"""Peers of several processes against a real coordinator: one is killed, or the model is cut."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from atoll.peer.daemon.launching import LOST, SMALLER, environment, is_lost
from support.forks import Forked
from support.limits import DEADLINE_S
from support.organiser import LOOPBACK

ROUNDS = 4
CUT_PEER = Path(__file__).parents[2] / "support" / "cut_peer.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


class Child:
    """`atoll peer`, and the events that it prints."""

    def __init__(self, invite, state_dir, text, *words, program=None):
        words = ["peer", str(invite), "--json", "--yes", "--device", "cpu", *words]
        words += ["--data", text, "--listen", *LOOPBACK, "--state-dir", state_dir]
        started = {
            "stdout": subprocess.PIPE,
            "env": os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        }
        if program is None:
            self.process = Forked(*words, **started)
        else:
            command = [sys.executable, *map(str, program), *map(str, words)]
            self.process = subprocess.Popen(command, text=True, **started)
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
        return sorted(ranks, key=lambda each: (each.create_time(), each.pid))[number]

    def end(self):
        self.process.kill()  # its ranks end with it
        self.process.wait(DEADLINE_S)
        self.process.stdout.close()


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the closed ring of a low coral island. " * 2000)
    return path


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_peers_of_one_rank_and_of_two_cut_by_torchrun_share_a_log(organise, kit, text, tmp_path):
    organiser = organise(kit.tiny_spec(run={"rounds": ROUNDS}, round={"min_peers": 2}))
    invite = organiser.invite.encode()
    alone = Child(invite, tmp_path / "alone", text)
    cut = Child(invite, tmp_path / "cut", text, program=(*TORCHRUN, 2, CUT_PEER))
    try:
        assert alone.process.wait(DEADLINE_S) == cut.process.wait(DEADLINE_S) == 0
        assert cut.said("cut", "test") == 2
        status = organiser.status()
        assert (status.state, status.position) == ("finished", ROUNDS)
        assert {peer.device for peer in status.peers} == {"cpu", "2 x cpu"}
        assert [each.members for each in status.history] == [2] * ROUNDS
        assert [each.left_out for each in status.history] == [[]] * ROUNDS
        assert {(peer.chain, peer.state_position) for peer in status.peers} == {
            (status.chain, ROUNDS)
        }
        root = organiser.up.coordinator.log.replica.state.root().hex()
        assert {peer.state_digest for peer in status.peers} == {root}
    finally:
        alone.end()
        cut.end()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_peer_of_two_ranks_starts_again_when_one_is_killed(organise, kit, text, tmp_path):
    organiser = organise(kit.tiny_spec(run={"rounds": 0}))
    invite = organiser.invite.encode()
    child = Child(invite, tmp_path / "peer", text, "--ranks", "2", "--share", "0.3")
    try:
        kit.until(lambda: organiser.status().position >= 1, "a round of the ranks")
        (peer,) = organiser.status().peers
        assert peer.device == "2 x cpu"
        child.rank(1).kill()
        kit.until(lambda: child.said("starting all 2 again"), "a new start")
        kit.until(lambda: child.said("trains on", "ready") == 2, "training")
        position = organiser.status().position
        kit.until(lambda: organiser.status().position > position, "another round")
        ranks = [child.rank(number) for number in range(2)]
        child.process.send_signal(signal.SIGTERM)
        assert child.process.wait(DEADLINE_S) == 0
        assert not any(rank.is_running() for rank in ranks)
    finally:
        child.end()


@pytest.mark.slow
def test_gpus_on_a_machine_without_any_are_refused_at_once(tmp_path):
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    with Forked("peer", "INVITE", "--gpus", "all", stderr=subprocess.PIPE, env=hidden) as refused:
        assert refused.wait(DEADLINE_S) == 2
        assert "sees no CUDA device" in refused.stderr.read()


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
