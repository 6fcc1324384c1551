"""Both ends of a channel, and both sides of a peer, in one process."""

import socket
import threading

import pytest
import torch

from atoll.optim.state import vectors
from atoll.peer.daemon.beside.channel import Channel
from atoll.peer.daemon.beside.network_side import NetworkSide
from atoll.peer.daemon.beside.segments import use_for_vectors
from atoll.peer.daemon.beside.trainer_side import NetworkLine, SeatReducer
from support.reducer_bench import LAYOUT, Bench, contribution


@pytest.fixture(autouse=True)
def shared_vectors(monkeypatch):
    """Long vectors lie in shared memory, and are used again, for the time of a test."""
    monkeypatch.setattr(vectors, "_memory", vectors._memory)  # as it was, afterwards
    monkeypatch.setattr(vectors, "_keeps", True)  # a trainer's side lets this process keep none
    use_for_vectors()


@pytest.fixture
def ends():
    both = [Channel(each) for each in socket.socketpair()]
    yield both
    for each in both:
        each.close()


class Seat:
    """A trainer's reducer, and the one of the network behind it."""

    def __init__(self, folder, **changes):
        self.bench = Bench(folder, **changes)
        ours, theirs = socket.socketpair()
        self.side = side = NetworkSide(Channel(theirs))
        self.line = NetworkLine(ours, on_event=lambda level, text: None, stopping=threading.Event())
        self.thread = threading.Thread(target=self._serve, args=(side,), daemon=True)
        self.thread.start()
        self.reducer, self.commits = SeatReducer(self.line), []

    def _serve(self, side):
        side.serve(self.bench.thread)
        side.end(None)

    def start(self):
        return self.reducer.start(LAYOUT, torch.empty(0), self._settle)

    def _settle(self, commit):
        self.commits.append((commit, threading.current_thread()))

    def submit(self, **changes):
        self.bench.offered.clear()
        self.reducer.submit(contribution(**changes))
        assert self.bench.offered.wait(10)
        return self.bench.offers[-1]

    def close(self):
        self.reducer.close()
        self.thread.join(10)
        self.bench.close()


@pytest.fixture
def seats(tmp_path):
    """Makes trainers beside a network, and ends them."""
    made = []

    def make(**changes):
        made.append(Seat(tmp_path / f"seat-{len(made)}", **changes))
        return made[-1]

    yield make
    for each in made:
        each.close()
