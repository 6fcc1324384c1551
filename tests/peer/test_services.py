"""Files of services, and what the system's manager is asked for."""

import plistlib
import stat
from pathlib import Path

import pytest

from atoll.peer.services import Launchd, ServiceError, ServiceFailed, Systemd, UserService

SERVICE = UserService(
    name="peer-1a2b",
    words=["/opt/a b/python", "-m", "atoll", "peer", 'say "50%" for $5 \\ no', "--yes"],
    folder=Path("/data/100%"),
    environment={"XDG_STATE_HOME": "/my state"},
)


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """The calls of systemctl, of which a program of ours takes the place; one may fail."""
    log, program = tmp_path / "asked", tmp_path / "bin" / "systemctl"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\n'
        f'if [ -e {tmp_path}/fails ] && [ "$2" = enable ]; then echo "no bus" >&2; exit 1; fi\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return lambda: log.read_text().splitlines()


@pytest.fixture
def systemd(tmp_path):
    return Systemd(tmp_path / "units")


def test_a_unit_holds_each_argument_as_it_was_given(systemd):
    lines = systemd.text(SERVICE).splitlines()
    assert (
        'ExecStart="/opt/a b/python" "-m" "atoll" "peer" "say \\"50%%\\" for $$5 \\\\ no" "--yes"'
    ) in lines
    assert "WorkingDirectory=/data/100%%" in lines
    assert 'Environment="XDG_STATE_HOME=/my state"' in lines
    assert "RestartPreventExitStatus=2" in lines


def test_launchd_gets_the_same_words(tmp_path):
    told = plistlib.loads(Launchd(tmp_path).text(SERVICE).encode())
    assert told["ProgramArguments"] == SERVICE.words
    assert told["KeepAlive"] == {"SuccessfulExit": False}
    assert told["EnvironmentVariables"] == SERVICE.environment


def test_a_service_is_installed_listed_and_removed(systemd, asked):
    path = systemd.install(SERVICE)
    assert path.read_text() == systemd.text(SERVICE)
    assert systemd.names() == ["peer-1a2b"]
    systemd.remove("peer-1a2b")
    assert systemd.names() == []
    assert not path.exists()
    unit = "atoll-peer-1a2b.service"
    assert asked() == [
        "--user daemon-reload",
        f"--user enable {unit}",
        f"--user restart {unit}",
        f"--user disable --now {unit}",
        "--user daemon-reload",
    ]


@pytest.mark.parametrize("had_one", [False, True])
def test_what_the_manager_refuses_leaves_what_was_there(had_one, systemd, asked, tmp_path):
    other = UserService(name=SERVICE.name, words=["atoll"], folder=Path("/"))
    if had_one:
        systemd.install(other)
    (tmp_path / "fails").touch()
    with pytest.raises(ServiceFailed, match="no bus"):
        systemd.install(SERVICE)
    assert systemd.names() == (["peer-1a2b"] if had_one else [])
    if had_one:
        (path,) = systemd.folder.glob("*.service")
        assert path.read_text() == systemd.text(other)


def test_a_unit_of_somebody_else_is_neither_changed_nor_removed(systemd, asked):
    systemd.folder.mkdir()
    path = systemd.folder / "atoll-peer-1a2b.service"
    path.write_text("[Unit]\n")
    with pytest.raises(ServiceError, match="was not changed"):
        systemd.install(SERVICE)
    with pytest.raises(ServiceError, match="there is none"):
        systemd.remove("peer-1a2b")
    assert (path.read_text(), systemd.names()) == ("[Unit]\n", [])


@pytest.mark.parametrize("name", ["", "../x", "a b", "Peer", "x" * 65])
def test_a_name_that_is_no_file_name_is_refused(name):
    with pytest.raises(ServiceError, match="expected a name"):
        UserService(name=name, words=["atoll"], folder=Path("/"))


def test_an_argument_of_several_lines_is_refused():
    with pytest.raises(ServiceError, match="one line"):
        UserService(name="x", words=["a\nExecStart=b"], folder=Path("/"))
