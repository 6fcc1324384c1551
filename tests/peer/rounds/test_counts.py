"""What a round of many peers costs in messages: counted, not timed."""

import asyncio
import statistics
from collections import Counter

import pytest

from atoll.optim.state.layout import Layout
from atoll.peer.rounds.consensus.dissemination import FAN_OUT
from support.cells import use_cells
from support.swarm import reached, run_swarm

CELL_VALUES = 64
FEW_AND_MANY = (12, 36)  # peers
OWNERS = 4
SPREAD_S = 0.4  # windows end within it, so that nobody is waited for


def count_a_round(folder, num_peers):
    """Messages of the second round by (sender, method), and who took part and led."""
    layout = Layout(names=("w",), shapes=((OWNERS * CELL_VALUES,),))

    async def scenario(swarm):
        sent = Counter()

        def count(src, dst, method, number):
            sent[src, method] += 1

        peers = [swarm.add(window_s=20.0 - SPREAD_S * i / num_peers) for i in range(num_peers)]
        await swarm.begin(peers)
        await swarm.until(lambda: reached(peers, 1))
        await asyncio.sleep(10.0)
        swarm.network.on_message = count
        await swarm.until(lambda: reached(peers, 2))
        await asyncio.sleep(5.0)
        swarm.network.on_message = None
        assert swarm.same_bits(peers)
        assert all(len(p.settled[-1].applied.entry.members) == num_peers for p in peers)
        return sent, [p.identity.peer_id for p in peers]

    return run_swarm(folder, scenario, layout=layout)


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    use_cells(patch, CELL_VALUES)
    try:
        return {n: count_a_round(tmp_path_factory.mktemp(f"swarm-{n}"), n) for n in FEW_AND_MANY}
    finally:
        patch.undo()


def of_peers(counted, num_peers):
    sent, names = counted[num_peers]
    return {name: sum(n for (src, _), n in sent.items() if src == name) for name in names}


def of_method(counted, num_peers, method):
    sent, _ = counted[num_peers]
    return Counter({src: n for (src, what), n in sent.items() if what == method})


def test_a_member_without_parts_sends_as_little_among_many_as_among_few(counted):
    few, many = (statistics.median(of_peers(counted, n).values()) for n in FEW_AND_MANY)
    assert many <= 1.25 * few


def test_nobody_tells_more_than_eight_of_the_decision(counted):
    for num_peers in counted:
        told = of_method(counted, num_peers, "commit")
        assert max(told.values()) <= FAN_OUT + 1  # calls, and the answer to one's own
        assert sum(told.values()) == 2 * (num_peers - 1)


def test_a_leader_s_messages_grow_as_its_members_do_and_not_faster(counted):
    few, many = (max(of_peers(counted, n).values()) for n in FEW_AND_MANY)
    assert many <= FEW_AND_MANY[1] / FEW_AND_MANY[0] * few


def test_whoever_is_missing_is_asked_once_or_twice_where_they_are(counted):
    for num_peers in counted:
        asked = of_method(counted, num_peers, "head")
        assert sum(asked.values()) <= 4 * num_peers


def test_a_dense_round_costs_what_it_did_before_modules(tmp_path, monkeypatch):
    """The numbers are those of commit e6d4b98; bytes may vary a little with zlib."""
    use_cells(monkeypatch, CELL_VALUES)

    async def scenario(swarm):
        sent = Counter()

        def count(src, dst, method, number):
            sent[method] += 1

        peers = await swarm.begin([swarm.add(window_s=20.0) for _ in range(4)])
        await swarm.until(lambda: reached(peers, 2))
        await asyncio.sleep(10.0)
        swarm.network.on_message = count
        before_bytes = sum(p.transport.statistics().wire_bytes_sent for p in peers)
        await swarm.until(lambda: reached(peers, 6))
        await asyncio.sleep(10.0)
        after_bytes = sum(p.transport.statistics().wire_bytes_sent for p in peers)
        return sent, after_bytes - before_bytes

    layout = Layout(names=("w",), shapes=((64 * CELL_VALUES,),))
    sent, wire_bytes = run_swarm(tmp_path, scenario, layout=layout)
    messages = {"round": 80, "reduce": 336, "head": 16, "propose": 24, "voted": 72, "commit": 24}
    assert sent == messages
    assert wire_bytes == pytest.approx(477_676, rel=0.01)
