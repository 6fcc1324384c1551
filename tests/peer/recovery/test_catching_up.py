"""What a peer that cannot catch up tells people, and what it tells its trainer."""

import asyncio
import types

import pytest

from atoll.peer.daemon.logged import LogParticipation
from atoll.peer.daemon.patience import AGAIN_S, LASTS_S, Patience
from atoll.peer.recovery.recovery import KEEP_WORK, NoDonor, Recovery


class Peer:
    """The parts of a participation that catching up touches."""

    def __init__(self, recover):
        self.now_s, self.said, self.withdrawn, self.resets = 0.0, [], 0, []
        self.replica = types.SimpleNamespace(leaps=0, position=9, state="the state")
        peer = self.participation = object.__new__(LogParticipation)
        peer.replica, peer._patience, peer._started = self.replica, Patience(), True
        peer._recovery = types.SimpleNamespace(run=lambda: recover(self.replica))
        peer._session = types.SimpleNamespace(
            say=lambda level, text: self.said.append((level, text))
        )
        peer.ctx = types.SimpleNamespace(now=lambda: self.now_s)
        peer.rounds = types.SimpleNamespace(withdraw=self._withdraw)
        peer.reducer = types.SimpleNamespace(deliver=self.resets.append)

    def _withdraw(self):
        self.withdrawn += 1

    def catch_up(self):
        asyncio.run(self.participation._catch_up())


async def fails(replica):
    raise NoDonor("nobody has a snapshot")


async def leaps_and_fails(replica):
    replica.leaps += 1
    replica.position = 4
    raise NoDonor("nobody gave the body of entry 4")


async def finds_nothing(replica):
    return None


def test_a_wait_is_a_fact_first_and_a_warning_once_it_lasts():
    peer = Peer(fails)
    for peer.now_s in range(int(LASTS_S) + 2):
        peer.catch_up()
    assert [level for level, _ in peer.said] == ["info", "warning"]
    assert "nobody has a snapshot" in peer.said[0][1]
    peer.now_s += AGAIN_S
    peer.catch_up()
    assert [level for level, _ in peer.said] == ["info", "warning", "warning"]


def test_the_next_wait_begins_anew():
    peer = Peer(fails)
    peer.catch_up()
    peer.participation._recovery.run = lambda: finds_nothing(peer.replica)
    peer.now_s = 2 * LASTS_S
    peer.catch_up()
    peer.participation._recovery.run = lambda: fails(peer.replica)
    peer.catch_up()
    assert [level for level, _ in peer.said] == ["info", "info"]


@pytest.mark.parametrize(("recover", "resets"), [(leaps_and_fails, 1), (fails, 0)])
def test_who_leapt_and_then_failed_drops_its_open_work(recover, resets):
    """Its trainer would go on from parameters that the log has left."""
    peer = Peer(recover)
    peer.catch_up()
    assert (peer.withdrawn, len(peer.resets)) == (resets, resets)
    assert all(r.state == "the state" and "position 4" in r.why for r in peer.resets)


@pytest.mark.parametrize("fragments", [1, 4])
def test_as_many_entries_are_replayed_as_keep_open_work(fragments):
    """A window of each fragment passes in as many positions as there are fragments."""
    replica = types.SimpleNamespace(
        position=100,
        state=types.SimpleNamespace(snapshot_bytes=1),
        replay=types.SimpleNamespace(fragments=[None] * fragments),
        store=types.SimpleNamespace(get=lambda position: types.SimpleNamespace(body_bytes=1000)),
    )
    recovery = Recovery(
        types.SimpleNamespace(replica=replica),
        run_id=bytes(32),
        genesis=asyncio.sleep,
        on_progress=print,
    )

    def replays(missing):
        position = 100 + missing
        head = types.SimpleNamespace(position=position, snapshots=(position,))
        return recovery._replay_is_cheaper(head)

    assert replays(KEEP_WORK * fragments)
    assert not replays(KEEP_WORK * fragments + 1)
