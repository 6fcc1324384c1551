"""`atoll keys rotate`, and `atoll invite` from elsewhere, against a coordinator that waits."""

import json

import pytest

from atoll.coordinator.run.invite import Invite
from atoll.coordinator.run.keys import RunKeys


def test_invites_are_made_listed_and_revoked_from_elsewhere(atoll, invite, key):
    by = (invite, "--key", key)
    done = atoll("invite", *by, "--role", "observer", "--uses", 1, "--expires", "7d", "--json")
    told = json.loads(done.out)
    assert (done.code, told["kind"], told["uses"]) == (0, "observer", 1)
    made = Invite.decode(told["invite"])
    assert made.addresses == invite.addresses and made.token != invite.token
    assert atoll("status", told["invite"]).code == 0
    assert atoll("status", told["invite"]).code == 0  # the same user counts once
    shown = [json.loads(line) for line in atoll("invite", *by, "--list", "--json").out.splitlines()]
    assert {each["id"]: each["joined"] for each in shown}[told["id"]] == 1
    done = atoll("invite", *by, "--revoke", told["id"])
    assert done.code == 0 and f"invite {told['id']} is revoked" in done.err
    done = atoll("status", told["invite"])
    assert done.code == 2 and "revoked this invite" in done.err
    assert "for 1 observer, until" in atoll("invite", *by, "--list").out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--revoke", "nothing"), "expected the id of an invite (first"),
        (("--role", "king"), "invalid choice: 'king'"),
        (("--uses", "none"), "expected 1 to 100000, got none"),
        (("--expires", "soon"), "expected a time such as 30m"),
        (("--list", "--revoke", "first"), "not allowed with"),
    ],
)
def test_a_bad_invite_is_told(atoll, invite, key, arguments, message):
    done = atoll("invite", invite, "--key", key, *arguments)
    assert done.code == 2 and message in done.err


def test_nobody_without_the_key_manages_invites_or_keys(atoll, invite, tmp_path):
    RunKeys.load_or_create(tmp_path / "keys.json")
    for command in (("invite", invite), ("keys", "rotate", invite)):
        done = atoll(*command, "--key", tmp_path)
        assert done.code == 2 and "expected the key of the invite's run" in done.err
        done = atoll(*command)
        assert done.code == 2 and "pass --key with its keys.json" in done.err
    done = atoll("keys", "rotate", invite, "--key", tmp_path / "nothing")
    assert done.code == 2 and "no such file" in done.err


def test_the_key_is_changed_and_the_old_one_is_refused(atoll, invite, key, tmp_path):
    done = atoll("keys", "rotate", invite, "--key", key, "--out", tmp_path / "no")
    assert done.code == 2 and "create it first" in done.err
    done = atoll("keys", "rotate", invite, "--key", key, "--wait", 0, "--json")
    told = json.loads(done.out)
    assert (done.code, told["decided"], told["removed"]) == (0, False, None)
    # Nobody has decided it, and both files are there.
    assert {path.name for path in key.glob("*.json")} >= {"keys.json", told["file"].split("/")[-1]}
    done = atoll("run", "pause", invite, "--key", key / "keys.json", "--wait", 0)
    assert done.code == 2 and "the organiser's key was changed; expected " in done.err
    assert atoll("run", "pause", invite, "--key", told["file"], "--wait", 0).code == 0
    assert atoll("run", "resume", invite, "--key", key, "--wait", 0).code == 0  # found by itself
    assert atoll("invite", invite, "--key", key, "--list").code == 0
    done = atoll("keys", "rotate", invite, "--key", key, "--out", tmp_path, "--wait", 0)
    assert done.code == 0 and done.out.strip().startswith(str(tmp_path))
    done = atoll("run", "pause", invite, "--key", key, "--wait", 0)
    assert done.code == 2 and "pass --key with the file that `atoll keys rotate` wrote" in done.err
    assert atoll("run", "pause", invite, "--key", tmp_path, "--wait", 0).code == 0
