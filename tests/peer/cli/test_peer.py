"""`atoll peer` as its owner sees it: what it prints, and its exit code."""

import dataclasses
import logging
import os
import re
import shutil
import signal
import socket
import threading
import time
import types

import pytest
import torch

from atoll.peer.cli import main as cli
from atoll.peer.cli.peer import _as_text as as_text
from atoll.peer.daemon.membership import StateDirectory
from atoll.peer.daemon.process import PeerEvent
from atoll.peer.paths import PeerPaths
from support.commands import INVITE, contents, refused
from support.environment import NOBODY


@pytest.fixture
def paths(tmp_path):
    return PeerPaths(root=tmp_path / "state")


@pytest.fixture
def peer(capsys, paths, network_threads):
    """Runs the command on the state directory; gives its exit code, stdout and stderr."""

    def run(invite, *arguments):
        command = ["peer", str(invite), "--state-dir", str(paths.root), "--device", "cpu"]
        command += ["--listen", "/ip4/127.0.0.1/tcp/0", "--yes", *map(str, arguments)]
        try:
            code = cli.main(command)
        except SystemExit as leaving:
            code = leaving.code
        out = capsys.readouterr()
        assert "Traceback" not in out.err
        return types.SimpleNamespace(code=code, out=out.out, err=out.err)

    return run


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ('{"run_id": "0909"}', "expected the state of run 010101010101, got that of run 0909"),
        ("garbage", "run.json: expected the description of a run, got something else"),
    ],
)
def test_a_state_directory_of_something_else_is_refused(peer, paths, stored, expected):
    paths.root.mkdir()
    paths.run.write_text(stored)
    result = peer(NOBODY)
    assert (result.code, result.out) == (2, "")
    assert expected in result.err
    assert "another directory with --state-dir" in result.err
    assert contents(paths.root) == {paths.run: stored.encode()}


def test_a_state_directory_in_use_is_refused(peer, paths):
    directory = StateDirectory(paths, NOBODY.run_id)
    result = peer(NOBODY)
    directory.close()
    assert (result.code, result.out) == (2, "")
    assert "another peer is running on this state directory" in result.err
    assert contents(paths.root) == {paths.root / "lock": b""}


def test_a_state_directory_that_cannot_be_is_refused(peer, paths):
    paths.root.write_text("a file")
    result = peer(NOBODY)
    assert (result.code, result.out) == (2, "")
    assert "expected a folder that this peer can write" in result.err
    assert paths.root.read_text() == "a file"


def test_a_directory_that_cannot_be_made_is_refused(peer, paths):
    paths.root.parent.joinpath("state").write_text("a file")
    paths = PeerPaths(root=paths.root / "deeper")
    result = peer(NOBODY, "--state-dir", paths.root)
    assert result.code == 2
    assert "Not a directory" in result.err


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--uplink", "-5"),
        ("--uplink", "nan"),
        ("--share", "0"),
        ("--share", "half"),
        ("--serve", "0"),
        ("--serve", "1.5"),
        ("--downlink", "fast"),
        ("--name", "x" * 65),
        ("--listen", "127.0.0.1:4000"),
        ("--announce", "/ip4/no-address/tcp/1"),
        ("--metrics-listen", "9701"),
        ("--track", "mlflow"),
    ],
)
def test_an_option_without_sense_is_refused_at_once(peer, paths, option, value):
    result = peer(NOBODY, option, value)
    assert (result.code, result.out) == (2, "")
    assert option in result.err
    assert "expected" in result.err
    assert not paths.root.exists()


def test_a_port_of_metrics_in_use_is_refused(peer):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = peer(NOBODY, "--metrics-listen", address)
    assert result.code == 2
    assert f"--metrics-listen {address}: Address already in use" in result.err


def test_a_port_in_use_is_refused_at_once(peer):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = peer(NOBODY, "--listen", f"/ip4/127.0.0.1/tcp/{port}")
    assert (result.code, result.out) == (2, "")
    assert f"cannot listen on 127.0.0.1:{port} (Address already in use)" in result.err
    assert "--listen" in result.err


@pytest.mark.parametrize("port", [4001, 0])
def test_an_address_of_another_machine_is_refused_at_once(peer, port):
    result = peer(NOBODY, "--listen", f"/ip4/203.0.113.7/tcp/{port}")
    assert result.code == 2
    assert f"cannot listen on 203.0.113.7:{port}" in result.err


def stop_once(condition, number=signal.SIGTERM):
    """A signal to this process, in which the command runs, once something is so."""

    def wait():
        deadline = time.monotonic() + 30
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    threading.Thread(target=wait).start()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_nobody_at_the_address_is_said_with_a_remedy_and_tried_again(peer, paths, number, code):
    def is_waiting():
        return paths.messages.exists() and "retrying" in paths.messages.read_text()

    stop_once(is_waiting, number)
    result = peer(NOBODY)
    assert (result.code, result.out) == (code, "")
    assert "127.0.0.1:9: the coordinator cannot be reached (connection refused)" in result.err
    assert "ask the organiser" in result.err
    assert "retrying in 0.5 s" in result.err


def test_a_damaged_trainer_state_is_said_and_costs_no_more(peer, paths, organise, kit):
    organiser = organise(kit.tiny_spec())
    first = peer(organiser.invite)
    assert (first.code, first.out) == (0, "")
    assert organiser.status().state == "finished"
    assert re.match(r"[\d:]{8}  starting a peer for run [0-9a-f]{12} of ", first.err)
    assert re.search(r"^[\d:]{8}  the run asks this machine for the following:$", first.err, re.M)
    assert re.search(
        r"^[\d:]{8}  this peer \(\w{6}\) trains on cpu; the run starts with 1 ", first.err, re.M
    )
    assert "asks this machine" not in peer(organiser.invite).err
    assert re.search(r"^[\d:]{8}  round 3/3  loss \d\.\d{3}  [\d,]+ tok/s  util ", first.err, re.M)
    paths.trainer().write_bytes(b"garbage")
    again = peer(organiser.invite)
    assert again.code == 0
    assert "starting with a fresh inner optimizer" in again.err
    assert str(paths.trainer()) in again.err
    assert "resumed at position 3" in again.err
    assert "run complete: all 3 rounds committed" in again.err


def test_a_peer_that_lost_its_log_says_from_whom_it_has_it_again(peer, paths, organise, kit):
    organiser = organise(kit.tiny_spec())
    peer(organiser.invite)
    shutil.rmtree(paths.log())
    again = peer(organiser.invite)
    assert again.code == 0
    assert re.search(r"recovered from position 0 to 3: .* from coordinator in ", again.err)


def test_peers_are_told_apart_by_the_ends_of_their_names(capsys):
    peer_id = "12D3KooWK8ZiEmjhRa8rHTvptvSWWLwjikhmF4g12q9VVMb73JqV"
    told = f"round 3: {peer_id} cannot be reached: failed to dial {peer_id}: all dials failed"
    as_text(PeerEvent(kind="event", position=3, text=told, level="warning"))
    said = capsys.readouterr().err.partition("  ")[2]
    expected = "round 3: b73JqV cannot be reached: failed to dial b73JqV: all dials failed"
    assert said == f"warning  {expected}\n"


def test_an_address_to_announce_needs_a_port(atoll):
    for address in ("/ip4/203.0.113.7", "/ip4/203.0.113.7/tcp/0"):
        assert "with a port" in refused(atoll("peer", "INVITE", "--announce", address))


def test_a_peer_that_cannot_write_its_log_leaves_the_terminal_alone(atoll, monkeypatch, capsys):
    monkeypatch.setattr(logging, "raiseExceptions", True)
    refused(atoll("peer", "hello"))
    full = logging.StreamHandler(types.SimpleNamespace(write=None))
    full.emit(logging.makeLogRecord({"msg": "lost"}))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("change", [{"token": b"guessed"}, {"run_id": bytes(32)}])
def test_a_peer_with_an_invite_of_another_run_is_refused(atoll, invite, change):
    refused(atoll("peer", dataclasses.replace(invite, **change)))


def test_a_peer_without_its_data_is_refused_before_it_joins(atoll, tmp_path):
    result = atoll("peer", INVITE, "--state-dir", "state", "--data", "no-such-folder")
    assert "--data 'no-such-folder' does not exist" in refused(result)
    assert not (tmp_path / "state").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what the test lacks")
def test_a_peer_without_the_device_it_asks_for_is_refused(atoll, invite, tmp_path):
    assert "cuda" in refused(atoll("peer", invite, "--state-dir", "state", "--device", "cuda"))
    assert not (tmp_path / "state").exists()
