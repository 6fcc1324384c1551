"""The signatures of a large group's reports reach its acceptors alone, and before they vote."""

import asyncio
from collections import Counter

import pytest

from atoll.dht.refusals import RefusalCode
from atoll.dht.transport import Refused
from atoll.optim.log.entry import Certificate
from atoll.peer.rounds import messages, policies
from atoll.peer.rounds.consensus import dissemination
from atoll.peer.rounds.consensus.dissemination import Seat, seals_payload
from atoll.peer.rounds.consensus.voter import Voter
from atoll.peer.rounds.messages import Seals
from support.strikes import passed
from support.swarm import RUN_ID, run_swarm

PEERS = 5


@pytest.fixture(autouse=True)
def large(monkeypatch):
    monkeypatch.setattr(messages, "RELAYED_ABOVE", 2)
    monkeypatch.setattr(policies, "ROW_SHAPE", 1)


@pytest.fixture
def asked(monkeypatch):
    """Whether each proposal carried its reports."""
    proposals = []
    vote = Voter._propose

    async def propose(voter, remote, ask, reason):
        proposals.append(bool(ask.reports))
        return await vote(voter, remote, ask, reason)

    monkeypatch.setattr(Voter, "_propose", propose)
    return proposals


def first_terms(peers):
    rows = peers[0].replica.store.headers(0, peers[0].replica.position)
    return {Certificate.decode(row.certificate).attempt for row in rows} == {0}


def test_acceptors_have_the_signatures_when_they_vote(tmp_path, monkeypatch, asked):
    groups, sent = [], Counter()
    take = Seat.take

    def taken(seat, closed, group, *, passed):
        groups.append(group)
        take(seat, closed, group, passed=passed)

    def count(src, dst, method, number):
        sent[method] += 1

    monkeypatch.setattr(Seat, "take", taken)

    async def scenario(swarm):
        peers = await swarm.start(PEERS, window_s=1.0)
        await swarm.until(lambda: passed(peers, 2))
        asked.clear()
        swarm.network.on_message = count
        await swarm.until(lambda: passed(peers, 5))
        assert asked and not any(asked)
        assert sent["seals"] >= 2 * 3 * (PEERS - 1)  # calls and answers
        assert {report.signature for group in groups for report in group.reports} == {b""}
        assert first_terms(peers)
        assert swarm.same_bits(peers)

    run_swarm(tmp_path, scenario)


def test_a_proposal_carries_the_reports_where_the_signatures_were_lost(tmp_path, asked):
    async def scenario(swarm):
        peers = await swarm.start(PEERS, window_s=1.0)
        swarm.network.on_message = lambda src, dst, method, number: method != "seals"
        await swarm.until(lambda: passed(peers, 2))
        asked.clear()
        await swarm.until(lambda: passed(peers, 5))
        assert any(asked)
        assert first_terms(peers)
        assert swarm.same_bits(peers)

    run_swarm(tmp_path, scenario)


def test_each_acceptor_passes_signatures_on_to_few(tmp_path, monkeypatch):
    monkeypatch.setattr(dissemination, "FAN_OUT", 2)
    sent = Counter()

    def count(src, dst, method, number):
        sent[src] += method == "seals"

    async def scenario(swarm):
        peers = await swarm.start(8, window_s=1.0)
        await swarm.until(lambda: passed(peers, 2))
        at = peers[0].replica.position
        swarm.network.on_message = count
        await swarm.until(lambda: passed(peers, at + 1))
        assert max(sent.values()) <= 2 * (2 + 1)  # of two rounds at most
        assert sum(sent.values()) >= 2 * 7

    run_swarm(tmp_path, scenario)


@pytest.mark.parametrize("lie", ["signed by another", "one too few", "of another group"])
def test_signatures_that_are_not_the_leaders_are_refused(tmp_path, lie):
    async def scenario(swarm):
        peers = await swarm.start(PEERS, window_s=1.0)
        await swarm.until(lambda: passed(peers, 2))
        seats = peers[1].ctx.seats
        await swarm.until(lambda: any(seat.exchange is not None for seat in seats.values()))
        seat = next(seat for seat in seats.values() if seat.exchange is not None)
        leader = next(p for p in peers if p.identity.peer_id == seat._leader)
        liar = peers[0] if leader is not peers[0] else peers[2]
        group = seat.exchange.group
        signatures = (b"x",) * (len(group.members) - (lie == "one too few"))
        reports = tuple(r.model_copy(update={"signature": b"x"}) for r in group.reports)
        payload = seals_payload(RUN_ID, group.digest, reports)
        signer = liar if lie == "signed by another" else leader
        seals = Seals(
            epoch=group.epoch,
            position=group.position,
            term=group.term,
            group=bytes(32) if lie == "of another group" else group.digest,
            signatures=signatures,
            signature=signer.identity.sign(payload),
            tell=(),
        )
        kept = len(peers[1].ctx.parts._reports)
        call = liar.transport.call(
            peers[1].identity.peer_id, "seals", seals.encode(), timeout_s=2.0
        )
        with pytest.raises(Refused) as refusal:
            await call
        assert refusal.value.code == RefusalCode.OTHER_GROUP
        assert len(peers[1].ctx.parts._reports) == kept

    run_swarm(tmp_path, scenario)


def test_only_one_message_of_signatures_waits_for_its_group(tmp_path):
    """Anyone may send half a megabyte of them, and each would be kept for a stall."""

    async def scenario(swarm):
        peers = await swarm.start(PEERS, window_s=1.0)
        await swarm.until(lambda: passed(peers, 2))
        victim, *others = peers
        await swarm.until(lambda: any(seat.exchange is None for seat in victim.ctx.seats.values()))
        key, seat = next((k, s) for k, s in victim.ctx.seats.items() if s.exchange is None)
        victim.ctx.seats[key] = Seat(victim.ctx, seat._ready, seat._leader, seat._begin)
        seals = Seals(
            epoch=key[0],
            position=key[1],
            term=key[2],
            group=bytes(32),
            signatures=(b"x",) * 4096,
            signature=b"x",
            tell=(),
        )
        calls = [
            other.transport.call(victim.identity.peer_id, "seals", seals.encode(), timeout_s=60.0)
            for other in others
        ]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert {answer.code for answer in answers} == {RefusalCode.NO_SEAT}
        assert sorted("wait for the group" in str(a) for a in answers) == [False] + [True] * (
            PEERS - 2
        )

    run_swarm(tmp_path, scenario)
