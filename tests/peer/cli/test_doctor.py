"""`atoll doctor`: findings with remedies, and no traceback without a network."""

import json
from types import SimpleNamespace

import pytest

from atoll.peer.cli.main import main
from atoll.peer.daemon.doctor import health
from support.environment import NOBODY
from support.organiser import Organiser, tiny_spec


@pytest.fixture
def no_torch(monkeypatch):
    """It is here; finding out takes seconds."""
    monkeypatch.setattr(health, "torch_finding", lambda: health.ok("torch", "here"))


@pytest.mark.usefixtures("no_torch")
def test_without_a_network_it_reports_and_ends(monkeypatch, tmp_path, capsys):
    async def silent(host, port):
        return False

    monkeypatch.setattr(health, "answers", silent)
    code = main(["doctor", str(NOBODY), "--state-dir", str(tmp_path / "s"), "--json"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert code == 1
    assert {x["check"]: x["health"] for x in lines}["coordinator"] == "problem"
    assert not (tmp_path / "s").exists()


@pytest.mark.usefixtures("no_torch")
def test_the_way_to_a_run_is_measured_by_its_coordinator(tmp_path, capsys):
    organiser = Organiser(tiny_spec(), tmp_path / "c")
    organiser.start()
    arguments = ["doctor", str(organiser.invite), "--state-dir", str(tmp_path / "s"), "--json"]
    try:
        assert main(arguments) == 0
        assert organiser.status().peers == []  # it reported nothing of itself
    finally:
        organiser.stop()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = {x["check"]: SimpleNamespace(**x) for x in lines}
    assert all(found[check].health == "ok" for check in ("coordinator", "clock", "run", "reached"))
    # The coordinator's node measured it, and no other peer is there.
    assert "the coordinator; a round of this run takes at most 1 s" in found["rate"].fact


def test_an_address_that_is_none_is_refused(capsys):
    assert main(["doctor", "--listen", "4001"]) == 2
    assert "expected a multiaddr" in capsys.readouterr().err
