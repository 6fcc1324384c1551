"""A decided entry reaches everyone, and nobody sends it to more than a few."""

import asyncio
from collections import Counter

import pytest

from atoll.optim.state.layout import Layout
from atoll.peer.rounds.consensus.dissemination import FAN_OUT, branches
from support.cells import use_cells
from support.swarm import reached, run_swarm

CELL_VALUES = 64
PEERS = 24
LAYOUT = Layout(names=("w",), shapes=((4 * CELL_VALUES,),))


def test_at_most_eight_branches_of_nearly_equal_size():
    peers = [f"p{i}" for i in range(1000)]
    found = branches(peers)
    assert len(found) == FAN_OUT
    assert [branch[0] for branch in found] == peers[:FAN_OUT]
    assert {len(branch) for branch in found} == {125}
    assert sorted(p for branch in found for p in branch) == sorted(peers)
    assert branches(peers[:3]) == [("p0",), ("p1",), ("p2",)]
    assert branches([]) == []


def run(tmp_path, monkeypatch, scenario):
    use_cells(monkeypatch, CELL_VALUES)
    run_swarm(tmp_path, scenario, layout=LAYOUT)


def warnings(peers):
    return [event for peer in peers for event in peer.events if not event.startswith("info")]


def test_everyone_is_told_and_nobody_tells_more_than_eight(tmp_path, monkeypatch):
    async def scenario(swarm):
        sent = Counter()

        def count(src, dst, method, number):
            if method == "commit" and src in names:
                sent[src] += 1

        peers = [swarm.add() for _ in range(PEERS)]
        names = {peer.identity.peer_id for peer in peers}
        swarm.network.on_message = count
        await swarm.begin(peers)
        await swarm.until(lambda: reached(peers, 1))
        await asyncio.sleep(1.0)
        assert warnings(peers) == []
        answers = PEERS - 1  # each that is told answers
        assert sum(sent.values()) == 2 * answers
        assert max(sent.values()) <= FAN_OUT + 1
        assert {p.replica.position for p in peers} == {1}
        assert swarm.same_bits(peers)

    run(tmp_path, monkeypatch, scenario)


@pytest.mark.parametrize("blow", ["kill", pytest.param("freeze", marks=pytest.mark.exhaustive)])
def test_who_is_to_pass_it_on_and_cannot_is_passed_over(tmp_path, monkeypatch, blow):
    async def scenario(swarm):
        struck = []

        def strike(src, dst, method, number):
            if method == "commit" and not struck:
                struck.append(dst)
                getattr(swarm.network, blow)(dst)

        peers = await swarm.start(PEERS)
        await swarm.until(lambda: reached(peers, 1))
        swarm.network.on_message = strike
        await swarm.until(lambda: bool(struck))
        began_s = swarm.now()
        others = [peer for peer in peers if peer.identity.peer_id not in struck]
        position = max(peer.replica.position for peer in peers)
        await swarm.until(lambda: reached(others, max(position, 2)))
        assert swarm.now() - began_s < 3.0  # a stall of 1.5 s, and the way down
        await swarm.until(lambda: reached(others, position + 3))
        assert len({p.replica.chain for p in others if p.replica.position == position + 3}) == 1

    run(tmp_path, monkeypatch, scenario)
