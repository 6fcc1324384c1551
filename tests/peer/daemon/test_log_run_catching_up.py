"""What a peer that cannot catch up tells people, and what it tells its trainer."""

import asyncio
import types

import pytest

from atoll.coordinator.rpc.client_errors import CoordinatorUnreachable
from atoll.dht.testing import MemoryBoard
from atoll.dht.testing.memory import MemoryNetwork
from atoll.optim.log.entry import Elector
from atoll.peer.daemon.log_run import AGAIN_S, LASTS_S, CatchingUp, LogRun
from atoll.peer.paths import PeerPaths
from atoll.peer.recovery.errors import NoDonor
from atoll.peer.recovery.recovery import KEEP_WORK, Recovery
from atoll.peer.rounds.engine import Rounds
from support.environment import GENESIS, environment


class Peer:
    """The parts of a peer that catching up touches."""

    def __init__(self, recover):
        self.now_s, self.said, self.leaps = 0.0, [], []
        self.replica = types.SimpleNamespace(leaps=0, position=9)
        self.recovery = types.SimpleNamespace(run=lambda: recover(self.replica))
        self.catching_up = CatchingUp(
            types.SimpleNamespace(
                replica=self.replica,
                now=lambda: self.now_s,
                on_event=lambda level, text: self.said.append((level, text)),
            ),
            self.recovery,
            on_recovered=lambda: None,
            on_leap=lambda: self.leaps.append(self.replica.position),
        )

    def catch_up(self):
        asyncio.run(self.catching_up.run())


async def fails(replica):
    raise NoDonor("no peer has a snapshot")


async def leaps_and_fails(replica):
    replica.leaps += 1
    replica.position = 4
    raise NoDonor("no peer has the body of entry 4")


async def finds_nothing(replica):
    return None


def test_a_wait_is_a_fact_first_and_a_warning_once_it_lasts():
    peer = Peer(fails)
    for peer.now_s in range(int(LASTS_S) + 2):
        peer.catch_up()
    assert [level for level, _ in peer.said] == ["info", "warning"]
    assert "no peer has a snapshot" in peer.said[0][1]
    peer.now_s += AGAIN_S
    peer.catch_up()
    assert [level for level, _ in peer.said] == ["info", "warning", "warning"]


def test_the_next_wait_begins_anew():
    peer = Peer(fails)
    peer.catch_up()
    peer.recovery.run = lambda: finds_nothing(peer.replica)
    peer.now_s = 2 * LASTS_S
    peer.catch_up()
    peer.recovery.run = lambda: fails(peer.replica)
    peer.catch_up()
    assert [level for level, _ in peer.said] == ["info", "info"]


@pytest.mark.parametrize(("recover", "leaps"), [(leaps_and_fails, [4]), (fails, [])])
def test_who_leapt_and_then_failed_drops_its_open_work(recover, leaps):
    """Its trainer would continue from parameters that the log has left."""
    peer = Peer(recover)
    peer.catch_up()
    assert peer.leaps == leaps


async def nobody(*_):
    raise CoordinatorUnreachable("away")


async def nothing(*_):
    pass


def peer_of_a_log(folder):
    """The environment of a peer that is alone, without a coordinator."""
    return environment(
        Elector(peer_id="ann", incarnation="1"),
        paths=PeerPaths(root=folder),
        identity=types.SimpleNamespace(sign=lambda data: data),
        client=types.SimpleNamespace(
            fetch_snapshot=nobody,
            join=nobody,
            admissions=types.SimpleNamespace(is_out=lambda peer_id: False),
        ),
        node=types.SimpleNamespace(transport=MemoryNetwork().transport("ann")),
        neighbours=types.SimpleNamespace(
            roster=MemoryBoard().roster("ann"), publish=nothing, connect=nothing
        ),
    )


def test_a_leap_drops_the_open_work_of_a_peer_that_has_some(tmp_path, monkeypatch):
    """At its start a peer has none: its first leap is to the state with which it begins."""

    async def leap(recovery):
        await recovery._replica.install(GENESIS)

    async def main(env):
        run = await LogRun.start(env, None)
        at_start = len(withdrawn)
        run._decisions.subscribe()
        await run._catching_up.run()
        return at_start, run._decisions.take_all()

    withdrawn = []
    monkeypatch.setattr(Rounds, "withdraw", lambda rounds: withdrawn.append(rounds))
    monkeypatch.setattr(Recovery, "run", leap)
    env = peer_of_a_log(tmp_path)
    with env.files:
        at_start, resets = asyncio.run(main(env))
    assert (at_start, len(withdrawn)) == (0, 1)
    (reset,) = resets
    assert reset.state.params_N.equal(GENESIS.params_N)
    assert "position 0" in reset.why


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
        replica,
        sources=None,
        genesis=asyncio.sleep,
        stall_s=1.0,
        on_event=print,
        on_progress=print,
    )

    def replays(missing):
        position = 100 + missing
        head = types.SimpleNamespace(position=position, snapshots=(position,))
        return recovery._replay_is_cheaper(head)

    assert replays(KEEP_WORK * fragments)
    assert not replays(KEEP_WORK * fragments + 1)
