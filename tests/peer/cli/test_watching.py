"""The invite of commands that watch a run, and coordinators that cannot be asked."""

import dataclasses

import pytest

from atoll.peer.cli.watching import read_invite
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
