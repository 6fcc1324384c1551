"""P2 by promises: an acceptor names entries that no leader could propose."""

import asyncio

import pytest

from atoll.optim.log.entry import Entry
from atoll.peer.rounds.consensus.round import term_of
from atoll.peer.rounds.consensus.voter import Voter
from atoll.peer.rounds.messages import Promise, deflated
from support.attackers import stop_at
from support.swarm import reached, run_swarm


def noise(liar, ask):
    return Promise(attempt=ask.attempt, accepted_attempt=0, entry=deflated(b"noise" * 40))


def bomb(liar, ask):
    return Promise(attempt=ask.attempt, accepted_attempt=0, entry=deflated(b"\0" * (16 << 20)))


def of_another_place(liar, ask):
    entry = liar.replica.store.get(ask.position - 1).entry
    return Promise(attempt=ask.attempt, accepted_attempt=0, entry=deflated(entry))


def of_a_later_ballot(liar, ask):
    return named(liar, ask, accepted_attempt=ask.attempt)


def without_reports(liar, ask):
    return named(liar, ask, reports=b"r" * 32)


def named(liar, ask, accepted_attempt=0, **changes):
    last = Entry.decode(liar.replica.store.get(ask.position - 1).entry)
    changes |= {"position": ask.position, "previous_chain": liar.replica.chain, "electorate": ()}
    entry = deflated(last.model_copy(update=changes).encode())
    return Promise(attempt=ask.attempt, accepted_attempt=accepted_attempt, entry=entry)


@pytest.mark.parametrize("lie", [noise, bomb, of_another_place, of_a_later_ballot, without_reports])
def test_a_promise_of_what_cannot_be_proposed_counts_for_nothing(tmp_path, monkeypatch, lie):
    """The liar leads in silence, and its promise is the first that the next leader gets."""
    prepare = Voter._prepare
    told = []

    async def scenario(swarm):
        *honest, liar = await swarm.start(4)
        await swarm.until(lambda: reached([*honest, liar], 2))
        stop_at(monkeypatch, liar.ctx.me, "_form")

        async def promise(voter, remote, ask):
            if voter._ctx.me != liar.ctx.me or remote == liar.ctx.me.peer_id:
                await asyncio.sleep(0.2)  # the liar's promise comes first
                return await prepare(voter, remote, ask)
            told.append(term_of(ask.attempt))
            return lie(liar, ask)

        monkeypatch.setattr(Voter, "_prepare", promise)
        at = max(p.replica.position for p in honest)
        await swarm.until(lambda: reached(honest, at + 6) and told, timeout_s=200)
        assert swarm.same_bits(honest)

    run_swarm(tmp_path, scenario, codec="int8")
