"""A peer and its trainer against a real coordinator: finish, stop, resume, and damaged files."""

import dataclasses
import logging

import pytest

from atoll.coordinator.rpc.client_errors import CoordinatorError
from atoll.peer.daemon import process
from atoll.peer.daemon.process import log_file
from atoll.peer.daemon.state_directory import StateDirectoryInUse
from atoll.peer.errors import DataError
from atoll.peer.paths import PeerPaths


@pytest.fixture
def crew(organise, kit, start):
    """An endless run with two peers and a third, `peer`: two are a quorum without it."""
    organiser = organise(kit.tiny_spec(run={"rounds": 0}, round={"min_peers": 3}))
    for name in ("one", "two", "peer"):
        daemon = start(organiser.invite, name, share=0.2)
    kit.until(lambda: members(organiser) == 3, "a round of three")
    return organiser, daemon


def members(organiser, after=0):
    """Of the newest round, if it is later than a position."""
    history = organiser.status().history
    return history[-1].members if history and history[-1].position > after else 0


def test_a_peer_trains_to_the_end_and_the_coordinator_has_it_all(organise, kit, start):
    organiser = organise(kit.tiny_spec())
    daemon = start(organiser.invite)
    assert daemon.join() is True
    status = organiser.status()
    assert (status.state, status.position) == ("finished", 3)
    (peer,) = status.peers
    assert (peer.position, peer.chain, peer.state) == (3, status.chain, "left")
    assert peer.state_position == 3
    state = organiser.up.coordinator.log.replica.state
    assert peer.state_digest == state.root().hex()
    assert [e.kind for e in daemon.events][-1] == "stopped"

    assert start(organiser.invite).join() is True, "a finished run leaves it nothing to do"
    assert organiser.status().position == 3


@pytest.mark.exhaustive  # in a simulation: test_simulated_windows.py
def test_a_slow_peer_takes_shorter_windows_by_the_others_records(organise, kit, start):
    outer = {"inner_steps": 8, "windows": "deadline"}
    organiser = organise(
        kit.tiny_spec(run={"rounds": 0}, round={"min_peers": 2, "grace_s": 10.0}, outer=outer)
    )
    start(organiser.invite, "fast")
    start(organiser.invite, "slow", share=0.05)

    def windows():
        return {peer.name: peer.inner_steps for peer in organiser.status().peers}

    kit.until(lambda: windows() == {"fast": 8, "slow": 4}, "windows by speed")
    position = organiser.status().position
    kit.until(lambda: members(organiser, after=position) == 2, "a round of both")


@pytest.mark.exhaustive  # 100 rounds of processes; in a simulation test_simulated_windows.py
def test_windows_grow_alike_at_peers_that_stay_and_one_that_starts_again(organise, kit, start):
    outer = {"inner_steps": 8, "windows": "qsr", "growth": 0.0069}
    spec = kit.tiny_spec(
        run={"rounds": 100},
        round={"min_peers": 3, "grace_s": 20.0},
        outer=outer,
        inner={"min_lr_ratio": 0.0},
    )
    windows = spec.timetable(1)
    organiser = organise(spec)
    for name in ("one", "two", "leaves"):  # two are a quorum
        leaves = start(organiser.invite, name, share=0.4)
    kit.until(lambda: members(organiser, after=8) == 3, "rounds of three")
    leaves.stop.set()
    assert leaves.join() is False
    start(organiser.invite, "leaves", share=0.4)
    there = organiser.status().position
    kit.until(lambda: members(organiser, after=there) == 3, "it to be a member again")
    together = organiser.status().position
    grown = next(at for at in range(spec.run.rounds) if windows.window(at) > windows.window(8))
    enough = max(together + 7, grown)
    kit.until(lambda: organiser.status().position >= enough, "more rounds")
    status = organiser.status()
    assert status.inner_steps == windows.window(status.position) > windows.window(8)
    rows = [row for row in status.history if row.members == 3 and row.position > together + 2]
    expected = [3 * spec.step_tokens * windows.window(row.position - 1) for row in rows]
    assert [row.tokens for row in rows] == expected
    assert len(rows) >= 3


def expect_back(kit, organiser, daemon):
    """Wait until a peer that started again is a member of a round of three."""
    kit.until(lambda: daemon.said("trains on", kind="ready"), "it to train")
    assert daemon.said("resumed at position")
    there = organiser.status().position
    kit.until(lambda: members(organiser, there) == 3, "it to be a member again")


# Stopped and resumed: tests/test_processes.py; damaged: tests/peer/cli/test_peer.py.
@pytest.mark.exhaustive
def test_a_stopped_peer_resumes_where_it_was_even_if_its_file_is_damaged(
    crew, kit, start, tmp_path
):
    organiser, daemon = crew
    path = tmp_path / "peer" / "trainer.safetensors"
    daemon.stop.set()
    assert daemon.join() is False
    peer = next(p for p in organiser.status().peers if p.name == "peer")
    assert peer.state == "left"
    assert path.exists()

    again = start(organiser.invite)
    expect_back(kit, organiser, again)
    assert again.said("inner optimizer and data position resumed")

    again.stop.set()
    again.join()
    path.write_bytes(flip_a_bit(path.read_bytes()))
    damaged = start(organiser.invite)
    expect_back(kit, organiser, damaged)
    assert damaged.said("starting with a fresh inner optimizer")


def flip_a_bit(saved):
    damaged = bytearray(saved)
    damaged[-5] ^= 1
    return damaged


def test_the_end_of_a_run_that_was_missed_is_noticed_at_once(organise, kit, start):
    """The state that the peer saved is older than the run's last round."""
    organiser = organise(kit.tiny_spec(run={"rounds": 6}, round={"min_peers": 3}))
    others = [start(organiser.invite, name) for name in ("one", "two")]
    daemon = start(organiser.invite)
    kit.until(lambda: members(organiser) == 3, "a round of three")
    daemon.stop.set()
    daemon.join()
    assert [other.join() for other in others] == [True, True]
    assert start(organiser.invite).join() is True
    assert organiser.status().position == 6


def test_a_peer_without_its_data_is_told_so(organise, kit, start, tmp_path):
    organiser = organise(kit.tiny_spec())
    daemon = start(organiser.invite, data=str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="nowhere"):
        daemon.join()
    assert organiser.status().position == 0


def test_a_state_directory_serves_one_peer_at_a_time(organise, kit, start):
    organiser = organise(kit.tiny_spec(run={"rounds": 0}))
    daemon = start(organiser.invite)
    kit.until(lambda: organiser.status().position >= 1, "a round")
    other = start(organiser.invite)
    with pytest.raises(StateDirectoryInUse, match="another peer is running"):
        other.join()
    there = organiser.status().position
    kit.until(lambda: organiser.status().position > there, "the first to go on")
    assert daemon.thread.is_alive()


def test_a_stop_while_it_waits_for_the_coordinator_ends_it(organise, kit, start):
    organiser = organise(kit.tiny_spec())
    organiser.stop()
    daemon = start(organiser.invite)
    kit.until(lambda: daemon.said("retrying"), "it to try")
    daemon.stop.set()
    assert daemon.join() is False


def test_a_stop_while_it_joins_reads_no_data(organise, kit, start, tmp_path, monkeypatch):
    opening = process.NetworkProcess

    def open_and_stop(*args, stopping, **options):
        network = opening(*args, stopping=stopping, **options)
        stopping.set()
        return network

    monkeypatch.setattr(process, "NetworkProcess", open_and_stop)
    daemon = start(organise(kit.tiny_spec()).invite, data=str(tmp_path / "nowhere"))
    assert daemon.join() is False


def test_a_stop_does_not_wait_for_a_coordinator_that_is_away(organise, kit, start):
    organiser = organise(kit.tiny_spec(run={"rounds": 50}))
    daemon = start(organiser.invite)
    kit.until(lambda: organiser.status().position >= 1, "a round")
    organiser.stop()
    kit.until(lambda: daemon.said("run complete"), "the last round")
    assert daemon.thread.is_alive()
    daemon.stop.set()
    daemon.thread.join(15)
    assert not daemon.thread.is_alive()


def test_refusals_of_the_coordinator_reach_the_caller(organise, kit, start):
    organiser = organise(kit.tiny_spec())
    daemon = start(dataclasses.replace(organiser.invite, token=b"guessed"))
    with pytest.raises(CoordinatorError, match="token"):
        daemon.join()


def test_what_asyncio_says_of_failed_callbacks_is_in_the_log(tmp_path):
    paths = PeerPaths(root=tmp_path)
    with log_file(paths):
        logging.getLogger("asyncio").error("Task was destroyed but it is pending!")
    assert "ERROR asyncio: Task was destroyed" in paths.messages.read_text()
    assert not logging.getLogger("asyncio").handlers
