"""Peers of a pipeline: three stages over libp2p, each with a log of its own."""

import asyncio
import math
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from atoll.dht.testing.memory import MemoryNetwork
from atoll.optim.log.entry import Elector
from atoll.optim.state.layout import Layout
from atoll.peer.daemon import pipeline_run, process
from atoll.peer.daemon.network import connect
from atoll.peer.daemon.pipeline_run import PipelineRun, frame_shape, hop_rules
from atoll.peer.errors import DeviceError, ModelError, WrongRole
from atoll.peer.pipeline.hop import Hop
from atoll.peer.pipeline.messages import OmitNote
from atoll.peer.pipeline.workbench import Workbench
from atoll.peer.training.opening import first_state
from atoll.peer.training.permission import Allowed
from atoll.peer.training.stages import Shape
from atoll.peer.training.trained import load_checkpoint
from support.limits import DEADLINE_S
from support.organiser import LOOPBACK
from support.pacing import unlimited

STAGES = ("stage-1", "stage-2", "stage-3")
UNEVEN = [["slices.[0-2].*"], ["slices.3.*"], ["slices.4.*"]]  # of three blocks


def staged(kit, *, rounds=2, peers=3, layers=1, **topology):
    return kit.tiny_spec(
        run={"name": "tiny", "rounds": rounds},
        model={"overrides": {"dim": 16, "num_layers": layers, "num_heads": 2, "ffn_dim": 32}},
        inner={"batch_size": 2, "grad_accumulation": 2, "warmup_steps": 2},
        round={"min_peers": peers, "snapshot_every": 1, "grace_s": 10.0, "stall_s": 3.0},
        topology={"stages": 3} | topology,
    )


@pytest.fixture
def pipeline(organise, kit, start):
    """Starts a run and its peers; they join one after the other, so that each has another stage."""

    def begin(peers=3, **changes):
        organiser = organise(staged(kit, peers=peers, **changes))
        running = []
        for index in range(peers):
            running.append(start(organiser.invite, f"peer-{index}", share=1.0))
            wait_for(lambda: len(organiser.status().peers) == len(running), running)
        return organiser, running

    return begin


def wait_for(condition, running=()):
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        failed = [peer.error for peer in running if peer.error is not None]
        assert not failed, failed
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def stages_on_disk(folder):
    """The stages of which a peer keeps a log or progress."""
    return {path.name.partition(".")[0] for path in folder.iterdir() if "stage" in path.name}


def test_three_stages_train_one_model(pipeline):
    organiser, running = pipeline(stages=UNEVEN, layers=3)
    assert [peer.join() for peer in running] == [True, True, True]
    lines = [e.text for peer in running for e in peer.events if e.text.startswith("parameters: ")]
    assert sorted(line.partition(", stage-")[2][0] for line in lines) == ["1", "2", "3"]
    status = organiser.status()
    assert status.state == "finished"
    assert [(each.name, each.position) for each in status.modules] == [(s, 2) for s in STAGES]
    assert sorted(peer.module for peer in status.peers) == list(STAGES)
    logs = organiser.up.coordinator.logs
    slices = [
        {name.split(".")[1] for name in log.replica.state.layout.names} for log in logs.values()
    ]
    assert slices == [{"0", "1", "2"}, {"3"}, {"4"}]
    for peer in status.peers:
        state = logs[peer.module].replica.state
        assert peer.state_digest == state.root().hex()  # of that stage alone
    # Every stage has moved, and knows the loss of the microbatches that flowed through it.
    spec = organiser.spec
    for name, log in logs.items():
        begun = first_state(spec, Allowed.everything_in(spec), module=name)
        assert not torch.equal(begun.params_N, log.replica.state.params_N)
        losses = [row.loss for row in log.rounds.newest()]
        assert len(losses) == 2 and all(0 < loss < 2 * math.log(256) for loss in losses)
        assert organiser.status(name).history[-1].chain == log.head().chain.hex()
    # The checkpoints of the stages are one model.
    folder = organiser.folder / "checkpoints"
    wait_for(lambda: all((folder / each / "tiny-00000002.safetensors").exists() for each in logs))
    trained = load_checkpoint(folder)
    whole_N = torch.cat([logs[name].replica.state.params_N for name in STAGES])
    assert torch.equal(Layout.of(trained.model).flatten(trained.model), whole_N)
    assert trained.position == 2


@pytest.mark.exhaustive  # the one whose last peer leaves begins like this
def test_a_stage_of_two_peers_shares_the_flow_and_the_log(pipeline):
    organiser, running = pipeline(peers=4, rounds=3, exact=True)
    assert all(peer.join() for peer in running)
    flows = [peer.flow for peer in organiser.status().peers]
    assert all(flow.counted and not flow.double_counts for flow in flows)
    logs = organiser.up.coordinator.logs
    together = [log for log in logs.values() if log.rounds.newest()[-1].members == 2]
    assert len(together) == 1 and together[0].name == "stage-1"  # the fourth came to the first
    chains = {}
    for peer in organiser.status().peers:
        chains.setdefault(peer.module, set()).add(peer.chain)
    assert {module: len(found) for module, found in chains.items()} == dict.fromkeys(STAGES, 1)


@pytest.mark.exhaustive  # joining with a module that is named is tested without processes
def test_a_peer_that_restarts_serves_its_stage_again(pipeline, start, tmp_path):
    organiser, running = pipeline(rounds=6)
    wait_for(lambda: organiser.status().position >= 1, running)
    module = next(p.module for p in organiser.status().peers if p.name == "peer-1")
    running[1].stop.set()
    running[1].join()
    former = next(stage for stage in STAGES if stage != module)
    (tmp_path / "peer-1" / former).mkdir()  # as if it had been killed right after a move
    again = start(organiser.invite, "peer-1", share=1.0)
    assert again.join() is True
    assert stages_on_disk(tmp_path / "peer-1") == {module}
    assert again.said("resumed at position")
    assert next(p.module for p in organiser.status().peers if p.name == "peer-1") == module
    assert running[0].join() and running[2].join()
    assert {each.position for each in organiser.status().modules} == {6}


@pytest.mark.exhaustive  # the one below fills a stage at the second try
def test_a_stage_that_its_last_peer_leaves_is_filled_where_it_stood(pipeline, tmp_path):
    organiser, running = pipeline(peers=4, rounds=6)
    wait_for(lambda: organiser.status().position >= 1, running)
    last = next(p for p in organiser.status().peers if p.module == "stage-3")
    index = int(last.name.removeprefix("peer-"))
    running[index].stop.set()
    running[index].join()
    others = [peer for peer in running if peer is not running[index]]
    assert all(peer.join() for peer in others)
    assert organiser.status().state == "finished"
    # One, but for a busy machine: a mover that is slow to set out is passed over for another.
    movers = [peer for peer in others if peer.said("moves from stage-1 to stage-3")]
    assert movers
    # Not from its beginning: it stands on what the one before it had decided.
    log = organiser.up.coordinator.logs["stage-3"]
    assert log.head().position == 6 and log.replica.epoch > 0
    assert any(mover.said("recovered from position 0") for mover in movers)
    # Nobody keeps a stage that it no longer serves.
    kept = [stages_on_disk(tmp_path / f"peer-{i}") for i in range(4)]
    assert any(kept[running.index(mover)] == {"stage-3"} for mover in movers)
    assert all(len(stages) == 1 for stages in kept)
    assert set[str]().union(*kept) == {"stage-1", "stage-2", "stage-3"}


def test_a_peer_that_cannot_serve_where_it_moved_returns(pipeline, monkeypatch, tmp_path):
    tried, honest = [], process.Trainer

    def does_not_fit(spec, reducer, options, **given):
        if options.stage.module == "stage-3" and len(tried) == 3:
            tried.append(options.peer_id)
            raise DeviceError("the device does not hold this stage")
        tried.append(options.peer_id)
        return honest(spec, reducer, options, **given)

    monkeypatch.setattr(process, "Trainer", does_not_fit)
    organiser, running = pipeline(peers=4, rounds=0)
    wait_for(lambda: organiser.status().position >= 1, running)
    last = next(p for p in organiser.status().peers if p.module == "stage-3")
    tried[:] = [""] * 3
    gone = running[int(last.name.removeprefix("peer-"))]
    gone.stop.set()
    gone.join()
    log = organiser.up.coordinator.logs["stage-3"]
    stood = log.head().position
    others = [peer for peer in running if peer is not gone]
    back = "cannot serve stage-3, so this peer returns to stage-1"
    wait_for(lambda: any(peer.said(back) for peer in others), others)
    # Another peer fills the stage, and the one that came back serves its own again.
    wait_for(lambda: len([p for p in tried if p]) >= 3, others)
    assert len({p for p in tried if p}) == 2
    wait_for(
        lambda: (
            sorted(p.module for p in organiser.status().peers if p.state == "training")
            == list(STAGES)
        ),
        others,
    )
    # Not from its beginning: it stands on what the one before it had decided.
    wait_for(lambda: log.head().position > stood, others)
    assert log.replica.epoch > 0
    movers = [peer for peer in others if peer.said("moves from stage-1 to stage-3")]
    assert len(movers) == 2
    assert any(mover.said("recovered from position 0") for mover in movers)
    for peer in others:
        peer.stop.set()
        peer.join()
    # Nobody keeps a stage that it no longer serves.
    kept = [stages_on_disk(tmp_path / f"peer-{running.index(peer)}") for peer in others]
    assert all(len(stages) == 1 for stages in kept)
    assert set[str]().union(*kept) == set(STAGES)


@pytest.mark.exhaustive  # without processes: tests/peer/pipeline/test_hop.py
def test_a_peer_that_leaves_says_which_microbatches_it_gives_up(pipeline, monkeypatch):
    heard, noted = Counter(), Hop.noted

    def listens(self, peer, note, now_s):
        if isinstance(note, OmitNote):
            heard[peer, note.reason] += 1
        return noted(self, peer, note, now_s)

    monkeypatch.setattr(Hop, "noted", listens)
    organiser, running = pipeline(rounds=0)
    wait_for(lambda: organiser.status().position >= 1, running)
    middle = next(p for p in organiser.status().peers if p.module == "stage-2")
    running[int(middle.name.removeprefix("peer-"))].stop.set()
    wait_for(lambda: heard[middle.peer_id, "withdrawn"] > 0)
    for peer in running:
        peer.stop.set()


@pytest.mark.parametrize("in_touch", [True, False])
def test_only_a_peer_in_touch_with_the_coordinator_moves(in_touch):
    """It would leave its stage, and then wait to be let into another."""
    run = SimpleNamespace(
        replica=SimpleNamespace(opened=object()),
        _needs=(object(),),
        position=1,
        progress=SimpleNamespace(is_over=lambda position: False, leaving=False),
        heartbeats=SimpleNamespace(in_touch=in_touch),
    )
    assert PipelineRun._may_move.fget(run) is in_touch


@pytest.mark.parametrize("fills", [True, False])
def test_a_peer_that_fills_a_vacant_stage_waits_for_no_returns(fills, monkeypatch):
    """Nothing gets through the run meanwhile, so none might come."""
    done = []
    monkeypatch.setattr(pipeline_run, "DRAIN_S", 0.0)

    async def publish():
        done.append("announce")

    run = SimpleNamespace(
        _env=SimpleNamespace(report=lambda level, text: None, module="stage-1"),
        _placing=SimpleNamespace(fills_vacant=fills),
        _carrier=SimpleNamespace(
            act=lambda actions: None, hop=SimpleNamespace(drain=lambda now_s: done.append("drain"))
        ),
        publish=publish,
        on_move=lambda: done.append("leave"),
    )
    asyncio.run(PipelineRun._set_out(run, "stage-2"))
    assert done == (["announce", "leave"] if fills else ["announce", "drain", "leave"])
    assert (run.moves.module, run.moves.came_from) == ("stage-2", "stage-1")


def test_a_peer_announces_that_it_serves_as_soon_as_it_does(kit):
    """Its record is renewed each 5 s, and nobody sends it anything before that."""

    async def main():
        spawned = []
        run = SimpleNamespace(
            _env=SimpleNamespace(
                spec=staged(kit),
                report=lambda level, text: None,
                me=Elector(peer_id="ann", incarnation="1"),
                node=SimpleNamespace(transport=MemoryNetwork().transport("ann")),
                tasks=SimpleNamespace(keep=lambda work: None, spawn=spawned.append),
                compute=asyncio.to_thread,
            ),
            _stage=0,
            bench=Workbench(),
            ctx=SimpleNamespace(link=SimpleNamespace(pacer=unlimited())),
            publish=object(),
        )
        PipelineRun._open(run, Shape(vocab_size=256, seq_len=64, width=8), ())
        assert spawned == [run.publish]

    asyncio.run(main())


@pytest.mark.parametrize(("batch_size", "fits"), [(32, True), (1024, False)])
def test_microbatches_that_no_peer_could_keep_are_refused(kit, batch_size, fits):
    spec = kit.tiny_spec(inner={"batch_size": batch_size}, topology={"stages": 2})
    frames = frame_shape(spec, Shape(width=65_536, vocab_size=256, seq_len=spec.data.seq_len))
    if fits:
        assert hop_rules(spec, frames).stages == 2
    else:
        with pytest.raises(ModelError, match=r"at most 537 MB.*smaller inner.batch_size"):
            hop_rules(spec, frames)


def test_a_loop_of_its_own_cannot_join_a_pipeline(organise, kit, tmp_path, network_threads):
    organiser = organise(staged(kit))
    with pytest.raises(WrongRole, match="join with `atoll peer`"):
        connect(str(organiser.invite), state_dir=tmp_path / "own", listen=LOOPBACK)
