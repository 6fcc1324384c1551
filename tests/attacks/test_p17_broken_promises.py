"""P17: an admitted key says that it is ready now, and never reports: each group waits its grace."""

from support.attackers import tease
from support.swarm import SETTINGS, reached, run_swarm


async def round_s(swarm, peers, count=5):
    """Seconds a round."""
    began_s, at = swarm.now(), min(peer.replica.position for peer in peers)
    await swarm.until(lambda: reached(peers, at + count), timeout_s=600.0)
    return (swarm.now() - began_s) / count


def test_groups_do_not_wait_for_a_peer_that_breaks_its_promises(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(4)
        await swarm.until(lambda: reached(peers, 3))
        before_s = await round_s(swarm, peers)
        key = await tease(swarm)
        name = key.identity.peer_id
        await swarm.until(lambda: key.replica.position >= peers[0].replica.position)
        assert await round_s(swarm, peers) > before_s + SETTINGS.grace_s / 2, "nobody waited"
        await swarm.until(
            lambda: not any(peer.ctx.promises.believes(name) for peer in peers), timeout_s=600.0
        )
        assert await round_s(swarm, peers) < before_s + 0.1
        warned = [e for e in peers[0].events if "no longer: it said that it was ready" in e]
        assert len(warned) == 1
        for peer in peers:
            for other in peers:
                assert peer.ctx.promises.believes(other.identity.peer_id)
        assert swarm.same_bits(peers)

    run_swarm(tmp_path, scenario, codec="int8")


def test_a_peer_that_reports_again_is_waited_for_again(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(4)
        await swarm.until(lambda: reached(peers, 3))
        slow = peers[3].identity.peer_id
        for _ in range(3):
            peers[0].ctx.promises.broke(slow)
        assert not peers[0].ctx.promises.believes(slow)
        at = peers[0].replica.position
        await swarm.until(lambda: reached(peers, at + 2))
        assert peers[0].ctx.promises.believes(slow)

    run_swarm(tmp_path, scenario, codec="int8")
