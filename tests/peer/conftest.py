"""Coordinators for the tests of commands and of the daemon."""

import contextlib

import pytest

from atoll.coordinator.run.spec import RunSpec
from support import organiser as helpers
from support.organiser import Organiser


@pytest.fixture
def kit():
    """The helpers of `support.organiser`."""
    return helpers


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
