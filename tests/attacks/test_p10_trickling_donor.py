"""P10: a donor claims to be far ahead, so is asked first, and sends an entry every five seconds."""

import pytest

from support.greedy import join_s, trickle
from support.swarm import claim, reached, run_swarm


@pytest.mark.parametrize(
    "what",
    [
        "headers",
        "body",
        pytest.param("digests", marks=pytest.mark.exhaustive),
        pytest.param("leaves", marks=pytest.mark.exhaustive),
    ],
)
def test_a_joiner_waits_for_no_trickling_donor(tmp_path, monkeypatch, what):
    async def scenario(swarm):
        peers = await swarm.start(4)
        await swarm.until(lambda: reached(peers, 4))
        without_s = (await join_s(swarm))[1]
        liar = peers[3]
        claim(monkeypatch, liar, position=1 << 60)
        trickle(monkeypatch, liar, what)
        assert (await join_s(swarm))[1] <= without_s + 10.0  # a page's patience, and a spare
        # It is left alone from then on.
        at = max(p.replica.position for p in peers)
        await swarm.until(lambda: reached(swarm.peers, at + 3))

    run_swarm(tmp_path, scenario, codec="int8")
