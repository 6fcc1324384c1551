import os
import sys
import threading

import pytest
import torch

from atoll.optim.state import threads
from atoll.optim.state.threads import side_by_side
from atoll.peer.daemon.background import background_threads

MEET_S = 20.0


@pytest.fixture(autouse=True)
def two_threads_of_torch():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Seen:
    """What two threads see that meet in their first piece, and so both work."""

    def __init__(self, see=lambda: None):
        self.see, self.by_thread, self.pieces = see, {}, []
        self._meet = threading.Barrier(2)

    def work(self, piece):
        me = threading.get_ident()
        if me not in self.by_thread:
            self.by_thread[me] = self.see()
            self._meet.wait(MEET_S)
        self.pieces.append(piece)


def test_each_piece_is_taken_once_by_the_caller_and_another_thread_that_ends():
    seen, before = Seen(), threading.active_count()
    side_by_side(seen.work, range(100))
    assert sorted(seen.pieces) == list(range(100))
    assert len(seen.by_thread) == 2
    assert threading.get_ident() in seen.by_thread
    assert threading.active_count() == before


def test_threads_have_one_of_torchs_each_and_nothing_is_left_of_that():
    seen = Seen(torch.get_num_threads)
    side_by_side(seen.work, range(10))
    assert list(seen.by_thread.values()) == [1, 1]
    assert torch.get_num_threads() == 2
    started = []
    later = threading.Thread(target=lambda: started.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert started == [2]


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_threads_have_the_priority_and_the_mode_of_the_caller():
    def see():
        niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        return niceness, torch.is_inference_mode_enabled()

    seen = Seen(see)
    with background_threads(1, "atoll-test") as background:
        background.submit(side_by_side, seen.work, range(10)).result(MEET_S)
        expected = background.submit(see).result(MEET_S)
    assert list(seen.by_thread.values()) == [expected] * 2
    assert expected[1]
    assert expected[0] > os.getpriority(os.PRIO_PROCESS, 0)


def test_few_pieces_are_worth_no_thread():
    seen = []
    side_by_side(lambda piece: seen.append((piece, threading.get_ident())), range(3), at_least=2)
    assert seen == [(piece, threading.get_ident()) for piece in range(3)]


def test_no_more_threads_than_allowed():
    seen = set()
    side_by_side(lambda _: seen.add(threading.get_ident()), range(50), at_most=1)
    assert seen == {threading.get_ident()}


def test_a_failure_anywhere_ends_the_work():
    begun = []

    def work(piece):
        begun.append(piece)
        if piece == 3:
            raise ValueError("piece 3")

    with pytest.raises(ValueError, match="piece 3"):
        side_by_side(work, range(10_000))
    assert len(begun) < 10_000
    assert torch.get_num_threads() == 2


def test_the_caller_does_all_where_openmp_is_not_torchs(monkeypatch):
    threads._can_be_alone.cache_clear()
    monkeypatch.setattr(threads, "_set_own_threads", None)
    seen = set()
    side_by_side(lambda _: seen.add((threading.get_ident(), torch.get_num_threads())), range(9))
    threads._can_be_alone.cache_clear()
    assert seen == {(threading.get_ident(), 2)}
