"""`atoll service`."""

import stat
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="the manager is systemd")


@pytest.fixture
def user(tmp_path_factory, monkeypatch):
    """A home, with a program that takes systemctl's place and always agrees."""
    home = tmp_path_factory.mktemp("home")
    program = home / "bin" / "systemctl"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "state"))
    return home


def units(home):
    return sorted((home / "config/systemd/user").glob("*"))


def test_a_peer_becomes_a_service_whose_invite_nobody_else_reads(atoll, invite, user):
    told = atoll("service", "install", "peer", invite, "--yes", "--share", "0.5")
    assert told.code == 0, told.err
    name = f"peer-{invite.run_id.hex()[:8]}"
    assert "starts at boot" in told.out
    assert "journalctl" in told.out
    (unit,) = units(user)
    text = unit.read_text()
    assert str(invite) not in text
    assert '"peer"' in text
    assert '"--share" "0.5"' in text
    kept = user / "state/atoll/services" / f"{name}.invite"
    assert f'"{kept}"' in text
    assert kept.read_text() == f"{invite}\n"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert atoll("service", "list").out == f"{name}\n"
    assert atoll("service", "remove", name).code == 0
    assert (units(user), kept.exists()) == ([], False)


def test_a_coordinator_becomes_a_service_in_the_folder_of_its_file(atoll, user):
    Path("RUN.toml").write_text('[run]\nname = "weeks"\n')
    assert atoll("service", "install", "coordinator", "RUN.toml", "--quiet").code == 0
    (unit,) = units(user)
    assert unit.name == "atoll-coordinator-weeks.service"
    assert f"WorkingDirectory={Path.cwd()}" in unit.read_text()


def test_print_changes_nothing(atoll, invite, user):
    told = atoll("service", "install", "--print", "peer", invite, "--yes")
    assert told.out.startswith("# Written by `atoll service`")
    assert units(user) == []
    assert not (user / "state/atoll/services").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["peer", "INVITE"], "pass --yes after INVITE"),
        (["peer", "INVITE", "--yes", "--shre", "1"], "--shre"),
        (["peer", "atoll1nonsense", "--yes"], "invite"),
        (["--name", "../x", "peer", "INVITE", "--yes"], "expected a name"),
        (["coordinator", "ABSENT.toml"], "ABSENT.toml"),
    ],
)
def test_what_could_not_start_is_refused_now(words, message, atoll, invite, user):
    told = atoll("service", "install", *[invite if word == "INVITE" else word for word in words])
    assert told.code == 2
    assert message in told.err
    assert units(user) == []


def test_a_service_that_is_not_there_is_named(atoll, user):
    told = atoll("service", "remove", "peer-0")
    assert told.code == 2
    assert "there is none" in told.err
    assert atoll("service", "list").out == "none\n"
