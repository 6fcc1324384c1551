"""The networked reducer in loops of people's own: `connect`, `DiLoCo`, `close`."""

import dataclasses
import socket
import threading
from contextlib import closing

import example_diloco
import pytest
import torch

from atoll.coordinator.rpc.client_errors import CoordinatorError
from atoll.coordinator.run.invite import Invite, InviteError
from atoll.optim import DiLoCo
from atoll.optim.state.layout import Layout, LayoutError
from atoll.peer.daemon.network import connect
from atoll.peer.daemon.state_directory import StateDirectoryInUse

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
ROUNDS = 4


def some_invite():
    """An invite to a port at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return Invite(
        addresses=(f"127.0.0.1:{port}",),
        run_id=bytes(32),
        run_key=bytes(32),
        tls_sha256=bytes(32),
    )


@pytest.fixture
def organiser(organise, kit, request):
    method = getattr(request, "param", "diloco")
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

    def __init__(self, invite, state_dir, seed, together):
        super().__init__(daemon=True)
        self.together = together  # a barrier: nobody takes a step before all are ready
        self.invite, self.state_dir, self.seed = str(invite), state_dir, seed
        self.losses, self.worker, self.position = [], None, 0
        self.start()

    def run(self):
        train = example_diloco.train
        with closing(
            connect(
                self.invite, state_dir=self.state_dir, name=self.state_dir.name, listen=LOOPBACK
            )
        ) as reducer:
            inner_steps = reducer.spec.outer.inner_steps

            def join(*arguments, **options):
                self.worker = reducer.method.worker(*arguments, **options)
                self.together.wait(60)
                return self.worker

            for statistics in train(reducer, self.seed, 10_000, inner_steps, join):
                if statistics.position > self.position:
                    self.position = statistics.position
                    self.losses.append(statistics.loss)
                if reducer.finished:
                    break


@torch.no_grad()
def loss_of(worker):
    """The loss, on one text, of a worker's model after its last round, or of an untrained one."""
    model = example_diloco.ByteModel()
    if worker is not None:
        worker.layout.load_(model, worker.synced_N)
    tokens_BT, targets_BT = example_diloco.Text(seed=9).batch()
    return torch.nn.functional.cross_entropy(model(tokens_BT).flatten(0, 1), targets_BT.flatten())


@pytest.mark.parametrize(
    "organiser",
    ["diloco", pytest.param("sparseloco(tau=2)", marks=pytest.mark.exhaustive)],
    indirect=True,
)
def test_two_loops_of_their_own_train_one_model(organiser, tmp_path):
    together = threading.Barrier(2)
    loops = [
        Loop(organiser.invite, tmp_path / name, seed, together) for seed, name in enumerate("ab")
    ]
    for loop in loops:
        loop.join(60)
        assert not loop.is_alive()
    status = organiser.status()
    assert (status.state, status.position) == ("finished", ROUNDS)
    assert {row.members for row in status.history} == {2}
    assert all(loop.losses[-1] < loop.losses[0] < 6 for loop in loops)
    state = organiser.up.coordinator.log.replica.state
    assert all(torch.equal(loop.worker.synced_N, state.params_N) for loop in loops)
    assert {peer.name: peer.state for peer in status.peers} == {"a": "left", "b": "left"}
    assert all(0 < peer.loss < 6 and 0 < peer.utilisation < 1 for peer in status.peers)


@pytest.mark.slow
@pytest.mark.parametrize("organiser", ["noloco"], indirect=True)
def test_two_loops_by_gossip_end_all_rounds(organiser, tmp_path):
    together = threading.Barrier(2)
    loops = [
        Loop(organiser.invite, tmp_path / name, seed, together) for seed, name in enumerate("ab")
    ]
    for loop in loops:
        loop.join(90)
        assert not loop.is_alive()
    assert [loop.position for loop in loops] == [ROUNDS, ROUNDS]
    # By gossip, one that is two rounds behind adopts the other's state and skips what it lacks, so
    # a loop may have only one loss to tell: the model that it ended with is judged instead.
    assert all(loop.losses[0] < 6 for loop in loops)
    assert all(loss_of(loop.worker) < loss_of(None) - 1 for loop in loops)


IMAGES = """
from torch import nn
from atoll.peer.training.models import model

@model(tokens=False)
def build(channels=3):
    return nn.Sequential(nn.Conv2d(channels, 4, 3), nn.Flatten(), nn.Linear(4 * 4, 2))
"""


@pytest.mark.exhaustive  # its data: tests/peer/training; a model of text: below
def test_a_model_of_images_trains_in_a_run(organise, kit, monkeypatch, tmp_path, own_modules):
    (tmp_path / "image_models.py").write_text(IMAGES)
    monkeypatch.syspath_prepend(tmp_path)
    spec = kit.tiny_spec(
        run={"rounds": 2}, model={"custom": "image_models:build", "overrides": {"channels": 1}}
    )
    organiser = organise(spec)
    with closing(
        connect(str(organiser.invite), state_dir=tmp_path / "state", listen=LOOPBACK)
    ) as reducer:
        model = reducer.build_model(allow_model="image_models:build")
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        diloco = DiLoCo(model, inner, reducer, inner_steps=reducer.spec.outer.inner_steps)
        while not reducer.finished:
            diloco.zero_grad()
            model(torch.randn(5, 1, 4, 4)).square().mean().backward()
            diloco.step(tokens=5)
        assert (diloco.statistics().included, reducer.position) == (2, 2)


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


@pytest.mark.parametrize("option", ["listen", "announce"])
@pytest.mark.parametrize("address", ["/ip4/1.2.3.4", "1.2.3.4:7701", ["/ip4/1.2.3.4/tcp/x"]])
def test_an_address_without_a_port_is_refused(tmp_path, option, address):
    invite = str(some_invite())
    with pytest.raises(ValueError, match=rf"{option}: expected a multiaddr with a port.* got"):
        connect(invite, state_dir=tmp_path, **{option: address})


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan")])
def test_a_timeout_that_is_none_is_refused(tmp_path, timeout_s):
    with pytest.raises(ValueError, match="expected a timeout_s above 0"):
        connect(str(some_invite()), state_dir=tmp_path, timeout_s=timeout_s)


def test_a_coordinator_that_is_not_there_is_given_up(tmp_path):
    path = tmp_path / "invite.txt"
    path.write_text(str(some_invite()))
    with pytest.raises(TimeoutError, match=r"could not join within 0\.5 s.*atoll status"):
        connect(path, state_dir=tmp_path / "state", listen=LOOPBACK[0], timeout_s=0.5)


def test_the_dashboard_shows_the_device_of_a_loop(organiser, kit, tmp_path):
    with closing(
        connect(str(organiser.invite), state_dir=tmp_path, listen=LOOPBACK, device="cuda:7")
    ) as reducer:
        layout = Layout.of(example_diloco.ByteModel())
        reducer.start(layout, torch.zeros(layout.numel), lambda commit: None)
        kit.until(
            lambda: [peer.device for peer in organiser.status().peers] == ["cuda:7"], "a heartbeat"
        )


def test_what_is_no_invite_is_refused(tmp_path):
    with pytest.raises(InviteError):
        connect("hello", state_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_parameters_come_from_the_run(organiser, kit, tmp_path):
    with closing(connect(str(organiser.invite), state_dir=tmp_path, listen=LOOPBACK)) as reducer:
        layout = Layout.of(example_diloco.ByteModel())
        synced_N = reducer.start(layout, torch.zeros(layout.numel), lambda commit: None)
        assert torch.equal(synced_N, kit.first_state(organiser.spec).params_N)


def test_a_token_that_was_guessed_is_refused(organiser, tmp_path):
    invite = dataclasses.replace(organiser.invite, token=b"guessed")
    with pytest.raises(CoordinatorError, match="token"):
        connect(str(invite), state_dir=tmp_path, listen=LOOPBACK)
