"""Test the summary of a gossip demo, from the files of its processes."""

import types

import pytest
import torch

from atoll.coordinator.run.spec import RunSpec
from atoll.coordinator.run.status import PeerStatus, RoundSummary, RunStatus
from atoll.peer.lab import summary
from atoll.peer.lab.demo import Kill, PeerProcess
from atoll.peer.paths import PeerPaths
from atoll.peer.training import saved

SPEC = RunSpec.from_dict({"outer": {"method": "noloco"}})


def left_behind(folder, values, **changes):
    """Return a run whose peers saved models of these values."""
    peers = []
    for number, value in enumerate(values):
        peer = PeerProcess(name=f"peer-{number}", folder=folder / f"peer-{number}")
        peer.folder.mkdir()
        tree = {"worker": {"synced_N": torch.full((4,), value)}}
        path = PeerPaths(root=peer.folder).trainer()
        saved.save(path, tree, kind="trainer", run=SPEC.digest())
        peers.append(peer)
    told = [PeerStatus(peer_id=p.name, name=p.name, **changes) for p in peers]
    history = [RoundSummary(position=n + 1, at=n, loss=4.0 - n, tokens=100) for n in range(3)]
    status = RunStatus(run_name="talk", run_id="00", peers=told, history=history)
    return types.SimpleNamespace(peers=peers, status=status, kill=None)


def test_how_far_the_peers_are_apart(tmp_path):
    run = left_behind(tmp_path, [0.9, 1.1])
    assert summary.distance_to_mean(run, SPEC) == pytest.approx(0.1)


def test_rounds_are_those_that_were_told(tmp_path):
    told = summary.reported_rounds(left_behind(tmp_path, [1.0]))
    assert [(row.position, row.loss, row.tokens) for row in told] == [
        (1, 4.0, 100),
        (2, 3.0, 100),
        (3, 2.0, 100),
    ]


@pytest.mark.parametrize(
    ("recoveries", "partner", "expected"), [(1, "peer-0", 1), (0, "peer-0", 0), (1, "", 0)]
)
def test_a_killed_peer_is_back_once_it_has_met_somebody(tmp_path, recoveries, partner, expected):
    run = left_behind(tmp_path, [1.0, 1.0], recoveries=recoveries, partner=partner)
    run.kill = Kill(peer="peer-1", position=1, at_s=0.0, restarted=True)
    assert summary.recovered_peers(run, None) == expected
