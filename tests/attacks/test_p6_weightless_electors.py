"""P6: five keys report ready with a weight of 0, become electors so, and go away together."""

import asyncio
import hashlib

from atoll.dht.identity import Identity
from atoll.peer.rounds.consensus.ballots import leader_of
from support.greedy import report_and_live
from support.swarm import reached, ready_of, run_swarm


def incarnation_of(key):
    return hashlib.sha256(key.peer_id.encode()).hexdigest()[:32]


def test_keys_of_weight_0_gain_no_votes_and_may_go_away(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(4)
        await swarm.until(lambda: reached(peers, 2))
        await swarm.until(lambda: len({p.replica.position for p in peers}) == 1)
        keys = [Identity.ephemeral() for _ in range(5)]
        replica = peers[0].replica
        leader = leader_of(replica.electorate, replica.position, 0).peer_id
        held = []
        for key in keys:
            transport = swarm.network.transport(key.peer_id)
            stream = await transport.open(leader, "round", timeout_s=2.0)
            held.append(
                asyncio.create_task(
                    report_and_live(
                        stream, ready_of(key, peers[0], incarnation=incarnation_of(key))
                    )
                )
            )
        at = replica.position
        await swarm.until(lambda: reached(peers, at + 1))
        assert set(peers[0].replica.electorate) == {p.ctx.me for p in peers}
        for key in keys:
            swarm.network.kill(key.peer_id)
        at = max(p.replica.position for p in peers)
        await swarm.until(lambda: reached(peers, at + 5), timeout_s=60.0)
        assert swarm.same_bits(peers)

    run_swarm(tmp_path, scenario, codec="int8")
