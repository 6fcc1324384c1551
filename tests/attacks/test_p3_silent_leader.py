"""P3: a leader sends signs of life and never closes the group, or never proposes."""

import pytest

from atoll.peer.rounds.consensus import leader as leaders
from support.attackers import stop_at
from support.swarm import SETTINGS, reached, run_swarm

PATIENCE_S = 4 * SETTINGS.grace_s + 14 * SETTINGS.stall_s


@pytest.mark.parametrize("step", ["_form", "_reduce", "_count_votes"])
def test_a_run_goes_on_under_the_next_leader(tmp_path, monkeypatch, step):
    async def scenario(swarm):
        peers = await swarm.start(4)
        await swarm.until(lambda: reached(peers, 2))
        liar, honest = peers[3], peers[:3]
        stop_at(monkeypatch, liar.ctx.me, step)
        longest_s, led = 0.0, 0
        for _ in range(12):
            at, began_s = min(p.replica.position for p in honest), swarm.now()
            order = honest[0].replica.electorate
            led += leaders.leader_of(order, at, 0) == liar.ctx.me
            await swarm.until(lambda at=at: reached(honest, at + 1), timeout_s=300.0)
            longest_s = max(longest_s, swarm.now() - began_s)
        assert led > 0, "the liar led no position"
        assert longest_s < 2 * PATIENCE_S
        assert swarm.same_bits(honest)

    run_swarm(tmp_path, scenario, codec="int8")
