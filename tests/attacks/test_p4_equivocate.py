"""P4: a leader proposes one entry to one half of the electors, and another to the other half."""

import asyncio

import pytest

from atoll.dht.transport import Refused
from atoll.optim.log.entry import Entry
from support.attackers import equivocate
from support.swarm import SwarmPeer, reached, run_swarm, signed_epoch


@pytest.mark.parametrize("count", [3, 5, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_a_leader_that_proposes_two_entries_is_out_for_good(tmp_path, monkeypatch, count):
    async def scenario(swarm):
        peers = await swarm.start(count)
        await swarm.until(lambda: reached(peers, 2))
        liar, honest = peers[-1], peers[:-1]
        handed = []
        for peer in honest:
            peer.ctx.on_evidence = handed.append
        told = equivocate(monkeypatch, liar.ctx.me)
        await swarm.until(lambda: bool(told), timeout_s=2000)
        name = liar.identity.peer_id
        await swarm.until(lambda: all(p.ctx.conduct.is_out(name) for p in honest))
        assert len(handed) == len(honest)
        assert all([e.peer_id for e in p.ctx.evidence] == [name] for p in honest)
        with pytest.raises(Refused):
            await liar.transport.call(honest[0].identity.peer_id, "head", b"", timeout_s=5)
        # One entry is decided at the position all the same, and the run goes on without the liar.
        await swarm.until(lambda: reached(honest, told[0] + 4))
        at = told[0]
        assert len({p.replica.store.get(at).entry for p in honest}) == 1
        await swarm.until(lambda: all(liar.ctx.me not in p.replica.electorate for p in honest))
        newest = honest[0].replica.store.get(honest[0].replica.position - 1)
        assert name not in {m.peer_id for m in Entry.decode(newest.entry).members}
        assert swarm.same_bits(honest)

    run_swarm(tmp_path, scenario, codec="int8")


def test_a_fork_convicts_the_liar_and_a_new_epoch_joins_the_branches(tmp_path, monkeypatch):
    """No vote reaches another elector, so both entries are certified before anybody knows."""

    async def scenario(swarm):
        peers = await swarm.start(3)
        await swarm.until(lambda: reached(peers, 2))
        liar, honest = peers[-1], peers[:-1]
        told = equivocate(monkeypatch, liar.ctx.me)
        swarm.network.on_message = lambda src, dst, method, n: method != "voted"
        await swarm.until(lambda: bool(told) and reached(honest, told[0] + 1), timeout_s=2000)
        assert len({p.replica.store.get(told[0]).entry for p in honest}) == 2
        swarm.network.on_message = None
        name = liar.identity.peer_id
        await swarm.until(lambda: all(p.ctx.conduct.is_out(name) for p in honest))
        assert any("two certified entries" in text for p in honest for text in p.events)
        await asyncio.sleep(30)
        stood = [p.replica.position for p in honest]
        await asyncio.sleep(120)
        assert [p.replica.position for p in honest] == stood  # neither has a quorum
        ahead = max(honest, key=lambda p: p.replica.position)
        at = ahead.replica.position
        record = signed_epoch(2, at, ahead.replica.chain, [p.ctx.me for p in honest])
        for peer in honest:
            await peer.replica.adopt(record)
            await peer.catch_up()
        await swarm.until(lambda: reached(honest, at + 3))
        assert swarm.same_bits(honest)

    run_swarm(tmp_path, scenario, codec="int8")


def test_evidence_survives_a_restart(tmp_path, monkeypatch):
    async def scenario(swarm):
        peers = await swarm.start(3)
        await swarm.until(lambda: reached(peers, 2))
        liar, honest = peers[-1], peers[:-1]
        told = equivocate(monkeypatch, liar.ctx.me)
        await swarm.until(lambda: bool(told), timeout_s=2000)
        name = liar.identity.peer_id
        await swarm.until(lambda: all(p.ctx.conduct.is_out(name) for p in honest))
        before = honest[0]
        before.kill()
        before.replica.store.close()
        again = SwarmPeer(  # in the same folder
            swarm=swarm, identity=before.identity, incarnation=before.incarnation
        )
        assert again.ctx.conduct.is_out(name)
        again.replica.store.close()

    run_swarm(tmp_path, scenario, codec="int8")
