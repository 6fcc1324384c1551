"""The owner's yes to a run: what it shows, when it asks, and what it keeps."""

import contextlib
import json
import os
import pty
import shutil
import stat
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch

from atoll.coordinator.run.spec import RunSpec
from atoll.optim.state import mapped
from atoll.optim.state.layout import Layout
from atoll.peer.cli import main as cli
from atoll.peer.cli import peer as command
from atoll.peer.daemon.consent import (
    Consent,
    ConsentMissing,
    Declined,
    NoOuterState,
    NoRoom,
    RunTerms,
    expect_room,
    needs_of,
    request_of,
    round_bytes,
)
from atoll.peer.errors import DataError, ExtraMissing, ModelError
from atoll.peer.lab import plan
from atoll.peer.paths import PeerPaths
from atoll.peer.training.permission import Allowed, with_own_files
from atoll.peer.training.resources import GPU_PROCESS_BYTES
from support.forks import Forked

RUN_ID = bytes(range(32))
LAYOUT = Layout(names=("w",), shapes=((1000, 1000),))


def terms_of(layout=None, **sections):
    spec = RunSpec.from_dict(sections)
    if layout is None:
        is_own = spec.model.custom or spec.data.tokenizer != "bytes"
        layout = LAYOUT if is_own else Layout.of(plan.bare_model(spec))
    return RunTerms(spec=spec, layout=layout)


class Owner:
    """Answers questions, and counts them."""

    def __init__(self, folder, answer=True, **options):
        self.asked, self.shown, self._answer = 0, [], answer
        self.paths = PeerPaths(root=folder)
        self._options = {"allowed": Allowed(), "run_id": RUN_ID, "ask": self._ask} | options

    def _ask(self, stopping):
        self.asked += 1
        return self._answer

    def admit(self, terms, **options):
        self.shown.clear()
        consent = Consent(paths=self.paths, show=self.shown.append, **{**self._options, **options})
        assert not consent.admit(terms), "no tokenizer travels with the run"


def test_the_owner_sees_what_the_run_asks_for(tmp_path):
    owner = Owner(tmp_path)
    owner.admit(terms_of(run={"name": "big", "rounds": 200}, model={"preset": "mini"}))
    assert owner.shown == [
        "the run asks this machine for the following:",
        "run: big, 200 rounds",
        "model: mini, built in",
        "parameters: 10,720,128",
        "data: the source code of Python's standard library, on this machine",
        "tokenizer: bytes, built in",
        "method: diloco, 30 steps a round",
        "memory: about 1.26 GB; with a GPU about 1.02 GB, and 263 MB of its own, at least 175 MB",
        "disk: about 1.03 GB, and 257 MB free beside it",
        "traffic: about 21.8 MB each way per round of 30 steps; 31.4 GB a day at one round a "
        "minute",
    ]


def test_a_run_that_cannot_fit_is_refused_before_the_owner_is_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    owner, run = Owner(tmp_path), terms_of(model={"preset": "mini"})
    needs = needs_of(run.spec, run.layout)
    there = SimpleNamespace(total=needs.peer_memory - 1)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: there)
    with pytest.raises(NoRoom, match="of memory, and this machine or container has"):
        owner.admit(run)
    disk = SimpleNamespace(free=needs.peer_disk + needs.peer_disk_free - 100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)
    with pytest.raises(NoRoom, match="of disk, and"):
        Owner(tmp_path, gpu_bytes=80 * 10**9).admit(run)  # a GPU takes a part of it
    owner = Owner(tmp_path, gpu_bytes=80 * 10**9)
    assert owner.asked == 0
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "log.sqlite").write_bytes(bytes(100))  # what is there is its own
    owner.admit(run)
    assert owner.asked == 1


def test_a_run_that_its_gpu_cannot_hold_is_refused(tmp_path):
    run = terms_of(model={"preset": "mini"})
    least = needs_of(run.spec, run.layout).gpu_memory_least + GPU_PROCESS_BYTES
    owner = Owner(tmp_path, gpu_bytes=least - 1)
    with pytest.raises(NoRoom, match=r"of GPU memory, .*train on more GPUs with --gpus all"):
        owner.admit(run)
    assert owner.asked == 0
    Owner(tmp_path, gpu_bytes=least).admit(run)


@pytest.mark.parametrize("lacks", ["memory", "GPU memory", "disk"])
def test_a_machine_too_small_for_its_stage_is_told_which(tmp_path, monkeypatch, lacks):
    run = terms_of(model={"preset": "mini"})
    needs = needs_of(run.spec, run.layout)
    if lacks == "memory":
        there = SimpleNamespace(total=needs.peer_memory - 1)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: there)
    if lacks == "disk":
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    gpu_bytes = needs.inner_memory if lacks == "GPU memory" else None
    with pytest.raises(NoRoom) as refused:
        expect_room(needs, tmp_path, module="stage-2", gpu_bytes=gpu_bytes)
    assert f"of {lacks}" in str(refused.value)
    assert "stage-2 of the run" in str(refused.value)
    assert ("more stages" in str(refused.value)) is (lacks != "disk")
    assert "--gpus" not in str(refused.value)  # one process trains a stage


def test_a_run_in_8_bits_is_refused_where_their_package_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    owner, run = Owner(tmp_path), terms_of(inner={"state": "8bit"})
    with pytest.raises(ExtraMissing, match=r"needs the package 'torchao'.*pip install torchao"):
        owner.admit(run)
    assert owner.asked == 0
    owner.admit(replace(run, is_keeper=True))  # which trains nothing


def test_a_state_on_the_disk_fits_where_one_in_memory_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr(mapped, "IN_MEMORY", ())  # the tests' folder may lie there
    run = terms_of(model={"preset": "mini"})
    needs = needs_of(run.spec, run.layout)
    there = SimpleNamespace(total=needs.host_memory(on_gpu=False, state_on_disk=True))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: there)
    with pytest.raises(NoRoom, match="keep the outer state in files with --outer-state disk, or"):
        Owner(tmp_path).admit(run)
    owner = Owner(tmp_path, state_on_disk=True)
    owner.admit(run)
    (shown,) = [line for line in owner.shown if line.startswith("outer state")]
    assert shown.startswith("outer state: on the disk, 129 MB, which leaves ")
    there.total -= 1
    with pytest.raises(NoRoom, match=r"and this machine or container has .*; join from a larger"):
        Owner(tmp_path / "small", state_on_disk=True).admit(run)
    there.total += 1
    needed = needs.peer_disk + needs.peer_disk_free + needs.peer_state
    disk = SimpleNamespace(free=needed - 100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)
    with pytest.raises(NoRoom, match="of disk, and"):
        Owner(tmp_path / "other", state_on_disk=True).admit(run)


def test_a_state_on_the_disk_needs_a_log_and_a_disk(tmp_path, monkeypatch):
    owner = Owner(tmp_path, state_on_disk=True)
    monkeypatch.setattr(mapped, "file_system_of", lambda folder: "tmpfs")
    with pytest.raises(mapped.NotOnDisk, match="choose a folder on a disk with --state-dir"):
        owner.admit(terms_of())
    with pytest.raises(NoOuterState, match="is for runs with a log, and noloco has none; omit it"):
        owner.admit(terms_of(outer={"method": "noloco"}))
    assert owner.asked == 0


def test_what_is_asked_for_is_what_the_plan_says():
    for method in ("diloco", "sparseloco", "streaming(count=2)"):
        spec = RunSpec.from_dict({"outer": {"method": method}, "model": {"preset": "mini"}})
        model = plan.bare_model(spec)
        own, planned = needs_of(spec, Layout.of(model)), plan.needed(spec, model, 2)
        assert own.peer_memory == pytest.approx(planned.peer_memory, rel=0.01)
        assert own.peer_disk == pytest.approx(planned.peer_disk, rel=0.01)


def test_a_custom_model_and_the_owners_files_are_shown_as_such():
    model = {"custom": "mine:build", "overrides": {"width": 3, "path": "x"}}
    allowed = Allowed(models=frozenset({"mine:build"}), files=frozenset({"/my/text", "t.json"}))
    data = {"source": "~/.ssh", "tokenizer": "/etc/t.json"}
    spec = RunSpec.from_dict({"model": model, "data": data, "inner": {"compile": True}})
    allowed.expect(with_own_files(spec, data="/my/text", tokenizer="t.json"))
    lines = request_of(spec, LAYOUT, data="/my/text", tokenizer="t.json").lines
    assert lines[2:6] == (
        "model: mine:build, code on this machine; width=3, path=x; compiled with torch.compile",
        "parameters: 1,000,000",
        "data: /my/text, on this machine (--data)",
        "tokenizer: t.json, on this machine (--tokenizer)",
    )


def test_text_and_tokenizer_of_the_run_are_shown_with_their_digests():
    data = {"source": "/corpus", "sha256": "ab" * 32}
    tokenizer = {"tokenizer": "/t.json", "tokenizer_sha256": "cd" * 32}
    lines = request_of(RunSpec.from_dict({"data": data | tokenizer}), LAYOUT).lines
    assert "data: /corpus, on this machine, SHA-256 abababababab" in lines
    assert "tokenizer: /t.json, on this machine (--tokenizer), SHA-256 cdcdcdcdcdcd" in lines


def test_a_data_set_of_the_hub_is_shown_as_such():
    spec = RunSpec.from_dict({"data": {"source": "hf:some/name"}})
    assert "data: some/name, streamed from the Hugging Face hub" in request_of(spec, LAYOUT).lines


def test_a_run_without_a_bound_of_norms_says_so():
    def warned(method):
        spec = RunSpec.from_dict({"outer": {"method": method}})
        return [line for line in request_of(spec, LAYOUT).lines if "people you know" in line]

    assert warned("diloco") == warned("sparseloco") == []
    (line,) = warned("noloco")
    assert line.startswith("noloco does not bound")


@pytest.mark.parametrize(
    ("method", "codec"),
    [
        ("diloco", "auto"),
        ("diloco", "powersgd(rank=4)"),
        ("sparseloco", "auto"),
        ("streaming(count=2, tau=5)", "auto"),
        ("noloco", "auto"),
        ("muloco", "auto"),
        ("ddp", "auto"),
    ],
)
def test_the_traffic_bounds_what_the_plan_predicts(method, codec):
    outer = {"method": method}
    if method == "ddp":
        outer["inner_steps"] = 1
    spec = RunSpec.from_dict(
        {"outer": outer, "compression": {"codec": codec}, "round": {"min_peers": 4}}
    )
    layout = Layout.of(plan.bare_model(spec))
    method = spec.method()
    fragments = plan.sizes_of(method, layout)
    predicted = sum(plan.sent_bytes(method, fragment, 4) for fragment in fragments)
    assert predicted <= 1.01 * round_bytes(spec, layout)
    assert round_bytes(spec, layout) <= 2.1 * predicted


def test_a_yes_is_asked_for_once_and_kept_for_its_owner_alone(tmp_path):
    owner = Owner(tmp_path)
    owner.admit(terms_of())
    shown = list(owner.shown)
    owner.admit(terms_of())
    assert owner.asked == 1
    assert owner.shown == []
    kept = tmp_path / "consent.json"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert json.loads(kept.read_text())["asked"] == shown
    assert [path.name for path in tmp_path.iterdir()] == ["consent.json"]


def test_a_yes_in_advance_is_shown_and_kept_without_a_question(tmp_path):
    owner = Owner(tmp_path, ask=None)
    owner.admit(terms_of(), yes=True)
    assert len(owner.shown) == 10
    owner.admit(terms_of())


def test_another_request_is_asked_for_again(tmp_path):
    owner = Owner(tmp_path)
    owner.admit(terms_of())
    owner.admit(terms_of(model={"preset": "mini"}))
    owner.admit(terms_of(), run_id=bytes(32))
    assert owner.asked == 3
    # Its address may change; the run stays the same.
    owner.admit(terms_of(coordinator={"listen": "0.0.0.0:1"}), run_id=bytes(32))
    assert owner.asked == 3


def test_another_size_of_a_custom_model_is_asked_for_again(tmp_path):
    owner = Owner(tmp_path, allowed=Allowed(models=frozenset({"mine:build"})))
    for size in (10, 20, 20):
        layout = Layout(names=("w",), shapes=((size, size),))
        owner.admit(terms_of(layout, model={"custom": "mine:build"}))
    assert owner.asked == 2


@pytest.mark.parametrize("overrides", [{}, {"num_layers": 10**9}, {"dim": 192 * 10**9}])
def test_a_model_larger_than_the_owner_is_shown_is_not_built(tmp_path, overrides):
    owner = Owner(tmp_path)
    small = Layout(names=("w",), shapes=((5, 5),))
    with pytest.raises(ModelError, match="expected a model of 25 parameters, as was claimed, got"):
        owner.admit(terms_of(small, model={"overrides": overrides}), yes=True)
    assert owner.asked == 0


@pytest.mark.parametrize("damage", [b"", b"[]", b"yes", b'{"digest": 1}', b"\xff"])
def test_a_damaged_yes_is_none(tmp_path, damage):
    owner = Owner(tmp_path, ask=None)
    owner.admit(terms_of(), yes=True)
    owner.paths.consent.write_bytes(damage)
    with pytest.raises(ConsentMissing):
        owner.admit(terms_of())


def test_a_no_is_not_kept(tmp_path):
    owner = Owner(tmp_path, answer=False)
    for _ in range(2):
        with pytest.raises(Declined, match="declined; no code of the run was run"):
            owner.admit(terms_of())
    assert owner.asked == 2
    assert list(tmp_path.iterdir()) == []


def test_with_nobody_there_it_names_the_remedy(tmp_path):
    with pytest.raises(ConsentMissing, match="pass --yes"):
        Owner(tmp_path, ask=None).admit(terms_of())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("sections", "error"),
    [
        ({"model": {"custom": "torch.hub:load"}}, ModelError),
        ({"data": {"source": "~/.ssh"}}, DataError),
        ({"data": {"tokenizer": "~/.ssh/id_rsa"}}, DataError),
        ({"data": {"source": "hf:text"}}, DataError),
    ],
)
def test_yes_allows_no_code_and_no_files(tmp_path, sections, error):
    owner = Owner(tmp_path)
    with pytest.raises(error):
        owner.admit(terms_of(**sections), yes=True)
    assert owner.asked == 0
    assert owner.shown == []
    assert list(tmp_path.iterdir()) == []


# --- the command


def arguments(invite, folder, *more):
    words = ["peer", str(invite), "--state-dir", str(folder), "--device", "cpu"]
    return [*words, "--listen", "/ip4/127.0.0.1/tcp/0", *more]


class Terminal:
    """`atoll peer` with a terminal as its input and output."""

    def __init__(self, *words):
        self._ours, theirs = pty.openpty()
        self._process = Forked(*words, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        self.text = ""
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self):
        with contextlib.suppress(OSError):  # the end of a terminal's output, on Linux
            while data := os.read(self._ours, 4096):
                self.text += data.decode(errors="replace")

    def await_text(self, text):
        deadline = time.monotonic() + 60
        while text not in self.text:
            assert self._process.poll() is None, self.text
            assert time.monotonic() < deadline, self.text
            time.sleep(0.05)

    def type(self, text):
        os.write(self._ours, text.encode())

    def interrupt(self):
        self._process.send_signal(2)

    def end(self):
        """Return the exit code."""
        try:
            self._process.wait(60)
        finally:
            self._process.kill()
            self._process.wait()
        self._reading.join(5)
        os.close(self._ours)
        return self._process.returncode


@pytest.fixture
def at_terminal(tmp_path):
    running = []

    def start(invite, *more):
        running.append(Terminal(*arguments(invite, tmp_path / "peer", *more)))
        return running[-1]

    yield start
    for terminal in running:
        if terminal._process.poll() is None:
            terminal._process.kill()
            terminal._process.wait()


@pytest.mark.slow
def test_a_yes_in_the_terminal_trains_and_is_asked_for_once(
    organise, kit, at_terminal, tmp_path, network_threads
):
    organiser = organise(kit.tiny_spec())
    terminal = at_terminal(organiser.invite)
    terminal.await_text("[y/N]")
    assert "parameters: " in terminal.text and "traffic: " in terminal.text
    terminal.type("y\n")
    assert terminal.end() == 0
    assert organiser.status().state == "finished"
    # Kept: a start without a terminal, or --yes, now needs no answer.
    assert cli.main(arguments(organiser.invite, tmp_path / "peer")) == 0


@pytest.mark.slow
def test_a_no_ends_it(organise, kit, at_terminal, tmp_path):
    organiser = organise(kit.tiny_spec())
    terminal = at_terminal(organiser.invite)
    terminal.await_text("[y/N]")
    terminal.type("\x04")
    assert terminal.end() == 1
    assert "declined" in terminal.text
    assert "Traceback" not in terminal.text
    assert not (tmp_path / "peer" / "consent.json").exists()
    assert organiser.status().position == 0


@pytest.mark.parametrize(
    ("answer", "is_yes"),
    [
        ("y\n", True),
        (" Yes\n", True),
        ("n\n", False),
        ("\n", False),
        ("maybe\n", False),
        ("", False),
    ],
)
def test_only_a_yes_is_a_yes(monkeypatch, answer, is_yes):
    read, write = os.pipe()
    os.write(write, answer.encode())
    os.close(write)
    monkeypatch.setattr(command, "STDIN", read)
    assert command._ask(threading.Event()) is is_yes
    os.close(read)


@pytest.mark.slow
def test_an_interrupt_at_the_question_ends_it(organise, kit, at_terminal):
    organiser = organise(kit.tiny_spec())
    terminal = at_terminal(organiser.invite)
    terminal.await_text("[y/N]")
    terminal.interrupt()
    assert terminal.end() == 130
    assert "Traceback" not in terminal.text


def test_without_a_terminal_it_is_refused_with_the_remedy(
    organise, kit, tmp_path, capsys, network_threads
):
    organiser = organise(kit.tiny_spec())
    assert cli.main(arguments(organiser.invite, tmp_path / "peer")) == 2
    told = capsys.readouterr().err
    assert "parameters: " in told
    assert "or pass --yes" in told
    assert organiser.status().position == 0


@pytest.mark.parametrize("model", [{"custom": "logging:basicConfig", "overrides": {}}])
def test_a_run_of_code_that_is_not_allowed_is_refused_before_it_starts(
    organise, kit, tmp_path, capsys, monkeypatch, model, network_threads
):
    """The organiser has the state; the peer has only the spec's word for what to run."""
    state = kit.first_state(kit.tiny_spec())
    monkeypatch.setattr(kit, "first_state", lambda spec, module: state)
    spec = kit.tiny_spec()
    organiser = organise(type(spec).from_dict(spec.model_dump(mode="json") | {"model": model}))
    folder = tmp_path / "peer"
    assert cli.main(arguments(organiser.invite, folder, "--yes")) == 2
    assert "pass --allow-model logging:basicConfig" in capsys.readouterr().err
    assert not (folder / "consent.json").exists()
