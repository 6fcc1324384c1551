"""P13 by one that neither leads nor votes: it calls the leaders of later terms again and again."""

import asyncio

import pytest

from support.greedy import call_alone
from support.swarm import reached, run_swarm

WINDOW_S = 30.0  # far longer than a leader waits for others once somebody has called it


@pytest.mark.parametrize(
    "electors", ["members", pytest.param("keepers", marks=pytest.mark.exhaustive)]
)
def test_a_lone_caller_ends_no_round_that_others_wait_for(tmp_path, electors):
    """Else each leader that it calls prepares a term, far beyond those that others come to."""

    async def scenario(swarm):
        keepers = [swarm.add(role="keeper") for _ in range(4 if electors == "keepers" else 0)]
        trainers = [swarm.add(window_s=WINDOW_S) for _ in range(3)]
        voters = keepers or trainers
        await swarm.begin([*keepers, *trainers])
        await swarm.until(lambda: reached(voters, 2))
        task = asyncio.create_task(call_alone(swarm, voters))
        at, began = voters[0].replica.position, swarm.now()
        await swarm.until(lambda: reached(voters, at + 2), timeout_s=600)
        assert swarm.now() - began < 4 * WINDOW_S
        assert all(voter.rounds.voter.term < 4 for voter in voters)
        task.cancel()

    run_swarm(tmp_path, scenario, electors=electors)
