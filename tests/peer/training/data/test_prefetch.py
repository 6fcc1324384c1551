import threading

import pytest
import torch

from atoll.peer.errors import DataError
from atoll.peer.training.data.corpus import TokenStream, check_state
from atoll.peer.training.data.prefetch import AHEAD, Prefetched


class Counted(TokenStream):
    """Batches that are numbers; `gate` holds the thread that draws them."""

    def __init__(self, breaks_at=None):
        self.at, self.breaks_at = 0, breaks_at
        self.gate = threading.Event()
        self.gate.set()
        self.drawn = threading.Semaphore(0)

    def next_batch(self):
        assert self.gate.wait(30)
        if self.at == self.breaks_at:
            raise DataError("the network is gone")
        self.at += 1
        self.drawn.release()
        return torch.tensor([[self.at]])

    def state_dict(self):
        return {"kind": "counted", "at": self.at}

    def load_state_dict(self, state):
        check_state(state, "counted", at=int)
        self.at = state["at"]


@pytest.fixture
def ahead():
    made = []

    def make(stream):
        made.append(Prefetched(stream))
        return made[-1]

    yield make
    for each in made:
        each.close()


def drawn(stream, count):
    return [int(stream.next_batch()) for _ in range(count)]


def test_batches_come_in_order_and_some_ahead(ahead):
    source = Counted()
    stream = ahead(source)
    assert drawn(stream, 1) == [1]
    for _ in range(AHEAD + 1):
        assert source.drawn.acquire(timeout=30)
    assert not source.drawn.acquire(blocking=False)
    assert source.at == AHEAD + 1
    assert drawn(stream, 20) == list(range(2, 22))


def test_the_state_is_that_of_what_was_handed_out(ahead):
    stream = ahead(Counted())
    assert stream.state_dict()["at"] == 0
    drawn(stream, 7)
    assert stream.state_dict()["at"] == 7
    again = ahead(Counted())
    drawn(again, 3)
    again.load_state_dict(stream.state_dict())
    assert again.state_dict()["at"] == 7
    assert drawn(again, 5) == drawn(stream, 5) == list(range(8, 13))


def test_a_state_of_another_stream_is_refused(ahead):
    with pytest.raises(DataError, match="expected the state of a 'counted' stream"):
        ahead(Counted()).load_state_dict({"kind": "windows"})


def test_an_error_comes_where_its_batch_would_have(ahead):
    stream = ahead(Counted(breaks_at=3))
    assert drawn(stream, 3) == [1, 2, 3]
    with pytest.raises(DataError, match="the network is gone"):
        stream.next_batch()


def test_closing_ends_the_thread_after_the_batch_that_it_draws():
    others = set(threading.enumerate())
    source = Counted()
    stream = Prefetched(source)
    drawn(stream, 1)
    for _ in range(AHEAD + 1):
        assert source.drawn.acquire(timeout=30)
    source.gate.clear()
    drawn(stream, 1)  # one more is asked for, and held
    threads = set(threading.enumerate()) - others
    assert threads
    source.gate.set()
    stream.close()
    assert threads.isdisjoint(threading.enumerate())
