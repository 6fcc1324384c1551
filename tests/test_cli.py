"""The command line: what it prints, its exit codes, and that it overwrites nothing."""

import errno
import importlib
import json
import subprocess
import sys
import types

import pytest

from atoll.coordinator.spec import RunSpec, SpecError
from atoll.dht.transport import TransportError
from atoll.optim import store
from atoll.peer import cli
from atoll.peer.commands import SUMMARIES, print_json


@pytest.fixture
def atoll(capsys, tmp_path, monkeypatch):
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


def refused(result):
    """One clear message, and none of Python's."""
    assert result.code == 2
    assert "Traceback" not in result.err
    assert result.out == ""
    return result.err


def test_help_names_every_command(atoll):
    result = atoll("--help")
    assert result.code == 0
    assert all(f"  {name:<13}{text}\n" in result.out for name, text in SUMMARIES.items())


def test_help_loads_no_torch():
    program = "import sys, atoll.peer.cli as c\ntry: c.main(['--help'])\nexcept SystemExit: pass\n"
    program += "print(sorted({'torch', 'hivemind', 'grpc', 'textual'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", SUMMARIES)
def test_every_command_has_help_with_examples(atoll, name):
    result = atoll(name, "--help")
    assert result.code == 0
    assert "examples:" in result.out
    assert f"atoll {name}" in result.out


def test_version(atoll):
    assert atoll("--version").out.startswith("atoll ")


def test_without_a_command_it_shows_its_help(atoll):
    assert "commands:" in refused(atoll())


def test_an_unknown_command_is_refused(atoll):
    assert "invalid choice: 'trian'" in refused(atoll("trian"))


def test_init_writes_a_run_that_loads(atoll, tmp_path):
    result = atoll("init", "mine.toml")
    assert result.code == 0
    assert "atoll coordinator mine.toml" in result.out
    assert RunSpec.load(tmp_path / "mine.toml") == RunSpec()


def test_init_overwrites_nothing(atoll, tmp_path):
    (tmp_path / "RUN.toml").write_text("mine")
    assert "is there already" in refused(atoll("init"))
    assert (tmp_path / "RUN.toml").read_text() == "mine"


def test_init_in_a_folder_that_is_not_there(atoll):
    assert "nowhere" in refused(atoll("init", "nowhere/RUN.toml"))


class BoomError(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SpecError([], source="RUN.toml"), 2),
        (store.WrongRun("another run's log"), 2),
        (store.NotStored("a body that was pruned"), 1),
        (TransportError("nobody answers"), 1),
        (OSError(errno.EADDRINUSE, "Address already in use"), 2),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "here"), 2),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), 1),
        (ValueError("a bug"), None),
        (BoomError(), None),
    ],
)
def test_exit_codes_follow_the_table(error, code):
    assert cli.exit_code(error) == code


@pytest.mark.parametrize("name", sorted(cli.BAD_INPUTS))
def test_the_table_names_classes_that_exist(name):
    module, _, kind = name.rpartition(".")
    assert issubclass(getattr(importlib.import_module(module), kind), Exception)


def command_that_raises(error, monkeypatch):
    def run(args):
        raise error

    module = types.SimpleNamespace(add_parser=lambda sub: sub.add_parser("init"), run=run)
    monkeypatch.setattr(cli, "_load", lambda name: module)


def test_ctrl_c_is_130(atoll, monkeypatch):
    command_that_raises(KeyboardInterrupt(), monkeypatch)
    result = atoll("init")
    assert (result.code, result.err) == (130, "")


def test_a_foreseen_failure_is_one_message(atoll, monkeypatch):
    command_that_raises(TransportError("nobody answers"), monkeypatch)
    result = atoll("init")
    assert (result.code, result.err) == (1, "atoll init: nobody answers\n")


def test_a_bug_keeps_its_traceback(atoll, monkeypatch):
    command_that_raises(BoomError(), monkeypatch)
    with pytest.raises(BoomError):
        atoll("init")


def test_json_is_one_line_without_nan(capsys):
    print_json({"loss": 1.5})
    assert json.loads(capsys.readouterr().out) == {"loss": 1.5}
    with pytest.raises(ValueError, match="JSON"):
        print_json({"loss": float("nan")})
