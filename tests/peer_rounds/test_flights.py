"""Several positions in flight: reductions overlap, decisions come in order."""

import sys
from pathlib import Path

import pytest

from atoll.dht.memory import run_virtual
from atoll.optim.layout import CELL, Layout
from atoll.optim.log import Entry
from atoll.peer.rounds import policies

sys.path.insert(0, str(Path(__file__).parent))
from strikes import expect_no_work_lost, expect_sums, passed
from swarm import Swarm

BLOCKS = Layout(names=tuple(f"blocks.{i}.w" for i in range(4)), shapes=((CELL + 1_000,),) * 4)
FAR_S = 0.2  # latency at which a reduction takes several steps of a second


def run(folder, scenario, *, fragments=4, **options):
    async def main():
        swarm = Swarm(
            folder, method=f"streaming(count={fragments})", codec="fp32", layout=BLOCKS, **options
        )
        try:
            await scenario(swarm)
            assert swarm.network.errors == []
        finally:
            await swarm.stop()

    run_virtual(main())


def entries(peer):
    return [Entry.decode(r.entry) for r in peer.replica.store.headers(0, peer.replica.position)]


async def end_equal(swarm, peers):
    """All come to the same place some time, with the same bits, nothing lost or counted twice."""
    await swarm.until(lambda: len({p.replica.position for p in peers}) == 1)
    assert swarm.same_bits(peers)
    for peer in peers:
        expect_no_work_lost(peer)
    expect_sums(swarm, peers[0])


@pytest.mark.parametrize("fragments", [2, 4])
def test_positions_in_flight_end_in_the_same_bits(tmp_path, fragments):
    async def scenario(swarm):
        swarm.network.default.latency_s = FAR_S
        peers = await swarm.start(3, window_s=1.2 / fragments, tau=fragments)
        in_flight = []

        def on_message(*_):
            in_flight.append(max(p.rounds.statistics().in_flight for p in peers))

        swarm.network.on_message = on_message
        await swarm.until(lambda: passed(peers, 12))
        assert max(in_flight) == fragments
        log = entries(peers[0])
        assert [e.fragment for e in log] == [swarm.replay.fragment_at(e.position) for e in log]
        assert all(len(e.complete_members()) == 3 for e in log)
        await end_equal(swarm, peers)

    run(tmp_path, scenario, fragments=fragments)


def rounds_in(folder, seconds, *, tau):
    """Positions that three far peers decide, a fragment handed in each second."""
    decided = []

    async def scenario(swarm):
        swarm.network.default.latency_s = FAR_S
        peers = await swarm.start(3, window_s=1.0, tau=tau)
        await swarm.until(lambda: swarm.now() > seconds, timeout_s=2 * seconds)
        decided.append(min(p.replica.position for p in peers))

    run(folder, scenario)
    return decided[0]


def test_a_reduction_that_takes_longer_than_a_step_holds_nobody_up(tmp_path, monkeypatch):
    many = rounds_in(tmp_path / "many", 30.0, tau=4)
    monkeypatch.setattr(policies, "MAX_AHEAD", 0)
    one = rounds_in(tmp_path / "one", 30.0, tau=4)
    assert many >= 27
    assert one <= 20
