"""A peer that reported ready and went before the group closed is not waited for."""

import sys
from pathlib import Path

from atoll.dht.memory import run_virtual
from atoll.peer.rounds.ballot import leader_of

sys.path.insert(0, str(Path(__file__).parent))
from swarm import SETTINGS, Swarm


def test_a_peer_that_dies_while_the_group_forms_costs_no_grace(tmp_path):
    async def main():
        swarm = Swarm(tmp_path)
        try:
            slow, *others = await swarm.start(4)
            await swarm.until(lambda: all(p.replica.position == 1 for p in swarm.peers))
            slow.window_s = 7.0  # the others wait for it, within their grace
            await swarm.until(lambda: all(p.replica.position == 2 for p in swarm.peers))
            began_s = swarm.now()
            leaving = next(p for p in others if p is not leader(swarm))
            await swarm.until(lambda: leaving.rounds.statistics().phase == "wait")
            leaving.kill()
            alive = [p for p in swarm.peers if p is not leaving]
            await swarm.until(lambda: all(p.replica.position == 3 for p in alive))
            assert swarm.now() - began_s < slow.window_s + SETTINGS.grace_s / 2
        finally:
            await swarm.stop()

    run_virtual(main())


def leader(swarm):
    at = swarm.peers[0].replica
    elector = leader_of(at.electorate, at.position, 0)
    return next(p for p in swarm.peers if p.ctx.me == elector)
