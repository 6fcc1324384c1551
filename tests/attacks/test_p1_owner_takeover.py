"""P1: the owner of a part reports that nobody else sent it anything, to vote alone from then on."""

from support.attackers import deny_others
from support.swarm import reached, run_swarm


def test_an_owner_that_names_all_others_as_missing_votes_alone_no_sooner(tmp_path, monkeypatch):
    async def scenario(swarm):
        peers = await swarm.start(4)
        await swarm.until(lambda: reached(peers, 2))
        liar, honest = peers[3], peers[:3]
        before = set(peers[0].replica.electorate)
        deny_others(monkeypatch, liar.ctx.me)
        at = max(p.replica.position for p in peers)
        await swarm.until(lambda: reached(peers, at + 4))
        assert set(peers[0].replica.electorate) == before
        liar.kill()
        at = max(p.replica.position for p in honest)
        await swarm.until(lambda: reached(honest, at + 3), timeout_s=30.0)
        assert liar.ctx.me not in peers[0].replica.electorate
        assert swarm.same_bits(honest)

    run_swarm(tmp_path, scenario, codec="int8")
