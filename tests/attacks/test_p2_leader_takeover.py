"""P2: a leader makes itself the only elector, by a group of its own or by leaving others out."""

import asyncio

import pytest

from atoll.optim.log.entry import Entry
from atoll.peer.rounds.consensus import leader as leaders
from atoll.peer.rounds.consensus.ballots import term_of
from atoll.peer.rounds.consensus.round_events import SendProposal
from atoll.peer.rounds.consensus.voter import Voter
from support.attackers import close_alone, drop
from support.swarm import reached, run_swarm


def log_of(peer):
    position = peer.replica.position
    return [Entry.decode(peer.replica.store.get(p).entry) for p in range(position)]


@pytest.mark.parametrize(
    "count",
    [pytest.param(3, id="all"), pytest.param(1, id="one", marks=pytest.mark.exhaustive)],
)
def test_a_leader_that_drops_electors_that_answer_gets_no_votes(tmp_path, monkeypatch, count):
    async def scenario(swarm):
        peers = await swarm.start(4)
        await swarm.until(lambda: reached(peers, 2))
        liar, honest = peers[3], peers[:3]
        drop(monkeypatch, liar.ctx.me, count)
        close_alone(monkeypatch, liar.ctx.me)
        at = max(p.replica.position for p in peers)
        await swarm.until(lambda: reached(honest, at + 12))
        for entry in log_of(honest[0])[at + 1 :]:
            assert {p.ctx.me for p in honest} <= set(entry.electorate)
        assert swarm.same_bits(honest)

    run_swarm(tmp_path, scenario, codec="int8")


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(4, id="few"),
        pytest.param(9, id="more than send votes to all", marks=pytest.mark.exhaustive),
    ],
)
def test_nor_does_it_bind_other_leaders_by_its_own_vote(tmp_path, monkeypatch, count):
    """Its promises name the entry that it alone accepted; the others pass that over."""
    ask, prepare = Voter._expect_silent, Voter._prepare

    async def scenario(swarm):
        peers = await swarm.start(count)
        await swarm.until(lambda: reached(peers, 2))
        *honest, liar = peers
        drop(monkeypatch, liar.ctx.me, 1)

        async def expect_silent(voter, dropped, place):
            if voter._ctx.me != liar.ctx.me:
                await ask(voter, dropped, place)

        async def promise(voter, remote, question):
            """The liar's promise comes before the others'."""
            if voter._ctx.me != liar.ctx.me:
                await asyncio.sleep(0.2)
            return await prepare(voter, remote, question)

        monkeypatch.setattr(Voter, "_expect_silent", expect_silent)
        monkeypatch.setattr(Voter, "_prepare", promise)
        at, began_s = max(p.replica.position for p in peers), swarm.now()
        await swarm.until(lambda: reached(honest, at + 12))
        for entry in log_of(honest[0])[at + 1 :]:
            assert {p.ctx.me for p in honest} <= set(entry.electorate)
        assert swarm.now() - began_s < 120.0  # 60 s of windows, and what three lost terms cost
        assert swarm.same_bits(honest)

    run_swarm(tmp_path, scenario, codec="int8")


def test_nor_in_a_term_that_comes_after_every_elector_has_led(tmp_path, monkeypatch):
    """Voters asked nobody in such terms, because all might have led in vain."""

    async def scenario(swarm):
        peers = await swarm.start(4)
        await swarm.until(lambda: reached(peers, 2))
        liar, honest = peers[3], peers[:3]
        at = max(p.replica.position for p in peers) + 1
        run, terms = leaders.Polls._run, []

        async def silent(polls, question, electorate):
            """Nobody is asked to vote at this position until the liar leads a later term."""
            if isinstance(question, SendProposal) and question.entry.position == at:
                term = term_of(question.attempt)
                terms.append(term)
                if term < len(electorate) or (term < 12 and polls._ctx.me != liar.ctx.me):
                    return await run(polls, question, ())
            return await run(polls, question, electorate)

        monkeypatch.setattr(leaders.Polls, "_run", silent)
        drop(monkeypatch, liar.ctx.me, 1)
        await swarm.until(lambda: reached(honest, at + 1), timeout_s=4000)
        entry = log_of(honest[0])[at]
        assert max(terms) >= 4
        assert {p.ctx.me for p in honest} <= set(entry.electorate)

    run_swarm(tmp_path, scenario, codec="int8")


def test_an_elector_that_died_is_dropped(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(4)
        await swarm.until(lambda: reached(peers, 2))
        dead, *alive = peers
        dead.kill()
        at = max(p.replica.position for p in alive)
        await swarm.until(lambda: reached(alive, at + 2))
        assert dead.ctx.me not in alive[0].replica.electorate

    run_swarm(tmp_path, scenario, codec="int8")
