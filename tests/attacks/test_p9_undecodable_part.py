"""P9 by an owner: its part decodes to nothing, and others blame the leader that proposes it."""

import asyncio

from atoll.optim.log.entry import sha256
from atoll.peer.rounds.allreduce.reduction import PartReducer
from atoll.peer.rounds.allreduce.sides import Owner
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


def name_bytes_of_another(monkeypatch, liar):
    """As an owner it names the bytes of another part, which everybody holds; return its lies."""
    init, lies = Owner.__init__, []

    class Later(asyncio.Queue):
        def put_nowait(self, done):
            asyncio.get_running_loop().call_later(1.0, self.lie, done)

        def lie(self, done):
            state = self.state
            size = state.range_of(done.part).values
            for part, other in state.parts.items():
                values = state.range_of(part).values
                if values.stop - values.start != size.stop - size.start:
                    lies.append(done)
                    changes = {"digest": other.digest, "wire_bytes": other.wire_bytes}
                    return super().put_nowait(done.model_copy(update=changes))
            super().put_nowait(done)

    def lying(owner, state, *args, **options):
        init(owner, state, *args, **options)
        if state.ctx.me == liar:
            owner.reports = Later()
            owner.reports.state = state

    monkeypatch.setattr(Owner, "__init__", lying)
    return lies


def test_an_owner_that_names_the_bytes_of_another_part_stops_nobody(tmp_path, monkeypatch):
    """Voters hold these bytes, and could blame the leader for what they decode to."""
    blamed = []

    async def scenario(swarm):
        *honest, liar = await swarm.start(4)
        await swarm.until(lambda: reached([*honest, liar], 2))
        lies = name_bytes_of_another(monkeypatch, liar.ctx.me)
        names = {peer.identity.peer_id for peer in honest}
        for peer in honest:
            monkeypatch.setattr(peer.ctx, "fault", lambda who, why: blamed.append(who))
        at = max(p.replica.position for p in honest)
        await swarm.until(lambda: reached(honest, at + 3), timeout_s=60.0)
        assert lies
        assert not set(blamed) & names
        assert swarm.same_bits(honest)

    run_swarm(tmp_path, scenario, codec="int8")
