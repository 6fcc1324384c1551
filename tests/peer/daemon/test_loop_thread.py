"""The thread of a peer's loop: entered or abandoned, asked, and left."""

import asyncio
import threading
from contextlib import asynccontextmanager

import pytest

from atoll.peer.daemon.loop_thread import LoopThread


class Room:
    """A context that notes what happens to it."""

    def __init__(self, *, opens=True, failure=None, parting=None):
        self.opens, self.failure, self.parting = opens, failure, parting
        self.happened = []

    @asynccontextmanager
    async def open(self):
        try:
            if self.failure is not None:
                raise self.failure
            if not self.opens:
                await asyncio.sleep(1000.0)
            yield self
            self.happened.append("left")
            if self.parting is not None:
                raise self.parting
        finally:
            await asyncio.sleep(0.01)  # as closing a node does
            self.happened.append("closed")


def test_a_context_stays_open_until_close():
    room = Room()
    thread = LoopThread(room.open())
    assert thread.value is room
    assert room.happened == []
    inside = thread.ask(threading.get_ident)
    assert inside != threading.get_ident()
    done = threading.Event()
    thread.post(done.set)
    assert done.wait(10)
    thread.close()
    thread.close()
    assert room.happened == ["left", "closed"]
    with pytest.raises(RuntimeError):
        thread.post(done.set)


def test_what_entering_raises_reaches_the_caller():
    """Also when the loop has ended before the caller looks."""
    for _ in range(50):
        room = Room(failure=ValueError("refused"))
        with pytest.raises(ValueError, match="refused"):
            LoopThread(room.open())
        assert room.happened == ["closed"]


def test_a_stop_abandons_the_entering_and_still_closes():
    room, stopping = Room(opens=False), threading.Event()
    threading.Timer(0.1, stopping.set).start()
    with pytest.raises(KeyboardInterrupt):
        LoopThread(room.open(), stopping)
    assert room.happened == ["closed"]


def test_what_leaving_raises_is_raised_by_close_once():
    thread = LoopThread(Room(parting=OSError("no goodbye")).open())
    with pytest.raises(OSError, match="no goodbye"):
        thread.close()
    thread.close()


def test_a_context_that_does_not_open_in_time_is_abandoned():
    room = Room(opens=False)
    with pytest.raises(TimeoutError, match=r"not ready after 0\.05 s"):
        LoopThread(room.open(), timeout_s=0.05)
    assert room.happened == ["closed"]
