"""P1: the owner of a part reports that nobody else sent it anything, to vote alone from then on."""

import asyncio

from atoll.peer.rounds.allreduce.sides import Owner
from atoll.peer.rounds.messages import Prefix
from support.swarm import reached, run_swarm


def lie(monkeypatch, liar):
    """Its reports name all other members of the group with 0 cells."""
    init = Owner.__init__

    class Lies(asyncio.Queue):
        def __init__(self, state):
            super().__init__()
            self.state = state

        def put_nowait(self, done):
            others = [i for i in range(len(self.state.group.members)) if i != self.state.me]
            partial = tuple(Prefix(member=i, cells=0) for i in others)
            super().put_nowait(done.model_copy(update={"partial": partial}))

    def lying(owner, state, *args, **options):
        init(owner, state, *args, **options)
        if state.ctx.me == liar:
            owner.reports = Lies(state)

    monkeypatch.setattr(Owner, "__init__", lying)


def test_an_owner_that_names_all_others_as_missing_votes_alone_no_sooner(tmp_path, monkeypatch):
    async def scenario(swarm):
        peers = await swarm.start(4)
        await swarm.until(lambda: reached(peers, 2))
        liar, honest = peers[3], peers[:3]
        before = set(peers[0].replica.electorate)
        lie(monkeypatch, liar.ctx.me)
        at = max(p.replica.position for p in peers)
        await swarm.until(lambda: reached(peers, at + 4))
        assert set(peers[0].replica.electorate) == before
        liar.kill()
        at = max(p.replica.position for p in honest)
        await swarm.until(lambda: reached(honest, at + 3), timeout_s=30.0)
        assert liar.ctx.me not in peers[0].replica.electorate
        assert swarm.same_bits(honest)

    run_swarm(tmp_path, scenario, codec="int8")
