"""A peer of a run with a log compares its head with the one that a heartbeat brings."""

import asyncio
import types

import pytest

from atoll.coordinator.rpc.client import Beat
from atoll.optim.log.orders import RunSettings
from atoll.optim.log.store import StoreHead
from atoll.peer.daemon.log_run import Publisher


class Peer:
    """A peer at position 7, and how often it looked for entries."""

    def __init__(self, *, waits_for_group, is_paused=False):
        self.looks = 0
        self.rounds = types.SimpleNamespace(
            waits_for_group=waits_for_group, kick_catch_up=self._look
        )
        settings = RunSettings(number=1, is_paused=is_paused)
        self.replica = types.SimpleNamespace(position=7, settings=settings)
        self.publisher = Publisher(None, None, self.replica, self.rounds)

    def _look(self):
        self.looks += 1

    def hears(self, position):
        beat = Beat(
            epoch=b"",
            head=StoreHead(epoch=0, position=position, chain=bytes(32)),
            bootstrap=(),
            publish_from=None,
            admission=b"",
            finished=False,
            heartbeat_s=1.0,
        )
        asyncio.run(self.publisher.heed(beat))
        return self.looks


@pytest.mark.parametrize("waits_for_group", [True, False])
def test_a_coordinator_two_entries_ahead_is_caught_up_with_at_once(waits_for_group):
    assert Peer(waits_for_group=waits_for_group).hears(9) == 1


def test_one_entry_ahead_is_a_commit_on_its_way():
    peer = Peer(waits_for_group=True)
    assert peer.hears(8) == 0
    peer.replica.position = 8
    assert [peer.hears(8), peer.hears(9)] == [0, 0]
    peer.replica.position = 9
    assert [peer.hears(9), peer.hears(9), peer.hears(10)] == [0, 0, 0]


def test_one_entry_ahead_for_two_heartbeats_was_missed():
    peer = Peer(waits_for_group=True)
    assert [peer.hears(8), peer.hears(8), peer.hears(8)] == [0, 1, 2]


def test_a_peer_in_a_group_may_take_long_to_get_its_commit():
    peer = Peer(waits_for_group=False)
    assert [peer.hears(8) for _ in range(5)] == [0] * 5


def test_a_peer_that_missed_an_entry_in_a_pause_looks_for_it():
    """Nobody is in a group then, and those that decided a stop may have ended."""
    peer = Peer(waits_for_group=False, is_paused=True)
    assert [peer.hears(8), peer.hears(8)] == [0, 1]
