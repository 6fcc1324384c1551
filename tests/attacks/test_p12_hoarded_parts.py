"""P12: a member sends codes up front that no round will ever ask for, and an owner keeps them."""

import asyncio

import pytest

from atoll.dht.refusals import RefusalCode
from atoll.dht.transport import Refused
from atoll.peer.rounds.allreduce import eager
from atoll.peer.rounds.allreduce.eager import (
    MAX_VECTORS,
    MESSAGE_BYTES,
    MIN_BYTES,
    EagerCodes,
    furthest_upfront,
)
from support.greedy import begin_part, fill
from support.strikes import expect_sums, passed
from support.swarm import run_swarm

STREAMS = 20


def hoarded(tmp_path, attack):
    """Run an attack of a member on an owner of parts, early in a window; then the run goes on."""

    async def scenario(swarm):
        peers = await swarm.start(3, window_s=60.0)
        await swarm.until(lambda: passed(peers, 2))
        await asyncio.sleep(1.0)
        streams = await attack(*peers)
        position = peers[0].replica.position
        await swarm.until(lambda: passed(peers, position + 1))
        for stream in streams or ():
            await stream.close()
        await asyncio.sleep(1.0)
        assert peers[0].rounds.eager.waiting == 0
        assert swarm.same_bits(peers)
        expect_sums(swarm, peers[0])

    run_swarm(tmp_path, scenario)


async def code_of(stream):
    with pytest.raises(Refused) as refusal:
        await stream.recv(timeout_s=5)
    return refusal.value.code


@pytest.mark.parametrize("ahead", [2, pytest.param(10**6, marks=pytest.mark.exhaustive)])
def test_codes_of_far_positions_are_refused_at_once(tmp_path, ahead):
    async def attack(owner, _, liar):
        assert owner.replica.position + ahead > furthest_upfront(owner.ctx)
        before = owner.ctx.now()
        for _ in range(STREAMS):
            stream, limit = await begin_part(liar, owner, owner.replica.position + ahead)
            await fill(stream, limit - 1)
            assert await code_of(stream) is RefusalCode.NOT_UPFRONT
        assert owner.ctx.now() - before < STREAMS * 0.2  # nobody waited for such a position
        assert owner.rounds.eager.waiting == 0

    hoarded(tmp_path, attack)


def test_a_part_is_kept_once(tmp_path):
    async def attack(owner, _, liar):
        begun = [await begin_part(liar, owner) for _ in range(STREAMS)]
        for stream, limit in begun:
            await fill(stream, limit - 1)
        await asyncio.sleep(1.0)
        limit = begun[0][1]
        assert limit / 2 < owner.rounds.eager.waiting < 1.1 * limit
        assert owner.rounds.eager.refused == STREAMS - 1
        assert any("a second time" in event for event in owner.events)
        return [stream for stream, _ in begun]

    hoarded(tmp_path, attack)


def test_one_peer_may_leave_no_more_than_a_vector(tmp_path):
    async def attack(owner, honest, liar):
        owner.rounds.eager.most_of_one = 20_000
        mine, limit = await begin_part(liar, owner)
        assert limit > 50_000
        await fill(mine, limit - 1)
        assert await code_of(mine) is RefusalCode.NOT_UPFRONT
        assert owner.rounds.eager.waiting == 0
        other, _ = await begin_part(honest, owner)
        await fill(other, 15_000)
        await asyncio.sleep(1.0)
        assert owner.rounds.eager.waiting > 15_000
        return [other]

    hoarded(tmp_path, attack)


def test_all_peers_together_may_leave_a_few_vectors(tmp_path):
    async def attack(owner, honest, liar):
        owner.rounds.eager.most = 20_000
        first, _ = await begin_part(liar, owner)
        await fill(first, 15_000)
        await asyncio.sleep(1.0)
        second, _ = await begin_part(honest, owner)
        await fill(second, 15_000)
        assert await code_of(second) is RefusalCode.NOT_UPFRONT
        assert 15_000 < owner.rounds.eager.waiting < 20_000
        assert any("may wait for a group" in event for event in owner.events)
        return [first]

    hoarded(tmp_path, attack)


def test_empty_messages_count(tmp_path):
    async def attack(owner, _, liar):
        owner.rounds.eager.most_of_one = 20 * MESSAGE_BYTES
        stream, _ = await begin_part(liar, owner)
        for _ in range(30):
            await stream.send(b"", timeout_s=5)
        assert await code_of(stream) is RefusalCode.NOT_UPFRONT

    hoarded(tmp_path, attack)


def test_the_limits_follow_the_vector(tmp_path, monkeypatch):
    async def attack(owner, _, liar):
        assert EagerCodes(owner.ctx).most_of_one == MIN_BYTES
        monkeypatch.setattr(eager, "MIN_BYTES", 1)
        limits = EagerCodes(owner.ctx)
        two_positions = 2 * owner.ctx.replay.cells_at(0).max_body_bytes(1)
        assert limits.most_of_one == two_positions
        assert limits.most == MAX_VECTORS * two_positions

    hoarded(tmp_path, attack)
