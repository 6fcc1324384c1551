"""A newcomer gives way to the rounds of its donors, and not for ever."""

import asyncio

import pytest

from atoll.dht.tasks import end
from atoll.peer.recovery.errors import GaveWay
from atoll.peer.recovery.sources import PEER_PATIENCE_S, PeerSource
from support.strikes import donor_and_reader, passed
from support.swarm import run_swarm

FAR_S = 0.3  # latency at which a reduction takes seconds


async def given_beside_rounds(swarm, peers, donor, *, rounds):
    """Ask a donor for a body all the time; how often it gave, and how often it had a round."""
    reader = PeerSource(swarm.peers[-1].ctx, donor.identity.peer_id)
    answers = {True: 0, False: 0}

    async def read():
        into = memoryview(bytearray(len(donor.replica.store.body(1))))
        while True:
            try:
                await reader.body(1, 0, into, gives_way=True)
                answers[True] += 1
            except GaveWay:
                answers[False] += 1
            await asyncio.sleep(0.05)

    reading = asyncio.create_task(read())
    until = donor.replica.position + rounds
    await swarm.until(lambda: passed(peers, until))
    await end(reading)
    return answers


def test_a_newcomer_reads_while_donors_train_and_not_during_their_rounds(tmp_path):
    async def scenario(swarm):
        swarm.network.default.latency_s = FAR_S
        peers = await swarm.start(3, window_s=4.0)
        await swarm.until(lambda: passed(peers, 3))
        await peers[0].replica.saved()
        answers = await given_beside_rounds(swarm, peers, peers[0], rounds=4)
        assert answers[True] >= 4 and answers[False] >= 2

    run_swarm(tmp_path, scenario)


def test_where_training_goes_on_during_rounds_a_newcomer_reads_beside_them(tmp_path):
    async def scenario(swarm):
        swarm.network.default.latency_s = FAR_S
        peers = await swarm.start(3, window_s=4.0, tau=2)
        await swarm.until(lambda: passed(peers, 3))
        await peers[0].replica.saved()
        answers = await given_beside_rounds(swarm, peers, peers[0], rounds=4)
        assert answers[True] >= 4 and not answers[False]

    run_swarm(tmp_path, scenario, method="diloco(tau=2)")


def test_a_round_that_does_not_end_is_given_way_to_for_a_while(tmp_path):
    async def scenario(swarm):
        donor, asking = await donor_and_reader(swarm)
        donor.rounds.archive._is_awaited = lambda: True
        newest = max(donor.replica.snapshots)
        source = PeerSource(asking.ctx, donor.identity.peer_id)

        async def wait_for_a_leaf():
            began_s = swarm.now()
            while True:
                try:
                    return [i async for i, _ in source.leaves(newest, [0])], swarm.now() - began_s
                except GaveWay:
                    await asyncio.sleep(0.1)

        for _ in range(2):  # and then it gives way again
            leaves, took_s = await wait_for_a_leaf()
            assert leaves == [0] and took_s == pytest.approx(PEER_PATIENCE_S, abs=1.0)

    run_swarm(tmp_path, scenario)


def test_a_newcomer_reads_while_donors_wait_for_a_slower_peer(tmp_path):
    async def scenario(swarm):
        swarm.network.default.latency_s = 0.1
        peers = await swarm.begin([swarm.add(window_s=each_s) for each_s in (1.0, 1.0, 10.0)])
        await swarm.until(lambda: passed(peers, 3))
        await peers[0].replica.saved()
        answers = await given_beside_rounds(swarm, peers, peers[0], rounds=4)
        assert answers[True] > 2 * answers[False] > 0

    run_swarm(tmp_path, scenario)


def test_a_newcomer_draws_level_beside_quick_rounds(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(3, window_s=2.0)
        await swarm.until(lambda: passed(peers, 4))
        for peer in peers:
            peer.rounds.archive._is_awaited = lambda: True
        newcomer = swarm.add(window_s=2.0)
        async with asyncio.timeout(10 * PEER_PATIENCE_S):
            await newcomer.start()
        assert newcomer.recovered is not None and newcomer.replica.is_current

    run_swarm(tmp_path, scenario)
