"""P9 by an owner: its part decodes to nothing, and keepers blame the leader that proposes it."""

from atoll.optim.log.entry import sha256
from atoll.peer.rounds.allreduce.reduction import PartReducer
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
