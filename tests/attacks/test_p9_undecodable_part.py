"""P9 by an owner: its part decodes to nothing, and others blame the leader that proposes it."""

from atoll.optim.log.entry import sha256
from atoll.peer.rounds.allreduce.reduction import PartReducer
from atoll.peer.rounds.consensus.voter import Voter
from atoll.peer.rounds.context import Holdings
from support.attackers import spoil_parts
from support.liar_runs import WINDOW_S
from support.swarm import reached, run_swarm


def test_an_owner_of_bytes_that_do_not_decode_bars_no_leader(tmp_path, monkeypatch):
    async def scenario(swarm):
        keepers = [swarm.add(role="keeper") for _ in range(4)]
        trainers = [swarm.add() for _ in range(3)]
        await swarm.begin([*keepers, *trainers])
        await swarm.until(lambda: reached(keepers, 2))
        put_together = PartReducer._put_together

        def lying(reduction, part, generation):
            body, done = put_together(reduction, part, generation)
            if part == 0 and generation == 0:
                body = bytes(255 for _ in body)
                done = done.model_copy(update={"digest": sha256(body)})
            return body, done

        monkeypatch.setattr(PartReducer, "_put_together", lying)
        at = keepers[0].replica.position
        await swarm.until(lambda: reached([*keepers, *trainers], at + 4), timeout_s=400)
        names = [keeper.identity.peer_id for keeper in keepers]
        assert not any(k.ctx.conduct.barred(n, swarm.now()) for k in keepers for n in names)

    run_swarm(tmp_path, scenario, electors="keepers", trust="byzantine")


def test_nobody_holds_a_fetched_part_that_does_not_decode(tmp_path, monkeypatch):
    """A voter that held one would propose it when it leads, and be barred by the others."""
    put, spoilt = Holdings.put, []

    def noted(holdings, position, digest, body, decoded=None):
        if body == bytes([255]) * len(body):
            spoilt.append(holdings)
        put(holdings, position, digest, body, decoded)

    monkeypatch.setattr(Holdings, "put", noted)
    fetched = []
    fetch = Voter._fetch

    async def fetching(voter, entry, part, source):
        fetched.append(await fetch(voter, entry, part, source))
        return fetched[-1]

    monkeypatch.setattr(Voter, "_fetch", fetching)

    async def scenario(swarm):
        peers = await swarm.start(4, window_s=WINDOW_S)
        honest, liar = peers[:-1], peers[-1]
        await swarm.until(lambda: reached(honest, 2))
        spoil_parts(monkeypatch, liar.ctx.me)
        at = max(p.replica.position for p in peers)
        await swarm.until(lambda: reached(honest, at + 8), timeout_s=900)
        assert any(body == bytes([255]) * len(body) for body in fetched)
        assert not any(peer.ctx.parts in spoilt for peer in honest)
        names = [peer.identity.peer_id for peer in honest]
        assert not any(p.ctx.conduct.barred(n, swarm.now()) for p in honest for n in names)

    run_swarm(tmp_path, scenario, codec="int8")
