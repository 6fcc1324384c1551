"""Findings about a run, as its status tells them."""

import dataclasses

import torch

from atoll.coordinator.run.spec import RunSpec
from atoll.coordinator.run.status import PeerStatus, RunStatus
from atoll.optim.state.layout import Layout
from atoll.peer.daemon import consent
from atoll.peer.daemon.consent import needs_of
from atoll.peer.daemon.doctor.health import Health
from atoll.peer.daemon.doctor.run_checks import (
    coordinator_dht,
    pair_findings,
    room_finding,
    run_finding,
)
from atoll.peer.lab import plan


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


def test_it_is_said_whether_the_run_fits(tmp_path, monkeypatch):
    spec = RunSpec.from_dict({"model": {"preset": "mini"}})
    needs = needs_of(spec, Layout.of(plan.bare_model(spec)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(consent, "memory_total", lambda: needs.step_memory)
    found = room_finding(needs, tmp_path)
    assert found.health is Health.OK
    assert "--outer-state disk moves 107 MB to files" in found.fact
    monkeypatch.setattr(consent, "memory_total", lambda: needs.step_memory - 1)
    found = room_finding(needs, tmp_path)
    assert found.health is Health.PROBLEM
    assert "of memory, and this machine or container has" in found.fact
    assert found.remedy.startswith("keep the outer state in files with --outer-state disk")
