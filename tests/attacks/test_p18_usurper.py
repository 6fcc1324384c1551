"""P18: a liar ends the terms of honest leaders, so that others pass them over from then on."""

import asyncio

import pytest

from atoll.dht.tasks import end
from atoll.optim.log.entry import Certificate
from atoll.peer.rounds.consensus import leader as leaders
from atoll.peer.rounds.consensus.ballots import leader_of, term_of
from support import attackers
from support.swarm import SMALL, reached, run_swarm


def leaders_of(peer, start):
    """The leaders of the terms at which entries were decided, and these terms."""
    replica = peer.replica
    rows = replica.store.headers(start, replica.position - start)
    terms = [term_of(Certificate.decode(row.certificate).attempt) for row in rows]
    electorates = [replica.electorate_at(row.position) for row in rows]
    led = [
        leader_of(electorate, row.position, term).peer_id
        for row, electorate, term in zip(rows, electorates, terms, strict=True)
    ]
    return led, terms


def test_leaders_whose_terms_a_liar_ends_are_not_passed_over(tmp_path, monkeypatch):
    async def scenario(swarm):
        peers = await swarm.start(4)
        await swarm.until(lambda: reached(peers, 3))
        *honest, liar = peers
        at = max(p.replica.position for p in peers) + 1
        with monkeypatch.context() as patch:
            attackers.usurp(patch, liar)
            await swarm.until(lambda: reached(peers, at + 12))
        led, terms = leaders_of(honest[0], at)
        stolen = [term for peer, term in zip(led, terms, strict=True) if term > 0]
        assert len(stolen) >= 4, "the liar ended no term of others"
        assert all(peer.ctx.failed.is_empty for peer in honest)
        await asyncio.sleep(10)
        at = max(p.replica.position for p in peers) + 1
        await swarm.until(lambda: reached(peers, at + 12))
        led, terms = leaders_of(honest[0], at)
        assert set(terms) == {0} and len(set(led)) > 1, "they lead again at once"
        assert swarm.same_bits(honest)

    run_swarm(tmp_path, scenario, codec="int8")


@pytest.mark.parametrize(
    ("count", "asks"),
    [
        pytest.param(4, True, marks=pytest.mark.exhaustive),
        (3, True),  # of three, none may lie: its own word has to be left out
        (4, False),  # a proposal shows no promises
    ],
)
def test_a_liar_that_ends_the_terms_of_others_leads_its_own_alone(
    tmp_path, monkeypatch, count, asks
):
    async def scenario(swarm):
        peers = await swarm.start(count)
        await swarm.until(lambda: reached(peers, 3))
        *honest, liar = peers
        attackers.usurp(monkeypatch, liar, asks=asks)
        name = liar.identity.peer_id

        def is_known():
            return all(p.ctx.usurpers.is_known(name, p.replica.position) for p in honest)

        await swarm.until(is_known, timeout_s=900.0)
        for peer in honest:
            assert sum("promising" in event for event in peer.events) == 1
            others = [other.identity.peer_id for other in honest if other is not peer]
            assert not any(peer.ctx.usurpers.is_known(o, peer.replica.position) for o in others)
        at = max(p.replica.position for p in peers) + 1
        await swarm.until(lambda: reached(peers, at + 12), timeout_s=900.0)
        led, terms = leaders_of(honest[0], at)
        assert name not in [peer for peer, term in zip(led, terms, strict=True) if term > 0]
        assert led.count(name) <= 12 // count + 2, "it leads its own terms"
        assert swarm.same_bits(honest)

    run_swarm(tmp_path, scenario, codec="int8", layout=SMALL)


def test_one_promise_does_not_end_a_term_to_which_a_quorum_reports(tmp_path, monkeypatch):
    """The liar asks one leader at a time, and leads its own terms in silence."""

    async def scenario(swarm):
        peers = await swarm.start(4)
        await swarm.until(lambda: reached(peers, 3))
        *honest, liar = peers
        ask = leaders.Leadership._ask_trainers

        async def never(leadership):
            if leadership.ctx is liar.ctx:
                await asyncio.sleep(1e6)
            return await ask(leadership)

        monkeypatch.setattr(leaders.Leadership, "_ask_trainers", never)
        at = max(p.replica.position for p in peers)
        striking = asyncio.create_task(attackers.strike(swarm, liar, honest))
        await swarm.until(lambda: reached(honest, at + 12), timeout_s=200.0)
        await end(striking)
        assert swarm.same_bits(honest)

    run_swarm(tmp_path, scenario, codec="int8", layout=SMALL)
