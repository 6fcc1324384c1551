"""An elector's votes keep to what it has said of others that do not answer."""

import asyncio
from dataclasses import replace

import pytest

from atoll.dht.refusals import RefusalCode
from atoll.dht.transport import Refused
from atoll.peer.rounds.consensus import voter as voters
from atoll.peer.rounds.messages import AskHeard, Heard
from support.swarm import run_swarm


def among_three(tmp_path, monkeypatch, scene):
    """Call `scene(swarm, leader, voter, other, gone)` before any window ends."""
    ask, gone = voters.ask_head, set()

    async def ask_head(ctx, peer, *stalls):
        return None if peer in gone else await ask(ctx, peer, *stalls)

    async def scenario(swarm):
        monkeypatch.setattr(voters, "ask_head", ask_head)
        await scene(swarm, *await swarm.start(3, window_s=1000.0), gone)

    run_swarm(tmp_path, scenario)


async def heard_by(leader, voter, other, position=0):
    ask = AskHeard(epoch=leader.replica.epoch, position=position, peers=(other.identity.peer_id,))
    answer = await leader.ctx.transport.call(
        voter.identity.peer_id, "heard", ask.encode(), timeout_s=10.0
    )
    return Heard.decode(answer).peers


def test_who_was_silent_may_be_dropped_though_it_is_back(tmp_path, monkeypatch):
    async def scene(swarm, leader, voter, other, gone):
        name = other.identity.peer_id
        gone.add(name)
        assert await heard_by(leader, voter, other) == ()
        gone.clear()
        await voter.rounds.voter._expect_silent([other.ctx.me], 0)
        assert await heard_by(leader, voter, other) == ()
        with pytest.raises(Refused, match="must remain") as refusal:
            await voter.rounds.voter._expect_silent([other.ctx.me], 1)
        assert refusal.value.code is RefusalCode.BAD_ELECTORATE
        replica = voter.replica
        replica.standing = replace(replica.standing, head=replace(replica.head, position=1))
        assert voter.rounds.voter.term == 0
        assert {position for _, position in voter.rounds.voter._asked} == {1}

    among_three(tmp_path, monkeypatch, scene)


def test_who_asks_again_and_again_finds_nobody_silent_for_a_moment(tmp_path, monkeypatch):
    async def scene(swarm, leader, voter, other, gone):
        name = other.identity.peer_id
        assert await heard_by(leader, voter, other) == (name,)
        gone.add(name)
        for _ in range(5):
            await asyncio.sleep(10.0)
            assert await heard_by(leader, voter, other) == (name,)
        assert await heard_by(leader, voter, other, position=1) == ()
        assert await voter.rounds.voter.heard([voter.ctx.me], 0) == (voter.identity.peer_id,)

    among_three(tmp_path, monkeypatch, scene)


@pytest.mark.parametrize(
    "change",
    [{"peers": ("nobody",)}, {"position": 9}, {"epoch": 9}],
    ids=["no elector", "far ahead", "another epoch"],
)
def test_a_question_about_another_log_is_refused(tmp_path, monkeypatch, change):
    async def scene(swarm, leader, voter, other, gone):
        ask = AskHeard(epoch=voter.replica.epoch, position=0, peers=(other.identity.peer_id,))
        with pytest.raises(Refused) as refusal:
            await voter.rounds.voter.take_silence(
                leader.identity.peer_id, ask.model_copy(update=change)
            )
        assert refusal.value.code is RefusalCode.ELSEWHERE
        with pytest.raises(Refused):
            await voter.rounds.voter.take_silence("a stranger", ask)

    among_three(tmp_path, monkeypatch, scene)
