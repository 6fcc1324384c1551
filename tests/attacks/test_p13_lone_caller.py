"""P13 by one that neither leads nor votes: it calls the leaders of later terms again and again."""

import asyncio
from contextlib import suppress

import pytest

from atoll.dht.transport import Refused, TransportError
from atoll.peer.rounds.consensus.round import leader_of
from support.swarm import identity_of, reached, ready_of, run_swarm

WINDOW_S = 30.0  # far longer than a leader waits for others once somebody has called it


@pytest.mark.parametrize("electors", ["members", "keepers"])
def test_a_lone_caller_ends_no_round_that_others_wait_for(tmp_path, electors):
    """Else each leader that it calls prepares a term, far beyond those that others come to."""

    async def scenario(swarm):
        keepers = [swarm.add(role="keeper") for _ in range(4 if electors == "keepers" else 0)]
        trainers = [swarm.add(window_s=WINDOW_S) for _ in range(3)]
        voters = keepers or trainers
        await swarm.begin([*keepers, *trainers])
        await swarm.until(lambda: reached(voters, 2))
        liar = identity_of(99)
        stranger = swarm.network.transport(liar.peer_id)

        async def call(leader, term):
            with suppress(TransportError, Refused):
                stream = await stranger.open(leader.identity.peer_id, "round", timeout_s=2)
                await stream.send(ready_of(liar, leader, term=term), timeout_s=2)
                while await stream.recv(timeout_s=WINDOW_S) is not None:
                    pass

        async def attack(leader):
            replica = leader.replica
            async with asyncio.TaskGroup() as calls:
                while True:
                    begin = leader.rounds.voter.term + 40
                    order = replica.electorate, replica.position
                    near = range(begin, begin + 2 * len(voters))
                    term = next(t for t in near if leader_of(*order, t) == leader.ctx.me)
                    calls.create_task(call(leader, term))
                    await asyncio.sleep(2.0)

        tasks = [asyncio.create_task(attack(leader)) for leader in voters]
        at, began = voters[0].replica.position, swarm.now()
        await swarm.until(lambda: reached(voters, at + 2), timeout_s=600)
        assert swarm.now() - began < 4 * WINDOW_S
        assert all(voter.rounds.voter.term < 4 for voter in voters)
        for task in tasks:
            task.cancel()

    run_swarm(tmp_path, scenario, electors=electors)
