"""An owner names the right digest of its part, and another length than the bytes have."""

import pytest

from atoll.dht.transport import PeerUnreachable
from atoll.optim.log.entry import Entry, sha256
from support.attackers import report
from support.swarm import reached, run_swarm


@pytest.mark.parametrize("error", [1, pytest.param(-1, marks=pytest.mark.exhaustive)])
def test_no_leader_is_blamed_for_the_length_that_an_owner_named(tmp_path, monkeypatch, error):
    async def scenario(swarm):
        peers = await swarm.start(4)
        await swarm.until(lambda: reached(peers, 2))
        liar, honest = peers[3], peers[:3]

        def lie(done, state):
            return done.model_copy(update={"wire_bytes": done.wire_bytes + error})

        report(monkeypatch, liar.ctx.me, lie)
        names = {p.identity.peer_id for p in honest}
        at = max(p.replica.position for p in peers)
        await swarm.until(lambda: reached(honest, at + 6), timeout_s=300.0)
        assert not any(p.ctx.conduct.barred(n, swarm.now()) for p in honest for n in names)
        assert swarm.same_bits(honest)

    run_swarm(tmp_path, scenario, codec="int8")


def test_a_part_of_another_length_is_refused_and_no_fault_of_its_leader(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(4)
        await swarm.until(lambda: reached(peers, 2))
        voter, leader = peers[:2]
        entry = Entry.decode(voter.replica.store.get(1).entry)
        part, body = entry.parts[0], b"x" * 100
        voter.ctx.parts.put(entry.position, sha256(body), body)
        lie = part.model_copy(update={"digest": sha256(body), "wire_bytes": 101})
        assert not voter.ctx.parts.holds(lie.digest, lie.wire_bytes)
        with pytest.raises(PeerUnreachable):
            lying = entry.model_copy(update={"parts": (lie,)})
            await voter.rounds.voter.gather(lying, leader.identity.peer_id)

    run_swarm(tmp_path, scenario, codec="int8")
