"""`atoll`: help, exit codes and messages that all commands share."""

import errno
import io
import json
import sqlite3
import subprocess
import sys
import types

import pytest
import torch

from atoll.coordinator.run.spec_problems import SpecError
from atoll.dht.transport import TransportError
from atoll.optim.log.store_errors import NotStored, WrongRun
from atoll.peer.cli import SUMMARIES, print_json
from atoll.peer.cli import main as cli
from support.commands import loaded_by, refused


def test_help_names_every_command(atoll):
    result = atoll("--help")
    assert result.code == 0
    assert all(f"  {name:<13}{text}\n" in result.out for name, text in SUMMARIES.items())


def test_help_loads_nothing_that_takes_long():
    assert loaded_by("--help") == set()


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


def test_a_misspelt_option_is_told_its_right_name(atoll):
    assert "did you mean --state-dir?" in refused(atoll("coordinator", "R", "--statedir", "x"))
    told = refused(atoll("status", "INVITE", "--zzzz"))
    assert "unrecognized arguments: --zzzz" in told and "did you mean" not in told


def test_text_beyond_the_encoding_of_the_terminal_is_printed(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", stream)
    cli._write_any_text()
    print("3 … ☃", file=stream, flush=True)
    assert stream.buffer.getvalue() == b"3 ? ?\n"


class BoomError(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SpecError([], source="RUN.toml"), 2),
        (WrongRun("another run's log"), 2),
        (NotStored("a body that was pruned"), 1),
        (TransportError("nobody answers"), 1),
        (OSError(errno.EADDRINUSE, "Address already in use"), 2),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "here"), 2),
        (sqlite3.OperationalError("database or disk is full"), 1),
        (OSError(errno.ENOSPC, "No space left on device", "here"), 1),
        (MemoryError(), 1),
        (RuntimeError("a bug"), None),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), 1),
        (ValueError("a bug"), None),
        (BoomError(), None),
    ],
)
def test_exit_codes_follow_the_table(error, code):
    assert cli.exit_code(error) == code


@pytest.mark.parametrize("kind", cli.bad_inputs())
def test_every_class_of_bad_input_and_its_subclasses_exit_with_2(kind):
    class MoreSpecific(kind):
        __module__ = kind.__module__

    assert not issubclass(kind, ValueError), "it would be listed for nothing"
    for each in (kind, MoreSpecific):
        assert cli.exit_code(each.__new__(each)) == cli.BAD_INPUT


def command_that_raises(error, monkeypatch):
    def run(args):
        raise error

    module = types.SimpleNamespace(add_parser=lambda sub: sub.add_parser("init"), run=run)
    monkeypatch.setattr(cli, "_load", lambda name: module)


def test_ctrl_c_is_130(atoll, monkeypatch):
    command_that_raises(KeyboardInterrupt(), monkeypatch)
    result = atoll("init")
    assert (result.code, result.err) == (130, "")


def test_ctrl_c_while_modules_are_loaded_is_130_too(atoll, monkeypatch):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_load", interrupted)
    result = atoll("init")
    assert (result.code, result.err) == (130, "")


def test_a_foreseen_failure_is_one_message(atoll, monkeypatch):
    command_that_raises(TransportError("nobody answers"), monkeypatch)
    result = atoll("init")
    assert (result.code, result.err) == (1, "atoll init: nobody answers\n")


@pytest.mark.parametrize(
    "error",
    [
        sqlite3.OperationalError("database or disk is full"),
        OSError(errno.ENOSPC, "No space left on device"),
    ],
)
def test_a_full_disk_is_a_failure_with_a_remedy(atoll, monkeypatch, error):
    command_that_raises(error, monkeypatch)
    result = atoll("init")
    assert result.code == 1
    assert str(error) in result.err and "free some space" in result.err


def test_a_model_too_large_for_memory_is_a_failure_with_a_remedy(atoll, monkeypatch):
    with pytest.raises(RuntimeError) as too_large:
        torch.empty(1 << 60, dtype=torch.uint8)
    command_that_raises(too_large.value, monkeypatch)
    result = atoll("init")
    assert result.code == 1
    assert result.err.startswith("atoll init: out of memory (")
    assert "use a smaller model or batch" in result.err


def test_a_bug_keeps_its_traceback(atoll, monkeypatch):
    command_that_raises(BoomError(), monkeypatch)
    with pytest.raises(BoomError):
        atoll("init")


def test_json_is_one_line_without_nan(capsys):
    print_json({"loss": 1.5})
    assert json.loads(capsys.readouterr().out) == {"loss": 1.5}
    with pytest.raises(ValueError, match="JSON"):
        print_json({"loss": float("nan")})


def test_ctrl_c_before_a_coroutine_begins_prints_nothing():
    code = (
        "import sys\n"
        "from atoll.peer.cli import main as cli\n"
        "async def look(): pass\n"
        "def stop(arguments):\n"
        "    waiting = look()\n"
        "    raise KeyboardInterrupt\n"
        "cli._main = stop\n"
        "sys.exit(cli.main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize("triton", [True, False])
def test_garbage_is_left_only_without_triton_which_counts_it_as_leaks(monkeypatch, triton):
    calls = []
    monkeypatch.setattr(cli.gc, "freeze", lambda: calls.append("freeze"))
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    if triton:
        monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    cli._leave_garbage()
    assert calls == ([] if triton else ["freeze"])
