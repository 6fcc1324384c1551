"""Bounds on the memory of arrivals, by peer and for all."""

import pytest

from atoll.dht.arrivals import ArrivalMemory
from atoll.dht.transport import FrameError


def test_one_peer_holds_no_more_than_its_bound():
    memory = ArrivalMemory(peer_bytes=100, all_bytes=1000)
    memory.claim("a", 60)
    with pytest.raises(FrameError, match="101 bytes of a"):
        memory.claim("a", 41)
    memory.claim("a", 40)
    memory.claim("b", 100)
    assert memory.total_bytes == 200
    memory.release("a", 100)
    memory.claim("a", 100)


def test_many_keys_together_hold_no_more_than_the_bound_for_all():
    memory = ArrivalMemory(peer_bytes=100, all_bytes=300)
    for key in "wxyz":  # the fourth one passes the bound
        memory.claim(key, 70)
    with pytest.raises(FrameError, match="more than its share"):
        memory.claim("w", 30)
    memory.claim("honest", 25)  # holds less than a fifth of the bound
    assert memory.total_bytes == 305


def test_streams_stop_reading_ahead_at_half_of_a_bound():
    memory = ArrivalMemory(peer_bytes=100, all_bytes=300)
    memory.claim("a", 50)
    assert not memory.is_tight("a")
    memory.claim("a", 1)
    assert memory.is_tight("a") and not memory.is_tight("b")
    memory.claim("c", 100)
    assert memory.is_tight("b")
    memory.release("c", 100)
    assert not memory.is_tight("b")
