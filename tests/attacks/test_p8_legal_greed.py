"""P8: a member claims 16 times its tokens and sends 8 times its norm, each within its own bound."""

from atoll.optim.log.entry import Entry
from atoll.optim.reduction.contribution import SHARE_CAP
from support.greedy import work_more
from support.swarm import SMALL, reached, run_swarm

ROUNDS = 4


def pulls(entry):
    """Return weight x clip factor x norm of each member, by PeerID: what moves the update."""
    return {m.peer_id: m.weight * m.clip * m.norm for m in entry.members}


def test_a_member_that_is_greedy_in_all_pulls_as_four_others_at_most(tmp_path, monkeypatch):
    async def scenario(swarm):
        peers = await swarm.start(4)
        await swarm.until(lambda: reached(peers, 2))
        *honest, liar = peers
        work_more(monkeypatch, liar)
        at = max(p.replica.position for p in peers) + 1
        await swarm.until(lambda: reached(peers, at + ROUNDS))
        for record in honest[0].replica.store.headers(at, ROUNDS):
            pull = pulls(Entry.decode(record.entry))
            greedy = pull.pop(liar.identity.peer_id)
            assert 2 * max(pull.values()) < greedy <= 1.01 * SHARE_CAP * max(pull.values())
        assert swarm.same_bits(peers)

    run_swarm(tmp_path, scenario, codec="int8", layout=SMALL)
