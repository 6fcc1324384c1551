"""The networked reducer in loops of people's own: `connect`, `DiLoCo`, `close`."""

import dataclasses
import runpy
import threading
from contextlib import closing
from pathlib import Path

import pytest
import torch

from atoll.coordinator.rpc.client_errors import CoordinatorError
from atoll.coordinator.run.invite import InviteError
from atoll.optim import DiLoCo
from atoll.optim.state.layout import Layout, LayoutError
from atoll.peer.daemon.membership import StateDirectoryInUse
from atoll.peer.daemon.network import connect

SCRIPTS = Path(__file__).parents[3] / "scripts"
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
ROUNDS = 4


@pytest.fixture
def organiser(organise, kit, monkeypatch, request):
    method = getattr(request, "param", "diloco")
    monkeypatch.syspath_prepend(SCRIPTS)
    model = {"custom": "example_diloco:build", "overrides": {}}
    spec = kit.tiny_spec(
        run={"rounds": ROUNDS},
        outer={"inner_steps": 3, "method": method},
        data={"seq_len": 64},
        round={"min_peers": 2},
    )
    return organise(type(spec).from_dict(spec.model_dump(mode="json") | {"model": model}))


class Loop(threading.Thread):
    """The loop of the example, as a peer of a run, until the last round."""

    def __init__(self, invite, state_dir, seed):
        super().__init__(daemon=True)
        self.invite, self.state_dir, self.seed = str(invite), state_dir, seed
        self.losses, self.synced_N, self.position = [], None, 0
        self.start()

    def run(self):
        train = runpy.run_path(str(SCRIPTS / "example_diloco.py"))["train"]
        with closing(
            connect(
                self.invite, state_dir=self.state_dir, name=self.state_dir.name, listen=LOOPBACK
            )
        ) as reducer:
            inner_steps = reducer.spec.outer.inner_steps
            join = reducer.method.worker
            for statistics in train(reducer, self.seed, 10_000, inner_steps, join):
                if statistics.position > self.position:
                    self.position = statistics.position
                    self.losses.append(statistics.loss)
                if reducer.finished:
                    break
            self.root = reducer._replica.state.root()


@pytest.mark.parametrize("organiser", ["diloco", "sparseloco(tau=2)"], indirect=True)
def test_two_loops_of_their_own_train_one_model(organiser, tmp_path):
    loops = [Loop(organiser.invite, tmp_path / name, seed) for seed, name in enumerate("ab")]
    for loop in loops:
        loop.join(60)
        assert not loop.is_alive()
    status = organiser.status()
    assert (status.state, status.position) == ("finished", ROUNDS)
    assert {row.members for row in status.history} == {2}
    assert all(loop.losses[-1] < loop.losses[0] < 6 for loop in loops)
    state = organiser.up.coordinator.replica.state
    assert {loop.root for loop in loops} == {state.root()}
    assert {peer.name: peer.state for peer in status.peers} == {"a": "gone", "b": "gone"}
    assert all(0 < peer.loss < 6 and 0 < peer.utilisation < 1 for peer in status.peers)


def test_a_model_of_another_shape_is_refused(organiser, tmp_path):
    model = torch.nn.Linear(3, 3)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with closing(connect(str(organiser.invite), state_dir=tmp_path, listen=LOOPBACK)) as reducer:
        with pytest.raises((LayoutError, ValueError), match="expected the run's model"):
            DiLoCo(model, inner, reducer, inner_steps=3)


def test_closing_twice_is_fine_and_frees_the_directory(organiser, tmp_path):
    reducer = connect(str(organiser.invite), state_dir=tmp_path, listen=LOOPBACK)
    with pytest.raises(StateDirectoryInUse):
        connect(str(organiser.invite), state_dir=tmp_path, listen=LOOPBACK)
    reducer.close()
    reducer.close()
    connect(str(organiser.invite), state_dir=tmp_path, listen=LOOPBACK).close()


def test_a_name_that_the_coordinator_would_refuse_is_refused_here(organiser, tmp_path):
    with pytest.raises(ValueError, match="at most 64 characters, got 65"):
        connect(str(organiser.invite), state_dir=tmp_path, name="x" * 65, listen=LOOPBACK)


def test_what_is_no_invite_is_refused(tmp_path):
    with pytest.raises(InviteError):
        connect("hello", state_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_parameters_come_from_the_run(organiser, kit, tmp_path):
    with closing(connect(str(organiser.invite), state_dir=tmp_path, listen=LOOPBACK)) as reducer:
        layout = Layout.of(runpy.run_path(str(SCRIPTS / "example_diloco.py"))["ByteModel"]())
        synced_N = reducer.start(layout, torch.zeros(layout.numel), lambda commit: None)
        assert torch.equal(synced_N, kit.first_state(organiser.spec).params_N)


def test_a_token_that_was_guessed_is_refused(organiser, tmp_path):
    invite = dataclasses.replace(organiser.invite, token=b"guessed")
    with pytest.raises(CoordinatorError, match="token"):
        connect(str(invite), state_dir=tmp_path, listen=LOOPBACK)
