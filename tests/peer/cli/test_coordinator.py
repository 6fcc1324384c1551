"""`atoll coordinator`: what is wrong costs one message, and nothing is overwritten."""

import contextlib
import functools
import gc
import signal
import socket
import subprocess
import time

import pytest

from atoll.coordinator.copies.sealing import RecoveryKey
from atoll.coordinator.run.spec import RunSpec, template
from atoll.peer.cli.coordinator import costs_of, spare_searches
from support.commands import contents, refused
from support.forks import Forked

TINY = {"dim": 32, "num_layers": 1, "num_heads": 2, "ffn_dim": 64}


@pytest.fixture
def spec_file(tmp_path):
    """Writes a RUN.toml of a tiny run with some sections changed."""

    return functools.partial(write_spec, tmp_path / "RUN.toml")


@pytest.fixture
def taken_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


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


def test_patterns_that_do_not_fit_the_model_leave_no_state_directory(atoll, spec_file, tmp_path):
    spec = spec_file(topology={"stages": [["slices.0.*"], ["slices.2.*"]]})
    told = refused(atoll("coordinator", spec, "--state-dir", "state"))
    assert "topology.stages: no pattern matches slices.1.attention_norm.weight; add it" in told
    assert not (tmp_path / "state").exists()


def test_a_target_that_cannot_be_written_leaves_no_directory(atoll, spec_file, tmp_path):
    (tmp_path / "file").write_text("")
    start = ("coordinator", spec_file(), "--state-dir", "state", "--copies")
    told = refused(atoll(*start, tmp_path / "file" / "below"))
    assert "cannot be written: the folder or bucket is not there" in told
    assert "pass a folder or a URL" in refused(atoll(*start, "no-such-protocol://x"))
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "name RUN.toml, or the copies"),
        (["--restore", "copies"], "--restore needs --recovery-key"),
        (["RUN.toml", "--older"], "are for --restore TARGET"),
        (["--restore", "copies", "--recovery-key", "no.key"], "no.key: cannot be read"),
    ],
)
def test_a_restore_that_lacks_something_is_refused(atoll, spec_file, arguments, expected):
    spec_file()
    assert expected in refused(atoll("coordinator", *arguments))


def test_a_restore_from_a_folder_without_copies_leaves_nothing(atoll, tmp_path):
    RecoveryKey(b"k" * 32).write(tmp_path / "recovery.key")
    restore = ("coordinator", "--restore", "copies", "--recovery-key", "recovery.key")
    assert "expected copies of a run, got none" in refused(atoll(*restore))
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "notes.txt").write_text("")
    told = refused(atoll(*restore, "--state-dir", "state"))
    assert "expected a new or empty directory" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recovery.key", "state"]


def test_newcomers_are_placed_by_what_stages_cost(capsys):
    stages = {"topology": {"stages": [["slices.[0-2].*"], ["slices.3.*"]]}}
    heavy, light = costs_of(RunSpec.from_dict(stages))
    assert heavy > 2 * light
    even = RunSpec.from_dict({"topology": {"stages": 2}})
    assert costs_of(RunSpec()) == costs_of(even) == ()
    gone = RunSpec.from_dict(stages | {"model": {"custom": "no_such_module:build"}})
    assert costs_of(gone) == ()  # a run that goes on needs no model at its coordinator
    assert "warning: newcomers are placed as if all stages cost the same" in capsys.readouterr().err


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


def test_an_invite_file_that_cannot_be_written_is_refused(atoll, spec_file, state_home):
    result = atoll("coordinator", spec_file(), "--invite-file", "nowhere/invite")
    assert "nowhere/invite: the folder does not exist" in refused(result)
    assert not state_home.exists()


@contextlib.contextmanager
def coordinator(folder, *arguments):
    """A coordinator of the folder's RUN.toml, ready: its invite stands in the file `invite`."""
    invite = folder / "invite"
    invite.unlink(missing_ok=True)
    words = ["coordinator", folder / "RUN.toml", "--state-dir", folder / "state"]
    words += ["--invite-file", invite, *arguments]
    pipe = subprocess.PIPE
    with Forked(*words, stdout=pipe, stderr=pipe) as process:
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


def test_searches_for_garbage_leave_out_what_was_loaded():
    loaded = [[]]
    assert any(each is loaded for each in gc.get_objects())
    spare_searches()  # not undone: the tests' own objects are left out as well (conftest.py)
    assert not any(each is loaded for each in gc.get_objects())
