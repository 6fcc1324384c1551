"""A trainer and the network process beside it, as real processes that die in every order."""

import os
import signal
import subprocess
import threading
from contextlib import closing

import psutil
import pytest
import torch
from torch import nn

from atoll.optim import DiLoCo
from atoll.peer.daemon.beside.trainer_side import NetworkProcess
from atoll.peer.daemon.network import connect
from atoll.peer.daemon.options import PeerOptions
from atoll.peer.errors import NetworkLost
from support.forks import Forked

pytestmark = pytest.mark.slow

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
WIDTH = 1100  # 1.2M values: more than a vector that travels in a message
MODEL = f"""
from torch import nn
from atoll.peer.training.models import model

@model(tokens=False)
def build():
    return nn.Linear({WIDTH}, {WIDTH}, bias=False)
"""
TRAINER = """
import os, sys, time
from pathlib import Path
from contextlib import closing
from torch import nn
from atoll.optim.state.layout import Layout
from atoll.peer.daemon.network import connect

if __name__ == "__main__":
    invite, state_dir, forks = sys.argv[1:]
    reducer = connect(invite, state_dir=state_dir, listen=("/ip4/127.0.0.1/tcp/0",))
    with closing(reducer):
        if forks == "forks" and os.fork() == 0:  # as the workers of a DataLoader are
            os.setsid()
            time.sleep(60)
            os._exit(0)
        layout = Layout.of(nn.Linear(1100, 1100, bias=False))
        reducer.start(layout, None, lambda commit: None)
        print(reducer.network.pid, flush=True)
        reducer.stopping.wait(60)
"""


@pytest.fixture
def organiser(organise, kit, tmp_path, monkeypatch, own_modules):
    (tmp_path / "wide_model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    spec = kit.tiny_spec(run={"rounds": 4}, model={"custom": "wide_model:build", "overrides": {}})
    return organise(spec)


def model_of(seed):
    torch.manual_seed(seed)
    return nn.Linear(WIDTH, WIDTH, bias=False)


def trained(reducer, rounds):
    """Train until so many rounds are decided; return the worker."""
    model = model_of(1)
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    worker = DiLoCo(model, inner, reducer, inner_steps=reducer.spec.outer.inner_steps)
    begun = reducer.position
    while reducer.position < begun + rounds:
        worker.zero_grad()
        model(torch.ones(2, WIDTH)).square().mean().backward()
        worker.step(tokens=2)
    return worker


def descendants(pid):
    return psutil.Process(pid).children(recursive=True)


def expect_gone(kit, processes):
    kit.until(
        lambda: all(not p.is_running() or p.status() == "zombie" for p in processes),
        "the end of all processes",
    )


def test_long_vectors_cross_by_shared_memory_and_a_restart_continues(organiser, kit, tmp_path):
    state_dir, invite = tmp_path / "peer", str(organiser.invite)
    with closing(connect(invite, state_dir=state_dir, listen=LOOPBACK)) as reducer:
        worker = trained(reducer, 2)
        saved, synced_N = worker.state_dict(), worker.synced_N.clone()
        assert saved["reducer"]["feedback"][0]["mass_N"].numel() == WIDTH**2
        tensors = reducer.network._channel.tensors
        assert tensors._borrowed and next(tensors._tokens) > 0  # nothing long in a message
    with closing(connect(invite, state_dir=state_dir, listen=LOOPBACK)) as reducer:
        model = model_of(2)
        inner = torch.optim.SGD(model.parameters(), lr=1e-3)
        worker = DiLoCo(model, inner, reducer, inner_steps=reducer.spec.outer.inner_steps)
        worker.load_state_dict(saved)
        assert reducer.position == 2 and torch.equal(worker.synced_N, synced_N)
        mass_N = reducer.state_dict()["feedback"][0]["mass_N"]
        assert torch.equal(mass_N, saved["reducer"]["feedback"][0]["mass_N"])
        assert trained(reducer, 2).statistics().position == 4 and reducer.finished
    kit.until(lambda: organiser.status().position == 4, "all rounds")


def test_a_killed_network_process_ends_a_wait_and_leaves_nothing(
    organiser, kit, tmp_path, interpreters
):
    with closing(connect(str(organiser.invite), state_dir=tmp_path, listen=LOOPBACK)) as reducer:
        worker = trained(reducer, 1)
        pid = reducer.network.pid
        left = descendants(pid)
        assert any("p2pd" in process.name() for process in left)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(NetworkLost, match="killed by SIGKILL; start the peer again"):
            reducer.wait()
        with pytest.raises(NetworkLost):
            reducer.state_dict()
        assert worker.statistics().position == 1 and worker.synced_N.isfinite().all()
    expect_gone(kit, left)
    # Its state directory is free, and the same peer joins again.
    with closing(connect(str(organiser.invite), state_dir=tmp_path, listen=LOOPBACK)) as again:
        assert again.peer_id == reducer.peer_id


@pytest.mark.parametrize("forks", ["alone", "forks"])
def test_the_network_process_leaves_when_its_trainer_is_killed(organiser, kit, tmp_path, forks):
    with started(organiser, tmp_path, forks) as trainer:
        pid = int(trainer.stdout.readline())
        left = [psutil.Process(pid), *descendants(pid)]
        holders = [p for p in descendants(trainer.pid) if p not in left]
        trainer.kill()
        trainer.wait()
        expect_gone(kit, left)
        kit.until(lambda: organiser.status().peers[0].state == "left", "a goodbye")
        assert all(holder.is_running() for holder in holders)
        for holder in holders:
            holder.kill()


def test_ctrl_c_means_the_trainer_which_leaves_the_run(organiser, kit, tmp_path):
    with started(organiser, tmp_path, "alone") as trainer:
        pid = int(trainer.stdout.readline())
        left = [psutil.Process(pid), *descendants(pid)]
        os.kill(pid, signal.SIGTERM)  # as a service manager does to all at once
        os.killpg(trainer.pid, signal.SIGINT)
        assert trainer.wait(60) == -signal.SIGINT
        expect_gone(kit, left)
        kit.until(lambda: organiser.status().peers[0].state == "left", "a goodbye")


def started(organiser, tmp_path, forks):
    program = tmp_path / "trainer.py"
    program.write_text(TRAINER)
    words = (organiser.invite, tmp_path / "peer", forks)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    return Forked(*words, program=program, **pipes)


def test_a_stop_ends_the_joining(kit, tmp_path, organiser):
    organiser.stop()
    stopping = threading.Event()
    threading.Timer(1.0, stopping.set).start()
    options = PeerOptions(invite=organiser.invite, state_dir=tmp_path / "peer", listen=LOOPBACK)
    before = set(psutil.Process().children())
    with pytest.raises(KeyboardInterrupt):
        NetworkProcess(options, on_event=lambda level, text: None, stopping=stopping)
    expect_gone(kit, set(psutil.Process().children()) - before)
