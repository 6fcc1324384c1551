"""A coordinator that stops and comes back to a real peer that has pruned what it missed."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.optim import DiLoCo
from atoll.peer.daemon.network import connect
from atoll.peer.training.opening import build_model
from atoll.peer.training.permission import Allowed
from support import organiser

# In memory: test_catching_up.py.
pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

CUSTOM = "away_model:build"
MODEL = """
from torch import nn
from atoll.peer.training.models import model

WIDTH = 2400  # 1.2 MB in int8: more than a megabyte of log holds

@model
def build(*, vocab_size, seq_len):
    return nn.Sequential(nn.Embedding(vocab_size, WIDTH), nn.Linear(WIDTH, vocab_size))
"""


@pytest.fixture
def links() -> Any:
    """The coordinator in a thread that the tests of links use."""
    return organiser


class Loop(threading.Thread):
    """Trains until it is told to stop, slowly: what is fetched must outlive its fetching."""

    def __init__(self, invite: Any, state_dir: Path) -> None:
        super().__init__(daemon=True)
        self.invite, self.state_dir = str(invite), state_dir
        self.position, self.stopping = 0, threading.Event()
        self.start()

    def run(self) -> None:
        with closing(
            connect(self.invite, state_dir=self.state_dir, listen=("/ip4/127.0.0.1/tcp/0",))
        ) as reducer:
            model = build_model(reducer.spec, 256, Allowed(models=frozenset({CUSTOM})))
            inner = torch.optim.SGD(model.parameters(), lr=0.01)
            diloco = DiLoCo(model, inner, reducer, inner_steps=1)
            while not self.stopping.wait(0.4):
                inner.zero_grad()
                loss = model(torch.arange(8)).square().mean()
                loss.backward()
                diloco.step(tokens=8, loss=loss)
                self.position = diloco.statistics().position


def test_it_catches_up_over_the_network(links: Any, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "away_model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    spec = links.tiny_spec(
        run={"rounds": 0},
        outer={"inner_steps": 1},
        round={"log_mb": 1},
    )
    fields = spec.model_dump(mode="json") | {"model": {"custom": CUSTOM}}
    organiser = links.Organiser(type(spec).from_dict(fields), tmp_path / "coordinator")
    organiser.start()
    loop = Loop(organiser.invite, tmp_path / "peer")
    try:
        links.until(lambda: organiser.status().position >= 2, "the first rounds")
        organiser.stop()
        away = loop.position
        links.until(lambda: loop.position >= away + 12, "rounds without the coordinator")
        organiser.start()
        links.until(lambda: organiser.status().position >= away + 12, "the coordinator catches up")
        (gap,) = links.until(lambda: organiser.status().gaps, "that it says what it lacks")
        assert gap.first <= away + 2 and gap.last > gap.first
        before = organiser.status().position
        links.until(lambda: organiser.status().position >= before + 2, "rounds go on")
        assert organiser.up.coordinator.log.replica.is_current
        organiser.stop()
    finally:
        loop.stopping.set()
        loop.join(60)
        organiser.stop()
