"""Findings about this machine: each is judged, and has a remedy unless all is well."""

from pathlib import Path

import pytest

from atoll.peer.daemon.doctor import health
from atoll.peer.daemon.doctor.health import Health

GIB = 1 << 30
MINE, ROUTER = "192.168.1.5", "203.0.113.7"


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
        (health.tcp_finding("bbr"), Health.OK),
        (health.tcp_finding("cubic"), Health.NOTE),
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


def test_a_system_that_does_not_say_how_it_sends_is_not_judged(monkeypatch, tmp_path):
    monkeypatch.setattr(health, "CONGESTION_CONTROL", tmp_path / "absent")
    assert health.congestion_control() == ""
    (tmp_path / "there").write_text("cubic\n")
    monkeypatch.setattr(health, "CONGESTION_CONTROL", tmp_path / "there")
    assert health.congestion_control() == "cubic"


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
