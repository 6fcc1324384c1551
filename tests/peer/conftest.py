"""Coordinators for the tests of commands and of the daemon."""

import contextlib

import pytest

from atoll.coordinator.run.spec import RunSpec
from atoll.optim.state import vectors
from atoll.peer.daemon.beside import starting
from support import organiser as helpers
from support.beside import InThread
from support.organiser import Organiser


@pytest.fixture
def kit():
    """The helpers of `support.organiser`."""
    return helpers


@pytest.fixture
def network_threads(monkeypatch):
    """Peers of this process have their network sides in threads of it."""
    monkeypatch.setattr(starting, "start_process", InThread)
    monkeypatch.setattr(vectors, "_memory", vectors._memory)  # as it was, afterwards


@pytest.fixture
def organise(tmp_path):
    """Starts coordinators; all are stopped when the test ends."""
    with contextlib.ExitStack() as stack:

        def start(spec: RunSpec) -> Organiser:
            organiser = Organiser(spec, tmp_path / "coordinator")
            stack.callback(organiser.stop)
            organiser.start()
            return organiser

        yield start
