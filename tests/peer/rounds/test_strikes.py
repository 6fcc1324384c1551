"""A fault at every message of a round: the others commit in time, and nobody's work is lost.

What must hold is in ``strikes.check_strike``.  With three peers a round has some 104 messages.
"""

import random

import pytest

from support.strikes import KINDS, Strike, run_strike

LONGER_THAN_A_ROUND = 150


def strike_at(folder, message, kind, end, peers=3):
    return run_strike(folder, peers, lambda swarm: Strike(swarm, kind, message, end))


@pytest.mark.parametrize("message", range(2, 104, 17))
def test_a_fault_at_one_of_seventeen_messages(tmp_path, message):
    kind, end = KINDS[message % len(KINDS)]
    assert strike_at(tmp_path, message, kind, end) is not None


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "end"), KINDS)
def test_a_fault_at_every_message(tmp_path, kind, end):
    struck = 0
    for message in range(1, LONGER_THAN_A_ROUND):
        if strike_at(tmp_path / str(message), message, kind, end) is None:
            break
        struck += 1
    assert 80 < struck < LONGER_THAN_A_ROUND - 1


def test_a_random_fault_among_eight(tmp_path):
    strike_random(tmp_path, 1)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_many_random_faults_among_eight(tmp_path):
    for seed in range(40):
        strike_random(tmp_path / str(seed), seed)


def strike_random(folder, seed):
    rng = random.Random(seed)
    kind, end = rng.choice(KINDS)
    assert strike_at(folder, rng.randrange(1, 200), kind, end, peers=8) is not None
