"""The invite of commands that watch a run, and coordinators that cannot be asked."""

import dataclasses
import json

import pytest

from atoll.coordinator.run.keys import KEYS_FILE, RunKeys
from atoll.coordinator.run.relocation import Relocation
from atoll.peer.cli.watching import read_invite
from atoll.peer.paths import PeerPaths, follower_dir, peer_state_dir
from support.commands import INVITE, refused


@pytest.mark.parametrize("command", ["peer", "status", "rounds", "dashboard"])
@pytest.mark.parametrize(
    ("invite", "expected"),
    [
        ("hello", "starts with 'atoll1', got 'hello'"),
        ("no-such-file", "contains it (no such file exists)"),
        ("atoll2" + INVITE[6:], "version"),
        (INVITE[:-3], "damaged"),
        (INVITE.replace("A", "B", 1), "damaged"),
    ],
)
def test_an_invite_that_is_none_is_refused(atoll, command, invite, expected):
    assert expected in refused(atoll(command, invite))


def test_an_invite_may_stand_in_a_file(tmp_path):
    (tmp_path / "invite").write_text(INVITE[:40] + "\n" + INVITE[40:] + "\n")
    assert read_invite(str(tmp_path / "invite")).encode() == INVITE


def test_a_file_without_an_invite_is_refused(atoll, tmp_path):
    (tmp_path / "invite").write_bytes(b"\xff\xfe")
    assert "invite does not contain an invite" in refused(atoll("status", "invite"))


@pytest.mark.parametrize("command", ["status", "rounds"])
def test_an_unreachable_coordinator_is_a_failure_with_a_remedy(atoll, command):
    result = atoll(command, INVITE)
    assert (result.code, result.out) == (1, "")
    assert "127.0.0.1:9: the coordinator cannot be reached (connection refused)" in result.err
    assert "ask the organiser" in result.err


@pytest.mark.parametrize("command", ["status", "dashboard"])
@pytest.mark.parametrize("change", [{"tls_sha256": bytes(32)}, {"token": b"guessed"}])
def test_an_invite_that_the_coordinator_does_not_know_is_refused(atoll, invite, command, change):
    refused(atoll(command, dataclasses.replace(invite, **change)))


@pytest.mark.parametrize("folder", [peer_state_dir, follower_dir])
def test_an_old_invite_is_enough_where_a_local_peer_knows_the_place(
    atoll, invite, folder, state_home, key
):
    """The invite's address is dead; a local peer or follower has kept the signed relocation."""
    old = dataclasses.replace(invite, addresses=("127.0.0.1:9",))
    assert atoll("status", old).code == 1
    kept = PeerPaths(root=folder(invite.run_id.hex())).run
    kept.parent.mkdir(parents=True)
    kept.write_text("damaged")
    assert atoll("status", old).code == 1
    there = Relocation(serial=5, addresses=invite.addresses)
    forged = there.sign(invite.run_id, lambda payload: bytes(64))
    kept.write_text(json.dumps({"relocation": forged.hex()}))
    assert atoll("status", old).code == 1
    signed = there.sign(invite.run_id, RunKeys.load_or_create(key / KEYS_FILE).sign)
    kept.write_text(json.dumps({"relocation": signed.hex()}))
    assert "waiting" in atoll("status", old).out
    assert atoll("rounds", old).code == 0
