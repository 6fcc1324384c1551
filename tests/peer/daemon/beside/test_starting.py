"""Network processes that are started before anybody needs them."""

import gc
import os

import pytest

from atoll.peer.daemon.beside import starting


class Process:
    """Notes how it is ended."""

    def __init__(self, connection):
        self.peer, self.ended = os.dup(connection.fileno()), []

    def kill(self):
        self.ended.append("killed")

    def wait(self):
        self.ended.append("waited for")


@pytest.fixture
def made(monkeypatch):
    """The processes that were started."""
    found = []

    def start(connection):
        found.append(Process(connection))
        return found[-1]

    monkeypatch.setattr(starting, "start_process", start)
    yield found
    for each in found:
        os.close(each.peer)


def test_the_first_to_ask_takes_it(made):
    with starting.started_ahead():
        connection, process = starting.take_ahead()
        assert process is made[0]
        assert starting.take_ahead() is None  # a second peer of this process starts its own
    assert process.ended == []
    connection.sendall(b"still open")
    assert os.read(process.peer, 10) == b"still open"
    connection.close()


def test_it_ends_if_nobody_took_it(made):
    with pytest.raises(ValueError, match="a wrong option"), starting.started_ahead():
        raise ValueError("a wrong option")
    assert made[0].ended == ["killed", "waited for"]
    assert os.read(made[0].peer, 1) == b""
    assert starting.take_ahead() is None


def test_no_garbage_is_looked_for_while_modules_load():
    with pytest.raises(ImportError), starting.loading():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
