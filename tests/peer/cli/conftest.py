"""A command in an empty folder, and a coordinator for those that ask one."""

import types

import pytest

from atoll.coordinator.run.keys import RunKeys
from atoll.peer.cli import main as cli
from support.organiser import Organiser, tiny_spec


@pytest.fixture
def atoll(capsys, tmp_path, monkeypatch, network_threads):
    """Runs a command in an empty folder; gives its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        try:
            code = cli.main([str(argument) for argument in arguments])
        except SystemExit as leaving:
            code = leaving.code
        out = capsys.readouterr()
        return types.SimpleNamespace(code=code, out=out.out, err=out.err)

    return run


@pytest.fixture(scope="module")
def invite(tmp_path_factory):
    """The invite of a coordinator that runs for a module, and waits for peers."""
    organiser = Organiser(tiny_spec(), tmp_path_factory.mktemp("coordinator") / "state")
    organiser.start()
    yield organiser.invite
    organiser.stop()


@pytest.fixture
def key(invite, tmp_path_factory):
    """The directory of the coordinator that waits, which holds the run's key."""
    return next(
        path.parent
        for path in tmp_path_factory.getbasetemp().glob("coordinator*/state/keys.json")
        if RunKeys.load_or_create(path).run_public_key == invite.run_key
    )
