"""Peers and reducers for the tests here; all end with the test."""

import contextlib
import threading
from dataclasses import dataclass

import pytest

from atoll.peer.daemon.joining import open_peer
from atoll.peer.daemon.options import LinkRates, PeerOptions
from atoll.peer.daemon.peer import Peer
from atoll.peer.daemon.process import RunOptions, Stop, join_and_train
from atoll.peer.daemon.reducer import RunReducer
from support.organiser import LOOPBACK
from support.reducer_bench import Bench

SHARE = 0.3  # of the time to train: more would only take cores from the other peers and tests


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

        def join_run(invite, name="peer", **options) -> Joined:
            events = []
            thread = open_peer(
                PeerOptions(
                    invite=invite, state_dir=tmp_path / name, name=name, listen=LOOPBACK, **options
                ),
                on_event=lambda level, text, key=None: events.append(f"{level}: {text}"),
            )
            reducer = thread.value.run.reducer(thread)
            stack.callback(reducer.close)
            return Joined(reducer, events)

        yield join_run


class Running:
    """A peer with its trainer in a thread, and what it said."""

    def __init__(self, invite, state_dir, rates=None, **options):
        self.events = []
        self.result = self.error = None
        self.stop = Stop()
        peer = PeerOptions(
            invite=invite,
            state_dir=state_dir,
            name=state_dir.name,
            listen=LOOPBACK,
            rates=rates or LinkRates(),
        )
        options = {"share": SHARE} | options
        self._options = RunOptions(peer=peer, device="cpu", yes=True, **options)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self):
        try:
            self.result = join_and_train(self._options, on_event=self.events.append, stop=self.stop)
        except Exception as error:
            self.error = error

    def said(self, text, kind="event"):
        return any(e.kind == kind and text in e.text for e in self.events)

    def join(self):
        self.thread.join(60)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error
        return self.result


@pytest.fixture
def start(tmp_path, network_threads):
    running = []

    def start(invite, name="peer", **options):
        running.append(Running(invite, tmp_path / name, **options))
        return running[-1]

    yield start
    for peer in running:
        peer.stop.set()
    for peer in running:
        peer.thread.join(60)
