"""The command line: what it prints, its exit codes, and that it overwrites nothing."""

import contextlib
import dataclasses
import errno
import functools
import io
import json
import logging
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import types

import pytest
import torch

from atoll.coordinator.run.invite import Invite
from atoll.coordinator.run.spec import RunSpec, template
from atoll.coordinator.run.spec_problems import SpecError
from atoll.dht.transport import TransportError
from atoll.optim.log import store
from atoll.peer.cli import SUMMARIES, print_json
from atoll.peer.cli import main as cli
from atoll.peer.cli.watching import read_invite
from atoll.peer.paths import PeerPaths


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


def loaded_by(*arguments):
    """Which of the modules that take long to import a command imports."""
    program = (
        f"import sys, atoll.peer.cli.main as c\ntry: c.main({list(map(str, arguments))})\n"
        "except SystemExit: pass\n"
        "print(*({'torch', 'hivemind', 'grpc', 'textual'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


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


def test_init_writes_a_run_that_loads(atoll, tmp_path):
    result = atoll("init", "mine.toml")
    assert result.code == 0
    assert "atoll coordinator mine.toml" in result.out
    assert RunSpec.load(tmp_path / "mine.toml") == RunSpec()


def test_init_names_the_run(atoll, tmp_path):
    assert atoll("init", "--name", "fish", "--model", "nano").code == 0
    assert RunSpec.load(tmp_path / "RUN.toml").run.name == "fish"


def test_a_misspelt_option_is_told_its_right_name(atoll):
    assert "did you mean --state-dir?" in refused(atoll("coordinator", "R", "--statedir", "x"))
    told = refused(atoll("status", "INVITE", "--zzzz"))
    assert "unrecognized arguments: --zzzz" in told and "did you mean" not in told


def test_an_address_to_announce_needs_a_port(atoll):
    for address in ("/ip4/203.0.113.7", "/ip4/203.0.113.7/tcp/0"):
        assert "with a port" in refused(atoll("peer", "INVITE", "--announce", address))


def test_text_beyond_the_encoding_of_the_terminal_is_printed(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", stream)
    cli._write_any_text()
    print("3 … ☃", file=stream, flush=True)
    assert stream.buffer.getvalue() == b"3 ? ?\n"


def test_init_overwrites_nothing(atoll, tmp_path):
    (tmp_path / "RUN.toml").write_text("mine")
    assert "exists and was not changed" in refused(atoll("init"))
    assert (tmp_path / "RUN.toml").read_text() == "mine"


def test_init_of_a_folder_names_a_file_in_it(atoll, tmp_path):
    (tmp_path / "runs").mkdir()
    assert "runs is a folder; name a file in it: runs/RUN.toml" in refused(atoll("init", "runs"))


def test_init_in_a_folder_that_is_not_there(atoll):
    said = refused(atoll("init", "nowhere/RUN.toml"))
    assert "nowhere/RUN.toml: " in said and "create the folder nowhere first" in said


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


def test_a_peer_that_cannot_write_its_log_leaves_the_terminal_alone(atoll, monkeypatch, capsys):
    monkeypatch.setattr(logging, "raiseExceptions", True)
    refused(atoll("peer", "hello"))
    full = logging.StreamHandler(types.SimpleNamespace(write=None))
    full.emit(logging.makeLogRecord({"msg": "lost"}))
    assert capsys.readouterr().err == ""


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


# --- the input that is wrong: one message, exit code 2, nothing overwritten

TINY = {"dim": 32, "num_layers": 1, "num_heads": 2, "ffn_dim": 64}
INVITE = Invite(
    addresses=("127.0.0.1:9",),
    run_id=bytes(32),
    run_key=bytes(32),
    tls_sha256=bytes(32),
).encode()


@pytest.fixture
def spec_file(tmp_path):
    """Writes a RUN.toml of a tiny run with some sections changed."""

    return functools.partial(write_spec, tmp_path / "RUN.toml")


@pytest.fixture
def taken_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[outer]\ninner_steps = 'ten'", "line 2: outer.inner_steps"),
        ("[outer]\ninner_step = 10", "did you mean 'inner_steps'"),
        ("[compression]\ncodec = 'int9'", "compression.codec"),
        ("[outer", "not valid TOML"),
        ("[run]\nname = 'a/b'\n[data]\nseq_len = 0", "2 problems"),
    ],
)
def test_a_wrong_run_file_is_refused(atoll, tmp_path, text, expected):
    (tmp_path / "RUN.toml").write_text(text)
    assert expected in refused(atoll("coordinator", "RUN.toml", "--state-dir", "state"))
    assert not (tmp_path / "state").exists()


def test_a_missing_run_file_is_refused(atoll):
    assert "atoll init" in refused(atoll("coordinator", "RUN.toml"))


@pytest.mark.parametrize("option", ["--listen", "--dht-listen", "--metrics-listen"])
def test_an_address_that_is_none_is_refused(atoll, spec_file, option):
    assert "host:port" in refused(atoll("coordinator", spec_file(), option, "7700"))


@pytest.mark.parametrize("option", ["--listen", "--dht-listen", "--metrics-listen"])
def test_a_port_in_use_is_refused(atoll, spec_file, taken_port, option):
    result = atoll("coordinator", spec_file(), "--state-dir", "state", option, taken_port)
    assert "in use" in refused(result)


def test_a_model_that_is_none_leaves_no_state_directory(atoll, spec_file, tmp_path):
    spec = spec_file(model={"preset": "gigantic", "overrides": {}})
    assert "gigantic" in refused(atoll("coordinator", spec, "--state-dir", "state"))
    assert not (tmp_path / "state").exists()


def test_a_missing_tokenizer_is_refused(atoll, spec_file, tmp_path):
    spec = spec_file(data={"tokenizer": "no-such.json"})
    refused(atoll("coordinator", spec, "--state-dir", "state"))
    assert not (tmp_path / "state").exists()


def test_a_state_directory_of_something_else_is_refused(atoll, spec_file, tmp_path):
    state = tmp_path / "state"
    state.mkdir()
    (state / "thesis.tex").write_text("mine")
    assert "thesis.tex" in refused(atoll("coordinator", spec_file(), "--state-dir", state))
    assert contents(state) == {state / "thesis.tex": b"mine"}


def test_a_state_directory_of_another_run_is_refused(atoll, spec_file, taken_port, tmp_path):
    state = tmp_path / "state"
    # The first run gets as far as its port, which leaves a state directory of its own.
    refused(atoll("coordinator", spec_file(), "--state-dir", state, "--listen", taken_port))
    (state / "epoch.signed").write_text("0\n")  # as if peers had begun it
    before = contents(state)
    assert before
    other = spec_file(outer={"inner_steps": 7})
    assert "outer.inner_steps: 30 != 7" in refused(
        atoll("coordinator", other, "--state-dir", state)
    )
    assert contents(state) == before


def test_an_invite_file_with_something_else_is_refused(atoll, spec_file, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    result = atoll("coordinator", spec_file(), "--invite-file", "notes.txt")
    assert "notes.txt" in refused(result)
    assert (tmp_path / "notes.txt").read_text() == "mine"


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


def test_an_invite_file_that_cannot_be_written_is_refused(atoll, spec_file, state_home):
    result = atoll("coordinator", spec_file(), "--invite-file", "nowhere/invite")
    assert "nowhere/invite: the folder does not exist" in refused(result)
    assert not state_home.exists()


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


def test_no_picture_is_drawn_of_a_run_that_does_not_answer(atoll, tmp_path):
    result = atoll("dashboard", INVITE, "--screenshot", "run.svg")
    assert (result.code, result.out) == (1, "")
    assert "connection refused" in result.err
    assert not (tmp_path / "run.svg").exists()


def test_a_picture_of_another_format_is_refused(atoll):
    assert "must end in .svg" in refused(atoll("dashboard", INVITE, "--screenshot", "run.png"))


@pytest.mark.parametrize("arguments", [["--temperature", "-1"], ["--max-tokens", "-1"], []])
def test_sample_refuses_what_it_cannot_use(atoll, arguments):
    refused(atoll("sample", "no-such.safetensors", *arguments))


def test_sample_refuses_a_damaged_checkpoint(atoll, tmp_path):
    (tmp_path / "damaged.safetensors").write_bytes(b"\x08" + bytes(40))
    refused(atoll("sample", "damaged.safetensors"))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--preset gigantic", "the presets are nano"),
        ("--codec int9", "expected one of the codecs"),
        ("--method sgd", "expected one of the methods"),
        ("--device abacus", "expected auto, cuda, mps or cpu"),
        ("--data no-such-folder", "no-such-folder"),
        ("--data empty", "holds no text; name a file or folder with text"),
        ("--chaos --peers 1", "expected at least 2 peers, got 1"),
        ("--chaos --rounds 4", "expected at least 5 rounds, got 4"),
        ("--rounds many", "expected a whole number above 0, got 'many'"),
        ("--peers 0", "expected a whole number above 0, got '0'"),
        ("--shares 1,0", "expected shares above 0 and at most 1"),
        ("--shares all", "expected numbers such as 1,0.5, got 'all'"),
        ("--windows long", "outer.windows"),
    ],
)
def test_a_demo_that_cannot_be_is_refused_before_anything_starts(
    atoll, tmp_path, arguments, expected
):
    (tmp_path / "empty").mkdir()
    assert expected in refused(atoll("demo", "--out", "out", *arguments.split()))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("out", ["file", "file/deeper"])
def test_a_demo_with_a_file_in_its_way_is_refused(atoll, tmp_path, out):
    (tmp_path / "file").write_text("mine")
    assert "choose another with --out" in refused(atoll("demo", "--out", out))
    assert (tmp_path / "file").read_text() == "mine"


def test_a_demo_overwrites_nothing(atoll, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    assert "choose another with --out" in refused(atoll("demo", "--out", "out"))
    assert contents(tmp_path / "out") == {tmp_path / "out" / "thesis.tex": b"mine"}


# --- against a coordinator as a process


@contextlib.contextmanager
def coordinator(folder, *arguments):
    """A coordinator of the folder's RUN.toml, ready: its invite stands in the file `invite`."""
    invite = folder / "invite"
    invite.unlink(missing_ok=True)
    command = [sys.executable, "-m", "atoll.peer.cli.main", "coordinator", str(folder / "RUN.toml")]
    command += ["--state-dir", str(folder / "state"), "--invite-file", str(invite), *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            deadline = time.monotonic() + 60
            while not invite.exists():
                assert process.poll() is None, process.stderr.read()
                assert time.monotonic() < deadline
                time.sleep(0.1)
            yield process
        finally:
            process.kill()


def write_spec(path, **sections):
    values = {
        "model": {"overrides": TINY},
        "coordinator": {"listen": "127.0.0.1:0", "dht_listen": "127.0.0.1:0"},
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    path.write_text(template(RunSpec.from_dict(values)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def invite(tmp_path_factory):
    """The invite of a coordinator that runs for this module; stopped by SIGTERM, it ends well."""
    folder = tmp_path_factory.mktemp("coordinator")
    write_spec(folder / "RUN.toml")
    with coordinator(folder, "--quiet") as process:
        yield Invite.decode((folder / "invite").read_text())
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 0, err


def test_status_and_rounds_of_a_run_that_waits(atoll, invite):
    status = json.loads(atoll("status", invite, "--json").out)
    assert (status["state"], status["run_id"]) == ("waiting", invite.run_id.hex())
    assert "waiting" in atoll("status", invite).out
    assert "no rounds committed yet" in atoll("rounds", invite).out
    assert json.loads(atoll("rounds", invite, "--json").out)["rounds"] == []


def test_status_loads_no_torch(invite):
    """Torch alone takes seconds; a script that asks for the status waits for none of them."""
    assert "torch" not in loaded_by("status", invite, "--json")


def test_a_picture_of_the_run_needs_no_terminal(atoll, invite, tmp_path):
    result = atoll("dashboard", invite, "--screenshot", "run.svg")
    assert (result.code, result.err) == (0, "")
    drawn = (tmp_path / "run.svg").read_text()
    assert drawn.startswith("<svg")
    assert "WAITING" in drawn


def test_a_picture_that_cannot_be_written_is_refused(atoll, invite):
    told = refused(atoll("dashboard", invite, "--screenshot", "nowhere/run.svg"))
    assert "nowhere/run.svg" in told


@pytest.mark.parametrize("command", ["status", "dashboard"])
@pytest.mark.parametrize("change", [{"tls_sha256": bytes(32)}, {"token": b"guessed"}])
def test_an_invite_that_the_coordinator_does_not_know_is_refused(atoll, invite, command, change):
    refused(atoll(command, dataclasses.replace(invite, **change)))


@pytest.mark.parametrize("change", [{"token": b"guessed"}, {"run_id": bytes(32)}])
def test_a_peer_with_an_invite_of_another_run_is_refused(atoll, invite, change):
    refused(atoll("peer", dataclasses.replace(invite, **change)))


def test_a_peer_without_its_data_is_refused_before_it_joins(atoll, tmp_path):
    result = atoll("peer", INVITE, "--state-dir", "state", "--data", "no-such-folder")
    assert "--data 'no-such-folder' does not exist" in refused(result)
    assert not (tmp_path / "state").exists()


def test_a_simulation_with_nowhere_to_draw_is_refused_before_it_trains(atoll, tmp_path):
    assert "nowhere/a.png" in refused(atoll("simulate", "--plot", "nowhere/a.png"))
    assert not (tmp_path / "simulation").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what the test lacks")
def test_a_peer_without_the_device_it_asks_for_is_refused(atoll, invite, tmp_path):
    assert "cuda" in refused(atoll("peer", invite, "--state-dir", "state", "--device", "cuda"))
    assert not (tmp_path / "state").exists()


@pytest.mark.slow
def test_a_peer_refuses_the_state_directory_of_another_run(invite, tmp_path):
    mark = PeerPaths(root=tmp_path / "state").run
    mark.parent.mkdir()
    mark.write_text('{"run_id": "00"}')
    told = refused_by_process("peer", invite, "--state-dir", mark.parent)
    assert "got that of run 00" in told
    assert mark.read_text() == '{"run_id": "00"}'


def refused_by_process(*arguments):
    command = [sys.executable, "-m", "atoll.peer.cli.main", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    return refused(types.SimpleNamespace(code=done.returncode, out=done.stdout, err=done.stderr))


@pytest.mark.slow
def test_a_coordinator_that_starts_again_is_the_same(tmp_path):
    write_spec(tmp_path / "RUN.toml")
    invites = []
    for number in (signal.SIGTERM, signal.SIGINT):
        with coordinator(tmp_path) as process:
            process.send_signal(number)
            out, err = process.communicate(timeout=30)
        assert process.returncode == (130 if number == signal.SIGINT else 0), err
        assert "Traceback" not in err
        assert (tmp_path / "invite").read_text() == out
        invites.append(out)
    assert invites[0] == invites[1]


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
