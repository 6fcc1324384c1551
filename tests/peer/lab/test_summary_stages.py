"""Test the summary of a pipeline's demo: stage by stage, and as one model."""

import json
import subprocess
import sys
import types
from dataclasses import replace

import pytest

from atoll.coordinator.run.status import FlowStatus, PeerStatus, RunStatus
from atoll.peer.lab import summary
from atoll.peer.lab.demo import PeerProcess
from atoll.peer.lab.summary import Flowed, Summary

CHAINS = {"stage-1": "aa", "stage-2": "bb"}


def finished(*peers):
    """Return a run whose peers, given by stage and chain, have reported."""
    told = [
        PeerStatus(peer_id=f"p{i}", name=f"peer-{i}", module=module, chain=chain)
        for i, (module, chain) in enumerate(peers)
    ]
    return types.SimpleNamespace(
        peers=[PeerProcess(name=peer.name, folder=None) for peer in told],
        status=RunStatus(run_name="demo", run_id="00", peers=told),
        kill=None,
    )


def entry(chain):
    return types.SimpleNamespace(chain=bytes.fromhex(chain))


def equal(run):
    return [summary.chains_equal(run, [entry(CHAINS[m])], module=m) for m in CHAINS]


def test_chains_are_compared_within_a_stage():
    run = finished(("stage-1", "aa"), ("stage-2", "bb"), ("stage-1", "aa"))
    assert equal(run) == [True, True]
    assert equal(finished(("stage-1", "aa"), ("stage-2", "aa"))) == [True, False]


def test_a_stage_without_peers_and_a_peer_that_nobody_knows_are_not_equal():
    assert equal(finished(("stage-1", "aa"))) == [True, False]
    run = finished(("stage-1", "aa"), ("stage-2", "bb"))
    run.peers.append(PeerProcess(name="peer-9", folder=None))
    assert equal(run) == [False, False]


def test_what_flowed_counts_across_restarts():
    before = FlowStatus(counted=10, omitted={"late": 2, "withdrawn": 5}, resends=1)
    assert Flowed.of([before, FlowStatus(counted=4, double_counts=3)]) == Flowed(
        counted=14, omitted=2, resends=1, double_counts=3
    )


STAGED = Summary(
    rounds=2,
    peers=3,
    tokens=1000,
    loss_first=5.0,
    loss_last=4.0,
    loss_baseline=None,
    valid_loss=4.5,
    valid_loss_baseline=None,
    valid_loss_alone=None,
    bytes_sent_per_peer=1,
    bytes_received_per_peer=1,
    ddp_bytes_per_peer=None,
    traffic_ratio=None,
    utilisation=0.5,
    seconds_to_first_round=1.0,
    seconds=2.0,
    chains_equal=True,
    states_equal=True,
    distance_to_mean=None,
    recovered_peers=0,
    phases={},
    checkpoint="checkpoints",
    plot="loss.png",
    stages=3,
    flow=Flowed(counted=30, omitted=1, resends=2, double_counts=0),
)


def test_the_page_says_nothing_of_data_parallel_peers(capsys):
    run = types.SimpleNamespace(kill=None)
    shown = dict(summary.rows(STAGED, run))
    assert "data parallel" not in shown
    assert shown["trained"].endswith("in 2 rounds by 3 peers in 3 stages, 2 s")
    assert "1 omitted" in shown["flow"]
    assert shown["replicas"].startswith("bit-identical in each stage")
    differs = dict(summary.rows(replace(STAGED, states_equal=False), run))
    assert differs["replicas"].startswith("NOT EQUAL")
    summary.render(STAGED, run)
    # Of a folder with the stages' checkpoints it makes one model.
    assert "atoll sample checkpoints --prompt" in capsys.readouterr().out


@pytest.mark.exhaustive  # the parts run in test_demo.py and in test_pipeline_run.py
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_pipeline_of_three_processes_ends_with_equal_replicas(tmp_path):
    words = "demo --stages 3 --peers 3 --rounds 2 --inner-steps 1 --plain --json --out out"
    done = subprocess.run(
        [sys.executable, "-m", "atoll.peer.cli.main", *words.split()],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["stages"], told["rounds"], told["peers"]) == (3, 2, 3)
    assert told["chains_equal"] is True and told["states_equal"] is True
    assert told["ddp_bytes_per_peer"] is None
    assert 0 < told["valid_loss"] < 7  # of all stages' checkpoints together
    assert 0 < told["loss_last"] < told["loss_first"] < 7
    # Each of the two rounds had a step of four microbatches, which counted at three stages.
    assert told["flow"]["counted"] >= 2 * 4 * 3
    assert told["flow"]["double_counts"] == 0
    stages = sorted(path.name for path in (tmp_path / told["checkpoint"]).iterdir())
    assert stages == ["stage-1", "stage-2", "stage-3"]
