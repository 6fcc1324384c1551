"""Peers of a pipeline's middle stage, as processes, one of which is killed within a pass."""

import os
import signal
from contextlib import suppress

import psutil
import pytest

from support.forks import Forked
from support.organiser import LOOPBACK, stand_on_one_log, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MODEL = """
import os
import time
from functools import partial

import torch
from torch import nn

from atoll.peer.training.models import model


def enter(direction):
    try:
        os.rename(direction, f"{direction}-in-{os.getpid()}")
    except FileNotFoundError:
        return
    time.sleep(600)  # until it is killed


class Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BTD):
        enter("forward")
        return x_BTD.clone()

    @staticmethod
    def backward(ctx, gradient_BTD):
        enter("backward")
        return gradient_BTD


class Middle(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inside = nn.Linear(width, width)

    def forward(self, x_BTD):
        time.sleep(0.02)  # a round takes longer than looking at it
        return x_BTD + Pass.apply(self.inside(x_BTD))


@model(slices=True)
def build(*, vocab_size, seq_len, width=16, **_):
    first = partial(nn.Embedding, vocab_size, width)
    return [first, partial(Middle, width), partial(nn.Linear, width, vocab_size)]
"""


@pytest.fixture
def organiser(own_modules, tmp_path, organise, kit):
    """A run whose model stops, in whoever enters it first, once a file says where."""
    (tmp_path / "stops.py").write_text(MODEL)
    return organise(
        kit.tiny_spec(
            run={"rounds": 0},
            model={"custom": "stops:build", "overrides": {}},
            inner={"batch_size": 2, "grad_accumulation": 4, "warmup_steps": 2},
            round={"min_peers": 5, "snapshot_every": 1, "grace_s": 5.0, "stall_s": 3.0},
            topology={"stages": 3, "deadline_s": 30.0},
        )
    )


@pytest.fixture
def spawn(tmp_path):
    """Starts peers as processes; what is left of them is killed."""
    started = []

    def begin(invite, name):
        words = ("--state-dir", tmp_path / name, "--name", name, "--device", "cpu", "--yes")
        allowed = ("--allow-model", "stops:build", "--listen", *LOOPBACK)
        with (tmp_path / f"{name}.log").open("w") as log:
            process = Forked(
                "peer", invite.encode(), *words, *allowed, stdout=log, stderr=log, cwd=tmp_path
            )
        started.append(process)
        return process

    yield begin
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def stands(organiser):
    return {each.name: each.position for each in organiser.status().modules}


def trains(organiser, names):
    """What each peer has counted so far."""
    peers = [peer for peer in organiser.status().peers if peer.name in names]
    return {peer.name: peer.flow.counted if peer.flow else 0 for peer in peers}


@pytest.mark.parametrize(
    "direction", ["backward", pytest.param("forward", marks=pytest.mark.exhaustive)]
)
def test_a_peer_killed_within_a_pass_is_replaced(direction, organiser, start, spawn, tmp_path):
    middle = {}
    for number in range(5):  # each to the stage with the fewest: the second gets two
        name = f"peer-{number}"
        if number % 3 == 1:
            middle[name] = spawn(organiser.invite, name)
        else:
            start(organiser.invite, name, share=1.0, allow_models=frozenset({"stops:build"}))
        until(lambda joined=number + 1: len(organiser.status().peers) == joined, name)
    modules = {peer.name: peer.module for peer in organiser.status().peers}
    assert {name for name in modules if modules[name] == "stage-2"} == set(middle)
    until(
        lambda: all(stands(organiser).values()) and all(trains(organiser, middle).values()),
        "a round of each stage, and work of both",
    )

    (tmp_path / direction).touch()
    entered = until(lambda: list(tmp_path.glob(f"{direction}-in-*")), "a pass")
    pid = int(entered[0].name.rpartition("-")[2])
    (killed,) = (name for name in middle if middle[name].pid == pid)
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    os.killpg(pid, signal.SIGKILL)
    assert middle[killed].wait(30) == -signal.SIGKILL
    before, others = stands(organiser), modules.keys() - {killed}
    counted = trains(organiser, others)

    until(
        lambda: (
            all(stands(organiser)[stage] >= before[stage] + 2 for stage in before)
            and all(trains(organiser, others)[name] > counted[name] for name in others)
        ),
        "two more rounds of each stage, and work of all that are left",
    )
    until(lambda: stand_on_one_log(organiser, others), "the coordinator to have every entry")
    assert {peer.module for peer in organiser.status().peers if peer.name in others} == set(before)
    gone = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    until(
        lambda: all(not each.is_running() or each.status() in gone for each in processes),
        "the end of all that belonged to it",
    )
