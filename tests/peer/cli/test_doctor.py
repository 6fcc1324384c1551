"""`atoll doctor`: findings with remedies, and no traceback without a network."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from atoll.coordinator.run.status import PeerStatus, RunStatus
from atoll.peer.cli.main import main
from atoll.peer.daemon.doctor import health
from atoll.peer.daemon.doctor.health import Health
from atoll.peer.daemon.doctor.run_checks import coordinator_dht, pair_findings, run_finding
from support.environment import NOBODY
from support.organiser import Organiser, tiny_spec

GIB = 1 << 30
MINE, ROUTER = "192.168.1.5", "203.0.113.7"


@pytest.fixture
def no_torch(monkeypatch):
    """It is here; finding out takes seconds."""
    monkeypatch.setattr(health, "torch_finding", lambda: health.ok("torch", "here"))


@pytest.mark.parametrize(
    ("finding", "expected"),
    [
        (health.python_finding((3, 10, 4)), Health.PROBLEM),
        (health.python_finding((3, 14, 0)), Health.OK),
        (health.disk_finding(10 * GIB, Path("here")), Health.OK),
        (health.disk_finding(GIB, Path("here")), Health.NOTE),
        (health.disk_finding(1000, Path("here")), Health.PROBLEM),
        (health.memory_finding(4 * GIB), Health.OK),
        (health.memory_finding(GIB // 2), Health.NOTE),
        (health.memory_finding(None), Health.NOTE),
        (health.clock_finding(0.2), Health.OK),
        (health.clock_finding(-40.0), Health.NOTE),
        (health.reach_finding("203.0.113.7", 4001, is_dialed=True), Health.OK),
        (health.upnp_finding(is_used=True, refusal=""), Health.OK),
        (health.upnp_finding(is_used=False, refusal="no router answers"), Health.NOTE),
        (health.reach_finding("203.0.113.7", 4001, is_dialed=False), Health.NOTE),
        (health.nat_finding(["192.168.1.5"], "203.0.113.7"), Health.NOTE),
        (health.nat_finding(["203.0.113.7"], "203.0.113.7"), Health.OK),
        (health.nat_finding([MINE], "", []), Health.NOTE),
        (health.nat_finding([MINE], ROUTER, [f"/ip4/{ROUTER}/tcp/4"]), Health.NOTE),
        (health.nat_finding([MINE], ROUTER, [f"/ip4/{ROUTER}/tcp/4"] * 2), Health.OK),
        (health.nat_finding([ROUTER], "", [f"/ip4/{ROUTER}/tcp/4"] * 2), Health.OK),
        (health.nat_finding([MINE], "", ["/ip4/127.0.0.1/tcp/4", f"/ip4/{MINE}/tcp/5"]), Health.OK),
        (health.nat_finding([MINE], "", ["/ip4/no.address/tcp/4"]), Health.NOTE),
        (health.link_finding("c", 50.0, 9.0, 10**7), Health.OK),
        (health.link_finding("c", 50.0, 0.5, 10**3), Health.NOTE),
        (health.link_finding("c", None, 50.0, 10**3), Health.NOTE),
        (health.rate_finding("it", 1_000_000, 1.0), Health.OK),
        (health.rate_finding("it", 1_000, 1.0), Health.NOTE),
        (health.free_disk(Path("/proc/nowhere")), Health.PROBLEM),
        (health.bind_finding("192.0.2.1", 0), Health.PROBLEM),
        (health.bind_finding("127.0.0.1", 0), Health.OK),
    ],
)
def test_what_is_found_is_judged_and_has_a_remedy(finding, expected):
    assert finding.health is expected
    assert bool(finding.remedy) is (expected is not Health.OK)
    assert finding.line.startswith(f"{expected} ".ljust(9))


def test_a_slow_uplink_is_named_with_what_a_round_takes_on_it():
    finding = health.link_finding("box-2", 3.0, 40.0, 15_000_000)
    assert finding.fact == (
        "up 3 Mbit/s, down 40 Mbit/s, box-2; a round of this run takes 40 s at 3 Mbit/s"
    )
    assert finding.remedy.startswith("uploads limit it")


def test_another_port_for_each_observer_is_a_symmetric_router():
    public = "8.8.4.4"
    seen = [f"/ip4/{public}/tcp/4", f"/ip4/{public}/tcp/5", "/ip4/10.0.0.9/tcp/4"]
    finding = health.nat_finding([MINE], public, seen)
    assert finding.health is Health.NOTE
    assert "endpoint-dependent" in finding.fact
    kept = health.nat_finding([MINE], public, [seen[0], seen[0], seen[2]])
    assert "endpoint-independent" in kept.fact  # what a neighbour on the own network sees is left


def test_the_exit_code_is_1_only_with_a_problem():
    fine, bad = health.note("a", "b", "c"), health.problem("a", "b", "c")
    assert (health.exit_code([fine]), health.exit_code([fine, bad])) == (0, 1)


def status_of(*peers):
    return RunStatus(run_name="tiny", run_id="00", peers=list(peers), rounds_total=9)


def test_pairs_that_cannot_reach_each_other_are_named():
    one = PeerStatus(peer_id="a", name="box-1", unreached=["b"])
    other = PeerStatus(peer_id="b", name="box-2", reach="relayed")
    (finding,) = pair_findings(status_of(one, other))
    assert finding.fact == "box-1 and box-2 cannot reach each other"
    assert "--announce" in finding.remedy
    (fine,) = pair_findings(status_of(dataclasses.replace(one, unreached=[]), other))
    assert fine.fact == "2 in the run reach each other, 1 of them behind routers"
    assert "2 trainers online" in run_finding(status_of(one, other)).fact


def test_the_coordinators_node_is_the_first_of_an_invite():
    found = coordinator_dht(
        ["/ip4/1.2.3.4/tcp/7701/p2p/C", "/dns4/c/tcp/7/p2p/C", "/ip4/2/tcp/1/p2p/P"]
    )
    assert found == [("1.2.3.4", 7701), ("c", 7)]


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
