"""Coordinators, peers and reducers for the tests here; all end with the test."""

import contextlib
from dataclasses import dataclass

import pytest

from atoll.coordinator.run.spec import RunSpec
from atoll.peer.daemon.network import open_reducer
from atoll.peer.daemon.options import PeerOptions
from atoll.peer.daemon.peer import Peer
from atoll.peer.daemon.reducer import RunReducer
from support import organiser as helpers
from support.organiser import LOOPBACK, Organiser
from support.reducer_bench import Bench


@pytest.fixture
def kit():
    """The helpers of `support.organiser`."""
    return helpers


@pytest.fixture
def bench(tmp_path):
    """Makes reducers, and ends them."""
    made = []

    def make(**changes):
        made.append(Bench(tmp_path / f"log-{len(made)}", **changes))
        return made[-1]

    yield make
    for each in made:
        each.close()


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


@dataclass
class Joined:
    """A peer without a trainer, and what it said."""

    reducer: RunReducer
    events: list

    @property
    def peer(self) -> Peer:
        return self.reducer.peer

    def said(self, text: str) -> bool:
        return any(text in event for event in self.events)


@pytest.fixture
def join(tmp_path):
    """Joins peers by an invite; all leave when the test ends."""
    with contextlib.ExitStack() as stack:

        def open_peer(invite, name="peer", **options) -> Joined:
            events = []
            reducer = open_reducer(
                PeerOptions(
                    invite=invite, state_dir=tmp_path / name, name=name, listen=LOOPBACK, **options
                ),
                on_event=lambda level, text, key=None: events.append(f"{level}: {text}"),
            )
            stack.callback(reducer.close)
            return Joined(reducer, events)

        yield open_peer
